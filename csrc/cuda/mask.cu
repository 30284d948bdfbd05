// Packing a mask.
#include "mask.cuh"
#include "pairs.cuh"

namespace mha_ext::cuda {

constexpr int kPackThreads = 256, kPiece = 16;  // keys of one piece

// One warp a row, a piece a lane.
static __global__ void LAUNCH_BOUNDS(kPackThreads, 4)
    pack_mask_kernel(const GRID_CONSTANT Pairs mask, const int64_t batches, const int64_t heads,
                     const int64_t rows, const int64_t keys, uint16_t* words) {
  constexpr int kAtOnce = 4;
  const int64_t place = grid_row(), i = (int64_t)blockIdx.x * (kPackThreads / kWarp) + warp_id();
  if (place >= batches * heads || i >= rows) return;
  const int64_t b = place / heads, h = place % heads, pieces = ceil_div(keys, 64) * (64 / kPiece);
  const char* row =
      (const char*)mask.data + (b * mask.batch + h * mask.head + i * mask.query) * mask.item_size;
  uint16_t* to = words + (place * rows + i) * pieces;
  if (!mask_is_in_pieces(mask, row)) {
    const int64_t step = kPiece * mask.key * mask.item_size;
    for (int64_t p = lane_id(); p < pieces; p += kWarp)
      to[p] = (uint16_t)mask_bits(mask, row + p * step, (int)min_of(kPiece, keys - p * kPiece));
    return;
  }
  for (int64_t first = lane_id(); first < pieces; first += kAtOnce * kWarp) {
    Bytes16 bytes[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; n++) {
      const int64_t k0 = (first + n * kWarp) * kPiece;
      bytes[n] = k0 + kPiece <= keys ? *(const Bytes16*)(row + k0) : Bytes16{};
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; n++) {
      const int64_t p = first + n * kWarp, k0 = p * kPiece;
      if (p >= pieces) break;
      const bool whole = k0 + kPiece <= keys;
      to[p] =
          (uint16_t)(whole ? nonzero_bytes(bytes[n]) : mask_bits(mask, row + k0, (int)(keys - k0)));
    }
  }
}

// One warp a block of 64 queries, a square a lane.
static __global__ void LAUNCH_BOUNDS(kPackThreads, 4)
    summarize_mask_kernel(const MaskShape of, const uint64_t* words, uint32_t* squares) {
  const int64_t place = grid_row(),
                block = (int64_t)blockIdx.x * (kPackThreads / kWarp) + warp_id();
  if (place >= of.places || block >= of.blocks) return;
  const int64_t rows = min_of(64, of.rows - block * 64), halves = 2 * of.block_words;
  const uint64_t* from = words + (place * of.rows + block * 64) * of.row_words;
  uint32_t* to = squares + (place * of.blocks + block) * 2 * halves;
  for (int64_t first = 0; first < halves * kWarp; first += kWarp) {
    const int64_t square = first + lane_id();
    uint64_t any = 0, all = ~0ull;
    if (square < of.row_words)
#pragma unroll 8
      for (int64_t i = 0; i < rows; i++) {
        const uint64_t word = from[i * of.row_words + square];
        any |= word;
        all &= word;
      }
    const uint32_t some = ballot(any != 0), every = ballot(any != 0 && all == ~0ull);
    if (lane_id() == 0) {
      to[first / kWarp] = some;
      to[halves + first / kWarp] = every;
    }
  }
}

const char* pack_mask(Attention& a, void*& scratch, Stream stream) {
  if (!mask_is_packed(a)) return nullptr;
  const Pairs& from = a.mask;
  const int64_t batches = from.batch ? a.batch : 1, heads = from.head ? a.heads : 1;
  const int64_t rows = from.query ? a.queries : 1;
  const char* error =
      launch(pack_mask_kernel, {ceil_div(rows, kPackThreads / kWarp), batches * heads},
             kPackThreads, 0, stream, from, batches, heads, rows, a.keys, (uint16_t*)scratch);
  const MaskShape of = mask_shape(a);
  const uint64_t* words = (const uint64_t*)scratch;
  if (!error)
    error = launch(summarize_mask_kernel, {ceil_div(of.blocks, kPackThreads / kWarp), of.places},
                   kPackThreads, 0, stream, of, words,
                   (uint32_t*)(words + of.places * of.rows * of.row_words));
  const int64_t bytes = packed_mask_bytes(a);
  a.mask = packed_mask(a, scratch);
  scratch = (char*)scratch + bytes;
  return error;
}

}  // namespace mha_ext::cuda

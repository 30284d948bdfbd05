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

const char* pack_mask(Attention& a, void*& scratch, Stream stream) {
  if (!mask_is_packed(a)) return nullptr;
  const Pairs& from = a.mask;
  const int64_t batches = from.batch ? a.batch : 1, heads = from.head ? a.heads : 1;
  const int64_t rows = from.query ? a.queries : 1;
  const char* error =
      launch(pack_mask_kernel, {ceil_div(rows, kPackThreads / kWarp), batches * heads},
             kPackThreads, 0, stream, from, batches, heads, rows, a.keys, (uint16_t*)scratch);
  const int64_t bytes = packed_mask_bytes(a);
  a.mask = packed_mask(a, scratch);
  scratch = (char*)scratch + bytes;
  return error;
}

}  // namespace mha_ext::cuda

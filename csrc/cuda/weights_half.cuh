// The weights of 16-bit types, on the tensor cores. A block has the rows of one run and goes over a
// few tiles of keys. Rows of Q and K lie in slices of 64 columns: those of Q stay, those of K come
// one after the other through a ring, the next two while one is used. So one kernel serves every
// width.
#pragma once
#include "half.cuh"
#include "softmax.cuh"

namespace mha_ext::cuda {

template <class S_>
struct HalfWeights {
  using S = S_;
  static constexpr bool kOwnsKeys = false;
  static constexpr int kThreads = 128, kRows = 64, kKeys = 64, kTiles = 8;  // tiles of a block
  static constexpr int kFragments = 1, kColumns = kKeys / 8, kStages = 3;
  static constexpr int kSlice = 64, kRowBytes = 2 * kSlice, kSliceBytes = 64 * kRowBytes;
  static constexpr Address kWeights = 0;  // [kRows][kKeys], on their way to memory
  DEVICE_MEMBER static Address key_slice(int stage) { return (Address)((1 + stage) * kSliceBytes); }
  DEVICE_MEMBER static Address query_slice(int slice) { return key_slice(kStages + slice); }
  static int slices(int64_t width) { return (int)ceil_div(width, kSlice); }
  static int shared_bytes(int64_t width) { return (1 + kStages + slices(width)) * kSliceBytes; }
};

// Columns [64 slice, 64 slice + 64) of rows [begin, begin + rows), at most 64, of a head.
template <class F>
DEVICE void copy_slice(Address to, HeadRows from, int64_t begin, int64_t rows, int slice,
                       int columns) {
  from.first += slice * F::kRowBytes;
  copy_rows<64, F::kRowBytes, F::kThreads>(
      to, from, begin, (int)min_of(64, rows),
      (int)min_of(F::kRowBytes, 2 * columns - slice * F::kRowBytes));
}

// The fragments of a warp's 16 rows to memory, by way of its part of shared memory: each row is
// written by lanes that stand next to each other, as many bytes at once as its address allows.
template <class F>
DEVICE void store_tile(const float (&p)[1][F::kColumns][4], typename F::S* to, int64_t stride,
                       int rows, int columns) {
  const int lane = lane_id();
  const Address part = F::kWeights + warp_id() * 16 * F::kRowBytes;
  sync_warp();  // what stood there has been read
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int j = 0; j < F::kColumns; j++)
      store_shared(part + swizzled<F::kRowBytes>(8 * half + lane / 4, j) + lane % 4 * 4,
                   pack(typename F::S{}, p[0][j][2 * half], p[0][j][2 * half + 1]));
  sync_warp();
  const int low = (int)((uintptr_t)to | (uintptr_t)(2 * stride)) & 15;
  if (low == 0) {  // then columns are a multiple of 8
#pragma unroll 1
    for (int r = lane / 8; r < rows; r += 4)
      if (lane % 8 * 8 < columns)
        *(Bytes16*)(to + r * stride + lane % 8 * 8) =
            load_shared<Bytes16>(part + swizzled<F::kRowBytes>(r, lane % 8));
    return;
  }
#pragma unroll 1
  for (int r = 0; r < rows; r++) {
    if (low % 4 == 0) {
      if (lane * 2 < columns)
        *(uint32_t*)(to + r * stride + lane * 2) =
            load_shared<uint32_t>(part + swizzled<F::kRowBytes>(r, lane / 4) + lane % 4 * 4);
    } else {
#pragma unroll
      for (int c = lane; c < F::kKeys; c += kWarp)
        if (c < columns)
          to[r * stride + c].bits =
              load_shared<uint16_t>(part + swizzled<F::kRowBytes>(r, c / 8) + c % 8 * 2);
    }
  }
}

// What exp subtracts from S in row 8 half + g of a warp, and what is added to P: in rows without
// any key 1 / Lk, if they are uniform.
struct RowNumbers {
  float lse, low, added;
};
DEVICE void row_numbers(const Attention& a, int64_t b, int64_t h, int64_t i0, RowNumbers (&to)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int64_t i = i0 + 8 * half + lane_id() / 4, at = (b * a.heads + h) * a.queries + i;
    to[half] = {INFINITY, 0, 0};
    if (i >= a.queries) continue;
    const float lse = ((const float*)a.lse)[at];
    if (lse != -INFINITY)
      to[half] = {lse, a.lse_low ? ((const float*)a.lse_low)[at] : 0, 0};
    else if (a.uniform_empty_rows)
      to[half].added = 1 / (float)a.keys;
  }
}

// S without its scale -> P, 0 where a pair is hidden.
template <class F>
DEVICE void weights_of_tile(const Attention& a, int64_t b, int64_t h, int64_t i0, int64_t k0,
                            bool partial, const RowNumbers (&rows)[2], uint32_t (&visible)[1],
                            float (&s)[1][F::kColumns][4]) {
  const float scale = (float)a.scale;
#pragma unroll
  for (int j = 0; j < F::kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[0][j][e] *= scale;
  if (a.bias.data) partial |= ballot(add_bias_tile<F>(a, b, h, i0, k0, s, visible)) != 0;
#pragma unroll
  for (int j = 0; j < F::kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      s[0][j][e] = exp2_approximate((s[0][j][e] - rows[e / 2].lse - rows[e / 2].low) * kLog2E);
  if (partial) select_tile<F>(visible, 0, s);
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 3)
    weights_half_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT Selection selected,
                        typename F::S* out, const int slices) {
  using S = typename F::S;
  const int64_t row = grid_row();
  if (row >= a.batch * selected.head_count) return;
  const int64_t parts = ceil_div(a.keys, F::kTiles * F::kKeys), run = blockIdx.x / parts;
  const RowRun rows = selected.runs ? selected.runs[run]
                                    : RowRun{run * 64, min_of(64, a.queries - run * 64), run * 64};
  const int64_t b = row / selected.head_count, place = row % selected.head_count;
  const int64_t h = selected.heads ? selected.heads[place] : place;
  const HeadRows keys = head_rows<S>(a.key, b, kv_head(a, h));
  const int columns = (int)a.head_dim;

  // Of this block's tiles those in which something is seen; the others hold no product.
  const int begin = (int)(blockIdx.x % parts) * F::kTiles;
  const int end = (int)min_of(begin + F::kTiles, ceil_div(a.keys, F::kKeys));
  const SeenTiles seen = seen_tiles<F::kKeys>(a, b, rows.query, rows.count);
  const int first = (int)max_of(begin, seen.any);
  const int last = (int)max_of(first, min_of(end, seen.any_end));

  const int warp_rows = (int)min_of(16, rows.count - warp_id() * 16);  // may be none
  const int64_t i0 = rows.query + warp_id() * 16;
  RowNumbers numbers[2];
  row_numbers(a, b, h, i0, numbers);
  S* const to = out + (row * selected.row_count + rows.to + warp_id() * 16) * a.keys;
  int next_tile = first, next_slice = 0, next_stage = 0;
  const auto fetch = [&] {
    if (next_tile < last) {
      const int64_t k0 = (int64_t)next_tile * F::kKeys;
      copy_slice<F>(F::key_slice(next_stage), keys, k0, a.keys - k0, next_slice, columns);
    }
    copy_commit();
    next_stage = next_stage + 1 == F::kStages ? 0 : next_stage + 1;
    if (++next_slice < slices) return;
    next_slice = 0;
    next_tile++;
  };
  for (int slice = 0; first < last && slice < slices; slice++)
    copy_slice<F>(F::query_slice(slice), head_rows<S>(a.query, b, h), rows.query, rows.count, slice,
                  columns);
#pragma unroll
  for (int n = 1; n < F::kStages; n++) fetch();

  int stage = 0;
#pragma unroll 1
  for (int tile = begin; tile < end; tile++) {
    const int64_t k0 = (int64_t)tile * F::kKeys;
    float s[1][F::kColumns][4] = {};
    if (tile >= first && tile < last) {
      uint32_t visible[1] = {~0u};
      bool partial = false, any = warp_rows > 0;
      if (any && (a.mask.data || tile < seen.all || tile >= seen.all_end)) {
        const uint64_t word = visible_word(a, b, h, i0, warp_rows, k0, F::kKeys);
        any = ballot(word != 0) != 0;
        partial = ballot(lane_id() < warp_rows && word != first_bits(F::kKeys)) != 0;
        if (partial) fragment_bits<F>(word, visible);
      }
#pragma unroll 1
      for (int slice = 0; slice < slices; slice++) {
        copy_wait<F::kStages - 2>();
        sync_block();  // this slice is there, and the place of the one before it is free
        fetch();
        if (any)
          add_rows<S, F::kRowBytes>(F::query_slice(slice), warp_id() * 16, F::key_slice(stage),
                                    columns - slice * F::kSlice, s);
        stage = stage + 1 == F::kStages ? 0 : stage + 1;
      }
      if (any) weights_of_tile<F>(a, b, h, i0, k0, partial, numbers, visible, s);
    }
    if (warp_rows <= 0) continue;
#pragma unroll
    for (int j = 0; j < F::kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[0][j][e] += numbers[e / 2].added;
    store_tile<F>(s, to + k0, a.keys, warp_rows, (int)min_of(F::kKeys, a.keys - k0));
  }
  copy_wait<0>();
}

template <class S>
const char* weights_half(const Attention& a, const Selection& selected, void* out, Stream stream) {
  using F = HalfWeights<S>;
  if (selected.row_count == 0) return nullptr;  // no runs are not all rows
  const int64_t runs = selected.runs ? selected.run_count : ceil_div(a.queries, F::kRows);
  const Grid grid{runs * ceil_div(a.keys, F::kTiles * F::kKeys), a.batch * selected.head_count};
  return launch(weights_half_kernel<F>, grid, F::kThreads, F::shared_bytes(a.head_dim), stream, a,
                selected, (S*)out, F::slices(a.head_dim));
}

}  // namespace mha_ext::cuda

// Forward for float32 on the tensor cores, of heads up to 128 wide: see split.cuh.
//   S = scale Q K^T + bias,  P = exp(S - level),  O = sum P V / l,  lse = level + log l
// A block splits its queries itself; keys and values are split once, and come in tiles of kKeys:
// values while scores are computed, the next keys while values are added up.
#pragma once
#include "forward_half.cuh"
#include "split_products.cuh"

namespace mha_ext::cuda {

template <int kWidth_>
struct SplitForward {
  using S = float;
  static constexpr bool kOwnsKeys = false;
  static constexpr int kWidth = kWidth_;  // D and Dv are at most this
  static constexpr int kFragments = kWidth <= 64 ? 2 : 1, kKeys = 32;
  static constexpr int kThreads = 128, kRows = kThreads / kWarp * 16 * kFragments;
  static constexpr int kColumns = kKeys / 8, kSteps = kKeys / 16;
  static constexpr int kRowBytes = 2 * kWidth;
  static constexpr int kQueryBytes = kRows * kRowBytes, kTileBytes = kKeys * kRowBytes;
  static constexpr Address kKeyTile = kPlanes * kQueryBytes,
                           kValueTile = kKeyTile + kPlanes * kTileBytes;
  static constexpr int kSharedBytes = kPlanes * (kQueryBytes + 2 * kTileBytes);
};

struct SplitKeys {
  Planes key, value;
};

// S -> P, and P is added to l. Levels rise where scores exceed them by more than 5: levels that
// stay save most passes over out.
template <class F>
DEVICE void softmax_split(float (&s)[F::kFragments][F::kColumns][4], RowState<F>& rows) {
  bool grew = false;
  float factor[F::kFragments][2];
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = -INFINITY;
#pragma unroll
      for (int j = 0; j < F::kColumns; j++)
        top = fmaxf(top, fmaxf(s[m][j][2 * half], s[m][j][2 * half + 1]));
      top = fmaxf(top, shuffle_xor(top, 1));
      top = fmaxf(top, shuffle_xor(top, 2));
      const float old = rows.level[m][half];
      const bool grows = top > old + 5;
      factor[m][half] = grows ? Softmax<float>::power(old - top) : 1;
      if (grows) rows.level[m][half] = top;
      rows.l[m][half] *= factor[m][half];
      grew |= grows;
    }
  if (ballot(grew)) {
#pragma unroll
    for (int m = 0; m < F::kFragments; m++)
#pragma unroll
      for (int n = 0; n < F::kWidth / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) rows.out[m][n][e] *= factor[m][e / 2];
  }
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float level = rows.level[m][half] == -INFINITY ? 0 : rows.level[m][half];
      float sum = 0;
#pragma unroll
      for (int j = 0; j < F::kColumns; j++)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
          s[m][j][e] = Softmax<float>::power(s[m][j][e] - level);
          sum += s[m][j][e];
        }
      rows.l[m][half] += sum;
    }
}

// Scores of one tile of one warp, -inf where a pair is hidden; false: nothing is visible.
template <class F>
DEVICE bool split_scores(const Attention& a, const Place& place, const SeenTiles& seen, int64_t i0,
                         int tile, bool special, uint32_t (&visible)[F::kFragments],
                         float (&s)[F::kFragments][F::kColumns][4]) {
  bool partial;
  if (!visible_tile<F>(a, place, seen, i0, tile, visible, partial)) return false;
  const int64_t k0 = (int64_t)tile * F::kKeys;
  multiply_split_rows<F::kRowBytes, F::kQueryBytes, F::kTileBytes, false>(
      0, warp_id() * 16 * F::kFragments, F::kKeyTile, (int)a.head_dim, s);
  if (special)
    add_special_rows(float_rows(a.query, place.b, place.h, i0, a.queries),
                     float_rows(a.key, place.b, place.kv, k0, a.keys), (int)a.head_dim, s);
  scale_fragments((float)a.scale, s);
  if (a.bias.data) {
    const bool hides = add_bias_tile<F>(a, place.b, place.h, i0, k0, s, visible);
    partial |= ballot(hides) != 0;
  }
  if (partial) select_tile<F>(visible, -INFINITY, s);
  return true;
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    forward_split_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT SplitKeys split,
                         const PartialSums<float> sums, const KeyParts parts) {
  const int64_t row = grid_row();
  if (row >= a.batch * a.heads) return;
  const Place place = place_of(a, row, F::kRows, parts.count);
  const int64_t block_rows = min_of(F::kRows, a.queries - place.q0);
  const int64_t i0 = place.q0 + warp_id() * 16 * F::kFragments;
  const int64_t head = place.b * a.kv_heads + place.kv;

  const SeenTiles block = seen_tiles<F::kKeys>(a, place.b, place.q0, block_rows);
  const SeenTiles seen =
      seen_tiles<F::kKeys>(a, place.b, i0, min_of(16 * F::kFragments, a.queries - i0));
  const int part_tiles = (int)ceil_div(parts.size, F::kKeys);
  const int first = (int)max_of(block.any, place.part * part_tiles);
  const int last = (int)max_of(first, min_of(block.any_end, (place.part + 1) * part_tiles));

  RowState<F> rows;
  clear_rows<F>(rows);
  if (first < last)
    copy_planes<F::kKeys, F::kRowBytes, F::kThreads>(F::kKeyTile, split.key, head,
                                                     (int64_t)first * F::kKeys);
  copy_commit();
  const bool special_queries = sync_block_or(split_tile<F::kRows, F::kRowBytes, F::kThreads>(
      0, a.query, place.b, place.h, place.q0, a.queries, (int)a.head_dim));
#pragma unroll 1
  for (int tile = first; tile < last; tile++) {
    const int64_t k0 = (int64_t)tile * F::kKeys;
    copy_wait<0>();
    sync_block();  // the keys are there, and the values have been read
    copy_planes<F::kKeys, F::kRowBytes, F::kThreads>(F::kValueTile, split.value, head, k0);
    copy_commit();
    uint32_t visible[F::kFragments];
    float s[F::kFragments][F::kColumns][4];
    const bool any = split_scores<F>(a, place, seen, i0, tile,
                                     special_queries || *split.key.flag(head, k0), visible, s);
    uint32_t p[F::kSteps][kPlanes][F::kFragments][4];
    if (any) {
      softmax_split<F>(s, rows);
      if (a.dropout.seed) {
        uint32_t kept[F::kFragments];
        kept_bits<F>(a, place.b, place.h, i0, k0, kept);
        select_tile<F>(kept, 0, s);
      }
      if (*split.value.flag(head, k0))
        add_special_across(s, visible, float_rows(a.value, place.b, place.kv, k0, a.keys),
                           (int)a.value_dim, rows.out);
      split_fragments(s, p);
    }
    copy_wait<0>();
    sync_block();  // the values are there, and the keys have been read
    if (tile + 1 < last)
      copy_planes<F::kKeys, F::kRowBytes, F::kThreads>(F::kKeyTile, split.key, head, k0 + F::kKeys);
    copy_commit();
    if (any)
      add_split_across<F::kRowBytes, F::kTileBytes>(p, F::kValueTile, (int)a.value_dim, 1,
                                                    rows.out);
  }
  copy_wait<0>();

  add_lanes<F>(rows);
  if (parts.count == 1) {
    float factor[F::kFragments][2];
    finish_levels<F>(a, row, i0, rows, factor);
    store_float_fragments(a.out, place.b, place.h, i0, a.queries, (int)a.value_dim, factor,
                          rows.out);
  } else {
    store_part<F>(a, place, i0, (row * parts.count + place.part) * a.queries, sums, rows);
  }
}

template <int kWidth>
const char* forward_split(const Attention& a, void* scratch, Stream stream) {
  using F = SplitForward<kWidth>;
  const KeyParts parts = key_parts(a);
  const PartialSums<float> sums = partial_sums<float>(a, scratch);
  int64_t at = ceil_div(parts_bytes(a), 256) * 256;
  const int64_t heads = a.batch * a.kv_heads;
  const Planes key = take_planes(at, scratch, heads, a.keys, a.head_dim);
  const Planes value = take_planes(at, scratch, heads, a.keys, a.value_dim);
  const char* error = run_split({{a.key, a.value},
                                 {(int)a.head_dim, (int)a.value_dim},
                                 {key, value},
                                 a.batch,
                                 a.kv_heads,
                                 a.keys},
                                stream);
  const Grid grid{ceil_div(a.queries, F::kRows) * parts.count, a.batch * a.heads};
  if (!error)
    error = launch(forward_split_kernel<F>, grid, F::kThreads, F::kSharedBytes, stream, a,
                   SplitKeys{key, value}, sums, parts);
  return error ? error : finish_rows<float>(a, sums, parts, a.queries, stream);
}

}  // namespace mha_ext::cuda

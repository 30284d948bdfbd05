// Forward for 16-bit types, on the tensor cores: one pass over the keys with a running level and
// sum (Milakov & Gimelshein 2018; Dao et al. 2022, 2023).
//   S = scale Q K^T + bias,  P = exp(S - level),  O = sum P V / l,  lse = level + log l
// Four warps hold 16 kFragments queries each; K and V come in tiles of kKeys, the next one while
// this one is used.
#pragma once
#include "forward.cuh"
#include "half.cuh"

namespace mha_ext::cuda {

template <class S_, int kWidth_>
struct HalfForward {
  using S = S_;
  static constexpr bool kOwnsKeys = false;
  static constexpr int kWidth = kWidth_;  // D and Dv are at most this
  static constexpr int kFragments = kWidth <= 64 ? 2 : 1, kKeys = kWidth <= 128 ? 64 : 32;
  static constexpr int kThreads = 128, kRows = kThreads / kWarp * 16 * kFragments;
  static constexpr int kQueries = kRows;
  static constexpr int kColumns = kKeys / 8, kSteps = kKeys / 16;
  static constexpr int kRowBytes = 2 * kWidth, kTileBytes = kKeys * kRowBytes;
  static constexpr int kSharedBytes = kRows * kRowBytes + 4 * kTileBytes;
  DEVICE_MEMBER static Address key_tile(int stage) {
    return (Address)(kRows * kRowBytes + 2 * stage * kTileBytes);
  }
  DEVICE_MEMBER static Address value_tile(int stage) { return key_tile(stage) + kTileBytes; }
};

// Rows of one warp: sums of P V, and of each of a lane's rows 16 m + 8 half + g the level and this
// lane's share of l.
template <class F>
struct RowState {
  float out[F::kFragments][F::kWidth / 8][4];
  float level[F::kFragments][2], l[F::kFragments][2];
};

// What a row's sums are multiplied by where its level has risen.
template <class F>
struct Rise {
  float factor[F::kFragments][2];
  bool any;  // of this lane's rows
};

// Raises the levels of rows whose scores, s times `scale` > 0, exceed them by more than 5.5; S ->
// P, and P is added to l. Levels that stay save most passes over out, and cost no accuracy.
template <class F>
DEVICE Rise<F> softmax_tile(float scale, float (&s)[F::kFragments][F::kColumns][4],
                            RowState<F>& rows) {
  constexpr float kNear = 128 * kLog2E;
  const float scale_log2e = scale * kLog2E;
  const auto is_near = [&](float number) {
    return fabsf(number) < kNear && scale_log2e < INFINITY;
  };
  float ahead[F::kFragments][2], factor[F::kFragments][2];
  Rise<F> rise;
  rise.any = false;
  bool far = false;
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = -INFINITY, other = -INFINITY;
#pragma unroll
      for (int j = 0; j < F::kColumns; j++) {
        top = fmaxf(top, s[m][j][2 * half]);
        other = fmaxf(other, s[m][j][2 * half + 1]);
      }
      top = fmaxf(top, other);
      top = fmaxf(top, shuffle_xor(top, 1));
      top = fmaxf(top, shuffle_xor(top, 2)) * scale;
      float& level = rows.level[m][half];
      const bool grows = top > level + 5.5f;
      rise.factor[m][half] = grows ? Softmax<typename F::S>::power(level - top) : 1;
      if (grows) level = top;
      rows.l[m][half] *= rise.factor[m][half];
      rise.any |= grows;
      ahead[m][half] = level == -INFINITY ? 0 : level * -kLog2E;  // -inf - -inf would be NaN
      factor[m][half] = scale_log2e;
      far |= !is_near(ahead[m][half]);
    }
  if (ballot(far)) {
    // Far from zero level log2 e is rounded by more than scores differ; scale log2 e is infinite
    // where scale is near the largest number.
#pragma unroll
    for (int m = 0; m < F::kFragments; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (is_near(ahead[m][half])) continue;
        ahead[m][half] = 0;
        factor[m][half] = kLog2E;
#pragma unroll
        for (int j = 0; j < F::kColumns; j++)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; e++)
            s[m][j][e] = s[m][j][e] * scale - rows.level[m][half];
      }
  }
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = 0, other = 0;
#pragma unroll
      for (int j = 0; j < F::kColumns; j++) {
        float &x = s[m][j][2 * half], &y = s[m][j][2 * half + 1];
        x = exp2_approximate(fmaf(x, factor[m][half], ahead[m][half]));
        y = exp2_approximate(fmaf(y, factor[m][half], ahead[m][half]));
        sum += x;
        other += y;
      }
      rows.l[m][half] += sum + other;
    }
  return rise;
}
template <class F>
DEVICE void rescale(const Rise<F>& rise, RowState<F>& rows) {
  if (!ballot(rise.any)) return;
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int n = 0; n < F::kWidth / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) rows.out[m][n][e] *= rise.factor[m][e / 2];
}

// The bits of what this warp sees of a tile, as far as lengths, band and mask say, and whether that
// is not all; false: nothing.
template <class F>
DEVICE bool visible_tile(const Attention& a, const Place& place, const SeenTiles& seen, int64_t i0,
                         int tile, uint32_t (&visible)[F::kFragments], bool& partial) {
  if (tile < seen.any || tile >= seen.any_end) return false;
#pragma unroll
  for (int m = 0; m < F::kFragments; m++) visible[m] = ~0u;
  partial = false;
  if (!a.mask.data && tile >= seen.all && tile < seen.all_end) return true;
  const int rows = (int)min_of(16 * F::kFragments, a.queries - i0);
  const uint64_t word =
      visible_word(a, place.b, place.h, i0, rows, (int64_t)tile * F::kKeys, F::kKeys);
  if (!ballot(word != 0)) return false;
  partial = ballot(lane_id() < rows && word != first_bits(F::kKeys)) != 0;
  if (partial) fragment_bits<F>(word, visible);
  return true;
}

// One tile of keys of one warp; finite: its values are. Whether it has met hidden pairs.
template <class F>
DEVICE bool forward_tile(const Attention& a, const Place& place, const SeenTiles& seen, int64_t i0,
                         int tile, bool finite, bool bias_copied, RowState<F>& rows) {
  using S = typename F::S;
  uint32_t visible[F::kFragments];
  bool partial;
  if (!visible_tile<F>(a, place, seen, i0, tile, visible, partial)) return false;
  const int64_t k0 = (int64_t)tile * F::kKeys;
  const int stage = tile & 1;

  float s[F::kFragments][F::kColumns][4];
  multiply_rows<S, F::kRowBytes>(0, warp_id() * 16 * F::kFragments, F::key_tile(stage),
                                 (int)a.head_dim, s);
  scale_fragments((float)a.scale, s);
  if (a.bias.data) {
    const bool hides = bias_copied ? add_copied_bias<F>(bias_tile<F>(stage), s, visible)
                                   : add_bias_tile<F>(a, place.b, place.h, i0, k0, s, visible);
    partial |= ballot(hides) != 0;
  }
  if (partial) select_tile<F>(visible, -INFINITY, s);
  rescale<F>(softmax_tile<F>(1, s, rows), rows);
  if (a.dropout.seed) {
    uint32_t kept[F::kFragments];
    kept_bits<F>(a, place.b, place.h, i0, k0, kept);
    select_tile<F>(kept, 0, s);
  }

  uint32_t p[F::kFragments][F::kSteps][4];
  round_fragments<S>(s, p);
  const int columns = (int)a.value_dim;
  const bool met = partial;
  if (finite) partial = false;
  if (!partial) {
    multiply_across<S, F::kRowBytes, false>(p, F::value_tile(stage), columns, rows.out);
    return met;
  }
  // Hidden pairs have P = 0, but 0 * NaN is NaN.
  const bool dirty =
      multiply_across<S, F::kRowBytes, true>(p, F::value_tile(stage), columns, rows.out);
  if (ballot(dirty))
    add_nonfinite<S, F::kRowBytes, false>(p, visible, F::value_tile(stage), columns, rows.out);
  return met;
}

template <class F>
DEVICE void clear_rows(RowState<F>& rows) {
  clear_fragments(rows.out);
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      rows.level[m][half] = -INFINITY;
      rows.l[m][half] = 0;
    }
}

// l of the whole row in each of its lanes.
template <class F>
DEVICE void add_lanes(RowState<F>& rows) {
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      rows.l[m][half] += shuffle_xor(rows.l[m][half], 1);
      rows.l[m][half] += shuffle_xor(rows.l[m][half], 2);
    }
}

// Stores lse and lse_low of rows that have seen all their keys; what their sums are multiplied by.
template <class F>
DEVICE void finish_levels(const Attention& a, int64_t row, int64_t i0, const RowState<F>& rows,
                          float (&factor)[F::kFragments][2]) {
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t i = i0 + 16 * m + 8 * half + lane_id() / 4;
      const float l = rows.l[m][half];
      factor[m][half] = l != 0 ? (float)a.dropout.keep_scale / l : 0;
      if (i < a.queries && lane_id() % 4 == 0)
        store_lse(a, row * a.queries + i, rows.level[m][half], l);
    }
}
template <class F>
DEVICE void store_rows(const Attention& a, const Place& place, int64_t row, int64_t i0,
                       const RowState<F>& rows) {
  float factor[F::kFragments][2];
  finish_levels<F>(a, row, i0, rows, factor);
  store_fragments<typename F::S>(a.out, place.b, place.h, i0, a.queries, (int)a.value_dim, factor,
                                 rows.out);
}

template <class F>
DEVICE void store_part(const Attention& a, const Place& place, int64_t i0, int64_t first,
                       const PartialSums<float>& sums, const RowState<F>& rows) {
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t i = i0 + 16 * m + 8 * half + lane / 4;
      if (i >= a.queries) continue;
      float* out = sums.out + (first + i) * a.value_dim;
#pragma unroll
      for (int n = 0; n < F::kWidth / 8; n++) {
        const int d = 8 * n + lane % 4 * 2;
        if (d < a.value_dim) out[d] = rows.out[m][n][2 * half];
        if (d + 1 < a.value_dim) out[d + 1] = rows.out[m][n][2 * half + 1];
      }
      if (lane % 4 == 0) {
        sums.rows[(first + i) * 2] = rows.level[m][half];
        sums.rows[(first + i) * 2 + 1] = rows.l[m][half];
      }
    }
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    forward_half_kernel(const GRID_CONSTANT Attention a, const PartialSums<float> sums,
                        const KeyParts parts) {
  using S = typename F::S;
  if (grid_row() >= a.batch * a.heads) return;
  const int64_t row = bias_row(a, grid_row(), a.heads);
  const Place place = place_of(a, row, F::kRows, parts.count);
  const int64_t block_rows = min_of(F::kRows, a.queries - place.q0);
  const int64_t i0 = place.q0 + warp_id() * 16 * F::kFragments;
  const HeadRows keys = head_rows<S>(a.key, place.b, place.kv);
  const HeadRows values = head_rows<S>(a.value, place.b, place.kv);

  const SeenTiles block = seen_tiles<F::kKeys>(a, place.b, place.q0, block_rows);
  const SeenTiles seen =
      seen_tiles<F::kKeys>(a, place.b, i0, min_of(16 * F::kFragments, a.queries - i0));
  const int part_tiles = (int)ceil_div(parts.size, F::kKeys);
  int tile = (int)max_of(block.any, place.part * part_tiles);
  int last = (int)max_of(tile, min_of(block.any_end, (place.part + 1) * part_tiles));

  const bool bias_copied = bias_is_copied<F>(a);
  Cleaning cleaning(a);
  RowState<F> rows;
  clear_rows<F>(rows);
  copy_rows<F::kRows, F::kRowBytes, F::kThreads>(0, head_rows<S>(a.query, place.b, place.h),
                                                 place.q0, (int)block_rows, (int)a.head_dim * 2);
  // Each turn fetches a tile of keys and computes the one before.
#pragma unroll 1
  for (int next = tile; next <= last; next++) {
    copy_wait<0>();
    const bool looks = next > tile && cleaning.looks_at(a, block, next - 1);
    const bool nonfinite =
        looks && copied_nonfinite<F, F::kKeys>(F::value_tile(next & 1 ^ 1), (int)a.value_dim);
    // The tile before is there, and the place of the next is free.
    const bool finite = cleaning.sync(looks, nonfinite);
    if (next < last) {
      const int64_t k0 = (int64_t)next * F::kKeys;
      const int count = (int)min_of(F::kKeys, a.keys - k0), stage = next & 1;
      copy_rows<F::kKeys, F::kRowBytes, F::kThreads>(F::key_tile(stage), keys, k0, count,
                                                     (int)a.head_dim * 2);
      copy_rows<F::kKeys, F::kRowBytes, F::kThreads>(F::value_tile(stage), values, k0, count,
                                                     (int)a.value_dim * 2);
      if (bias_copied)
        copy_pairs<F>(a, a.bias, place.b, place.h, place.q0, k0, bias_tile<F>(stage));
    }
    copy_commit();
    if (next > tile)
      cleaning.met = forward_tile<F>(a, place, seen, i0, next - 1, finite, bias_copied, rows);
  }
  copy_wait<0>();

  add_lanes<F>(rows);
  if (parts.count == 1) {
    store_rows<F>(a, place, row, i0, rows);
  } else {
    store_part<F>(a, place, i0, (row * parts.count + place.part) * a.queries, sums, rows);
  }
}

template <class S, int kWidth>
const char* forward_half(const Attention& a, void* scratch, Stream stream) {
  using F = HalfForward<S, kWidth>;
  const KeyParts parts = key_parts(a);
  const PartialSums<float> sums = partial_sums<float>(a, scratch);
  const int64_t tiles = ceil_div(a.queries, F::kRows);
  const char* error = launch(forward_half_kernel<F>, {tiles * parts.count, a.batch * a.heads},
                             F::kThreads, shared_bytes<F>(a), stream, a, sums, parts);
  return error ? error : finish_rows<S>(a, sums, parts, a.queries, stream);
}

template <class S>
const char* forward_of_half(const Attention& given, void* scratch, Stream stream) {
  if (decodes(given)) return decode_of<S>(given, scratch, stream);
  Attention a = given;
  if (const char* error = pack_mask(a, scratch, stream)) return error;
  if (hopper_takes(a)) {
    const char* error = align_rows(a, nullptr, scratch, stream);
    if (!error) error = forward_hopper_of<S>(a, stream);
    return error ? error
                 : finish_rows<S>(a, partial_sums<float>(a, scratch), key_parts(a), a.queries,
                                  stream);
  }
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (width <= 64) return forward_half<S, 64>(a, scratch, stream);
  if (width <= 128) return forward_half<S, 128>(a, scratch, stream);
  return forward_half<S, 256>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

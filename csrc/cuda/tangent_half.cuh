// The tangent of forward for 16-bit types, on the tensor cores, and what that of backward shares
// with it. A tile in shared memory is followed by the tile of its tangent.
//   S' = scale (Q' K^T + Q K'^T) + B',  mu = rowsum(P o S') = lse'
//   O' = ((P o S') o M) V + Z V' - mu O
// A block owns 64 queries, 16 a warp. Keys come while the values before them are used, and values
// while their keys are.
#pragma once
#include "backward_half.cuh"
#include "tangent.cuh"

namespace mha_ext::cuda {

template <class S_, int kWidth_>
struct HalfTangent {
  using S = S_;
  static constexpr bool kOwnsKeys = false;
  static constexpr int kWidth = kWidth_, kFragments = 1;  // D and Dv are at most kWidth
  static constexpr int kThreads = 128, kRows = 64;
  static constexpr int kOthers = kWidth <= 128 ? 32 : 16;  // rows of a tile
  static constexpr int kColumns = kOthers / 8, kSteps = kOthers / 16;
  static constexpr int kRowBytes = 2 * kWidth, kOwnBytes = kRows * kRowBytes;
  static constexpr int kTileBytes = kOthers * kRowBytes;
  static constexpr Address kOwnScores = 0, kKeys = 2 * kOwnBytes, kValues = kKeys + 2 * kTileBytes;
  static constexpr int kSharedBytes = 2 * kOwnBytes + 4 * kTileBytes;
};

// c = X Y^T, where it is wanted, and moved = X' Y^T + X Y'^T: X are 16 rows of what a block owns, Y
// is a tile.
template <class F>
DEVICE void multiply_moved(Address own, Address tile, bool wanted, bool own_moves, bool tile_moves,
                           int columns, float (&c)[1][F::kColumns][4],
                           float (&moved)[1][F::kColumns][4]) {
  using S = typename F::S;
  const int row = warp_id() * 16;
  if (own_moves) {
    multiply_two_rows<S, F::kRowBytes>(own, row, F::kOwnBytes, tile, columns, c, moved);
  } else {
    clear_fragments(c);
    clear_fragments(moved);
    if (wanted) add_rows<S, F::kRowBytes>(own, row, tile, columns, c);
  }
  if (tile_moves) add_rows<S, F::kRowBytes>(own, row, tile + F::kTileBytes, columns, moved);
}

// S and S' of one tile of one warp; a pair that is hidden holds anything, and a bias may hide more.
template <class F>
DEVICE void moved_scores(const Attention& a, const AttentionTangent& t, const HalfPlace& at,
                         Address tile, HalfPairs<F>& pairs, float (&s)[1][F::kColumns][4],
                         float (&moved)[1][F::kColumns][4]) {
  using S = typename F::S;
  const bool own_moves = F::kOwnsKeys ? t.key.data : t.query.data;
  const bool tile_moves = F::kOwnsKeys ? t.query.data : t.key.data;
  multiply_moved<F>(F::kOwnScores, tile, true, own_moves, tile_moves, (int)a.head_dim, s, moved);
  const float scale = (float)a.scale;
#pragma unroll
  for (int j = 0; j < F::kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s[0][j][e] *= scale;
      moved[0][j][e] *= scale;
    }
  if (a.bias.data) {
    const bool hides =
        add_bias_tile<F>(a, at.b, at.h, at.own0(), (int64_t)at.tile * F::kOthers, s, pairs.visible);
    pairs.partial |= ballot(hides) != 0;
  }
  if (t.bias.data)
    for_each_pair<F>(a, t.bias, at.b, at.h, at.own0(), (int64_t)at.tile * F::kOthers,
                     [&](int, int j, int e, int64_t from) {
                       const void* bias = t.bias.data;
                       moved[0][j][e] += a.bias_is_float32 ? ((const float*)bias)[from]
                                                           : widen(((const S*)bias)[from]);
                     });
}

// sum += first Y + second Y', where Y is a tile; each is left out where it is not wanted.
template <class F>
DEVICE void add_two_tiles(const uint32_t (&first)[1][F::kSteps][4],
                          const uint32_t (&second)[1][F::kSteps][4], bool with_first,
                          bool with_second, const HalfPairs<F>& pairs, Address tile, int columns,
                          float (&sum)[1][F::kWidth / 8][4]) {
#pragma unroll 1
  for (int term = 0; term < 2; term++) {
    if (!(term ? with_second : with_first)) continue;
    uint32_t x[1][F::kSteps][4];
#pragma unroll
    for (int k = 0; k < F::kSteps; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) x[0][k][i] = term ? second[0][k][i] : first[0][k][i];
    add_rounded<F, true>(x, pairs.partial, pairs.visible, tile + term * F::kTileBytes, columns,
                         sum);
  }
}

// A tile of rows and, where there is one, that of its tangent.
template <class F, int kRows>
DEVICE void copy_with_tangent(Address to, const Rows& rows, const Rows& moved, int64_t b, int64_t h,
                              int64_t begin, int count, int64_t columns, bool wanted = true) {
  using S = typename F::S;
  constexpr int kBytes = kRows * F::kRowBytes;
  if (wanted)
    copy_rows<kRows, F::kRowBytes, F::kThreads>(to, head_rows<S>(rows, b, h), begin, count,
                                                (int)columns * 2);
  if (moved.data)
    copy_rows<kRows, F::kRowBytes, F::kThreads>(to + kBytes, head_rows<S>(moved, b, h), begin,
                                                count, (int)columns * 2);
}

// P and P o S' of one tile of one warp, before dropout: z and ds; false: nothing is visible. Their
// products are added to mu.
template <class F>
DEVICE bool tangent_pairs(const Attention& a, const AttentionTangent& t, const HalfPlace& at,
                          const SeenTiles& seen, const float (&lse)[2], const float (&low)[2],
                          HalfPairs<F>& pairs, float (&mu)[2]) {
  if (!visible_pairs<F>(a, at, seen, pairs)) return false;
  auto &p = pairs.z, &moved = pairs.ds;
  moved_scores<F>(a, t, at, F::kKeys, pairs, p, moved);
#pragma unroll
  for (int j = 0; j < F::kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      p[0][j][e] = exp2_approximate((p[0][j][e] - lse[e / 2] - low[e / 2]) * kLog2E);
      moved[0][j][e] *= p[0][j][e];
    }
  if (pairs.partial) {
    select_tile<F>(pairs.visible, 0, p);
    select_tile<F>(pairs.visible, 0, moved);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < F::kColumns; j++) sum += moved[0][j][2 * half] + moved[0][j][2 * half + 1];
    mu[half] += sum;
  }
  if (a.dropout.seed) {
    uint32_t kept[1];
    kept_bits<F>(a, at.b, at.h, at.own0(), (int64_t)at.tile * F::kOthers, kept);
    select_tile<F>(kept, 0, p);
    select_tile<F>(kept, 0, moved);
  }
  return true;
}

// sum (P o S' o M) V + Z V' becomes O': the factor of dropout, and - mu O.
template <class F>
DEVICE void finish_out_tangent(const Attention& a, int64_t b, int64_t h, int64_t own0,
                               const float (&mu)[2], float (&sum)[1][F::kWidth / 8][4]) {
  using S = typename F::S;
  const float keep_scale = (float)a.dropout.keep_scale;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int64_t i = own0 + 8 * half + lane_id() / 4;
    if (i >= a.queries) continue;
    const S* out = row_of<S>(a.out, b, h, i);
#pragma unroll
    for (int n = 0; n < F::kWidth / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int d = 8 * n + lane_id() % 4 * 2 + e;
        if (d >= a.value_dim) continue;
        float& to = sum[0][n][2 * half + e];
        to *= keep_scale;
        if (mu[half] != 0) to -= mu[half] * widen(out[d]);
      }
  }
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    forward_tangent_half_kernel(const GRID_CONSTANT Attention a,
                                const GRID_CONSTANT AttentionTangent t) {
  using S = typename F::S;
  const int64_t row = grid_row();
  if (row >= a.batch * a.heads) return;
  const HalfBlock of = half_block<F>(a, row, blockIdx.x, warp_id() * 16);
  const int64_t b = of.b, h = of.head, kv = kv_head(a, h);
  const bool with_scores = moves_scores(t);

  float sum[1][F::kWidth / 8][4] = {}, mu[2] = {}, lse[2], low[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int64_t i = of.own0 + 8 * half + lane_id() / 4, number = row * a.queries + i;
    lse[half] = i < a.queries ? row_level(((const float*)a.lse)[number]) : 0;
    low[half] = i < a.queries && a.lse_low ? ((const float*)a.lse_low)[number] : 0;
  }
  const auto copy_tile = [&](Address to, const Rows& rows, const Rows& moved, int tile,
                             int64_t columns, bool wanted) {
    const int64_t k0 = (int64_t)tile * F::kOthers;
    copy_with_tangent<F, F::kOthers>(to, rows, moved, b, kv, k0,
                                     (int)min_of(F::kOthers, a.keys - k0), columns, wanted);
    copy_commit();
  };
  const int end = with_scores || t.value.data ? of.block.any_end : 0;
  HalfPlace at{b, (int)(of.own0 / 16), (int)h, of.block.any, 0};
  if (at.tile < end) {
    copy_with_tangent<F, F::kRows>(F::kOwnScores, a.query, t.query, b, h, of.block0,
                                   (int)min_of(F::kRows, a.queries - of.block0), a.head_dim);
    copy_tile(F::kKeys, a.key, t.key, at.tile, a.head_dim, true);
  }
#pragma unroll 1
  for (; at.tile < end; at.tile++) {
    copy_wait<0>();
    sync_block();  // the keys are there, and the place of the values is free
    copy_tile(F::kValues, a.value, t.value, at.tile, a.value_dim, with_scores);
    HalfPairs<F> pairs;
    const bool any = tangent_pairs<F>(a, t, at, of.seen, lse, low, pairs, mu);
    copy_wait<0>();
    sync_block();  // the values are there, and the place of the keys is free
    if (at.tile + 1 < end) copy_tile(F::kKeys, a.key, t.key, at.tile + 1, a.head_dim, true);
    if (any) {
      uint32_t p[1][F::kSteps][4], moved[1][F::kSteps][4];
      round_fragments<S>(pairs.z, p);
      round_fragments<S>(pairs.ds, moved);
      add_two_tiles<F>(moved, p, with_scores, t.value.data, pairs, F::kValues, (int)a.value_dim,
                       sum);
    }
  }
  copy_wait<0>();

#pragma unroll
  for (int half = 0; half < 2; half++) {
    mu[half] += shuffle_xor(mu[half], 1);
    mu[half] += shuffle_xor(mu[half], 2);
    if (lse[half] == INFINITY) mu[half] = 0;
    const int64_t i = of.own0 + 8 * half + lane_id() / 4;
    if (i < a.queries && lane_id() % 4 == 0) ((float*)t.lse)[row * a.queries + i] = mu[half];
  }
  finish_out_tangent<F>(a, b, h, of.own0, mu, sum);
  const float factor[1][2] = {{1, 1}};
  store_fragments<S>(t.out, b, h, of.own0, a.queries, (int)a.value_dim, factor, sum);
}

template <class S, int kWidth>
const char* forward_tangent_half(const Attention& a, const AttentionTangent& t, Stream stream) {
  using F = HalfTangent<S, kWidth>;
  const Grid grid{ceil_div(a.queries, F::kRows), a.batch * a.heads};
  const char* error =
      launch(forward_tangent_half_kernel<F>, grid, F::kThreads, F::kSharedBytes, stream, a, t);
  return error ? error : finish_rows_tangent<S>(a, t, stream);
}

template <class S>
const char* forward_tangent_of_half(const Attention& a, const AttentionTangent& t, Stream stream) {
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (width <= 64) return forward_tangent_half<S, 64>(a, t, stream);
  if (width <= 128) return forward_tangent_half<S, 128>(a, t, stream);
  return forward_tangent_half<S, 256>(a, t, stream);
}

}  // namespace mha_ext::cuda

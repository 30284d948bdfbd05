// Backward for float32 on the tensor cores, of heads up to 128 wide: the form of backward_half.cuh,
// with the planes of split.cuh.
#pragma once
#include "backward_half.cuh"
#include "split_products.cuh"

namespace mha_ext::cuda {

template <int kWidth_, bool kOwnsKeys_, bool kScores_, bool kValues_>
struct SplitBackward {
  using S = float;
  static constexpr bool kOwnsKeys = kOwnsKeys_;
  static constexpr bool kScores = kScores_, kValues = kValues_;  // dK or dQ; dV
  static constexpr int kWidth = kWidth_, kFragments = 1;         // D and Dv are at most kWidth
  static constexpr int kOwnTiles = kScores ? 2 : 1;
  static constexpr int kRows = kWidth * kOwnTiles <= 128 ? 64 : 32, kThreads = kRows / 16 * kWarp;
  static constexpr int kOthers = kWidth <= 64 ? 32 : 16;  // rows of a tile
  static constexpr int kColumns = kOthers / 8, kSteps = kOthers / 16;
  static constexpr int kRowBytes = 2 * kWidth, kOwnBytes = kRows * kRowBytes;
  static constexpr int kTileBytes = kOthers * kRowBytes, kNumberBytes = 3 * kOthers * 4;
  static constexpr Address kOwnScores = 0, kOwnValues = kPlanes * kOwnBytes;
  static constexpr int kSharedBytes =
      kPlanes * (kOwnTiles * kOwnBytes + 4 * kTileBytes) + 2 * kNumberBytes;
  DEVICE_MEMBER static Address score_tile(int stage) {
    return (Address)(kPlanes * (kOwnTiles * kOwnBytes + 2 * stage * kTileBytes));
  }
  DEVICE_MEMBER static Address value_tile(int stage) {
    return score_tile(stage) + kPlanes * kTileBytes;
  }
  // lse, lse_low and delta of the queries of a tile.
  DEVICE_MEMBER static Address numbers(int stage) {
    return (Address)(kPlanes * (kOwnTiles * kOwnBytes + 4 * kTileBytes) + stage * kNumberBytes);
  }
};

template <class F>
DEVICE const Planes& other_scores(const SplitSides& of) {
  return F::kOwnsKeys ? of.query : of.key;
}
template <class F>
DEVICE const Planes& other_values(const SplitSides& of) {
  return F::kOwnsKeys ? of.grad_out : of.value;
}
template <class F>
DEVICE int64_t other_head(const Attention& a, int64_t b, int64_t h) {
  return F::kOwnsKeys ? b * a.heads + h : b * a.kv_heads + kv_head(a, h);
}
template <class F>
DEVICE int64_t own_head(const Attention& a, int64_t b, int64_t h) {
  return F::kOwnsKeys ? b * a.kv_heads + kv_head(a, h) : b * a.heads + h;
}
// float32 rows of the others' tile, and of what this warp owns.
template <class F>
DEVICE FloatRows queries_or_keys(const Attention& a, const Rows& queries, const Rows& keys,
                                 bool of_queries, const HalfPlace& at) {
  const int64_t first = of_queries == F::kOwnsKeys ? (int64_t)at.tile * F::kOthers : at.own0();
  return of_queries ? float_rows(queries, at.b, at.h, first, a.queries)
                    : float_rows(keys, at.b, kv_head(a, at.h), first, a.keys);
}

// A tile of the others, for query head h; where they are queries, their numbers too.
template <class F>
DEVICE void copy_split_others(const Attention& a, const AttentionGrad& g, const SplitSides& of,
                              int64_t b, int64_t h, int64_t other0, int stage) {
  const int64_t head = other_head<F>(a, b, h);
  copy_planes<F::kOthers, F::kRowBytes, F::kThreads>(F::score_tile(stage), other_scores<F>(of),
                                                     head, other0);
  copy_planes<F::kOthers, F::kRowBytes, F::kThreads>(F::value_tile(stage), other_values<F>(of),
                                                     head, other0);
  if constexpr (F::kOwnsKeys) copy_numbers<F>(a, g, b, h, other0, stage);
}

// z = P o M without its factor, ds = dS of one tile of one warp; false: nothing is visible.
template <class F>
DEVICE bool split_gradient(const Attention& a, const AttentionGrad& g, const HalfPlace& at,
                           const SeenTiles& seen, const QueryNumbers (&own)[2], bool special_scores,
                           bool special_values, HalfPairs<F>& pairs) {
  if (!visible_pairs<F>(a, at, seen, pairs)) return false;
  const int row = warp_id() * 16;
  auto &p = pairs.z, &ds = pairs.ds;
  multiply_split_rows<F::kRowBytes, F::kOwnBytes, F::kTileBytes, F::kOwnsKeys>(
      F::kOwnScores, row, F::score_tile(at.stage), (int)a.head_dim, p);
  if constexpr (F::kScores)
    multiply_split_rows<F::kRowBytes, F::kOwnBytes, F::kTileBytes, F::kOwnsKeys>(
        F::kOwnValues, row, F::value_tile(at.stage), (int)a.value_dim, ds);
  if (special_scores)
    add_special_rows(queries_or_keys<F>(a, a.query, a.key, !F::kOwnsKeys, at),
                     queries_or_keys<F>(a, a.query, a.key, F::kOwnsKeys, at), (int)a.head_dim, p);
  if (F::kScores && special_values)
    add_special_rows(queries_or_keys<F>(a, g.grad_out, a.value, !F::kOwnsKeys, at),
                     queries_or_keys<F>(a, g.grad_out, a.value, F::kOwnsKeys, at), (int)a.value_dim,
                     ds);
  finish_pairs<F>(a, at, own, pairs);
  return true;
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    backward_split_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g,
                          const GRID_CONSTANT SplitSides sides) {
  const int64_t row = grid_row();
  if (row >= a.batch * (F::kOwnsKeys ? a.kv_heads : a.heads)) return;
  const HalfBlock of = half_block<F>(a, row, blockIdx.x, warp_id() * 16);
  const int64_t b = of.b, own0 = of.own0;
  const int count = of.count();

  float score_sum[1][F::kWidth / 8][4] = {}, value_sum[1][F::kWidth / 8][4] = {};
  QueryNumbers own[2] = {};
  if constexpr (!F::kOwnsKeys) own_numbers(a, g, b, of.head, own0, own);
  if constexpr (F::kValues)
    if (a.uniform_empty_rows)
      for (int h = of.head * of.group; h < (of.head + 1) * of.group; h++)
        add_uniform_rows<F>(a, g.grad_out, b, h, own0, value_sum);
  const bool dense_bias = !F::kOwnsKeys && g.grad_bias.data && bias_is_dense(a, g.grad_bias);
  const bool with_scores = F::kOwnsKeys ? g.grad_key.data : g.grad_query.data;
  const int64_t head = own_head<F>(a, b, (int64_t)of.head * of.group);
  const Planes &own_scores = F::kOwnsKeys ? sides.key : sides.query,
               &own_values = F::kOwnsKeys ? sides.value : sides.grad_out;
  copy_planes<F::kRows, F::kRowBytes, F::kThreads>(F::kOwnScores, own_scores, head, of.block0);
  if constexpr (F::kScores)
    copy_planes<F::kRows, F::kRowBytes, F::kThreads>(F::kOwnValues, own_values, head, of.block0);
  const bool special_scores = *own_scores.flag(head, of.block0),
             special_values = *own_values.flag(head, of.block0);
  HalfPlace at = of.before();
  // Each turn fetches a tile and computes the one before.
#pragma unroll 1
  for (int next = 0; next <= count; next++) {
    copy_wait<0>();
    sync_block();  // the tile before is there, and the place of the next is free
    const HalfPlace to = of.after(at);
    if (next < count)
      copy_split_others<F>(a, g, sides, b, to.h, (int64_t)to.tile * F::kOthers, next & 1);
    copy_commit();
    at.stage = (next & 1) ^ 1;
    HalfPairs<F> pairs;
    if (next > 0) {
      const int64_t other = other_head<F>(a, b, at.h), other0 = (int64_t)at.tile * F::kOthers;
      const bool tile_scores = *other_scores<F>(sides).flag(other, other0),
                 tile_values = *other_values<F>(sides).flag(other, other0);
      if (split_gradient<F>(a, g, at, of.seen, own, special_scores || tile_scores,
                            special_values || tile_values, pairs)) {
        uint32_t x[F::kSteps][kPlanes][1][4];
        if constexpr (F::kValues) {
          if (tile_values)
            add_special_across(pairs.z, pairs.visible,
                               queries_or_keys<F>(a, g.grad_out, a.value, F::kOwnsKeys, at),
                               (int)a.value_dim, value_sum);
          split_fragments(pairs.z, x);
          add_split_across<F::kRowBytes, F::kTileBytes>(x, F::value_tile(at.stage),
                                                        (int)a.value_dim, 1, value_sum);
        }
        if constexpr (F::kScores) {
          if (dense_bias) store_dense_bias<F>(a, g.grad_bias, at, pairs.ds);
          if (with_scores) {
            if (tile_scores)
              add_special_across(pairs.ds, pairs.visible,
                                 queries_or_keys<F>(a, a.query, a.key, F::kOwnsKeys, at),
                                 (int)a.head_dim, score_sum);
            const float factor = lift_tiny(pairs.ds);
            split_fragments(pairs.ds, x);
            add_split_across<F::kRowBytes, F::kTileBytes>(x, F::score_tile(at.stage),
                                                          (int)a.head_dim, factor, score_sum);
          }
        }
      }
    }
    at = to;
  }
  copy_wait<0>();

  if (F::kScores && with_scores) {
    const float scale = (float)a.scale, factor[1][2] = {{scale, scale}};
    store_float_fragments(F::kOwnsKeys ? g.grad_key : g.grad_query, b, of.head, own0, of.rows,
                          (int)a.head_dim, factor, score_sum);
  }
  if constexpr (F::kValues)
    if (g.grad_value.data) {
      const float scale = (float)a.dropout.keep_scale, factor[1][2] = {{scale, scale}};
      store_float_fragments(g.grad_value, b, of.head, own0, of.rows, (int)a.value_dim, factor,
                            value_sum);
    }
}

template <class F>
const char* run_backward_split(const Attention& a, const AttentionGrad& g, const SplitSides& sides,
                               Stream stream) {
  const Grid grid{ceil_div(F::kOwnsKeys ? a.keys : a.queries, F::kRows),
                  a.batch * (F::kOwnsKeys ? a.kv_heads : a.heads)};
  return launch(backward_split_kernel<F>, grid, F::kThreads, F::kSharedBytes, stream, a, g, sides);
}

// Gradients of query, key and value, and of a dense bias, from memory for the planes.
template <int kWidth>
const char* backward_split(const Attention& a, const AttentionGrad& g, void* memory,
                           Stream stream) {
  int64_t at = 0;
  const SplitSides sides = split_sides(a, memory, at);
  const int widths[] = {(int)a.head_dim, (int)a.value_dim};
  const char* error = run_split({{a.query, g.grad_out},
                                 {widths[0], widths[1]},
                                 {sides.query, sides.grad_out},
                                 a.batch,
                                 a.heads,
                                 a.queries},
                                stream);
  if (!error)
    error = run_split({{a.key, a.value},
                       {widths[0], widths[1]},
                       {sides.key, sides.value},
                       a.batch,
                       a.kv_heads,
                       a.keys},
                      stream);
  if (!error && (g.grad_query.data || (g.grad_bias.data && bias_is_dense(a, g.grad_bias))))
    error = run_backward_split<SplitBackward<kWidth, false, true, false>>(a, g, sides, stream);
  if constexpr (kWidth <= 64) {
    if (!error && (g.grad_key.data || g.grad_value.data))
      error = run_backward_split<SplitBackward<kWidth, true, true, true>>(a, g, sides, stream);
  } else {  // the two sums do not fit into the registers together
    if (!error && g.grad_key.data)
      error = run_backward_split<SplitBackward<kWidth, true, true, false>>(a, g, sides, stream);
    if (!error && g.grad_value.data)
      error = run_backward_split<SplitBackward<kWidth, true, false, true>>(a, g, sides, stream);
  }
  return error;
}

}  // namespace mha_ext::cuda

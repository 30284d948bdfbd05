// The tangent of backward for 16-bit types, on the tensor cores.
//   P' = P o (S' - mu),  f = (dO V^T) o M - delta,  f' = (dO' V^T + dO V'^T) o M - delta'
//   dS' = P' o f + P o f',  dS = P o f
//   dV' = (P' o M)^T dO + (P o M)^T dO',  dK' = scale (dS'^T Q + dS^T Q'),
//   dQ' = scale (dS' K + dS K'),  dB' = dS'
// Two kernels of the form of backward: a block owns rows of K and V or of Q and dO, with their
// tangents, and the others come in tiles.
#pragma once
#include "tangent_half.cuh"

namespace mha_ext::cuda {

template <class S_, int kWidth_, bool kOwnsKeys_, bool kScores_, bool kValues_>
struct HalfBackwardTangent {
  using S = S_;
  static constexpr bool kOwnsKeys = kOwnsKeys_;
  static constexpr bool kScores = kScores_, kValues = kValues_;  // dK' or dQ'; dV'
  static constexpr int kWidth = kWidth_, kFragments = 1;         // D and Dv are at most kWidth
  // Beyond 128 columns four tensors do not leave room for 64 rows of each, nor for two tiles.
  static constexpr int kRows = kWidth <= 128 || !kScores ? 64 : 32, kThreads = 2 * kRows;
  static constexpr int kOthers = kWidth <= 64 ? 32 : 16, kStages = kWidth <= 128 ? 2 : 1;
  static constexpr int kColumns = kOthers / 8, kSteps = kOthers / 16;
  static constexpr int kRowBytes = 2 * kWidth, kOwnBytes = kRows * kRowBytes;
  static constexpr int kTileBytes = kOthers * kRowBytes;
  static constexpr Address kOwnScores = 0, kOwnValues = 2 * kOwnBytes;
  static constexpr Address kTiles = (kScores ? 4 : 2) * kOwnBytes;
  // Of each query, of a tile or of the block: lse, lse_low, mu, delta, delta'.
  static constexpr int kNumbers = 5, kNumberRows = kOwnsKeys ? kOthers : kRows;
  static constexpr int kNumberBytes = kNumbers * kNumberRows * 4;
  static constexpr Address kNumbersAt = kTiles + kStages * 4 * kTileBytes;
  static constexpr int kSharedBytes = kNumbersAt + (kOwnsKeys ? kStages : 1) * kNumberBytes;
  DEVICE_MEMBER static Address score_tile(int stage) {
    return kTiles + (Address)(stage * 4 * kTileBytes);
  }
  DEVICE_MEMBER static Address value_tile(int stage) { return score_tile(stage) + 2 * kTileBytes; }
  DEVICE_MEMBER static Address numbers(int stage) {
    return kNumbersAt + (Address)(kOwnsKeys ? stage * kNumberBytes : 0);
  }
};

// Those of queries [q0, q0 + rows); what is missing is zero.
template <class F>
DEVICE void copy_numbers(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                         int64_t b, int64_t h, int64_t q0, int rows, int stage) {
  const void* const from[F::kNumbers] = {a.lse, a.lse_low, t.lse, g.delta, t.delta};
  const int r = thread_id();
  if (r >= F::kNumberRows) return;
  const int64_t at = r < rows ? (b * a.heads + h) * a.queries + q0 + r : 0;
#pragma unroll
  for (int n = 0; n < F::kNumbers; n++)
    copy_async<4>(F::numbers(stage) + 4 * (n * F::kNumberRows + r),
                  (const float*)(from[n] ? from[n] : a.lse) + at, r < rows && from[n] ? 4 : 0);
}

struct TangentNumbers {
  float lse, low, mu, delta, moved;
};
// Of the two columns of fragment j, or of the two rows of any.
template <class F>
DEVICE void load_numbers(int stage, int j, TangentNumbers (&to)[2]) {
  float numbers[2][F::kNumbers];
#pragma unroll
  for (int n = 0; n < F::kNumbers; n++) {
    const Address from = F::numbers(stage) + 4 * n * F::kNumberRows;
    if constexpr (F::kOwnsKeys) {
      const auto two = load_shared<TwoNumbers>(from + 4 * (8 * j + 2 * (lane_id() % 4)));
      numbers[0][n] = two.at[0];
      numbers[1][n] = two.at[1];
    } else {
#pragma unroll
      for (int half = 0; half < 2; half++)
        numbers[half][n] =
            load_shared<float>(from + 4 * (warp_id() * 16 + 8 * half + lane_id() / 4));
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
    to[i] = {row_level(numbers[i][0]), numbers[i][1], numbers[i][2], numbers[i][3], numbers[i][4]};
}

// Z' and Z without the factor of dropout, dS' and dS; hidden pairs are 0.
template <class F>
struct TangentPairs : HalfPairs<F> {
  float moved_z[1][F::kColumns][4], moved_ds[1][F::kColumns][4];
};

// Those of one tile of one warp; false: nothing is visible.
template <class F>
DEVICE bool half_tangent(const Attention& a, const AttentionTangent& t, const HalfPlace& at,
                         const SeenTiles& seen, TangentPairs<F>& pairs) {
  if (!visible_pairs<F>(a, at, seen, pairs)) return false;
  const bool with_scores = moves_scores(t);
  auto &p = pairs.z, &moved = pairs.moved_z, &ds = pairs.ds, &moved_ds = pairs.moved_ds;
  moved_scores<F>(a, t, at, F::score_tile(at.stage), pairs, p, moved);
  if constexpr (F::kScores) {
    const bool own_moves = F::kOwnsKeys ? t.value.data : t.grad_out.data;
    const bool tile_moves = F::kOwnsKeys ? t.grad_out.data : t.value.data;
    multiply_moved<F>(F::kOwnValues, F::value_tile(at.stage), with_scores, own_moves, tile_moves,
                      (int)a.value_dim, ds, moved_ds);
  }
  uint32_t kept[1] = {~0u};
  if (a.dropout.seed) {
    const int64_t other0 = (int64_t)at.tile * F::kOthers;
    if constexpr (F::kOwnsKeys)
      fragment_bits_across<F>(kept_words_across<F>(a, at.b, at.h, other0, at.own0()), kept);
    else
      kept_bits<F>(a, at.b, at.h, at.own0(), other0, kept);
    if constexpr (F::kScores) {
      select_tile<F>(kept, 0, ds);
      select_tile<F>(kept, 0, moved_ds);
    }
  }
  const float keep_scale = (float)a.dropout.keep_scale;
  TangentNumbers queries[2];
#pragma unroll
  for (int j = 0; j < F::kColumns; j++) {
    if (F::kOwnsKeys || j == 0) load_numbers<F>(at.stage, j, queries);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const TangentNumbers& q = queries[F::kOwnsKeys ? e % 2 : e / 2];
      p[0][j][e] = exp2_approximate((p[0][j][e] - q.lse - q.low) * kLog2E);
      moved[0][j][e] = with_scores ? p[0][j][e] * (moved[0][j][e] - q.mu) : 0;
      if constexpr (F::kScores) {
        const float first = with_scores ? fmaf(ds[0][j][e], keep_scale, -q.delta) : 0;
        const float second = fmaf(moved_ds[0][j][e], keep_scale, -q.moved);
        moved_ds[0][j][e] = fmaf(p[0][j][e], second, moved[0][j][e] * first);
        ds[0][j][e] = p[0][j][e] * first;
      }
    }
  }
  if (pairs.partial) {
    if constexpr (F::kScores) {
      select_tile<F>(pairs.visible, 0, ds);
      select_tile<F>(pairs.visible, 0, moved_ds);
    }
    if constexpr (F::kValues) {
      select_tile<F>(pairs.visible, 0, p);
      select_tile<F>(pairs.visible, 0, moved);
    }
  }
  if constexpr (F::kValues)
    if (a.dropout.seed) {
      select_tile<F>(kept, 0, p);
      select_tile<F>(kept, 0, moved);
    }
  return true;
}

// Rows that a block owns; where they are queries, their numbers too.
template <class F>
DEVICE void copy_own_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                             int64_t b, int64_t h, int64_t own0) {
  constexpr bool kKeys = F::kOwnsKeys;
  const int rows = (int)min_of(F::kRows, (kKeys ? a.keys : a.queries) - own0);
  copy_with_tangent<F, F::kRows>(F::kOwnScores, kKeys ? a.key : a.query, kKeys ? t.key : t.query, b,
                                 h, own0, rows, a.head_dim);
  if constexpr (F::kScores)
    copy_with_tangent<F, F::kRows>(F::kOwnValues, kKeys ? a.value : g.grad_out,
                                   kKeys ? t.value : t.grad_out, b, h, own0, rows, a.value_dim);
  if constexpr (!kKeys) copy_numbers<F>(a, g, t, b, h, own0, rows, 0);
}
// A tile of the others, for query head h; where they are queries, their numbers too.
template <class F>
DEVICE void copy_other_tangent(const Attention& a, const AttentionGrad& g,
                               const AttentionTangent& t, int64_t b, int64_t h, int64_t other0,
                               int stage) {
  constexpr bool kKeys = F::kOwnsKeys;
  const int rows = (int)min_of(F::kOthers, (kKeys ? a.queries : a.keys) - other0);
  const int64_t head = kKeys ? h : kv_head(a, h);
  copy_with_tangent<F, F::kOthers>(F::score_tile(stage), kKeys ? a.query : a.key,
                                   kKeys ? t.query : t.key, b, head, other0, rows, a.head_dim);
  copy_with_tangent<F, F::kOthers>(F::value_tile(stage), kKeys ? g.grad_out : a.value,
                                   kKeys ? t.grad_out : t.value, b, head, other0, rows,
                                   a.value_dim);
  if constexpr (kKeys) copy_numbers<F>(a, g, t, b, h, other0, rows, stage);
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    backward_tangent_half_kernel(const GRID_CONSTANT Attention a,
                                 const GRID_CONSTANT AttentionGrad g,
                                 const GRID_CONSTANT AttentionTangent t) {
  using S = typename F::S;
  const int64_t row = grid_row();
  if (row >= a.batch * (F::kOwnsKeys ? a.kv_heads : a.heads)) return;
  const HalfBlock of = half_block<F>(a, row, blockIdx.x, warp_id() * 16);
  const Rows& result = F::kOwnsKeys ? g.grad_key : g.grad_query;
  const bool with_scores = moves_scores(t);
  const bool dense_bias = !F::kOwnsKeys && g.grad_bias.data && bias_is_dense(a, g.grad_bias);

  float score_sum[1][F::kWidth / 8][4] = {}, value_sum[1][F::kWidth / 8][4] = {};
  if constexpr (F::kValues)
    if (a.uniform_empty_rows && t.grad_out.data)
      for (int h = of.head * of.group; h < (of.head + 1) * of.group; h++)
        add_uniform_rows<F>(a, t.grad_out, of.b, h, of.own0, value_sum);
  copy_own_tangent<F>(a, g, t, of.b, of.head, of.block0);
  const int count = of.count();
  HalfPlace at = of.before();
  // Each turn fetches a tile, before or, with one stage, after it computes the one before.
#pragma unroll 1
  for (int next = 0; next <= count; next++) {
    copy_wait<0>();
    sync_block();  // the tile before is there, and with two stages the place of the next is free
    const HalfPlace to = of.after(at);
    const auto fetch = [&](int stage) {
      if (next < count)
        copy_other_tangent<F>(a, g, t, of.b, to.h, (int64_t)to.tile * F::kOthers, stage);
      copy_commit();
    };
    if constexpr (F::kStages == 2) fetch(next & 1);
    at.stage = F::kStages == 2 ? (next & 1) ^ 1 : 0;
    TangentPairs<F> pairs;
    if (next > 0 && half_tangent<F>(a, t, at, of.seen, pairs)) {
      // All are rounded before the first product: registers are scarce.
      uint32_t z[1][F::kSteps][4], moved_z[1][F::kSteps][4];
      uint32_t ds[1][F::kSteps][4], moved_ds[1][F::kSteps][4];
      if constexpr (F::kValues) {
        round_fragments<S>(pairs.z, z);
        round_fragments<S>(pairs.moved_z, moved_z);
      }
      if constexpr (F::kScores) {
        round_fragments<S>(pairs.ds, ds);
        round_fragments<S>(pairs.moved_ds, moved_ds);
        if (dense_bias) store_dense_bias<F>(a, g.grad_bias, at, pairs.moved_ds);
      }
      if constexpr (F::kValues)
        if (g.grad_value.data)
          add_two_tiles<F>(moved_z, z, with_scores, t.grad_out.data, pairs, F::value_tile(at.stage),
                           (int)a.value_dim, value_sum);
      if constexpr (F::kScores)
        if (result.data)
          add_two_tiles<F>(moved_ds, ds, true, (F::kOwnsKeys ? t.query : t.key).data, pairs,
                           F::score_tile(at.stage), (int)a.head_dim, score_sum);
    }
    if constexpr (F::kStages == 1) {
      sync_block();  // the tile has been read
      fetch(0);
    }
    at = to;
  }
  copy_wait<0>();

  const int64_t rows = F::kOwnsKeys ? a.keys : a.queries;
  if constexpr (F::kScores)
    if (result.data) {
      const float scale = (float)a.scale, factor[1][2] = {{scale, scale}};
      store_fragments<S>(result, of.b, of.head, at.own0(), rows, (int)a.head_dim, factor,
                         score_sum);
    }
  if constexpr (F::kValues)
    if (g.grad_value.data) {
      const float scale = (float)a.dropout.keep_scale, factor[1][2] = {{scale, scale}};
      store_fragments<S>(g.grad_value, of.b, of.head, at.own0(), rows, (int)a.value_dim, factor,
                         value_sum);
    }
}

// One chunk of the sum of kRows queries and kOthers keys of one owner's tile of grad_bias.
template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    bias_tangent_half_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g,
                             const GRID_CONSTANT AttentionTangent t, const BiasPlan plan,
                             float* sums) {
  constexpr int kParts = (int)kTile / F::kOthers, kRowParts = (int)kTile / F::kRows;
  const int64_t chunk = blockIdx.x % plan.chunks;
  const int part = (int)(blockIdx.x / plan.chunks % kParts);
  const int row0 = (int)(blockIdx.x / plan.chunks / kParts % kRowParts) * F::kRows;
  const int64_t owner = blockIdx.x / plan.chunks / kParts / kRowParts;
  const BiasTile tile = bias_tile(plan, owner);
  const int64_t k0 = tile.k0 + part * F::kOthers;
  const int key_tile = (int)(k0 / F::kOthers), lane = lane_id();
  float total[F::kColumns][4] = {};
  for_each_term(a, plan, tile, chunk, [&](int64_t b, int64_t h, int64_t q) {
    const int64_t q0 = q + row0, own0 = q0 + warp_id() * 16;
    const SeenTiles seen = seen_tiles<F::kOthers>(a, b, q0, min_of(F::kRows, a.queries - q0));
    if (key_tile < seen.any || key_tile >= seen.any_end) return;
    sync_block();  // what stood there has been read
    copy_own_tangent<F>(a, g, t, b, h, q0);
    copy_other_tangent<F>(a, g, t, b, h, k0, 0);
    copy_commit();
    copy_wait<0>();
    sync_block();
    TangentPairs<F> pairs;
    const SeenTiles rows = seen_tiles<F::kOthers>(a, b, own0, min_of(16, a.queries - own0));
    if (!half_tangent<F>(a, t, {b, (int)(own0 / 16), (int)h, key_tile, 0}, rows, pairs)) return;
#pragma unroll
    for (int j = 0; j < F::kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (own0 + 8 * (e / 2) + lane / 4 < a.queries) total[j][e] += pairs.moved_ds[0][j][e];
  });
#pragma unroll
  for (int j = 0; j < F::kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      store_bias_sum<typename F::S>(
          a, g.grad_bias, plan, owner, chunk, row0 + warp_id() * 16 + 8 * (e / 2) + lane / 4,
          part * F::kOthers + 8 * j + 2 * (lane % 4) + e % 2, total[j][e], sums);
}

template <class F>
const char* run_backward_tangent_half(const Attention& a, const AttentionGrad& g,
                                      const AttentionTangent& t, Stream stream) {
  const Grid grid{ceil_div(F::kOwnsKeys ? a.keys : a.queries, F::kRows),
                  a.batch * (F::kOwnsKeys ? a.kv_heads : a.heads)};
  return launch(backward_tangent_half_kernel<F>, grid, F::kThreads, F::kSharedBytes, stream, a, g,
                t);
}

template <class S, int kWidth>
const char* backward_tangent_half(const Attention& a, const AttentionGrad& g,
                                  const AttentionTangent& t, void* scratch, Stream stream) {
  using OfQueries = HalfBackwardTangent<S, kWidth, false, true, false>;
  const bool scores = g.grad_query.data || (g.grad_bias.data && bias_is_dense(a, g.grad_bias));
  const char* error = run_delta_tangent<S>(a, g, t, stream);
  if (!error && scores) error = run_backward_tangent_half<OfQueries>(a, g, t, stream);
  if constexpr (kWidth <= 128) {
    using OfKeys = HalfBackwardTangent<S, kWidth, true, true, true>;
    if (!error && (g.grad_key.data || g.grad_value.data))
      error = run_backward_tangent_half<OfKeys>(a, g, t, stream);
  } else {  // the two sums do not fit into the registers together
    if (!error && g.grad_key.data)
      error = run_backward_tangent_half<HalfBackwardTangent<S, kWidth, true, true, false>>(a, g, t,
                                                                                           stream);
    if (!error && g.grad_value.data)
      error = run_backward_tangent_half<HalfBackwardTangent<S, kWidth, true, false, true>>(a, g, t,
                                                                                           stream);
  }
  if (error) return error;
  // Where the bias is constant along the keys, its gradient is that of lse, and so in the tangent.
  const void* delta = t.delta ? t.delta : g.delta;
  return run_bias<S>(
      a, g.grad_bias, t.grad_lse, delta, scratch, stream, [&](const BiasPlan& plan, float* sums) {
        constexpr int64_t kParts = kTile / OfQueries::kOthers * (kTile / OfQueries::kRows);
        const Grid grid{owner_count(plan) * kParts * plan.chunks, 1};
        return launch(bias_tangent_half_kernel<OfQueries>, grid, OfQueries::kThreads,
                      OfQueries::kSharedBytes, stream, a, g, t, plan, sums);
      });
}

template <class S>
const char* backward_tangent_of_half(const Attention& given, const AttentionGrad& g,
                                     const AttentionTangent& t, void* scratch, Stream stream) {
  Attention a = given;
  if (const char* error = pack_mask(a, scratch, stream)) return error;
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (width <= 64) return backward_tangent_half<S, 64>(a, g, t, scratch, stream);
  if (width <= 128) return backward_tangent_half<S, 128>(a, g, t, scratch, stream);
  return backward_tangent_half<S, 256>(a, g, t, scratch, stream);
}

}  // namespace mha_ext::cuda

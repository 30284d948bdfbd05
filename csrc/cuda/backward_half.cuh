// Backward for 16-bit types, on the tensor cores.
//   P = exp(S - lse), Z = P o M, dP = (dO V^T) o M, dS = P o (dP - delta)
//   dV = Z^T dO, dK = scale dS^T Q, dQ = scale dS K, dB = dS
// Two kernels of one form: a block owns 64 rows, of K and V or of Q and dO, 16 a warp, and the
// others come in tiles, the next one while this one is used. Then S = owned scores times scores of
// the tile, dP = owned values times values of the tile, and the sums are dS times the tile's scores
// (dK or dQ) and Z times its values (dV). Where the cotangent is that of P, dP is read: its tile
// [queries][keys] comes in place of the values.
#pragma once
#include "backward.cuh"
#include "half.cuh"

namespace mha_ext::cuda {

template <class S_, int kWidth_, bool kOwnsKeys_, bool kScores_, bool kValues_,
          bool kWeights_ = false>
struct HalfBackward {
  using S = S_;
  static constexpr bool kOwnsKeys = kOwnsKeys_;
  static constexpr bool kScores = kScores_, kValues = kValues_;  // dK or dQ; dV
  static constexpr bool kWeights = kWeights_;                    // dP is given
  static constexpr int kWidth = kWidth_, kFragments = 1;         // D and Dv are at most kWidth
  static constexpr int kThreads = 128, kRows = 64;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // A third block of owners of queries is worth a few bytes that it spills: the gradients with a
  // bias of 2048 x 64 took 5.4 ms on an H100, with two blocks 6.4.
  static constexpr int kBlocks = kWidth <= 64 && !kOwnsKeys ? 3 : 1;  // of a multiprocessor
#else
  static constexpr int kBlocks = 1;
#endif
  static constexpr int kOthers = kWidth <= 64 ? 64 : kWidth <= 128 ? 32 : 16;  // rows of a tile
  static constexpr int kColumns = kOthers / 8, kSteps = kOthers / 16;
  static constexpr int kRowBytes = 2 * kWidth, kOwnBytes = kRows * kRowBytes;
  static constexpr int kOwnTiles = kWeights ? 1 : 2;
  static constexpr int kTileBytes = kOthers * kRowBytes, kNumberBytes = 3 * kOthers * 4;
  static constexpr Address kOwnScores = 0, kOwnValues = kOwnBytes;
  static constexpr int kSharedBytes = kOwnTiles * kOwnBytes + 4 * kTileBytes + 2 * kNumberBytes;
  DEVICE_MEMBER static Address score_tile(int stage) {
    return (Address)(kOwnTiles * kOwnBytes + 2 * stage * kTileBytes);
  }
  DEVICE_MEMBER static Address value_tile(int stage) { return score_tile(stage) + kTileBytes; }
  // lse, lse_low and delta of the queries of a tile.
  DEVICE_MEMBER static Address numbers(int stage) {
    return (Address)(kOwnTiles * kOwnBytes + 4 * kTileBytes + stage * kNumberBytes);
  }
  // A tile of pairs.
  static constexpr int kQueries = kOwnsKeys ? kOthers : kRows, kKeys = kOwnsKeys ? kRows : kOthers;
  static_assert(!kWeights || kQueries * kPairBytes <= kTileBytes);
};

// P = exp(S - lse - low), dS = P (dP - delta). S - lse comes first: lse log2 e may overflow.
struct QueryNumbers {
  float lse, low, delta;
};
// Of row 8 half + g of a warp that owns 16 queries.
DEVICE void own_numbers(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h,
                        int64_t i0, QueryNumbers (&to)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int64_t i = i0 + 8 * half + lane_id() / 4, at = (b * a.heads + h) * a.queries + i;
    to[half] = {0, 0, 0};
    if (i < a.queries)
      to[half] = {row_level(((const float*)a.lse)[at]),
                  a.lse_low ? ((const float*)a.lse_low)[at] : 0, ((const float*)g.delta)[at]};
  }
}

// Where a warp is: head h and its own 16 rows, against a tile of the others.
struct HalfPlace {
  int64_t b;
  int own, h, tile, stage;  // own: in units of 16 rows; registers are scarce
  DEVICE_MEMBER int64_t own0() const { return (int64_t)own * 16; }
};

// What a warp knows of a tile's pairs; hidden ones are 0 in z and ds.
template <class F>
struct HalfPairs {
  float z[1][F::kColumns][4], ds[1][F::kColumns][4];
  uint32_t visible[1];
  bool partial;
};

// The bits of what is visible as far as lengths, band and mask say; whether anything is.
template <class F>
DEVICE bool visible_pairs(const Attention& a, const HalfPlace& at, const SeenTiles& seen,
                          HalfPairs<F>& pairs) {
  pairs.visible[0] = ~0u;
  pairs.partial = false;
  if (at.tile < seen.any || at.tile >= seen.any_end) return false;
  const int64_t other0 = (int64_t)at.tile * F::kOthers;
  if (!a.mask.data && at.tile >= seen.all && at.tile < seen.all_end) return true;
  const int lane = lane_id();
  if constexpr (F::kOwnsKeys) {
    const int rows = (int)min_of(F::kOthers, a.queries - other0);
    const uint32_t words = visible_words_across<F>(a, at.b, at.h, other0, rows, at.own0());
    if (!ballot(words != 0)) return false;
    const uint32_t every =
        (lane < F::kOthers ? 0xffffu : 0) | (lane + kWarp < F::kOthers ? 0xffff0000u : 0);
    pairs.partial = ballot(words != every) != 0;
    if (pairs.partial) fragment_bits_across<F>(words, pairs.visible);
  } else {
    const int rows = (int)min_of(16, a.queries - at.own0());
    const uint64_t word = visible_word(a, at.b, at.h, at.own0(), rows, other0, F::kOthers);
    if (!ballot(word != 0)) return false;
    pairs.partial = ballot(lane < 16 && word != first_bits(F::kOthers)) != 0;
    if (pairs.partial) fragment_bits<F>(word, pairs.visible);
  }
  return true;
}

// dP of this warp's pairs, from a tile of it.
template <class F>
DEVICE void load_pairs(Address tile, float (&dp)[1][F::kColumns][4]) {
  using S = typename F::S;
  for_each_copied<F>(tile, [&](int m, int j, int half, uint32_t pair) {
    dp[m][j][2 * half] = widen(S{(uint16_t)pair});
    dp[m][j][2 * half + 1] = widen(S{(uint16_t)(pair >> 16)});
  });
}

struct alignas(8) TwoNumbers {
  float at[2];
};

// From the products in z and in ds: z = P o M without its factor, ds = dS.
template <class F>
DEVICE void finish_pairs(const Attention& a, const HalfPlace& at, const QueryNumbers (&own)[2],
                         HalfPairs<F>& pairs) {
  const int64_t other0 = (int64_t)at.tile * F::kOthers;
  auto &p = pairs.z, &ds = pairs.ds;
  scale_fragments((float)a.scale, p);
  if (a.bias.data) {
    const auto add = [&] {
      if constexpr (sizeof(typename F::S) == 2)
        if (bias_is_copied<F>(a))
          return add_copied_bias<F>(bias_tile<F>(at.stage), p, pairs.visible);
      return add_bias_tile<F>(a, at.b, at.h, at.own0(), other0, p, pairs.visible);
    };
    pairs.partial |= ballot(add()) != 0;
  }
  uint32_t kept[1] = {~0u};
  if (a.dropout.seed) {
    if constexpr (F::kOwnsKeys)
      fragment_bits_across<F>(kept_words_across<F>(a, at.b, at.h, other0, at.own0()), kept);
    else
      kept_bits<F>(a, at.b, at.h, at.own0(), other0, kept);
    if constexpr (F::kScores) {
      select_tile<F>(kept, 0, ds);
      scale_fragments((float)a.dropout.keep_scale, ds);
    }
  }
#pragma unroll
  for (int j = 0; j < F::kColumns; j++) {
    QueryNumbers queries[2];  // of the two columns, or of the two rows
    if constexpr (F::kOwnsKeys) {
      const Address from = F::numbers(at.stage) + 4 * (8 * j + 2 * (lane_id() % 4));
      const auto lse = load_shared<TwoNumbers>(from);
      const auto lse_low = load_shared<TwoNumbers>(from + 4 * F::kOthers);
      const auto delta = load_shared<TwoNumbers>(from + 8 * F::kOthers);
#pragma unroll
      for (int i = 0; i < 2; i++) queries[i] = {row_level(lse.at[i]), lse_low.at[i], delta.at[i]};
    } else {
      queries[0] = own[0];
      queries[1] = own[1];
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const QueryNumbers& q = queries[F::kOwnsKeys ? e % 2 : e / 2];
      p[0][j][e] = Softmax<typename F::S>::power(p[0][j][e] - q.lse - q.low);
      if constexpr (F::kScores) ds[0][j][e] = p[0][j][e] * (ds[0][j][e] - q.delta);
    }
  }
  if (pairs.partial) {
    select_tile<F>(pairs.visible, 0, p);
    if constexpr (F::kScores) select_tile<F>(pairs.visible, 0, ds);
  }
  if constexpr (F::kValues)
    if (a.dropout.seed) select_tile<F>(kept, 0, p);
}

// z = P o M without its factor, ds = dS of one tile of one warp; false: nothing is visible.
template <class F>
DEVICE bool half_gradient(const Attention& a, const HalfPlace& at, const SeenTiles& seen,
                          const QueryNumbers (&own)[2], HalfPairs<F>& pairs) {
  using S = typename F::S;
  if (!visible_pairs<F>(a, at, seen, pairs)) return false;
  const int row = warp_id() * 16;
  auto &p = pairs.z, &ds = pairs.ds;
  multiply_rows<S, F::kRowBytes>(F::kOwnScores, row, F::score_tile(at.stage), (int)a.head_dim, p);
  if constexpr (F::kWeights)
    load_pairs<F>(F::value_tile(at.stage), ds);
  else if constexpr (F::kScores)
    multiply_rows<S, F::kRowBytes>(F::kOwnValues, row, F::value_tile(at.stage), (int)a.value_dim,
                                   ds);
  finish_pairs<F>(a, at, own, pairs);
  return true;
}

// sum += pairs times the rows of a tile; hidden pairs are 0, but 0 * NaN is NaN. kSigned: of any
// sign where the tile is not finite.
template <class F, bool kSigned = false>
DEVICE void add_rounded(const uint32_t (&x)[1][F::kSteps][4], bool partial,
                        const uint32_t (&visible)[1], Address tile, int columns,
                        float (&sum)[1][F::kWidth / 8][4]) {
  using S = typename F::S;
  if (!partial) {
    multiply_across<S, F::kRowBytes, false>(x, tile, columns, sum);
    return;
  }
  const bool dirty = multiply_across<S, F::kRowBytes, true>(x, tile, columns, sum);
  if (ballot(dirty)) add_nonfinite<S, F::kRowBytes, kSigned>(x, visible, tile, columns, sum);
}
template <class F>
DEVICE void add_tile(const float (&pairs)[1][F::kColumns][4], bool partial,
                     const uint32_t (&visible)[1], Address tile, int columns,
                     float (&sum)[1][F::kWidth / 8][4]) {
  uint32_t x[1][F::kSteps][4];
  round_fragments<typename F::S>(pairs, x);
  add_rounded<F>(x, partial, visible, tile, columns, sum);
}

template <class F>
DEVICE void store_dense_bias(const Attention& a, const Pairs& bias, const HalfPlace& at,
                             const float (&ds)[1][F::kColumns][4]) {
  using S = typename F::S;
  const int64_t column0 = (int64_t)at.tile * F::kOthers;
  if (bias_has_pairs<S>(a, bias) && column0 + F::kOthers <= a.keys) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t i = at.own0() + 8 * half + lane_id() / 4;
      if (i >= a.queries) continue;
      S* to = (S*)bias.data + (at.b * bias.batch + at.h * bias.head + i * bias.query + column0) +
              2 * (lane_id() % 4);
#pragma unroll
      for (int j = 0; j < F::kColumns; j++)
        narrow_pair(ds[0][j][2 * half], ds[0][j][2 * half + 1], to + 8 * j);
    }
    return;
  }
  for_each_pair<F>(a, bias, at.b, at.h, at.own0(), column0,
                   [&](int, int j, int e, int64_t to) { store_bias<S>(a, bias, to, ds[0][j][e]); });
}

// Rows that a block owns: of scores, and of values where dP is their product.
template <class F>
DEVICE void copy_own(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h,
                     int64_t own0) {
  using S = typename F::S;
  const int rows = (int)min_of(F::kRows, (F::kOwnsKeys ? a.keys : a.queries) - own0);
  const Rows &scores = F::kOwnsKeys ? a.key : a.query,
             &values = F::kOwnsKeys ? a.value : g.grad_out;
  copy_rows<F::kRows, F::kRowBytes, F::kThreads>(F::kOwnScores, head_rows<S>(scores, b, h), own0,
                                                 rows, (int)a.head_dim * 2);
  if constexpr (F::kScores && !F::kWeights)
    copy_rows<F::kRows, F::kRowBytes, F::kThreads>(F::kOwnValues, head_rows<S>(values, b, h), own0,
                                                   rows, (int)a.value_dim * 2);
}
// lse, lse_low and delta of the queries of a tile.
template <class F>
DEVICE void copy_numbers(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h,
                         int64_t q0, int stage) {
  const int r = thread_id();
  if (r >= F::kOthers) return;
  const bool exists = q0 + r < a.queries;
  const int64_t at = exists ? (b * a.heads + h) * a.queries + q0 + r : 0;
  const Address to = F::numbers(stage) + 4 * r;
  const void* lse_low = a.lse_low ? a.lse_low : a.lse;
  copy_async<4>(to, (const float*)a.lse + at, exists ? 4 : 0);
  copy_async<4>(to + 4 * F::kOthers, (const float*)lse_low + at, exists && a.lse_low ? 4 : 0);
  copy_async<4>(to + 8 * F::kOthers, (const float*)g.delta + at, exists ? 4 : 0);
}
// A tile of the others, for query head h; where they are queries, their numbers too.
template <class F>
DEVICE void copy_others(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h,
                        int64_t own0, int64_t other0, int stage) {
  using S = typename F::S;
  const int64_t head = F::kOwnsKeys ? h : kv_head(a, h);
  const int rows = (int)min_of(F::kOthers, (F::kOwnsKeys ? a.queries : a.keys) - other0);
  const Rows &scores = F::kOwnsKeys ? a.query : a.key,
             &values = F::kOwnsKeys ? g.grad_out : a.value;
  copy_rows<F::kOthers, F::kRowBytes, F::kThreads>(
      F::score_tile(stage), head_rows<S>(scores, b, head), other0, rows, (int)a.head_dim * 2);
  const int64_t q0 = F::kOwnsKeys ? other0 : own0, k0 = F::kOwnsKeys ? own0 : other0;
  if (bias_is_copied<F>(a)) copy_pairs<F>(a, a.bias, b, h, q0, k0, bias_tile<F>(stage));
  if constexpr (F::kWeights)
    copy_pairs<F>(a, g.grad_weights, b, h, q0, k0, F::value_tile(stage));
  else
    copy_rows<F::kOthers, F::kRowBytes, F::kThreads>(
        F::value_tile(stage), head_rows<S>(values, b, head), other0, rows, (int)a.value_dim * 2);
  if constexpr (F::kOwnsKeys) copy_numbers<F>(a, g, b, h, other0, stage);
}

// dV += Z^T dO of rows without any key.
template <class F>
DEVICE void add_uniform_rows(const Attention& a, const Rows& grad_out, int64_t b, int64_t h,
                             int64_t k0, float (&sum)[1][F::kWidth / 8][4]) {
  using S = typename F::S;
  for_each_empty_row<float>(a, b, h, [&](int64_t i) {
    const S* row = row_of<S>(grad_out, b, h, i);
    float weight[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const bool kept = !a.dropout.seed ||
                        keeps(a.dropout, a.origin.batch + b, a.origin.head + h, a.origin.query + i,
                              a.origin.key + k0 + 8 * half + lane_id() / 4);
      weight[half] = kept ? 1 / (float)a.keys : 0;
    }
#pragma unroll
    for (int n = 0; n < F::kWidth / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int d = 8 * n + lane_id() % 4 * 2 + e;
        if (d >= a.value_dim) continue;
        const float grad = widen(row[d]);
        sum[0][n][e] = fmaf(weight[0], grad, sum[0][n][e]);
        sum[0][n][2 + e] = fmaf(weight[1], grad, sum[0][n][2 + e]);
      }
  });
}

template <class F>
DEVICE SeenTiles other_tiles(const Attention& a, int64_t b, int64_t own0, int64_t rows) {
  if constexpr (F::kOwnsKeys)
    return seeing_tiles<F::kOthers>(a, b, own0, rows);
  else
    return seen_tiles<F::kOthers>(a, b, own0, rows);
}

// What a block of threads goes over: the tiles that its rows see, or are seen by, of each head that
// shares its keys, one head after the other.
struct HalfBlock {
  int64_t b, rows, block0, own0;  // own0: of this warp, of `rows` in all
  int head, group;                // of what is owned; query heads of it
  SeenTiles block, seen;          // of the block, of this warp
  DEVICE_MEMBER int count() const {
    return group * (block.any_end > block.any ? block.any_end - block.any : 0);
  }
  DEVICE_MEMBER HalfPlace before() const {
    return {b, (int)(own0 / 16), head * group - 1, block.any_end - 1, 0};
  }
  DEVICE_MEMBER HalfPlace after(const HalfPlace& at) const {
    const bool wraps = at.tile + 1 == block.any_end;
    return {at.b, at.own, at.h + (wraps ? 1 : 0), wraps ? block.any : at.tile + 1, at.stage};
  }
};
// own: where the rows of this warp begin in the block, which is the nth of its head.
template <class F>
DEVICE HalfBlock half_block(const Attention& a, int64_t row, int64_t n, int own) {
  HalfBlock of;
  const uint32_t heads = (uint32_t)(F::kOwnsKeys ? a.kv_heads : a.heads);
  of.b = (uint32_t)row / heads;
  of.head = (int)((uint32_t)row % heads);
  of.group = F::kOwnsKeys ? (int)((uint32_t)a.heads / heads) : 1;
  of.rows = F::kOwnsKeys ? a.keys : a.queries;
  // Under a causal mask early keys and late queries have the most to do.
  const int64_t blocks = ceil_div(of.rows, F::kRows);
  of.block0 = (F::kOwnsKeys ? n : blocks - 1 - n) * F::kRows;
  of.own0 = of.block0 + own;
  of.block = other_tiles<F>(a, of.b, of.block0, min_of(F::kRows, of.rows - of.block0));
  of.seen = {0, 0, 0, 0};
  if (of.own0 < of.rows) of.seen = other_tiles<F>(a, of.b, of.own0, min_of(16, of.rows - of.own0));
  return of;
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, F::kBlocks)
    backward_half_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g) {
  const int64_t heads = F::kOwnsKeys ? a.kv_heads : a.heads;
  if (grid_row() >= a.batch * heads) return;
  const HalfBlock of = half_block<F>(a, bias_row(a, grid_row(), heads), blockIdx.x, warp_id() * 16);
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
  copy_own<F>(a, g, b, of.head, of.block0);
  HalfPlace at = of.before();
  Cleaning cleaning(a);
  // Each turn fetches a tile and computes the one before.
#pragma unroll 1
  for (int next = 0; next <= count; next++) {
    copy_wait<0>();
    at.stage = (next & 1) ^ 1;
    const bool looks = next > 0 && cleaning.looks_at(a, of.block, at.tile);
    bool nonfinite = false;
    if (looks) {
      if constexpr (F::kScores)
        nonfinite |= copied_nonfinite<F, F::kOthers>(F::score_tile(at.stage), (int)a.head_dim);
      if constexpr (F::kValues)
        nonfinite |= copied_nonfinite<F, F::kOthers>(F::value_tile(at.stage), (int)a.value_dim);
    }
    // The tile before is there, and the place of the next is free.
    const bool finite = cleaning.sync(looks, nonfinite);
    const HalfPlace to = of.after(at);
    if (next < count)
      copy_others<F>(a, g, b, to.h, of.block0, (int64_t)to.tile * F::kOthers, next & 1);
    copy_commit();
    HalfPairs<F> pairs;
    if (next > 0 && half_gradient<F>(a, at, of.seen, own, pairs)) {
      cleaning.met = pairs.partial;
      if (finite) pairs.partial = false;
      if constexpr (F::kValues)
        add_tile<F>(pairs.z, pairs.partial, pairs.visible, F::value_tile(at.stage),
                    (int)a.value_dim, value_sum);
      if constexpr (F::kScores) {
        if (dense_bias) store_dense_bias<F>(a, g.grad_bias, at, pairs.ds);
        if (with_scores)
          add_tile<F>(pairs.ds, pairs.partial, pairs.visible, F::score_tile(at.stage),
                      (int)a.head_dim, score_sum);
      }
    }
    at = to;
  }
  copy_wait<0>();

  if constexpr (F::kScores)
    if (with_scores) {
      const float scale = (float)a.scale, factor[1][2] = {{scale, scale}};
      store_fragments<typename F::S>(F::kOwnsKeys ? g.grad_key : g.grad_query, b, of.head,
                                     at.own0(), of.rows, (int)a.head_dim, factor, score_sum);
    }
  if constexpr (F::kValues)
    if (g.grad_value.data) {
      const float scale = (float)a.dropout.keep_scale, factor[1][2] = {{scale, scale}};
      store_fragments<typename F::S>(g.grad_value, b, of.head, at.own0(), of.rows, (int)a.value_dim,
                                     factor, value_sum);
    }
}

}  // namespace mha_ext::cuda

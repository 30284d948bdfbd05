// Backward without tensor cores, for float32 and float64.
//   P = exp(S - lse), Z = P o M, dP = (dO V^T) o M, dS = P o (dP - delta)
//   dV = Z^T dO, dK = scale dS^T Q, dQ = scale dS K, dB = dS
#pragma once
#include "gradient_wide.cuh"

namespace mha_ext::cuda {

// The query that row 4 y + n, or column x + 16 n, of this thread is.
template <bool kOwnsKeys>
DEVICE int64_t query_of(const TilePlace& at, int n) {
  return at.q0 + (kOwnsKeys ? thread_id() % 16 + 16 * n : thread_id() / 16 * 4 + n);
}
// A number of each query; 0 where there is no such query, or no such number.
template <bool kOwnsKeys, class T>
DEVICE void query_numbers(const Attention& a, const TilePlace& at, const void* from, T (&to)[4]) {
  const T* numbers = (const T*)from + (at.b * a.heads + at.h) * a.queries;
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const int64_t q = query_of<kOwnsKeys>(at, n);
    to[n] = from && q < a.queries ? numbers[q] : (T)0;
  }
}

// p += Q_rows K_rows^T, with rows and columns as they are owned.
template <class F, bool kOwnsKeys>
DEVICE void add_scores(const Attention& a, const TilePlace& at, const Rows& queries,
                       const Rows& keys, int64_t width, typename F::T (&p)[4][4]) {
  const auto q = tile_rows<typename F::S>(queries, at.b, at.h, at.q0, a.queries);
  const auto k = tile_rows<typename F::S>(keys, at.b, at.kv, at.k0, a.keys);
  if constexpr (kOwnsKeys)
    add_products<F>(k, q, (int)width, p);
  else
    add_products<F>(q, k, (int)width, p);
}

// P = exp(S - lse); a pair that is hidden holds anything.
template <class F, bool kOwnsKeys>
DEVICE void probabilities(const Attention& a, const TilePlace& at, typename F::T (&p)[4][4]) {
  using T = typename F::T;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) p[i][j] = 0;
  add_scores<F, kOwnsKeys>(a, at, a.query, a.key, a.head_dim, p);
  scale_and_bias<F, kOwnsKeys>(a, at, p);
  T high[4], low[4];
  query_numbers<kOwnsKeys>(a, at, a.lse, high);
  query_numbers<kOwnsKeys>(a, at, a.lse_low, low);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int n = kOwnsKeys ? j : i;
      p[i][j] = Softmax<T>::power(p[i][j] - row_level(high[n]) - low[n]);
    }
}

template <class F, bool kOwnsKeys>
DEVICE void select(bool whether, int set, typename F::T (&p)[4][4]) {
  if (!whether) return;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (!tile_bit<F, kOwnsKeys>(set, thread_id() / 16 * 4 + i, thread_id() % 16 + 16 * j))
        p[i][j] = 0;
}
// Whether dropout drops a pair: dP is 0 there, else it has its factor.
template <class F, bool kOwnsKeys>
DEVICE void drop_gradient(const Attention& a, typename F::T (&dp)[4][4]) {
  if (!a.dropout.seed) return;
  select<F, kOwnsKeys>(true, 1, dp);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) dp[i][j] *= (typename F::T)a.dropout.keep_scale;
}

// The cotangent of P itself, where it is given.
template <class F, bool kOwnsKeys>
DEVICE void read_pairs(const Attention& a, const Pairs& from, const TilePlace& at,
                       typename F::T (&to)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int row = thread_id() / 16 * 4 + i, column = thread_id() % 16 + 16 * j;
      const int64_t q = at.q0 + (kOwnsKeys ? column : row), k = at.k0 + (kOwnsKeys ? row : column);
      if (q < a.queries && k < a.keys)
        to[i][j] = widen(
            ((const typename F::S*)
                 from.data)[at.b * from.batch + at.h * from.head + q * from.query + k * from.key]);
    }
}

struct BackwardTask {
  static constexpr int kTerms = 1;
  Attention a;
  AttentionGrad g;

  DEVICE_MEMBER const Rows& factors(Output output, int) const {
    return output == Output::kQuery ? a.key : output == Output::kKey ? a.query : g.grad_out;
  }
  DEVICE_MEMBER const Rows& uniform_factors() const { return g.grad_out; }

  // Z without the factor of dropout, or dS.
  template <class F, Output kOutput>
  DEVICE_MEMBER void pairs(const TilePlace& at, bool partial,
                           typename F::T (&found)[1][4][4]) const {
    using T = typename F::T;
    constexpr bool kOwnsKeys = kOutput != Output::kQuery;
    T(&p)[4][4] = found[0];
    probabilities<F, kOwnsKeys>(a, at, p);
    if constexpr (kOutput == Output::kValue) {
      if (a.dropout.seed) select<F, kOwnsKeys>(true, 1, p);
    } else {
      T dp[4][4] = {}, delta[4];
      if (g.grad_weights.data)
        read_pairs<F, kOwnsKeys>(a, g.grad_weights, at, dp);
      else
        add_scores<F, kOwnsKeys>(a, at, g.grad_out, a.value, a.value_dim, dp);
      drop_gradient<F, kOwnsKeys>(a, dp);
      query_numbers<kOwnsKeys>(a, at, g.delta, delta);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) p[i][j] *= dp[i][j] - delta[kOwnsKeys ? j : i];
    }
    select<F, kOwnsKeys>(partial, 0, p);
  }
};

// grad_query, grad_key and grad_bias, with up to kWidth columns a block.
template <class S, int kWidth>
const char* backward_scores(const Attention& a, const AttentionGrad& g, void* scratch,
                            Stream stream) {
  using F = Wide<S, kWidth>;
  const BackwardTask task{a, g};
  const char* error = run_wide_scores<F>(task, stream);
  return error ? error : run_wide_bias<Wide<S, 64>>(task, g.grad_lse, g.delta, scratch, stream);
}

template <class S, int kWidth>
const char* backward_wide(const Attention& a, const AttentionGrad& g, void* scratch,
                          Stream stream) {
  const char* error = run_delta<S>(a, g, stream);
  if (!error) error = backward_scores<S, kWidth>(a, g, scratch, stream);
  if (error || !g.grad_value.data) return error;
  return run_wide_gradient<Wide<S, kWidth>, Output::kValue>(BackwardTask{a, g}, stream);
}

}  // namespace mha_ext::cuda

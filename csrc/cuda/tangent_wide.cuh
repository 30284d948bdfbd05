// The tangents of forward and of backward for float32 and float64, in multiply-adds.
#pragma once
#include "backward_wide.cuh"
#include "tangent.cuh"

namespace mha_ext::cuda {

// S'; a pair that is hidden holds anything.
template <class F, bool kOwnsKeys>
DEVICE void scores_tangent(const Attention& a, const AttentionTangent& t, const TilePlace& at,
                           typename F::T (&s)[4][4]) {
  using T = typename F::T;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) s[i][j] = 0;
  if (t.query.data) add_scores<F, kOwnsKeys>(a, at, t.query, a.key, a.head_dim, s);
  if (t.key.data) add_scores<F, kOwnsKeys>(a, at, a.query, t.key, a.head_dim, s);
  const T scale = (T)a.scale;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int row = thread_id() / 16 * 4 + i, column = thread_id() % 16 + 16 * j;
      const int64_t q = at.q0 + (kOwnsKeys ? column : row), k = at.k0 + (kOwnsKeys ? row : column);
      s[i][j] *= scale;
      if (t.bias.data && q < a.queries && k < a.keys) {
        const int64_t from =
            at.b * t.bias.batch + at.h * t.bias.head + q * t.bias.query + k * t.bias.key;
        s[i][j] += a.bias_is_float32 ? (T)((const float*)t.bias.data)[from]
                                     : (T)widen(((const typename F::S*)t.bias.data)[from]);
      }
    }
}

// O' and lse' of 64 queries and up to kWidth columns. mu is known at the end only, so what is
// summed is P o S', and mu O is taken away then.
template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    forward_tangent_kernel(const GRID_CONSTANT Attention a,
                           const GRID_CONSTANT AttentionTangent t) {
  using S = typename F::S;
  using T = typename F::T;
  const int64_t row = grid_row();
  if (row >= a.batch * a.heads) return;
  const int parts = (int)max_of(1, ceil_div(a.value_dim, F::kWidth));
  const int first = (int)(blockIdx.x % parts) * F::kWidth, width = (int)a.value_dim;
  const int64_t q0 = (ceil_div(a.queries, 64) - 1 - blockIdx.x / parts) * 64;
  const int64_t b = row / a.heads, h = row % a.heads, kv = kv_head(a, h);
  const SeenTiles seen = seen_tiles<64>(a, b, q0, min_of(64, a.queries - q0));
  const bool with_scores = moves_scores(t);

  T out[F::kChunks][4][4] = {}, mu[4] = {};
#pragma unroll 1
  for (int n = seen.any; n < seen.any_end && (with_scores || t.value.data); n++) {
    const TilePlace at{b, h, kv, q0, (int64_t)n * 64};
    sync_block();  // the words have been read
    const Visibility visible = tile_words<F>(a, at);
    if (visible == Visibility::kEmpty) continue;
    const bool partial = visible == Visibility::kPartial;
    if (a.dropout.seed) tile_kept<F>(a, at);
    T p[4][4];
    probabilities<F, false>(a, at, p);
    select<F, false>(partial, 0, p);
    if (with_scores) {
      T moved[4][4];
      scores_tangent<F, false>(a, t, at, moved);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) moved[i][j] *= p[i][j];
      select<F, false>(partial, 0, moved);
#pragma unroll
      for (int i = 0; i < 4; i++)
        mu[i] += (moved[i][0] + moved[i][1]) + (moved[i][2] + moved[i][3]);
      select<F, false>(a.dropout.seed != nullptr, 1, moved);
      sync_block();
      store_pairs<F>(moved);
      add_weighted<F, false>(tile_rows<S>(a.value, b, kv, at.k0, a.keys), first, width, partial,
                             out);
    }
    if (t.value.data) {
      select<F, false>(a.dropout.seed != nullptr, 1, p);
      sync_block();
      store_pairs<F>(p);
      add_weighted<F, false>(tile_rows<S>(t.value, b, kv, at.k0, a.keys), first, width, partial,
                             out);
    }
  }

#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) mu[i] += shuffle_xor(mu[i], lanes);
    const int64_t q = q0 + thread_id() / 16 * 4 + i;
    if (q >= a.queries) continue;
    const int64_t number = row * a.queries + q;
    const bool empty = ((const T*)a.lse)[number] == -(T)INFINITY;
    if (first == 0 && thread_id() % 16 == 0) ((T*)t.lse)[number] = empty ? (T)0 : mu[i];
    const S* unmoved = row_of<S>(a.out, b, h, q);
    S* to = (S*)row_of<S>(t.out, b, h, q);
#pragma unroll
    for (int c = 0; c < F::kChunks; c++)
#pragma unroll
      for (int f = 0; f < 4; f++) {
        const int column = first + out_column<F>(c, f);
        if (column >= width) continue;
        T sum = out[c][i][f] * (T)a.dropout.keep_scale;
        if (with_scores && !empty) sum -= mu[i] * widen(unmoved[column]);
        narrow(sum, to + column);
      }
  }
}

struct TangentTask {
  static constexpr int kTerms = 2;
  Attention a;
  AttentionGrad g;
  AttentionTangent t;
  Rows none;

  DEVICE_MEMBER const Rows& factors(Output output, int term) const {
    if (term == 0)
      return output == Output::kQuery ? a.key
             : output == Output::kKey ? a.query
             : moves_scores(t)        ? g.grad_out
                                      : none;
    return output == Output::kQuery ? t.key : output == Output::kKey ? t.query : t.grad_out;
  }
  DEVICE_MEMBER const Rows& uniform_factors() const { return t.grad_out; }

  // Z' and Z without the factor of dropout, or dS' and dS.
  template <class F, Output kOutput>
  DEVICE_MEMBER void pairs(const TilePlace& at, bool partial,
                           typename F::T (&found)[2][4][4]) const {
    using T = typename F::T;
    constexpr bool kOwnsKeys = kOutput != Output::kQuery;
    constexpr bool kGrads = kOutput != Output::kValue;
    const bool with_scores = moves_scores(t);
    T(&moved)[4][4] = found[0];
    T(&p)[4][4] = found[1];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) moved[i][j] = 0;
    probabilities<F, kOwnsKeys>(a, at, p);
    select<F, kOwnsKeys>(partial, 0, p);
    if (with_scores) {
      T mu[4];
      scores_tangent<F, kOwnsKeys>(a, t, at, moved);
      query_numbers<kOwnsKeys>(a, at, t.lse, mu);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) moved[i][j] = p[i][j] * (moved[i][j] - mu[kOwnsKeys ? j : i]);
    }
    if constexpr (kGrads)
      gradients<F, kOwnsKeys>(at, with_scores, found);
    else
      select<F, kOwnsKeys>(a.dropout.seed != nullptr, 1, p);
    select<F, kOwnsKeys>(partial, 0, moved);
    if constexpr (kGrads)
      select<F, kOwnsKeys>(partial, 0, p);
    else
      select<F, kOwnsKeys>(a.dropout.seed != nullptr, 1, moved);
  }

  // dP - delta.
  template <class F, bool kOwnsKeys>
  DEVICE_MEMBER void unmoved(const TilePlace& at, typename F::T (&found)[4][4]) const {
    typename F::T delta[4];
    query_numbers<kOwnsKeys>(a, at, g.delta, delta);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) found[i][j] = 0;
    add_scores<F, kOwnsKeys>(a, at, g.grad_out, a.value, a.value_dim, found);
    drop_gradient<F, kOwnsKeys>(a, found);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) found[i][j] -= delta[kOwnsKeys ? j : i];
  }

  // P' and P become dS' and dS.
  template <class F, bool kOwnsKeys>
  DEVICE_MEMBER void gradients(const TilePlace& at, bool with_scores,
                               typename F::T (&found)[2][4][4]) const {
    using T = typename F::T;
    constexpr bool kTwice = sizeof(T) == 8;  // dP is computed again: there is no room to keep it
    T(&moved)[4][4] = found[0];
    T(&p)[4][4] = found[1];
    T kept[4][4] = {};
    if (with_scores) {
      T own[4][4], (&first)[4][4] = kTwice ? own : kept;
      unmoved<F, kOwnsKeys>(at, first);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) moved[i][j] *= first[i][j];
    }
    if (moves_grads(t)) {
      T second[4][4] = {}, delta[4];
      if (t.grad_out.data)
        add_scores<F, kOwnsKeys>(a, at, t.grad_out, a.value, a.value_dim, second);
      if (t.value.data) add_scores<F, kOwnsKeys>(a, at, g.grad_out, t.value, a.value_dim, second);
      drop_gradient<F, kOwnsKeys>(a, second);
      query_numbers<kOwnsKeys>(a, at, t.delta, delta);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          moved[i][j] = fma(p[i][j], second[i][j] - delta[kOwnsKeys ? j : i], moved[i][j]);
    }
    if (kTwice && with_scores) unmoved<F, kOwnsKeys>(at, kept);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) p[i][j] *= kept[i][j];
  }
};

template <class S, int kWidth>
const char* forward_tangent_wide(const Attention& a, const AttentionTangent& t, Stream stream) {
  using F = Wide<S, kWidth>;
  const Grid grid{ceil_div(a.queries, 64) * max_of(1, ceil_div(a.value_dim, kWidth)),
                  a.batch * a.heads};
  const char* error =
      launch(forward_tangent_kernel<F>, grid, F::kThreads, F::kSharedBytes, stream, a, t);
  return error ? error : finish_rows_tangent<S>(a, t, stream);
}

template <class S, int kWidth>
const char* backward_tangent_wide(const Attention& a, const AttentionGrad& g,
                                  const AttentionTangent& t, void* scratch, Stream stream) {
  using F = Wide<S, kWidth>;
  const TangentTask task{a, g, t, {}};
  const char* error = run_delta_tangent<S>(a, g, t, stream);
  if (!error) error = run_wide_scores<F>(task, stream);
  if (!error && g.grad_value.data) error = run_wide_gradient<F, Output::kValue>(task, stream);
  // Where the bias is constant along the keys, its gradient is that of lse, and so in the tangent.
  const void* delta = t.delta ? t.delta : g.delta;
  return error ? error : run_wide_bias<Wide<S, 64>>(task, t.grad_lse, delta, scratch, stream);
}

}  // namespace mha_ext::cuda

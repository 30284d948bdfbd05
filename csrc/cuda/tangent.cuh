// What the tangents of forward and of backward share: derivatives in a direction Q', K', V', B'
// (and dO', dL'). What is missing is zero: its products are not computed.
//   S' = scale (Q' K^T + Q K'^T) + B',  mu = rowsum(P o S') = lse',  P' = P o (S' - mu)
//   O' = (P' o M) V + Z V'
//   dP' = (dO' V^T + dO V'^T) o M,  dS' = P' o (dP - delta) + P o (dP' - delta')
//   dV' = Z'^T dO + Z^T dO', dK' = scale (dS'^T Q + dS^T Q'), dQ' = scale (dS' K + dS K'), dB' =
//   dS'
#pragma once
#include "backward.cuh"
#include "forward.cuh"

namespace mha_ext::cuda {

// Tangents of one storage type: float, double, BFloat16, Float16; each is a source of its own.
template <class S>
const char* forward_tangent_of(const Attention& a, const AttentionTangent& t, Stream stream);
template <class S>
const char* backward_tangent_of(const Attention& a, const AttentionGrad& g,
                                const AttentionTangent& t, void* scratch, Stream stream);

HOST_DEVICE bool moves_scores(const AttentionTangent& t) {
  return t.query.data || t.key.data || t.bias.data;
}
HOST_DEVICE bool moves_grads(const AttentionTangent& t) {
  return t.grad_out.data || t.value.data || t.delta;
}

// delta' = rowsum(dO' o O + dO o O') - dL'; one warp a row.
template <class S>
__global__ void LAUNCH_BOUNDS(kRowThreads, 8)
    delta_tangent_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g,
                         const GRID_CONSTANT AttentionTangent t) {
  using T = typename Softmax<S>::T;
  const int64_t row = grid_row();
  const int64_t i = (int64_t)blockIdx.x * (kRowThreads / kWarp) + warp_id();
  if (row >= a.batch * a.heads || i >= a.queries) return;
  const int64_t b = row / a.heads, h = row % a.heads, at = row * a.queries + i;
  const auto dot = [&](const Rows& left, const Rows& right) {
    const S *x = row_of<S>(left, b, h, i), *y = row_of<S>(right, b, h, i);
    T sum = 0;
    for (int64_t d = lane_id(); d < a.value_dim; d += kWarp)
      sum = fma(widen(x[d]), widen(y[d]), sum);
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
    return sum;
  };
  T sum = 0;
  if (t.grad_out.data) sum += dot(t.grad_out, a.out);
  if (t.out.data) sum += dot(g.grad_out, t.out);
  if (lane_id() == 0) ((T*)t.delta)[at] = t.grad_lse ? sum - ((const T*)t.grad_lse)[at] : sum;
}

// g.delta, and t.delta if there is room for it.
template <class S>
const char* run_delta_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                              Stream stream) {
  const char* error = run_delta<S>(a, g, stream);
  if (error || !t.delta) return error;
  const Grid rows{ceil_div(a.queries, kRowThreads / kWarp), a.batch * a.heads};
  return launch(delta_tangent_kernel<S>, rows, kRowThreads, 0, stream, a, g, t);
}

// No score moves the rows without any key: they are the mean of V', as they are of V in forward.
template <class S>
const char* finish_rows_tangent(const Attention& a, const AttentionTangent& t, Stream stream) {
  if (!a.uniform_empty_rows || !t.value.data || a.keys == 0) return nullptr;
  Attention moved = a;
  moved.value = t.value;
  moved.out = t.out;
  const Grid rows{ceil_div(a.queries, kRowThreads / kWarp), a.batch * a.heads};
  return launch(uniform_rows_kernel<S>, rows, kRowThreads, 0, stream, moved,
                (typename Softmax<S>::T)(a.dropout.keep_scale / (double)a.keys));
}

}  // namespace mha_ext::cuda

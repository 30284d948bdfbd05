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

// delta' = rowsum(dO' o O + dO o O') - dL'.
template <class S>
__global__ void LAUNCH_BOUNDS(kRowThreads, 8)
    delta_tangent_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g,
                         const GRID_CONSTANT AttentionTangent t) {
  using T = typename Softmax<S>::T;
  if (grid_row() >= a.batch * a.heads) return;
  const LaneRow of = lane_row(a);
  T sum = 0;
  if (t.grad_out.data) sum += product_of_rows<S>(a, of, t.grad_out, a.out);
  if (t.out.data) sum += product_of_rows<S>(a, of, g.grad_out, t.out);
  if (of.exists && of.lane == 0)
    ((T*)t.delta)[of.at] = t.grad_lse ? sum - ((const T*)t.grad_lse)[of.at] : sum;
}

// g.delta, and t.delta if there is room for it.
template <class S>
const char* run_delta_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                              Stream stream) {
  const char* error = run_delta<S>(a, g, stream);
  if (error || !t.delta) return error;
  return launch(delta_tangent_kernel<S>, lane_rows(a), kRowThreads, 0, stream, a, g, t);
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

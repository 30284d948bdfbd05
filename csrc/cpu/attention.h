// What the operators of the CPU key share: the size of a problem, its tasks, its directions.
#pragma once
#include <algorithm>
#include <vector>

#include "../ops.h"
#include "../problem.h"
#include "kernels.h"

namespace mha_ext::cpu {

// Everything but addresses is the same in all groups: sizes are read from the first. A group's
// tasks follow those of the group before.

// Some queries of one head; later ones first, since under a causal mask they see more keys.
struct QueryTask {
  int64_t batch, head, part;
};
inline QueryTask query_task(const Attention& a, int64_t task, int64_t parts) {
  const int64_t row = task / parts;
  return {row / a.heads, row % a.heads, parts - 1 - task % parts};
}
inline int64_t query_blocks(const Attention& a) { return ceil_div(a.queries, kTile); }
inline void set_lse(Groups<Attention>& groups, const Tensor& lse, const OptionalTensor& lse_low,
                    std::vector<Tensor>& keep) {
  set(groups, &Attention::lse, lse, keep);
  if (lse_low) set(groups, &Attention::lse_low, *lse_low, keep);
}
// Keys that a query sees at most; those of a window, where it has two ends.
inline double keys_in_sight(const Attention& a) {
  const double keys = static_cast<double>(a.keys);
  if (!a.band.left_bounded || !a.band.right_bounded) return keys;
  const double window = static_cast<double>(a.band.left) + static_cast<double>(a.band.right) + 1;
  return std::clamp(window, 0.0, keys);
}
inline double pair_count(const Attention& a) {
  return static_cast<double>(a.batch * a.heads) * static_cast<double>(a.queries) * keys_in_sight(a);
}

// The directions of one call, for each group.
inline Groups<AttentionTangent> directions(const Groups<Attention>& groups,
                                           const Tangents& tangents, std::vector<Tensor>& keep) {
  Groups<AttentionTangent> found(groups.size());
  if (tangents.query) set(found, &AttentionTangent::query, *tangents.query, keep);
  if (tangents.key) set(found, &AttentionTangent::key, *tangents.key, keep);
  if (tangents.value) set(found, &AttentionTangent::value, *tangents.value, keep);
  if (tangents.bias) set(found, &AttentionTangent::bias, *tangents.bias);
  return found;
}

// What the backward operators run on: the problem of each group, and where its gradients go.
struct GradProblem {
  int64_t count;  // of groups
  const Groups<Attention>& groups;
  const Groups<AttentionGrad>& grads;
  const TypeKernels& kernels;
};

// The gradients of first order; grad_bias is the tensor that p.grads point into.
void run_backward(const GradProblem& p, const Tensor& grad_bias);

ops::Forward attention_forward;
ops::Backward attention_backward;
ops::ForwardTangent attention_forward_tangent;
ops::BackwardTangent attention_backward_tangent;
ops::Weights attention_weights;
ops::WeightsBackward attention_weights_backward;

}  // namespace mha_ext::cpu

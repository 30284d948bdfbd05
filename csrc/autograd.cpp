// The Autograd key: derivatives of every order, in reverse and in forward mode, the way PyTorch's
// generated code does it (a Node for each operator, which calls the next operator through the
// dispatcher; a tangent set on each result). So every transform that understands PyTorch's own
// operators understands these. docs/derivatives.md has the formulas.
#include <torch/library.h>

#include "autograd_nodes.h"

namespace mha_ext {
namespace {

using torch::autograd::compute_requires_grad;

// lse_low is a cache that has no derivative.
std::tuple<Tensor, Tensor, Tensor> forward(c10::DispatchKeySet keys, const Tensor& query,
                                           const Tensor& key, const Tensor& value,
                                           const OptionalTensor& mask, const OptionalTensor& bias,
                                           const OptionalTensor& key_lengths,
                                           const OptionalTensor& seed, OptionalString corner,
                                           OptionalSymInt window_left, OptionalSymInt window_right,
                                           double dropout_p, double scale, bool uniform_empty_rows,
                                           c10::SymIntArrayRef origin, bool with_lse) {
  const Direction d{tangent(query), tangent(key), tangent(value), tangent(bias), {}, {}};
  const bool graph = compute_requires_grad(query, key, value, bias);
  const bool derives = graph || moves_inputs(d);
  std::tuple<Tensor, Tensor, Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results =
        ops::forward().redispatch(keys & c10::after_autograd_keyset, query, key, value, mask, bias,
                                  key_lengths, seed, corner, window_left, window_right, dropout_p,
                                  scale, uniform_empty_rows, origin, with_lse || derives);
  }
  if (!derives) return results;
  const auto& [out, lse, lse_low] = results;

  const KeptOptions options(corner, window_left, window_right, dropout_p, scale, uniform_empty_rows,
                            origin);
  Pointer<AttentionBackward> node;
  if (graph)
    node = add_node<AttentionBackward>(options, std::array{out, lse}, query, key, value, bias);
  if (moves_inputs(d)) {
    const Call call(options, query, key, value, mask, bias, key_lengths, seed, out, lse, lse_low);
    const auto tangents = call.forward_tangent(d);
    set_tangent(out, tangents[0]);
    set_tangent(lse, tangents[1]);
  }
  if (node) node->save(query, key, value, mask, bias, key_lengths, seed, out, lse, lse_low);
  return results;
}

// out, lse and lse_low are caches here: no derivative flows through them.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    c10::DispatchKeySet keys, const Tensor& grad_out, const OptionalTensor& grad_lse,
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& lse, const OptionalTensor& lse_low, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_lengths, const OptionalTensor& seed,
    OptionalString corner, OptionalSymInt window_left, OptionalSymInt window_right,
    double dropout_p, double scale, bool uniform_empty_rows, c10::SymIntArrayRef origin,
    std::array<bool, 4> output_mask, bool all_keys) {
  std::tuple<Tensor, Tensor, Tensor, Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = ops::backward().redispatch(
        keys & c10::after_autograd_keyset, grad_out, grad_lse, query, key, value, out, lse, lse_low,
        mask, bias, key_lengths, seed, corner, window_left, window_right, dropout_p, scale,
        uniform_empty_rows, origin, output_mask, all_keys);
  }
  const Direction d{tangent(query), tangent(key),      tangent(value),
                    tangent(bias),  tangent(grad_out), tangent(grad_lse)};
  const bool graph = compute_requires_grad(grad_out, grad_lse, query, key, value, bias);
  const bool dual = moves_inputs(d) || any(d.grad_out, d.grad_lse);
  if (!graph && !dual) return results;

  const KeptOptions options(corner, window_left, window_right, dropout_p, scale, uniform_empty_rows,
                            origin);
  output_mask[3] = output_mask[3] && bias;
  const auto grads = pick(output_mask, results);
  Pointer<AttentionBackwardBackward> node;
  if (graph)
    node = add_node<AttentionBackwardBackward>(options, grads, grad_out, grad_lse, query, key,
                                               value, bias);
  if (dual) {
    const Call call(options, query, key, value, mask, bias, key_lengths, seed, out, lse, lse_low);
    std::array<Tensor, 2> forward{tangent(out), tangent(lse)};  // known where out is dual too
    if (!forward[0].defined() || !forward[1].defined()) forward = call.forward_tangent(d);
    const auto tangents =
        call.backward_tangent(primal(grad_out), or_zero(primal(grad_lse)), d, forward, output_mask);
    for (size_t i = 0; i < 4; i++) set_tangent(grads[i], tangents[i]);
  }
  if (node)
    node->save(query, key, value, mask, bias, key_lengths, seed, out, lse, lse_low, grad_out,
               grad_lse);
  return results;
}

std::tuple<Tensor, Tensor> forward_tangent(
    c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, const OptionalTensor& lse_low,
    const OptionalTensor& query_tangent, const OptionalTensor& key_tangent,
    const OptionalTensor& value_tangent, const OptionalTensor& bias_tangent,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_lengths,
    const OptionalTensor& seed, OptionalString corner, OptionalSymInt window_left,
    OptionalSymInt window_right, double dropout_p, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin) {
  std::tuple<Tensor, Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = ops::forward_tangent().redispatch(
        keys & c10::after_autograd_keyset, query, key, value, out, lse, lse_low, query_tangent,
        key_tangent, value_tangent, bias_tangent, mask, bias, key_lengths, seed, corner,
        window_left, window_right, dropout_p, scale, uniform_empty_rows, origin);
  }
  const auto& [out_tangent, lse_tangent] = results;
  const Direction b{tangent(query), tangent(key), tangent(value), tangent(bias), {}, {}};
  const Direction moved{tangent(query_tangent),
                        tangent(key_tangent),
                        tangent(value_tangent),
                        tangent(bias_tangent),
                        {},
                        {}};
  const bool graph = compute_requires_grad(query, key, value, bias, query_tangent, key_tangent,
                                           value_tangent, bias_tangent);
  const bool dual = moves_inputs(b) || moves_inputs(moved);
  if (!graph && !dual) return results;

  const KeptOptions options(corner, window_left, window_right, dropout_p, scale, uniform_empty_rows,
                            origin);
  Pointer<AttentionForwardTangentBackward> node;
  if (graph)
    node = add_node<AttentionForwardTangentBackward>(options, std::array{out_tangent, lse_tangent},
                                                     query, key, value, bias, query_tangent,
                                                     key_tangent, value_tangent, bias_tangent);
  if (dual) {
    const Call call(options, query, key, value, mask, bias, key_lengths, seed, out, lse, lse_low);
    const Direction a{or_zero(primal(query_tangent)),
                      or_zero(primal(key_tangent)),
                      or_zero(primal(value_tangent)),
                      or_zero(primal(bias_tangent)),
                      {},
                      {}};
    const auto second = call.forward_second(a, b), first = call.forward_tangent(moved);
    set_tangent(out_tangent, plus(second[0], first[0]));
    set_tangent(lse_tangent, plus(second[1], first[1]));
  }
  if (node)
    node->save(query, key, value, mask, bias, key_lengths, seed, out, lse, lse_low, query_tangent,
               key_tangent, value_tangent, bias_tangent, out_tangent, lse_tangent);
  return results;
}

// out_tangent and lse_tangent are caches too.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward_tangent(
    c10::DispatchKeySet keys, const Tensor& grad_out, const OptionalTensor& grad_lse,
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& lse, const OptionalTensor& lse_low, const OptionalTensor& out_tangent,
    const OptionalTensor& lse_tangent, const OptionalTensor& query_tangent,
    const OptionalTensor& key_tangent, const OptionalTensor& value_tangent,
    const OptionalTensor& bias_tangent, const OptionalTensor& grad_out_tangent,
    const OptionalTensor& grad_lse_tangent, const OptionalTensor& mask, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, const OptionalTensor& seed, OptionalString corner,
    OptionalSymInt window_left, OptionalSymInt window_right, double dropout_p, double scale,
    bool uniform_empty_rows, c10::SymIntArrayRef origin, std::array<bool, 4> output_mask) {
  std::tuple<Tensor, Tensor, Tensor, Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = ops::backward_tangent().redispatch(
        keys & c10::after_autograd_keyset, grad_out, grad_lse, query, key, value, out, lse, lse_low,
        out_tangent, lse_tangent, query_tangent, key_tangent, value_tangent, bias_tangent,
        grad_out_tangent, grad_lse_tangent, mask, bias, key_lengths, seed, corner, window_left,
        window_right, dropout_p, scale, uniform_empty_rows, origin, output_mask);
  }
  const Direction b{tangent(query), tangent(key),      tangent(value),
                    tangent(bias),  tangent(grad_out), tangent(grad_lse)};
  const Direction moved{tangent(query_tangent),    tangent(key_tangent),
                        tangent(value_tangent),    tangent(bias_tangent),
                        tangent(grad_out_tangent), tangent(grad_lse_tangent)};
  const bool graph =
      compute_requires_grad(grad_out, grad_lse, query, key, value, bias, query_tangent, key_tangent,
                            value_tangent, bias_tangent, grad_out_tangent, grad_lse_tangent);
  const bool moves = moves_inputs(b) || any(b.grad_out, b.grad_lse);
  const bool turns = moves_inputs(moved) || any(moved.grad_out, moved.grad_lse);
  if (!graph && !moves && !turns) return results;

  const KeptOptions options(corner, window_left, window_right, dropout_p, scale, uniform_empty_rows,
                            origin);
  output_mask[3] = output_mask[3] && bias;
  const auto grads = pick(output_mask, results);
  Pointer<AttentionBackwardTangentBackward> node;
  if (graph)
    node = add_node<AttentionBackwardTangentBackward>(
        options, grads, grad_out, grad_lse, query, key, value, bias, query_tangent, key_tangent,
        value_tangent, bias_tangent, grad_out_tangent, grad_lse_tangent);
  const Call call(options, query, key, value, mask, bias, key_lengths, seed, out, lse, lse_low);
  const Tensor grad = primal(grad_out), grad_of_lse = or_zero(primal(grad_lse));
  std::array<Tensor, 4> second, first;
  if (moves) {
    const Direction a{or_zero(primal(query_tangent)),    or_zero(primal(key_tangent)),
                      or_zero(primal(value_tangent)),    or_zero(primal(bias_tangent)),
                      or_zero(primal(grad_out_tangent)), or_zero(primal(grad_lse_tangent))};
    second = call.backward_second(grad, grad_of_lse, a, b, output_mask);
  }
  if (turns)
    first =
        call.backward_tangent(grad, grad_of_lse, moved, call.forward_tangent(moved), output_mask);
  for (size_t i = 0; i < 4; i++) set_tangent(grads[i], plus(second[i], first[i]));
  if (node)
    node->save(query, key, value, mask, bias, key_lengths, seed, out, lse, lse_low, grad_out,
               grad_lse, query_tangent, key_tangent, value_tangent, bias_tangent, grad_out_tangent,
               grad_lse_tangent);
  return results;
}

// lse and lse_low are caches here: no derivative flows through them.
Tensor weights(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
               const OptionalTensor& lse, const OptionalTensor& lse_low, const OptionalTensor& mask,
               const OptionalTensor& bias, const OptionalTensor& key_lengths, OptionalString corner,
               OptionalSymInt window_left, OptionalSymInt window_right, double scale,
               bool uniform_empty_rows, c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads,
               at::OptionalIntArrayRef rows) {
  Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = ops::weights().redispatch(keys & c10::after_autograd_keyset, query, key, lse, lse_low,
                                       mask, bias, key_lengths, corner, window_left, window_right,
                                       scale, uniform_empty_rows, origin, heads, rows);
  }
  const Direction d{tangent(query), tangent(key), {}, tangent(bias), {}, {}};
  const bool graph = compute_requires_grad(query, key, bias);
  if (!graph && !moves_inputs(d)) return result;

  const KeptOptions options(corner, window_left, window_right, /*dropout_p=*/0.0, scale,
                            uniform_empty_rows, origin, heads, rows);
  Pointer<AttentionWeightsBackward> node;
  if (graph)
    node = add_node<AttentionWeightsBackward>(options, std::array{result}, query, key, bias);
  if (moves_inputs(d)) {
    const Call call(options, query, key, {}, mask, bias, key_lengths, {}, {}, or_zero(lse),
                    lse_low);
    set_tangent(result, composite::weights_tangent(call.inputs(), call.selected(result), d));
  }
  if (node)
    node->save(query, key, Tensor(), mask, bias, key_lengths, Tensor(), result, or_zero(lse),
               lse_low);
  return result;
}

// weights is a cache too.
std::tuple<Tensor, Tensor, Tensor> weights_backward(
    c10::DispatchKeySet keys, const Tensor& grad_weights, const Tensor& weights,
    const Tensor& query, const Tensor& key, const OptionalTensor& lse,
    const OptionalTensor& lse_low, const OptionalTensor& mask, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, OptionalString corner, OptionalSymInt window_left,
    OptionalSymInt window_right, double scale, bool uniform_empty_rows, c10::SymIntArrayRef origin,
    at::OptionalIntArrayRef heads, at::OptionalIntArrayRef rows, std::array<bool, 3> output_mask) {
  std::tuple<Tensor, Tensor, Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = ops::weights_backward().redispatch(
        keys & c10::after_autograd_keyset, grad_weights, weights, query, key, lse, lse_low, mask,
        bias, key_lengths, corner, window_left, window_right, scale, uniform_empty_rows, origin,
        heads, rows, output_mask);
  }
  const Direction d{tangent(query), tangent(key), {}, tangent(bias), {}, {}};
  const Tensor moved = tangent(grad_weights);
  const bool graph = compute_requires_grad(grad_weights, query, key, bias);
  const bool dual = moves_inputs(d) || moved.defined();
  if (!graph && !dual) return results;

  const KeptOptions options(corner, window_left, window_right, /*dropout_p=*/0.0, scale,
                            uniform_empty_rows, origin, heads, rows);
  output_mask[2] = output_mask[2] && bias;
  const auto grads = pick(output_mask, results);
  Pointer<AttentionWeightsBackwardBackward> node;
  if (graph)
    node =
        add_node<AttentionWeightsBackwardBackward>(options, grads, grad_weights, query, key, bias);
  if (dual) {
    const Call call(options, query, key, {}, mask, bias, key_lengths, {}, {}, or_zero(lse),
                    lse_low);
    const auto tangents = composite::weights_backward_tangent(
        call.inputs(), call.weights(), primal(grad_weights), d, moved, output_mask);
    for (size_t i = 0; i < 3; i++) set_tangent(grads[i], tangents[i]);
  }
  if (node)
    node->save(query, key, Tensor(), mask, bias, key_lengths, Tensor(), Tensor(), or_zero(lse),
               lse_low, grad_weights);
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, Autograd, m) {
  m.impl("attention_forward", TORCH_FN(forward));
  m.impl("attention_backward", TORCH_FN(backward));
  m.impl("attention_forward_tangent", TORCH_FN(forward_tangent));
  m.impl("attention_backward_tangent", TORCH_FN(backward_tangent));
  m.impl("attention_weights", TORCH_FN(weights));
  m.impl("attention_weights_backward", TORCH_FN(weights_backward));
}

}  // namespace mha_ext

// The Meta key: shapes, dtypes and strides without data, for fake tensors, torch.compile and
// torch.export.
#include <torch/library.h>

#include "ops.h"
#include "problem.h"

namespace mha_ext {
namespace {

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& query, const Tensor& key,
                                           const Tensor& value, const OptionalTensor& mask,
                                           const OptionalTensor& bias,
                                           const OptionalTensor& key_lengths,
                                           const OptionalTensor& seed, OptionalString corner,
                                           OptionalSymInt window_left, OptionalSymInt window_right,
                                           double dropout_p, double scale, bool uniform_empty_rows,
                                           c10::SymIntArrayRef origin, bool with_lse) {
  check_shapes(query, key, &value, mask, bias, key_lengths, seed,
               {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin});
  return {empty_out(query, value), empty_lse(query, with_lse), empty_lse(query, with_lse)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& lse_low,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_lengths,
    const OptionalTensor& seed, OptionalString corner, OptionalSymInt window_left,
    OptionalSymInt window_right, double dropout_p, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin, std::array<bool, 4> output_mask, bool /*all_keys*/) {
  check_shapes(query, key, &value, mask, bias, key_lengths, seed,
               {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin});
  check_saved(grad_out, grad_lse, query, value, out, lse, lse_low);
  return {empty_grad(query, output_mask[0]), empty_grad(key, output_mask[1]),
          empty_grad(value, output_mask[2]), zero_grad_bias(query, bias, output_mask[3])};
}

std::tuple<Tensor, Tensor> forward_tangent(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& lse, const OptionalTensor& lse_low, const OptionalTensor& query_tangent,
    const OptionalTensor& key_tangent, const OptionalTensor& value_tangent,
    const OptionalTensor& bias_tangent, const OptionalTensor& mask, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, const OptionalTensor& seed, OptionalString corner,
    OptionalSymInt window_left, OptionalSymInt window_right, double dropout_p, double scale,
    bool uniform_empty_rows, c10::SymIntArrayRef origin) {
  check_shapes(query, key, &value, mask, bias, key_lengths, seed,
               {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin});
  check_saved(/*grad_out=*/std::nullopt, /*grad_lse=*/std::nullopt, query, value, out, lse,
              lse_low);
  check_tangents({query_tangent, key_tangent, value_tangent, bias_tangent}, query, key, value,
                 bias);
  return {empty_out(query, value), empty_lse(query)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_tangent(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& lse_low,
    const OptionalTensor& out_tangent, const OptionalTensor& lse_tangent,
    const OptionalTensor& query_tangent, const OptionalTensor& key_tangent,
    const OptionalTensor& value_tangent, const OptionalTensor& bias_tangent,
    const OptionalTensor& grad_out_tangent, const OptionalTensor& grad_lse_tangent,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_lengths,
    const OptionalTensor& seed, OptionalString corner, OptionalSymInt window_left,
    OptionalSymInt window_right, double dropout_p, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin, std::array<bool, 4> output_mask) {
  check_shapes(query, key, &value, mask, bias, key_lengths, seed,
               {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin});
  check_saved(grad_out, grad_lse, query, value, out, lse, lse_low);
  check_tangents({query_tangent, key_tangent, value_tangent, bias_tangent}, query, key, value,
                 bias);
  check_saved_tangents({out_tangent, lse_tangent, grad_out_tangent, grad_lse_tangent}, out, lse);
  return {empty_grad(query, output_mask[0]), empty_grad(key, output_mask[1]),
          empty_grad(value, output_mask[2]), zero_grad_bias(query, bias, output_mask[3])};
}

Tensor weights(const Tensor& query, const Tensor& key, const OptionalTensor& lse,
               const OptionalTensor& lse_low, const OptionalTensor& mask,
               const OptionalTensor& bias, const OptionalTensor& key_lengths, OptionalString corner,
               OptionalSymInt window_left, OptionalSymInt window_right, double scale,
               bool uniform_empty_rows, c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads,
               at::OptionalIntArrayRef rows) {
  check_shapes(query, key, /*value=*/nullptr, mask, bias, key_lengths, /*seed=*/std::nullopt,
               {corner, window_left, window_right, 0.0, scale, uniform_empty_rows, origin});
  check_selection(query, lse, lse_low, heads, rows);
  return empty_weights(query, key, heads, rows);
}

std::tuple<Tensor, Tensor, Tensor> weights_backward(
    const Tensor& grad_weights, const Tensor& weights, const Tensor& query, const Tensor& key,
    const OptionalTensor& lse, const OptionalTensor& lse_low, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_lengths, OptionalString corner,
    OptionalSymInt window_left, OptionalSymInt window_right, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads, at::OptionalIntArrayRef rows,
    std::array<bool, 3> output_mask) {
  check_shapes(query, key, /*value=*/nullptr, mask, bias, key_lengths, /*seed=*/std::nullopt,
               {corner, window_left, window_right, 0.0, scale, uniform_empty_rows, origin});
  check_selection(query, lse, lse_low, heads, rows);
  check_weights("grad_weights", grad_weights, query, key, heads, rows);
  check_weights("weights", weights, query, key, heads, rows);
  return {empty_grad(query, output_mask[0]), empty_grad(key, output_mask[1]),
          zero_grad_bias(query, bias, output_mask[2])};
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, Meta, m) {
  m.impl("attention_forward", TORCH_FN(forward));
  m.impl("attention_backward", TORCH_FN(backward));
  m.impl("attention_forward_tangent", TORCH_FN(forward_tangent));
  m.impl("attention_backward_tangent", TORCH_FN(backward_tangent));
  m.impl("attention_weights", TORCH_FN(weights));
  m.impl("attention_weights_backward", TORCH_FN(weights_backward));
}

}  // namespace mha_ext

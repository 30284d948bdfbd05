// The operators as C++ calls them through the dispatcher: each signature is written once,
// here. Their schemas, with the same order of arguments, are in ops.cpp.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

namespace mha_ext {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using OptionalString = std::optional<std::string_view>;
using OptionalSymInt = std::optional<c10::SymInt>;

namespace ops {

using Forward = std::tuple<Tensor, Tensor, Tensor>(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_lengths, const OptionalTensor& seed,
    OptionalString corner, OptionalSymInt window_left, OptionalSymInt window_right,
    double dropout_p, double scale, bool uniform_empty_rows, c10::SymIntArrayRef origin,
    bool with_lse);

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& lse_low,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_lengths,
    const OptionalTensor& seed, OptionalString corner, OptionalSymInt window_left,
    OptionalSymInt window_right, double dropout_p, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin, std::array<bool, 4> output_mask, bool all_keys);

using ForwardTangent = std::tuple<Tensor, Tensor>(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& lse, const OptionalTensor& lse_low, const OptionalTensor& query_tangent,
    const OptionalTensor& key_tangent, const OptionalTensor& value_tangent,
    const OptionalTensor& bias_tangent, const OptionalTensor& mask, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, const OptionalTensor& seed, OptionalString corner,
    OptionalSymInt window_left, OptionalSymInt window_right, double dropout_p, double scale,
    bool uniform_empty_rows, c10::SymIntArrayRef origin);

using BackwardTangent = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& lse_low,
    const OptionalTensor& out_tangent, const OptionalTensor& lse_tangent,
    const OptionalTensor& query_tangent, const OptionalTensor& key_tangent,
    const OptionalTensor& value_tangent, const OptionalTensor& bias_tangent,
    const OptionalTensor& grad_out_tangent, const OptionalTensor& grad_lse_tangent,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_lengths,
    const OptionalTensor& seed, OptionalString corner, OptionalSymInt window_left,
    OptionalSymInt window_right, double dropout_p, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin, std::array<bool, 4> output_mask);

using Weights = Tensor(const Tensor& query, const Tensor& key, const OptionalTensor& lse,
                       const OptionalTensor& lse_low, const OptionalTensor& mask,
                       const OptionalTensor& bias, const OptionalTensor& key_lengths,
                       OptionalString corner, OptionalSymInt window_left,
                       OptionalSymInt window_right, double scale, bool uniform_empty_rows,
                       c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads,
                       at::OptionalIntArrayRef rows);

using WeightsBackward = std::tuple<Tensor, Tensor, Tensor>(
    const Tensor& grad_weights, const Tensor& weights, const Tensor& query, const Tensor& key,
    const OptionalTensor& lse, const OptionalTensor& lse_low, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_lengths, OptionalString corner,
    OptionalSymInt window_left, OptionalSymInt window_right, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads, at::OptionalIntArrayRef rows,
    std::array<bool, 3> output_mask);

const c10::TypedOperatorHandle<Forward>& forward();
const c10::TypedOperatorHandle<Backward>& backward();
const c10::TypedOperatorHandle<ForwardTangent>& forward_tangent();
const c10::TypedOperatorHandle<BackwardTangent>& backward_tangent();
const c10::TypedOperatorHandle<Weights>& weights();
const c10::TypedOperatorHandle<WeightsBackward>& weights_backward();

}  // namespace ops
}  // namespace mha_ext

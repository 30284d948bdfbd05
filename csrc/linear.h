// The operator linear(input, weight, bias) as C++ calls it through the dispatcher, and its checks.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace mha_ext {

using LinearSignature = at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias);
const c10::TypedOperatorHandle<LinearSignature>& linear_op();

// input [..., in], weight [out, in], bias [out]; shapes only.
void check_linear(const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias);

}  // namespace mha_ext

// Derivatives that have no kernel of their own, as compositions of PyTorch's operators, which are
// differentiable again: with them the operators have derivatives of every order, in either mode.
// They hold matrices of scores, so their memory is quadratic.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "problem.h"

namespace mha_ext::composite {

// The tensors that attention is a function of, and its options.
struct Inputs {
  at::Tensor query, key, value;  // [*G, B, H, Lq, D], [*G, B, Hkv, Lk, D], [*G, B, Hkv, Lk, Dv]
  std::optional<at::Tensor> mask, bias, key_lengths, seed;
  Options options;
};

// A direction in the space of (query, key, value, bias), and of (grad_out, grad_lse) where these
// are variables too. An undefined tensor is a zero.
struct Direction {
  at::Tensor query, key, value, bias, grad_out, grad_lse;
};

// Second derivatives of (out, lse) along a and b.
std::tuple<at::Tensor, at::Tensor> forward_second(const Inputs& inputs, const Direction& a,
                                                  const Direction& b);

// Second derivatives of the gradients (query, key, value, bias) along a and b; undefined where
// they are not wanted.
std::array<at::Tensor, 4> backward_second(const Inputs& inputs, const at::Tensor& grad_out,
                                          const at::Tensor& grad_lse, const Direction& a,
                                          const Direction& b, const std::array<bool, 4>& wanted);

// The weights of attention_weights, and what selects them.
struct Weights {
  at::Tensor weights;  // [*G, B, heads, rows, Lk]
  at::OptionalIntArrayRef heads, rows;
};

// The derivative of the weights along a direction (query, key, bias).
at::Tensor weights_tangent(const Inputs& inputs, const Weights& weights, const Direction& a);

// The derivative of attention_weights_backward (grad_query, grad_key, grad_bias) along (query, key,
// bias) and a direction of grad_weights, which may be undefined.
std::array<at::Tensor, 3> weights_backward_tangent(const Inputs& inputs, const Weights& weights,
                                                   const at::Tensor& grad_weights,
                                                   const Direction& a,
                                                   const at::Tensor& grad_weights_tangent,
                                                   const std::array<bool, 3>& wanted);

}  // namespace mha_ext::composite

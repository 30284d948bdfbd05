// One problem, as the derivatives of the operators see it: what a Node keeps of it, its tangents,
// and the operators on it, called through the dispatcher. For autograd.cpp alone.
#pragma once
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <string>
#include <vector>

#include "composite.h"
#include "ops.h"

namespace mha_ext {
namespace {

using composite::Direction;
using torch::dynamo::autograd::CompiledNodeArgs;

// A zero is an undefined Tensor here, None for an operator.
OptionalTensor or_none(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}
Tensor or_zero(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }
template <class... Tensors>
bool any(const Tensors&... tensors) {
  return (tensors.defined() || ...);
}
bool moves_inputs(const Direction& d) { return any(d.query, d.key, d.value, d.bias); }

Tensor plus(const Tensor& x, const Tensor& y) {
  return !x.defined() ? y : !y.defined() ? x : x.add(y);
}

// Forward mode: a dual tensor is a primal and its tangent, which is undefined where there is none.
Tensor tangent(const Tensor& tensor) {
  return tensor.defined() ? Tensor(tensor._fw_grad(/*level=*/0)) : Tensor();
}
Tensor tangent(const OptionalTensor& tensor) { return tangent(or_zero(tensor)); }
Tensor primal(const Tensor& tensor) {
  return tangent(tensor).defined() ? tensor._fw_primal(/*level=*/0) : tensor;
}
OptionalTensor primal(const OptionalTensor& tensor) { return or_none(primal(or_zero(tensor))); }
void set_tangent(const Tensor& result, const Tensor& tangent) {
  if (tangent.defined()) result._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
}

// What a Node keeps, as compiled autograd passes it: options, which gradients are wanted, tensors.
using Arguments = std::vector<c10::IValue>;
enum Argument {
  kCorner,
  kWindowLeft,
  kWindowRight,
  kDropout,
  kScale,
  kUniform,
  kOrigin,
  kHeads,
  kRows,
  kWanted,
  kTensors
};
// The tensors that every Node begins with. In those of the weights kOut is the weights.
enum Saved { kQuery, kKey, kValue, kMask, kBias, kKeyLengths, kSeed, kOut, kLse, kLseLow, kShared };

Tensor kept(const Arguments& arguments, int i) {
  const c10::IValue& value = arguments[kTensors + i];
  return value.isNone() ? Tensor() : value.toTensor();
}

template <size_t count>
std::array<bool, count> wanted(const Arguments& arguments, size_t first = 0) {
  const c10::List<bool> list = arguments[kWanted].toBoolList();
  std::array<bool, count> found;
  for (size_t i = 0; i < count; i++) found[i] = list[first + i];
  return found;
}

// Of a backward operator's results those that were wanted; the others are empty tensors there.
template <size_t count, class... Tensors>
std::array<Tensor, count> pick(const std::array<bool, count>& wanted,
                               const std::tuple<Tensors...>& results) {
  std::array<Tensor, count> found = std::apply(
      [](const auto&... result) { return std::array<Tensor, count>{result...}; }, results);
  for (size_t i = 0; i < count; i++)
    if (!wanted[i]) found[i] = Tensor();
  return found;
}

// The options that outlive the call.
struct KeptOptions {
  using Indices = std::optional<std::vector<int64_t>>;
  std::optional<std::string> corner;
  OptionalSymInt window_left, window_right;
  double dropout_p = 0.0, scale = 1.0;
  bool uniform_empty_rows = false;
  std::vector<c10::SymInt> origin;
  Indices heads, rows;

  KeptOptions(OptionalString corner, OptionalSymInt window_left, OptionalSymInt window_right,
              double dropout_p, double scale, bool uniform_empty_rows, c10::SymIntArrayRef origin,
              at::OptionalIntArrayRef heads = std::nullopt,
              at::OptionalIntArrayRef rows = std::nullopt)
      : corner(corner ? std::optional<std::string>(*corner) : std::nullopt),
        window_left(std::move(window_left)),
        window_right(std::move(window_right)),
        dropout_p(dropout_p),
        scale(scale),
        uniform_empty_rows(uniform_empty_rows),
        origin(origin.vec()),
        heads(heads ? Indices(heads->vec()) : std::nullopt),
        rows(rows ? Indices(rows->vec()) : std::nullopt) {}

  explicit KeptOptions(const Arguments& a)
      : corner(a[kCorner].toOptional<std::string>()),
        dropout_p(a[kDropout].toDouble()),
        scale(a[kScale].toDouble()),
        uniform_empty_rows(a[kUniform].toBool()) {
    if (!a[kWindowLeft].isNone()) window_left = a[kWindowLeft].toSymInt();
    if (!a[kWindowRight].isNone()) window_right = a[kWindowRight].toSymInt();
    for (const c10::IValue& position : a[kOrigin].toListRef())
      origin.push_back(position.toSymInt());
    if (!a[kHeads].isNone()) heads = a[kHeads].toIntVector();
    if (!a[kRows].isNone()) rows = a[kRows].toIntVector();
  }
  void append_to(Arguments& arguments) const {
    arguments.insert(arguments.end(), {corner, window_left, window_right, dropout_p, scale,
                                       uniform_empty_rows, origin, heads, rows});
  }
  OptionalString corner_view() const { return corner ? OptionalString(*corner) : std::nullopt; }
  at::OptionalIntArrayRef heads_view() const {
    return heads ? at::OptionalIntArrayRef(*heads) : std::nullopt;
  }
  at::OptionalIntArrayRef rows_view() const {
    return rows ? at::OptionalIntArrayRef(*rows) : std::nullopt;
  }
  void collect(CompiledNodeArgs& args) const {
    args.collect(corner);
    args.collect(window_left);
    args.collect(window_right);
    args.collect(dropout_p);
    args.collect(scale);
    args.collect(uniform_empty_rows);
    args.collect(origin);
    args.collect(heads);
    args.collect(rows);
  }
  // visit(options) for what compiled autograd may replace by symbols, in the order of collect.
  template <class Visit>
  void visit_symbols(const Visit& visit) {
    visit(window_left);
    visit(window_right);
    visit(origin);
  }
};

// One problem, and the operators on it. Gradients that are not wanted are undefined.
struct Call {
  KeptOptions options;
  Tensor query, key, value;
  OptionalTensor mask, bias, key_lengths, seed;
  Tensor out, lse;  // caches, as lse_low: no derivative flows through them
  OptionalTensor lse_low;

  Call(KeptOptions options, const Tensor& query, const Tensor& key, const Tensor& value,
       const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_lengths,
       const OptionalTensor& seed, const Tensor& out, const Tensor& lse,
       const OptionalTensor& lse_low)
      : options(std::move(options)),
        query(primal(query)),
        key(primal(key)),
        value(primal(value)),
        mask(mask),
        bias(primal(bias)),
        key_lengths(key_lengths),
        seed(seed),
        out(primal(out)),
        lse(primal(lse)),
        lse_low(primal(lse_low)) {}
  explicit Call(const Arguments& a)
      : options(a),
        query(kept(a, kQuery)),
        key(kept(a, kKey)),
        value(kept(a, kValue)),
        mask(or_none(kept(a, kMask))),
        bias(or_none(kept(a, kBias))),
        key_lengths(or_none(kept(a, kKeyLengths))),
        seed(or_none(kept(a, kSeed))),
        out(kept(a, kOut)),
        lse(kept(a, kLse)),
        lse_low(or_none(kept(a, kLseLow))) {}

  composite::Inputs inputs() const {
    return {query,
            key,
            value,
            mask,
            bias,
            key_lengths,
            seed,
            {options.corner_view(), options.window_left, options.window_right, options.dropout_p,
             options.scale, options.uniform_empty_rows, options.origin}};
  }
  composite::Weights selected(const Tensor& weights) const {
    return {weights, options.heads_view(), options.rows_view()};
  }

  // all_keys: out and lse are the results of this call, not of one with more keys.
  std::array<Tensor, 4> backward(const Tensor& grad_out, const Tensor& grad_lse,
                                 const std::array<bool, 4>& wanted, bool all_keys = false) const {
    if (!any(grad_out, grad_lse) || !has(wanted)) return {};
    const KeptOptions& o = options;
    return pick(wanted, ops::backward().call(
                            grad_out.defined() ? grad_out : at::zeros_like(out), or_none(grad_lse),
                            query, key, value, out, lse, lse_low, mask, bias, key_lengths, seed,
                            o.corner_view(), o.window_left, o.window_right, o.dropout_p, o.scale,
                            o.uniform_empty_rows, o.origin, wanted, all_keys));
  }

  // The derivatives of (out, lse) along d.
  std::array<Tensor, 2> forward_tangent(const Direction& d) const {
    if (!moves_inputs(d)) return {};
    const KeptOptions& o = options;
    auto [out_tangent, lse_tangent] = ops::forward_tangent().call(
        query, key, value, out, lse, lse_low, or_none(d.query), or_none(d.key), or_none(d.value),
        or_none(d.bias), mask, bias, key_lengths, seed, o.corner_view(), o.window_left,
        o.window_right, o.dropout_p, o.scale, o.uniform_empty_rows, o.origin);
    return {std::move(out_tangent), std::move(lse_tangent)};
  }

  // The derivatives of the gradients along d; `forward` is forward_tangent(d).
  std::array<Tensor, 4> backward_tangent(const Tensor& grad_out, const Tensor& grad_lse,
                                         const Direction& d, const std::array<Tensor, 2>& forward,
                                         const std::array<bool, 4>& wanted) const {
    // backward is linear in grad_out and grad_lse
    if (!moves_inputs(d) || !any(grad_out, grad_lse))
      return backward(d.grad_out, d.grad_lse, wanted);
    if (!has(wanted)) return {};
    const KeptOptions& o = options;
    return pick(wanted, ops::backward_tangent().call(
                            grad_out.defined() ? grad_out : at::zeros_like(out), or_none(grad_lse),
                            query, key, value, out, lse, lse_low, or_none(forward[0]),
                            or_none(forward[1]), or_none(d.query), or_none(d.key), or_none(d.value),
                            or_none(d.bias), or_none(d.grad_out), or_none(d.grad_lse), mask, bias,
                            key_lengths, seed, o.corner_view(), o.window_left, o.window_right,
                            o.dropout_p, o.scale, o.uniform_empty_rows, o.origin, wanted));
  }

  // The second derivatives of (out, lse), and of the gradients.
  std::array<Tensor, 2> forward_second(const Direction& a, const Direction& b) const {
    if (!moves_inputs(a) || !moves_inputs(b)) return {};
    auto [out_second, lse_second] = composite::forward_second(inputs(), a, b);
    return {std::move(out_second), std::move(lse_second)};
  }
  std::array<Tensor, 4> backward_second(const Tensor& grad_out, const Tensor& grad_lse,
                                        const Direction& a, const Direction& b,
                                        const std::array<bool, 4>& wanted) const {
    if (!has(wanted)) return {};
    return composite::backward_second(inputs(), grad_out, grad_lse, a, b, wanted);
  }

  // The weights, as a function that has derivatives itself.
  composite::Weights weights() const {
    const KeptOptions& o = options;
    return selected(ops::weights().call(
        query, key, or_none(lse), lse_low, mask, bias, key_lengths, o.corner_view(), o.window_left,
        o.window_right, o.scale, o.uniform_empty_rows, o.origin, o.heads_view(), o.rows_view()));
  }
  std::array<Tensor, 3> weights_backward(const Tensor& grad_weights, const Tensor& weights,
                                         const std::array<bool, 3>& wanted) const {
    if (!grad_weights.defined() || !has(wanted)) return {};
    const KeptOptions& o = options;
    return pick(wanted, ops::weights_backward().call(
                            grad_weights, weights, query, key, or_none(lse), lse_low, mask, bias,
                            key_lengths, o.corner_view(), o.window_left, o.window_right, o.scale,
                            o.uniform_empty_rows, o.origin, o.heads_view(), o.rows_view(), wanted));
  }

 private:
  template <size_t count>
  static bool has(const std::array<bool, count>& wanted) {
    return std::find(wanted.begin(), wanted.end(), true) != wanted.end();
  }
};

}  // namespace
}  // namespace mha_ext

// The Autograd key: derivatives of every order, in reverse and in forward mode, the way PyTorch's
// generated code does it (a Node for each operator, which calls the next operator through the
// dispatcher; a tangent set on each result). So every transform that understands PyTorch's own
// operators understands these. docs/derivatives.md has the formulas.
#include <ATen/core/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>
#include <torch/version.h>

#include <string>
#include <vector>

#include "composite.h"
#include "ops.h"

namespace mha_ext {
namespace {

using composite::Direction;
using torch::autograd::collect_next_edges;
using torch::autograd::compute_requires_grad;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::set_history;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// PyTorch 2.13 made Node an intrusive_ptr target.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
template <class N, class... Args>
c10::intrusive_ptr<N> make_node(Args&&... args) {
  return c10::make_intrusive<N>(std::forward<Args>(args)...);
}
#else
template <class N, class... Args>
std::shared_ptr<N> make_node(Args&&... args) {
  return std::shared_ptr<N>(new N(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
#endif

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

  std::array<Tensor, 4> backward(const Tensor& grad_out, const Tensor& grad_lse,
                                 const std::array<bool, 4>& wanted) const {
    if (!any(grad_out, grad_lse) || !has(wanted)) return {};
    const KeptOptions& o = options;
    return pick(wanted, ops::backward().call(
                            grad_out.defined() ? grad_out : at::zeros_like(out), or_none(grad_lse),
                            query, key, value, out, lse, lse_low, mask, bias, key_lengths, seed,
                            o.corner_view(), o.window_left, o.window_right, o.dropout_p, o.scale,
                            o.uniform_empty_rows, o.origin, wanted));
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

// A Node of `inputs` differentiable inputs that keeps `count` tensors; bit i of `outputs` says that
// tensor i is one of its own results. Derived has run(grads, arguments), a pure function that
// compiled autograd puts into its graph.
template <class Derived, int inputs, int count, unsigned outputs>
struct AttentionNode : Node {
  SavedVariable saved[count];
  KeptOptions options;

  explicit AttentionNode(KeptOptions options) : options(std::move(options)) {}

  // After the results have their histories and tangents.
  template <class... Tensors>
  void save(const Tensors&... tensors) {
    static_assert(sizeof...(tensors) == count);
    int i = 0;
    ((saved[i] = SavedVariable(tensors, is_output(i)), i++), ...);
  }
  static bool is_output(int i) { return outputs >> i & 1; }

  Arguments arguments() {
    Arguments list;
    list.reserve(kTensors + count);
    options.append_to(list);
    c10::List<bool> wanted;
    for (size_t i = 0; i < inputs; i++) wanted.push_back(this->task_should_compute_output(i));
    list.emplace_back(std::move(wanted));
    for (int i = 0; i < count; i++) {
      const Tensor tensor = is_output(i) ? saved[i].unpack(this->getptr()) : saved[i].unpack();
      list.push_back(tensor.defined() ? c10::IValue(tensor) : c10::IValue());
    }
    return list;
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return run(grads, arguments());
  }
  static variable_list run(const variable_list& grads, const Arguments& arguments) {
    for (const Tensor& grad : grads)
      if (grad.defined()) return Derived::gradients(grads, Call(arguments), arguments);
    return variable_list(inputs);
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& variable : saved) variable.reset_data();
  }
  void compiled_args(CompiledNodeArgs& args) const override {
    for (int i = 0; i < count; i++) args.collect(saved[i], is_output(i));
    options.collect(args);
  }
  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& swap) override {
    for (SavedVariable& variable : saved) swap.before(variable);
    options.visit_symbols([&](auto& value) { swap.before(value); });
    const Arguments arguments = this->arguments();
    for (SavedVariable& variable : saved) swap.after(variable);
    options.visit_symbols([&](auto& value) { swap.after(value); });

    // The sizes of `grads` mean nothing here, so run() cannot be traced now: it becomes one call in
    // the graph.
    std::vector<c10::TypePtr> types;
    for (const c10::IValue& argument : arguments)
      types.push_back(argument.isTensor() ? c10::TensorType::get() : argument.type());
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string function =
        compiler->bind_function(swap.get_py_compiler(), this->name(), &AttentionNode::run, types,
                                /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto metadata = torch::dynamo::autograd::get_input_metadata(this->next_edges());
    using Metadata = std::decay_t<decltype(metadata)>;
    return compiler->call_function(swap.get_py_compiler(), "apply_functional", function, grads,
                                   arguments,
                                   torch::dynamo::autograd::IValuePacker<Metadata>::pack(metadata));
  }
};

template <class... Arrays>
variable_list joined(const Arrays&... arrays) {
  variable_list list;
  (list.insert(list.end(), arrays.begin(), arrays.end()), ...);
  return list;
}

// Edges: query, key, value, bias.
struct AttentionBackward final
    : AttentionNode<AttentionBackward, 4, kShared, 1u << kOut | 1u << kLse> {
  using AttentionNode::AttentionNode;
  std::string name() const override { return "AttentionBackward"; }

  static variable_list gradients(const variable_list& grads, const Call& call,
                                 const Arguments& arguments) {
    return joined(call.backward(grads[0], grads[1], wanted<4>(arguments)));
  }
};

// Edges: grad_out, grad_lse, query, key, value, bias. With cotangents c of the gradients, that is
// the derivative along c of forward, and (a Hessian is symmetric) of backward.
struct AttentionBackwardBackward final
    : AttentionNode<AttentionBackwardBackward, 6, kShared + 2, 0> {
  enum { kGradOut = kShared, kGradLse };
  using AttentionNode::AttentionNode;
  std::string name() const override { return "AttentionBackwardBackward"; }

  static variable_list gradients(const variable_list& grads, const Call& call,
                                 const Arguments& arguments) {
    const Direction c{grads[0], grads[1], grads[2], grads[3], {}, {}};
    const auto forward = call.forward_tangent(c);
    return joined(forward,
                  call.backward_tangent(kept(arguments, kGradOut), kept(arguments, kGradLse), c,
                                        forward, wanted<4>(arguments, 2)));
  }
};

// Edges: query, key, value, bias, and their tangents. forward_tangent is linear in the tangents.
struct AttentionForwardTangentBackward final
    : AttentionNode<AttentionForwardTangentBackward, 8, kShared + 6, 3u << (kShared + 4)> {
  enum { kTangents = kShared, kOutTangent = kShared + 4, kLseTangent };
  using AttentionNode::AttentionNode;
  std::string name() const override { return "AttentionForwardTangentBackward"; }

  static variable_list gradients(const variable_list& grads, const Call& call, const Arguments& a) {
    const Direction d{kept(a, kTangents),
                      kept(a, kTangents + 1),
                      kept(a, kTangents + 2),
                      kept(a, kTangents + 3),
                      {},
                      {}};
    const std::array<Tensor, 2> forward{kept(a, kOutTangent), kept(a, kLseTangent)};
    return joined(call.backward_tangent(grads[0], grads[1], d, forward, wanted<4>(a)),
                  call.backward(grads[0], grads[1], wanted<4>(a, 4)));
  }
};

// Edges: grad_out, grad_lse, query, key, value, bias, and the tangents of query, key, value, bias,
// grad_out, grad_lse. Where the inputs move twice, it takes second derivatives.
struct AttentionBackwardTangentBackward final
    : AttentionNode<AttentionBackwardTangentBackward, 12, kShared + 8, 0> {
  enum { kGradOut = kShared, kGradLse, kTangents };
  using AttentionNode::AttentionNode;
  std::string name() const override { return "AttentionBackwardTangentBackward"; }

  static variable_list gradients(const variable_list& grads, const Call& call, const Arguments& a) {
    const Tensor grad_out = kept(a, kGradOut), grad_lse = kept(a, kGradLse);
    const Direction d{kept(a, kTangents),     kept(a, kTangents + 1), kept(a, kTangents + 2),
                      kept(a, kTangents + 3), kept(a, kTangents + 4), kept(a, kTangents + 5)};
    const Direction c{grads[0], grads[1], grads[2], grads[3], {}, {}};
    const auto wants = wanted<2>(a);
    const auto forward = call.forward_tangent(c);
    return joined(wants[0] || wants[1] ? call.forward_second(d, c) : std::array<Tensor, 2>{},
                  call.backward_second(grad_out, grad_lse, d, c, wanted<4>(a, 2)),
                  call.backward_tangent(grad_out, grad_lse, c, forward, wanted<4>(a, 6)), forward);
  }
};

// Edges: query, key, bias.
struct AttentionWeightsBackward final
    : AttentionNode<AttentionWeightsBackward, 3, kShared, 1u << kOut> {
  using AttentionNode::AttentionNode;
  std::string name() const override { return "AttentionWeightsBackward"; }

  static variable_list gradients(const variable_list& grads, const Call& call,
                                 const Arguments& arguments) {
    return joined(call.weights_backward(grads[0], call.out, wanted<3>(arguments)));
  }
};

// Edges: grad_weights, query, key, bias.
struct AttentionWeightsBackwardBackward final
    : AttentionNode<AttentionWeightsBackwardBackward, 4, kShared + 1, 0> {
  using AttentionNode::AttentionNode;
  std::string name() const override { return "AttentionWeightsBackwardBackward"; }

  static variable_list gradients(const variable_list& grads, const Call& call, const Arguments& a) {
    const Direction c{grads[0], grads[1], {}, grads[2], {}, {}};
    const composite::Inputs inputs = call.inputs();
    const composite::Weights weights = call.weights();
    const Tensor along =
        wanted<1>(a)[0] ? composite::weights_tangent(inputs, weights, c) : Tensor();
    return joined(std::array<Tensor, 1>{along},
                  composite::weights_backward_tangent(inputs, weights, kept(a, kShared), c, {},
                                                      wanted<3>(a, 1)));
  }
};

// The Node of an operator on `inputs`, one of which requires a gradient. Undefined results were not
// asked for.
template <class N, class Results, class... Inputs>
auto add_node(const KeptOptions& options, const Results& results, const Inputs&... inputs) {
  auto node = make_node<N>(options);
  node->set_next_edges(collect_next_edges(inputs...));
  for (const Tensor& result : results)
    if (result.defined())
      set_history(result, node);
    else
      node->add_input_metadata(Node::undefined_input());
  return node;
}

template <class N>
using Pointer = decltype(make_node<N>(std::declval<KeptOptions>()));

// lse_low is a cache that has no derivative.
std::tuple<Tensor, Tensor, Tensor> forward(c10::DispatchKeySet keys, const Tensor& query,
                                           const Tensor& key, const Tensor& value,
                                           const OptionalTensor& mask, const OptionalTensor& bias,
                                           const OptionalTensor& key_lengths,
                                           const OptionalTensor& seed, OptionalString corner,
                                           OptionalSymInt window_left, OptionalSymInt window_right,
                                           double dropout_p, double scale, bool uniform_empty_rows,
                                           c10::SymIntArrayRef origin) {
  std::tuple<Tensor, Tensor, Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = ops::forward().redispatch(keys & c10::after_autograd_keyset, query, key, value, mask,
                                        bias, key_lengths, seed, corner, window_left, window_right,
                                        dropout_p, scale, uniform_empty_rows, origin);
  }
  const auto& [out, lse, lse_low] = results;
  const Direction d{tangent(query), tangent(key), tangent(value), tangent(bias), {}, {}};
  const bool graph = compute_requires_grad(query, key, value, bias);
  if (!graph && !moves_inputs(d)) return results;

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
    std::array<bool, 4> output_mask) {
  std::tuple<Tensor, Tensor, Tensor, Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = ops::backward().redispatch(keys & c10::after_autograd_keyset, grad_out, grad_lse,
                                         query, key, value, out, lse, lse_low, mask, bias,
                                         key_lengths, seed, corner, window_left, window_right,
                                         dropout_p, scale, uniform_empty_rows, origin, output_mask);
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

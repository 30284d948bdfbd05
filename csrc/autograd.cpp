// The Autograd key: first derivatives in reverse mode, the way PyTorch's generated code does it (a
// Node for each differentiable operator, which calls the next operator through the dispatcher). So
// every transform that understands PyTorch's own operators understands these.
#include <ATen/core/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>
#include <torch/version.h>

#include <string>
#include <vector>

#include "ops.h"

namespace mha_ext {
namespace {

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

constexpr const char* kNoSecondDerivative =
    "mha_ext: the second derivative of attention is not available in this version; use "
    "mha_ext.reference.attention, which is differentiable to any order";

bool has_tangent(const Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}
bool has_tangent(const OptionalTensor& tensor) { return tensor && has_tangent(*tensor); }

// An operator that ignored a tangent would give a derivative of zero, silently.
template <class... Tensors>
void refuse_tangents(const Tensors&... tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !(has_tangent(tensors) || ...),
      "mha_ext: forward-mode derivatives of attention are not available in this version; use "
      "mha_ext.reference.attention, which is differentiable in every mode");
}

// Backward operators: their results depend on these tensors, and to differentiate them again must
// raise.
template <class Results, class... Tensors>
void refuse_second_derivative(const Results& results, const Tensors&... tensors) {
  if (!compute_requires_grad(tensors...)) return;
  const auto node =
      make_node<torch::autograd::Error>(kNoSecondDerivative, collect_next_edges(tensors...));
  std::apply([&](const auto&... result) { (set_history(result, node), ...); }, results);
}

// What a backward operator takes after the incoming gradients, in the order of its schema.
using Arguments = std::vector<c10::IValue>;

c10::IValue argument(const SavedVariable& saved) {
  const Tensor tensor = saved.unpack();
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

std::optional<std::string> text(OptionalString view) {
  return view ? std::optional<std::string>(*view) : std::nullopt;
}

// The options that outlive the call.
struct KeptOptions {
  std::optional<std::string> corner;
  OptionalSymInt window_left, window_right;
  std::optional<double> dropout_p;  // attention_weights has none
  double scale;
  bool uniform_empty_rows;
  std::vector<c10::SymInt> origin;

  void append_to(Arguments& arguments) const {
    arguments.insert(arguments.end(), {corner, window_left, window_right});
    if (dropout_p) arguments.emplace_back(*dropout_p);
    arguments.insert(arguments.end(), {scale, uniform_empty_rows, origin});
  }
  void collect(CompiledNodeArgs& args) const {
    args.collect(corner);
    args.collect(window_left);
    args.collect(window_right);
    args.collect(dropout_p);
    args.collect(scale);
    args.collect(uniform_empty_rows);
    args.collect(origin);
  }
  // visit(options) for what compiled autograd may replace by symbols, in the order of collect.
  template <class Visit>
  void visit_symbols(const Visit& visit) {
    visit(window_left);
    visit(window_right);
    visit(origin);
  }
};

// A Node of `inputs` differentiable inputs that keeps `count` tensors, the last `outputs` of them
// its own differentiable results. Derived has arguments() and run(grads, arguments), a pure
// function that compiled autograd puts into its graph.
template <class Derived, int inputs, int count, int outputs>
struct AttentionNode : Node {
  SavedVariable saved[count];
  KeptOptions options;

  explicit AttentionNode(KeptOptions options) : options(std::move(options)) {}

  template <class... Tensors>
  void save(const Tensors&... tensors) {
    static_assert(sizeof...(tensors) == count);
    int i = 0;
    ((saved[i] = SavedVariable(tensors, is_output(i)), i++), ...);
  }
  static bool is_output(int i) { return i >= count - outputs; }
  c10::IValue result(int i) { return saved[i].unpack(this->getptr()); }

  c10::List<bool> wanted() {
    c10::List<bool> wanted;
    for (size_t i = 0; i < inputs; i++) wanted.push_back(this->task_should_compute_output(i));
    return wanted;
  }
  // The gradients that were wanted, from the results on the stack.
  static variable_list gradients(torch::jit::Stack&& results, const c10::IValue& wanted) {
    variable_list found(inputs);
    const c10::List<bool> mask = wanted.toBoolList();
    for (size_t i = 0; i < inputs; i++)
      if (mask[i]) found[i] = std::move(results[i]).toTensor();
    return found;
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return Derived::run(grads, static_cast<Derived*>(this)->arguments());
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
    const Arguments arguments = static_cast<Derived*>(this)->arguments();
    for (SavedVariable& variable : saved) swap.after(variable);
    options.visit_symbols([&](auto& value) { swap.after(value); });

    // The sizes of `grads` mean nothing here, so run() cannot be traced now: it becomes one call in
    // the graph.
    std::vector<c10::TypePtr> types;
    for (const c10::IValue& argument : arguments)
      types.push_back(argument.isTensor() ? c10::TensorType::get() : argument.type());
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string function =
        compiler->bind_function(swap.get_py_compiler(), this->name(), &Derived::run, types,
                                /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto metadata = torch::dynamo::autograd::get_input_metadata(this->next_edges());
    using Metadata = std::decay_t<decltype(metadata)>;
    return compiler->call_function(swap.get_py_compiler(), "apply_functional", function, grads,
                                   arguments,
                                   torch::dynamo::autograd::IValuePacker<Metadata>::pack(metadata));
  }
};

// Edges: query, key, value, bias.
struct AttentionBackward final : AttentionNode<AttentionBackward, 4, 10, 2> {
  enum Saved { kQuery, kKey, kValue, kMask, kBias, kKeyLengths, kSeed, kLseLow, kOut, kLse };
  using AttentionNode::AttentionNode;

  std::string name() const override { return "AttentionBackward"; }

  Arguments arguments() {
    Arguments list{argument(saved[kQuery]),
                   argument(saved[kKey]),
                   argument(saved[kValue]),
                   result(kOut),
                   result(kLse),
                   argument(saved[kLseLow]),
                   argument(saved[kMask]),
                   argument(saved[kBias]),
                   argument(saved[kKeyLengths]),
                   argument(saved[kSeed])};
    options.append_to(list);
    list.emplace_back(wanted());
    return list;
  }

  // A result that was not used has an undefined gradient.
  static variable_list run(const variable_list& grads, const Arguments& arguments) {
    const Tensor &grad_out = grads[0], &grad_lse = grads[1];
    if (!grad_out.defined() && !grad_lse.defined()) return variable_list(4);
    torch::jit::Stack stack;
    stack.reserve(2 + arguments.size());
    stack.emplace_back(grad_out.defined() ? grad_out : at::zeros_like(arguments[3].toTensor()));
    stack.emplace_back(grad_lse.defined() ? c10::IValue(grad_lse) : c10::IValue());
    stack.insert(stack.end(), arguments.begin(), arguments.end());
    ops::backward().callBoxed(stack);
    return gradients(std::move(stack), arguments.back());
  }
};

// Edges: query, key, bias.
struct AttentionWeightsBackward final : AttentionNode<AttentionWeightsBackward, 3, 8, 1> {
  enum Saved { kQuery, kKey, kLse, kLseLow, kMask, kBias, kKeyLengths, kWeights };
  using Indices = std::optional<std::vector<int64_t>>;
  Indices heads, rows;

  AttentionWeightsBackward(KeptOptions options, at::OptionalIntArrayRef heads,
                           at::OptionalIntArrayRef rows)
      : AttentionNode(std::move(options)),
        heads(heads ? Indices(heads->vec()) : std::nullopt),
        rows(rows ? Indices(rows->vec()) : std::nullopt) {}

  std::string name() const override { return "AttentionWeightsBackward"; }

  void compiled_args(CompiledNodeArgs& args) const override {
    AttentionNode::compiled_args(args);
    args.collect(heads);
    args.collect(rows);
  }

  Arguments arguments() {
    Arguments list{result(kWeights),       argument(saved[kQuery]),     argument(saved[kKey]),
                   argument(saved[kLse]),  argument(saved[kLseLow]),    argument(saved[kMask]),
                   argument(saved[kBias]), argument(saved[kKeyLengths])};
    options.append_to(list);
    list.insert(list.end(), {heads, rows, wanted()});
    return list;
  }

  static variable_list run(const variable_list& grads, const Arguments& arguments) {
    if (!grads[0].defined()) return variable_list(3);
    torch::jit::Stack stack;
    stack.reserve(1 + arguments.size());
    stack.emplace_back(grads[0]);
    stack.insert(stack.end(), arguments.begin(), arguments.end());
    ops::weights_backward().callBoxed(stack);
    return gradients(std::move(stack), arguments.back());
  }
};

// lse_low is a cache that has no derivative.
std::tuple<Tensor, Tensor, Tensor> forward(c10::DispatchKeySet keys, const Tensor& query,
                                           const Tensor& key, const Tensor& value,
                                           const OptionalTensor& mask, const OptionalTensor& bias,
                                           const OptionalTensor& key_lengths,
                                           const OptionalTensor& seed, OptionalString corner,
                                           OptionalSymInt window_left, OptionalSymInt window_right,
                                           double dropout_p, double scale, bool uniform_empty_rows,
                                           c10::SymIntArrayRef origin) {
  refuse_tangents(query, key, value, bias);
  std::tuple<Tensor, Tensor, Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = ops::forward().redispatch(keys & c10::after_autograd_keyset, query, key, value, mask,
                                        bias, key_lengths, seed, corner, window_left, window_right,
                                        dropout_p, scale, uniform_empty_rows, origin);
  }
  if (compute_requires_grad(query, key, value, bias)) {
    const auto node =
        make_node<AttentionBackward>(KeptOptions{text(corner), window_left, window_right, dropout_p,
                                                 scale, uniform_empty_rows, origin.vec()});
    node->set_next_edges(collect_next_edges(query, key, value, bias));
    const auto& [out, lse, lse_low] = results;
    set_history(out, node);
    set_history(lse, node);
    node->save(query, key, value, mask, bias, key_lengths, seed, lse_low, out, lse);
  }
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
  refuse_tangents(grad_out, grad_lse, query, key, value, bias);
  std::tuple<Tensor, Tensor, Tensor, Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = ops::backward().redispatch(keys & c10::after_autograd_keyset, grad_out, grad_lse,
                                         query, key, value, out, lse, lse_low, mask, bias,
                                         key_lengths, seed, corner, window_left, window_right,
                                         dropout_p, scale, uniform_empty_rows, origin, output_mask);
  }
  refuse_second_derivative(results, grad_out, grad_lse, query, key, value, bias);
  return results;
}

// lse and lse_low are caches here: no derivative flows through it.
Tensor weights(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
               const OptionalTensor& lse, const OptionalTensor& lse_low, const OptionalTensor& mask,
               const OptionalTensor& bias, const OptionalTensor& key_lengths, OptionalString corner,
               OptionalSymInt window_left, OptionalSymInt window_right, double scale,
               bool uniform_empty_rows, c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads,
               at::OptionalIntArrayRef rows) {
  refuse_tangents(query, key, bias);
  Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = ops::weights().redispatch(keys & c10::after_autograd_keyset, query, key, lse, lse_low,
                                       mask, bias, key_lengths, corner, window_left, window_right,
                                       scale, uniform_empty_rows, origin, heads, rows);
  }
  if (compute_requires_grad(query, key, bias)) {
    const auto node = make_node<AttentionWeightsBackward>(
        KeptOptions{text(corner), window_left, window_right, /*dropout_p=*/std::nullopt, scale,
                    uniform_empty_rows, origin.vec()},
        heads, rows);
    node->set_next_edges(collect_next_edges(query, key, bias));
    set_history(result, node);
    node->save(query, key, lse, lse_low, mask, bias, key_lengths, result);
  }
  return result;
}

std::tuple<Tensor, Tensor, Tensor> weights_backward(
    c10::DispatchKeySet keys, const Tensor& grad_weights, const Tensor& weights,
    const Tensor& query, const Tensor& key, const OptionalTensor& lse,
    const OptionalTensor& lse_low, const OptionalTensor& mask, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, OptionalString corner, OptionalSymInt window_left,
    OptionalSymInt window_right, double scale, bool uniform_empty_rows, c10::SymIntArrayRef origin,
    at::OptionalIntArrayRef heads, at::OptionalIntArrayRef rows, std::array<bool, 3> output_mask) {
  refuse_tangents(grad_weights, query, key, bias);
  std::tuple<Tensor, Tensor, Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = ops::weights_backward().redispatch(
        keys & c10::after_autograd_keyset, grad_weights, weights, query, key, lse, lse_low, mask,
        bias, key_lengths, corner, window_left, window_right, scale, uniform_empty_rows, origin,
        heads, rows, output_mask);
  }
  refuse_second_derivative(results, grad_weights, query, key, bias);
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, Autograd, m) {
  m.impl("attention_forward", TORCH_FN(forward));
  m.impl("attention_backward", TORCH_FN(backward));
  m.impl("attention_weights", TORCH_FN(weights));
  m.impl("attention_weights_backward", TORCH_FN(weights_backward));
}

}  // namespace mha_ext

// The Nodes: what each operator's gradient is made of. Each calls the next operator, or where two
// directions meet a composition. For autograd.cpp alone.
#pragma once
#include <ATen/core/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include "autograd_call.h"

namespace mha_ext {
namespace {

using torch::autograd::collect_next_edges;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::set_history;
using torch::autograd::variable_list;
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
    return joined(call.backward(grads[0], grads[1], wanted<4>(arguments), /*all_keys=*/true));
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

}  // namespace
}  // namespace mha_ext

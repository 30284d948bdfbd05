// linear(input, weight, bias) = input weightᵀ + bias beside its kernel: checks, the Meta and the
// Autograd key. Both products of its backward are the same operator on transposed views, so its
// derivatives of every order are made of it alone.
#include "linear.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>
#include <torch/version.h>

namespace mha_ext {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

const c10::TypedOperatorHandle<LinearSignature>& linear_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mha_ext::linear", "")
                             .typed<LinearSignature>();
  return op;
}

void check_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight must be [out_features, in_features], not ",
                    weight.sym_sizes());
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.sym_size(-1) == weight.sym_size(1),
                    "input must be [..., in_features] with in_features = ", weight.sym_size(1),
                    " as in weight, not ", input.sym_sizes());
  TORCH_CHECK_VALUE(!bias || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)),
                    "bias must be [out_features] = [", weight.sym_size(0), "] as in weight, not ",
                    bias ? bias->sym_sizes() : c10::SymIntArrayRef{});
  TORCH_CHECK_TYPE(at::isFloatingType(input.scalar_type()),
                   "input must be of a floating dtype, not ", input.scalar_type(),
                   "; convert it, for example by input.float()");
  TORCH_CHECK_TYPE(weight.scalar_type() == input.scalar_type(), "weight must have input's dtype ",
                   input.scalar_type(), ", not ", weight.scalar_type(), "; convert one of them");
  TORCH_CHECK_TYPE(!bias || bias->scalar_type() == input.scalar_type(),
                   "bias must have input's dtype ", input.scalar_type(), ", not ",
                   bias ? bias->scalar_type() : at::kFloat, "; convert one of them");
}

namespace {

using torch::autograd::collect_next_edges;
using torch::autograd::compute_requires_grad;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::set_history;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

Tensor meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  check_linear(input, weight, bias);
  auto sizes = input.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, input.options());
}

// [rows, width]; a single row for a vector.
Tensor as_matrix(const Tensor& tensor) {
  c10::SymInt rows = 1;
  for (int64_t dim = 0; dim < tensor.dim() - 1; dim++) rows *= tensor.sym_size(dim);
  return tensor.reshape_symint({rows, tensor.sym_size(-1)});
}

struct LinearBackward final : Node {
  SavedVariable input, weight;

  std::string name() const override { return "LinearBackward"; }

  // What compiled autograd puts into its graph: (input, weight, which gradients are wanted).
  using Arguments = std::vector<c10::IValue>;
  Arguments arguments() {
    c10::List<bool> wanted;
    for (size_t i = 0; i < 3; i++) wanted.push_back(task_should_compute_output(i));
    return {input.unpack(), weight.unpack(), wanted};
  }
  static variable_list run(const variable_list& grads, const Arguments& arguments) {
    variable_list found(3);
    if (!grads[0].defined()) return found;
    const c10::List<bool> wanted = arguments[2].toBoolList();
    if (wanted[0]) found[0] = linear_op().call(grads[0], arguments[1].toTensor().t(), std::nullopt);
    if (!wanted[1] && !wanted[2]) return found;
    const Tensor grad = as_matrix(grads[0]);
    if (wanted[1])
      found[1] = linear_op().call(grad.t(), as_matrix(arguments[0].toTensor()).t(), std::nullopt);
    if (wanted[2]) found[2] = grad.sum(0);
    return found;
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return run(grads, arguments());
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    input.reset_data();
    weight.reset_data();
  }
  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(input, /*is_output=*/false);
    args.collect(weight, /*is_output=*/false);
  }
  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& swap) override {
    swap.before(input);
    swap.before(weight);
    const Arguments kept = arguments();
    swap.after(input);
    swap.after(weight);
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const std::vector<c10::TypePtr> types{c10::TensorType::get(), c10::TensorType::get(),
                                          kept[2].type()};
    const std::string function =
        compiler->bind_function(swap.get_py_compiler(), name(), &LinearBackward::run, types,
                                /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto metadata = torch::dynamo::autograd::get_input_metadata(next_edges());
    using Metadata = std::decay_t<decltype(metadata)>;
    return compiler->call_function(swap.get_py_compiler(), "apply_functional", function, grads,
                                   kept,
                                   torch::dynamo::autograd::IValuePacker<Metadata>::pack(metadata));
  }
};

// PyTorch 2.13 made Node an intrusive_ptr target.
auto make_node() {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
  return c10::make_intrusive<LinearBackward>();
#else
  return std::shared_ptr<LinearBackward>(new LinearBackward, torch::autograd::deleteNode);
#endif
}

Tensor tangent_of(const Tensor& tensor) {
  return tensor.defined() ? tensor._fw_grad(/*level=*/0) : Tensor();
}
Tensor primal_of(const Tensor& tensor) { return tensor._fw_primal(/*level=*/0); }

// linear is linear in (input, bias) and in weight.
Tensor tangent(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const Tensor dx = tangent_of(input), dw = tangent_of(weight),
               db = bias ? tangent_of(*bias) : Tensor();
  Tensor sum;
  const auto add = [&](const Tensor& term) { sum = sum.defined() ? at::add(sum, term) : term; };
  if (dx.defined()) add(linear_op().call(dx, primal_of(weight), std::nullopt));
  if (dw.defined()) add(linear_op().call(primal_of(input), dw, std::nullopt));
  if (!db.defined()) return sum;
  if (sum.defined()) return at::add(sum, db);
  auto sizes = input.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return db.expand_symint(sizes).contiguous();
}

Tensor autograd(c10::DispatchKeySet keys, const Tensor& input, const Tensor& weight,
                const OptionalTensor& bias) {
  Tensor out;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    out = linear_op().redispatch(keys & c10::after_autograd_keyset, input, weight, bias);
  }
  if (compute_requires_grad(input, weight, bias)) {
    const auto node = make_node();
    node->set_next_edges(collect_next_edges(input, weight, bias));
    set_history(out, node);
    node->input = SavedVariable(input, /*is_output=*/false);
    node->weight = SavedVariable(weight, /*is_output=*/false);
  }
  if (const Tensor dot = tangent(input, weight, bias); dot.defined())
    out._set_fw_grad(dot, /*level=*/0, /*is_inplace_op=*/false);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, Meta, m) { m.impl("linear", TORCH_FN(meta)); }
TORCH_LIBRARY_IMPL(mha_ext, Autograd, m) { m.impl("linear", TORCH_FN(autograd)); }

}  // namespace mha_ext

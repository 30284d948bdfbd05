// The table of contents: the operators' schemas, and the pybind11 module that calls them.
#include "ops.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/pages.h"
#include "direct.h"
#include "explain.h"

// setup.py defines these; a build by hand need not.
#ifndef MHA_EXT_VERSION
#define MHA_EXT_VERSION "unknown"
#endif
#ifndef MHA_EXT_TORCH
#define MHA_EXT_TORCH "unknown"
#endif
#ifndef MHA_EXT_COMPILER
#define MHA_EXT_COMPILER "unknown"
#endif
#ifndef MHA_EXT_ISAS
#define MHA_EXT_ISAS "unknown"
#endif
#ifndef MHA_EXT_CUDA
#define MHA_EXT_CUDA "no (not built)"
#endif

// Every operator is a pure function: randomness is the argument `seed`. An unwanted gradient is an
// empty tensor.
TORCH_LIBRARY(mha_ext, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", tags);
  m.def(
      "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, "
      "Tensor? key_lengths, Tensor? seed, *, str? corner=None, SymInt? window_left=None, "
      "SymInt? window_right=None, float dropout_p=0.0, float scale, bool uniform_empty_rows=False, "
      "SymInt[4] origin=0, bool with_lse=True) -> (Tensor out, Tensor lse, Tensor lse_low)",
      tags);
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, "
      "Tensor value, Tensor out, Tensor lse, Tensor? lse_low, Tensor? mask, Tensor? bias, "
      "Tensor? key_lengths, Tensor? seed, *, str? corner=None, SymInt? window_left=None, "
      "SymInt? window_right=None, float dropout_p=0.0, float scale, bool uniform_empty_rows=False, "
      "SymInt[4] origin=0, bool[4] output_mask, bool all_keys=False) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)",
      tags);
  m.def(
      "attention_forward_tangent(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
      "Tensor? lse_low, Tensor? query_tangent, Tensor? key_tangent, Tensor? value_tangent, "
      "Tensor? bias_tangent, Tensor? mask, Tensor? bias, Tensor? key_lengths, Tensor? seed, *, "
      "str? corner=None, SymInt? window_left=None, SymInt? window_right=None, "
      "float dropout_p=0.0, float scale, bool uniform_empty_rows=False, SymInt[4] origin=0) "
      "-> (Tensor out_tangent, Tensor lse_tangent)",
      tags);
  m.def(
      "attention_backward_tangent(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, "
      "Tensor value, Tensor out, Tensor lse, Tensor? lse_low, Tensor? out_tangent, "
      "Tensor? lse_tangent, Tensor? query_tangent, Tensor? key_tangent, Tensor? value_tangent, "
      "Tensor? bias_tangent, Tensor? grad_out_tangent, Tensor? grad_lse_tangent, Tensor? mask, "
      "Tensor? bias, Tensor? key_lengths, Tensor? seed, *, str? corner=None, "
      "SymInt? window_left=None, SymInt? window_right=None, float dropout_p=0.0, float scale, "
      "bool uniform_empty_rows=False, SymInt[4] origin=0, bool[4] output_mask) "
      "-> (Tensor grad_query_tangent, Tensor grad_key_tangent, Tensor grad_value_tangent, "
      "Tensor grad_bias_tangent)",
      tags);
  m.def(
      "attention_weights(Tensor query, Tensor key, Tensor? lse, Tensor? lse_low, Tensor? mask, "
      "Tensor? bias, Tensor? key_lengths, *, str? corner=None, SymInt? window_left=None, "
      "SymInt? window_right=None, float scale, bool uniform_empty_rows=False, "
      "SymInt[4] origin=0, int[]? heads=None, int[]? rows=None) -> Tensor weights",
      tags);
  m.def(
      "attention_weights_backward(Tensor grad_weights, Tensor weights, Tensor query, Tensor key, "
      "Tensor? lse, Tensor? lse_low, Tensor? mask, Tensor? bias, Tensor? key_lengths, *, "
      "str? corner=None, SymInt? window_left=None, SymInt? window_right=None, float scale, "
      "bool uniform_empty_rows=False, SymInt[4] origin=0, int[]? heads=None, int[]? rows=None, "
      "bool[3] output_mask) -> (Tensor grad_query, Tensor grad_key, Tensor grad_bias)",
      tags);
}

namespace mha_ext {
namespace ops {
namespace {

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

const c10::TypedOperatorHandle<Forward>& forward() {
  static const auto op = find<Forward>("mha_ext::attention_forward");
  return op;
}
const c10::TypedOperatorHandle<Backward>& backward() {
  static const auto op = find<Backward>("mha_ext::attention_backward");
  return op;
}
const c10::TypedOperatorHandle<ForwardTangent>& forward_tangent() {
  static const auto op = find<ForwardTangent>("mha_ext::attention_forward_tangent");
  return op;
}
const c10::TypedOperatorHandle<BackwardTangent>& backward_tangent() {
  static const auto op = find<BackwardTangent>("mha_ext::attention_backward_tangent");
  return op;
}
const c10::TypedOperatorHandle<Weights>& weights() {
  static const auto op = find<Weights>("mha_ext::attention_weights");
  return op;
}
const c10::TypedOperatorHandle<WeightsBackward>& weights_backward() {
  static const auto op = find<WeightsBackward>("mha_ext::attention_weights_backward");
  return op;
}

}  // namespace ops

namespace {

namespace py = pybind11;
using Text = std::optional<std::string>;
using Integer = std::optional<int64_t>;
using Indices = std::optional<std::vector<int64_t>>;
using Positions = std::array<int64_t, 4>;

OptionalString view(const Text& text) { return text ? OptionalString(*text) : std::nullopt; }
OptionalSymInt symbol(Integer value) { return value ? OptionalSymInt(*value) : std::nullopt; }
c10::SymIntArrayRef symbols(const Positions& origin) { return c10::fromIntArrayRefSlow(origin); }
at::OptionalIntArrayRef list(const Indices& indices) {
  return indices ? at::OptionalIntArrayRef(*indices) : std::nullopt;
}
double scale_or_default(std::optional<double> scale, const Tensor& query) {
  return scale.value_or(query.dim() ? 1.0 / std::sqrt(static_cast<double>(query.size(-1))) : 1.0);
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_lengths, const OptionalTensor& seed,
    const Text& corner, Integer window_left, Integer window_right, double dropout_p,
    std::optional<double> scale, bool uniform_empty_rows, const Positions& origin, bool with_lse) {
  return ops::forward().call(query, key, value, mask, bias, key_lengths, seed, view(corner),
                             symbol(window_left), symbol(window_right), dropout_p,
                             scale_or_default(scale, query), uniform_empty_rows, symbols(origin),
                             with_lse);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& lse_low,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_lengths,
    const OptionalTensor& seed, const Text& corner, Integer window_left, Integer window_right,
    double dropout_p, std::optional<double> scale, bool uniform_empty_rows, const Positions& origin,
    const std::array<bool, 4>& output_mask, bool all_keys) {
  return ops::backward().call(grad_out, grad_lse, query, key, value, out, lse, lse_low, mask, bias,
                              key_lengths, seed, view(corner), symbol(window_left),
                              symbol(window_right), dropout_p, scale_or_default(scale, query),
                              uniform_empty_rows, symbols(origin), output_mask, all_keys);
}

std::tuple<Tensor, Tensor> attention_forward_tangent(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& lse, const OptionalTensor& lse_low, const OptionalTensor& query_tangent,
    const OptionalTensor& key_tangent, const OptionalTensor& value_tangent,
    const OptionalTensor& bias_tangent, const OptionalTensor& mask, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, const OptionalTensor& seed, const Text& corner,
    Integer window_left, Integer window_right, double dropout_p, std::optional<double> scale,
    bool uniform_empty_rows, const Positions& origin) {
  return ops::forward_tangent().call(
      query, key, value, out, lse, lse_low, query_tangent, key_tangent, value_tangent, bias_tangent,
      mask, bias, key_lengths, seed, view(corner), symbol(window_left), symbol(window_right),
      dropout_p, scale_or_default(scale, query), uniform_empty_rows, symbols(origin));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward_tangent(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& lse_low,
    const OptionalTensor& out_tangent, const OptionalTensor& lse_tangent,
    const OptionalTensor& query_tangent, const OptionalTensor& key_tangent,
    const OptionalTensor& value_tangent, const OptionalTensor& bias_tangent,
    const OptionalTensor& grad_out_tangent, const OptionalTensor& grad_lse_tangent,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_lengths,
    const OptionalTensor& seed, const Text& corner, Integer window_left, Integer window_right,
    double dropout_p, std::optional<double> scale, bool uniform_empty_rows, const Positions& origin,
    const std::array<bool, 4>& output_mask) {
  return ops::backward_tangent().call(
      grad_out, grad_lse, query, key, value, out, lse, lse_low, out_tangent, lse_tangent,
      query_tangent, key_tangent, value_tangent, bias_tangent, grad_out_tangent, grad_lse_tangent,
      mask, bias, key_lengths, seed, view(corner), symbol(window_left), symbol(window_right),
      dropout_p, scale_or_default(scale, query), uniform_empty_rows, symbols(origin), output_mask);
}

Tensor attention_weights(const Tensor& query, const Tensor& key, const OptionalTensor& lse,
                         const OptionalTensor& lse_low, const OptionalTensor& mask,
                         const OptionalTensor& bias, const OptionalTensor& key_lengths,
                         const Text& corner, Integer window_left, Integer window_right,
                         std::optional<double> scale, bool uniform_empty_rows,
                         const Positions& origin, const Indices& heads, const Indices& rows) {
  return ops::weights().call(query, key, lse, lse_low, mask, bias, key_lengths, view(corner),
                             symbol(window_left), symbol(window_right),
                             scale_or_default(scale, query), uniform_empty_rows, symbols(origin),
                             list(heads), list(rows));
}

// [B, L, heads * D] -> [B, heads, L, D], as a view.
Tensor split_heads(const char* name, const Tensor& tensor, const char* count, int64_t heads) {
  TORCH_CHECK_VALUE(heads >= 1, count, " must be at least 1, but is ", heads,
                    "; pass the number of heads that ", name, " holds");
  TORCH_CHECK_VALUE(tensor.dim() == 3, name, " must have 3 dimensions [batch, length, ", count,
                    " * head_dim], but has shape ", tensor.sizes(),
                    "; merge the heads into the last dimension with ", name, ".flatten(2)");
  TORCH_CHECK_VALUE(tensor.size(2) % heads == 0, name, " must have a width that ", count, " = ",
                    heads, " divides, but has ", tensor.size(2), "; project it to a multiple of ",
                    heads);
  return tensor.view({tensor.size(0), tensor.size(1), heads, tensor.size(2) / heads})
      .transpose(1, 2);
}

// The whole attention in one call: split, scaled and masked scores, softmax, product, merge.
Tensor multi_head_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                            int64_t num_heads, Integer num_kv_heads, const OptionalTensor& mask,
                            const OptionalTensor& bias, const OptionalTensor& key_lengths,
                            const OptionalTensor& seed, const Text& corner, Integer window_left,
                            Integer window_right, double dropout_p, std::optional<double> scale,
                            bool uniform_empty_rows) {
  const int64_t kv_heads = num_kv_heads.value_or(num_heads);
  const char* kv_count = num_kv_heads ? "num_kv_heads" : "num_heads";
  const Tensor q = split_heads("query", query, "num_heads", num_heads);
  const Tensor k = split_heads("key", key, kv_count, kv_heads);
  const Tensor v = split_heads("value", value, kv_count, kv_heads);
  const Tensor out = std::get<0>(
      attention_forward(q, k, v, mask, bias, key_lengths, seed, corner, window_left, window_right,
                        dropout_p, scale, uniform_empty_rows, Positions{}, /*with_lse=*/false));
  return out.transpose(1, 2).view({out.size(0), out.size(2), out.size(1) * out.size(3)});
}

std::vector<std::string> isas(bool only_supported) {
  std::vector<std::string> names;
  for (int i = 0; i < cpu::isa_count(); i++)
    if (!only_supported || cpu::isa_supported(i)) names.push_back(cpu::isa_name(i));
  return names;
}

void set_isa(const Text& name) {
  TORCH_CHECK_VALUE(cpu::select_isa(name ? name->c_str() : nullptr),
                    "name must be None (the best) or an instruction set that is compiled in and "
                    "that this CPU has, ",
                    c10::Join(", ", isas(/*only_supported=*/true)), ", but is \"",
                    name.value_or("None"), "\"; see supported_isas()");
}

double fma_peak(const std::string& dtype, double seconds) {
  const char* names[kDTypes] = {"float64", "float32", "bfloat16", "float16"};
  for (int i = 0; i < kDTypes; i++)
    if (dtype == names[i]) return cpu::fma_peak(static_cast<DType>(i), seconds);
  TORCH_CHECK_VALUE(false, "dtype must be float64, float32, bfloat16 or float16, but is \"", dtype,
                    "\"; pass one of these names as a string");
}

// A bandwidth, of arguments that were checked.
template <double (*measure)(int64_t bytes, double seconds, int threads)>
double bandwidth(int64_t bytes, double seconds, int threads) {
  TORCH_CHECK_VALUE(bytes > 0, "bytes must be positive, but is ", bytes);
  TORCH_CHECK_VALUE(threads > 0, "threads must be positive, but is ", threads);
  return measure(bytes, seconds, threads);
}

std::map<std::string, std::string> build_info() {
  return {{"version", MHA_EXT_VERSION},
          {"torch", MHA_EXT_TORCH},
          {"compiler", MHA_EXT_COMPILER},
          {"isas", MHA_EXT_ISAS},
          {"cuda", MHA_EXT_CUDA}};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "The operators of mha_ext as plain functions. They break torch.compile graphs: compiled "
      "code calls torch.ops.mha_ext.";
  // Without the GIL other Python threads run while a kernel does.
  using NoGil = py::call_guard<py::gil_scoped_release>;
  const py::kw_only keyword_only;
  const auto none = py::none();

  m.def("attention_forward", &attention_forward, NoGil(), py::arg("query"), py::arg("key"),
        py::arg("value"), py::arg("mask") = none, py::arg("bias") = none,
        py::arg("key_lengths") = none, py::arg("seed") = none, keyword_only,
        py::arg("corner") = none, py::arg("window_left") = none, py::arg("window_right") = none,
        py::arg("dropout_p") = 0.0, py::arg("scale") = none, py::arg("uniform_empty_rows") = false,
        py::arg("origin") = Positions{}, py::arg("with_lse") = true,
        R"(softmax(scale * query @ key.T + bias) @ value, fused, as (out, lse, lse_low).

query [B, H, Lq, D], key [B, Hkv, Lk, D] and value [B, Hkv, Lk, Dv] in one of float64, float32,
bfloat16, float16; H % Hkv == 0. mask (bool or integer, nonzero = attend) and bias (query's dtype or
float32) broadcast to [B, H, Lq, Lk]; key_lengths is an integer [B]; seed an int64 [2].
corner is None, "upper_left" or "lower_right": query i stands at key position p = i, or
p = i + (key_lengths[b] or Lk) - Lq, and sees keys p - window_left to p + window_right (None = all).
scale defaults to 1 / sqrt(D). uniform_empty_rows: a query that sees nothing gets the mean of value,
else 0. origin: the global position (batch, head, query, key) of the first element.
out is [B, H, Lq, Dv] over contiguous [B, Lq, H, Dv] memory; lse [B, H, Lq] is the logsumexp of the
scores in float32 (float64 for float64), lse_low its rounding error: lse + lse_low is right to twice
the precision. lse_low has no gradient. with_lse=False, where nobody reads them: both are empty
tensors [0], unless a derivative needs them. Raises ValueError or TypeError that name the argument.)");

  m.def("attention_backward", &attention_backward, NoGil(), py::arg("grad_out"),
        py::arg("grad_lse"), py::arg("query"), py::arg("key"), py::arg("value"), py::arg("out"),
        py::arg("lse"), py::arg("lse_low") = none, py::arg("mask") = none, py::arg("bias") = none,
        py::arg("key_lengths") = none, py::arg("seed") = none, keyword_only,
        py::arg("corner") = none, py::arg("window_left") = none, py::arg("window_right") = none,
        py::arg("dropout_p") = 0.0, py::arg("scale") = none, py::arg("uniform_empty_rows") = false,
        py::arg("origin") = Positions{},
        py::arg("output_mask") = std::array<bool, 4>{true, true, true, true},
        py::arg("all_keys") = false,
        R"((grad_query, grad_key, grad_value, grad_bias) of attention_forward.

grad_out [B, H, Lq, Dv] and grad_lse [B, H, Lq] or None are the gradients of its results; out, lse
and lse_low (None: zero) are these results; the rest as there. Gradients have the shape and dtype of
what they belong to. Where output_mask is False, and for a missing bias, the result is an empty tensor
of shape [0]. key and value may be a part of what out and lse are the results of; the gradients are
then what that part adds. all_keys says that they are not, and that out need not be read where the
rest implies it.)");

  m.def("attention_forward_tangent", &attention_forward_tangent, NoGil(), py::arg("query"),
        py::arg("key"), py::arg("value"), py::arg("out"), py::arg("lse"), py::arg("lse_low") = none,
        py::arg("query_tangent") = none, py::arg("key_tangent") = none,
        py::arg("value_tangent") = none, py::arg("bias_tangent") = none, py::arg("mask") = none,
        py::arg("bias") = none, py::arg("key_lengths") = none, py::arg("seed") = none, keyword_only,
        py::arg("corner") = none, py::arg("window_left") = none, py::arg("window_right") = none,
        py::arg("dropout_p") = 0.0, py::arg("scale") = none, py::arg("uniform_empty_rows") = false,
        py::arg("origin") = Positions{},
        R"((out_tangent, lse_tangent): the derivative of attention_forward in a direction.

The direction is query_tangent, key_tangent, value_tangent and bias_tangent, each of the shape and
dtype of what it belongs to; None is zero, and costs nothing. out, lse and lse_low (None: zero) are
the results of attention_forward, the rest as there. The results are like out and lse.)");

  m.def("attention_backward_tangent", &attention_backward_tangent, NoGil(), py::arg("grad_out"),
        py::arg("grad_lse"), py::arg("query"), py::arg("key"), py::arg("value"), py::arg("out"),
        py::arg("lse"), py::arg("lse_low") = none, py::arg("out_tangent") = none,
        py::arg("lse_tangent") = none, py::arg("query_tangent") = none,
        py::arg("key_tangent") = none, py::arg("value_tangent") = none,
        py::arg("bias_tangent") = none, py::arg("grad_out_tangent") = none,
        py::arg("grad_lse_tangent") = none, py::arg("mask") = none, py::arg("bias") = none,
        py::arg("key_lengths") = none, py::arg("seed") = none, keyword_only,
        py::arg("corner") = none, py::arg("window_left") = none, py::arg("window_right") = none,
        py::arg("dropout_p") = 0.0, py::arg("scale") = none, py::arg("uniform_empty_rows") = false,
        py::arg("origin") = Positions{},
        py::arg("output_mask") = std::array<bool, 4>{true, true, true, true},
        R"((grad_query_tangent, grad_key_tangent, grad_value_tangent, grad_bias_tangent): the
derivative of attention_backward in a direction.

The direction is that of attention_forward_tangent, with grad_out_tangent and grad_lse_tangent (None:
zero) for what attention_backward takes; out_tangent and lse_tangent are what
attention_forward_tangent gave for it (None: zero). The rest as for attention_backward.)");

  m.def("attention_weights", &attention_weights, NoGil(), py::arg("query"), py::arg("key"),
        py::arg("lse") = none, py::arg("lse_low") = none, py::arg("mask") = none,
        py::arg("bias") = none, py::arg("key_lengths") = none, keyword_only,
        py::arg("corner") = none, py::arg("window_left") = none, py::arg("window_right") = none,
        py::arg("scale") = none, py::arg("uniform_empty_rows") = false,
        py::arg("origin") = Positions{}, py::arg("heads") = none, py::arg("rows") = none,
        R"(softmax(scale * query @ key.T + bias), written out: [B, H, Lq, Lk] in query's dtype.

heads and rows select heads and queries, in any order and any number of times: [B, len(heads),
len(rows), Lk]. lse and lse_low [B, H, Lq], from attention_forward with the same arguments, save
computing them again (lse_low None: zero). The rest as there.)");

  m.def("multi_head_attention", &multi_head_attention, NoGil(), py::arg("query"), py::arg("key"),
        py::arg("value"), py::arg("num_heads"), py::arg("num_kv_heads") = none,
        py::arg("mask") = none, py::arg("bias") = none, py::arg("key_lengths") = none,
        py::arg("seed") = none, keyword_only, py::arg("corner") = none,
        py::arg("window_left") = none, py::arg("window_right") = none, py::arg("dropout_p") = 0.0,
        py::arg("scale") = none, py::arg("uniform_empty_rows") = false,
        R"(Multi-head attention on unsplit heads, in one call: [B, Lq, H * Dv].

query [B, Lq, H * D], key [B, Lk, Hkv * D], value [B, Lk, Hkv * Dv], where H = num_heads and
Hkv = num_kv_heads (num_heads where it is None). Heads are split and merged by strides: nothing is
copied. The rest as for attention_forward.)");

  bind_direct(m);
  bind_explain(m);

  m.def(
      "compiled_isas", [] { return isas(/*only_supported=*/false); },
      "Names of the instruction sets that are compiled in, best first.");
  m.def(
      "supported_isas", [] { return isas(/*only_supported=*/true); },
      "Those of compiled_isas() that this CPU has, best first.");
  m.def(
      "active_isa", [] { return std::string(cpu::active_isa()); },
      "Name of the instruction set that the CPU kernels use.");
  m.def("whole_vectors", &cpu::whole_vectors,
        "Whether this is one of AMD's processors that take 512 bits at once, from Zen 5 on.");
  m.def("set_whole_vectors", &cpu::set_whole_vectors, py::arg("yes"),
        "Takes it for one, or for none: how K and V are read, which changes no bit.");
  m.def(
      "ask_huge_pages",
      [](const Tensor& tensor) {
        if (tensor.is_cpu() && tensor.is_non_overlapping_and_dense())
          cpu::ask_huge_pages(tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
      },
      NoGil(), py::arg("tensor"),
      "Asks the operating system for huge pages in a dense tensor on the CPU, before anything is "
      "written to it: what it holds is lost. Whether it gets them is the system's business.");
  m.def("set_isa", &set_isa, py::arg("name"),
        "Make the CPU kernels use this instruction set (None: the best). Raises ValueError where "
        "it is "
        "not one of supported_isas().");
  m.def("build_info", &build_info,
        "Version, torch and compiler this was built with, instruction sets and CUDA, as strings.");
  m.def("fma_peak", &fma_peak, NoGil(), py::arg("dtype"), py::arg("seconds") = 0.1,
        "Measured multiply-add ceiling of one thread in FLOP/s, for \"float64\", \"float32\", "
        "\"bfloat16\" or \"float16\" on the active instruction set.");
  m.def("copy_bandwidth", &bandwidth<cpu::copy_bandwidth>, NoGil(), py::arg("bytes"),
        py::arg("seconds") = 0.1, py::arg("threads") = 1,
        "Measured bytes a second, read and written, of threads that copy at the same time, each a "
        "part of a buffer of this size.");
  m.def("read_bandwidth", &bandwidth<cpu::read_bandwidth>, NoGil(), py::arg("bytes"),
        py::arg("seconds") = 0.1, py::arg("threads") = 1,
        "Measured bytes a second of threads that read at the same time, each a part of a buffer of "
        "this size.");
}

}  // namespace mha_ext

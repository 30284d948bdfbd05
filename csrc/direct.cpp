// torch.ops finds an operator's arguments by their names and boxes each, which takes longer than a
// small problem. Where there is nothing for it to find out (tensors are tensors, and no mode stands
// between), the same operator is called through its typed handle. What the dispatcher knows of
// (autograd, autocast, functorch, dispatch modes, tracing) is the same in both.
#include "direct.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>

#include "ops.h"

namespace mha_ext {
namespace {

namespace py = pybind11;

template <class T>
T read(PyObject* object) {
  return py::handle(object).cast<T>();
}
const Tensor& tensor(PyObject* object) { return THPVariable_Unpack(object); }
OptionalTensor optional_tensor(PyObject* object) {
  return object == Py_None ? std::nullopt : OptionalTensor(tensor(object));
}
OptionalSymInt optional_length(PyObject* object) {
  return object == Py_None ? std::nullopt : OptionalSymInt(read<int64_t>(object));
}

bool is_dense(const Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested();
}

// Dense tensors, from the fourth on optional ones, of Python's own classes (Parameter is one),
// query of so many dimensions.
bool direct(int64_t rank, PyObject* const* tensors, Py_ssize_t count) {
  if (count < 3 || at::impl::torch_function_mode_enabled()) return false;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (i >= 3 && tensors[i] == Py_None) continue;
    if (!THPVariable_CheckExact(tensors[i]) || !is_dense(tensor(tensors[i]))) return false;
  }
  return tensor(tensors[0]).dim() == rank;
}

PyObject* is_direct(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  const long rank = count > 0 ? PyLong_AsLong(arguments[0]) : 0;
  if (rank == -1 && PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(direct(rank, arguments + 1, count - 1));
}

enum Argument {
  kQuery,
  kKey,
  kValue,
  kMask,
  kBias,
  kKeyLengths,
  kSeed,
  kCorner,
  kWindowLeft,
  kWindowRight,
  kDropout,
  kScale,
  kUniform,
  kShared  // what both functions begin with
};

void check_direct(const char* name, int64_t rank, PyObject* const* a, bool complete) {
  TORCH_CHECK_TYPE(complete && direct(rank, a, kSeed + 1), name,
                   " must be given what is_direct accepts, and every argument; call "
                   "torch.ops.mha_ext.attention_forward");
}

using Results = std::tuple<Tensor, Tensor, Tensor>;

// What comes after the tensors that are split into heads.
struct Given {
  OptionalTensor mask, bias, key_lengths, seed;
  OptionalString corner;
  OptionalSymInt window_left, window_right;
  double dropout_p;
  std::optional<double> scale;
  bool uniform_empty_rows;
  std::array<int64_t, 4> origin{};

  explicit Given(PyObject* const* a)
      : mask(optional_tensor(a[kMask])),
        bias(optional_tensor(a[kBias])),
        key_lengths(optional_tensor(a[kKeyLengths])),
        seed(optional_tensor(a[kSeed])),
        corner(read<OptionalString>(a[kCorner])),
        window_left(optional_length(a[kWindowLeft])),
        window_right(optional_length(a[kWindowRight])),
        dropout_p(read<double>(a[kDropout])),
        scale(read<std::optional<double>>(a[kScale])),
        uniform_empty_rows(a[kUniform] == Py_True) {}

  Results forward(const Tensor& query, const Tensor& key, const Tensor& value,
                  bool with_lse) const {
    return ops::forward().call(
        query, key, value, mask, bias, key_lengths, seed, corner, window_left, window_right,
        dropout_p, scale ? *scale : 1.0 / std::sqrt(static_cast<double>(query.size(-1))),
        uniform_empty_rows, c10::fromIntArrayRefSlow(origin), with_lse);
  }
};

PyObject* attention_direct(PyObject*, PyObject* const* a, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  enum { kOrigin = kShared, kOnlyOut, kCount };
  check_direct("attention_direct", 4, a, count == kCount);
  Given given(a);
  if (a[kOrigin] != Py_None) given.origin = read<std::array<int64_t, 4>>(a[kOrigin]);
  const bool only_out = a[kOnlyOut] == Py_True;
  Results results;
  {
    const py::gil_scoped_release no_gil;
    results = given.forward(tensor(a[kQuery]), tensor(a[kKey]), tensor(a[kValue]), !only_out);
  }
  auto& [out, lse, lse_low] = results;
  if (only_out) return THPVariable_Wrap(std::move(out));
  return Py_BuildValue("(NNN)", THPVariable_Wrap(std::move(out)), THPVariable_Wrap(std::move(lse)),
                       THPVariable_Wrap(std::move(lse_low)));
  END_HANDLE_TH_ERRORS
}

// [B, L, heads * head_dim] -> [B, heads, L, head_dim], as a view.
Tensor split_heads(const Tensor& tensor, int64_t head_dim) {
  return tensor.unflatten(-1, {-1, head_dim}).transpose(1, 2);
}

PyObject* merged_attention_direct(PyObject*, PyObject* const* a, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  enum { kHeadDim = kShared, kValueHeadDim, kCount };
  check_direct("merged_attention_direct", 3, a, count == kCount);
  const Given given(a);
  const auto head_dim = read<int64_t>(a[kHeadDim]), value_dim = read<int64_t>(a[kValueHeadDim]);
  Tensor out;
  {
    const py::gil_scoped_release no_gil;
    const Tensor query = split_heads(tensor(a[kQuery]), head_dim);
    const Tensor key = split_heads(tensor(a[kKey]), head_dim);
    const Tensor value = split_heads(tensor(a[kValue]), value_dim);
    out = std::get<0>(given.forward(query, key, value, /*with_lse=*/false))
              .transpose(1, 2)
              .flatten(2);
  }
  return THPVariable_Wrap(std::move(out));
  END_HANDLE_TH_ERRORS
}

template <class Function>
PyCFunction method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"is_direct", method(&is_direct), METH_FASTCALL,
     "is_direct(rank, query, key, value, *optional) -> bool\n\nWhether the functions below take "
     "them: all plain, dense tensors (the optional ones may be None), query of `rank` dimensions, "
     "no "
     "function mode active."},
    {"attention_direct", method(&attention_direct), METH_FASTCALL,
     "attention_direct(query, key, value, mask, bias, key_lengths, seed, corner, window_left, "
     "window_right, dropout_p, scale, uniform_empty_rows, origin, only_out)\n\n"
     "torch.ops.mha_ext.attention_forward for the tensors that is_direct(4, ...) accepts, every "
     "argument by position.\nscale and origin may be None, for 1 / sqrt(D) and zeros. only_out: "
     "returns out alone."},
    {"merged_attention_direct", method(&merged_attention_direct), METH_FASTCALL,
     "merged_attention_direct(query, key, value, mask, bias, key_lengths, seed, corner, "
     "window_left, "
     "window_right, dropout_p, scale, uniform_empty_rows, head_dim, value_head_dim)\n\n"
     "The same for query [B, Lq, H * head_dim], key and value, that is_direct(3, ...) accepts: out "
     "[B, Lq, H * value_head_dim].\nHeads are split and merged by strides."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_direct(py::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace mha_ext

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

// Three tensors and optional ones, of Python's own classes (Parameter is one), query [B, H, Lq, D].
bool direct(PyObject* const* tensors, Py_ssize_t count) {
  if (count < 3 || at::impl::torch_function_mode_enabled()) return false;
  for (Py_ssize_t i = 0; i < count; i++)
    if (!THPVariable_CheckExact(tensors[i]) && (i < 3 || tensors[i] != Py_None)) return false;
  return tensor(tensors[0]).dim() == 4;
}

PyObject* is_direct(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(direct(arguments, count));
  END_HANDLE_TH_ERRORS
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
  kOrigin,
  kOnlyOut,
  kCount
};

PyObject* attention_direct(PyObject*, PyObject* const* a, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == kCount && direct(a, kSeed + 1),
                   "attention_direct must be given what is_direct accepts; call "
                   "torch.ops.mha_ext.attention_forward");
  const Tensor& query = tensor(a[kQuery]);
  const OptionalTensor mask = optional_tensor(a[kMask]), bias = optional_tensor(a[kBias]);
  const OptionalTensor key_lengths = optional_tensor(a[kKeyLengths]);
  const OptionalTensor seed = optional_tensor(a[kSeed]);
  const auto corner = read<OptionalString>(a[kCorner]);
  const auto left = optional_length(a[kWindowLeft]), right = optional_length(a[kWindowRight]);
  const double dropout_p = read<double>(a[kDropout]);
  const double scale = a[kScale] == Py_None ? 1.0 / std::sqrt(static_cast<double>(query.size(-1)))
                                            : read<double>(a[kScale]);
  const bool uniform_empty_rows = a[kUniform] == Py_True;
  std::array<int64_t, 4> origin{};
  if (a[kOrigin] != Py_None) origin = read<std::array<int64_t, 4>>(a[kOrigin]);
  std::tuple<Tensor, Tensor, Tensor> results;
  {
    const py::gil_scoped_release no_gil;
    results = ops::forward().call(query, tensor(a[kKey]), tensor(a[kValue]), mask, bias,
                                  key_lengths, seed, corner, left, right, dropout_p, scale,
                                  uniform_empty_rows, c10::fromIntArrayRefSlow(origin));
  }
  auto& [out, lse, lse_low] = results;
  if (a[kOnlyOut] == Py_True) return THPVariable_Wrap(std::move(out));
  return Py_BuildValue("(NNN)", THPVariable_Wrap(std::move(out)), THPVariable_Wrap(std::move(lse)),
                       THPVariable_Wrap(std::move(lse_low)));
  END_HANDLE_TH_ERRORS
}

template <class Function>
PyCFunction method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"is_direct", method(&is_direct), METH_FASTCALL,
     "is_direct(query, key, value, *optional) -> bool\n\nWhether attention_direct takes them: "
     "query "
     "[B, H, Lq, D], all plain tensors (the optional ones may be None), no function mode active."},
    {"attention_direct", method(&attention_direct), METH_FASTCALL,
     "attention_direct(query, key, value, mask, bias, key_lengths, seed, corner, window_left, "
     "window_right, dropout_p, scale, uniform_empty_rows, origin, only_out)\n\n"
     "torch.ops.mha_ext.attention_forward for the tensors that is_direct accepts, every argument "
     "by "
     "position.\nscale and origin may be None, for 1 / sqrt(D) and zeros. only_out: returns out "
     "alone."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_direct(py::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace mha_ext

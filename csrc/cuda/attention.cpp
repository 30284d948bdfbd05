// The CUDA key of the operators: describe the problem, allocate, enqueue on the current stream.
// torch is asked for streams and devices through c10 alone, so that the same extension loads where
// torch has no CUDA.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>
#include <torch/version.h>

#include <array>
#include <tuple>
#include <vector>

#include "../ops.h"
#include "../problem.h"
#include "kernels.h"

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
// Of libtorch_cuda, which is not linked: there wherever there is a CUDA tensor.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device,
                                                                            void** stream);
#endif

namespace mha_ext::cuda {
namespace {

Stream current_stream(const c10::Device& device) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  void* stream = nullptr;
  TORCH_CHECK(aoti_torch_get_current_cuda_stream &&
                  aoti_torch_get_current_cuda_stream(device.index(), &stream) == 0,
              "this torch does not tell its current CUDA stream; use torch 2.13 or later");
  return stream;
#else
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
#endif
}

// A limit of these kernels, not of the operators: problem.cpp does not know it.
void check_width(const char* name, const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.size(-1) <= kMaxWidth, name, " must have at most ", kMaxWidth,
                    " columns on CUDA, but has ", tensor.size(-1), "; use the CPU for wider heads");
}

void check_launch(const char* error) {
  TORCH_CHECK(!error, "mha_ext: a CUDA kernel could not be started: ", error);
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_lengths, const OptionalTensor& seed,
    OptionalString corner, OptionalSymInt window_left, OptionalSymInt window_right,
    double dropout_p, double scale, bool uniform_empty_rows, c10::SymIntArrayRef origin) {
  const c10::DeviceGuard guard(query.device());
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe(
      query, key, &value, mask, bias, key_lengths, seed,
      {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin}, keep);
  check_width("query", query);
  check_width("value", value);
  const Tensor out = empty_out(query, value), lse = empty_lse(query), lse_low = empty_lse(query);
  set(groups, &Attention::out, out, keep);
  set(groups, &Attention::lse, lse, keep);
  set(groups, &Attention::lse_low, lse_low, keep);
  // Groups run one after the other on the stream, so they may share what they work in.
  const Tensor scratch =
      at::empty({forward_scratch_bytes(groups[0])}, query.options().dtype(at::kByte));
  const Stream stream = current_stream(query.device());
  for (int64_t i = 0; i < group_count(query); i++)
    check_launch(forward(groups[i], scratch.mutable_data_ptr(), stream));
  return {out, lse, lse_low};
}

// Where the gradients of one call go, and delta.
struct Gradients {
  Tensor query, key, value, bias, delta;
  Groups<AttentionGrad> groups;
};
Gradients gradients(const Tensor& query, const Tensor& key, const Tensor& value,
                    const OptionalTensor& bias, const std::array<bool, 4>& wanted, size_t count,
                    std::vector<Tensor>& keep) {
  // Tiles in which no pair is visible are not written.
  Gradients g{empty_grad(query, wanted[0]),
              empty_grad(key, wanted[1]),
              empty_grad(value, wanted[2]),
              empty_grad_bias(query, bias, wanted[3]).zero_(),
              empty_lse(query),
              Groups<AttentionGrad>(count)};
  set(g.groups, &AttentionGrad::delta, g.delta, keep);
  if (wanted[0]) set(g.groups, &AttentionGrad::grad_query, g.query, keep);
  if (wanted[1]) set(g.groups, &AttentionGrad::grad_key, g.key, keep);
  if (wanted[2]) set(g.groups, &AttentionGrad::grad_value, g.value, keep);
  if (wanted[3] && bias) set(g.groups, &AttentionGrad::grad_bias, g.bias);
  return g;
}

void set_lse(Groups<Attention>& groups, const Tensor& lse, const OptionalTensor& lse_low,
             std::vector<Tensor>& keep) {
  set(groups, &Attention::lse, lse, keep);
  if (lse_low) set(groups, &Attention::lse_low, *lse_low, keep);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& lse_low,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_lengths,
    const OptionalTensor& seed, OptionalString corner, OptionalSymInt window_left,
    OptionalSymInt window_right, double dropout_p, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin, std::array<bool, 4> output_mask) {
  const c10::DeviceGuard guard(query.device());
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe(
      query, key, &value, mask, bias, key_lengths, seed,
      {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin}, keep);
  check_saved(grad_out, grad_lse, query, value, out, lse, lse_low);
  check_width("query", query);
  check_width("value", value);
  set(groups, &Attention::out, out, keep);
  set_lse(groups, lse, lse_low, keep);
  Gradients g = gradients(query, key, value, bias, output_mask, groups.size(), keep);
  set(g.groups, &AttentionGrad::grad_out, grad_out, keep);
  if (grad_lse) set(g.groups, &AttentionGrad::grad_lse, *grad_lse, keep);
  const Tensor scratch =
      at::empty({backward_scratch_bytes(groups[0], g.groups[0])}, query.options().dtype(at::kByte));
  const Stream stream = current_stream(query.device());
  for (int64_t i = 0; i < group_count(query); i++)
    check_launch(backward(groups[i], g.groups[i], scratch.mutable_data_ptr(), stream));
  return {g.query, g.key, g.value, g.bias};
}

}  // namespace
}  // namespace mha_ext::cuda

TORCH_LIBRARY_IMPL(mha_ext, CUDA, m) {
  m.impl("attention_forward", mha_ext::cuda::attention_forward);
  m.impl("attention_backward", mha_ext::cuda::attention_backward);
}

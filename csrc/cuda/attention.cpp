// The CUDA key of the operators: describe the problem, allocate, enqueue on the current stream.
// torch is asked for streams and devices through c10 alone, so that the same extension loads where
// torch has no CUDA.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
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
    double dropout_p, double scale, bool uniform_empty_rows, c10::SymIntArrayRef origin,
    bool with_lse) {
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
  int64_t bytes = 0;
  for (const Attention& group : groups) bytes = std::max(bytes, forward_scratch_bytes(group));
  const Tensor scratch = at::empty({bytes}, query.options().dtype(at::kByte));
  const Stream stream = current_stream(query.device());
  for (int64_t i = 0; i < group_count(query); i++)
    check_launch(forward(groups[i], scratch.mutable_data_ptr(), stream));
  // These kernels write lse in any case.
  if (!with_lse) return {out, empty_lse(query, false), empty_lse(query, false)};
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
              zero_grad_bias(query, bias, wanted[3]),
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
    c10::SymIntArrayRef origin, std::array<bool, 4> output_mask, bool all_keys) {
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
  for (AttentionGrad& group : g.groups) group.all_keys = all_keys;
  int64_t bytes = 0;
  for (size_t i = 0; i < groups.size(); i++)
    bytes = std::max(bytes, backward_scratch_bytes(groups[i], g.groups[i]));
  const Tensor scratch = at::empty({bytes}, query.options().dtype(at::kByte));
  const Stream stream = current_stream(query.device());
  for (int64_t i = 0; i < group_count(query); i++)
    check_launch(backward(groups[i], g.groups[i], scratch.mutable_data_ptr(), stream));
  return {g.query, g.key, g.value, g.bias};
}

// The directions of one call, for each group.
Groups<AttentionTangent> directions(const Groups<Attention>& groups, const Tangents& tangents,
                                    std::vector<Tensor>& keep) {
  Groups<AttentionTangent> found(groups.size());
  if (tangents.query) set(found, &AttentionTangent::query, *tangents.query, keep);
  if (tangents.key) set(found, &AttentionTangent::key, *tangents.key, keep);
  if (tangents.value) set(found, &AttentionTangent::value, *tangents.value, keep);
  if (tangents.bias) set(found, &AttentionTangent::bias, *tangents.bias);
  return found;
}

std::tuple<Tensor, Tensor> attention_forward_tangent(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
    const Tensor& lse, const OptionalTensor& lse_low, const OptionalTensor& query_tangent,
    const OptionalTensor& key_tangent, const OptionalTensor& value_tangent,
    const OptionalTensor& bias_tangent, const OptionalTensor& mask, const OptionalTensor& bias,
    const OptionalTensor& key_lengths, const OptionalTensor& seed, OptionalString corner,
    OptionalSymInt window_left, OptionalSymInt window_right, double dropout_p, double scale,
    bool uniform_empty_rows, c10::SymIntArrayRef origin) {
  const c10::DeviceGuard guard(query.device());
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe(
      query, key, &value, mask, bias, key_lengths, seed,
      {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin}, keep);
  check_saved(/*grad_out=*/std::nullopt, /*grad_lse=*/std::nullopt, query, value, out, lse,
              lse_low);
  const Tangents given{query_tangent, key_tangent, value_tangent, bias_tangent};
  check_tangents(given, query, key, value, bias);
  check_width("query", query);
  check_width("value", value);
  set(groups, &Attention::out, out, keep);
  set_lse(groups, lse, lse_low, keep);
  Groups<AttentionTangent> tangents = directions(groups, given, keep);
  const Tensor out_tangent = empty_out(query, value), lse_tangent = empty_lse(query);
  set(tangents, &AttentionTangent::out, out_tangent, keep);
  set(tangents, &AttentionTangent::lse, lse_tangent, keep);
  const Stream stream = current_stream(query.device());
  for (int64_t i = 0; i < group_count(query); i++)
    check_launch(forward_tangent(groups[i], tangents[i], stream));
  return {out_tangent, lse_tangent};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward_tangent(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& lse_low,
    const OptionalTensor& out_tangent, const OptionalTensor& lse_tangent,
    const OptionalTensor& query_tangent, const OptionalTensor& key_tangent,
    const OptionalTensor& value_tangent, const OptionalTensor& bias_tangent,
    const OptionalTensor& grad_out_tangent, const OptionalTensor& grad_lse_tangent,
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
  const Tangents given{query_tangent, key_tangent, value_tangent, bias_tangent};
  check_tangents(given, query, key, value, bias);
  check_saved_tangents({out_tangent, lse_tangent, grad_out_tangent, grad_lse_tangent}, out, lse);
  check_width("query", query);
  check_width("value", value);
  set(groups, &Attention::out, out, keep);
  set_lse(groups, lse, lse_low, keep);
  // The tangent of a gradient is where the gradient would be.
  Gradients g = gradients(query, key, value, bias, output_mask, groups.size(), keep);
  set(g.groups, &AttentionGrad::grad_out, grad_out, keep);
  if (grad_lse) set(g.groups, &AttentionGrad::grad_lse, *grad_lse, keep);
  Groups<AttentionTangent> tangents = directions(groups, given, keep);
  if (out_tangent) set(tangents, &AttentionTangent::out, *out_tangent, keep);
  if (lse_tangent) set(tangents, &AttentionTangent::lse, *lse_tangent, keep);
  if (grad_out_tangent) set(tangents, &AttentionTangent::grad_out, *grad_out_tangent, keep);
  if (grad_lse_tangent) set(tangents, &AttentionTangent::grad_lse, *grad_lse_tangent, keep);
  Tensor delta_tangent;
  if (out_tangent || grad_out_tangent || grad_lse_tangent) {
    delta_tangent = empty_lse(query);
    set(tangents, &AttentionTangent::delta, delta_tangent, keep);
  }
  const Tensor scratch = at::empty({backward_tangent_scratch_bytes(groups[0], g.groups[0])},
                                   query.options().dtype(at::kByte));
  const Stream stream = current_stream(query.device());
  for (int64_t i = 0; i < group_count(query); i++)
    check_launch(
        backward_tangent(groups[i], g.groups[i], tangents[i], scratch.mutable_data_ptr(), stream));
  return {g.query, g.key, g.value, g.bias};
}

Tensor on_device(at::IntArrayRef numbers, const Tensor& like) {
  const auto count = static_cast<int64_t>(numbers.size());
  const Tensor found = at::empty({count}, like.options().dtype(at::kLong));
  check_launch(upload(numbers.data(), count, found.mutable_data_ptr<int64_t>(),
                      current_stream(like.device())));
  return found;
}

// Rows of the weights that are wanted and stand one after the other, as RowRun, on the device.
Tensor row_runs(at::IntArrayRef rows, const Tensor& query) {
  std::vector<int64_t> runs;
  for (size_t i = 0; i < rows.size(); i++) {
    const size_t end = runs.size();
    if (end && runs[end - 3] + runs[end - 2] == rows[i] && runs[end - 2] < kTile)
      runs[end - 2]++;
    else
      runs.insert(runs.end(), {rows[i], 1, static_cast<int64_t>(i)});
  }
  return on_device(runs, query).view({-1, 3});
}

// lse as it is given, or of a forward without value: Dv = 0. The latter has the scores that weights
// have (kSplitWidth), so that in float32 what is given by a forward with values saves no pass.
struct Levels {
  Tensor high;
  OptionalTensor low;
};
Levels levels_of(const Tensor& query, const Tensor& key, const OptionalTensor& lse,
                 const OptionalTensor& lse_low, const OptionalTensor& mask,
                 const OptionalTensor& bias, const OptionalTensor& key_lengths,
                 const Options& options) {
  const bool fits = query.scalar_type() != at::kFloat || query.size(-1) > kSplitWidth;
  if (lse && fits) return {*lse, lse_low};
  const auto [out, high, low] = attention_forward(
      query, key, key.narrow(-1, 0, 0), mask, bias, key_lengths, /*seed=*/std::nullopt,
      options.corner, options.window_left, options.window_right, /*dropout_p=*/0.0, options.scale,
      options.uniform_empty_rows, options.origin, /*with_lse=*/true);
  return {high, low};
}

Tensor attention_weights(const Tensor& query, const Tensor& key, const OptionalTensor& lse,
                         const OptionalTensor& lse_low, const OptionalTensor& mask,
                         const OptionalTensor& bias, const OptionalTensor& key_lengths,
                         OptionalString corner, OptionalSymInt window_left,
                         OptionalSymInt window_right, double scale, bool uniform_empty_rows,
                         c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads,
                         at::OptionalIntArrayRef rows) {
  const c10::DeviceGuard guard(query.device());
  const Options options{corner, window_left, window_right, 0.0, scale, uniform_empty_rows, origin};
  std::vector<Tensor> keep;
  Groups<Attention> groups =
      describe(query, key, nullptr, mask, bias, key_lengths, std::nullopt, options, keep);
  check_selection(query, lse, lse_low, heads, rows);
  check_width("query", query);
  const Levels levels = levels_of(query, key, lse, lse_low, mask, bias, key_lengths, options);
  set_lse(groups, levels.high, levels.low, keep);
  const Tensor found = empty_weights(query, key, heads, rows);
  Selection selected;
  selected.head_count = found.size(-3);
  selected.row_count = found.size(-2);
  if (heads) {
    keep.push_back(on_device(*heads, query));
    selected.heads = keep.back().const_data_ptr<int64_t>();
  }
  if (rows) {
    keep.push_back(row_runs(*rows, query));
    selected.runs = static_cast<const RowRun*>(keep.back().const_data_ptr());
    selected.run_count = keep.back().size(0);
  }
  const Stream stream = current_stream(query.device());
  char* const to = static_cast<char*>(found.mutable_data_ptr());
  const int64_t count = group_count(query);
  for (int64_t i = 0; i < count; i++)
    check_launch(weights(groups[i], selected, to + found.numel() / count * i * found.element_size(),
                         stream));
  return found;
}

// Zeros of `size` along dim, to which each part is added in its place. Places that repeat are added
// one after the other: index_add promises no order.
Tensor spread(const Tensor& parts, at::IntArrayRef places, int64_t dim, int64_t size) {
  std::vector<int64_t> shape = parts.sizes().vec();
  shape[dim] = size;
  const Tensor whole = at::zeros(shape, parts.options());
  std::vector<bool> done(places.size());
  for (size_t left = places.size(); left > 0;) {
    std::vector<int64_t> from, to;
    std::vector<bool> taken(static_cast<size_t>(size));
    for (size_t i = 0; i < places.size(); i++) {
      const auto place = static_cast<size_t>(places[i]);
      if (done[i] || taken[place]) continue;
      done[i] = taken[place] = true;
      from.push_back(static_cast<int64_t>(i));
      to.push_back(places[i]);
    }
    left -= from.size();
    whole.index_add_(dim, on_device(to, parts), parts.index_select(dim, on_device(from, parts)));
  }
  return whole;
}

// The gradient of P reaches Q, K and the bias through the softmax alone: dS = P o (dP - rowsum(P o
// dP)). That is the backward of attention with dP given instead of dO V^T.
std::tuple<Tensor, Tensor, Tensor> attention_weights_backward(
    const Tensor& grad_weights, const Tensor& weights, const Tensor& query, const Tensor& key,
    const OptionalTensor& lse, const OptionalTensor& lse_low, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_lengths, OptionalString corner,
    OptionalSymInt window_left, OptionalSymInt window_right, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads, at::OptionalIntArrayRef rows,
    std::array<bool, 3> output_mask) {
  const c10::DeviceGuard guard(query.device());
  const Options options{corner, window_left, window_right, 0.0, scale, uniform_empty_rows, origin};
  check_selection(query, lse, lse_low, heads, rows);
  check_weights("grad_weights", grad_weights, query, key, heads, rows);
  check_weights("weights", weights, query, key, heads, rows);
  const Tensor value = key.narrow(-1, 0, 0);
  const Levels levels = levels_of(query, key, lse, lse_low, mask, bias, key_lengths, options);
  std::vector<Tensor> keep;
  Groups<Attention> groups =
      describe(query, key, &value, mask, bias, key_lengths, std::nullopt, options, keep);
  check_width("query", query);
  set_lse(groups, levels.high, levels.low, keep);

  // A hidden pair has P = 0 and an unknown dP: select, do not multiply.
  const auto sum_type = levels.high.scalar_type();
  Tensor grad = grad_weights;
  Tensor delta = at::where(weights.eq(0), at::zeros({}, levels.high.options()),
                           at::mul(weights.to(sum_type), grad.to(sum_type)))
                     .sum(-1);
  // The rest of P had no use, so its cotangent is zero.
  for (Tensor* part : {&grad, &delta}) {
    if (heads) *part = spread(*part, *heads, query.dim() - 3, query.size(-3));
    if (rows) *part = spread(*part, *rows, query.dim() - 2, query.size(-2));
  }

  if (grad.stride(-1) != 1 && grad.element_size() == 2) grad = grad.contiguous();
  Gradients g =
      gradients(query, key, value, bias, {output_mask[0], output_mask[1], false, output_mask[2]},
                groups.size(), keep);
  set(g.groups, &AttentionGrad::grad_weights, grad);
  set(g.groups, &AttentionGrad::delta, delta, keep);
  const Tensor scratch =
      at::empty({backward_scratch_bytes(groups[0], g.groups[0])}, query.options().dtype(at::kByte));
  const Stream stream = current_stream(query.device());
  for (int64_t i = 0; i < group_count(query); i++)
    check_launch(backward(groups[i], g.groups[i], scratch.mutable_data_ptr(), stream));
  return {g.query, g.key, g.bias};
}

}  // namespace
}  // namespace mha_ext::cuda

TORCH_LIBRARY_IMPL(mha_ext, CUDA, m) {
  m.impl("attention_forward", mha_ext::cuda::attention_forward);
  m.impl("attention_backward", mha_ext::cuda::attention_backward);
  m.impl("attention_forward_tangent", mha_ext::cuda::attention_forward_tangent);
  m.impl("attention_backward_tangent", mha_ext::cuda::attention_backward_tangent);
  m.impl("attention_weights", mha_ext::cuda::attention_weights);
  m.impl("attention_weights_backward", mha_ext::cuda::attention_weights_backward);
}

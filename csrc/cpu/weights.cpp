// The CPU key: the weights, for the heads and rows that are asked for, and their backward.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "attention.h"
#include "padding.h"
#include "pages.h"
#include "schedule.h"

namespace mha_ext::cpu {
namespace {

// Rows of the weights that are wanted and stand one after the other in one block: one call of the
// kernel.
struct RowRun {
  int64_t query, count, to;
};
std::vector<RowRun> row_runs(const Attention& a, at::OptionalIntArrayRef rows) {
  std::vector<RowRun> runs;
  const int64_t count = rows ? static_cast<int64_t>(rows->size()) : a.queries;
  for (int64_t i = 0; i < count; i++) {
    const int64_t query = rows ? (*rows)[i] : i;
    if (!runs.empty() && runs.back().query + runs.back().count == query && query % kTile != 0)
      runs.back().count++;
    else
      runs.push_back({query, 1, i});
  }
  return runs;
}

}  // namespace

Tensor attention_weights(const Tensor& query, const Tensor& key, const OptionalTensor& lse,
                         const OptionalTensor& lse_low, const OptionalTensor& mask,
                         const OptionalTensor& bias, const OptionalTensor& key_lengths,
                         OptionalString corner, OptionalSymInt window_left,
                         OptionalSymInt window_right, double scale, bool uniform_empty_rows,
                         c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads,
                         at::OptionalIntArrayRef rows) {
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe_padded(
      query, key, nullptr, mask, bias, key_lengths, std::nullopt,
      {corner, window_left, window_right, 0.0, scale, uniform_empty_rows, origin}, keep);
  check_selection(query, lse, lse_low, heads, rows);
  if (lse) set_lse(groups, *lse, lse_low, keep);
  const Attention& a = groups[0];
  const Tensor weights = empty_weights(query, key, heads, rows);
  first_touch(weights);
  const std::vector<RowRun> runs = row_runs(a, rows);
  const int64_t run_count = static_cast<int64_t>(runs.size()), head_count = weights.size(-3);
  const int64_t row_count = weights.size(-2), item = weights.element_size();
  char* to = static_cast<char*>(weights.mutable_data_ptr());
  const TypeKernels& kernels = kernels_for(a);
  const int64_t tasks = a.batch * head_count * run_count;
  for_each_task(group_count(query) * tasks,
                4.0 * static_cast<double>(weights.numel()) * static_cast<double>(a.head_dim),
                kernels.forward_scratch_bytes(a), [&](int64_t task, void* scratch) {
                  const RowRun& run = runs[task % run_count];
                  const int64_t row = task / run_count, h = row % head_count;
                  kernels.weights(groups[task / tasks], row / head_count % a.batch,
                                  heads ? (*heads)[h] : h, run.query, run.count,
                                  to + (row * row_count + run.to) * a.keys * item,
                                  static_cast<int64_t>(weights.nbytes()), scratch);
                });
  return weights;
}

namespace {

// to[row] = sum of from[row]. at::sum cuts a single long row by the number of threads; here the
// order is fixed.
template <class T>
void sum_rows(const Tensor& from, const Tensor& to) {
  constexpr int64_t kSums = 16;
  const int64_t width = from.size(-1);
  const T* const data = from.const_data_ptr<T>();
  T* const result = to.mutable_data_ptr<T>();
  const double bytes = static_cast<double>(from.numel() * from.element_size());
  for_each_task(to.numel(), flops_worth(bytes), 0, [&](int64_t row, void*) {
    double sums[kSums] = {};
    for (int64_t j = 0; j < width; j++)
      sums[j % kSums] += static_cast<double>(data[row * width + j]);
    double total = 0;
    for (const double sum : sums) total += sum;
    result[row] = static_cast<T>(total);
  });
}

}  // namespace

// The gradient of P reaches Q, K and the bias through the softmax alone: dS = P o (dP - rowsum(P o
// dP)). That is the backward of attention with dP given instead of dO V^T.
std::tuple<Tensor, Tensor, Tensor> attention_weights_backward(
    const Tensor& grad_weights, const Tensor& weights, const Tensor& query, const Tensor& key,
    const OptionalTensor& lse, const OptionalTensor& lse_low, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_lengths, OptionalString corner,
    OptionalSymInt window_left, OptionalSymInt window_right, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads, at::OptionalIntArrayRef rows,
    std::array<bool, 3> output_mask) {
  check_selection(query, lse, lse_low, heads, rows);
  check_weights("grad_weights", grad_weights, query, key, heads, rows);
  check_weights("weights", weights, query, key, heads, rows);
  // No value: with Dv = 0 the forward gives lse alone, and nothing reaches grad_value.
  const Tensor value = key.narrow(-1, 0, 0);
  Tensor high, low;
  if (lse) {
    high = *lse;
    low = lse_low ? *lse_low : Tensor();
  } else {
    std::tie(std::ignore, high, low) =
        attention_forward(query, key, value, mask, bias, key_lengths, std::nullopt, corner,
                          window_left, window_right, 0.0, scale, uniform_empty_rows, origin,
                          /*with_lse=*/true);
  }
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe_padded(
      query, key, &value, mask, bias, key_lengths, std::nullopt,
      {corner, window_left, window_right, 0.0, scale, uniform_empty_rows, origin}, keep);
  set_lse(groups, high, low.defined() ? OptionalTensor(low) : std::nullopt, keep);

  // A hidden pair has P = 0 and an unknown dP: select, do not multiply.
  Tensor grad = grad_weights, delta;
  const auto sum_type = high.scalar_type();
  const Tensor terms = at::where(weights.eq(0), at::zeros({}, high.options()),
                                 at::mul(weights.to(sum_type), grad.to(sum_type)))
                           .contiguous();
  delta = at::empty(terms.sizes().slice(0, terms.dim() - 1), high.options());
  if (sum_type == at::kDouble)
    sum_rows<double>(terms, delta);
  else
    sum_rows<float>(terms, delta);
  if (heads || rows) {  // the rest of P had no use, so its cotangent is zero
    const auto place = [&](const Tensor& part) {
      Tensor whole = part;
      const auto spread = [&](at::IntArrayRef at_indices, int64_t dim, int64_t size) {
        std::vector<int64_t> shape = whole.sizes().vec();
        shape[dim] = size;
        const Tensor index = at::empty({static_cast<int64_t>(at_indices.size())}, at::kLong);
        std::copy(at_indices.begin(), at_indices.end(), index.mutable_data_ptr<int64_t>());
        whole = at::zeros(shape, whole.options()).index_add(dim, index, whole);
      };
      if (heads) spread(*heads, query.dim() - 3, query.size(-3));
      if (rows) spread(*rows, query.dim() - 2, query.size(-2));
      return whole;
    };
    grad = place(grad);
    delta = place(delta);
  }

  const Tensor grad_query = empty_grad(query, output_mask[0]),
               grad_key = empty_grad(key, output_mask[1]);
  const Tensor grad_bias = empty_grad_bias(query, bias, output_mask[2]);
  first_touch(grad_query, grad_key, grad_bias);
  Groups<AttentionGrad> grads(groups.size());
  set(grads, &AttentionGrad::grad_weights, grad);
  set(grads, &AttentionGrad::delta, delta, keep);
  if (output_mask[0]) set(grads, &AttentionGrad::grad_query, grad_query, keep);
  if (output_mask[1]) set(grads, &AttentionGrad::grad_key, grad_key, keep);
  if (output_mask[2] && bias) set(grads, &AttentionGrad::grad_bias, grad_bias);
  const GradProblem problem{group_count(query), groups, grads, kernels_for(groups[0])};
  run_backward(problem, grad_bias);
  return {grad_query, grad_key, grad_bias};
}

}  // namespace mha_ext::cpu

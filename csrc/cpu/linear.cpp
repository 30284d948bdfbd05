// The CPU key of linear: blocks of the result, handed to the threads. Other dtypes than float32 go
// to PyTorch's own.
#include "../linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels.h"
#include "pages.h"
#include "schedule.h"

namespace mha_ext::cpu {
namespace {

using at::Tensor;

// As few blocks as fit, but a few for every thread. Their size changes no bit of the result.
struct Blocks {
  int64_t rows, columns, down, across;
  Blocks(const Linear& p, const LinearKernel& kernel, int64_t threads) {
    down = ceil_div(p.rows, kernel.rows);
    across = ceil_div(p.columns, kernel.columns);
    const int64_t enough = threads == 1 ? 1 : kernel.tasks * threads;
    while (down * across < enough) {
      const int64_t height = ceil_div(p.rows, down), width = ceil_div(p.columns, across);
      const bool may_cut_rows = height >= 2 * kernel.least_rows;
      const bool rows_first = kernel.square && height > width && may_cut_rows;
      if (width >= 2 * kTile && !rows_first)
        across++;
      else if (may_cut_rows)
        down++;
      else
        break;
    }
    rows = ceil_div(ceil_div(p.rows, down), kernel.row_step) * kernel.row_step;
    columns = ceil_div(ceil_div(p.columns, across), kTile) * kTile;
    down = ceil_div(p.rows, rows);
    across = ceil_div(p.columns, columns);
  }
};

void run(const Linear& p) {
  const double flops = 2.0 * static_cast<double>(p.rows) * static_cast<double>(p.columns) *
                       static_cast<double>(p.depth);
  const Kernels& kernels = active_kernels();
  const LinearKernel& kernel = p.depth < kLongSum ? kernels.linear : kernels.long_linear;
  const Blocks blocks(p, kernel, available_threads());
  for_each_task(blocks.down * blocks.across, flops, kernel.scratch_bytes(blocks.rows, p.depth),
                [&](int64_t task, void* scratch) {
                  const int64_t m0 = task / blocks.across * blocks.rows;
                  const int64_t n0 = task % blocks.across * blocks.columns;
                  kernel.run(p, m0, std::min(blocks.rows, p.rows - m0), n0,
                             std::min(blocks.columns, p.columns - n0), scratch);
                });
}

// Strides of a matrix one of which is 1; a copy where neither is.
Matrix matrix_of(const Tensor& tensor, Tensor& keep) {
  const auto one = [](const Tensor& t, int dim) { return t.stride(dim) == 1 || t.size(dim) == 1; };
  keep = one(tensor, 0) || one(tensor, 1) ? tensor : tensor.contiguous();
  const bool along_row = one(keep, 1);
  return {keep.const_data_ptr<float>(), along_row ? keep.stride(0) : 1,
          along_row ? 1 : keep.stride(1)};
}

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_linear(input, weight, bias);
  if (input.scalar_type() != at::kFloat || !weight.is_cpu() || (bias && !bias->is_cpu()))
    return at::linear(input, weight, bias);
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  const Tensor out = at::empty(sizes, input.options());
  first_touch(out);
  if (out.numel() == 0) return out;
  Tensor keep_input, keep_weight;
  const Tensor keep_bias = bias ? bias->contiguous() : Tensor();
  Linear p;
  p.a = matrix_of(input.dim() == 1 ? input.unsqueeze(0) : input.flatten(0, -2), keep_input);
  p.x = matrix_of(weight.t(), keep_weight);
  p.bias = bias ? keep_bias.const_data_ptr<float>() : nullptr;
  p.out = out.mutable_data_ptr<float>();
  p.columns = weight.size(0);
  p.depth = weight.size(1);
  p.rows = out.numel() / p.columns;
  run(p);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) { m.impl("linear", TORCH_FN(linear)); }

}  // namespace mha_ext::cpu

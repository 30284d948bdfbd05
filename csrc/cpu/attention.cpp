// The CPU key of the operators: describe the problem, allocate, hand tiles to the threads.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "../ops.h"
#include "../problem.h"
#include "kernels.h"
#include "schedule.h"

namespace mha_ext::cpu {
namespace {

// Everything but addresses is the same in all groups: sizes are read from the first. A group's
// tasks follow those of the group before.

// Some queries of one head; later ones first, since under a causal mask they see more keys.
struct QueryTask {
  int64_t batch, head, part;
};
QueryTask query_task(const Attention& a, int64_t task, int64_t parts) {
  const int64_t row = task / parts;
  return {row / a.heads, row % a.heads, parts - 1 - task % parts};
}
int64_t query_blocks(const Attention& a) { return ceil_div(a.queries, kTile); }
void set_lse(Groups<Attention>& groups, const Tensor& lse, const OptionalTensor& lse_low,
             std::vector<Tensor>& keep) {
  set(groups, &Attention::lse, lse, keep);
  if (lse_low) set(groups, &Attention::lse_low, *lse_low, keep);
}
double pair_count(const Attention& a) {
  return static_cast<double>(a.batch * a.heads) * static_cast<double>(a.queries) *
         static_cast<double>(a.keys);
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_lengths, const OptionalTensor& seed,
    OptionalString corner, OptionalSymInt window_left, OptionalSymInt window_right,
    double dropout_p, double scale, bool uniform_empty_rows, c10::SymIntArrayRef origin) {
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe(
      query, key, &value, mask, bias, key_lengths, seed,
      {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin}, keep);
  const Tensor out = empty_out(query, value), lse = empty_lse(query), lse_low = empty_lse(query);
  set(groups, &Attention::out, out, keep);
  set_lse(groups, lse, lse_low, keep);
  const Attention& a = groups[0];
  const int64_t count = group_count(query);
  const TypeKernels& kernels = kernels_for(a);
  const double flops = 2 * static_cast<double>(count) * pair_count(a) *
                       static_cast<double>(a.head_dim + a.value_dim);
  const int64_t ranges = forward_ranges(a).count, scratch_bytes = kernels.forward_scratch_bytes(a);
  const int64_t state_bytes = ranges > 1 ? kernels.state_bytes(a) : 0;
  if (a.queries <= kFewQueries && a.queries > 0 && a.heads > 0) {
    const int64_t rows = a.heads / a.kv_heads * a.queries, parts = ceil_div(rows, kFewRows);
    const int64_t jobs = a.batch * a.kv_heads * parts;
    const auto place = [&](int64_t index, const auto& run) {
      const int64_t job = index % jobs, head = job / parts, first = job % parts * kFewRows;
      run(groups[index / jobs], head / a.kv_heads, head % a.kv_heads, first,
          std::min(kFewRows, rows - first));
    };
    const auto part = [&](int64_t job, int64_t range, void* states, void* scratch) {
      place(job, [&](const Attention& g, int64_t b, int64_t kv, int64_t first, int64_t size) {
        kernels.forward_few(g, b, kv, first, size, range, states, scratch);
      });
    };
    for_each_job(
        count * jobs, ranges, flops, scratch_bytes, state_bytes,
        [&](int64_t job, void* scratch) { part(job, kEveryRange, nullptr, scratch); }, part,
        [&](int64_t job, void* states, void* scratch) {
          place(job, [&](const Attention& g, int64_t b, int64_t kv, int64_t first, int64_t size) {
            kernels.merge_few(g, b, kv, first, size, states, scratch);
          });
        });
    return {out, lse, lse_low};
  }
  // Blocks done together share what they read and pack of K and V; no more of them than leaves
  // every thread a few tasks, and one where its ranges may be tasks. A row's result does not depend
  // on that.
  const int64_t blocks = count * a.batch * a.heads * query_blocks(a);
  const int64_t together =
      std::clamp<int64_t>(blocks / (4 * at::get_num_threads()), 1, ranges > 1 ? 1 : kernels.group);
  const int64_t parts = ceil_div(query_blocks(a), together);
  const int64_t jobs = a.batch * a.heads * parts;
  const auto place = [&](int64_t index, const auto& run) {
    const QueryTask q = query_task(a, index % jobs, parts);
    const int64_t q0 = q.part * together * kTile;
    run(groups[index / jobs], q.batch, q.head, q0, std::min(together * kTile, a.queries - q0));
  };
  const auto part = [&](int64_t job, int64_t range, void* states, void* scratch) {
    place(job, [&](const Attention& g, int64_t b, int64_t h, int64_t q0, int64_t rows) {
      kernels.forward(g, b, h, q0, rows, range, states, scratch);
    });
  };
  for_each_job(
      count * jobs, ranges, flops, scratch_bytes, state_bytes,
      [&](int64_t job, void* scratch) { part(job, kEveryRange, nullptr, scratch); }, part,
      [&](int64_t job, void* states, void* scratch) {
        place(job, [&](const Attention& g, int64_t b, int64_t h, int64_t q0, int64_t rows) {
          kernels.merge(g, b, h, q0, rows, states, scratch);
        });
      });
  return {out, lse, lse_low};
}

// What the backward operators run on: the problem of each group, and where its gradients go.
struct GradProblem {
  int64_t count;  // of groups
  const Groups<Attention>& groups;
  const Groups<AttentionGrad>& grads;
  const TypeKernels& kernels;
};

// run(group, b, h, block) for every block of queries: sums over their rows.
template <class Run>
void run_blocks(const GradProblem& p, const Run& run) {
  const Attention& a = p.groups[0];
  const int64_t blocks = query_blocks(a), tasks = a.batch * a.heads * blocks;
  const double flops = 2 * static_cast<double>(p.count * a.batch * a.heads * a.queries) *
                       static_cast<double>(a.value_dim);
  for_each_task(p.count * tasks, flops, 0, [&](int64_t index, void*) {
    const QueryTask q = query_task(a, index % tasks, blocks);
    run(index / tasks, q.batch, q.head, q.part);
  });
}
void run_delta(const GradProblem& p) {
  run_blocks(p, [&](int64_t group, int64_t b, int64_t h, int64_t block) {
    p.kernels.delta(p.groups[group], p.grads[group], b, h, block);
  });
}

// grad_query, grad_key and grad_value. run_range(group, b, kv_head, range, partial, scratch) does
// one range of keys, as kernels.backward.
template <class RunRange>
void run_ranges(const GradProblem& p, int64_t scratch_bytes, double products,
                const RunRange& run_range) {
  const Attention& a = p.groups[0];
  const KeyRanges ranges = key_ranges(a);
  const int64_t group_heads = a.batch * a.kv_heads, kv_heads = p.count * group_heads;
  const int64_t shared = a.kv_heads ? a.heads / a.kv_heads : 0;  // query heads of a key/value head
  const int64_t partial_bytes =
      shared * ranges.count * a.queries * a.head_dim * p.kernels.element_size;
  const bool partial = ranges.count > 1 && p.grads[0].grad_query.data;
  // The partial sums of a few heads at a time, so that memory does not grow with their number.
  const int64_t wave =
      partial ? std::max<int64_t>(1, ceil_div(2 * at::get_num_threads(), ranges.count)) : kv_heads;
  const at::DataPtr memory =
      c10::GetCPUAllocator()->allocate(partial ? std::min(wave, kv_heads) * partial_bytes : 0);
  char* sums = static_cast<char*>(memory.get());
  const double head_flops = 2 * products * pair_count(a) /
                            static_cast<double>(std::max<int64_t>(1, group_heads)) *
                            static_cast<double>(std::max(a.head_dim, a.value_dim));

  for (int64_t first = 0; first < kv_heads; first += wave) {
    const int64_t count = std::min(wave, kv_heads - first);
    for_each_task(count * ranges.count, head_flops * static_cast<double>(count), scratch_bytes,
                  [&](int64_t task, void* scratch) {
                    const int64_t head = task / ranges.count, row = first + head;
                    run_range(row / group_heads, row % group_heads / a.kv_heads, row % a.kv_heads,
                              task % ranges.count, partial ? sums + head * partial_bytes : nullptr,
                              scratch);
                  });
    if (!partial) continue;
    const int64_t blocks = query_blocks(a), group_rows = a.batch * a.heads;
    for_each_task(count * shared * blocks, static_cast<double>(count * partial_bytes), 0,
                  [&](int64_t task, void*) {
                    const int64_t head = task / blocks, row = first * shared + head;
                    p.kernels.add_ranges(p.groups[row / group_rows], p.grads[row / group_rows],
                                         sums + head * (partial_bytes / shared),
                                         row % group_rows / a.heads, row % a.heads, task % blocks);
                  });
  }
}

// One key/value head of one group.
struct HeadPlace {
  int64_t group, batch, kv_head;
};

// grad_query, grad_key and grad_value, of first order, of `count` heads: at(i) says which. Where
// there are many, a task is a head; else some ranges of keys of a head, whose sums of grad_query
// are added afterwards.
template <class At>
void run_heads(const GradProblem& p, int64_t kv_heads, const At& at) {
  const Attention& a = p.groups[0];
  const KeyRanges ranges = grad_ranges(a);
  const int64_t shared = a.heads / a.kv_heads, blocks = query_blocks(a);
  const int64_t sum_bytes = blocks * query_sum_size(a) * p.kernels.element_size;
  const int64_t scratch_bytes = ceil_div(p.kernels.backward_scratch_bytes(a), 64) * 64;
  const int64_t together = ranges_together(a), threads = available_threads();
  const double head_flops = 10 * pair_count(a) / static_cast<double>(a.batch * a.kv_heads) *
                            static_cast<double>(std::max(a.head_dim, a.value_dim));
  const auto backward = [&](int64_t head, KeyPart part, void* sums, void* scratch) {
    const HeadPlace place = at(head);
    p.kernels.backward(p.groups[place.group], p.grads[place.group], place.batch, place.kv_head,
                       part, sums, scratch);
  };
  if (ranges.count == 1 || threads == 1 || kv_heads >= 4 * threads) {
    const bool one_call = together == ranges.count;
    for_each_task(
        kv_heads, head_flops * static_cast<double>(kv_heads),
        scratch_bytes + (one_call ? 0 : shared * sum_bytes), [&](int64_t head, void* scratch) {
          void* sums = one_call ? nullptr : static_cast<char*>(scratch) + scratch_bytes;
          for (int64_t first = 0; first < ranges.count; first += together)
            backward(head, {first, std::min(first + together, ranges.count), false}, sums, scratch);
        });
    return;
  }
  // Enough tasks for all threads, but the sums of few heads at a time, so that memory does not grow
  // with their number.
  const int64_t size = std::clamp<int64_t>(kv_heads * ranges.count / (4 * threads), 1, together);
  const int64_t parts = ceil_div(ranges.count, size);
  const int64_t wave = std::min(kv_heads, ceil_div(4 * threads, parts));
  const int64_t head_bytes = shared * ranges.count * sum_bytes;
  const bool with_sums = p.grads[0].grad_query.data;
  const at::DataPtr memory = c10::GetCPUAllocator()->allocate(with_sums ? wave * head_bytes : 0);
  char* sums = static_cast<char*>(memory.get());
  for (int64_t first = 0; first < kv_heads; first += wave) {
    const int64_t count = std::min(wave, kv_heads - first);
    for_each_task(count * parts, head_flops * static_cast<double>(count), scratch_bytes,
                  [&](int64_t task, void* scratch) {
                    const int64_t head = task % count, range = task / count * size;
                    backward(first + head, {range, std::min(range + size, ranges.count), true},
                             sums + head * head_bytes, scratch);
                  });
    if (!with_sums) continue;
    for_each_task(count * shared * blocks, static_cast<double>(count * head_bytes) / 4, 0,
                  [&](int64_t task, void*) {
                    const int64_t head = task / blocks;
                    const HeadPlace place = at(first + head / shared);
                    p.kernels.add_sums(p.groups[place.group], p.grads[place.group],
                                       sums + head * ranges.count * sum_bytes, place.batch,
                                       place.kv_head * shared + head % shared, task % blocks);
                  });
  }
}

// All heads at once; or, where they add to one grad_bias, one after the other those that share it.
void run_backward(const GradProblem& p) {
  const Attention& a = p.groups[0];
  if (p.count * a.batch * a.kv_heads == 0) return;
  const Pairs& bias = p.grads[0].grad_bias;
  const bool in_turns = bias_is_added(a, bias);
  const int64_t turns_b = in_turns && !bias.batch ? a.batch : 1;
  const int64_t turns_h = in_turns && !bias.head ? a.kv_heads : 1;
  const int64_t batches = a.batch / turns_b, heads = a.kv_heads / turns_h;
  for (int64_t b = 0; b < turns_b; b++)
    for (int64_t h = 0; h < turns_h; h++)
      run_heads(p, p.count * batches * heads, [&](int64_t i) {
        return HeadPlace{i / (batches * heads), b + i / heads % batches, h + i % heads};
      });
}

// A bias that is the same for all keys of a row moves the scores of that row alike, and P not at
// all: what is left of rowsum(dS) is the gradient of lse. So this sum needs no scores, and does not
// cancel.
template <class T, class Bias>
void sum_constant_bias(const Attention& a, const AttentionGrad& g) {
  const Pairs& bias = g.grad_bias;
  const int64_t batches = bias.batch ? a.batch : 1, heads = bias.head ? a.heads : 1;
  const int64_t queries = bias.query ? a.queries : 1;
  std::vector<double> sums(batches * heads * queries, 0.0);
  for (int64_t b = 0; b < a.batch; b++)
    for (int64_t h = 0; h < a.heads; h++)
      for (int64_t i = 0; i < a.queries; i++) {
        const int64_t row = (b * a.heads + h) * a.queries + i;
        if (static_cast<const T*>(a.lse)[row] == -std::numeric_limits<T>::infinity()) continue;
        const T delta = static_cast<const T*>(g.delta)[row];
        const T term = (g.grad_lse ? static_cast<const T*>(g.grad_lse)[row] : T(0)) +
                       (delta - delta);  // NaN stays NaN
        sums[((bias.batch ? b : 0) * heads + (bias.head ? h : 0)) * queries +
             (bias.query ? i : 0)] += term;
      }
  for (size_t i = 0; i < sums.size(); i++)
    static_cast<Bias*>(bias.data)[i] = static_cast<Bias>(sums[i]);
}

template <class T>
void sum_constant_bias(const Attention& a, const AttentionGrad& g) {
  if (a.bias_is_float32) return sum_constant_bias<T, float>(a, g);
  switch (a.dtype) {
    case DType::kFloat64:
      return sum_constant_bias<T, double>(a, g);
    case DType::kFloat32:
      return sum_constant_bias<T, float>(a, g);
    case DType::kBFloat16:
      return sum_constant_bias<T, at::BFloat16>(a, g);
    case DType::kFloat16:
      return sum_constant_bias<T, at::Half>(a, g);
  }
}

// grad_bias where the bias broadcasts; elsewhere run_ranges has written it. run_share(group, plan,
// owner, chunk, sums, scratch) adds one share, as kernels.bias_share; lse_grads has the gradient of
// lse.
template <class RunShare>
void run_bias(const GradProblem& p, const Groups<AttentionGrad>& lse_grads, int64_t share_bytes,
              const RunShare& run_share) {
  const Attention& a = p.groups[0];
  const Pairs& bias = p.grads[0].grad_bias;
  if (!bias.data || bias_is_dense(a, bias) || a.batch * a.heads * a.queries * a.keys == 0) return;
  if (!bias.key && a.keys > 1) {
    for (int64_t group = 0; group < p.count; group++) {
      if (a.dtype == DType::kFloat64)
        sum_constant_bias<double>(p.groups[group], lse_grads[group]);
      else
        sum_constant_bias<float>(p.groups[group], lse_grads[group]);
    }
    return;
  }
  BiasPlan plan{bias.batch ? a.batch : 1, bias.head ? a.heads : 1,
                bias.query ? ceil_div(a.queries, kTile) : 1, ceil_div(a.keys, kTile), 1};
  const int64_t owners = plan.batches * plan.heads * plan.query_tiles * plan.key_tiles;
  const int64_t terms =
      a.batch * a.heads * ceil_div(a.queries, kTile) * ceil_div(a.keys, kTile) / owners;
  // Few owners would leave threads idle: cut their sums. How does not depend on the threads or the
  // groups, nor, where the bias has a batch of its own, on the size of the batch.
  constexpr int64_t kOwnersEnough = 64;
  plan.chunks = owners / plan.batches >= kOwnersEnough ? 1 : std::min<int64_t>(8, terms);
  const int64_t tile_bytes = kTile * kTile * p.kernels.element_size;
  const int64_t scratch_bytes = ceil_div(share_bytes, 64) * 64;
  const double flops = 4 * static_cast<double>(p.count) * pair_count(a) *
                       static_cast<double>(std::max(a.head_dim, a.value_dim));
  const auto finish = [&](int64_t index, void* sums, void* scratch) {
    const int64_t group = index / owners;
    p.kernels.bias_finish(p.groups[group], p.grads[group], plan, index % owners, sums, scratch);
  };
  if (p.count * owners >= kOwnersEnough) {
    for_each_task(p.count * owners, flops, scratch_bytes + plan.chunks * tile_bytes,
                  [&](int64_t index, void* scratch) {
                    char* sums = static_cast<char*>(scratch) + scratch_bytes;
                    for (int64_t chunk = 0; chunk < plan.chunks; chunk++)
                      run_share(index / owners, plan, index % owners, chunk,
                                sums + chunk * tile_bytes, scratch);
                    finish(index, sums, scratch);
                  });
    return;
  }
  const at::DataPtr memory =
      c10::GetCPUAllocator()->allocate(p.count * owners * plan.chunks * tile_bytes);
  char* sums = static_cast<char*>(memory.get());
  for_each_task(p.count * owners * plan.chunks, flops, scratch_bytes,
                [&](int64_t task, void* scratch) {
                  const int64_t index = task / plan.chunks;
                  run_share(index / owners, plan, index % owners, task % plan.chunks,
                            sums + task * tile_bytes, scratch);
                });
  for_each_task(p.count * owners, 0, scratch_bytes, [&](int64_t index, void* scratch) {
    finish(index, sums + index * plan.chunks * tile_bytes, scratch);
  });
}

void run_bias(const GradProblem& p) {
  if (bias_is_added(p.groups[0], p.grads[0].grad_bias)) return;
  run_bias(p, p.grads, p.kernels.backward_scratch_bytes(p.groups[0]),
           [&](int64_t group, const BiasPlan& plan, int64_t owner, int64_t chunk, void* sums,
               void* scratch) {
             p.kernels.bias_share(p.groups[group], p.grads[group], plan, owner, chunk, sums,
                                  scratch);
           });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& lse_low,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& key_lengths,
    const OptionalTensor& seed, OptionalString corner, OptionalSymInt window_left,
    OptionalSymInt window_right, double dropout_p, double scale, bool uniform_empty_rows,
    c10::SymIntArrayRef origin, std::array<bool, 4> output_mask) {
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe(
      query, key, &value, mask, bias, key_lengths, seed,
      {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin}, keep);
  check_saved(grad_out, grad_lse, query, value, out, lse, lse_low);
  set(groups, &Attention::out, out, keep);
  set_lse(groups, lse, lse_low, keep);

  const Tensor grad_query = empty_grad(query, output_mask[0]),
               grad_key = empty_grad(key, output_mask[1]);
  const Tensor grad_value = empty_grad(value, output_mask[2]);
  const Tensor grad_bias = empty_grad_bias(query, bias, output_mask[3]).zero_();
  const Tensor delta = empty_lse(query);
  Groups<AttentionGrad> grads(groups.size());
  set(grads, &AttentionGrad::grad_out, grad_out, keep);
  set(grads, &AttentionGrad::delta, delta, keep);
  if (grad_lse) set(grads, &AttentionGrad::grad_lse, *grad_lse, keep);
  if (output_mask[0]) set(grads, &AttentionGrad::grad_query, grad_query, keep);
  if (output_mask[1]) set(grads, &AttentionGrad::grad_key, grad_key, keep);
  if (output_mask[2]) set(grads, &AttentionGrad::grad_value, grad_value, keep);
  if (output_mask[3] && bias) set(grads, &AttentionGrad::grad_bias, grad_bias);

  const GradProblem problem{group_count(query), groups, grads, kernels_for(groups[0])};
  run_delta(problem);
  run_backward(problem);
  run_bias(problem);
  return {grad_query, grad_key, grad_value, grad_bias};
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
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe(
      query, key, &value, mask, bias, key_lengths, seed,
      {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin}, keep);
  check_saved(/*grad_out=*/std::nullopt, /*grad_lse=*/std::nullopt, query, value, out, lse,
              lse_low);
  const Tangents given{query_tangent, key_tangent, value_tangent, bias_tangent};
  check_tangents(given, query, key, value, bias);
  set(groups, &Attention::out, out, keep);
  set_lse(groups, lse, lse_low, keep);
  Groups<AttentionTangent> tangents = directions(groups, given, keep);
  const Tensor out_tangent = empty_out(query, value), lse_tangent = empty_lse(query);
  set(tangents, &AttentionTangent::out, out_tangent, keep);
  set(tangents, &AttentionTangent::lse, lse_tangent, keep);

  const Attention& a = groups[0];
  const int64_t count = group_count(query);
  const TypeKernels& kernels = kernels_for(a);
  // As in forward, blocks done together share what they pack.
  const int64_t blocks = count * a.batch * a.heads * query_blocks(a);
  const int64_t together =
      std::clamp<int64_t>(blocks / (4 * at::get_num_threads()), 1, kernels.group);
  const int64_t parts = ceil_div(query_blocks(a), together), tasks = a.batch * a.heads * parts;
  const double flops = 2 * static_cast<double>(count) * pair_count(a) *
                       static_cast<double>(3 * a.head_dim + 2 * a.value_dim);
  for_each_task(count * tasks, flops, kernels.forward_tangent_scratch_bytes(a),
                [&](int64_t index, void* scratch) {
                  const QueryTask q = query_task(a, index % tasks, parts);
                  const int64_t q0 = q.part * together * kTile, group = index / tasks;
                  kernels.forward_tangent(groups[group], tangents[group], q.batch, q.head, q0,
                                          std::min(together * kTile, a.queries - q0), scratch);
                });
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
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe(
      query, key, &value, mask, bias, key_lengths, seed,
      {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin}, keep);
  check_saved(grad_out, grad_lse, query, value, out, lse, lse_low);
  const Tangents given{query_tangent, key_tangent, value_tangent, bias_tangent};
  check_tangents(given, query, key, value, bias);
  check_saved_tangents({out_tangent, lse_tangent, grad_out_tangent, grad_lse_tangent}, out, lse);
  set(groups, &Attention::out, out, keep);
  set_lse(groups, lse, lse_low, keep);

  // The tangent of a gradient is where the gradient would be.
  const Tensor grad_query = empty_grad(query, output_mask[0]),
               grad_key = empty_grad(key, output_mask[1]);
  const Tensor grad_value = empty_grad(value, output_mask[2]);
  const Tensor grad_bias = empty_grad_bias(query, bias, output_mask[3]).zero_();
  const Tensor delta = empty_lse(query);
  Groups<AttentionGrad> grads(groups.size());
  set(grads, &AttentionGrad::grad_out, grad_out, keep);
  set(grads, &AttentionGrad::delta, delta, keep);
  if (grad_lse) set(grads, &AttentionGrad::grad_lse, *grad_lse, keep);
  if (output_mask[0]) set(grads, &AttentionGrad::grad_query, grad_query, keep);
  if (output_mask[1]) set(grads, &AttentionGrad::grad_key, grad_key, keep);
  if (output_mask[2]) set(grads, &AttentionGrad::grad_value, grad_value, keep);
  if (output_mask[3] && bias) set(grads, &AttentionGrad::grad_bias, grad_bias);

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

  const GradProblem problem{group_count(query), groups, grads, kernels_for(groups[0])};
  const TypeKernels& kernels = problem.kernels;
  run_delta(problem);
  if (delta_tangent.defined())
    run_blocks(problem, [&](int64_t group, int64_t b, int64_t h, int64_t block) {
      kernels.delta_tangent(groups[group], grads[group], tangents[group], b, h, block);
    });
  const int64_t scratch_bytes = kernels.backward_tangent_scratch_bytes(groups[0]);
  run_ranges(
      problem, scratch_bytes, /*products=*/12,
      [&](int64_t group, int64_t b, int64_t kv_head, int64_t range, void* partial, void* scratch) {
        kernels.backward_tangent(groups[group], grads[group], tangents[group], b, kv_head, range,
                                 partial, scratch);
      });
  // Where the bias is constant along the keys, its gradient is that of lse, and so in the tangent.
  Groups<AttentionGrad> lse_grads = grads;
  for (size_t i = 0; i < grads.size(); i++) {
    lse_grads[i].grad_lse = tangents[i].grad_lse;
    if (tangents[i].delta) lse_grads[i].delta = tangents[i].delta;
  }
  run_bias(problem, lse_grads, scratch_bytes,
           [&](int64_t group, const BiasPlan& plan, int64_t owner, int64_t chunk, void* sums,
               void* scratch) {
             kernels.bias_share_tangent(groups[group], grads[group], tangents[group], plan, owner,
                                        chunk, sums, scratch);
           });
  return {grad_query, grad_key, grad_value, grad_bias};
}

// Rows of the weights that are wanted and stand one after the other: one call of the kernel.
struct RowRun {
  int64_t query, count, to;
};
std::vector<RowRun> row_runs(const Attention& a, at::OptionalIntArrayRef rows) {
  std::vector<RowRun> runs;
  const int64_t count = rows ? static_cast<int64_t>(rows->size()) : a.queries;
  for (int64_t i = 0; i < count; i++) {
    const int64_t query = rows ? (*rows)[i] : i;
    if (!runs.empty() && runs.back().query + runs.back().count == query &&
        runs.back().count < kTile)
      runs.back().count++;
    else
      runs.push_back({query, 1, i});
  }
  return runs;
}

Tensor attention_weights(const Tensor& query, const Tensor& key, const OptionalTensor& lse,
                         const OptionalTensor& lse_low, const OptionalTensor& mask,
                         const OptionalTensor& bias, const OptionalTensor& key_lengths,
                         OptionalString corner, OptionalSymInt window_left,
                         OptionalSymInt window_right, double scale, bool uniform_empty_rows,
                         c10::SymIntArrayRef origin, at::OptionalIntArrayRef heads,
                         at::OptionalIntArrayRef rows) {
  std::vector<Tensor> keep;
  Groups<Attention> groups =
      describe(query, key, nullptr, mask, bias, key_lengths, std::nullopt,
               {corner, window_left, window_right, 0.0, scale, uniform_empty_rows, origin}, keep);
  check_selection(query, lse, lse_low, heads, rows);
  if (lse) set_lse(groups, *lse, lse_low, keep);
  const Attention& a = groups[0];
  const Tensor weights = empty_weights(query, key, heads, rows);
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
                                  to + (row * row_count + run.to) * a.keys * item, scratch);
                });
  return weights;
}

// to[row] = sum of from[row]. at::sum cuts a single long row by the number of threads; here the
// order is fixed.
template <class T>
void sum_rows(const Tensor& from, const Tensor& to) {
  constexpr int64_t kSums = 16;
  const int64_t width = from.size(-1);
  const T* const data = from.const_data_ptr<T>();
  T* const result = to.mutable_data_ptr<T>();
  for_each_task(to.numel(), static_cast<double>(from.numel()), 0, [&](int64_t row, void*) {
    double sums[kSums] = {};
    for (int64_t j = 0; j < width; j++)
      sums[j % kSums] += static_cast<double>(data[row * width + j]);
    double total = 0;
    for (const double sum : sums) total += sum;
    result[row] = static_cast<T>(total);
  });
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
                          window_left, window_right, 0.0, scale, uniform_empty_rows, origin);
  }
  std::vector<Tensor> keep;
  Groups<Attention> groups =
      describe(query, key, &value, mask, bias, key_lengths, std::nullopt,
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
  const Tensor grad_bias = empty_grad_bias(query, bias, output_mask[2]).zero_();
  Groups<AttentionGrad> grads(groups.size());
  set(grads, &AttentionGrad::grad_weights, grad);
  set(grads, &AttentionGrad::delta, delta, keep);
  if (output_mask[0]) set(grads, &AttentionGrad::grad_query, grad_query, keep);
  if (output_mask[1]) set(grads, &AttentionGrad::grad_key, grad_key, keep);
  if (output_mask[2] && bias) set(grads, &AttentionGrad::grad_bias, grad_bias);
  const GradProblem problem{group_count(query), groups, grads, kernels_for(groups[0])};
  run_backward(problem);
  run_bias(problem);
  return {grad_query, grad_key, grad_bias};
}

}  // namespace
}  // namespace mha_ext::cpu

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("attention_forward", mha_ext::cpu::attention_forward);
  m.impl("attention_backward", mha_ext::cpu::attention_backward);
  m.impl("attention_forward_tangent", mha_ext::cpu::attention_forward_tangent);
  m.impl("attention_backward_tangent", mha_ext::cpu::attention_backward_tangent);
  m.impl("attention_weights", mha_ext::cpu::attention_weights);
  m.impl("attention_weights_backward", mha_ext::cpu::attention_weights_backward);
}

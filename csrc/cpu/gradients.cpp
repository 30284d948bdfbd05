// The CPU key: backward and its tangent.
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "attention.h"
#include "schedule.h"

namespace mha_ext::cpu {
namespace {

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

}  // namespace

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

namespace {

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

}  // namespace

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

}  // namespace mha_ext::cpu

// The CPU key: backward and its tangent.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "attention.h"
#include "padding.h"
#include "pages.h"
#include "plan.h"

namespace mha_ext::cpu {
namespace {

// run(group, b, h, block) for every block of queries: sums over their rows.
template <class Run>
void run_blocks(const GradProblem& p, const Run& run) {
  const Attention& a = p.groups[0];
  const int64_t blocks = query_blocks(a), tasks = a.batch * a.heads * blocks;
  const double bytes = 2 * static_cast<double>(p.count * a.batch * a.heads * a.queries) *
                       static_cast<double>(a.value_dim * item_size(a));
  for_each_task(p.count * tasks, flops_worth(bytes), 0, [&](int64_t index, void*) {
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
// one range of keys, as kernels.backward_tangent.
template <class RunRange>
void run_ranges(const GradProblem& p, const RunRange& run_range) {
  const Attention& a = p.groups[0];
  const BackwardTangentPlan plan = plan_backward_tangent(a, p.grads[0], p.count);
  const int64_t ranges = plan.ranges.count, group_heads = a.batch * a.kv_heads;
  const int64_t shared = a.kv_heads ? a.heads / a.kv_heads : 0;  // query heads of a key/value head
  const bool partial = plan.head_bytes > 0;
  const at::DataPtr memory = allocate(plan.wave * plan.head_bytes);
  char* sums = static_cast<char*>(memory.get());
  for (int64_t first = 0; first < plan.heads; first += plan.wave) {
    const int64_t count = std::min(plan.wave, plan.heads - first);
    for_each_task(plan_heads(plan, count), [&](int64_t task, void* scratch) {
      const int64_t head = task / ranges, row = first + head;
      run_range(row / group_heads, row % group_heads / a.kv_heads, row % a.kv_heads, task % ranges,
                partial ? sums + head * plan.head_bytes : nullptr, scratch);
    });
    if (!partial) continue;
    const int64_t blocks = query_blocks(a), group_rows = a.batch * a.heads;
    for_each_task(count * shared * blocks,
                  flops_worth(static_cast<double>(count * plan.head_bytes)), 0,
                  [&](int64_t task, void*) {
                    const int64_t head = task / blocks, row = first * shared + head;
                    p.kernels.add_ranges(p.groups[row / group_rows], p.grads[row / group_rows],
                                         sums + head * (plan.head_bytes / shared),
                                         row % group_rows / a.heads, row % a.heads, task % blocks);
                  });
  }
}

// One key/value head of one group, and the share of its batch entry in the sums of grad_bias.
struct HeadPlace {
  int64_t group, share, batch, kv_head;
};

// grad_query, grad_key and grad_value, of first order, turn by turn; shares[share][group] says
// where gradients go.
void run_heads(const GradProblem& p, const BackwardPlan& plan,
               const std::vector<Groups<AttentionGrad>>& shares, bool begins_bias) {
  const Attention& a = p.groups[0];
  const int64_t ranges = plan.ranges.count;
  const int64_t batches = ceil_div(a.batch, plan.turns_batch), heads = a.kv_heads / plan.turns_head;
  const int64_t share_count = static_cast<int64_t>(shares.size());
  // Head `index` of a turn; the last share may have fewer turns than the others.
  const auto place_of = [&](int64_t index, int64_t turn) {
    const int64_t batch = index / heads % batches;
    return HeadPlace{index / (batches * heads), share_count > 1 ? batch : 0,
                     batch * plan.turns_batch + turn / plan.turns_head,
                     turn % plan.turns_head + index % heads};
  };
  const auto backward = [&](int64_t head, int64_t turn, KeyPart part, void* sums, void* scratch) {
    const HeadPlace place = place_of(head, turn);
    part.begins_bias = begins_bias && turn == 0;
    if (place.batch < a.batch)
      p.kernels.backward(p.groups[place.group], shares[place.share][place.group], place.batch,
                         place.kv_head, part, sums, scratch);
  };
  if (plan.side_by_side > 1) {
    const int64_t together = plan.side_by_side, group_heads = a.batch * a.heads;
    const int64_t group_tasks = ceil_div(group_heads, together);
    TaskPlan tasks = plan_heads(plan, plan.heads);
    tasks.tasks = p.count * group_tasks;
    for_each_task(tasks, [&](int64_t task, void* scratch) {
      const int64_t group = task / group_tasks, first = task % group_tasks * together;
      p.kernels.backward_heads(p.groups[group], p.grads[group], first,
                               std::min(together, group_heads - first), scratch);
    });
    return;
  }
  if (!plan.apart) {
    TaskPlan tasks = plan_heads(plan, plan.heads);
    // One thread goes head after head, as they lie in memory, and not turn after turn of a head.
    const int64_t together = tasks.threads == 1 ? 1 : plan.turns();
    tasks.tasks *= plan.turns() / together;
    for_each_task(tasks, [&](int64_t task, void* scratch) {
      const int64_t head = task % plan.heads, begin = task / plan.heads;
      void* sums = plan.head_bytes ? static_cast<char*>(scratch) + plan.scratch_bytes : nullptr;
      for (int64_t turn = begin; turn < begin + together; turn++)
        for (int64_t first = 0; first < ranges; first += plan.together)
          backward(head, turn, {first, std::min(first + plan.together, ranges), false}, sums,
                   scratch);
    });
    return;
  }
  const int64_t shared = a.heads / a.kv_heads, blocks = query_blocks(a);
  const at::DataPtr memory = allocate(plan.wave * plan.head_bytes);
  char* sums = static_cast<char*>(memory.get());
  const auto run_wave = [&](int64_t turn, int64_t first, int64_t count) {
    for_each_task(plan_heads(plan, count), [&](int64_t task, void* scratch) {
      const int64_t head = task % count, range = task / count * plan.together;
      backward(first + head, turn, {range, std::min(range + plan.together, ranges), true},
               sums + head * plan.head_bytes, scratch);
    });
    if (!plan.head_bytes) return;
    for_each_task(count * shared * blocks,
                  flops_worth(static_cast<double>(count * plan.head_bytes)), 0,
                  [&](int64_t task, void*) {
                    const int64_t head = task / blocks;
                    const HeadPlace place = place_of(first + head / shared, turn);
                    if (place.batch < a.batch)
                      p.kernels.add_sums(p.groups[place.group], p.grads[place.group],
                                         sums + head * ranges * plan.sum_bytes, place.batch,
                                         place.kv_head * shared + head % shared, task % blocks);
                  });
  };
  for (int64_t turn = 0; turn < plan.turns(); turn++)
    for (int64_t first = 0; first < plan.heads; first += plan.wave)
      run_wave(turn, first, std::min(plan.wave, plan.heads - first));
}

// delta, unless the calls compute it, and then all heads; those that add to the same sums of
// grad_bias one after the other.
void run_first_order(const GradProblem& p, const BackwardPlan& plan,
                     const std::vector<Groups<AttentionGrad>>& shares, bool begins_bias) {
  const Attention& a = p.groups[0];
  if (plan.heads == 0) return;
  const bool whole_heads = !plan.apart && plan.together == plan.ranges.count;
  const bool one_tile =
      backward_kernel(a, p.grads[0], p.kernels.limits) == BackwardKernel::kOneTile;
  if (!whole_heads && !one_tile && !p.grads[0].grad_weights.data) run_delta(p);
  run_heads(p, plan, shares, begins_bias);
}

// sums[0] += sums[1], sums[2] ...: [shares, elements].
template <class T>
void add_shares(const Tensor& sums) {
  const int64_t count = sums.size(0), size = sums.size(1);
  T* const to = sums.mutable_data_ptr<T>();
  at::parallel_for(0, size, 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t share = 1; share < count; share++)
      for (int64_t i = begin; i < end; i++) to[i] += to[share * size + i];
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

// grad_bias where plan_bias leaves a sum. run_share(group, plan, owner, chunk, sums, scratch) adds
// one share, as kernels.bias_share; lse_grads has the gradient of lse.
template <class RunShare>
void run_bias(const GradProblem& p, const Groups<AttentionGrad>& lse_grads, bool added,
              int64_t share_bytes, const RunShare& run_share) {
  const Attention& a = p.groups[0];
  const BiasSumPlan plan = plan_bias(a, p.grads[0].grad_bias, p.count, added, share_bytes);
  if (plan.kind == BiasSums::kNone) return;
  if (plan.kind == BiasSums::kConstant) {
    for (int64_t group = 0; group < p.count; group++) {
      if (a.dtype == DType::kFloat64)
        sum_constant_bias<double>(p.groups[group], lse_grads[group]);
      else
        sum_constant_bias<float>(p.groups[group], lse_grads[group]);
    }
    return;
  }
  const BiasPlan& tiles = plan.tiles;
  const int64_t owners = plan.owners, sum_bytes = tiles.chunks * plan.tile_bytes;
  const auto finish = [&](int64_t index, void* sums, void* scratch) {
    const int64_t group = index / owners;
    p.kernels.bias_finish(p.groups[group], p.grads[group], tiles, index % owners, sums, scratch);
  };
  if (!plan.apart) {
    for_each_task(plan.tasks, [&](int64_t index, void* scratch) {
      char* sums = static_cast<char*>(scratch) + plan.share_bytes;
      for (int64_t chunk = 0; chunk < tiles.chunks; chunk++)
        run_share(index / owners, tiles, index % owners, chunk, sums + chunk * plan.tile_bytes,
                  scratch);
      finish(index, sums, scratch);
    });
    return;
  }
  const at::DataPtr memory = allocate(p.count * owners * sum_bytes);
  char* sums = static_cast<char*>(memory.get());
  for_each_task(plan.tasks, [&](int64_t task, void* scratch) {
    const int64_t index = task / tiles.chunks;
    run_share(index / owners, tiles, index % owners, task % tiles.chunks,
              sums + task * plan.tile_bytes, scratch);
  });
  const double flops = flops_worth(static_cast<double>(p.count * owners * sum_bytes));
  for_each_task(p.count * owners, flops, plan.share_bytes, [&](int64_t index, void* scratch) {
    finish(index, sums + index * sum_bytes, scratch);
  });
}

}  // namespace

void run_backward(const GradProblem& p, const Tensor& grad_bias) {
  const Attention& a = p.groups[0];
  const BackwardPlan plan = plan_backward(a, p.grads[0], p.count);
  const int64_t count = plan.bias.count;
  const bool all_tiles = meets_all_tiles(a);
  const bool begins_bias =
      count > 0 && all_tiles &&
      backward_kernel(a, p.grads[0], p.kernels.limits) == BackwardKernel::kTiled;
  const bool is_written =
      plan.bias.apart || begins_bias || (all_tiles && bias_is_dense(a, p.grads[0].grad_bias));
  if (p.grads[0].grad_bias.data && !is_written) grad_bias.zero_();
  std::vector<Groups<AttentionGrad>> shares(std::max<int64_t>(1, count), p.grads);
  const bool batch_first =
      plan.turns_batch > 1 && !plan.apart && plan_heads(plan, plan.heads).threads > 1;
  for (Groups<AttentionGrad>& grads : shares)
    for (AttentionGrad& grad : grads) {
      grad.adds_bias = count > 0;
      grad.batch_first = batch_first;
    }
  Tensor sums;  // of the shares, each of the shape of grad_bias
  if (plan.bias.apart) {
    const auto type = a.dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
    sums = at::empty({count, grad_bias.numel()}, grad_bias.options().dtype(type));
    first_touch(sums);
    if (!begins_bias) sums.zero_();
    for (int64_t i = 0; i < count; i++)
      set(shares[i], &AttentionGrad::grad_bias, sums[i].view(grad_bias.sizes()));
  }
  run_first_order(p, plan, shares, begins_bias);
  if (plan.bias.apart) {
    if (sums.scalar_type() == at::kDouble)
      add_shares<double>(sums);
    else
      add_shares<float>(sums);
    grad_bias.copy_(sums[0].view(grad_bias.sizes()));
  }
  run_bias(p, p.grads, /*added=*/plan.bias.count > 0, p.kernels.backward_scratch_bytes(a),
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
    c10::SymIntArrayRef origin, std::array<bool, 4> output_mask, bool all_keys) {
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe_padded(
      query, key, &value, mask, bias, key_lengths, seed,
      {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin}, keep);
  check_saved(grad_out, grad_lse, query, value, out, lse, lse_low);
  set(groups, &Attention::out, out, keep);
  set_lse(groups, lse, lse_low, keep);

  const Tensor grad_query = empty_grad(query, output_mask[0]),
               grad_key = empty_grad(key, output_mask[1]);
  const Tensor grad_value = empty_grad(value, output_mask[2]);
  const Tensor grad_bias = empty_grad_bias(query, bias, output_mask[3]);
  first_touch(grad_query, grad_key, grad_value, grad_bias);
  const Tensor delta = empty_lse(query);
  Groups<AttentionGrad> grads(groups.size());
  set(grads, &AttentionGrad::grad_out, grad_out, keep);
  set(grads, &AttentionGrad::delta, delta, keep);
  for (AttentionGrad& grad : grads) grad.all_keys = all_keys;
  if (grad_lse) set(grads, &AttentionGrad::grad_lse, *grad_lse, keep);
  if (output_mask[0]) set(grads, &AttentionGrad::grad_query, grad_query, keep);
  if (output_mask[1]) set(grads, &AttentionGrad::grad_key, grad_key, keep);
  if (output_mask[2]) set(grads, &AttentionGrad::grad_value, grad_value, keep);
  if (output_mask[3] && bias) set(grads, &AttentionGrad::grad_bias, grad_bias);

  const GradProblem problem{group_count(query), groups, grads, kernels_for(groups[0])};
  run_backward(problem, grad_bias);
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
  Groups<Attention> groups = describe_padded(
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
  const Tensor grad_bias = empty_grad_bias(query, bias, output_mask[3]);
  first_touch(grad_query, grad_key, grad_value, grad_bias);
  grad_bias.zero_();
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
  run_ranges(problem, [&](int64_t group, int64_t b, int64_t kv_head, int64_t range, void* partial,
                          void* scratch) {
    kernels.backward_tangent(groups[group], grads[group], tangents[group], b, kv_head, range,
                             partial, scratch);
  });
  // Where the bias is constant along the keys, its gradient is that of lse, and so in the tangent.
  Groups<AttentionGrad> lse_grads = grads;
  for (size_t i = 0; i < grads.size(); i++) {
    lse_grads[i].grad_lse = tangents[i].grad_lse;
    if (tangents[i].delta) lse_grads[i].delta = tangents[i].delta;
  }
  run_bias(problem, lse_grads, /*added=*/false, kernels.backward_tangent_scratch_bytes(groups[0]),
           [&](int64_t group, const BiasPlan& plan, int64_t owner, int64_t chunk, void* sums,
               void* scratch) {
             kernels.bias_share_tangent(groups[group], grads[group], tangents[group], plan, owner,
                                        chunk, sums, scratch);
           });
  return {grad_query, grad_key, grad_value, grad_bias};
}

}  // namespace mha_ext::cpu

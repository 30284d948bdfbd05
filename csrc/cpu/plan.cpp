#include "plan.h"

#include <algorithm>

namespace mha_ext::cpu {
namespace {

// Blocks of queries done together share what they read and pack of K and V; no more of them than
// leaves every thread so many tasks that none waits long for the last one: threads begin late, and
// neighbours slow some of them. Those of a head are cut into equal parts. A row's result does not
// depend on that.
// Where what they share is dear, fewer tasks are enough; then a thread that is alone has no reason
// to cut at all.
int64_t blocks_together(const Attention& a, int64_t heads, int64_t blocks, int64_t most) {
  const int64_t threads = at::get_num_threads();
  const int64_t tasks = !kernels_for(a).packs(a) ? 8 : threads > 1 ? 4 : 1;
  blocks = std::max<int64_t>(1, blocks);
  const int64_t fit = std::clamp<int64_t>(heads * a.batch * blocks / (tasks * threads), 1, most);
  return ceil_div(blocks, ceil_div(blocks, fit));
}

// The same for heads that are one tile: they are so short that none waits for long.
int64_t short_heads_together(const Attention& a, int64_t groups) {
  constexpr int64_t kTasksOfAThread = 2;
  const int64_t most = heads_together(a, kernels_for(a).limits), threads = available_threads();
  if (threads == 1) return most;
  return std::clamp<int64_t>(groups * a.batch * a.heads / (kTasksOfAThread * threads), 1, most);
}

double product_flops(const Attention& a, int64_t groups, int64_t widths) {
  return 2 * static_cast<double>(groups) * pair_count(a) * static_cast<double>(widths);
}

// Reading the operands, in operations: what bounds few queries and short heads.
double read_flops(const Attention& a, int64_t groups) {
  const double rows =
      static_cast<double>(a.kv_heads) * keys_in_sight(a) + static_cast<double>(a.heads * a.queries);
  return flops_worth(
      static_cast<double>(groups * a.batch * item_size(a) * (a.head_dim + a.value_dim)) * rows);
}

int64_t padded(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

}  // namespace

ForwardPlan plan_forward(const Attention& a, int64_t groups) {
  const TypeKernels& kernels = kernels_for(a);
  ForwardPlan plan{forward_kernel(a, kernels.limits), 0, 0, 1, 0, {}};
  const int64_t ranges = forward_ranges(a).count;
  if (plan.kernel == ForwardKernel::kFew) {
    // Fewer rows and heads together, where that would leave threads without a task.
    const int64_t threads = available_threads(), heads = groups * a.batch * a.kv_heads * ranges;
    const int64_t rows = group_rows(a);
    const auto share = [&](int64_t tasks, int64_t least, int64_t most) {
      return threads == 1 ? most : std::clamp<int64_t>(tasks / (2 * threads), least, most);
    };
    plan.together = ceil_div(share(heads * rows, kFewPart, kFewRows), 4) * 4;
    plan.parts = ceil_div(rows, plan.together);
    plan.heads = share(heads * plan.parts, 1, few_heads(a));
    plan.group_jobs = a.batch * ceil_div(a.kv_heads, plan.heads) * plan.parts;
  } else if (plan.kernel == ForwardKernel::kGrouped) {
    const int64_t rows = group_rows(a), lanes = kernels.limits.lanes;
    const int64_t most = blocks_together(a, groups * a.kv_heads, ceil_div(rows, kTile),
                                         ranges > 1 ? 1 : kernels.group(a));
    // Equal parts, of whole blocks, or, less than one, of whole vectors.
    const int64_t whole = most > 1 ? kTile : lanes;
    plan.parts = ceil_div(rows, most * kTile);
    plan.together = ceil_div(ceil_div(rows, plan.parts), whole) * whole;
    plan.parts = ceil_div(rows, plan.together);
    plan.group_jobs = a.batch * a.kv_heads * plan.parts;
  } else {  // one block where its ranges may be tasks
    plan.together =
        blocks_together(a, groups * a.heads, query_blocks(a), ranges > 1 ? 1 : kernels.group(a));
    plan.parts = ceil_div(query_blocks(a), plan.together);
    if (plan.kernel == ForwardKernel::kOneTile) plan.heads = short_heads_together(a, groups);
    plan.group_jobs = ceil_div(a.batch * a.heads, plan.heads) * plan.parts;
  }
  double work = product_flops(a, groups, a.head_dim + a.value_dim);
  if (plan.kernel != ForwardKernel::kTiled) work = std::max(work, read_flops(a, groups));
  plan.jobs = plan_jobs(groups * plan.group_jobs, ranges, work, kernels.forward_scratch_bytes(a),
                        ranges > 1 ? kernels.state_bytes(a) : 0);
  if (!plan.jobs.apart) plan.jobs.tasks.head_tasks = plan.parts;
  return plan;
}

TangentPlan plan_forward_tangent(const Attention& a, int64_t groups) {
  const TypeKernels& kernels = kernels_for(a);
  const int64_t together = blocks_together(a, groups * a.heads, query_blocks(a), kTangentGroup);
  const int64_t parts = ceil_div(query_blocks(a), together), tasks = a.batch * a.heads * parts;
  TangentPlan plan{
      together, parts, tasks,
      plan_tasks(groups * tasks, product_flops(a, groups, 3 * a.head_dim + 2 * a.value_dim),
                 kernels.forward_tangent_scratch_bytes(a))};
  plan.tasks.head_tasks = parts;
  return plan;
}

BackwardPlan plan_backward(const Attention& a, const AttentionGrad& g, int64_t groups) {
  const TypeKernels& kernels = kernels_for(a);
  BackwardPlan plan = {};
  plan.ranges = grad_ranges(a);
  plan.bias = bias_shares(a, g.grad_bias);
  plan.turns_batch = plan.bias.batch_turns;
  plan.turns_head = plan.bias.count && !g.grad_bias.head ? a.kv_heads : 1;
  plan.heads = groups * ceil_div(a.batch, plan.turns_batch) * (a.kv_heads / plan.turns_head);
  plan.together = ranges_together(a);
  plan.wave = plan.heads;
  plan.side_by_side = 1;
  if (plan.turns() == 1 && !plan.bias.count &&
      backward_kernel(a, g, kernels.limits) == BackwardKernel::kOneTile)
    plan.side_by_side = short_heads_together(a, groups);
  plan.scratch_bytes = padded(kernels.backward_scratch_bytes(a));
  if (plan.heads == 0) return plan;
  const int64_t shared = a.heads / a.kv_heads, threads = available_threads();
  plan.sum_bytes = query_blocks(a) * query_sum_size(a) * kernels.element_size;
  plan.head_flops = 10 * pair_count(a) / static_cast<double>(a.batch * a.kv_heads) *
                    static_cast<double>(std::max(a.head_dim, a.value_dim));
  if (backward_kernel(a, g, kernels.limits) != BackwardKernel::kTiled)  // and as many gradients
    plan.head_flops =
        std::max(plan.head_flops, 2 * read_flops(a, 1) / static_cast<double>(a.batch * a.kv_heads));
  const int64_t count = plan.ranges.count;
  plan.apart = !(count == 1 || threads == 1 || plan.heads >= 4 * threads);
  if (!plan.apart) {
    plan.head_bytes = plan.together == count ? 0 : shared * plan.sum_bytes;
    return plan;
  }
  // Enough tasks for all threads, but the sums of few heads at a time, so that memory does not grow
  // with their number.
  plan.together = std::clamp<int64_t>(plan.heads * count / (4 * threads), 1, plan.together);
  plan.wave = std::min(plan.heads, ceil_div(4 * threads, ceil_div(count, plan.together)));
  plan.head_bytes = g.grad_query.data ? shared * count * plan.sum_bytes : 0;
  return plan;
}

TaskPlan plan_heads(const BackwardPlan& plan, int64_t count) {
  const int64_t parts = plan.apart ? ceil_div(plan.ranges.count, plan.together) : 1;
  const int64_t flops_of = plan.apart ? count : count * plan.turns();
  TaskPlan tasks = plan_tasks(count * parts, plan.head_flops * static_cast<double>(flops_of),
                              plan.scratch_bytes + (plan.apart ? 0 : plan.head_bytes));
  tasks.head_tasks = plan.apart ? 0 : 1;
  return tasks;
}

BackwardTangentPlan plan_backward_tangent(const Attention& a, const AttentionGrad& g,
                                          int64_t groups) {
  constexpr double kProducts = 12;
  const TypeKernels& kernels = kernels_for(a);
  const int64_t group_heads = a.batch * a.kv_heads;
  BackwardTangentPlan plan = {};
  plan.ranges = key_ranges(a);
  plan.heads = groups * group_heads;
  plan.wave = plan.heads;
  plan.scratch_bytes = kernels.backward_tangent_scratch_bytes(a);
  if (plan.heads == 0) return plan;
  // The partial sums of a few heads at a time, so that memory does not grow with their number.
  if (plan.ranges.count > 1 && g.grad_query.data) {
    plan.wave = std::min(
        plan.heads, std::max<int64_t>(1, ceil_div(2 * at::get_num_threads(), plan.ranges.count)));
    plan.head_bytes =
        a.heads / a.kv_heads * plan.ranges.count * a.queries * a.head_dim * kernels.element_size;
  }
  plan.head_flops = 2 * kProducts * pair_count(a) / static_cast<double>(group_heads) *
                    static_cast<double>(std::max(a.head_dim, a.value_dim));
  return plan;
}

TaskPlan plan_heads(const BackwardTangentPlan& plan, int64_t count) {
  TaskPlan tasks = plan_tasks(count * plan.ranges.count,
                              plan.head_flops * static_cast<double>(count), plan.scratch_bytes);
  tasks.head_tasks = plan.ranges.count;
  return tasks;
}

BiasSumPlan plan_bias(const Attention& a, const Pairs& grad_bias, int64_t groups, bool added,
                      int64_t share_bytes) {
  BiasSumPlan plan;
  if (!grad_bias.data || added || bias_is_dense(a, grad_bias) ||
      a.batch * a.heads * a.queries * a.keys == 0)
    return plan;
  if (!grad_bias.key && a.keys > 1) {
    plan.kind = BiasSums::kConstant;
    return plan;
  }
  plan.kind = BiasSums::kOwners;
  BiasPlan& tiles = plan.tiles;
  tiles = {grad_bias.batch ? a.batch : 1, grad_bias.head ? a.heads : 1,
           grad_bias.query ? ceil_div(a.queries, kTile) : 1, ceil_div(a.keys, kTile), 1};
  plan.owners = tiles.batches * tiles.heads * tiles.query_tiles * tiles.key_tiles;
  const int64_t terms =
      a.batch * a.heads * ceil_div(a.queries, kTile) * ceil_div(a.keys, kTile) / plan.owners;
  // Few owners would leave threads idle: cut their sums. How does not depend on the threads or the
  // groups, nor, where the bias has a batch of its own, on the size of the batch.
  constexpr int64_t kOwnersEnough = 64;
  tiles.chunks = plan.owners / tiles.batches >= kOwnersEnough ? 1 : std::min<int64_t>(8, terms);
  plan.apart = groups * plan.owners < kOwnersEnough;
  plan.tile_bytes = kTile * kTile * kernels_for(a).element_size;
  plan.share_bytes = padded(share_bytes);
  plan.tasks = plan_tasks(groups * plan.owners * (plan.apart ? tiles.chunks : 1),
                          product_flops(a, groups, 2 * std::max(a.head_dim, a.value_dim)),
                          plan.share_bytes + (plan.apart ? 0 : tiles.chunks * plan.tile_bytes));
  return plan;
}

}  // namespace mha_ext::cpu

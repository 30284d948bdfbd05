// The plans of a problem on this CPU, in words.
#include "../explain.h"

#include <c10/util/StringUtil.h>

#include "plan.h"

namespace mha_ext::cpu {
namespace {

template <class... Words>
std::string text(const Words&... words) {
  return c10::str(words...);
}
std::string counted(int64_t count, const char* one, const char* many) {
  return text(count, " ", count == 1 ? one : many);
}

Pass new_pass(const char* name, const char* kernel) {
  Pass pass;
  pass.name = name;
  pass.kernel = kernel;
  pass.tile_rows = pass.tile_keys = kTile;
  return pass;
}

void set_tasks(Pass& pass, const TaskPlan& tasks) {
  pass.tasks = tasks.tasks;
  pass.threads = tasks.tasks ? tasks.threads : 0;
  pass.memory.emplace_back("scratch", pass.threads * tasks.scratch_bytes);
  if (!tasks.tasks) return;
  const std::string threads = counted(tasks.threads, "thread: ", "threads: ");
  switch (tasks.limit) {
    case ThreadLimit::kWork:
      pass.why.push_back(threads + "one more is woken for each million operations, or 160 KB");
      break;
    case ThreadLimit::kTasks:
      pass.why.push_back(threads + "there are no more tasks");
      break;
    case ThreadLimit::kThreads:
      pass.why.push_back(threads + "all that this call may use");
      break;
  }
}

void set_ranges(Pass& pass, const KeyRanges& ranges, const char* by) {
  pass.key_ranges = ranges.count;
  if (ranges.count > 1)
    pass.why.push_back(
        text("the keys are cut into ", ranges.count, " ranges of ", ranges.size, ", by ", by));
}

int64_t few_queries(const Attention& a) {
  return a.keys > kTile ? kernels_for(a).limits.few_queries : kFewest;
}

Pass forward(const Attention& a) {
  const ForwardPlan plan = plan_forward(a, 1);
  Pass pass = new_pass("forward", "");
  const std::string queries = counted(a.queries, "query", "queries") + " a head";
  switch (plan.kernel) {
    case ForwardKernel::kFew:
      pass.kernel = "few queries";
      pass.of_group = true;
      pass.tile_rows = min_of(plan.together, group_rows(a));
      pass.why.push_back(text(queries, ", at most ", few_queries(a),
                              ": a tile has the rows of the heads that share K and V, ",
                              plan.together, " at most"));
      if (plan.heads > 1)
        pass.why.push_back(text("a task takes ", plan.heads,
                                " heads of keys and values, which lie side by side, some keys "
                                "of each in turn"));
      if (few_in_order(a, plan.heads, pass.tile_rows, kernels_for(a).limits))
        pass.why.push_back(text(counted(pass.tile_rows, "row", "rows"),
                                " over keys and values that follow one another: read in order"));
      break;
    case ForwardKernel::kGrouped:
      pass.kernel = "grouped";
      pass.of_group = true;
      pass.tile_rows = min_of(plan.together, kTile);
      pass.why.push_back(text(queries, " in ", a.heads / a.kv_heads,
                              " heads that share K and V: their queries fill the tiles together"));
      if (plan.together > kTile)
        pass.why.push_back(text("a task takes ", plan.together, " of them over each tile of keys"));
      break;
    case ForwardKernel::kOneTile:
      pass.kernel = "one tile";
      pass.why.push_back(text("the keys, ", a.keys, ", fit into one tile of ", kTile,
                              ": nothing is rescaled, K and V are read in place"));
      if (plan.heads > 1)
        pass.why.push_back(text("a task takes ", plan.heads, " heads, whose ", queries,
                                " lie side by side in a tile"));
      break;
    case ForwardKernel::kTiled:
      pass.kernel = "tiled";
      pass.why.push_back(a.keys > kTile
                             ? text("the keys, ", a.keys, ", are more than one tile of ", kTile)
                             : text(queries, ", more than ", kernels_for(a).limits.one_tile_queries,
                                    ": products of pairs want whole tiles"));
      if (plan.together > 1)
        pass.why.push_back(
            text("a task takes ", plan.together, " blocks of ", kTile, " queries over each tile"));
      break;
  }
  set_ranges(pass, forward_ranges(a), "the two lengths alone");
  if (plan.jobs.apart)
    pass.why.push_back(text("a range is a task: there are only ",
                            counted(plan.jobs.jobs, "block", "blocks"), " of queries"));
  set_tasks(pass, plan.jobs.tasks);
  if (plan.jobs.apart)
    pass.memory.emplace_back("sums of the ranges", plan.jobs.jobs * plan.jobs.job_bytes);
  return pass;
}

void explain_bias(Pass& pass, const Attention& a, const Pairs& grad_bias, bool first_order,
                  int64_t share_bytes) {
  if (!grad_bias.data) return;
  const BiasShares shares = first_order ? bias_shares(a, grad_bias) : BiasShares();
  const bool added = shares.count > 0;
  const BiasSumPlan plan = plan_bias(a, grad_bias, 1, added, share_bytes);
  if (plan.kind == BiasSums::kConstant) {
    pass.why.push_back("bias: constant along the keys, so its gradient is that of lse");
  } else if (plan.kind == BiasSums::kNone) {
    if (!added)
      pass.why.push_back("bias: one element for each pair, dS is its gradient");
    else if (!shares.apart)
      pass.why.push_back("bias: the heads that share it take turns and add dS to its gradient");
    else
      pass.why.push_back(
          text("bias: the heads that share it take turns and add dS to sums beside its gradient, ",
               shares.count > 1 ? text("in ", shares.count, " shares added in order")
                                : std::string("rounded once")));
    if (shares.apart)
      pass.memory.emplace_back("sums of the bias' gradient",
                               shares.count * shares.bytes * (grad_bias.batch ? a.batch : 1));
  } else {
    pass.why.push_back(text("bias: ", counted(plan.owners, "tile", "tiles"),
                            " of its gradient, each with an owner that computes dS again",
                            plan.tiles.chunks > 1
                                ? text(", in ", plan.tiles.chunks, " shares added in order")
                                : std::string()));
    pass.memory.emplace_back("scratch of the bias' gradient",
                             plan.tasks.threads * plan.tasks.scratch_bytes);
    if (plan.apart)
      pass.memory.emplace_back("sums of the bias' gradient",
                               plan.owners * plan.tiles.chunks * plan.tile_bytes);
  }
}

Pass backward(const Attention& a, const AttentionGrad& g) {
  const BackwardPlan plan = plan_backward(a, g, 1);
  Pass pass = new_pass("backward", "tiled");
  switch (backward_kernel(a, g, kernels_for(a).limits)) {
    case BackwardKernel::kFew:
      pass.kernel = "few queries";
      pass.of_group = true;
      pass.tile_rows = group_rows(a);
      pass.why.push_back(text(counted(a.queries, "query", "queries"),
                              takes_groups(a, kernels_for(a).limits)
                                  ? text(" in ", a.heads / a.kv_heads, " heads")
                                  : text(" a head, at most ", few_queries(a)),
                              ": a tile has the rows of the heads that share K and V, ", kFewRows,
                              " at most, and each key is met once"));
      break;
    case BackwardKernel::kOneTile:
      pass.kernel = "one tile";
      pass.why.push_back(text("a head is one tile of ", kTile, " x ", kTile,
                              ": each gradient is one product, written where it belongs"));
      break;
    case BackwardKernel::kTiled:
      break;
  }
  set_ranges(pass, plan.ranges, "their number alone");
  if (plan.side_by_side > 1)
    pass.why.push_back(text("a task takes ", plan.side_by_side,
                            " heads, whose queries lie side by side in a tile"));
  else if (!plan.apart)
    pass.why.push_back(
        plan.turns() > 1 ? text("a task is ", plan.turns(), " key/value heads, one after the other")
                         : std::string("a task is a key/value head"));
  else
    pass.why.push_back(text("a task is ", plan.together, " of the ranges of a key/value head: ",
                            counted(plan.heads, "head is", "heads are"), " few for the threads"));
  if (plan.apart && plan.turns() > 1)
    pass.why.push_back(text(plan.turns(), " turns, each with the tasks below"));
  set_tasks(pass, plan_heads(plan, plan.wave));
  if (plan.apart && plan.head_bytes)
    pass.memory.emplace_back("sums of grad_query", plan.wave * plan.head_bytes);
  pass.tasks = pass.tasks / max_of(1, plan.wave) * plan.heads;
  if (plan.side_by_side > 1) pass.tasks = ceil_div(plan.heads, plan.side_by_side);
  explain_bias(pass, a, g.grad_bias, /*first_order=*/true,
               kernels_for(a).backward_scratch_bytes(a));
  return pass;
}

Pass forward_tangent(const Attention& a) {
  Pass pass = new_pass("forward_tangent", "tiled");
  set_tasks(pass, plan_forward_tangent(a, 1).tasks);
  return pass;
}

Pass backward_tangent(const Attention& a, const AttentionGrad& g) {
  const BackwardTangentPlan plan = plan_backward_tangent(a, g, 1);
  Pass pass = new_pass("backward_tangent", "tiled");
  set_ranges(pass, plan.ranges, "their number alone");
  pass.why.push_back("a task is a range of a key/value head");
  set_tasks(pass, plan_heads(plan, plan.wave));
  if (plan.head_bytes) pass.memory.emplace_back("sums of grad_query", plan.wave * plan.head_bytes);
  pass.tasks = pass.tasks / max_of(1, plan.wave) * plan.heads;
  explain_bias(pass, a, g.grad_bias, /*first_order=*/false,
               kernels_for(a).backward_tangent_scratch_bytes(a));
  return pass;
}

}  // namespace

std::vector<Pass> explain(const Attention& a, const AttentionGrad& g) {
  return {forward(a), backward(a, g), forward_tangent(a), backward_tangent(a, g)};
}

}  // namespace mha_ext::cpu

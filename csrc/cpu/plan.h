// How each pass over a problem is cut into tasks: decided here, run by attention.cpp and
// gradients.cpp, told by explain.cpp. Sizes are read from the first group.
#pragma once
#include "attention.h"
#include "schedule.h"

namespace mha_ext::cpu {

struct ForwardPlan {
  ForwardKernel kernel;
  int64_t together;    // blocks of 64 queries of a head that a job takes; kFew, kGrouped: rows
  int64_t parts;       // jobs of a head; kFew, kGrouped: of `heads` key/value heads
  int64_t heads;       // that a job takes: kFew, kGrouped: of key and value; kOneTile: short ones
  int64_t group_jobs;  // of one group
  JobPlan jobs;        // over the ranges of keys
};
ForwardPlan plan_forward(const Attention& a, int64_t groups);

struct TangentPlan {
  int64_t together, parts, group_tasks;
  TaskPlan tasks;
};
TangentPlan plan_forward_tangent(const Attention& a, int64_t groups);

// grad_query, grad_key and grad_value, of first order. Where there are many heads, a task is a
// key/value head; else (`apart`) some ranges of keys of a head, whose sums of grad_query are added
// afterwards.
struct BackwardPlan {
  KeyRanges ranges;
  BiasShares bias;
  int64_t turns_batch, turns_head;  // heads that add to the same grad_bias take turns
  int64_t heads;                    // of key and value, in one turn, at most
  int64_t side_by_side;             // short heads that a task takes; else 1
  bool apart;
  int64_t together;       // ranges that a call takes
  int64_t wave;           // heads whose tasks, and sums, there are at a time
  int64_t scratch_bytes;  // of a call
  int64_t sum_bytes;      // of one query head: its grad_query over one range of keys
  int64_t head_bytes;     // of the sums of a key/value head: beside the call's scratch, or `apart`
  double head_flops;
  int64_t turns() const { return turns_batch * turns_head; }
};
BackwardPlan plan_backward(const Attention& a, const AttentionGrad& g, int64_t groups);
// Of `count` heads, a wave at most. A task that has all of a head takes its turns as well.
TaskPlan plan_heads(const BackwardPlan& plan, int64_t count);

// The same for the tangent of backward: a task is one of key_ranges of a key/value head.
struct BackwardTangentPlan {
  KeyRanges ranges;
  int64_t heads, wave;
  int64_t scratch_bytes, head_bytes;
  double head_flops;
};
BackwardTangentPlan plan_backward_tangent(const Attention& a, const AttentionGrad& g,
                                          int64_t groups);
TaskPlan plan_heads(const BackwardTangentPlan& plan, int64_t count);

// grad_bias, and its tangent.
enum class BiasSums {
  kNone,      // there is none, or backward writes or adds it
  kConstant,  // constant along the keys: the sum of grad_lse
  kOwners     // each tile has an owner, which computes dS again
};
struct BiasSumPlan {
  BiasSums kind = BiasSums::kNone;
  BiasPlan tiles = {};
  int64_t owners = 0;
  bool apart = false;  // an owner's shares are tasks, and their sums are added afterwards
  int64_t tile_bytes = 0, share_bytes = 0;
  TaskPlan tasks;
};
// `added`: backward has added it (bias_shares). share_bytes: scratch of a share.
BiasSumPlan plan_bias(const Attention& a, const Pairs& grad_bias, int64_t groups, bool added,
                      int64_t share_bytes);

}  // namespace mha_ext::cpu

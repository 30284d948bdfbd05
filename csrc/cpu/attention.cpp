// The CPU key: forward and its tangent, and the table of all operators. Describe the problem,
// allocate, hand tiles to the threads as plan.h says.
#include "attention.h"

#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "padding.h"
#include "pages.h"
#include "plan.h"

namespace mha_ext::cpu {

std::tuple<Tensor, Tensor, Tensor> attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
    const OptionalTensor& bias, const OptionalTensor& key_lengths, const OptionalTensor& seed,
    OptionalString corner, OptionalSymInt window_left, OptionalSymInt window_right,
    double dropout_p, double scale, bool uniform_empty_rows, c10::SymIntArrayRef origin,
    bool with_lse) {
  std::vector<Tensor> keep;
  Groups<Attention> groups = describe_padded(
      query, key, &value, mask, bias, key_lengths, seed,
      {corner, window_left, window_right, dropout_p, scale, uniform_empty_rows, origin}, keep);
  const Tensor out = empty_out(query, value), lse = empty_lse(query, with_lse),
               lse_low = empty_lse(query, with_lse);
  first_touch(out);
  set(groups, &Attention::out, out, keep);
  if (with_lse) set_lse(groups, lse, lse_low, keep);
  const Attention& a = groups[0];
  const int64_t count = group_count(query);
  const TypeKernels& kernels = kernels_for(a);
  const ForwardPlan plan = plan_forward(a, count);
  const int64_t together = plan.together, parts = plan.parts, jobs = plan.group_jobs;
  if (plan.kernel == ForwardKernel::kFew || plan.kernel == ForwardKernel::kGrouped) {
    const int64_t rows = group_rows(a);
    const int64_t heads_jobs = ceil_div(a.kv_heads, plan.heads);
    const auto place = [&](int64_t index, const auto& run) {
      const int64_t job = index % jobs, heads = job / parts, first = job % parts * together;
      const int64_t kv = heads % heads_jobs * plan.heads;
      run(groups[index / jobs], heads / heads_jobs, kv, std::min(plan.heads, a.kv_heads - kv),
          first, std::min(together, rows - first));
    };
    const auto part = [&](int64_t job, int64_t range, void* states, void* scratch) {
      place(job, [&](const Attention& g, int64_t b, int64_t kv, int64_t heads, int64_t first,
                     int64_t size) {
        kernels.forward_few(g, b, kv, heads, first, size, range, states, scratch);
      });
    };
    for_each_job(
        plan.jobs, [&](int64_t job, void* scratch) { part(job, kEveryRange, nullptr, scratch); },
        part,
        [&](int64_t job, void* states, void* scratch) {
          place(job, [&](const Attention& g, int64_t b, int64_t kv, int64_t heads, int64_t first,
                         int64_t size) {
            kernels.merge_few(g, b, kv, heads, first, size, states, scratch);
          });
        });
    return {out, lse, lse_low};
  }
  if (plan.heads > 1) {
    for_each_task(plan.jobs.tasks, [&](int64_t job, void* scratch) {
      const int64_t first = job % jobs * plan.heads;
      kernels.forward_heads(groups[job / jobs], first,
                            std::min(plan.heads, a.batch * a.heads - first), scratch);
    });
    return {out, lse, lse_low};
  }
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
      plan.jobs, [&](int64_t job, void* scratch) { part(job, kEveryRange, nullptr, scratch); },
      part,
      [&](int64_t job, void* states, void* scratch) {
        place(job, [&](const Attention& g, int64_t b, int64_t h, int64_t q0, int64_t rows) {
          kernels.merge(g, b, h, q0, rows, states, scratch);
        });
      });
  return {out, lse, lse_low};
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
  Groups<Attention> groups = describe_padded(
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
  first_touch(out_tangent);
  set(tangents, &AttentionTangent::out, out_tangent, keep);
  set(tangents, &AttentionTangent::lse, lse_tangent, keep);

  const Attention& a = groups[0];
  const int64_t count = group_count(query);
  const TypeKernels& kernels = kernels_for(a);
  const TangentPlan plan = plan_forward_tangent(a, count);
  const int64_t together = plan.together, parts = plan.parts, tasks = plan.group_tasks;
  for_each_task(plan.tasks, [&](int64_t index, void* scratch) {
    const QueryTask q = query_task(a, index % tasks, parts);
    const int64_t q0 = q.part * together * kTile, group = index / tasks;
    kernels.forward_tangent(groups[group], tangents[group], q.batch, q.head, q0,
                            std::min(together * kTile, a.queries - q0), scratch);
  });
  return {out_tangent, lse_tangent};
}

}  // namespace mha_ext::cpu

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("attention_forward", mha_ext::cpu::attention_forward);
  m.impl("attention_backward", mha_ext::cpu::attention_backward);
  m.impl("attention_forward_tangent", mha_ext::cpu::attention_forward_tangent);
  m.impl("attention_backward_tangent", mha_ext::cpu::attention_backward_tangent);
  m.impl("attention_weights", mha_ext::cpu::attention_weights);
  m.impl("attention_weights_backward", mha_ext::cpu::attention_weights_backward);
}

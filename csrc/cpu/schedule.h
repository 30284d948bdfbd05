// How the tasks of one call are handed to threads, and the scratch memory they work in.
#pragma once
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

namespace mha_ext::cpu {

// OpenMP's threads do not survive a fork: in the child, work runs on the calling thread.
inline std::atomic<bool> forked{false};
[[maybe_unused]] inline const int at_fork =
    pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

// Scratch memory of the thread that calls an operator, kept between calls: fresh pages cost more
// than a small problem.
inline char* scratch_memory(int64_t bytes, at::DataPtr& owner) {
  constexpr int64_t kKept = int64_t{4} << 20;
  thread_local at::DataPtr kept;
  thread_local int64_t kept_bytes = 0;
  const auto aligned = [](const at::DataPtr& memory) {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) &
                                   ~uintptr_t{63});
  };
  if (bytes > kKept) {
    owner = c10::GetCPUAllocator()->allocate(bytes + 64);
    return aligned(owner);
  }
  if (bytes > kept_bytes) {
    kept = c10::GetCPUAllocator()->allocate(bytes + 64);
    kept_bytes = bytes;
  }
  return aligned(kept);
}

// How many threads a call may use.
inline int64_t available_threads() {
  return forked.load(std::memory_order_relaxed) || at::in_parallel_region() ? 1
                                                                            : at::get_num_threads();
}

// What keeps a call from more threads: little work, few tasks, or that there are no more.
enum class ThreadLimit { kWork, kTasks, kThreads };

struct TaskPlan {
  int64_t tasks = 0, threads = 1;
  int64_t head_tasks = 0;     // of a head, one after the other; 0: no head is a thread's own
  int64_t scratch_bytes = 0;  // of each thread
  ThreadLimit limit = ThreadLimit::kWork;
};

// Little work is not worth waking threads for: so many operations are, or so many bytes of memory.
constexpr double kFlopsWorthAThread = 1e6, kBytesWorthAThread = 160 << 10;
inline double flops_worth(double bytes) {
  return bytes * (kFlopsWorthAThread / kBytesWorthAThread);
}

// `flops` is an estimate of the whole.
inline TaskPlan plan_tasks(int64_t tasks, double flops, int64_t scratch_bytes) {
  TaskPlan plan;
  plan.tasks = tasks;
  plan.threads = 1 + static_cast<int64_t>(flops / kFlopsWorthAThread);
  plan.scratch_bytes = (scratch_bytes + 127) / 64 * 64;
  if (plan.threads == 1) return plan;
  const int64_t available = available_threads();
  const int64_t most = std::min(tasks, available);
  if (most < plan.threads) {
    plan.limit = available <= tasks ? ThreadLimit::kThreads : ThreadLimit::kTasks;
    plan.threads = most;
  }
  return plan;
}

// run(task, scratch) for every task, by any thread; what a task computes depends neither on that
// nor on their order.
template <class Run>
void for_each_task(const TaskPlan& plan, const Run& run) {
  const int64_t tasks = plan.tasks, threads = plan.threads, stride = plan.scratch_bytes;
  if (tasks == 0) return;
  at::DataPtr memory;
  char* base = scratch_memory(stride * threads, memory);
  if (threads == 1) {
    for (int64_t task = 0; task < tasks; task++) run(task, base);
    return;
  }
  // A thread has heads of its own, as far as there are: what it read and asked for is in its cache.
  // Then it helps the others. Within a head the task that takes longest is first.
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  constexpr int64_t kShares = 64;
  const int64_t of_head = plan.head_tasks ? plan.head_tasks : tasks;
  const int64_t heads = (tasks + of_head - 1) / of_head;
  const int64_t count = std::min({heads, threads, kShares});
  std::array<Share, kShares> shares;
  for (int64_t i = 0; i < count; i++) {
    shares[i].next.store(i * heads / count * of_head, std::memory_order_relaxed);
    shares[i].end = std::min((i + 1) * heads / count * of_head, tasks);
  }
  // Many small tasks are taken several at a time: each take moves a cache line between threads.
  const int64_t take = std::max<int64_t>(1, tasks / (16 * threads));
  const auto work = [&](int64_t thread) {
    for (int64_t i = 0; i < count; i++) {
      Share& share = shares[(thread + i) % count];
      for (int64_t begin;
           (begin = share.next.fetch_add(take, std::memory_order_relaxed)) < share.end;)
        for (int64_t task = begin; task < std::min(begin + take, share.end); task++)
          run(task, base + thread * stride);
    }
  };
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; thread++) work(thread);
  });
}
template <class Run>
void for_each_task(int64_t tasks, double flops, int64_t scratch_bytes, const Run& run) {
  for_each_task(plan_tasks(tasks, flops, scratch_bytes), run);
}

// Jobs of which each is a sum of `parts`: all of a job by one thread, or, where the jobs are too
// few for the threads, the parts as tasks (`apart`), and the sum by whoever finishes a job's last
// part. Both give the same bits.
struct JobPlan {
  int64_t jobs = 0, parts = 1;
  bool apart = false;
  int64_t job_bytes = 0;  // of the states of a job's parts, where they are apart
  TaskPlan tasks;
};

inline JobPlan plan_jobs(int64_t jobs, int64_t parts, double flops, int64_t scratch_bytes,
                         int64_t part_bytes) {
  constexpr int64_t kJobsEnough = 8;  // for each thread
  const int64_t threads = available_threads();
  JobPlan plan;
  plan.jobs = jobs;
  plan.parts = parts;
  plan.apart = parts > 1 && threads > 1 && jobs < kJobsEnough * threads;
  if (plan.apart) plan.job_bytes = (parts * part_bytes + 63) / 64 * 64;
  plan.tasks = plan_tasks(plan.apart ? jobs * parts : jobs, flops, scratch_bytes);
  return plan;
}

//   whole(job, scratch)   part(job, index, states, scratch)   sum(job, states, scratch)
template <class Whole, class Part, class Sum>
void for_each_job(const JobPlan& plan, const Whole& whole, const Part& part, const Sum& sum) {
  if (!plan.apart) return for_each_task(plan.tasks, whole);
  const at::DataPtr memory = c10::GetCPUAllocator()->allocate(plan.jobs * plan.job_bytes);
  std::vector<std::atomic<int64_t>> left(plan.jobs);
  for (auto& count : left) count.store(plan.parts, std::memory_order_relaxed);
  for_each_task(plan.tasks, [&](int64_t task, void* scratch) {
    const int64_t job = task / plan.parts;
    char* states = static_cast<char*>(memory.get()) + job * plan.job_bytes;
    part(job, task % plan.parts, states, scratch);
    if (left[job].fetch_sub(1, std::memory_order_acq_rel) == 1) sum(job, states, scratch);
  });
}

}  // namespace mha_ext::cpu

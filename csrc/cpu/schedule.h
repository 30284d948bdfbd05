// How the tasks of one call are handed to threads, and the scratch memory they work in.
#pragma once
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>

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

// run(task, scratch) for every task, the next free thread taking the next task; what a task
// computes depends on neither. `flops` is an estimate of the whole: little work is not worth waking
// threads for.
template <class Run>
void for_each_task(int64_t tasks, double flops, int64_t scratch_bytes, const Run& run) {
  if (tasks == 0) return;
  constexpr double kFlopsWorthAThread = 1e6;
  int64_t threads = 1 + static_cast<int64_t>(flops / kFlopsWorthAThread);
  if (threads > 1) threads = std::min({threads, tasks, available_threads()});

  const int64_t stride = (scratch_bytes + 127) / 64 * 64;
  at::DataPtr memory;
  char* base = scratch_memory(stride * threads, memory);
  if (threads == 1) {
    for (int64_t task = 0; task < tasks; task++) run(task, base);
    return;
  }
  // Many small tasks are taken several at a time: each take moves a cache line between threads.
  const int64_t take = std::max<int64_t>(1, tasks / (16 * threads));
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t thread) {
    for (int64_t begin; (begin = next.fetch_add(take, std::memory_order_relaxed)) < tasks;)
      for (int64_t task = begin; task < std::min(begin + take, tasks); task++)
        run(task, base + thread * stride);
  };
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; thread++) work(thread);
  });
}

}  // namespace mha_ext::cpu

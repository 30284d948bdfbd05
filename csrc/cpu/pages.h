// The pages of large memory, given by the operating system at the first write to each.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include "schedule.h"

namespace mha_ext::cpu {

// A block of this size malloc mostly maps anew: by default M_MMAP_THRESHOLD (mallopt(3)) grows no
// further. To be given its 8,192 pages takes several times as long as to write to them. As huge
// pages they are 16 and take a fifth, but where transparent_hugepage/enabled is madvise one must
// ask for them.
constexpr int64_t kMappedAnew = int64_t{32} << 20, kHugePage = int64_t{2} << 20;

// For memory just allocated, before anything is written, and those of its pages that are huge as a
// whole. The threads write to pages of their own, one after the other: of two that meet in one,
// each clears it.
inline void ask_huge_pages(void* memory, int64_t bytes) {
  if (bytes < kHugePage) return;
  char* const data = static_cast<char*>(memory);
  char* const first = data + kHugePage - reinterpret_cast<intptr_t>(data) % kHugePage;
  const int64_t pages = (data + bytes - first) / kHugePage;
  if (pages <= 0) return;
#ifdef MADV_HUGEPAGE
  (void)madvise(first, pages * kHugePage, MADV_HUGEPAGE);  // where that fails, pages are small
#endif
  TaskPlan plan = plan_tasks(pages, flops_worth(static_cast<double>(bytes)), 0);
  plan.head_tasks = 1;
  for_each_task(plan, [&](int64_t page, void*) { first[page * kHugePage] = 0; });
}

inline void first_touch(void* memory, int64_t bytes) {
  if (bytes >= kMappedAnew) ask_huge_pages(memory, bytes);
}
template <class... Tensors>
void first_touch(const at::Tensor& made, const Tensors&... others) {
  first_touch(made.mutable_data_ptr(), static_cast<int64_t>(made.nbytes()));
  if constexpr (sizeof...(others) > 0) first_touch(others...);
}

inline at::DataPtr allocate(int64_t bytes) {
  at::DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
  first_touch(memory.get(), bytes);
  return memory;
}

}  // namespace mha_ext::cpu

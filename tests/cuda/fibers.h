// Threads of a block as fibers: a stack each, and a jump from one to another.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <memory>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {
namespace {

constexpr size_t kStack = 256 << 10;

#ifdef __x86_64__
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.local emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#endif

struct Fiber {
  std::unique_ptr<char[]> stack;
#ifdef __x86_64__
  void* at = nullptr;
#else
  ucontext_t at;
#endif
  // Stacks begin at different offsets: at the same one they would share a few lines of the caches.
  void prepare(void (*entry)(), int number) {
    if (!stack) stack.reset(new char[kStack]);
    const size_t size = kStack - (size_t)number * 33 % 1024 * 64;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack.get(), kStack);  // of frames that never returned
#endif
#ifdef __x86_64__
    void** top = (void**)(((uintptr_t)stack.get() + size) & ~(uintptr_t)15);
    *--top = nullptr;  // the return address of entry, which never returns
    *--top = (void*)entry;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    at = top;
#else
    getcontext(&at);
    at.uc_stack.ss_sp = stack.get();
    at.uc_stack.ss_size = size;
    at.uc_link = nullptr;
    makecontext(&at, entry, 0);
#endif
  }
};

#ifdef __SANITIZE_ADDRESS__
const void* main_bottom = nullptr;
size_t main_size = 0;
#endif

// What a fiber does first.
inline void arrived() {
#ifdef __SANITIZE_ADDRESS__
  if (!main_bottom)
    __sanitizer_finish_switch_fiber(nullptr, &main_bottom, &main_size);
  else
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

inline void jump(Fiber& from, Fiber& to) {
#ifdef __SANITIZE_ADDRESS__
  void* fake = nullptr;
  const bool home = !to.stack;
  __sanitizer_start_switch_fiber(&fake, home ? main_bottom : to.stack.get(),
                                 home ? main_size : kStack);
#endif
#ifdef __x86_64__
  emulator_switch(&from.at, to.at);
#else
  swapcontext(&from.at, &to.at);
#endif
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

}  // namespace
}  // namespace emulator

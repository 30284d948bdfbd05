// The instruction sets that were compiled, best first; which of them this machine has; which one
// runs.
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef MHA_EXT_X86
#if defined(__x86_64__)
#define MHA_EXT_X86 1
#else
#define MHA_EXT_X86 0
#endif
#endif

#if MHA_EXT_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mha_ext::cpu {

// Weak: a build may leave all but the portable one out, and then their address is null.
#if MHA_EXT_X86
extern const Kernels kAmx [[gnu::weak]], kAvx512Bf16 [[gnu::weak]], kAvx512 [[gnu::weak]],
    kAvx2 [[gnu::weak]];
#endif
extern const Kernels kPortable;

namespace {

struct Isa {
  const Kernels* kernels;
  bool (*supported)();
};

bool always() { return true; }

#if MHA_EXT_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");  // and F16C, which every AVX2 machine has
}
#ifdef MHA_EXT_EMULATE_AVX512
bool has_avx512() { return has_avx2(); }
bool has_avx512_bf16() { return has_avx2(); }
#else
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
#ifdef MHA_EXT_EMULATE_AMX
bool has_amx() { return has_avx512_bf16(); }
#else
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & kTile) == 0 || (d & kBf16) == 0) return false;
  // Linux gives the 8 KiB of tile state to processes that ask for it.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#endif

// On Intel without AMX, vdpbf16ps does half the work of a float multiply-add per cycle (measured:
// 120 against 235 GFLOP/s on Granite Rapids), on AMD twice (495 against 250 on Zen 5): there it
// leads the list, here it comes after plain AVX-512.
const Isa kIntel[] = {{&kAmx, has_amx},
                      {&kAvx512, has_avx512},
                      {&kAvx512Bf16, has_avx512_bf16},
                      {&kAvx2, has_avx2},
                      {&kPortable, always}};
const Isa kOther[] = {{&kAmx, has_amx},
                      {&kAvx512Bf16, has_avx512_bf16},
                      {&kAvx512, has_avx512},
                      {&kAvx2, has_avx2},
                      {&kPortable, always}};
// What is emulated is slow: for those who name it.
bool is_emulated([[maybe_unused]] const Kernels* kernels) {
#if defined(MHA_EXT_EMULATE_AVX512)
  return kernels == &kAvx512 || kernels == &kAvx512Bf16 || kernels == &kAmx;
#elif defined(MHA_EXT_EMULATE_AMX)
  return kernels == &kAmx;
#else
  return false;
#endif
}
// Those of the list that were compiled.
struct List {
  Isa isas[5];
  int count = 0;
  template <int n>
  explicit List(const Isa (&all)[n]) {
    for (int emulated = 0; emulated < 2; emulated++)
      for (const Isa& isa : all)
        if (isa.kernels && is_emulated(isa.kernels) == (emulated == 1)) isas[count++] = isa;
  }
};
const List& list() {
  static const List found = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") ? List(kIntel) : List(kOther);
  }();
  return found;
}
#else
struct List {
  Isa isas[1] = {{&kPortable, always}};
  int count = 1;
};
const List& list() {
  static const List found;
  return found;
}
#endif

const Kernels* find(const char* name) {
  for (int i = 0; i < list().count; i++) {
    const Isa& isa = list().isas[i];
    if (isa.supported() && (!name || !strcmp(name, isa.kernels->name))) return isa.kernels;
  }
  return nullptr;
}

const Kernels* at_start() {
  const char* name = getenv("MHA_EXT_CPU_ISA");
  if (!name || !*name) return find(nullptr);
  const Kernels* kernels = find(name);
  if (kernels) return kernels;
  kernels = find(nullptr);
  fprintf(stderr,
          "mha_ext: MHA_EXT_CPU_ISA=%s is unknown or not supported by this machine; using %s "
          "(`mha-ext info` lists what is supported)\n",
          name, kernels->name);
  return kernels;
}

bool& whole() {
#if MHA_EXT_X86
  static bool found = [] {
    constexpr unsigned kZen5 = 0x1a;
    unsigned a = 0, b = 0, c = 0, d = 0;
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") && __get_cpuid(1, &a, &b, &c, &d) &&
           (a >> 8 & 0xf) + (a >> 20 & 0xff) >= kZen5;
  }();
#else
  static bool found = false;
#endif
  return found;
}

const Kernels*& active() {
  static const Kernels* kernels = at_start();
  return kernels;
}

}  // namespace

const Kernels& active_kernels() { return *active(); }
int isa_count() { return list().count; }
const char* isa_name(int index) { return list().isas[index].kernels->name; }
bool isa_supported(int index) { return list().isas[index].supported(); }
const char* active_isa() { return active()->name; }

bool whole_vectors() { return whole(); }
void set_whole_vectors(bool yes) { whole() = yes; }

bool select_isa(const char* name) {
  const Kernels* kernels = find(name);
  if (kernels) active() = kernels;
  return kernels != nullptr;
}

}  // namespace mha_ext::cpu

// What a kernel says to a GPU of compute capability 9.0 beside tile.cuh: barriers that threads
// arrive at and others wait for, and products of a warpgroup (four warps, the first a multiple of
// four) that read their operands from shared memory while the threads go on. With g++ each wrapper
// has a host definition of the same meaning (tile_hopper_host.h, in tests/cuda).
#pragma once
#include "tile.cuh"

namespace mha_ext::cuda {

constexpr int kGroup = 4 * kWarp;  // threads of a warpgroup

// A tile of 16-bit elements lies in shared memory in panels of 64 columns: row r of a panel has 128
// bytes, and its piece p of 16 bytes stands in place p ^ (r % 8). Panels begin at multiples of 1024
// bytes. As an operand of a product the tile has its rows along the sum (kAcross: the columns are
// those of the result), or its columns.
constexpr int kPanelBytes = 128;  // of a row

// Tells products where an operand is: `panels` bytes are between its panels.
using Operand = uint64_t;

}  // namespace mha_ext::cuda

#ifndef __CUDACC__
#include "tile_hopper_host.h"
#else

namespace mha_ext::cuda {

// Bits 0-13 the address, 16-29 the step from panel to panel, 32-45 that between groups of eight
// rows (all in units of 16 bytes), 62-63 the order of the pieces: 1 = of 128 bytes.
DEVICE Operand operand(Address at, int panels) {
  return (Operand)((shared_window() + at) >> 4 & 0x3fff) | (Operand)((panels >> 4) & 0x3fff) << 16 |
         (Operand)(8 * kPanelBytes >> 4) << 32 | (Operand)1 << 62;
}

// A barrier, of 8 bytes, that `count` arrivals complete; then its next phase begins. Phases have
// parity 0, 1, 0, ...
DEVICE void barrier_init(Address at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_window() + at), "r"(count)
               : "memory");
}
DEVICE void barrier_arrive(Address at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_window() + at) : "memory");
}
// Until the phase with this parity is complete: at first, that of parity 1 is.
DEVICE void barrier_wait(Address at, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(shared_window() + at),
      "r"(parity)
      : "memory");
}

// What this thread has written to shared memory, its copies that it has waited for among it, is
// seen by products after the next barrier.
DEVICE void fence_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of `threads` threads (whole warps), by number (1 to 15): those that wait and those that
// only arrive.
DEVICE void sync_some(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
DEVICE void arrive_some(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Registers of each thread of a warpgroup from here on: fewer or more.
template <int kRegisters>
DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Products are asynchronous: begin_products, then products, then commit_products; what they read
// and write is not to be touched until wait_products.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the kLatest groups committed last are done.
template <int kLatest>
DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLatest) : "memory");
}
// Keeps the compiler from moving uses of registers over the fence, or the wait, beside it.
template <int kColumns>
DEVICE void pin(float (&c)[kColumns][4]) {
#pragma unroll
  for (int j = 0; j < kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) asm volatile("" : "+f"(c[j][e])::"memory");
}
template <int kSteps>
DEVICE void pin(uint32_t (&x)[kSteps][4]) {
#pragma unroll
  for (int j = 0; j < kSteps; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) asm volatile("" : "+r"(x[j][e])::"memory");
}

// Four 8 x 8 matrices of 16-bit elements to shared memory, as load_matrices reads them.
DEVICE void store_matrices(Address row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_window() + row),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// kBytes from shared memory to numbers of the device, both at multiples of 16 bytes: in place of
// what is there, or added to it. They are asynchronous: what they read may be written over after
// wait_numbers_read, and what they write is there, for this thread, after wait_numbers. What they
// read must have been written before a fence_products of who wrote it, and a barrier.
template <int kBytes>
DEVICE void store_numbers(float* to, Address from) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(shared_window() + from), "n"(kBytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kBytes>
DEVICE void add_numbers(float* to, Address from) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(shared_window() + from), "n"(kBytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
DEVICE void wait_numbers_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void wait_numbers() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Words of the device that blocks of threads tell each other by: who sees one, with wait_signal,
// sees also what the thread that gave it had written, or waited for, before. Only a block that
// took its number earlier may be waited for: that one runs.
DEVICE uint32_t take_number(uint32_t* counter) { return atomicAdd(counter, 1u); }
DEVICE void give_signal(uint32_t* at, uint32_t value) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "r"(value)
               : "memory");
}
// Until reached(value) says so.
template <class Reached>
DEVICE uint32_t wait_signal(const uint32_t* at, const Reached& reached) {
  uint32_t value;
  do {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                 : "=r"(value)
                 : "l"(__cvta_generic_to_global(at))
                 : "memory");
  } while (!reached(value));
  asm volatile("fence.acq_rel.gpu;\nfence.proxy.async.global;" ::: "memory");
  return value;
}

// Nothing; but the assembler cannot move a wait for products before what x comes from. x must not
// be the NaN with these bits, which no arithmetic gives.
DEVICE void settle(float x) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.eq.b32 never, %0, 0x7f800001;\n"
      "@never st.shared.b32 [%1], %0;\n"
      "}" ::"r"(__float_as_uint(x)),
      "r"(shared_window())
      : "memory");
}

// c[64 x 8 kColumns] = a[64 x 16] b[16 x 8 kColumns], or += with `add`. Warp w of the warpgroup has
// rows 16 w to 16 w + 15 of a (in registers) and c as in multiply_add; kAcross: see above, of b;
// kLeftAcross: of a, whose columns are then the rows of c.
#define MHA_EXT_C4(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define MHA_EXT_C16(c, j) \
  MHA_EXT_C4(c, j), MHA_EXT_C4(c, j + 1), MHA_EXT_C4(c, j + 2), MHA_EXT_C4(c, j + 3)
#define MHA_EXT_C32(c) MHA_EXT_C16(c, 0), MHA_EXT_C16(c, 4)
#define MHA_EXT_C64(c) MHA_EXT_C32(c), MHA_EXT_C16(c, 8), MHA_EXT_C16(c, 12)
#define MHA_EXT_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MHA_EXT_D32                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MHA_EXT_D64                                                                              \
  MHA_EXT_D32                                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MHA_EXT_SHARED(type, n, names, outputs, a0, a1, a2, a3, a4)                                \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" a2                                         \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" names "}, %" a0 \
               ", %" a1 ", add, 1, 1, %" a4 ", %" a3 ";\n}"                                        \
               : outputs                                                                           \
               : "l"(a), "l"(b), "r"((int)add), "n"(kAcross ? 1 : 0), "n"(kLeftAcross ? 1 : 0))
#define MHA_EXT_REGISTERS(type, n, names, outputs, x0, x1, x2, x3, b0, a0, t0)            \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" a0                                \
               ", 0;\n"                                                                   \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" names  \
               "}, {%" x0 ", %" x1 ", %" x2 ", %" x3 "}, %" b0 ", add, 1, 1, %" t0 ";\n}" \
               : outputs                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add),       \
                 "n"(kAcross ? 1 : 0))
#define MHA_EXT_PRODUCTS(S, type)                                                                  \
  template <bool kAcross, bool kLeftAcross = false>                                                \
  DEVICE void multiply_group(S, float (&c)[4][4], Operand a, Operand b, bool add) {                \
    MHA_EXT_SHARED(type, "32", MHA_EXT_D16, MHA_EXT_C16(c, 0), "16", "17", "18", "19", "20");      \
  }                                                                                                \
  template <bool kAcross, bool kLeftAcross = false>                                                \
  DEVICE void multiply_group(S, float (&c)[8][4], Operand a, Operand b, bool add) {                \
    MHA_EXT_SHARED(type, "64", MHA_EXT_D32, MHA_EXT_C32(c), "32", "33", "34", "35", "36");         \
  }                                                                                                \
  template <bool kAcross, bool kLeftAcross = false>                                                \
  DEVICE void multiply_group(S, float (&c)[16][4], Operand a, Operand b, bool add) {               \
    MHA_EXT_SHARED(type, "128", MHA_EXT_D64, MHA_EXT_C64(c), "64", "65", "66", "67", "68");        \
  }                                                                                                \
  template <bool kAcross>                                                                          \
  DEVICE void multiply_group(S, float (&c)[8][4], const uint32_t (&a)[4], Operand b, bool add) {   \
    MHA_EXT_REGISTERS(type, "64", MHA_EXT_D32, MHA_EXT_C32(c), "32", "33", "34", "35", "36", "37", \
                      "38");                                                                       \
  }                                                                                                \
  template <bool kAcross>                                                                          \
  DEVICE void multiply_group(S, float (&c)[16][4], const uint32_t (&a)[4], Operand b, bool add) {  \
    MHA_EXT_REGISTERS(type, "128", MHA_EXT_D64, MHA_EXT_C64(c), "64", "65", "66", "67", "68",      \
                      "69", "70");                                                                 \
  }
MHA_EXT_PRODUCTS(BFloat16, "bf16")
MHA_EXT_PRODUCTS(Float16, "f16")

}  // namespace mha_ext::cuda

#endif

namespace mha_ext::cuda {

// The place of piece p (of 16 bytes) of row r in a tile of kRows rows.
template <int kRows>
DEVICE Address paneled(int row, int piece) {
  return (Address)((piece >> 3) * kRows * kPanelBytes + row * kPanelBytes +
                   (((piece & 7) ^ (row & 7)) << 4));
}

// Operands `bytes` further on: no sum reaches beyond the bits of the address.
DEVICE Operand stepped(Operand first, int bytes) {
  return (first & 0xffffffff00000000ull) | ((uint32_t)first + (uint32_t)(bytes >> 4));
}
// Steps of a product over a tile of kRows rows. Along its columns, step k has columns [16 k, 16 k +
// 16); across, it has rows [16 k, 16 k + 16) of all columns.
template <int kRows>
DEVICE Operand along(Operand tile, int k) {
  return stepped(tile, (k >> 2) * kRows * kPanelBytes + (k & 3) * 32);
}
DEVICE Operand across(Operand tile, int k) { return stepped(tile, 16 * k * kPanelBytes); }

}  // namespace mha_ext::cuda

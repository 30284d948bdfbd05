// What a kernel says to the machine: all PTX, and every collective of a warp or a block. With g++
// each wrapper has a host definition of the same meaning (tile_host.h, in tests/cuda), so that the
// same kernels run without a GPU.
//
// Shared memory is one dynamic block; an address is an offset in it.
#pragma once
#include "../spec/attention.h"
#include "../spec/mask.h"

#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define GRID_CONSTANT __grid_constant__
#else
#define DEVICE [[maybe_unused]] static inline
#define DEVICE_MEMBER inline
#define GRID_CONSTANT
#endif

namespace mha_ext::cuda {

constexpr int kWarp = 32;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct alignas(16) Bytes16 {
  uint32_t word[4];
};

using Address = uint32_t;  // in bytes, from the start of the block's shared memory

}  // namespace mha_ext::cuda

#ifndef __CUDACC__
#include "tile_host.h"
#else

namespace mha_ext::cuda {

extern __shared__ __align__(1024) char shared_memory[];

DEVICE uint32_t shared_window() { return (uint32_t)__cvta_generic_to_shared(shared_memory); }
template <class T>
DEVICE T load_shared(Address at) {
  return *(const T*)(shared_memory + at);
}
template <class T>
DEVICE void store_shared(Address at, T value) {
  *(T*)(shared_memory + at) = value;
}

DEVICE void sync_block() { __syncthreads(); }
DEVICE bool sync_block_or(bool value) { return __syncthreads_or(value); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE uint32_t ballot(bool value) { return __ballot_sync(0xffffffffu, value); }
DEVICE int lowest_bit(uint64_t bits) { return __ffsll((long long)bits) - 1; }  // bits != 0
template <class T>
DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <class T>
DEVICE T shuffle_xor(T value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, value, lanes);
}

// Copies `bytes` of kBytes (4 or 16, the alignment of both sides) and zeroes the rest. What it
// writes is there after a wait for its group, for the others after a barrier that follows the wait.
template <int kBytes>
DEVICE void copy_async(Address to, const void* from, int bytes) {
  const uint64_t source = __cvta_generic_to_global(from);
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_window() + to),
                 "l"(source), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_window() + to),
                 "l"(source), "n"(kBytes), "r"(bytes)
                 : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the kLatest groups committed last have arrived.
template <int kLatest>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLatest) : "memory");
}

// Brings what is there nearer; it is read later.
DEVICE void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// Four 8 x 8 matrices of 16-bit elements. Lane 8 i + r gives the address of row r of matrix i, and
// lane l gets elements 2 (l % 4) and the next of row l / 4 of matrix i in to[i]; transposed: of
// column l / 4.
DEVICE void load_matrices(uint32_t (&to)[4], Address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_window() + row)
               : "memory");
}
DEVICE void load_matrices_transposed(uint32_t (&to)[4], Address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_window() + row)
               : "memory");
}

// c[16 x 8] += a[16 x 16] b[16 x 8]. With g = lane / 4 and t = lane % 4 a lane holds
//   a: rows g and g + 8, columns 2 t and 2 t + 1 (a[0], a[1]), then 2 t + 8 and 2 t + 9 (a[2],
//   a[3]) b: column g, rows 2 t and 2 t + 1 (b0), 2 t + 8 and 2 t + 9 (b1) c: row g, columns 2 t
//   and 2 t + 1 (c[0], c[1]); row g + 8 (c[2], c[3])
DEVICE void multiply_add(BFloat16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void multiply_add(Float16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x with an error of 2 ulp; 2^-inf is 0.
DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The greater one, NaN where one is NaN.
DEVICE float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
// Of two pairs, the lesser numbers; the other one where one is NaN.
DEVICE uint32_t min_pair(BFloat16, uint32_t x, uint32_t y) {
  uint32_t z;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
DEVICE uint32_t min_pair(Float16, uint32_t x, uint32_t y) {
  uint32_t z;
  asm("min.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t multiply_high(uint32_t x, uint32_t y) { return __umulhi(x, y); }
DEVICE float saturate(float x) { return __saturatef(x); }  // to [0, 1]
// The upper halves of two words, the first in the low half.
DEVICE uint32_t upper_halves(uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x7632); }

DEVICE float widen(BFloat16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
DEVICE float widen(Float16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Two numbers rounded to nearest even, the first in the low half.
DEVICE uint32_t pack(BFloat16, float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE uint32_t pack(Float16, float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

}  // namespace mha_ext::cuda

#endif

namespace mha_ext::cuda {

DEVICE int thread_id() { return (int)threadIdx.x; }
DEVICE int lane_id() { return thread_id() % kWarp; }
DEVICE int warp_id() { return thread_id() / kWarp; }

DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }
DEVICE void narrow(float x, BFloat16* to) { to->bits = (uint16_t)pack(BFloat16{}, x, 0); }
DEVICE void narrow(float x, Float16* to) { to->bits = (uint16_t)pack(Float16{}, x, 0); }
DEVICE void narrow(float x, float* to) { *to = x; }
// Two, next to each other, where their place has 4 bytes' alignment (8 of float).
template <class S>
DEVICE void narrow_pair(float x, float y, S* to) {
  *(uint32_t*)to = pack(S{}, x, y);
}
DEVICE void narrow_pair(float x, float y, float* to) {
  to[0] = x;
  to[1] = y;
}
DEVICE void narrow(double x, double* to) { *to = x; }

// Bytes of one row of a tile that lies in shared memory in pieces of 16 bytes. Piece p of row r
// stands in place p ^ (r % 8): eight rows of one column of pieces, as load_matrices reads them, and
// eight pieces of one row, as copies write them, are in different banks.
template <int kRowBytes>
DEVICE Address swizzled(int row, int piece) {
  static_assert(kRowBytes % 128 == 0);
  return (Address)(row * kRowBytes + ((piece ^ (row & 7)) << 4));
}

// The place 2 `steps` pieces further on in the row, from one of the first two pieces: few registers
// hold all addresses of a product.
DEVICE Address stepped(Address first, int steps) {
  return (first ^ (Address)((steps & 3) << 5)) + (Address)((steps >> 2) << 7);
}

// The same bits of eight bytes, two of each, next to each other: bits 8 j and 8 j + 1 become 2 j
// and 2 j + 1. So a word of 64 keys becomes what one lane of a fragment holds of it.
DEVICE uint32_t pairs_of_bytes(uint64_t x) {
  x &= 0x0303030303030303ull;
  x = (x | x >> 6) & 0x000f000f000f000full;
  x = (x | x >> 12) & 0x000000ff000000ffull;
  return (uint32_t)(x | x >> 24) & 0xffff;
}

}  // namespace mha_ext::cuda

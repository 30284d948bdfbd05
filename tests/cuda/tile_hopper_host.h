// The host definitions of the wrappers of csrc/cuda/tile_hopper.cuh, over the emulator.
#pragma once
#include "emulator.h"

namespace mha_ext::cuda {

// Fields as on the device, where shared memory begins 1024 bytes into its window.
inline Operand operand(Address at, int panels) {
  return (Operand)((1024 + at) >> 4 & 0x3fff) | (Operand)((panels >> 4) & 0x3fff) << 16 |
         (Operand)(8 * kPanelBytes >> 4) << 32 | (Operand)1 << 62;
}

inline void barrier_init(Address at, int count) { emulator::barrier_init(at, count); }
inline void barrier_arrive(Address at) { emulator::barrier_arrive(at); }
inline void barrier_wait(Address at, int parity) { emulator::barrier_wait(at, parity); }
inline void fence_products() { emulator::fence_products(); }
inline void sync_some(int number, int threads) {
  emulator::numbered_barrier(number, threads, true);
}
inline void arrive_some(int number, int threads) {
  emulator::numbered_barrier(number, threads, false);
}
template <int kRegisters>
void give_registers() {
  emulator::set_registers(kRegisters, false);
}
template <int kRegisters>
void take_registers() {
  emulator::set_registers(kRegisters, true);
}

inline void begin_products() { emulator::begin_products(); }
inline void commit_products() { emulator::commit_products(); }
template <int kLatest>
void wait_products() {
  emulator::wait_products(kLatest);
}
template <int kColumns>
void pin(float (&)[kColumns][4]) {}
template <int kSteps>
void pin(uint32_t (&)[kSteps][4]) {}

inline void settle(float) {}

inline void store_matrices(Address row, const uint32_t (&from)[4]) {
  for (int i = 0; i < 4; i++) {
    const Address to = exchange(row, 8 * i + (int)threadIdx.x % kWarp / 4);
    emulator::check_address<16>(to);
    emulator::write_shared(to + 4 * (threadIdx.x % 4), from[i]);
  }
}

template <int kBytes>
void store_numbers(float* to, Address from) {
  emulator::send_numbers(to, from, kBytes, false);
}
template <int kBytes>
void add_numbers(float* to, Address from) {
  emulator::send_numbers(to, from, kBytes, true);
}
inline void wait_numbers_read() { emulator::wait_numbers(false); }
inline void wait_numbers() { emulator::wait_numbers(true); }

// Blocks run one after the other: who came earlier has given all of its signals.
inline uint32_t take_number(uint32_t* counter) { return (*counter)++; }
inline void give_signal(uint32_t* at, uint32_t value) {
  emulator::check_numbers_sent();
  *at = value;
}
template <class Reached>
uint32_t wait_signal(const uint32_t* at, const Reached& reached) {
  if (!reached(*at)) emulator::fail("a block waits for one that does not run");
  return *at;
}

template <class S>
float widen_bits(uint16_t bits) {
  return widen(S{bits});
}
template <bool kAcross, bool kLeftAcross = false, class S, int kColumns>
void multiply_group(S, float (&c)[kColumns][4], Operand a, Operand b, bool add) {
  static_assert(kColumns == 4 || kColumns == 8 || kColumns == 16);
  emulator::issue_product({a, b, 8 * kColumns, false, kAcross, kLeftAcross, add, widen_bits<S>},
                          c[0], nullptr);
}
template <bool kAcross, class S, int kColumns>
void multiply_group(S, float (&c)[kColumns][4], const uint32_t (&a)[4], Operand b, bool add) {
  static_assert(kColumns == 8 || kColumns == 16);
  emulator::issue_product({0, b, 8 * kColumns, true, kAcross, false, add, widen_bits<S>}, c[0], a);
}

}  // namespace mha_ext::cuda

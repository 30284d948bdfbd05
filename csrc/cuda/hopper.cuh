// What the kernels for compute capability 9.0 share: tiles in panels, the ring in which a producer
// hands them to consumers, and the products of whole tiles.
#pragma once
#include "rows.cuh"
#include "tile_hopper.cuh"

// Only code for exactly this architecture knows these instructions.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MHA_EXT_HOPPER_CODE 1
#endif

namespace mha_ext::cuda {

// For one warpgroup of which this is `thread`: kRows rows of up to 64 kPanels columns, `bytes`
// bytes each, into panels; zero beyond `rows` and `bytes`. Addresses and strides are multiples of
// 16 bytes.
template <int kRows, int kPanels>
DEVICE void copy_panels(Address to, const HeadRows& from, int64_t begin, int rows, int bytes,
                        int thread) {
  constexpr int kPieces = 8 * kPanels, kStep = kGroup / kPieces;
  static_assert(kGroup % kPieces == 0 && kRows % kStep == 0 && kStep % 8 == 0);
  const int p = thread % kPieces, r0 = thread / kPieces;
  const int valid = (int)max_of(0, min_of(16, bytes - p * 16));
  const char* source = from.first + (begin + r0) * from.stride + (valid ? p * 16 : 0);
  const int64_t step = kStep * from.stride;
  const Address target = to + paneled<kRows>(r0, p);  // eight rows on, pieces stand as here
  if (rows >= kRows) {
#pragma unroll
    for (int i = 0; i < kRows / kStep; i++, source += step)
      copy_async<16>(target + i * kStep * kPanelBytes, source, valid);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRows / kStep; i++, source += step) {
    const bool exists = r0 + i * kStep < rows;
    // A row that does not exist is not read, but its address must be one.
    copy_async<16>(target + i * kStep * kPanelBytes, exists ? source : from.first,
                   exists ? valid : 0);
  }
}

// Which turn of a ring: its stage, and how often the ring has gone round.
template <int kStages>
struct Turn {
  int stage = 0, round = 0;
  DEVICE_MEMBER void next() {
    if (++stage == kStages) {
      stage = 0;
      round++;
    }
  }
};

// A ring of kStages tiles in shared memory from `tiles` on, each of kBytes, with its barriers from
// `barriers` on: the producer fills what the consumers have left.
template <int kStages, int kBytes, Address kTiles, Address kBarriers>
struct Ring {
  static constexpr Address kEnd = kBarriers + 16 * kStages;
  DEVICE_MEMBER static Address tile(const Turn<kStages>& at) {
    return kTiles + (Address)(at.stage * kBytes);
  }
  DEVICE_MEMBER static Address full(int stage) { return kBarriers + (Address)(16 * stage); }
  DEVICE_MEMBER static Address free(int stage) { return full(stage) + 8; }
  DEVICE_MEMBER static void init(int consumer_warps) {
    for (int stage = 0; stage < kStages; stage++) {
      barrier_init(full(stage), kGroup);
      barrier_init(free(stage), consumer_warps);
    }
  }
  // Of the producer: until the place is free; that its copies, which it has waited for, are there.
  DEVICE_MEMBER static void wait_free(const Turn<kStages>& at) {
    barrier_wait(free(at.stage), (at.round & 1) ^ 1);
  }
  DEVICE_MEMBER static void filled(const Turn<kStages>& at) {
    fence_products();
    barrier_arrive(full(at.stage));
  }
  // Of the consumers: until the tile is there; that this warp has done with it.
  DEVICE_MEMBER static void wait_full(const Turn<kStages>& at) {
    barrier_wait(full(at.stage), at.round & 1);
  }
  DEVICE_MEMBER static void left(const Turn<kStages>& at) {
    if (lane_id() == 0) barrier_arrive(free(at.stage));
  }
};

// c = 64 rows of `left`, from `row` on, times the rows of `right`, along kWidth columns.
template <class S, int kLeftRows, int kRightRows, int kWidth, int kColumns>
DEVICE void start_rows(Address left, int row, Address right, float (&c)[kColumns][4]) {
  const Operand x = operand(left + (Address)(row * kPanelBytes), kLeftRows * kPanelBytes);
  const Operand y = operand(right, kRightRows * kPanelBytes);
  pin(c);
  begin_products();
#pragma unroll
  for (int k = 0; k < kWidth / 16; k++)
    multiply_group<false>(S{}, c, along<kLeftRows>(x, k), along<kRightRows>(y, k), k > 0);
  commit_products();
}
// c += x times the kRows rows of `right`.
template <class S, int kRows, int kColumns>
DEVICE void start_across(uint32_t (&x)[kRows / 16][4], Address right, float (&c)[kColumns][4]) {
  const Operand y = operand(right, kRows * kPanelBytes);
  pin(x);
  pin(c);
  begin_products();
#pragma unroll
  for (int k = 0; k < kRows / 16; k++) multiply_group<true>(S{}, c, x[k], across(y, k), true);
  commit_products();
}

}  // namespace mha_ext::cuda

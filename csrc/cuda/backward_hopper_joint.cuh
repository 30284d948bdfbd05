// Backward for 16-bit types on GPUs of compute capability 9.0, all three gradients by one kernel,
// with five products: an owner of 128 keys, as in backward_hopper.cuh, that also computes what its
// keys give to dQ, 64 queries at a time, and adds it to sums in memory. So that each sum has one
// order, the block of the keys behind comes first, and says so by a signal for each tile.
#pragma once
#include "backward_hopper.cuh"

namespace mha_ext::cuda {

// What all blocks share: their order, and the sums of dQ, [batch, heads, tile, part]: 64
// queries and the columns of a consumer, as its lanes have them.
struct HopperJoint {
  uint32_t blocks, rows;  // of a head of keys; heads of all entries
  int tiles;              // of the queries of a head
  bool even;              // no pair of rows that exist is hidden
  float* sums;
  uint32_t *signals, *number;  // of each part of the sums; the next block's

  // Blocks in the order of their numbers: kRows heads take turns, each from its last keys on. So
  // the blocks that run at the same time hardly wait for each other, and read few heads.
  DEVICE_MEMBER void place(uint32_t n, uint32_t& row, uint32_t& block) const {
    constexpr uint32_t kRows = 16;
    const uint32_t group = n / (kRows * blocks);
    n -= group * kRows * blocks;
    const uint32_t count = (uint32_t)min_of(kRows, rows - group * kRows);
    row = group * kRows + n % count;
    block = blocks - 1 - n / count;
  }
  template <class F>
  DEVICE_MEMBER int64_t part_of_sums(const Attention& a, const HopperPlace& at, int part) const {
    return (((int64_t)at.b * a.heads + at.h) * tiles + at.tile) * F::kConsumers + part;
  }
};

// A signal: which block has added its part, and whether there is a sum at all.
DEVICE uint32_t signal_of(uint32_t block, bool any) { return 2 * (block + 1) + (any ? 1 : 0); }
DEVICE bool is_any(uint32_t signal) { return signal & 1; }

// The producer's other warps: one for each consumer, which adds what it has left to the sums.
template <class F>
DEVICE void add_to_sums(const Attention& a, const HopperJoint& joint, uint32_t block,
                        const HalfBlock& of_block, HopperPlace at, int consumer) {
  if (lane_id() != 0) return;
  SeenTiles behind = {0, 0, 0, 0};
  const int64_t behind0 = of_block.block0 + F::kRows;
  if (behind0 < a.keys)
    behind = other_tiles<F>(a, of_block.b, behind0, min_of(F::kRows, a.keys - behind0));
  at.n = 0;  // of all tiles, not of those that the mask leaves
  at.tile = at.first;
  at.h = of_block.head * of_block.group;
  Turn<F::kConsumers> turn{consumer, 0};
#pragma unroll 1
  for (; !at.done(); at.step()) {
    const int64_t of = joint.part_of_sums<F>(a, at, consumer);
    uint32_t before = 0;
    if (at.tile >= behind.any && at.tile < behind.any_end)
      before = wait_signal(joint.signals + of, [&](uint32_t signal) {
        return signal >> 1 == signal_of(block + 1, false) >> 1;
      });
    // A tile that the mask hides has no part; it is said all the same.
    const bool hidden = a.mask.data && !(at.mark<F>() & kAnyMark);
    if (!hidden) {
      float* const sum = joint.sums + of * (F::kSumBytes / 4);
      F::Outbox::wait_full(turn);
      if (is_any(before))
        add_numbers<F::kSumBytes>(sum, F::Outbox::tile(turn));
      else
        store_numbers<F::kSumBytes>(sum, F::Outbox::tile(turn));
      wait_numbers_read();
      F::Outbox::left(turn);
      turn.round++;
      wait_numbers();
    }
    give_signal(joint.signals + of, signal_of(block, !hidden || is_any(before)));
  }
}

// Keys that do not exist give nothing.
template <class F>
DEVICE void drop_missing_keys(const Attention& a, const HopperPlace& at,
                              float (&ds)[1][F::kColumns][4]) {
  const int left = (int)min_of(16, a.keys - (int64_t)at.own * 16);
  if (left == 16) return;
#pragma unroll
  for (int j = 0; j < F::kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (8 * (e / 2) + lane_id() / 4 >= left) ds[0][j][e] = 0;
}
// dS of a warp's 16 keys, for the products of all.
template <class F>
DEVICE void share_gradient(Address to, const uint32_t (&y)[1][F::kSteps][4]) {
  const int lane = lane_id(), row = F::warp_row() + lane % 16;
#pragma unroll
  for (int k = 0; k < F::kSteps; k++)
    store_matrices(to + paneled<F::kRows>(row, 2 * k + lane / 16), y[0][k]);
}

// What a consumer does for dQ, beside its own sums: a part of its columns.
template <class F>
struct HopperShare {
  static constexpr int kColumns = F::kPartColumns / 8;
  float sums[1][kColumns][4];
  Turn<F::kGradStages> grad;
  Turn<F::kConsumers> box;
  int h, tile;  // whose gradient is shared
  DEVICE_MEMBER explicit HopperShare(int consumer) : box{consumer, 0}, h(0), tile(0) {}
  DEVICE_MEMBER int first_column() const { return box.stage * F::kPartColumns; }
};
struct OfQueries {  // 64 keys of 16 queries, as words of visibility have them
  static constexpr bool kOwnsKeys = false;
  static constexpr int kFragments = 1, kOthers = 64, kColumns = 8;
};

// dS of a tile, rounded, to where all consumers find it.
template <class F>
DEVICE void share_tile(const Attention& a, const HopperPlace& at, HopperTile<F>& tile,
                       HopperShare<F>& share) {
  drop_missing_keys<F>(a, at, tile.dp);
  round_tile<F>(tile);
  F::Grads::wait_free(share.grad);
  share_gradient<F>(F::Grads::tile(share.grad), tile.y);
  F::Grads::filled(share.grad);
  share.h = at.h;
  share.tile = at.tile;
}
// A group of products: dS of all of the block's keys times K.
template <class F>
DEVICE void start_share(const typename F::At& turn, HopperShare<F>& share) {
  const int column = share.first_column();
  F::Grads::wait_full(share.grad);
  const Operand x = uniform_operand(F::Grads::tile(share.grad), F::kRows * kPanelBytes);
  const Operand y = uniform_operand(
      F::own_scores(turn) + (Address)(column / 64 * F::kRows * kPanelBytes + column % 64 * 2),
      F::kRows * kPanelBytes);
  clear_fragments(share.sums);  // no register holds them until here
  pin(share.sums[0]);
  begin_products();
#pragma unroll
  for (int k = 0; k < F::kRows / 16; k++)
    multiply_group<true, true>(typename F::S{}, share.sums[0], across(x, k), across(y, k), true);
  commit_products();
}
// The same with care, of a warp's 16 queries: hidden pairs are 0, but 0 * NaN is NaN.
template <class F>
DEVICE void share_with_care(const Attention& a, const HopperPlace& at, Address keys,
                            HopperShare<F>& share) {
  using S = typename F::S;
  const int lane = lane_id(), own = warp_id() % 4;
  const int panel = share.first_column() / 64, left = (int)a.head_dim - 64 * panel;
  const int64_t key0 = (int64_t)at.own * 16 - F::warp_row();
  const int64_t q0 = (int64_t)share.tile * F::kOthers + 16 * own;
  const int rows = (int)max_of(0, min_of(16, a.queries - q0));
  float sums[1][8][4] = {};  // of the whole panel
#pragma unroll 1
  for (int part = 0; part < F::kRows / 64; part++) {
    uint32_t x[1][4][4], visible[1];
#pragma unroll
    for (int k = 0; k < 4; k++)
      load_matrices_transposed(
          x[0][k], F::Grads::tile(share.grad) +
                       paneled<F::kRows>(64 * part + 16 * k + 8 * (lane / 16) + lane % 8,
                                         2 * own + lane / 8 % 2));
    fragment_bits<OfQueries>(visible_word(a, at.b, share.h, q0, rows, key0 + 64 * part, 64),
                             visible);
    const Address from = keys + (Address)((panel * F::kRows + 64 * part) * kPanelBytes);
    const bool dirty = multiply_across<S, kPanelBytes, true>(x, from, left, sums);
    if (ballot(dirty)) add_nonfinite<S, kPanelBytes, false>(x, visible, from, left, sums);
  }
  const bool second = share.first_column() % 64 != 0;
#pragma unroll
  for (int j = 0; j < HopperShare<F>::kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      share.sums[0][j][e] = second ? sums[0][j + 8 - HopperShare<F>::kColumns][e] : sums[0][j][e];
}
// Once it is done: to where it is added to the sums in memory.
template <class F>
DEVICE void finish_share(const Attention& a, const HopperJoint& joint, const HopperPlace& at,
                         const typename F::At& turn, HopperShare<F>& share) {
  pin(share.sums[0]);
  if (!joint.even && ballot(!all_finite(share.sums))) {
    wait_products<0>();  // registers are scarce
    share_with_care<F>(a, at, F::own_scores(turn), share);
  }
  sync_warp();
  F::Grads::left(share.grad);
  share.grad.next();
  F::Outbox::wait_free(share.box);
  const Address to = F::Outbox::tile(share.box) + (Address)(16 * (thread_id() % kGroup));
#pragma unroll
  for (int j = 0; j < HopperShare<F>::kColumns; j++) {
    const float (&c)[4] = share.sums[0][j];
    store_shared(to + (Address)(16 * kGroup * j),
                 Bytes16{{bits_of(c[0]), bits_of(c[1]), bits_of(c[2]), bits_of(c[3])}});
  }
  F::Outbox::filled(share.box);
  share.box.round++;
}

// All tiles of one consumer; whether any was only partly visible.
template <class F>
DEVICE bool consume_jointly(const Attention& a, const HopperJoint& joint, HopperPlace at,
                            typename F::At& turn, HopperSums<F>& sums) {
  if (at.done()) return false;
  const HopperNumbers none[2] = {};
  HopperShare<F> share(group_id() - 1);
  bool partial = false;
  if constexpr (F::kAhead) {
    HopperTile<F> tile;
    clear_fragments(tile.s);
    clear_fragments(tile.dp);
    hopper_visible<F>(a, at, tile.pairs);
    start_tile<F, false>(turn, {}, tile);
    middle_of_tile<F, 0>(a, at, turn, none, tile);
    partial |= tile.pairs.partial;
    share_tile<F>(a, at, tile, share);
#pragma unroll 1
    for (at.next<F>(a); !at.done(); at.next<F>(a)) {
      const typename F::At before = turn;
      turn.next();
      hopper_visible<F>(a, at, tile.pairs);
      pin_sums<F>(tile, sums);
      start_tile<F, false>(turn, {}, tile);
      start_sums<F>(before, tile, sums);
      start_share<F>(turn, share);
      middle_of_tile<F, 3>(a, at, turn, none, tile);
      partial |= tile.pairs.partial;
      wait_products<0>();
      pin_sums<F>(tile, sums);
      finish_share<F>(a, joint, at, turn, share);
      leave<F>(before);
      share_tile<F>(a, at, tile, share);
    }
    pin_sums<F>(tile, sums);
    start_sums<F>(turn, tile, sums);
    start_share<F>(turn, share);
    wait_products<0>();
    pin_sums<F>(tile, sums);
    finish_share<F>(a, joint, at, turn, share);
    leave<F>(turn);
    turn.next();
  } else {
    using S = typename F::S;
#pragma unroll 1
    for (; !at.done(); turn.next(), at.next<F>(a)) {
      HopperTile<F> tile;  // no register holds it from tile to tile
      clear_fragments(tile.s);
      clear_fragments(tile.dp);
      hopper_visible<F>(a, at, tile.pairs);
      start_tile<F, false>(turn, {}, tile);
      middle_of_tile<F, 0>(a, at, turn, none, tile);
      partial |= tile.pairs.partial;
      share_tile<F>(a, at, tile, share);
      pin_sums<F>(tile, sums);
      start_sum<S, F::kOthers>(tile.x[0], F::value_tile(turn), sums.values[0]);
      start_share<F>(turn, share);
      start_sum<S, F::kOthers>(tile.y[0], F::score_tile(turn), sums.scores[0]);
      wait_products<1>();  // all but dK
      finish_share<F>(a, joint, at, turn, share);
      wait_products<0>();
      pin_sums<F>(tile, sums);
      leave<F>(turn);
    }
  }
  leave_own<F>(turn);
  return partial;
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    backward_hopper_joint_kernel(const GRID_CONSTANT Attention a,
                                 const GRID_CONSTANT AttentionGrad g, const HopperJoint joint) {
#ifdef MHA_EXT_HOPPER_CODE
  if (thread_id() == 0) {
    F::Tiles::init(4 * F::kConsumers * kWarp);
    F::Own::init(4 * F::kConsumers);
    F::Grads::init(4 * F::kConsumers);
    F::Outbox::init(1);
    F::Spoilt::init();
    store_shared(F::kNumber, take_number(joint.number));
  }
  sync_block();
  uint32_t row, number;
  joint.place(load_shared<uint32_t>(F::kNumber), row, number);
  const HalfBlock of = half_block<F>(a, row, number, warp_id() < 4 ? 0 : F::warp_row());
  if (a.mask.data) {
    mark_tiles<F>(a, of);
    sync_block();
  }
  const HopperPlace at = first_place<F>(a, of);
  typename F::At turn;
  if (warp_id() < 4) {
    give_registers<F::kProducerRegisters>();
    const int writer = warp_id() - F::kCopiers / kWarp;
    if (writer >= 0) {
      add_to_sums<F>(a, joint, number, of, at, writer);
      return;
    }
#pragma unroll 1
    for (int pass = 0; pass == 0 || (pass == 1 && F::Spoilt::hear()); pass++)
      produce_others<F>(a, g, at, turn);
    return;
  }
  take_registers<F::kConsumerRegisters>();
  HopperSums<F> sums;
  clear_sums<F>(sums);
  const bool partial = consume_jointly<F>(a, joint, at, turn, sums);
  const bool finite = all_finite(sums.scores) && all_finite(sums.values);
  store_sums<F>(a, g, at, of.head, sums);
  F::Spoilt::answer(!joint.even && partial && !finite);
  if (!F::Spoilt::hear()) return;
  const HopperNumbers none[2] = {};
  clear_sums<F>(sums);
  consume_with_care<F>(a, at, none, turn, sums);
  store_sums<F>(a, g, at, of.head, sums);
#endif
}

// dQ from its sums.
template <class F>
__global__ void LAUNCH_BOUNDS(kGroup, 8)
    query_sums_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g,
                      const HopperJoint joint) {
  using S = typename F::S;
  const int64_t row = grid_row();
  if (row >= a.batch * a.heads) return;
  const int64_t at = row * joint.tiles + blockIdx.x;
  const float scale = (float)a.scale, factor[1][2] = {{scale, scale}};
  for (int part = 0; part < F::kConsumers; part++) {
    constexpr int kColumns = F::kPartColumns / 8;
    const int64_t of = at * F::kConsumers + part;
    float c[1][kColumns][4] = {};
    if (is_any(joint.signals[of])) {
      const Bytes16* from = (const Bytes16*)(joint.sums + of * (F::kSumBytes / 4)) + thread_id();
#pragma unroll
      for (int j = 0; j < kColumns; j++) {
        const Bytes16 four = from[j * kGroup];
#pragma unroll
        for (int e = 0; e < 4; e++) c[0][j][e] = float_of(four.word[e]);
      }
    }
    Rows to = g.grad_query;
    to.data = (S*)to.data + F::kPartColumns * part;
    store_fragments<S>(to, row / a.heads, row % a.heads, (int64_t)blockIdx.x * 64 + 16 * warp_id(),
                       a.queries, (int)a.head_dim - F::kPartColumns * part, factor, c);
  }
}

template <class F>
const char* run_backward_joint(const Attention& a, const AttentionGrad& g, void* scratch,
                               Stream stream) {
  const int64_t tiles = ceil_div(a.queries, 64);
  const JointScratch of = joint_scratch(a);
  char* const at = (char*)scratch;
  const HopperJoint joint{(uint32_t)ceil_div(a.keys, F::kRows),
                          (uint32_t)(a.batch * a.kv_heads),
                          (int)tiles,
                          !a.mask.data && hides_nothing(a),
                          (float*)at,
                          (uint32_t*)(at + of.sums) + 1,
                          (uint32_t*)(at + of.sums)};
  const char* error = clear(at + of.sums, of.all - of.sums, stream);
  if (!error)
    error = launch(backward_hopper_joint_kernel<F>, {(int64_t)joint.blocks * joint.rows, 1},
                   F::kThreads, F::kSharedBytes, stream, a, g, joint);
  if (!error)
    error =
        launch(query_sums_kernel<F>, {tiles, a.batch * a.heads}, kGroup, 0, stream, a, g, joint);
  return error;
}
template <class S, int kWidth>
const char* backward_joint(const Attention& a, const AttentionGrad& g, void* scratch,
                           Stream stream) {
  return a.dropout.seed ? run_backward_joint<HopperBackward<S, kWidth, true, true, false, true>>(
                              a, g, scratch, stream)
                        : run_backward_joint<HopperBackward<S, kWidth, true, false, false, true>>(
                              a, g, scratch, stream);
}
template <class S>
const char* backward_joint(const Attention& a, const AttentionGrad& g, void* scratch,
                           Stream stream) {
  return joint_width(a) <= 64 ? backward_joint<S, 64>(a, g, scratch, stream)
                              : backward_joint<S, 128>(a, g, scratch, stream);
}

}  // namespace mha_ext::cuda

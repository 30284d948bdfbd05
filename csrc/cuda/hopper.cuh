// What the kernels for compute capability 9.0 share: tiles in panels, the ring in which a producer
// hands them to consumers, and the products of whole tiles.
#pragma once
#include "half.cuh"
#include "tile_hopper.cuh"

// Only code for exactly this architecture knows these instructions.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MHA_EXT_HOPPER_CODE 1
#endif

namespace mha_ext::cuda {

// Number of the warpgroup, and known to be the same in all lanes: branches that depend on it alone
// leave the compiler its uniform registers, which products take their operands from.
DEVICE int group_id() { return shuffle(warp_id() / 4, 0); }

// What half a warpgroup copies: the piece of 16 bytes that this thread has of every eighth row of a
// head, in few registers. Addresses and strides are multiples of 16 bytes.
constexpr int kCopyThreads = kGroup / 2, kPieces = 8, kCopyRows = kCopyThreads / kPieces;
struct PanelRows {
  const char *at, *any;  // of the first row; what can be read in place of a row that does not exist
  int64_t stride;
  int bytes;  // from this piece on
};
DEVICE int copied_row() { return thread_id() % kCopyThreads / kPieces; }
template <class S>
DEVICE PanelRows panel_rows(const Rows& rows, int64_t b, int64_t h, int64_t begin, int64_t width) {
  const HeadRows from = head_rows<S>(rows, b, h);
  const int piece = thread_id() % kPieces, bytes = (int)width * 2 - piece * 16;
  return {from.first + (begin + copied_row()) * from.stride + (bytes > 0 ? piece * 16 : 0),
          (const char*)rows.data, from.stride, bytes};
}
// kRows rows of up to 64 kPanels columns into panels; zero beyond `rows` and their width.
template <int kRows, int kPanels>
DEVICE void copy_panels(Address to, const PanelRows& from, int rows) {
  static_assert(kRows % kCopyRows == 0 &&
                kCopyRows % 8 == 0);  // eight rows on, pieces stand as here
  to += paneled<kRows>(copied_row(), thread_id() % kPieces);
#pragma unroll 1
  for (int panel = 0; panel < kPanels; panel++, to += kRows * kPanelBytes) {
    const int valid = (int)max_of(0, min_of(16, from.bytes - panel * kPanelBytes));
    const char* source = from.at + (valid ? panel * kPanelBytes : 0);
    if (rows >= kRows) {
#pragma unroll 4
      for (int i = 0; i < kRows; i += kCopyRows, source += kCopyRows * from.stride)
        copy_async<16>(to + i * kPanelBytes, source, valid);
    } else {
#pragma unroll 1
      for (int i = 0; i < kRows; i += kCopyRows, source += kCopyRows * from.stride) {
        const bool exists = copied_row() + i < rows;
        copy_async<16>(to + i * kPanelBytes, exists ? source : from.any, exists ? valid : 0);
      }
    }
  }
}

// A tile of the bias lies in panels of 64 keys: half a warpgroup copies 64 x 64 pairs of it into
// one panel, with zeros where there are none.
DEVICE void copy_bias(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t k0,
                      Address to) {
  const Pairs& bias = a.bias;
  const int64_t k = k0 + thread_id() % kPieces * 8;
  const int bytes = (int)max_of(0, min_of(8, a.keys - k)) * 2;
  const int64_t at = b * bias.batch + h * bias.head + (q0 + copied_row()) * bias.query;
  const char* data = (const char*)bias.data;
  copy_panels<64, 1>(to, {data + 2 * (at + (bytes ? k : 0)), data, 2 * bias.query, bytes},
                     (int)max_of(0, min_of(64, a.queries - q0)));
}
// Of the fragments j and j + 1 of a warp: word i has two keys, or two queries, of row 8 (i % 2) + g
// of fragment j + i / 2.
template <class F, class Turn>
DEVICE void load_bias(const Turn& turn, int j, uint32_t (&words)[4]) {
  const int lane = lane_id(), r = lane % 8, half = lane / 8 % 2, next = lane / 16;
  if constexpr (F::kOwnsKeys)
    load_matrices_transposed(
        words,
        F::bias_tile(turn) + paneled<F::kOthers>(8 * (j + next) + r, F::warp_row() / 8 + half));
  else
    load_matrices(words,
                  F::bias_tile(turn) + paneled<F::kRows>(F::warp_row() + 8 * half + r, j + next));
}
// The bias of a warp's pairs, for who goes over its fragments in order, in few registers; and a
// word below which it has none.
template <class F>
struct BiasWords {
  uint32_t least = 0, words[4] = {};
  template <class Turn>
  DEVICE_MEMBER void load(const Turn& turn, int j) {
    if (j % 2) return;
    load_bias<F>(turn, j, words);
#pragma unroll
    for (int i = 0; i < 4; i++) least = min_pair(typename F::S{}, least, words[i]);
  }
  DEVICE_MEMBER float at(int j, int e) const {
    return widen(typename F::S{(uint16_t)(words[j % 2 * 2 + e / 2] >> 16 * (e % 2))});
  }
  // S scale + bias, and where it is too low for a float.
  DEVICE_MEMBER float sum(float s, float scale, int j, int e) const {
    return fmaf(s, scale, at(j, e));
  }
  DEVICE_MEMBER float clamped(float s, float scale, int j, int e) const {
    return max_or_nan(sum(s, scale, j, e), lowest_finite(0.0f));
  }
};
// Pairs whose bias is -inf are hidden: their bits go. Whether there are any; `least` is a word
// below which there is none.
template <class F, class Turn, class Pairs>
DEVICE bool hide_by_bias(const Turn& turn, uint32_t least, Pairs& pairs) {
  const auto hidden = [](uint32_t bits) {
    return widen(typename F::S{(uint16_t)bits}) == -INFINITY;
  };
  if (!ballot(hidden(least) || hidden(least >> 16))) return false;
  pairs.partial = true;
#pragma unroll
  for (int j = 0; j < F::kColumns; j += 2) {
    uint32_t words[4];
    load_bias<F>(turn, j, words);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t bits = (hidden(words[i]) ? 1 : 0) | (hidden(words[i] >> 16) ? 2 : 0);
      pairs.visible[j / 8] &= ~(bits << (16 * (i % 2) + 2 * (j % 8 + i / 2)));
    }
  }
  return true;
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
template <int kStages, int kBytes, Address kTiles, Address kBarriers, int kProducers = kGroup>
struct Ring {
  static constexpr Address kEnd = kBarriers + 16 * kStages;
  DEVICE_MEMBER static Address tile(const Turn<kStages>& at) {
    return kTiles + (Address)(at.stage * kBytes);
  }
  DEVICE_MEMBER static Address full(int stage) { return kBarriers + (Address)(16 * stage); }
  DEVICE_MEMBER static Address free(int stage) { return full(stage) + 8; }
  // consumers: warps, or lanes, that leave a tile.
  DEVICE_MEMBER static void init(int consumers) {
    for (int stage = 0; stage < kStages; stage++) {
      barrier_init(full(stage), kProducers);
      barrier_init(free(stage), consumers);
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
  DEVICE_MEMBER static void left_by_lane(const Turn<kStages>& at) {
    barrier_arrive(free(at.stage));
  }
};

// A question to all consumers, whose answer all threads of the block hear: the roles come to no
// barrier of the block together. From kAt on, a multiple of 8.
template <int kConsumers, Address kAt>
struct Question {
  static constexpr int kWarps = 4 * kConsumers;
  static constexpr Address kAnswers = kAt + 8, kEnd = kAnswers + 4 * kWarps;
  DEVICE_MEMBER static void init() { barrier_init(kAt, kWarps); }
  DEVICE_MEMBER static void answer(bool yes) {
    const uint32_t any = ballot(yes);
    sync_warp();  // what its lanes have read may be written over
    if (lane_id() != 0) return;
    store_shared(kAnswers + 4 * (Address)(warp_id() - 4), any);
    barrier_arrive(kAt);
  }
  // Whether any said yes.
  DEVICE_MEMBER static bool hear() {
    barrier_wait(kAt, 0);
    uint32_t any = 0;
#pragma unroll 1
    for (int warp = 0; warp < kWarps; warp++)
      any |= load_shared<uint32_t>(kAnswers + 4 * (Address)warp);
    return any;
  }
};

// The same address, known to be the same in all lanes: the steps of a product cost nothing then.
DEVICE Operand uniform_operand(Address at, int panels) { return operand(shuffle(at, 0), panels); }

// c = 64 rows of `left`, from `row` on, times the rows of `right`, along kWidth columns.
template <class S, int kLeftRows, int kRightRows, int kWidth, int kColumns>
DEVICE void start_rows(Address left, int row, Address right, float (&c)[kColumns][4]) {
  const Operand x = uniform_operand(left + (Address)(row * kPanelBytes), kLeftRows * kPanelBytes);
  const Operand y = uniform_operand(right, kRightRows * kPanelBytes);
  pin(c);
  begin_products();
#pragma unroll
  for (int k = 0; k < kWidth / 16; k++)
    multiply_group<false>(S{}, c, along<kLeftRows>(x, k), along<kRightRows>(y, k), k > 0);
  commit_products();
}
// c += x times the kRows rows of `right`, up to 128 columns at once.
template <class S, int kRows, int kColumns>
DEVICE void start_across(uint32_t (&x)[kRows / 16][4], Address right, float (&c)[kColumns][4]) {
  constexpr int kAtOnce = kColumns < 16 ? kColumns : 16;
  pin(x);
  pin(c);
  begin_products();
#pragma unroll
  for (int part = 0; part < kColumns / kAtOnce; part++) {
    const Operand y =
        uniform_operand(right + part * kAtOnce / 8 * kRows * kPanelBytes, kRows * kPanelBytes);
    auto& to = (float (&)[kAtOnce][4])c[part * kAtOnce];
#pragma unroll
    for (int k = 0; k < kRows / 16; k++) multiply_group<true>(S{}, to, x[k], across(y, k), true);
  }
  commit_products();
}

}  // namespace mha_ext::cuda

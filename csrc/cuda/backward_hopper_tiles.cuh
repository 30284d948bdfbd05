// Tiles of backward on GPUs of compute capability 9.0: where they lie, which pairs are visible, and
// what becomes of their scores: S -> P, dP -> dS.
#pragma once
#include "backward_half.cuh"
#include "hopper.cuh"

namespace mha_ext::cuda {

// kJoint: an owner of keys that also adds up dQ (backward_hopper_joint.cuh).
template <class S_, int kWidth_, bool kOwnsKeys_, bool kDropout_, bool kBias_ = false,
          bool kJoint_ = false>
struct HopperBackward {
  using S = S_;
  static constexpr bool kOwnsKeys = kOwnsKeys_, kDropout = kDropout_, kBias = kBias_;
  static constexpr bool kJoint = kJoint_;
  static constexpr bool kScores = true, kValues = kOwnsKeys;  // dK or dQ; dV
  static constexpr int kWidth = kWidth_, kPanels = kWidth / 64, kFragments = 1;
  static constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kGroup;
  // Wide sums do not fit into the registers of one consumer: then both have the same rows, and each
  // adds up one half of the columns.
  static constexpr bool kHalves = kWidth > 128;
  static constexpr int kRows = kHalves ? 64 : 64 * kConsumers;  // that a block owns
  static constexpr int kSumPanels = kHalves ? kPanels / 2 : kPanels, kSumColumns = 8 * kSumPanels;
  static_assert(!kBias || !kHalves);
  static_assert(!kJoint || (kOwnsKeys && !kBias && !kHalves));
  static constexpr int kOthers = kOwnsKeys || kBias || kWidth > 64 ? 64 : 128;  // rows of a tile
  // Whether the owned scores stay in registers: products of 64 columns are short of shared memory.
  static constexpr bool kHeld = !kOwnsKeys && kWidth > 64 && !kHalves;
  // Of a thread: 65536 in all.
  static constexpr int kProducerRegisters = kWidth <= 64 ? 56 : 40;
  static constexpr int kConsumerRegisters = kWidth <= 64 ? 224 : 232;
  // Whether S and dP of the next tile start with the sums of this one: as registers allow, and
  // where a third stage can be filled meanwhile.
  static constexpr bool kAhead = (!kOwnsKeys || (kWidth <= 64 && !kBias)) && !kHalves;
  static constexpr int kParts = kOthers / 64, kColumns = kOthers / 8, kSteps = kOthers / 16;
  static constexpr int kStages = kHalves        ? 2
                                 : kBias        ? (kWidth <= 64 ? 4 : 3)
                                 : !kOwnsKeys   ? 4
                                 : kWidth <= 64 ? 5
                                                : 3;
  static constexpr int kOwnBytes = kRows * 2 * kWidth, kTileBytes = kOthers * 2 * kWidth;
  // Threads of the producer that copy.
  static constexpr int kCopiers = kJoint ? kGroup / 2 : kGroup;
  // Where they have room, the rows of the next block come while those of this one are used.
  static constexpr int kOwnStages = kWidth <= 64 && !kJoint ? 2 : 1;
  static constexpr int kBiasBytes = kBias ? 2 * kRows * kOthers : 0;
  static constexpr int kStageBytes = 2 * kTileBytes + kBiasBytes;
  static constexpr int kNumberBytes = kOwnsKeys ? 1280 : 0;
  static constexpr Address kFirst = kOwnStages * 2 * kOwnBytes;
  // dS of a tile, [keys][queries], of all consumers; and what comes of it for 64 queries of dQ, of
  // which a consumer has a part of the columns.
  static constexpr int kGradStages = kWidth <= 64 ? 2 : 1, kGradBytes = kRows * kPanelBytes;
  static constexpr int kPartColumns = kWidth / kConsumers, kSumBytes = 64 * kPartColumns * 4;
  static constexpr Address kGrads = kFirst + kStages * kStageBytes;
  static constexpr Address kOutbox = kGrads + (kJoint ? kGradStages * kGradBytes : 0);
  static constexpr Address kNumbers = kOutbox + (kJoint ? kConsumers * kSumBytes : 0);
  using Tiles = Ring<kStages, kStageBytes, kFirst, kNumbers + kStages * kNumberBytes, kCopiers>;
  // Full with their first tile.
  using Own = Ring<kOwnStages, 2 * kOwnBytes, 0, Tiles::kEnd, kCopiers>;
  using Grads = Ring<kGradStages, kGradBytes, kGrads, Own::kEnd, kConsumers * kGroup>;
  using Outbox =
      Ring<kConsumers, kSumBytes, kOutbox, Grads::kEnd, kGroup>;  // a stage of a consumer
  using Spoilt = Question<kConsumers, Outbox::kEnd>;
  // What the mask hides of so many of the block's tiles; it is looked up in later ones.
  static constexpr Address kMarks = Spoilt::kEnd;
  static constexpr int kMostMarks = 2048;
  static constexpr Address kNumber = kMarks + 4 * kMostMarks;  // of the block
  static constexpr int kSharedBytes = kNumber + 4;
  // Where a thread is in the rings.
  struct At : Turn<kStages> {
    Turn<kOwnStages> own;
  };
  DEVICE_MEMBER static Address score_tile(const At& at) { return Tiles::tile(at); }
  DEVICE_MEMBER static Address value_tile(const At& at) { return Tiles::tile(at) + kTileBytes; }
  // Of the pairs of a tile, [queries][keys] in panels of 64 keys.
  DEVICE_MEMBER static Address bias_tile(const At& at) { return Tiles::tile(at) + 2 * kTileBytes; }
  DEVICE_MEMBER static Address own_scores(const At& at) { return Own::tile(at.own); }
  DEVICE_MEMBER static Address own_values(const At& at) { return Own::tile(at.own) + kOwnBytes; }
  // Of a consumer: its first row of those of the block, that of a warp, and its first panel of the
  // sums.
  DEVICE_MEMBER static int first_row() {
    return kHalves ? 0 : shuffle((warp_id() / 4 - 1) * 64, 0);
  }
  DEVICE_MEMBER static int warp_row() { return kHalves ? warp_id() % 4 * 16 : warp_id() * 16 - 64; }
  DEVICE_MEMBER static int first_panel() { return kHalves ? (group_id() - 1) * kSumPanels : 0; }
  DEVICE_MEMBER static Address sum_panels(Address tile) {
    return tile + (Address)(first_panel() * kOthers * kPanelBytes);
  }
  // What the queries of a tile have: level and delta, then lse and lse_low, 64 of each; then
  // whether a level of the first, or of the other 32, is far from zero.
  DEVICE_MEMBER static Address numbers(const At& at) {
    return kNumbers + (Address)(at.stage * kNumberBytes);
  }
  // 64 of the others, as words of visibility have them.
  struct Part {
    using S = S_;
    static constexpr bool kOwnsKeys = kOwnsKeys_;
    static constexpr int kFragments = 1, kOthers = 64, kColumns = 8, kSteps = 4;
  };
};
template <int kColumns>
DEVICE float (&part_of(float (&c)[1][kColumns][4], int part))[1][8][4] {
  return (float (&)[1][8][4])c[0][8 * part];
}

// P = 2^(S scale log2 e - level) is exact enough while the level is near zero.
struct HopperNumbers {
  float level, delta, lse, low;
  bool far;
};
DEVICE HopperNumbers hopper_numbers(const QueryNumbers& of) {
  constexpr float kNear = 128;
  HopperNumbers to;
  to.lse = row_level(of.lse);
  to.low = of.low;
  to.delta = of.delta;
  to.far = to.lse != INFINITY && !(fabsf(to.lse) < kNear);
  to.level = fmaf(to.lse, kLog2E, to.low * kLog2E);
  return to;
}

DEVICE QueryNumbers numbers_at(const Attention& a, const AttentionGrad& g, int64_t at) {
  return {((const float*)a.lse)[at], a.lse_low ? ((const float*)a.lse_low)[at] : 0,
          ((const float*)g.delta)[at]};
}
DEVICE HopperNumbers hopper_numbers(const Attention& a, const AttentionGrad& g, int64_t at) {
  return hopper_numbers(numbers_at(a, g, at));
}

// A mark for each tile of a block, head after head: whether the mask leaves any of its pairs, and a
// bit for each consumer: it leaves all of them.
constexpr uint32_t kAnyMark = 1, kAllMark = 2;
template <class F>
DEVICE void mark_tiles(const Attention& a, const HalfBlock& of) {
  const int count = (int)min_of(of.count(), F::kMostMarks);
  const int tiles = of.block.any_end - of.block.any;
#pragma unroll 1
  for (int n = thread_id(); n < count; n += F::kThreads) {
    const int64_t h = of.head * of.group + n / tiles;
    const int64_t other0 = (int64_t)(of.block.any + n % tiles) * F::kOthers;
    constexpr int kOwn = F::kRows / 64;
    const bool any = F::kOwnsKeys
                         ? squares_have_any(a, of.b, h, other0, 1, of.block0, kOwn)
                         : squares_have_any(a, of.b, h, of.block0, kOwn, other0, F::kParts);
    uint32_t mark = any ? kAnyMark : 0;
    for (int i = 0; i < kOwn; i++) {
      const int64_t own0 = of.block0 + 64 * i;
      const bool all = F::kOwnsKeys ? square_has_all(a, of.b, h, other0, own0, 1)
                                    : square_has_all(a, of.b, h, own0, other0, F::kParts);
      if (all) mark |= kAllMark << i;
    }
    store_shared(F::kMarks + 4 * (Address)n, mark);
  }
}

// Where a warp is, in few registers: its own rows, against one of the block's tiles.
struct HopperPlace {
  int b, own, h, tile;           // own: in units of 16 rows
  int first, end, all, all_end;  // tiles of the block, and those that need no look
  int n, count;                  // the tile's number of all
  DEVICE_MEMBER bool done() const { return n >= count; }
  DEVICE_MEMBER void step() {
    n++;
    if (++tile < end) return;
    tile = first;
    h++;
  }
  template <class F>
  DEVICE_MEMBER uint32_t mark() const {
    return n < F::kMostMarks ? load_shared<uint32_t>(F::kMarks + 4 * (Address)n) : kAnyMark;
  }
  // To the first tile, from this one on, that the mask does not hide.
  template <class F>
  DEVICE_MEMBER void seek(const Attention& a) {
    if (a.mask.data)
#pragma unroll 1
      while (!done() && !(mark<F>() & kAnyMark)) step();
  }
  template <class F>
  DEVICE_MEMBER void next(const Attention& a) {
    step();
    seek<F>(a);
  }
};
template <class F>
DEVICE HopperPlace first_place(const Attention& a, const HalfBlock& of) {
  // Rows that do not exist have nothing hidden from them: what becomes of them is not stored.
  const bool exists = of.own0 < of.rows;
  HopperPlace at{(int)of.b,
                 (int)(of.own0 / 16),
                 of.head * of.group,
                 of.block.any,
                 of.block.any,
                 of.block.any_end,
                 exists ? of.seen.all : 0,
                 exists ? of.seen.all_end : INT32_MAX,
                 0,
                 of.count()};
  at.seek<F>(a);
  return at;
}

// What a consumer has of a tile beside S and dP: which pairs are visible, and whether not all are.
template <class F>
struct HopperPairs {
  uint32_t visible[F::kParts];
  bool partial;
};
template <class F>
DEVICE void hopper_visible(const Attention& a, const HopperPlace& at, HopperPairs<F>& pairs) {
  using Part = typename F::Part;
  pairs.partial = at.tile < at.all || at.tile >= at.all_end;
  if (a.mask.data) pairs.partial |= !(at.mark<F>() & kAllMark << (F::kHalves ? 0 : group_id() - 1));
#pragma unroll
  for (int part = 0; part < F::kParts; part++) {
    uint32_t bits[1] = {~0u};
    if (pairs.partial) {
      const int64_t own0 = (int64_t)at.own * 16, other0 = (int64_t)at.tile * F::kOthers + 64 * part;
      if constexpr (F::kOwnsKeys) {
        const int rows = (int)min_of(64, a.queries - other0);
        fragment_bits_across<Part>(visible_words_across<Part>(a, at.b, at.h, other0, rows, own0),
                                   bits);
      } else {
        const int rows = (int)max_of(0, min_of(16, a.queries - own0));
        fragment_bits<Part>(visible_word(a, at.b, at.h, own0, rows, other0, 64), bits);
      }
    }
    pairs.visible[part] = bits[0];
  }
}
// What is hidden becomes 0.
template <class F>
DEVICE void hide(const HopperPairs<F>& pairs, float (&c)[1][F::kColumns][4]) {
  if (!pairs.partial) return;
#pragma unroll
  for (int part = 0; part < F::kParts; part++) {
    const uint32_t bits[1] = {pairs.visible[part]};
    select_tile<typename F::Part>(bits, 0, part_of(c, part));
  }
}

// S -> P of one tile; for a tile with a bias: also the bits of what it hides.
template <class F>
DEVICE void hopper_powers(const Attention& a, const typename F::At& turn,
                          const HopperNumbers (&own)[2], HopperPairs<F>& pairs,
                          float (&s)[1][F::kColumns][4]) {
  const float scale = (float)a.scale;
  const Address first = F::numbers(turn) + 8 * (Address)(lane_id() % 4);
  [[maybe_unused]] BiasWords<F> bias;
  bool far = false;
  if constexpr (F::kOwnsKeys)
    far = load_shared<uint64_t>(F::numbers(turn) + 1024) != 0;
  else
    far = ballot(own[0].far || own[1].far) != 0;
  const float factor = scale * kLog2E;
  far |= !(fabsf(factor) < INFINITY);  // scale is near the largest number
  if (far) {                           // S - lse comes first
#pragma unroll
    for (int j = 0; j < F::kColumns; j++) {
      if constexpr (F::kBias) bias.load(turn, j);
      TwoNumbers lse, low;
      if constexpr (F::kOwnsKeys) {
        lse = load_shared<TwoNumbers>(first + (Address)(32 * j) + 512);
        low = load_shared<TwoNumbers>(first + (Address)(32 * j) + 768);
      } else {
        lse = {{own[0].lse, own[1].lse}};
        low = {{own[0].low, own[1].low}};
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int i = F::kOwnsKeys ? e % 2 : e / 2;
        float above;
        if constexpr (F::kBias)
          above = bias.clamped(s[0][j][e], scale, j, e) - lse.at[i];
        else
          above = fmaf(s[0][j][e], scale, -lse.at[i]);
        s[0][j][e] = exp2_approximate((above - low.at[i]) * kLog2E);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < F::kColumns; j++) {
      if constexpr (F::kBias) bias.load(turn, j);
      TwoNumbers level;
      if constexpr (F::kOwnsKeys)
        level = load_shared<TwoNumbers>(first + (Address)(32 * j));
      else
        level = {{own[0].level, own[1].level}};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float lower = level.at[F::kOwnsKeys ? e % 2 : e / 2];
        if constexpr (F::kBias)  // they may be far from zero where their sum is not
          s[0][j][e] = exp2_approximate(fmaf(bias.sum(s[0][j][e], scale, j, e), kLog2E, -lower));
        else
          s[0][j][e] = exp2_approximate(fmaf(s[0][j][e], factor, -lower));
      }
    }
  }
  if constexpr (F::kBias) hide_by_bias<F>(turn, bias.least, pairs);
}
// dP -> dS.
template <class F>
DEVICE void hopper_differences(const typename F::At& turn, const HopperNumbers (&own)[2],
                               const float (&p)[1][F::kColumns][4],
                               float (&dp)[1][F::kColumns][4]) {
  const Address first = F::numbers(turn) + 256 + 8 * (Address)(lane_id() % 4);
#pragma unroll
  for (int j = 0; j < F::kColumns; j++) {
    TwoNumbers delta;
    if constexpr (F::kOwnsKeys)
      delta = load_shared<TwoNumbers>(first + (Address)(32 * j));
    else
      delta = {{own[0].delta, own[1].delta}};
#pragma unroll
    for (int e = 0; e < 4; e++)
      dp[0][j][e] = p[0][j][e] * (dp[0][j][e] - delta.at[F::kOwnsKeys ? e % 2 : e / 2]);
  }
}

// The same with dropout. An owner of queries draws here;
template <class F>
DEVICE void dropped_differences(const Attention& a, const HopperPlace& at,
                                const typename F::At& turn, const HopperNumbers (&own)[2],
                                const float (&p)[1][F::kColumns][4],
                                float (&dp)[1][F::kColumns][4]) {
#pragma unroll
  for (int part = 0; part < F::kParts; part++)
    drop_pairs<typename F::Part>(a, at.b, at.h, (int64_t)at.own * 16,
                                 (int64_t)at.tile * F::kOthers + 64 * part, part_of(dp, part));
  scale_fragments((float)a.dropout.keep_scale, dp);
  hopper_differences<F>(turn, own, p, dp);
}
// an owner of keys has drawn what is kept, and also turns P into Z without its factor:
// dS = P (keep dP - delta) = Z dP - P delta.
template <class F>
DEVICE void dropped_differences(const Attention& a, const typename F::At& turn,
                                const uint32_t (&kept)[8], float (&p)[1][F::kColumns][4],
                                float (&dp)[1][F::kColumns][4]) {
  const Address first = F::numbers(turn) + 256 + 8 * (Address)(lane_id() % 4);
  const float factor = (float)a.dropout.keep_scale;
#pragma unroll
  for (int j = 0; j < F::kColumns; j++) {
    const TwoNumbers delta = load_shared<TwoNumbers>(first + (Address)(32 * j));
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float all = p[0][j][e] * delta.at[e % 2];
      if (!is_found(kept, j, e)) p[0][j][e] = 0;
      dp[0][j][e] = fmaf(p[0][j][e], factor * dp[0][j][e], -all);
    }
  }
}

}  // namespace mha_ext::cuda

// Backward for 16-bit types on GPUs of compute capability 9.0: what backward_half.cuh does, by
// products of warpgroups. A block owns 128 rows, of K and V or of Q and dO, 64 a warpgroup; another
// one brings the others in tiles. The products that add a tile up, and those of the next tile, run
// while exponentials are taken.
#pragma once
#include "backward_half.cuh"
#include "hopper.cuh"

namespace mha_ext::cuda {

template <class S_, int kWidth_, bool kOwnsKeys_>
struct HopperBackward {
  using S = S_;
  static constexpr bool kOwnsKeys = kOwnsKeys_;
  static constexpr bool kScores = true, kValues = kOwnsKeys;  // dK or dQ; dV
  static constexpr int kWidth = kWidth_, kPanels = kWidth / 64, kFragments = 1;
  static constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kGroup;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kOthers = kOwnsKeys || kWidth > 64 ? 64 : 128;  // rows of a tile
  // Whether the owned scores stay in registers: products of 64 columns are short of shared memory.
  static constexpr bool kHeld = !kOwnsKeys && kWidth > 64;
  // Of a thread: 65536 in all.
  static constexpr int kProducerRegisters = kWidth <= 64 ? 56 : 40;
  static constexpr int kConsumerRegisters = kWidth <= 64 ? 224 : 232;
  // Whether S and dP of the next tile start with the sums of this one: as registers allow.
  static constexpr bool kAhead = !kOwnsKeys || kWidth <= 64;
  static constexpr int kParts = kOthers / 64, kColumns = kOthers / 8, kSteps = kOthers / 16;
  static constexpr int kStages = kOwnsKeys ? (kWidth <= 64 ? 5 : 3) : 4;
  static constexpr int kOwnBytes = kRows * 2 * kWidth, kTileBytes = kOthers * 2 * kWidth;
  static constexpr Address kOwnScores = 0, kOwnValues = kOwnBytes;
  static constexpr int kStageBytes = 2 * kTileBytes, kNumberBytes = kOwnsKeys ? 1280 : 0;
  static constexpr Address kNumbers = 2 * kOwnBytes + kStages * kStageBytes;
  using Tiles = Ring<kStages, kStageBytes, 2 * kOwnBytes, kNumbers + kStages * kNumberBytes>;
  static constexpr int kSharedBytes = Tiles::kEnd;
  using At = Turn<kStages>;
  DEVICE_MEMBER static Address score_tile(const At& at) { return Tiles::tile(at); }
  DEVICE_MEMBER static Address value_tile(const At& at) { return Tiles::tile(at) + kTileBytes; }
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
DEVICE HopperNumbers hopper_numbers(const Attention& a, const AttentionGrad& g, int64_t at) {
  constexpr float kNear = 128;
  HopperNumbers to;
  to.lse = row_level(((const float*)a.lse)[at]);
  to.low = a.lse_low ? ((const float*)a.lse_low)[at] : 0;
  to.delta = ((const float*)g.delta)[at];
  to.far = to.lse != INFINITY && !(fabsf(to.lse) < kNear);
  to.level = fmaf(to.lse, kLog2E, to.low * kLog2E);
  return to;
}

// Where a warp is, in few registers: its own rows, against one of the block's tiles.
struct HopperPlace {
  int b, own, h, tile;           // own: in units of 16 rows
  int first, end, all, all_end;  // tiles of the block, and those that need no look
  DEVICE_MEMBER void next() {
    if (++tile < end) return;
    tile = first;
    h++;
  }
};
DEVICE HopperPlace first_place(const HalfBlock& of) {
  return {(int)of.b,    (int)(of.own0 / 16), of.head * of.group, of.block.any,
          of.block.any, of.block.any_end,    of.seen.all,        of.seen.all_end};
}

// What one half of the producer copies, scores or values, in few registers.
struct HopperSource {
  const char* data;  // from the piece of this thread on
  int64_t head, row;
  int bytes;  // of that piece
};
template <class S>
DEVICE HopperSource source_of(const Rows& scores, const Rows& values, int head_dim, int value_dim,
                              int b, int piece) {
  const bool first = thread_id() < kGroup / 2;
  const char* data = (const char*)(first ? scores.data : values.data);
  const int64_t batch = first ? scores.batch : values.batch;
  const int bytes = (first ? head_dim : value_dim) * 2 - piece * 16;
  return {data + b * batch * 2 + (bytes > 0 ? piece * 16 : 0),
          (first ? scores.head : values.head) * 2, (first ? scores.row : values.row) * 2,
          (int)max_of(0, min_of(16, bytes))};
}
// kRows rows into panels; zero beyond `rows` and the width.
template <int kRows, int kPanels>
DEVICE void copy_tile(Address to, const HopperSource& from, int64_t head, int64_t begin, int rows) {
  constexpr int kPieces = 8 * kPanels, kStep = kGroup / 2 / kPieces;
  static_assert(kStep % 4 == 0 && kRows % kStep == 0);
  int r = thread_id() % (kGroup / 2) / kPieces;
  const char* source = from.data + head * from.head + (begin + r) * from.row;
  to += paneled<kRows>(r, thread_id() % kPieces);
#pragma unroll 2
  for (int i = 0; i < kRows / kStep; i++) {
    // A row that does not exist is not read, but its address must be one.
    copy_async<16>(to, r < rows ? source : from.data, r < rows ? from.bytes : 0);
    r += kStep;
    source += kStep * from.row;
    to = (to + kStep * kPanelBytes) ^ (kStep % 8 ? 64 : 0);  // the place of the piece in that row
  }
}

// The producer's side: what the block owns, then one tile after the other.
template <class F>
DEVICE void produce_others(const Attention& a, const AttentionGrad& g, HopperPlace at, int count,
                           typename F::At& turn) {
  using S = typename F::S;
  using Tiles = typename F::Tiles;
  constexpr bool kKeys = F::kOwnsKeys;
  const int thread = thread_id(), piece = thread % (8 * F::kPanels);
  const bool first = thread < kGroup / 2;
  {
    const HopperSource own = source_of<S>(kKeys ? a.key : a.query, kKeys ? a.value : g.grad_out,
                                          (int)a.head_dim, (int)a.value_dim, at.b, piece);
    const int64_t own0 = (int64_t)at.own * 16;
    copy_tile<F::kRows, F::kPanels>(first ? F::kOwnScores : F::kOwnValues, own,
                                    kKeys ? kv_head(a, at.h) : at.h, own0,
                                    (int)min_of(F::kRows, (kKeys ? a.keys : a.queries) - own0));
  }
  const HopperSource others = source_of<S>(kKeys ? a.query : a.key, kKeys ? g.grad_out : a.value,
                                           (int)a.head_dim, (int)a.value_dim, at.b, piece);
  typename F::At before = turn;
#pragma unroll 1
  for (int n = 0; n < count; n++, at.next()) {
    const int64_t other0 = (int64_t)at.tile * F::kOthers;
    const int rows = (int)min_of(F::kOthers, (kKeys ? a.queries : a.keys) - other0);
    Tiles::wait_free(turn);
    copy_tile<F::kOthers, F::kPanels>(first ? F::score_tile(turn) : F::value_tile(turn), others,
                                      kKeys ? at.h : kv_head(a, at.h), other0, rows);
    copy_commit();
    if (n > 0) {
      copy_wait<1>();
      Tiles::filled(before);
    }
    if constexpr (kKeys)
      if (thread < 64) {
        HopperNumbers numbers = {INFINITY, 0, INFINITY, 0, false};
        if (thread < rows)
          numbers = hopper_numbers(a, g, (at.b * a.heads + at.h) * a.queries + other0 + thread);
        const Address to = F::numbers(turn) + (Address)(4 * thread);
        store_shared(to, numbers.level);
        store_shared(to + 256, numbers.delta);
        store_shared(to + 512, numbers.lse);
        store_shared(to + 768, numbers.low);
        const uint32_t far = ballot(numbers.far);
        if (lane_id() == 0) store_shared(F::numbers(turn) + 1024 + (Address)(4 * warp_id()), far);
      }
    before = turn;
    turn.next();
  }
  copy_wait<0>();
  Tiles::filled(before);
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
  pairs.partial = a.mask.data || at.tile < at.all || at.tile >= at.all_end;
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
template <class F>
DEVICE void hide(const HopperPairs<F>& pairs, float (&c)[1][F::kColumns][4]) {
  if (!pairs.partial) return;
#pragma unroll
  for (int part = 0; part < F::kParts; part++) {
    const uint32_t bits[1] = {pairs.visible[part]};
    select_tile<typename F::Part>(bits, 0, part_of(c, part));
  }
}

// S -> P of one tile.
template <class F>
DEVICE void hopper_powers(const Attention& a, const typename F::At& turn,
                          const HopperNumbers (&own)[2], float (&s)[1][F::kColumns][4]) {
  const float scale = (float)a.scale;
  const Address first = F::numbers(turn) + 8 * (Address)(lane_id() % 4);
  bool far = false;
  if constexpr (F::kOwnsKeys)
    far = load_shared<uint64_t>(F::numbers(turn) + 1024) != 0;
  else
    far = ballot(own[0].far || own[1].far) != 0;
  if (far) {  // S - lse comes first
#pragma unroll
    for (int j = 0; j < F::kColumns; j++) {
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
        s[0][j][e] = exp2_approximate((fmaf(s[0][j][e], scale, -lse.at[i]) - low.at[i]) * kLog2E);
      }
    }
    return;
  }
  const float factor = scale * kLog2E;
#pragma unroll
  for (int j = 0; j < F::kColumns; j++) {
    TwoNumbers level;
    if constexpr (F::kOwnsKeys)
      level = load_shared<TwoNumbers>(first + (Address)(32 * j));
    else
      level = {{own[0].level, own[1].level}};
#pragma unroll
    for (int e = 0; e < 4; e++)
      s[0][j][e] =
          exp2_approximate(fmaf(s[0][j][e], factor, -level.at[F::kOwnsKeys ? e % 2 : e / 2]));
  }
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

// As in hopper.cuh, but what they change must have been pinned before the first of several.
template <class S, int kRightRows, int kWidth, int kColumns, class Left>
DEVICE void start_product(const Left& left, Address right, float (&c)[kColumns][4]) {
  const Operand y = operand(right, kRightRows * kPanelBytes);
  begin_products();
#pragma unroll
  for (int k = 0; k < kWidth / 16; k++)
    multiply_group<false>(S{}, c, left(k), along<kRightRows>(y, k), k > 0);
  commit_products();
}
template <class S, int kRows, int kColumns>
DEVICE void start_sum(const uint32_t (&x)[kRows / 16][4], Address right, float (&c)[kColumns][4]) {
  const Operand y = operand(right, kRows * kPanelBytes);
  begin_products();
#pragma unroll
  for (int k = 0; k < kRows / 16; k++) multiply_group<true>(S{}, c, x[k], across(y, k), true);
  commit_products();
}

// The owned scores, where they stay in registers.
template <class F>
struct HopperOwn {
  uint32_t scores[F::kHeld ? F::kWidth / 16 : 1][4];
};
template <class F>
DEVICE void hold(HopperOwn<F>& own) {
  if constexpr (F::kHeld) {
    const int row = warp_id() * 16 - 64 + lane_id() % 16;
#pragma unroll
    for (int k = 0; k < F::kWidth / 16; k++)
      load_matrices(own.scores[k], F::kOwnScores + paneled<F::kRows>(row, 2 * k + lane_id() / 16));
  }
}

template <class F>
struct HopperSums {
  float scores[1][F::kWidth / 8][4], values[1][F::kValues ? F::kWidth / 8 : 1][4];
};
template <class F>
struct HopperTile {
  float s[1][F::kColumns][4], dp[1][F::kColumns][4];  // then P and dS
  uint32_t x[1][F::kSteps][4], y[1][F::kSteps][4];    // P and dS, rounded
  HopperPairs<F> pairs;
};

// Groups of products: S and dP of a tile, which is there when they start;
template <class F>
DEVICE void start_rows_of(Address own, Address right, float (&c)[F::kColumns][4]) {
  // Known to be the same in all lanes, and not kept, in many forms, from tile to tile.
  const int row = shuffle((warp_id() / 4 - 1) * 64, 0);
  const Operand x = operand(own + (Address)(row * kPanelBytes), F::kRows * kPanelBytes);
  start_product<typename F::S, F::kOthers, F::kWidth>([&](int k) { return along<F::kRows>(x, k); },
                                                      right, c);
}
template <class F, bool kHeld>
DEVICE void start_tile(const typename F::At& turn, const HopperOwn<F>& own, HopperTile<F>& tile) {
  F::Tiles::wait_full(turn);
  pin(tile.s[0]);
  pin(tile.dp[0]);
  if constexpr (kHeld)
    start_product<typename F::S, F::kOthers, F::kWidth>(
        [&](int k) -> const uint32_t (&)[4] { return own.scores[k]; }, F::score_tile(turn),
        tile.s[0]);
  else
    start_rows_of<F>(F::kOwnScores, F::score_tile(turn), tile.s[0]);
  start_rows_of<F>(F::kOwnValues, F::value_tile(turn), tile.dp[0]);
}
// the sums of a tile.
template <class F>
DEVICE void pin_sums(HopperTile<F>& tile, HopperSums<F>& sums) {
  pin(tile.y[0]);
  pin(sums.scores[0]);
  if constexpr (F::kValues) {
    pin(tile.x[0]);
    pin(sums.values[0]);
  }
}
template <class F>
DEVICE void start_sums(const typename F::At& turn, HopperTile<F>& tile, HopperSums<F>& sums) {
  using S = typename F::S;
  if constexpr (F::kValues)
    start_sum<S, F::kOthers>(tile.x[0], F::value_tile(turn), sums.values[0]);
  start_sum<S, F::kOthers>(tile.y[0], F::score_tile(turn), sums.scores[0]);
}
// That this warp has done with a tile, whose numbers each lane has read.
template <class F>
DEVICE void leave(const typename F::At& turn) {
  if constexpr (F::kOwnsKeys) sync_warp();
  F::Tiles::left(turn);
}
// P and dS from S and dP, after which kLater groups of products were committed.
template <class F, int kLater>
DEVICE void middle_of_tile(const Attention& a, const typename F::At& turn,
                           const HopperNumbers (&own)[2], HopperTile<F>& tile) {
  wait_products<kLater + 1>();
  pin(tile.s[0]);
  hopper_powers<F>(a, turn, own, tile.s);
  hide<F>(tile.pairs, tile.s);
  wait_products<kLater>();
  pin(tile.dp[0]);
  hopper_differences<F>(turn, own, tile.s, tile.dp);
  hide<F>(tile.pairs, tile.dp);
}
template <class F>
DEVICE void round_tile(HopperTile<F>& tile) {
  using S = typename F::S;
  if constexpr (F::kValues) round_fragments<S>(tile.s, tile.x);
  round_fragments<S>(tile.dp, tile.y);
}

// All tiles of one consumer; whether any was only partly visible.
template <class F>
DEVICE bool consume_others(const Attention& a, HopperPlace at, int count,
                           const HopperNumbers (&own)[2], typename F::At& turn,
                           HopperSums<F>& sums) {
  HopperOwn<F> held;
  F::Tiles::wait_full(turn);  // what is owned came with it
  hold<F>(held);
  HopperTile<F> tile;
  clear_fragments(tile.s);
  clear_fragments(tile.dp);
  bool partial = false;
  if constexpr (F::kAhead) {
    hopper_visible<F>(a, at, tile.pairs);
    start_tile<F, F::kHeld>(turn, held, tile);
    middle_of_tile<F, 0>(a, turn, own, tile);
    partial |= tile.pairs.partial;
    round_tile<F>(tile);
#pragma unroll 1
    for (int n = 1; n < count; n++) {
      const typename F::At before = turn;
      turn.next();
      at.next();
      hopper_visible<F>(a, at, tile.pairs);
      // Products start together: what they add to is not touched before all of them are done.
      pin_sums<F>(tile, sums);
      start_tile<F, F::kHeld>(turn, held, tile);
      start_sums<F>(before, tile, sums);
      middle_of_tile<F, F::kValues ? 2 : 1>(a, turn, own, tile);
      partial |= tile.pairs.partial;
      wait_products<0>();
      pin_sums<F>(tile, sums);
      leave<F>(before);
      round_tile<F>(tile);
    }
    pin_sums<F>(tile, sums);
    start_sums<F>(turn, tile, sums);
    wait_products<0>();
    pin_sums<F>(tile, sums);
    leave<F>(turn);
    turn.next();
  } else {
#pragma unroll 1
    for (; count > 0; count--, turn.next(), at.next()) {
      hopper_visible<F>(a, at, tile.pairs);
      partial |= tile.pairs.partial;
      start_tile<F, F::kHeld>(turn, held, tile);
      middle_of_tile<F, 0>(a, turn, own, tile);
      round_tile<F>(tile);
      pin_sums<F>(tile, sums);
      start_sums<F>(turn, tile, sums);
      wait_products<0>();
      pin_sums<F>(tile, sums);
      leave<F>(turn);
    }
  }
  return partial;
}

// The same with care, one product after the other: hidden pairs are 0, but 0 * NaN is NaN.
template <class F>
DEVICE void add_with_care(const uint32_t (&x)[1][F::kSteps][4], const HopperPairs<F>& pairs,
                          Address tile, int columns, float (&sum)[1][F::kWidth / 8][4]) {
  using S = typename F::S;
#pragma unroll
  for (int part = 0; part < F::kParts; part++)
#pragma unroll
    for (int panel = 0; panel < F::kPanels; panel++) {
      const Address from = tile + (Address)((panel * F::kOthers + 64 * part) * kPanelBytes);
      auto& to = (float (&)[1][8][4])sum[0][8 * panel];
      const auto& own = (const uint32_t (&)[1][4][4])x[0][4 * part];
      const uint32_t visible[1] = {pairs.visible[part]};
      const int left = columns - 64 * panel;
      const bool dirty = multiply_across<S, kPanelBytes, true>(own, from, left, to);
      if (ballot(dirty)) add_nonfinite<S, kPanelBytes, false>(own, visible, from, left, to);
    }
}
template <class F>
DEVICE void consume_with_care(const Attention& a, HopperPlace at, int count,
                              const HopperNumbers (&own)[2], typename F::At& turn,
                              HopperSums<F>& sums) {
  HopperTile<F> tile;
  clear_fragments(tile.s);
  clear_fragments(tile.dp);
#pragma unroll 1
  for (int n = 0; n < count; n++, turn.next(), at.next()) {
    hopper_visible<F>(a, at, tile.pairs);
    start_tile<F, false>(turn, {}, tile);
    wait_products<0>();
    pin(tile.s[0]);
    pin(tile.dp[0]);
    hopper_powers<F>(a, turn, own, tile.s);
    hopper_differences<F>(turn, own, tile.s, tile.dp);
    hide<F>(tile.pairs, tile.s);
    hide<F>(tile.pairs, tile.dp);
    round_tile<F>(tile);
    if constexpr (F::kValues)
      add_with_care<F>(tile.x, tile.pairs, F::value_tile(turn), (int)a.value_dim, sums.values);
    add_with_care<F>(tile.y, tile.pairs, F::score_tile(turn), (int)a.head_dim, sums.scores);
    sync_warp();
    F::Tiles::left(turn);
  }
}

template <int kColumns>
DEVICE bool all_finite(const float (&c)[1][kColumns][4]) {
  float zero = 0;
#pragma unroll
  for (int n = 0; n < kColumns; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) zero = fmaf(c[0][n][e], 0.0f, zero);
  return zero == 0;
}
template <class F>
DEVICE void clear_sums(HopperSums<F>& sums) {
  clear_fragments(sums.scores);
  clear_fragments(sums.values);
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    backward_hopper_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g) {
#ifdef MHA_EXT_HOPPER_CODE
  using S = typename F::S;
  const int64_t row = grid_row();
  if (row >= a.batch * (F::kOwnsKeys ? a.kv_heads : a.heads)) return;
  // The producer has all rows of the block.
  const bool produces = warp_id() < 4;
  const HalfBlock of = half_block<F>(a, row, produces ? 0 : warp_id() * 16 - 64);
  const HopperPlace at = first_place(of);
  const int count = of.count();
  if (thread_id() == 0) F::Tiles::init(4 * F::kConsumers);
  sync_block();
  typename F::At turn;
  if (produces) {
    give_registers<F::kProducerRegisters>();
    if (count == 0) return;
    produce_others<F>(a, g, at, count, turn);
    if (sync_block_or(false)) produce_others<F>(a, g, at, count, turn);
    return;
  }
  take_registers<F::kConsumerRegisters>();
  HopperNumbers own[2] = {};
  if constexpr (!F::kOwnsKeys) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t i = (int64_t)at.own * 16 + 8 * half + lane_id() / 4;
      own[half] = {INFINITY, 0, INFINITY, 0, false};
      if (i < a.queries) own[half] = hopper_numbers(a, g, (at.b * a.heads + at.h) * a.queries + i);
    }
  }
  HopperSums<F> sums;
  clear_sums<F>(sums);
  if (count > 0) {
    const bool partial = consume_others<F>(a, at, count, own, turn, sums);
    // What a hidden pair may have spoilt is done again: nothing else costs time where all is well.
    const bool finite = all_finite(sums.scores) && all_finite(sums.values);
    if (sync_block_or(partial && !finite)) {
      clear_sums<F>(sums);
      consume_with_care<F>(a, at, count, own, turn, sums);
    }
  }
  // From what is kept anyway.
  const int64_t own0 = (int64_t)at.own * 16, rows = F::kOwnsKeys ? a.keys : a.queries;
  const int64_t head = F::kOwnsKeys ? kv_head(a, at.h) : at.h;
  const Rows& scores = F::kOwnsKeys ? g.grad_key : g.grad_query;
  const float scale = (float)a.scale, factor[1][2] = {{scale, scale}}, one[1][2] = {{1, 1}};
  if (scores.data)
    store_fragments<S>(scores, at.b, head, own0, rows, (int)a.head_dim, factor, sums.scores);
  if constexpr (F::kValues)
    if (g.grad_value.data)
      store_fragments<S>(g.grad_value, at.b, head, own0, rows, (int)a.value_dim, one, sums.values);
#endif
}

template <class F>
const char* run_backward_hopper(const Attention& a, const AttentionGrad& g, Stream stream) {
  const Grid grid{ceil_div(F::kOwnsKeys ? a.keys : a.queries, F::kRows),
                  a.batch * (F::kOwnsKeys ? a.kv_heads : a.heads)};
  return launch(backward_hopper_kernel<F>, grid, F::kThreads, F::kSharedBytes, stream, a, g);
}
template <class S, int kWidth>
const char* backward_hopper(const Attention& a, const AttentionGrad& g, Stream stream) {
  const char* error = nullptr;
  if (g.grad_query.data)
    error = run_backward_hopper<HopperBackward<S, kWidth, false>>(a, g, stream);
  if (!error && (g.grad_key.data || g.grad_value.data))
    error = run_backward_hopper<HopperBackward<S, kWidth, true>>(a, g, stream);
  return error;
}
template <class S>
const char* backward_hopper(const Attention& a, const AttentionGrad& g, Stream stream) {
  if (max_of(a.head_dim, a.value_dim) <= 64) return backward_hopper<S, 64>(a, g, stream);
  return backward_hopper<S, 128>(a, g, stream);
}

}  // namespace mha_ext::cuda

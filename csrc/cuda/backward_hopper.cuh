// Backward for 16-bit types on GPUs of compute capability 9.0: what backward_half.cuh does, by
// products of warpgroups. A block owns 128 rows, of K and V or of Q and dO, 64 a warpgroup; another
// one brings the others in tiles. The products that add a tile up, and those of the next tile, run
// while exponentials are taken.
#pragma once
#include "backward_hopper_copies.cuh"

namespace mha_ext::cuda {

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
DEVICE void hold(const typename F::At& turn, HopperOwn<F>& own) {
  if constexpr (F::kHeld) {
    const int row = F::warp_row() + lane_id() % 16;
#pragma unroll
    for (int k = 0; k < F::kWidth / 16; k++)
      load_matrices(own.scores[k],
                    F::own_scores(turn) + paneled<F::kRows>(row, 2 * k + lane_id() / 16));
  }
}

template <class F>
struct HopperSums {
  float scores[1][F::kSumColumns][4], values[1][F::kValues ? F::kSumColumns : 1][4];
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
  const Operand x = operand(own + (Address)(F::first_row() * kPanelBytes), F::kRows * kPanelBytes);
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
    start_rows_of<F>(F::own_scores(turn), F::score_tile(turn), tile.s[0]);
  start_rows_of<F>(F::own_values(turn), F::value_tile(turn), tile.dp[0]);
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
    start_sum<S, F::kOthers>(tile.x[0], F::sum_panels(F::value_tile(turn)), sums.values[0]);
  start_sum<S, F::kOthers>(tile.y[0], F::sum_panels(F::score_tile(turn)), sums.scores[0]);
}
// That this warp has done with a tile. Where each lane has read numbers of it, each lane says so.
template <class F>
DEVICE void leave(const typename F::At& turn) {
  if constexpr (F::kOwnsKeys) {
    F::Tiles::left_by_lane(turn);
  } else {
    if constexpr (F::kBias) sync_warp();  // its lanes have read the bias
    F::Tiles::left(turn);
  }
}
// The same of what the block owns.
template <class F>
DEVICE void leave_own(typename F::At& turn) {
  sync_warp();  // its lanes have read what they hold of it
  F::Own::left(turn.own);
  turn.own.next();
}
// P and dS from S and dP, after which kLater groups of products were committed; with dropout Z,
// without its factor, in place of P.
template <class F, int kLater>
DEVICE void middle_of_tile(const Attention& a, const HopperPlace& at, const typename F::At& turn,
                           const HopperNumbers (&own)[2], HopperTile<F>& tile) {
  [[maybe_unused]] uint32_t kept[8];
  if constexpr (F::kDropout && F::kOwnsKeys) {
    const int64_t q0 = (int64_t)at.tile * F::kOthers, k0 = (int64_t)at.own * 16;
    turn_words_across(kept_words_across<typename F::Part, FastWord>(a, at.b, at.h, q0, k0), kept);
  }
  wait_products<kLater + 1>();
  pin(tile.s[0]);
  hopper_powers<F>(a, turn, own, tile.pairs, tile.s);
  hide<F>(tile.pairs, tile.s);
  wait_products<kLater>();
  pin(tile.dp[0]);
  if constexpr (!F::kDropout)
    hopper_differences<F>(turn, own, tile.s, tile.dp);
  else if constexpr (F::kOwnsKeys)
    dropped_differences<F>(a, turn, kept, tile.s, tile.dp);
  else
    dropped_differences<F>(a, at, turn, own, tile.s, tile.dp);
  hide<F>(tile.pairs, tile.dp);
}
template <class F>
DEVICE void round_tile(HopperTile<F>& tile) {
  using S = typename F::S;
  if constexpr (F::kValues) round_fragments<S>(tile.s, tile.x);
  round_fragments<S>(tile.dp, tile.y);
}

// Of the queries that a consumer owns.
template <class F>
DEVICE void own_numbers(const Attention& a, const AttentionGrad& g, const HopperPlace& at, int head,
                        HopperNumbers (&own)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    own[half] = {INFINITY, 0, INFINITY, 0, false};
    const int64_t i = (int64_t)at.own * 16 + 8 * half + lane_id() / 4;
    if (!F::kOwnsKeys && i < a.queries)
      own[half] = hopper_numbers(a, g, (at.b * a.heads + head) * a.queries + i);
  }
}

// dS of 64 keys of a warp, to where the gradient of the bias is.
template <class F>
DEVICE void store_bias_part(const Attention& a, const Pairs& grad_bias, int b, int h, int64_t i0,
                            int64_t k0, const float (&ds)[1][8][4]) {
  using S = typename F::S;
  const Rows to{(S*)grad_bias.data + k0, grad_bias.batch, grad_bias.head, grad_bias.query};
  const float one[1][2] = {{1, 1}};
  store_fragments<S>(to, b, h, i0, a.queries, (int)min_of(64, a.keys - k0), one, ds);
}
// A bias that has each pair for itself: its gradient is dS.
template <class F>
DEVICE void store_bias_of_tile(const Attention& a, const AttentionGrad& g, const HopperPlace& at,
                               HopperTile<F>& tile) {
  if constexpr (F::kBias && !F::kOwnsKeys)
    if (g.grad_bias.data && bias_is_dense(a, g.grad_bias))
#pragma unroll
      for (int part = 0; part < F::kParts; part++)
        store_bias_part<F>(a, g.grad_bias, at.b, at.h, (int64_t)at.own * 16,
                           (int64_t)at.tile * F::kOthers + 64 * part, part_of(tile.dp, part));
}

// All tiles of one consumer; whether any was only partly visible.
template <class F>
DEVICE bool consume_others(const Attention& a, const AttentionGrad& g, HopperPlace at,
                           const HopperNumbers (&own)[2], typename F::At& turn,
                           HopperSums<F>& sums) {
  if (at.done()) return false;
  HopperOwn<F> held;
  F::Tiles::wait_full(turn);  // what is owned came with it
  hold<F>(turn, held);
  HopperTile<F> tile;
  clear_fragments(tile.s);
  clear_fragments(tile.dp);
  bool partial = false;
  if constexpr (F::kAhead) {
    hopper_visible<F>(a, at, tile.pairs);
    start_tile<F, F::kHeld>(turn, held, tile);
    middle_of_tile<F, 0>(a, at, turn, own, tile);
    partial |= tile.pairs.partial;
    store_bias_of_tile<F>(a, g, at, tile);
    round_tile<F>(tile);
#pragma unroll 1
    for (at.next<F>(a); !at.done(); at.next<F>(a)) {
      const typename F::At before = turn;
      turn.next();
      hopper_visible<F>(a, at, tile.pairs);
      // Products start together: what they add to is not touched before all of them are done.
      pin_sums<F>(tile, sums);
      start_tile<F, F::kHeld>(turn, held, tile);
      start_sums<F>(before, tile, sums);
      middle_of_tile<F, F::kValues ? 2 : 1>(a, at, turn, own, tile);
      partial |= tile.pairs.partial;
      store_bias_of_tile<F>(a, g, at, tile);
      wait_products<0>();
      pin_sums<F>(tile, sums);
      leave<F>(before);
      round_tile<F>(tile);
    }
    leave_own<F>(turn);
    pin_sums<F>(tile, sums);
    start_sums<F>(turn, tile, sums);
    wait_products<0>();
    pin_sums<F>(tile, sums);
    leave<F>(turn);
    turn.next();
  } else {
#pragma unroll 1
    for (; !at.done(); turn.next(), at.next<F>(a)) {
      hopper_visible<F>(a, at, tile.pairs);
      start_tile<F, F::kHeld>(turn, held, tile);
      middle_of_tile<F, 0>(a, at, turn, own, tile);
      partial |= tile.pairs.partial;
      store_bias_of_tile<F>(a, g, at, tile);
      round_tile<F>(tile);
      pin_sums<F>(tile, sums);
      start_sums<F>(turn, tile, sums);
      wait_products<0>();
      pin_sums<F>(tile, sums);
      leave<F>(turn);
    }
    leave_own<F>(turn);
  }
  return partial;
}

// The same with care, one product after the other: hidden pairs are 0, but 0 * NaN is NaN.
template <class F>
DEVICE void add_with_care(const uint32_t (&x)[1][F::kSteps][4], const HopperPairs<F>& pairs,
                          Address tile, int columns, float (&sum)[1][F::kSumColumns][4]) {
  using S = typename F::S;
  columns -= 64 * F::first_panel();
#pragma unroll
  for (int part = 0; part < F::kParts; part++)
#pragma unroll
    for (int panel = 0; panel < F::kSumPanels; panel++) {
      const Address from =
          F::sum_panels(tile) + (Address)((panel * F::kOthers + 64 * part) * kPanelBytes);
      auto& to = (float (&)[1][8][4])sum[0][8 * panel];
      const auto& own = (const uint32_t (&)[1][4][4])x[0][4 * part];
      const uint32_t visible[1] = {pairs.visible[part]};
      const int left = columns - 64 * panel;
      const bool dirty = multiply_across<S, kPanelBytes, true>(own, from, left, to);
      if (ballot(dirty)) add_nonfinite<S, kPanelBytes, false>(own, visible, from, left, to);
    }
}
template <class F>
DEVICE void consume_with_care(const Attention& a, HopperPlace at, const HopperNumbers (&own)[2],
                              typename F::At& turn, HopperSums<F>& sums) {
  HopperTile<F> tile;
  clear_fragments(tile.s);
  clear_fragments(tile.dp);
#pragma unroll 1
  for (; !at.done(); turn.next(), at.next<F>(a)) {
    hopper_visible<F>(a, at, tile.pairs);
    start_tile<F, false>(turn, {}, tile);
    middle_of_tile<F, 0>(a, at, turn, own, tile);
    round_tile<F>(tile);
    if constexpr (F::kValues)
      add_with_care<F>(tile.x, tile.pairs, F::value_tile(turn), (int)a.value_dim, sums.values);
    add_with_care<F>(tile.y, tile.pairs, F::score_tile(turn), (int)a.head_dim, sums.scores);
    sync_warp();
    leave<F>(turn);
  }
  leave_own<F>(turn);
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

// The sums of one consumer, to memory.
template <class F>
DEVICE void store_sums(const Attention& a, const AttentionGrad& g, const HopperPlace& at, int head,
                       const HopperSums<F>& sums) {
  using S = typename F::S;
  const float scale = (float)a.scale, kept = F::kDropout ? (float)a.dropout.keep_scale : 1;
  const auto store = [&](Rows to, int64_t columns, float factor, const auto& sum) {
    if (!to.data) return;
    const int first = 64 * F::first_panel();
    to.data = (S*)to.data + first;
    const float factors[1][2] = {{factor, factor}};
    store_fragments<S>(to, at.b, head, (int64_t)at.own * 16, F::kOwnsKeys ? a.keys : a.queries,
                       (int)columns - first, factors, sum);
  };
  store(F::kOwnsKeys ? g.grad_key : g.grad_query, a.head_dim, scale, sums.scores);
  if constexpr (F::kValues) store(g.grad_value, a.value_dim, kept, sums.values);
}

// Where all blocks cost the same, a block of threads takes several, one after the other: what the
// next one owns, and its first tiles, arrive while the last one ends. Otherwise the GPU gives the
// next one to who is free.
struct HopperRounds {
  uint32_t blocks, all;  // of a head; of all heads
  bool even;
  DEVICE_MEMBER uint32_t number(uint32_t round) const { return blockIdx.x + round * gridDim.x; }
  template <class F>
  DEVICE_MEMBER static uint32_t heads_of(const Attention& a) {
    return (uint32_t)(F::kOwnsKeys ? a.kv_heads : a.heads);
  }
  // Batch entry and head of a row of blocks.
  template <class F>
  DEVICE_MEMBER static uint32_t row(const Attention& a, uint32_t n) {
    if constexpr (F::kBias) return (uint32_t)bias_row(a, n, heads_of<F>(a));
    return n;
  }
  template <class F>
  DEVICE_MEMBER int head(const Attention& a, uint32_t round) const {
    return row<F>(a, number(round) / blocks) % heads_of<F>(a);
  }
  template <class F>
  DEVICE_MEMBER HalfBlock block(const Attention& a, uint32_t round) const {
    const uint32_t n = number(round);
    // The producer has all rows of the block.
    return half_block<F>(a, row<F>(a, n / blocks), n % blocks, warp_id() < 4 ? 0 : F::warp_row());
  }
  template <class F>
  DEVICE_MEMBER bool take(const Attention& a, uint32_t round, HopperPlace& at) const {
    if (number(round) >= all) return false;
    at = first_place<F>(a, block<F>(a, round));
    return true;
  }
};
template <class F>
HopperRounds hopper_rounds(const Attention& a) {
  const int64_t blocks = ceil_div(F::kOwnsKeys ? a.keys : a.queries, F::kRows);
  const bool even = !a.mask.data && !a.bias.data && hides_nothing(a);
  const int64_t heads = a.batch * (F::kOwnsKeys ? a.kv_heads : a.heads);
  return {(uint32_t)blocks, (uint32_t)(blocks * heads), even};
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    backward_hopper_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g,
                           const HopperRounds rounds) {
#ifdef MHA_EXT_HOPPER_CODE
  if (thread_id() == 0) {
    F::Tiles::init(4 * F::kConsumers * (F::kOwnsKeys ? kWarp : 1));
    F::Own::init(4 * F::kConsumers);
    F::Spoilt::init();
  }
  if (a.mask.data) mark_tiles<F>(a, rounds.block<F>(a, 0));
  sync_block();
  HopperPlace at;
  typename F::At turn;
  if (warp_id() < 4) {
    give_registers<F::kProducerRegisters>();
#pragma unroll 1
    for (int pass = 0; pass == 0 || (pass == 1 && F::Spoilt::hear()); pass++)
#pragma unroll 1
      for (uint32_t round = 0; rounds.take<F>(a, round, at); round++)
        produce_others<F>(a, g, at, turn);
    return;
  }
  take_registers<F::kConsumerRegisters>();
  HopperNumbers own[2];
  HopperSums<F> sums;
  bool spoilt = false;
#pragma unroll 1
  for (uint32_t round = 0; rounds.take<F>(a, round, at); round++) {
    const int head = rounds.head<F>(a, round);
    own_numbers<F>(a, g, at, head, own);
    clear_sums<F>(sums);
    const bool partial = consume_others<F>(a, g, at, own, turn, sums);
    // What a hidden pair may have spoilt is done again: nothing else costs time where all is well.
    // Where blocks are even, a pair is hidden only because it does not exist; it stands here as 0.
    const bool finite = all_finite(sums.scores) && all_finite(sums.values);
    spoilt = !rounds.even && partial && !finite;
    store_sums<F>(a, g, at, head, sums);
  }
  F::Spoilt::answer(spoilt);
  if (!F::Spoilt::hear()) return;
  clear_sums<F>(sums);
  consume_with_care<F>(a, at, own, turn, sums);
  store_sums<F>(a, g, at, rounds.head<F>(a, 0), sums);
#endif
}

template <class F>
const char* run_backward_hopper(const Attention& a, const AttentionGrad& g, Stream stream) {
  const HopperRounds rounds = hopper_rounds<F>(a);
  const int64_t each = rounds.even ? min_of(rounds.all, processors()) : rounds.all;
  return launch(backward_hopper_kernel<F>, {each, 1}, F::kThreads, F::kSharedBytes, stream, a, g,
                rounds);
}
template <class S, int kWidth, bool kDropout, bool kBias = false>
const char* backward_hopper(const Attention& a, const AttentionGrad& g, Stream stream) {
  const char* error = nullptr;
  if (queries_are_wanted(a, g))
    error = run_backward_hopper<HopperBackward<S, kWidth, false, kDropout, kBias>>(a, g, stream);
  if (!error && (g.grad_key.data || g.grad_value.data))
    error = run_backward_hopper<HopperBackward<S, kWidth, true, kDropout, kBias>>(a, g, stream);
  return error;
}
template <class S, int kWidth>
const char* backward_hopper(const Attention& a, const AttentionGrad& g, Stream stream) {
  return a.dropout.seed ? backward_hopper<S, kWidth, true>(a, g, stream)
                        : backward_hopper<S, kWidth, false>(a, g, stream);
}
// With a bias.
template <class S>
const char* backward_hopper_bias(const Attention& a, const AttentionGrad& g, Stream stream) {
  return max_of(a.head_dim, a.value_dim) <= 64 ? backward_hopper<S, 64, false, true>(a, g, stream)
                                               : backward_hopper<S, 128, false, true>(a, g, stream);
}

template <class S>
const char* backward_hopper(const Attention& a, const AttentionGrad& g, Stream stream) {
  if (a.bias.data) return backward_hopper_bias_of<S>(a, g, stream);
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (width <= 64) return backward_hopper<S, 64>(a, g, stream);
  if (width <= 128) return backward_hopper<S, 128>(a, g, stream);
  return backward_hopper_wide_of<S>(a, g, stream);
}

}  // namespace mha_ext::cuda

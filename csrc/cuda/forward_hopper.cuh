// Forward for 16-bit types on GPUs of compute capability 9.0: what forward_half.cuh does, by
// products of warpgroups (Shah et al. 2024). One warpgroup copies tiles; each of the others holds
// 64 queries, and its products run while it and the others take exponentials: S of a tile is on its
// way while P V of the tile before is.
#pragma once
#include "forward_hopper_tiles.cuh"

namespace mha_ext::cuda {

// What a consumer has of a tile beside S: which pairs are visible, and whether not all are.
template <class F>
struct HopperPairs {
  uint32_t visible[F::kWords];
  bool partial;
};

// Hides what is not in the band of its row, nor below the number of keys: the columns of a lane
// begin at 2 (lane % 4).
template <class F>
DEVICE void hide_outside_band(const Attention& a, int64_t b, int64_t i0, int64_t k0,
                              float (&s)[1][F::kColumns][4]) {
  int begin[2], end[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int64_t i = i0 + 8 * half + lane_id() / 4;
    const Range seen = i < a.queries ? band_keys(a, b, i) : Range{0, 0};
    begin[half] = (int)max_of(0, min_of(F::kKeys, seen.begin - k0)) - lane_id() % 4 * 2;
    end[half] = (int)max_of(0, min_of(F::kKeys, seen.end - k0)) - lane_id() % 4 * 2;
  }
  if (a.band.left_bounded) {
#pragma unroll
    for (int j = 0; j < F::kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (8 * j + e % 2 < begin[e / 2]) s[0][j][e] = -INFINITY;
  }
#pragma unroll
  for (int j = 0; j < F::kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (8 * j + e % 2 >= end[e / 2]) s[0][j][e] = -INFINITY;
}

// The bits of what is visible; what is not becomes -inf.
template <class F>
DEVICE void hide_pairs(const Attention& a, const Place& place, int64_t i0, int64_t k0,
                       float (&s)[1][F::kColumns][4], uint32_t (&visible)[F::kWords]) {
  using Half = typename F::Half;
  const int count = (int)max_of(0, min_of(16, a.queries - i0));
#pragma unroll
  for (int part = 0; part < F::kWords; part++) {
    uint32_t bits[1];
    fragment_bits<Half>(visible_word(a, place.b, place.h, i0, count, k0 + 64 * part, 64), bits);
    select_tile<Half>(bits, -INFINITY, half_of<F>(s, part));
    visible[part] &= bits[0];
  }
}

// S scale + bias; what the bias hides becomes -inf.
template <class F>
DEVICE void add_bias_of_tile(const Turn<F::kStages>& turn, float scale,
                             float (&s)[1][F::kColumns][4], HopperPairs<F>& pairs) {
  BiasWords<F> bias;
#pragma unroll
  for (int j = 0; j < F::kColumns; j++) {
    bias.load(turn, j);
#pragma unroll
    for (int e = 0; e < 4; e++) s[0][j][e] = bias.clamped(s[0][j][e], scale, j, e);
  }
  if (hide_by_bias<F>(turn, bias.least, pairs))
#pragma unroll
    for (int part = 0; part < F::kWords; part++) {
      const uint32_t bits[1] = {pairs.visible[part]};
      select_tile<typename F::Half>(bits, -INFINITY, half_of<F>(s, part));
    }
  sync_warp();  // its lanes have read the bias
  F::Keys::left(turn);
}

// S -> P of one tile, as forward_tile does it. kCare: with the bits of what is visible.
template <class F, bool kCare>
DEVICE Rise<F> hopper_softmax(const Attention& a, const HopperBlock& of, const SeenTiles& seen,
                              int64_t i0, const HopperTiles<F>& tiles, const Turn<F::kStages>& turn,
                              float (&s)[1][F::kColumns][4], RowState<F>& rows,
                              HopperPairs<F>& pairs) {
  using Half = typename F::Half;
  const Place& place = of.place;
  const int tile = tiles.at;
  const int64_t k0 = (int64_t)tile * F::kKeys;
  float scale = (float)a.scale;
  pairs.partial = false;
#pragma unroll
  for (int part = 0; part < F::kWords; part++) pairs.visible[part] = ~0u;
  if constexpr (F::kBias) {
    add_bias_of_tile<F>(turn, scale, s, pairs);
    scale = 1;
  } else if constexpr (!F::kPlain) {
    if (!(scale > 0)) {
      scale_fragments(scale, s);
      scale = 1;
    }
  }
  const bool hides = tile < seen.all || tile >= seen.all_end || !tiles.clear;
  pairs.partial |= hides;
  if (hides) {
    if constexpr (F::kPlain && !kCare)
      hide_outside_band<F>(a, place.b, i0, k0, s);
    else
      hide_pairs<F>(a, place, i0, k0, s, pairs.visible);
  }
  const Rise<F> rise = softmax_tile<F>(scale, s, rows);
  if constexpr (!F::kPlain)
    if (a.dropout.seed)
#pragma unroll
      for (int part = 0; part < F::kWords; part++)
        drop_pairs<Half>(a, place.b, place.h, i0, k0 + 64 * part, half_of<F>(s, part));
  return rise;
}

// S of a tile that is there, and S alone.
template <class F>
DEVICE void start_scores(const Turn<F::kStages>& turn, float (&s)[1][F::kColumns][4]) {
  const int row = (group_id() - 1) * 64;
  start_rows<typename F::S, F::kRows, F::kKeys, F::kWidth>(0, row, F::Keys::tile(turn), s[0]);
}
template <class F>
DEVICE void wait_scores(const Turn<F::kStages>& turn, float (&s)[1][F::kColumns][4]) {
  start_scores<F>(turn, s);
  wait_products<0>();
  pin(s[0]);
  if constexpr (!F::kBias) F::Keys::left(turn);
}

// Leaves tiles that none of a consumer's queries sees, or the end of the tiles.
template <class F>
DEVICE void pass_tiles(Turns<F>& turns, int count) {
#pragma unroll 1
  for (; count > 0; count--, turns.tiles.next()) {
    F::Keys::wait_full(turns.tiles);
    F::Values::wait_full(turns.tiles);
    sync_warp();  // all of its lanes have seen them
    F::Keys::left(turns.tiles);
    F::Values::left(turns.tiles);
  }
}
// The tiles of one consumer, of which the first is there; whether any was only partly visible.
template <class F>
DEVICE bool consume_tiles(const Attention& a, const HopperBlock& of, const SeenTiles& seen,
                          int64_t i0, HopperTiles<F>& tiles, Turns<F>& turns, RowState<F>& rows) {
  using S = typename F::S;
  using Keys = typename F::Keys;
  using Values = typename F::Values;
  float s[1][F::kColumns][4];
  uint32_t p[1][F::kSteps][4];
  Turn<F::kStages>& turn = turns.tiles;
  HopperPairs<F> pairs;
  bool partial = false;
  clear_fragments(s);

  wait_scores<F>(turn, s);
  if (tiles.is_last()) F::Queries::left(turns.queries);
  hopper_softmax<F, false>(a, of, seen, i0, tiles, turn, s, rows, pairs);  // nothing to rescale yet
  partial |= pairs.partial;
  round_fragments<S>(s, p);
  Turn<F::kStages> before = turn;
  turn.next();
#pragma unroll 1
  while (tiles.find(turn)) {
    start_scores<F>(turn, s);
    Values::wait_full(before);
    start_across<S, F::kKeys>(p[0], Values::tile(before), rows.out[0]);
    wait_products<F::kAhead ? 1 : 0>();
    pin(s[0]);
    if constexpr (!F::kAhead) pin(rows.out[0]);
    if constexpr (!F::kBias) Keys::left(turn);
    if (tiles.is_last()) F::Queries::left(turns.queries);
    const Rise<F> rise = hopper_softmax<F, false>(a, of, seen, i0, tiles, turn, s, rows, pairs);
    partial |= pairs.partial;
    if constexpr (F::kAhead)
      settle(rows.l[0][0] + rows.l[0][1]);  // the exponentials come before the wait
    wait_products<0>();
    pin(rows.out[0]);
    pin(p[0]);
    Values::left(before);
    rescale<F>(rise, rows);
    round_fragments<S>(s, p);
    before = turn;
    turn.next();
  }
  Values::wait_full(before);
  start_across<S, F::kKeys>(p[0], Values::tile(before), rows.out[0]);
  wait_products<0>();
  pin(rows.out[0]);
  Values::left(before);
  return partial;
}
// All tiles of a block. Without a mask, those that lengths and band hide from all of this
// consumer's queries cost it nothing.
template <class F>
DEVICE bool consume_block(const Attention& a, const HopperBlock& of, const SeenTiles& seen,
                          int64_t i0, Turns<F>& turns, RowState<F>& rows) {
  HopperTiles<F> tiles{0, 0, is_noted<F>(a), true};
  int before = 0, after = 1;  // the end of the notes
  if (!tiles.noted) {
    if (of.first >= of.end) return false;
    const int64_t own0 = of.place.q0 + (group_id() - 1) * 64;
    const SeenTiles own = seen_tiles<F::kKeys>(a, of.place.b, own0, min_of(64, a.queries - own0));
    const bool any = own.any < own.any_end;
    tiles.at = (any ? own.any : of.end) - 1;
    tiles.end = any ? own.any_end : of.end;
    before = tiles.at + 1 - of.first;
    after = of.end - tiles.end;
  }
  F::Queries::wait_full(turns.queries);
  sync_warp();
  pass_tiles<F>(turns, before);
  const bool found = tiles.find(turns.tiles);
  bool partial = false;
  if (found) partial = consume_tiles<F>(a, of, seen, i0, tiles, turns, rows);
  if (tiles.noted || !found) F::Queries::left(turns.queries);
  pass_tiles<F>(turns, after);
  turns.queries.next();
  return partial;
}

// The same with care, one product after the other: hidden pairs have P = 0, but 0 * NaN is NaN.
template <class F>
DEVICE void consume_with_care(const Attention& a, const HopperBlock& of, const SeenTiles& seen,
                              int64_t i0, Turns<F>& turns, RowState<F>& rows) {
  using S = typename F::S;
  using Values = typename F::Values;
  float s[1][F::kColumns][4];
  uint32_t p[1][F::kSteps][4];
  Turn<F::kStages>& turn = turns.tiles;
  HopperPairs<F> pairs;
  clear_fragments(s);
  HopperTiles<F> tiles{of.first - 1, of.end, is_noted<F>(a), true};
  if (!tiles.noted && of.first >= of.end) return;
  F::Queries::wait_full(turns.queries);
#pragma unroll 1
  for (; tiles.find(turn); turn.next()) {
    wait_scores<F>(turn, s);
    rescale<F>(hopper_softmax<F, true>(a, of, seen, i0, tiles, turn, s, rows, pairs), rows);
    round_fragments<S>(s, p);
    Values::wait_full(turn);
#pragma unroll
    for (int part = 0; part < F::kWords; part++)
#pragma unroll
      for (int panel = 0; panel < F::kPanels; panel++) {
        const Address tile = Values::tile(turn) +
                             (Address)(panel * F::kKeys * kPanelBytes + 64 * part * kPanelBytes);
        const int columns = (int)a.value_dim - 64 * panel;
        auto& out = (float (&)[1][8][4])rows.out[0][8 * panel];
        const auto& x = (const uint32_t (&)[1][4][4])p[0][4 * part];
        const uint32_t visible[1] = {pairs.visible[part]};
        const bool dirty = multiply_across<S, kPanelBytes, true>(x, tile, columns, out);
        if (ballot(dirty)) add_nonfinite<S, kPanelBytes, false>(x, visible, tile, columns, out);
      }
    sync_warp();  // its lanes have read the values
    Values::left(turn);
  }
  F::Queries::left(turns.queries);
  turns.queries.next();
  if (tiles.noted) pass_tiles<F>(turns, 1);
}

// Tiles of the 16 queries of a warp. Queries that do not exist have nothing hidden from them: what
// becomes of them is not stored.
template <class F>
DEVICE SeenTiles warp_tiles(const Attention& a, const Place& place, int64_t i0) {
  if (i0 >= a.queries) return {0, 0, 0, INT32_MAX};
  return seen_tiles<F::kKeys>(a, place.b, i0, min_of(16, a.queries - i0));
}

template <class F>
DEVICE bool all_finite(const RowState<F>& rows) {
  float zero = 0;
#pragma unroll
  for (int n = 0; n < F::kWidth / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) zero = fmaf(rows.out[0][n][e], 0.0f, zero);
  return zero == 0;
}

// A block of threads takes one block of queries after the other: the next ones arrive while the
// last ones are stored.
template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    forward_hopper_kernel(const GRID_CONSTANT Attention a, const HopperOrder order) {
#ifdef MHA_EXT_HOPPER_CODE
  if (thread_id() == 0) {
    F::Keys::init(4 * F::kConsumers);
    F::Values::init(4 * F::kConsumers);
    F::Queries::init(4 * F::kConsumers);
    F::Spoilt::init();
  }
  for (int i = thread_id(); i < F::kThreads / kWarp * F::kRemembered; i += F::kThreads)
    store_shared<uint16_t>(F::kAgain + 2 * i, 0);
  sync_block();
  const auto again = [](int warp, uint32_t round) {
    return F::kAgain + 2 * (warp * F::kRemembered + round % F::kRemembered);
  };
  // What a hidden pair may have spoilt is done again, with care; that costs nothing where all is
  // well.
  const auto needs_care = [&](uint32_t round) {
    bool found = false;
    for (int warp = 4; warp < F::kThreads / kWarp; warp++)
      found |= load_shared<uint16_t>(again(warp, round)) != 0;
    return found;
  };
  Turns<F> turns;
  uint32_t row, tile;
  if (group_id() == 0) {
    give_registers<F::kProducerRegisters>();
#pragma unroll 1
    for (uint32_t round = 0; round < order.rounds; round++)
      if (order.take(round, row, tile)) produce_tiles<F>(a, hopper_block<F>(a, row, tile), turns);
    if (!F::Spoilt::hear()) return;
#pragma unroll 1
    for (uint32_t round = 0; round < order.rounds; round++)
      if (order.take(round, row, tile) && needs_care(round))
        produce_tiles<F>(a, hopper_block<F>(a, row, tile), turns);
    return;
  }
  take_registers<F::kConsumerRegisters>();
  RowState<F> rows;
  bool spoilt = false;
#pragma unroll 1
  for (uint32_t round = 0; round < order.rounds; round++) {
    if (!order.take(round, row, tile)) continue;
    const HopperBlock of = hopper_block<F>(a, row, tile);
    const int64_t i0 = of.place.q0 + (warp_id() - 4) * 16;
    const SeenTiles seen = warp_tiles<F>(a, of.place, i0);
    clear_rows<F>(rows);
    if (consume_block<F>(a, of, seen, i0, turns, rows) && ballot(!all_finite<F>(rows))) {
      spoilt = true;
      if (lane_id() == 0) store_shared<uint16_t>(again(warp_id(), round), 1);
    }
    add_lanes<F>(rows);
    store_rows<F>(a, of.place, of.row, i0, rows);
  }
  F::Spoilt::answer(spoilt);
  if (!F::Spoilt::hear()) return;
#pragma unroll 1
  for (uint32_t round = 0; round < order.rounds; round++) {
    if (!order.take(round, row, tile) || !needs_care(round)) continue;
    const HopperBlock of = hopper_block<F>(a, row, tile);
    const int64_t i0 = of.place.q0 + (warp_id() - 4) * 16;
    const SeenTiles seen = warp_tiles<F>(a, of.place, i0);
    clear_rows<F>(rows);
    consume_with_care<F>(a, of, seen, i0, turns, rows);
    add_lanes<F>(rows);
    store_rows<F>(a, of.place, of.row, i0, rows);
  }
#endif
}

template <class F>
const char* run_forward_hopper(const Attention& a, Stream stream) {
  const int64_t blocks = ceil_div(a.queries, F::kRows) * a.batch * a.heads;
  const int64_t each = min_of(blocks, processors());
  if (each == 0) return nullptr;
  return launch(forward_hopper_kernel<F>, {each, 1}, F::kThreads, F::kSharedBytes, stream, a,
                hopper_order<F>(a, each));
}
// The pairs that F goes over for these lengths, those that do not exist among them, in units of
// what a pair costs it.
template <class F>
int64_t cost_of_pairs(const Attention& a, int64_t each) {
  return ceil_div(a.queries, F::kRows) * F::kRows * ceil_div(a.keys, F::kKeys) * F::kKeys * each;
}
// Lengths and what hides or drops pairs alone decide between kernels: among others a sequence has
// the one, and the bits, that it has alone.
template <class S, int kWidth>
const char* with_options(const Attention& a, Stream stream) {
  using Two = HopperForward<S, kWidth, false>;
  if constexpr (kWidth <= 64) {
    using Four = HopperForward<S, kWidth, false, 4, 64>;
    constexpr int64_t kShort = 512;
    const bool may = a.keys > Four::kKeys && (a.keys <= kShort || !a.dropout.seed);
    const int64_t two = cost_of_pairs<Two>(a, a.keys <= kShort && !a.dropout.seed ? 134 : 109);
    if (may && cost_of_pairs<Four>(a, 100) <= two) return run_forward_hopper<Four>(a, stream);
  }
  return run_forward_hopper<Two>(a, stream);
}
template <class S, int kWidth>
const char* by_options(const Attention& a, Stream stream) {
  if constexpr (kWidth <= 128)
    if (a.bias.data)
      return a.mask.data || a.dropout.seed
                 ? run_forward_hopper<HopperForward<S, kWidth, false, 2, 128, true>>(a, stream)
                 : run_forward_hopper<HopperForward<S, kWidth, true, 2, 128, true>>(a, stream);
  if (a.mask.data || a.dropout.seed || !((float)a.scale > 0))
    return with_options<S, kWidth>(a, stream);
  using Two = HopperForward<S, kWidth, true>;
  if constexpr (kWidth <= 64) {
    using Three = HopperForward<S, kWidth, true, 3>;
    using Four = HopperForward<S, kWidth, true, 4, 64>;
    constexpr int64_t kLong = 1024;
    const int64_t two = cost_of_pairs<Two>(a, 109), four = cost_of_pairs<Four>(a, 100),
                  three = cost_of_pairs<Three>(a, a.keys < kLong ? 104 : 96);
    if (four <= min_of(two, three)) return run_forward_hopper<Four>(a, stream);
    if (three <= two) return run_forward_hopper<Three>(a, stream);
  }
  return run_forward_hopper<Two>(a, stream);
}
template <class S>
const char* forward_hopper(const Attention& a, Stream stream) {
  if (max_of(a.head_dim, a.value_dim) <= 64) return by_options<S, 64>(a, stream);
  if (max_of(a.head_dim, a.value_dim) <= 128) return by_options<S, 128>(a, stream);
  return by_options<S, 256>(a, stream);
}

}  // namespace mha_ext::cuda

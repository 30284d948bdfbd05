// Forward for 16-bit types on GPUs of compute capability 9.0: what forward_half.cuh does, by
// products of warpgroups (Shah et al. 2024). One warpgroup copies tiles; each of the others holds
// 64 queries, and its products run while it and the others take exponentials: S of a tile is on its
// way while P V of the tile before is.
#pragma once
#include "forward_half.cuh"
#include "hopper.cuh"

namespace mha_ext::cuda {

template <class S_, int kWidth_, bool kPlain_>
struct HopperForward {
  using S = S_;
  static constexpr bool kOwnsKeys = false;
  static constexpr bool kPlain = kPlain_;  // no mask or dropout, and scale > 0
  static constexpr int kWidth = kWidth_;   // D and Dv are at most this
  static constexpr int kKeys = kWidth <= 128 ? 128 : 64, kWords = kKeys / 64;
  static constexpr int kFragments = 1, kColumns = kKeys / 8, kSteps = kKeys / 16;
  static constexpr int kConsumers = kWidth <= 64 && kPlain ? 3 : 2;
  static constexpr int kThreads = (1 + kConsumers) * kGroup;
  // Of a thread: 65536 in all.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40,
                       kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  // Whether registers have room for P V of a tile while S of the next becomes P.
  static constexpr bool kAhead = (kPlain && kWidth > 64) || (!kPlain && kWidth <= 64);
  static constexpr int kRows = 64 * kConsumers, kPanels = kWidth / 64,
                       kStages = kWidth <= 64    ? 4
                                 : kWidth <= 128 ? 3
                                                 : 2;
  // Tiles that are on their way while the producer asks for the next.
  static constexpr int kLate = kStages > 2;
  static constexpr int kTileBytes = kKeys * 2 * kWidth, kQueryBytes = kRows * 2 * kWidth;
  static constexpr Address kFirst = kQueryBytes, kBarriers = kFirst + 2 * kStages * kTileBytes;
  using Keys = Ring<kStages, kTileBytes, kFirst, kBarriers, kCopyThreads>;
  using Values = Ring<kStages, kTileBytes, kFirst + kStages * kTileBytes, Keys::kEnd, kCopyThreads>;
  using Queries = Ring<1, kQueryBytes, 0, Values::kEnd, kCopyThreads>;
  // A number for each of so many blocks of queries and each warp: what is to be done again.
  static constexpr Address kAgain = Queries::kEnd;
  static constexpr int kRemembered = 64, kSharedBytes = kAgain + kThreads / kWarp * kRemembered * 2;
  // 64 of the keys, as a word of visibility has them.
  struct Half {
    using S = S_;
    static constexpr bool kOwnsKeys = false;
    static constexpr int kFragments = 1, kColumns = 8, kSteps = 4, kKeys = 64;
  };
};
template <class F>
DEVICE float (&half_of(float (&s)[1][F::kColumns][4], int part))[1][8][4] {
  return (float (&)[1][8][4])s[0][8 * part];
}

// What a block of threads goes over: blocks of queries, one after the other, and for each the tiles
// of keys that any of its queries sees.
struct HopperBlock {
  int64_t row;
  Place place;
  int first, count;  // tiles of keys
};
// Which blocks of queries a block of threads takes, round by round. Under a causal mask later
// queries see more keys, and work is to be even: first come pairs, of a head's first and last,
// which cost the same; then, for the last rounds, single ones by what they cost, where the last one
// of a round is the first of the next. The heads of both are few enough for the L2 cache.
struct HopperOrder {
  uint32_t tiles, rows;  // blocks of queries of a head; heads
  uint32_t paired, pair_rounds, rounds, group;
  // False: nothing in this round.
  DEVICE_MEMBER bool take(uint32_t round, uint32_t& row, uint32_t& tile) const {
    const uint32_t each = gridDim.x, mine = blockIdx.x;
    if (round < pair_rounds) {
      const uint32_t pairs = (tiles + 1) / 2, at = round / 2 * each + mine, first = at % pairs;
      row = at / pairs;
      tile = round % 2 ? first : tiles - 1 - first;
      return row < paired && (round % 2 == 0 || tile != tiles - 1 - first);
    }
    round -= pair_rounds;
    const uint32_t left = rows - paired, at = round * each + (round % 2 ? each - 1 - mine : mine);
    if (at >= tiles * left) return false;
    const uint32_t before = at / (group * tiles) * group;
    const uint32_t heads = (uint32_t)min_of(group, left - before), in_group = at - before * tiles;
    tile = tiles - 1 - in_group / heads;
    row = paired + before + in_group % heads;
    return true;
  }
};
template <class F>
HopperOrder hopper_order(const Attention& a, int64_t each) {
  constexpr int64_t kCached = 16 << 20;  // bytes
  const int64_t tiles = ceil_div(a.queries, F::kRows), rows = a.batch * a.heads;
  const int64_t pairs = (tiles + 1) / 2;
  int64_t paired = 0, pair_rounds = 0, group = rows;
  if (a.band.right_bounded && !a.band.left_bounded) {
    pair_rounds = max_of(0, rows * pairs / each - 1);
    paired = pair_rounds * each / pairs;
  } else {
    const int64_t bytes = max_of(1, a.keys * (a.head_dim + a.value_dim) * 2);
    group = max_of(1, kCached / bytes) * (a.heads / a.kv_heads);
  }
  const int64_t rounds = 2 * pair_rounds + ceil_div((rows - paired) * tiles, each);
  return {(uint32_t)tiles,  (uint32_t)rows,
          (uint32_t)paired, (uint32_t)(2 * pair_rounds),
          (uint32_t)rounds, (uint32_t)min_of(group, rows)};
}
template <class F>
DEVICE HopperBlock hopper_block(const Attention& a, uint32_t row, uint32_t tile) {
  const uint32_t b = row / (uint32_t)a.heads, h = row - b * (uint32_t)a.heads;
  HopperBlock of;
  of.row = row;
  of.place = {b, h, kv_head(a, h), (int64_t)tile * F::kRows, 0};
  const int64_t rows = min_of(F::kRows, a.queries - of.place.q0);
  const SeenTiles seen = seen_tiles<F::kKeys>(a, b, of.place.q0, rows);
  of.first = seen.any;
  of.count = (int)max_of(0, seen.any_end - seen.any);
  return of;
}

// Where a thread is in the rings.
template <class F>
struct Turns {
  Turn<1> queries;
  Turn<F::kStages> tiles;
};

// One half of the producer's side: keys or values of one tile after the other, `width` columns.
template <class F, class Tiles>
DEVICE void produce_rows(const Attention& a, const HopperBlock& of, const Rows& rows, int64_t width,
                         Turn<F::kStages>& turn) {
  const int64_t k0 = (int64_t)of.first * F::kKeys;
  PanelRows from = panel_rows<typename F::S>(rows, of.place.b, of.place.kv, k0, width);
  int left = (int)(a.keys - k0);
  Turn<F::kStages> before = turn;
#pragma unroll 1
  for (int n = 0; n < of.count; n++, left -= F::kKeys, from.at += F::kKeys * from.stride) {
    Tiles::wait_free(turn);
    copy_panels<F::kKeys, F::kPanels>(Tiles::tile(turn), from, left);
    copy_commit();
    if (n >= F::kLate) {
      copy_wait<F::kLate>();
      Tiles::filled(before);
      before.next();
    }
    turn.next();
  }
  if constexpr (F::kLate > 0) {
    copy_wait<0>();
    Tiles::filled(before);
  }
}
// The keys come on their own: those of the next block of queries, too.
template <class F>
DEVICE void produce_tiles(const Attention& a, const HopperBlock& of, Turns<F>& turns) {
  if (of.count == 0) return;
  const Place& place = of.place;
  if (thread_id() < kCopyThreads) {
    produce_rows<F, typename F::Keys>(a, of, a.key, a.head_dim, turns.tiles);
    return;
  }
  F::Queries::wait_free(turns.queries);
  copy_panels<F::kRows, F::kPanels>(
      0, panel_rows<typename F::S>(a.query, place.b, place.h, place.q0, a.head_dim),
      (int)min_of(F::kRows, a.queries - place.q0));
  copy_commit();
  copy_wait<0>();
  F::Queries::filled(turns.queries);
  turns.queries.next();
  produce_rows<F, typename F::Values>(a, of, a.value, a.value_dim, turns.tiles);
}

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
#pragma unroll
  for (int j = 0; j < F::kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (8 * j + e % 2 < begin[e / 2] || 8 * j + e % 2 >= end[e / 2]) s[0][j][e] = -INFINITY;
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
    visible[part] = bits[0];
  }
}

// S -> P of one tile, as forward_tile does it. kCare: with the bits of what is visible.
template <class F, bool kCare>
DEVICE Rise<F> hopper_softmax(const Attention& a, const HopperBlock& of, const SeenTiles& seen,
                              int64_t i0, int tile, float (&s)[1][F::kColumns][4],
                              RowState<F>& rows, HopperPairs<F>& pairs) {
  using Half = typename F::Half;
  const Place& place = of.place;
  const int64_t k0 = (int64_t)tile * F::kKeys;
  float scale = (float)a.scale;
  if constexpr (!F::kPlain)
    if (!(scale > 0)) {
      scale_fragments(scale, s);
      scale = 1;
    }
  pairs.partial = tile < seen.all || tile >= seen.all_end;
  if constexpr (!F::kPlain) pairs.partial |= a.mask.data != nullptr;
#pragma unroll
  for (int part = 0; part < F::kWords; part++) pairs.visible[part] = ~0u;
  if (pairs.partial) {
    if constexpr (F::kPlain && !kCare)
      hide_outside_band<F>(a, place.b, i0, k0, s);
    else
      hide_pairs<F>(a, place, i0, k0, s, pairs.visible);
  }
  const Rise<F> rise = softmax_tile<F>(scale, s, rows);
  if constexpr (!F::kPlain)
    if (a.dropout.seed)
#pragma unroll
      for (int part = 0; part < F::kWords; part++) {
        uint32_t kept[1];
        kept_bits<Half>(a, place.b, place.h, i0, k0 + 64 * part, kept);
        select_tile<Half>(kept, 0, half_of<F>(s, part));
      }
  return rise;
}

// Starts S of a tile that is there.
template <class F>
DEVICE void start_scores(const Turn<F::kStages>& turn, float (&s)[1][F::kColumns][4]) {
  const int row = (group_id() - 1) * 64;
  start_rows<typename F::S, F::kRows, F::kKeys, F::kWidth>(0, row, F::Keys::tile(turn), s[0]);
}
// S of the tile that comes next, with nothing else under way.
template <class F>
DEVICE void wait_scores(const Turn<F::kStages>& turn, float (&s)[1][F::kColumns][4]) {
  F::Keys::wait_full(turn);
  start_scores<F>(turn, s);
  wait_products<0>();
  pin(s[0]);
  F::Keys::left(turn);
}

// Leaves tiles that none of a consumer's queries sees.
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
// The tiles [first, first + count) of one consumer; whether any was only partly visible.
template <class F>
DEVICE bool consume_tiles(const Attention& a, const HopperBlock& of, const SeenTiles& seen,
                          int64_t i0, int first, int count, Turns<F>& turns, RowState<F>& rows) {
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
  if (count == 1) F::Queries::left(turns.queries);
  hopper_softmax<F, false>(a, of, seen, i0, first, s, rows, pairs);  // nothing is there to rescale
  partial |= pairs.partial;
  round_fragments<S>(s, p);
  Turn<F::kStages> before = turn;
  turn.next();
#pragma unroll 1
  for (int n = 1; n < count; n++) {
    Keys::wait_full(turn);
    start_scores<F>(turn, s);
    Values::wait_full(before);
    start_across<S, F::kKeys>(p[0], Values::tile(before), rows.out[0]);
    wait_products<F::kAhead ? 1 : 0>();
    pin(s[0]);
    if constexpr (!F::kAhead) pin(rows.out[0]);
    Keys::left(turn);
    if (n + 1 == count) F::Queries::left(turns.queries);
    const Rise<F> rise = hopper_softmax<F, false>(a, of, seen, i0, first + n, s, rows, pairs);
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
// All tiles of a block: those that none of this consumer's queries sees cost it nothing.
template <class F>
DEVICE bool consume_block(const Attention& a, const HopperBlock& of, const SeenTiles& seen,
                          int64_t i0, Turns<F>& turns, RowState<F>& rows) {
  if (of.count == 0) return false;
  const int64_t own0 = of.place.q0 + (group_id() - 1) * 64;
  const SeenTiles own = seen_tiles<F::kKeys>(a, of.place.b, own0, min_of(64, a.queries - own0));
  const int count = (int)max_of(0, own.any_end - own.any);
  const int before = count > 0 ? own.any - of.first : 0;
  F::Queries::wait_full(turns.queries);
  sync_warp();
  pass_tiles<F>(turns, before);
  bool partial = false;
  if (count > 0)
    partial = consume_tiles<F>(a, of, seen, i0, own.any, count, turns, rows);
  else
    F::Queries::left(turns.queries);
  pass_tiles<F>(turns, of.count - before - count);
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
  F::Queries::wait_full(turns.queries);
#pragma unroll 1
  for (int n = 0; n < of.count; n++, turn.next()) {
    wait_scores<F>(turn, s);
    rescale<F>(hopper_softmax<F, true>(a, of, seen, i0, of.first + n, s, rows, pairs), rows);
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
    if (!sync_block_or(false)) return;
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
    const SeenTiles seen = seen_tiles<F::kKeys>(a, of.place.b, i0, min_of(16, a.queries - i0));
    clear_rows<F>(rows);
    if (consume_block<F>(a, of, seen, i0, turns, rows) && ballot(!all_finite<F>(rows))) {
      spoilt = true;
      if (lane_id() == 0) store_shared<uint16_t>(again(warp_id(), round), 1);
    }
    add_lanes<F>(rows);
    store_rows<F>(a, of.place, of.row, i0, rows);
  }
  if (!sync_block_or(spoilt)) return;
#pragma unroll 1
  for (uint32_t round = 0; round < order.rounds; round++) {
    if (!order.take(round, row, tile) || !needs_care(round)) continue;
    const HopperBlock of = hopper_block<F>(a, row, tile);
    if (of.count == 0) continue;
    const int64_t i0 = of.place.q0 + (warp_id() - 4) * 16;
    const SeenTiles seen = seen_tiles<F::kKeys>(a, of.place.b, i0, min_of(16, a.queries - i0));
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
template <class S, int kWidth>
const char* by_options(const Attention& a, Stream stream) {
  if (a.mask.data || a.dropout.seed || !((float)a.scale > 0))
    return run_forward_hopper<HopperForward<S, kWidth, false>>(a, stream);
  return run_forward_hopper<HopperForward<S, kWidth, true>>(a, stream);
}
template <class S>
const char* forward_hopper(const Attention& a, Stream stream) {
  if (max_of(a.head_dim, a.value_dim) <= 64) return by_options<S, 64>(a, stream);
  if (max_of(a.head_dim, a.value_dim) <= 128) return by_options<S, 128>(a, stream);
  return by_options<S, 256>(a, stream);
}

}  // namespace mha_ext::cuda

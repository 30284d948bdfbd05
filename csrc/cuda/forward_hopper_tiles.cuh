// Tiles of forward on GPUs of compute capability 9.0: where they lie, which block of threads takes
// which of them, in what order, and who copies them.
#pragma once
#include "forward_half.cuh"
#include "hopper.cuh"

namespace mha_ext::cuda {

template <class S_, int kWidth_, bool kPlain_, int kConsumers_ = 2,
          int kKeys_ = kWidth_ <= 128 ? 128 : 64, bool kBias_ = false>
struct HopperForward {
  using S = S_;
  static constexpr bool kOwnsKeys = false;
  static constexpr bool kPlain = kPlain_;  // no mask or dropout, and scale > 0 or a bias
  static constexpr bool kBias = kBias_;
  static constexpr int kWidth = kWidth_;                     // D and Dv are at most this
  static constexpr int kKeys = kKeys_, kWords = kKeys / 64;  // of a tile
  static constexpr int kFragments = 1, kColumns = kKeys / 8, kSteps = kKeys / 16;
  static constexpr int kConsumers = kConsumers_;  // warpgroups with 64 queries each
  static constexpr int kThreads = (1 + kConsumers) * kGroup;
  // Of a thread: 65536 in all, which the GPU gives out in pieces of eight a thread.
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kWidth <= 64 ? 56 : 40;
  static constexpr int kConsumerRegisters =
      (65536 / kThreads / 8 * 8 * (1 + kConsumers) - kProducerRegisters) / kConsumers;
  static_assert(kConsumerRegisters % 8 == 0);
  // Whether registers have room for P V of a tile while S of the next becomes P.
  static constexpr bool kAhead = (kPlain || kWidth <= 64) && kConsumers == 2;
  static constexpr int kRows = 64 * kConsumers, kPanels = kWidth / 64;
  static constexpr int kTileBytes = kKeys * 2 * kWidth, kQueryBytes = kRows * 2 * kWidth;
  static constexpr int kKeyBytes = kTileBytes + (kBias ? 2 * kRows * kKeys : 0);
  static constexpr int kMostStages = kConsumers > 3 ? 6 : kWidth <= 64 ? 4 : kWidth <= 128 ? 3 : 2;
  static constexpr int kRoom = (kHopperSharedBytes - 2048 - kQueryBytes) / (kKeyBytes + kTileBytes);
  static constexpr int kStages = kRoom < kMostStages ? kRoom : kMostStages;
  // Tiles that are on their way while the producer asks for the next.
  static constexpr int kLate = kStages > 2;
  static constexpr Address kFirst = kQueryBytes, kFirstValues = kFirst + kStages * kKeyBytes,
                           kBarriers = kFirstValues + kStages * kTileBytes;
  using Keys = Ring<kStages, kKeyBytes, kFirst, kBarriers, kCopyThreads>;  // and the bias
  using Values = Ring<kStages, kTileBytes, kFirstValues, Keys::kEnd, kCopyThreads>;
  using Queries = Ring<1, kQueryBytes, 0, Values::kEnd, kCopyThreads>;
  using Spoilt = Question<kConsumers, Queries::kEnd>;
  // What the producer notes of a tile, 4 bytes a stage.
  static constexpr Address kNotes = Spoilt::kEnd;
  // A number for each of so many blocks of queries and each warp: what is to be done again.
  static constexpr Address kAgain = kNotes + 4 * kStages;
  static constexpr int kRemembered = 64, kSharedBytes = kAgain + kThreads / kWarp * kRemembered * 2;
  using Walk = TileWalk<kRows, kKeys, !kPlain>;
  DEVICE_MEMBER static Address bias_tile(const Turn<kStages>& turn) {
    return Keys::tile(turn) + kTileBytes;
  }
  DEVICE_MEMBER static int warp_row() { return warp_id() * 16 - 64; }
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
  int first, end;  // tiles of keys
};
// Which blocks of queries a block of threads takes, round by round; the last one of a round is the
// first of the next, so that what a head's last block lacks is lacked in turn. Under a causal mask
// later queries see more keys, and work is to be even: first come pairs, of a head's first and last
// block, which cost the same; then, for the last rounds, single ones by what they cost.
struct HopperOrder {
  uint32_t tiles, rows;                  // blocks of queries of a head; heads
  uint32_t paired, pair_rounds, rounds;  // heads, and rounds for them; in all
  bool by_cost;
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
    const uint32_t before = by_cost ? at / left : at % tiles;
    row = paired + (by_cost ? at % left : at / tiles);
    tile = tiles - 1 - before;
    return true;
  }
};
template <class F>
HopperOrder hopper_order(const Attention& a, int64_t each) {
  const int64_t tiles = ceil_div(a.queries, F::kRows), rows = a.batch * a.heads;
  const int64_t pairs = (tiles + 1) / 2;
  const bool by_cost = a.band.right_bounded && !a.band.left_bounded;
  // Few heads are left to the last rounds: their keys and values stay in the L2 cache.
  const int64_t pair_rounds = by_cost ? max_of(0, rows * pairs / each - 1) : 0;
  const int64_t paired = pair_rounds * each / pairs;
  const int64_t rounds = 2 * pair_rounds + ceil_div((rows - paired) * tiles, each);
  return {(uint32_t)tiles,  (uint32_t)rows, (uint32_t)paired, (uint32_t)(2 * pair_rounds),
          (uint32_t)rounds, by_cost};
}
template <class F>
DEVICE HopperBlock hopper_block(const Attention& a, uint32_t row, uint32_t tile) {
  if constexpr (F::kBias) row = (uint32_t)bias_row(a, row, a.heads);
  const uint32_t b = row / (uint32_t)a.heads, h = row - b * (uint32_t)a.heads;
  HopperBlock of;
  of.row = row;
  of.place = {b, h, kv_head(a, h), (int64_t)tile * F::kRows, 0};
  const int64_t rows = min_of(F::kRows, a.queries - of.place.q0);
  const SeenTiles seen = seen_tiles<F::kKeys>(a, b, of.place.q0, rows);
  of.first = seen.any;
  of.end = seen.any_end;
  return of;
}

// Where a thread is in the rings.
template <class F>
struct Turns {
  Turn<1> queries;
  Turn<F::kStages> tiles;
};

// Under a mask, what the producer notes of a tile of keys: its number, with a bit for each
// consumer: the mask hides none of its pairs; and behind the last tile that there is no more.
constexpr int kNoTile = -1, kClearBit = 28;
template <class F>
DEVICE bool is_noted(const Attention& a) {
  return !F::kPlain && a.mask.data;
}
template <class F>
DEVICE void note_tile(const Attention& a, const Place& place, const typename F::Walk& walk,
                      int stage) {
  int note = kNoTile;
  if (walk.at < walk.end) {
    note = walk.at;
#pragma unroll 1
    for (int i = 0; i < F::kConsumers; i++)
      note |= square_has_all(a, place.b, place.h, place.q0 + 64 * i, walk.at * F::kKeys, F::kWords)
              << (kClearBit + i);
  }
  store_shared<int>(F::kNotes + 4 * (Address)stage, note);
}

// One half of the producer's side: keys or values of one tile after the other, `width` columns; the
// bias comes with the keys.
template <class F, class Tiles, bool kWithBias>
DEVICE void produce_rows(const Attention& a, const HopperBlock& of, const Rows& rows, int64_t width,
                         bool notes, Turn<F::kStages>& turn) {
  const Place& place = of.place;
  typename F::Walk walk(a, place.b, place.h, place.q0, of.first, of.end);
  PanelRows from = panel_rows<typename F::S>(rows, place.b, place.kv, 0, width);
  const char* const first = from.at;
  Turn<F::kStages> before = turn;
  int n = 0;
#pragma unroll 1
  for (; walk.at < walk.end; n++, walk.next()) {
    from.at = first + walk.at * (F::kKeys * from.stride);
    Tiles::wait_free(turn);
    copy_panels<F::kKeys, F::kPanels>(Tiles::tile(turn), from, (int)(a.keys - walk.at * F::kKeys));
    if constexpr (kWithBias)
#pragma unroll 1
      for (int square = 0; square < F::kConsumers * F::kWords; square++) {
        const int row = square % F::kConsumers * 64, word = square / F::kConsumers;
        copy_bias(a, place.b, place.h, place.q0 + row, walk.at * F::kKeys + 64 * word,
                  F::bias_tile(turn) + (Address)((word * F::kRows + row) * kPanelBytes));
      }
    copy_commit();
    if (notes) note_tile<F>(a, place, walk, turn.stage);
    if (n >= F::kLate) {
      copy_wait<F::kLate>();
      Tiles::filled(before);
      before.next();
    }
    turn.next();
  }
  if (F::kLate > 0 && n > 0) {
    copy_wait<0>();
    Tiles::filled(before);
  }
  if (is_noted<F>(a)) {
    Tiles::wait_free(turn);
    if (notes) note_tile<F>(a, place, walk, turn.stage);
    Tiles::filled(turn);
    turn.next();
  }
}
// The keys come on their own: those of the next block of queries, too.
template <class F>
DEVICE void produce_tiles(const Attention& a, const HopperBlock& of, Turns<F>& turns) {
  const Place& place = of.place;
  if (!is_noted<F>(a) && of.first >= of.end) return;
  if (thread_id() < kCopyThreads) {
    const bool notes = is_noted<F>(a) && thread_id() == 0;
    produce_rows<F, typename F::Keys, F::kBias>(a, of, a.key, a.head_dim, notes, turns.tiles);
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
  produce_rows<F, typename F::Values, false>(a, of, a.value, a.value_dim, false, turns.tiles);
}

// The tiles of one consumer, one after the other: those after `at` up to `end`, or what notes say.
template <class F>
struct HopperTiles {
  int at, end;
  bool noted, clear;  // the mask hides nothing of this one
  // Waits for the keys of the next one; false: there is none.
  DEVICE_MEMBER bool find(const Turn<F::kStages>& turn) {
    if (!noted) {
      if (++at >= end) return false;
      F::Keys::wait_full(turn);
      return true;
    }
    F::Keys::wait_full(turn);
    // The lane that will leave the tile reads it for all.
    const Address from = F::kNotes + 4 * (Address)turn.stage;
    const int note = shuffle(lane_id() == 0 ? load_shared<int>(from) : 0, 0);
    at = note & ((1 << kClearBit) - 1);
    clear = note >> (kClearBit - 1 + group_id()) & 1;
    return note != kNoTile;
  }
  // Whether it is known that none follows.
  DEVICE_MEMBER bool is_last() const { return !noted && at + 1 == end; }
};

}  // namespace mha_ext::cuda

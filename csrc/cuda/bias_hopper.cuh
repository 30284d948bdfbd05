// The gradient of a bias that broadcasts over batch or heads, for 16-bit types on GPUs of compute
// capability 9.0: what bias_half_kernel does, by products of warpgroups. A block of threads takes
// one tile of the bias after the other; of each, it computes dS for all batch entries and heads
// that share it, whose rows come in a ring, and adds it up in order.
#pragma once
#include "backward_hopper.cuh"

namespace mha_ext::cuda {

template <class S_, int kWidth_>
struct HopperBias {
  using S = S_;
  static constexpr bool kOwnsKeys = false, kDropout = false, kBias = true, kHalves = false;
  static constexpr bool kValues = false, kHeld = false;
  static constexpr int kWidth = kWidth_, kPanels = kWidth / 64;
  static constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * kGroup;
  static constexpr int kRows = 64 * kConsumers;            // queries of a tile
  static constexpr int kOthers = kWidth <= 64 ? 128 : 64;  // keys of a tile
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kParts = kOthers / 64, kColumns = kOthers / 8, kSteps = kOthers / 16;
  // Q, dO, K and V of a term; and the bias, which stays.
  static constexpr int kStages = kWidth <= 64 ? 3 : 2;
  static constexpr int kOwnBytes = kRows * 2 * kWidth, kTileBytes = kOthers * 2 * kWidth;
  static constexpr int kStageBytes = 2 * (kOwnBytes + kTileBytes);
  static constexpr int kBiasBytes = 2 * kRows * kOthers;
  using Tiles = Ring<kStages, kStageBytes, kBiasBytes, kBiasBytes + kStages * kStageBytes>;
  using Own = Ring<1, kBiasBytes, 0, Tiles::kEnd>;  // full with the first term
  static constexpr int kSharedBytes = Own::kEnd;
  // What backward's functions ask for, and is not there: marks of tiles, and numbers in the ring.
  static constexpr Address kMarks = 0;
  static constexpr int kMostMarks = 0;
  struct At : Turn<kStages> {
    Turn<1> own;
  };
  DEVICE_MEMBER static Address own_scores(const At& at) { return Tiles::tile(at); }
  DEVICE_MEMBER static Address own_values(const At& at) { return Tiles::tile(at) + kOwnBytes; }
  DEVICE_MEMBER static Address score_tile(const At& at) { return Tiles::tile(at) + 2 * kOwnBytes; }
  DEVICE_MEMBER static Address value_tile(const At& at) { return score_tile(at) + kTileBytes; }
  DEVICE_MEMBER static Address bias_tile(const At& at) { return Own::tile(at.own); }
  DEVICE_MEMBER static Address numbers(const At&) { return 0; }
  DEVICE_MEMBER static int first_row() { return shuffle((warp_id() / 4 - 1) * 64, 0); }
  DEVICE_MEMBER static int warp_row() { return warp_id() * 16 - 64; }
  struct Part {
    using S = S_;
    static constexpr bool kOwnsKeys = false;
    static constexpr int kFragments = 1, kOthers = 64, kColumns = 8, kSteps = 4;
  };
};

// The tiles of a block of threads, one after the other, and the terms of each that hide not all.
template <class F>
struct HopperTerms {
  int batches, heads, query_tiles, key_tiles;  // of the bias
  int terms, shared;                           // of a tile; heads that share one
  uint32_t tile;
  int term, b, h, key_tile;
  int64_t q0;
  DEVICE_MEMBER HopperTerms(const Attention& a, const BiasPlan& plan)
      : batches((int)plan.batches),
        heads((int)plan.heads),
        query_tiles((int)ceil_div(a.queries, F::kRows)),
        key_tiles((int)ceil_div(a.keys, F::kOthers)),
        shared((int)(a.heads / plan.heads)),
        tile(blockIdx.x) {
    terms = (int)(a.batch / plan.batches) * shared;
  }
  DEVICE_MEMBER bool done() const {
    return tile >= (uint32_t)(batches * heads * query_tiles) * (uint32_t)key_tiles;
  }
  DEVICE_MEMBER void next_tile() { tile += gridDim.x; }
  DEVICE_MEMBER uint32_t row() const { return tile / (uint32_t)key_tiles; }
  DEVICE_MEMBER int first_b() const { return (int)(row() / (uint32_t)(query_tiles * heads)); }
  DEVICE_MEMBER int first_h() const { return (int)(row() / (uint32_t)query_tiles) % heads; }
  // Before the first term of a tile.
  DEVICE_MEMBER void start() {
    term = -1;
    key_tile = (int)(tile % (uint32_t)key_tiles);
    q0 = (int64_t)(row() % (uint32_t)query_tiles) * F::kRows;
  }
  // To the first term, or the one after this, of which the tile's queries see anything; false:
  // there is none.
  DEVICE_MEMBER bool next(const Attention& a) {
    while (++term < terms) {
      b = first_b() + term / shared;
      h = first_h() + term % shared;
      const SeenTiles seen = seen_tiles<F::kOthers>(a, b, q0, min_of(F::kRows, a.queries - q0));
      if (key_tile >= seen.any && key_tile < seen.any_end) return true;
    }
    return false;
  }
};

template <class F>
DEVICE void produce_terms(const Attention& a, const AttentionGrad& g, HopperTerms<F>& at) {
  using S = typename F::S;
  const bool first = thread_id() < kGroup / 2;
  const int piece = thread_id() % (8 * F::kPanels);
  typename F::At turn, before;
  bool later = false;
#pragma unroll 1
  for (; !at.done(); at.next_tile()) {
    at.start();
    bool bias_is_there = false;
#pragma unroll 1
    while (at.next(a)) {
      const int64_t k0 = (int64_t)at.key_tile * F::kOthers;
      F::Tiles::wait_free(turn);
      const HopperSource own =
          source_of<S>(a.query, g.grad_out, (int)a.head_dim, (int)a.value_dim, at.b, piece);
      copy_tile<F::kRows, F::kPanels>(first ? F::own_scores(turn) : F::own_values(turn), own, at.h,
                                      at.q0, (int)min_of(F::kRows, a.queries - at.q0));
      const HopperSource others =
          source_of<S>(a.key, a.value, (int)a.head_dim, (int)a.value_dim, at.b, piece);
      copy_tile<F::kOthers, F::kPanels>(first ? F::score_tile(turn) : F::value_tile(turn), others,
                                        kv_head(a, at.h), k0, (int)min_of(F::kOthers, a.keys - k0));
      copy_commit();
      if (later) {
        copy_wait<1>();
        F::Tiles::filled(before);
      }
      if (!bias_is_there) {  // the last tile's has been read once its last term is done
        F::Own::wait_free(turn.own);
        const int64_t own0 = at.q0 + (first ? 0 : 64);
#pragma unroll 1
        for (int panel = 0; panel < F::kParts; panel++)
          copy_bias(
              a, at.first_b(), at.first_h(), own0, k0 + 64 * panel,
              F::bias_tile(turn) + (Address)((panel * F::kRows + (first ? 0 : 64)) * kPanelBytes));
        copy_commit();
        turn.own.next();
        bias_is_there = true;
      }
      before = turn;
      later = true;
      turn.next();
    }
  }
  if (!later) return;
  copy_wait<0>();
  F::Tiles::filled(before);
}

// Of the two rows of this lane of a term.
template <class F>
DEVICE void load_numbers(const Attention& a, const AttentionGrad& g, const HopperTerms<F>& at,
                         QueryNumbers (&to)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int64_t i = at.q0 + F::warp_row() + 8 * half + lane_id() / 4;
    to[half] = {INFINITY, 0, 0};
    if (i < a.queries)
      to[half] = numbers_at(a, g, ((int64_t)at.b * a.heads + at.h) * a.queries + i);
  }
}
// The sum of one tile: of this warp's queries.
template <class F>
DEVICE void consume_terms(const Attention& a, const AttentionGrad& g, HopperTerms<F>& at,
                          typename F::At& turn, HopperTile<F>& tile,
                          float (&sum)[1][F::kColumns][4]) {
  const int64_t own0 = at.q0 + F::warp_row();
  bool found = at.next(a);
  if (!found) return;
  QueryNumbers next[2];
  load_numbers<F>(a, g, at, next);
#pragma unroll 1
  while (found) {
    const HopperNumbers own[2] = {hopper_numbers(next[0]), hopper_numbers(next[1])};
    SeenTiles seen{0, 0, 0, INT32_MAX};  // queries that do not exist have nothing hidden from them
    if (own0 < a.queries)
      seen = seen_tiles<F::kOthers>(a, at.b, own0, min_of(16, a.queries - own0));
    const HopperPlace place{at.b, (int)(own0 / 16), at.h,         at.key_tile, 0,
                            0,    seen.all,         seen.all_end, 0,           1};
    hopper_visible<F>(a, place, tile.pairs);
    start_tile<F, false>(turn, {}, tile);
    found = at.next(a);
    if (found) load_numbers<F>(a, g, at, next);  // they arrive while the products run
    middle_of_tile<F, 0>(a, place, turn, own, tile);
#pragma unroll
    for (int j = 0; j < F::kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum[0][j][e] += tile.dp[0][j][e];
    leave<F>(turn);
    turn.next();
  }
  leave_own<F>(turn);
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    bias_hopper_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g,
                       const BiasPlan plan) {
#ifdef MHA_EXT_HOPPER_CODE
  if (thread_id() == 0) {
    F::Tiles::init(4 * F::kConsumers);
    F::Own::init(4 * F::kConsumers);
  }
  sync_block();
  HopperTerms<F> at(a, plan);
  if (warp_id() < 4) {
    give_registers<F::kProducerRegisters>();
    produce_terms<F>(a, g, at);
    return;
  }
  take_registers<F::kConsumerRegisters>();
  typename F::At turn;
  HopperTile<F> tile;
  clear_fragments(tile.s);
  clear_fragments(tile.dp);
#pragma unroll 1
  for (; !at.done(); at.next_tile()) {
    float sum[1][F::kColumns][4] = {};
    at.start();
    consume_terms<F>(a, g, at, turn, tile, sum);
#pragma unroll
    for (int part = 0; part < F::kParts; part++)
      store_bias_part<F>(a, g.grad_bias, at.first_b(), at.first_h(), at.q0 + F::warp_row(),
                         (int64_t)at.key_tile * F::kOthers + 64 * part, part_of(sum, part));
  }
#endif
}

template <class S, int kWidth>
const char* bias_hopper(const Attention& a, const AttentionGrad& g, const BiasPlan& plan,
                        Stream stream) {
  using F = HopperBias<S, kWidth>;
  const int64_t tiles =
      plan.batches * plan.heads * ceil_div(a.queries, F::kRows) * ceil_div(a.keys, F::kOthers);
  return launch(bias_hopper_kernel<F>, {min_of(tiles, processors()), 1}, F::kThreads,
                F::kSharedBytes, stream, a, g, plan);
}
template <class S>
const char* bias_hopper(const Attention& a, const AttentionGrad& g, const BiasPlan& plan,
                        Stream stream) {
  return max_of(a.head_dim, a.value_dim) <= 64 ? bias_hopper<S, 64>(a, g, plan, stream)
                                               : bias_hopper<S, 128>(a, g, plan, stream);
}
}  // namespace mha_ext::cuda

// Who copies the tiles of backward on GPUs of compute capability 9.0: a warpgroup, or half of one.
#pragma once
#include "backward_hopper_tiles.cuh"

namespace mha_ext::cuda {

// What one half of the producer copies, scores or values, in few registers.
struct HopperSource {
  const char* data;  // from the piece of this thread on
  int64_t head, row;
  int bytes;  // of that piece
};
template <class S, int kCopiers = kGroup>
DEVICE HopperSource source_of(const Rows& scores, const Rows& values, int head_dim, int value_dim,
                              int b, int piece) {
  const bool first = thread_id() < kCopiers / 2;
  const char* data = (const char*)(first ? scores.data : values.data);
  const int64_t batch = first ? scores.batch : values.batch;
  const int bytes = (first ? head_dim : value_dim) * 2 - piece * 16;
  return {data + b * batch * 2 + (bytes > 0 ? piece * 16 : 0),
          (first ? scores.head : values.head) * 2, (first ? scores.row : values.row) * 2,
          (int)max_of(0, min_of(16, bytes))};
}
// kRows rows into panels; zero beyond `rows` and the width.
template <int kRows, int kPanels, int kCopiers = kGroup>
DEVICE void copy_tile(Address to, const HopperSource& from, int64_t head, int64_t begin, int rows) {
  constexpr int kPieces = 8 * kPanels, kStep = kCopiers / 2 / kPieces;
  static_assert((kStep == 2 || kStep % 4 == 0) && kRows % kStep == 0);
  // How the place of the piece turns from row to row.
  const auto turn = [](int i) { return kStep == 2 ? (i % 2 ? 96 : 32) : kStep % 8 ? 64 : 0; };
  int r = thread_id() % (kCopiers / 2) / kPieces;
  const char* source = from.data + head * from.head + (begin + r) * from.row;
  to += paneled<kRows>(r, thread_id() % kPieces);
#pragma unroll 2
  for (int i = 0; i < kRows / kStep; i++) {
    // A row that does not exist is not read, but its address must be one.
    copy_async<16>(to, r < rows ? source : from.data, r < rows ? from.bytes : 0);
    r += kStep;
    source += kStep * from.row;
    to = (to + kStep * kPanelBytes) ^ turn(i);
  }
}

// The producer's side: what the block owns, then one tile after the other.
template <class F>
DEVICE void produce_others(const Attention& a, const AttentionGrad& g, HopperPlace at,
                           typename F::At& turn) {
  using S = typename F::S;
  using Tiles = typename F::Tiles;
  constexpr bool kKeys = F::kOwnsKeys;
  if (at.done()) return;
  const int thread = thread_id(), piece = thread % (8 * F::kPanels);
  const bool first = thread < F::kCopiers / 2;
  {
    const HopperSource own =
        source_of<S, F::kCopiers>(kKeys ? a.key : a.query, kKeys ? a.value : g.grad_out,
                                  (int)a.head_dim, (int)a.value_dim, at.b, piece);
    const int64_t own0 = (int64_t)at.own * 16;
    F::Own::wait_free(turn.own);
    copy_tile<F::kRows, F::kPanels, F::kCopiers>(
        first ? F::own_scores(turn) : F::own_values(turn), own, kKeys ? kv_head(a, at.h) : at.h,
        own0, (int)min_of(F::kRows, (kKeys ? a.keys : a.queries) - own0));
  }
  const HopperSource others =
      source_of<S, F::kCopiers>(kKeys ? a.query : a.key, kKeys ? g.grad_out : a.value,
                                (int)a.head_dim, (int)a.value_dim, at.b, piece);
  typename F::At before = turn;
#pragma unroll 1
  for (bool later = false; !at.done(); at.next<F>(a), later = true) {
    const int64_t other0 = (int64_t)at.tile * F::kOthers;
    const int rows = (int)min_of(F::kOthers, (kKeys ? a.queries : a.keys) - other0);
    [[maybe_unused]] QueryNumbers raw = {-INFINITY, 0, 0};
    const auto load_numbers = [&] {
      if (thread < rows && thread < 64)
        raw = numbers_at(a, g, (at.b * a.heads + at.h) * a.queries + other0 + thread);
    };
    // They are on their way while rows are copied; beside a bias registers are too scarce.
    if constexpr (kKeys && !F::kBias) load_numbers();
    Tiles::wait_free(turn);
    copy_tile<F::kOthers, F::kPanels, F::kCopiers>(
        first ? F::score_tile(turn) : F::value_tile(turn), others, kKeys ? at.h : kv_head(a, at.h),
        other0, rows);
    if constexpr (F::kBias) {
      const int own0 = at.own * 16 + (first ? 0 : 64);
      copy_bias(a, at.b, at.h, kKeys ? other0 : own0, kKeys ? own0 : other0,
                F::bias_tile(turn) + (Address)(first ? 0 : 64 * kPanelBytes));
    }
    copy_commit();
    if (later) {
      copy_wait<1>();
      Tiles::filled(before);
    }
    if constexpr (kKeys && F::kBias) load_numbers();
    if constexpr (kKeys)
      if (thread < 64) {
        const HopperNumbers numbers = hopper_numbers(raw);
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
  turn.own.next();
}

}  // namespace mha_ext::cuda

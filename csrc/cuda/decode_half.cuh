// Forward of few queries for 16-bit types, where the time is that of reading the keys and values:
// each is read once for all heads that share it, and many bytes are under way.
// A block owns a part of the keys and 16 kFragments rows: the queries of those heads, head by head.
// Its warps take tiles of keys in turn, with copies of their own, and add up their sums at the end.
#pragma once
#include "decode_pairs.cuh"
#include "forward_half.cuh"

namespace mha_ext::cuda {

template <class S_, int kWidth_, int kFragments_>
struct HalfDecode {
  using S = S_;
  static constexpr int kWidth = kWidth_, kFragments = kFragments_;
  // Each warp has three places for tiles. One is that of the queries at first; wide ones stay
  // there, since they would take too many registers.
  static constexpr bool kQueriesStay = kWidth * kFragments > 128;
  static constexpr int kKeys = kWidth <= 64 ? 32 : 16, kPlaces = 3;
  static constexpr int kStages = kQueriesStay ? kPlaces - 1 : kPlaces;
  static constexpr int kHeld = kQueriesStay ? 1 : kWidth / 16;  // fragments of the queries
  // Small blocks: while one begins or ends, others of the multiprocessor keep the memory busy.
  static constexpr int kWarps = kWidth <= 128 ? 2 : 1, kThreads = kWarps * kWarp;
  static constexpr int kStep = kWarps * kKeys;
  static constexpr int kRows = 16 * kFragments, kColumns = kKeys / 8, kSteps = kKeys / 16;
  static constexpr int kRowBytes = 2 * kWidth, kTileBytes = kKeys * kRowBytes;
  static constexpr uint32_t kAllBits = ((1u << 2 * kColumns) - 1) * 0x10001u;
  DEVICE_MEMBER static Address key_tile(int stage) {
    return (Address)((stage * kWarps + warp_id()) * 2 * kTileBytes);
  }
  // At the end: the sums of each warp, in rows of kSumBytes, and their levels and l.
  static constexpr int kSumBytes = 4 * (kWidth + 8);
  DEVICE_MEMBER static Address sum_row(int warp, int r) {
    return (Address)((warp * kRows + r) * kSumBytes);
  }
  DEVICE_MEMBER static Address level_of(int warp, int r) {
    return (Address)(kWarps * kRows * kSumBytes + (warp * kRows + r) * 8);
  }
  static constexpr int shared_bytes(bool few_keys) {
    const int tiles = (few_keys ? 2 : kPlaces) * kWarps * 2 * kTileBytes;
    const int sums = kWarps * kRows * (kSumBytes + 8);
    return tiles > sums ? tiles : sums;
  }
};

struct alignas(8) FloatPair {
  float x, y;
};

// One tile of keys of one warp; `whole`: all its pairs are visible.
template <class F>
DEVICE void decode_tile(const Attention& a, const DecodePlace& place,
                        const uint32_t (&q)[F::kHeld][F::kFragments][4], Address queries,
                        Address tile, int64_t k0, bool whole, RowState<F>& rows) {
  using S = typename F::S;
  const int lane = lane_id();
  uint32_t visible[F::kFragments];
#pragma unroll
  for (int m = 0; m < F::kFragments; m++) visible[m] = F::kAllBits;
  bool partial = false;
  if (!whole) {
    decode_visible<F>(a, place, k0, visible);
    bool some = false;
#pragma unroll
    for (int m = 0; m < F::kFragments; m++) {
      some |= visible[m] != 0;
      partial |= visible[m] != F::kAllBits;
    }
    if (!ballot(some)) return;
    partial = ballot(partial) != 0;
  }

  float s[F::kFragments][F::kColumns][4];
  clear_fragments(s);
  const Address keys = tile + swizzled<F::kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < F::kWidth / 16; k++) {
    if (F::kQueriesStay && k * 16 >= (int)a.head_dim) break;
    uint32_t x[F::kFragments][4];
#pragma unroll
    for (int m = 0; m < F::kFragments; m++) {
      if constexpr (F::kQueriesStay)
        load_matrices(x[m], stepped(queries, k) + 16 * m * F::kRowBytes);
      else
        for (int i = 0; i < 4; i++) x[m][i] = q[k][m][i];
    }
#pragma unroll
    for (int j = 0; j < F::kColumns; j += 2) {
      uint32_t y[4];
      load_matrices(y, stepped(keys, k) + 8 * j * F::kRowBytes);
#pragma unroll
      for (int m = 0; m < F::kFragments; m++) {
        multiply_add(S{}, s[m][j], x[m], y[0], y[1]);
        multiply_add(S{}, s[m][j + 1], x[m], y[2], y[3]);
      }
    }
  }
  scale_fragments((float)a.scale, s);
  if (a.bias.data) partial |= ballot(decode_bias<F>(a, place, k0, s, visible)) != 0;
  if (partial) select_tile<F>(visible, -INFINITY, s);
  rescale<F>(softmax_tile<F>(1, s, rows), rows);
  if (a.dropout.seed) {
    uint32_t kept[F::kFragments];
#pragma unroll
    for (int m = 0; m < F::kFragments; m++) {
      kept[m] = 0;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const DecodeRow row = lane_row(a, place, m, half);
        const uint64_t word = kept_word(a, place.b, row.h, row.i, k0, F::kKeys);
        kept[m] |= pairs_of_bytes(word >> lane % 4 * 2) << 16 * half;
      }
    }
    select_tile<F>(kept, 0, s);
  }

  uint32_t p[F::kFragments][F::kSteps][4];
  round_fragments<S>(s, p);
  const Address values = tile + F::kTileBytes;
  const int columns = (int)a.value_dim;
  if (!partial) {
    // Without branches; columns beyond value_dim go nowhere.
    multiply_across<S, F::kRowBytes, false>(p, values, F::kQueriesStay ? columns : F::kWidth,
                                            rows.out);
    return;
  }
  // Hidden pairs have P = 0, but 0 * NaN is NaN.
  const bool dirty = multiply_across<S, F::kRowBytes, true>(p, values, columns, rows.out);
  if (ballot(dirty)) add_nonfinite<S, F::kRowBytes, false>(p, visible, values, columns, rows.out);
}

// The rows of a block as left operands of all products; each warp has a copy of its own at `to`.
template <class F>
DEVICE void copy_decode_rows(const Attention& a, const DecodePlace& place, Address to) {
  using S = typename F::S;
  constexpr int kPieces = F::kRowBytes / 16;
  const HeadRows rows = head_rows<S>(a.query, place.b, 0);
  const int64_t head = a.query.head * (int64_t)sizeof(S);
  const int piece = (int)min_of(rows.piece, head % 16 == 0 ? 16 : head % 4 == 0 ? 4 : 2);
  const int bytes = (int)a.head_dim * 2, p = lane_id() % kPieces;
  if (p * 16 >= (bytes + 31) / 32 * 32) return;
  const int valid = (int)max_of(0, min_of(16, bytes - p * 16));
#pragma unroll 1
  for (int r = lane_id() / kPieces; r < place.rows; r += kWarp / kPieces) {
    const DecodeRow row = decode_row(a, place, r);
    const char* from = rows.first + row.h * head + row.i * rows.stride + (valid ? p * 16 : 0);
    copy_piece(to + swizzled<F::kRowBytes>(r, p), from, valid, piece);
  }
}

// Products go over all columns: those beyond the heads' are zero in the queries and the keys, and
// no copy touches them.
template <class F>
DEVICE void clear_columns(const Attention& a, Address tile, int rows) {
  constexpr int kPieces = F::kRowBytes / 16;
  const int first = (int)ceil_div(a.head_dim, 16) * 2;
  if (first == kPieces) return;
#pragma unroll 1
  for (int at = lane_id(); at < rows * kPieces; at += kWarp)
    if (at % kPieces >= first)
      store_shared(tile + swizzled<F::kRowBytes>(at / kPieces, at % kPieces), Bytes16{});
}

// Adds up what the warps have, in their order, and gives it to where it belongs.
template <class F>
DEVICE void merge_warps(const Attention& a, const DecodePlace& place, int64_t part,
                        const KeyParts& parts, const PartialSums<float>& sums, RowState<F>& rows) {
  using S = typename F::S;
  const int lane = lane_id();
  add_lanes<F>(rows);
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Address at = F::level_of(warp_id(), 16 * m + 8 * half + lane / 4);
      if (lane % 4 == 0) store_shared(at, rows.level[m][half]);
      if (lane % 4 == 1) store_shared(at + 4, rows.l[m][half]);
    }
  sync_block();
  const int64_t group = place.b * a.kv_heads + place.kv;
  const int64_t all_rows = a.heads / a.kv_heads * a.queries;
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = 16 * m + 8 * half + lane / 4;
      float level = -INFINITY, l = 0;
#pragma unroll
      for (int w = 0; w < F::kWarps; w++)
        if (load_shared<float>(F::level_of(w, r) + 4) != 0)
          level = fmaxf(level, load_shared<float>(F::level_of(w, r)));
    // A warp that has seen nothing has l = 0; -inf - -inf would be NaN.
#pragma unroll
      for (int w = 0; w < F::kWarps; w++) {
        const float other = load_shared<float>(F::level_of(w, r) + 4);
        if (other != 0)
          l += other * Softmax<S>::power(load_shared<float>(F::level_of(w, r)) - level);
      }
      float factor = 0;
      if (rows.l[m][half] != 0) factor = Softmax<S>::power(rows.level[m][half] - level);
      const bool stores = warp_id() == 0 && lane % 4 == 0 && r < place.rows;
      if (parts.count == 1) {
        factor = l != 0 ? factor * ((float)a.dropout.keep_scale / l) : 0;
        if (stores) store_lse(a, group * all_rows + place.row0 + r, level, l);
      } else if (stores) {
        float* to = sums.rows + ((group * parts.count + part) * all_rows + place.row0 + r) * 2;
        to[0] = level;
        to[1] = l;
      }
      if (16 * m + 8 * half >= place.rows) continue;
#pragma unroll
      for (int n = 0; n < F::kWidth / 8; n++) {
        const Address to = F::sum_row(warp_id(), r) + 4 * (8 * n + lane % 4 * 2);
        store_shared(to, FloatPair{rows.out[m][n][2 * half] * factor,
                                   rows.out[m][n][2 * half + 1] * factor});
      }
    }
  sync_block();
  const int columns = (int)a.value_dim;
#pragma unroll 1
  for (int r = warp_id(); r < place.rows; r += F::kWarps) {
    const DecodeRow row = decode_row(a, place, r);
    S* out = (S*)a.out.data + place.b * a.out.batch + row.h * a.out.head + row.i * a.out.row;
    float* to = sums.out + ((group * parts.count + part) * all_rows + place.row0 + r) * columns;
#pragma unroll
    for (int n = 0; n < F::kWidth / kWarp; n++) {
      const int d = n * kWarp + lane;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < F::kWarps; w++) sum += load_shared<float>(F::sum_row(w, r) + 4 * d);
      if (d >= columns) break;
      if (parts.count == 1)
        narrow(sum, out + d);
      else
        to[d] = sum;
    }
  }
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 4)
    decode_half_kernel(const GRID_CONSTANT Attention a, const PartialSums<float> sums,
                       const KeyParts parts) {
  using S = typename F::S;
  const int64_t group = grid_row();
  if (group >= a.batch * a.kv_heads) return;
  const int64_t all_rows = a.heads / a.kv_heads * a.queries;
  const int blocks = (int)ceil_div(all_rows, F::kRows);  // of rows
  const int64_t part = blockIdx.x / blocks;
  DecodePlace place;
  place.b = group / a.kv_heads;
  place.kv = group % a.kv_heads;
  place.row0 = (int)(blockIdx.x % blocks) * F::kRows;
  place.rows = (int)min_of(F::kRows, all_rows - place.row0);

  const Range any = seen_by_any(a, place.b, 0, a.queries - 1);
  const Range all = seen_by_all(a, place.b, 0, a.queries - 1);
  const int64_t begin = max_of(any.begin, part * parts.size) / F::kKeys * F::kKeys;
  // The band of a query may begin after the last key.
  const int64_t last = min_of(key_count(a, place.b), (part + 1) * parts.size);
  const int64_t end = min_of(any.end, last);
  if (end <= begin && parts.count > 1) {  // nothing is seen here
    float* to = sums.rows + ((group * parts.count + part) * all_rows + place.row0) * 2;
    if (thread_id() < 2 * place.rows) to[thread_id()] = thread_id() % 2 ? 0 : -INFINITY;
    return;
  }
  const HeadRows keys = head_rows<S>(a.key, place.b, place.kv);
  const HeadRows values = head_rows<S>(a.value, place.b, place.kv);
  const auto fetch = [&](int64_t k0, int stage) {
    if (k0 < end) {
      const int count = (int)min_of(F::kKeys, end - k0);
      const Address tile = F::key_tile(stage);
      copy_rows<F::kKeys, F::kRowBytes, kWarp>(tile, keys, k0, count, (int)a.head_dim * 2,
                                               lane_id());
      copy_rows<F::kKeys, F::kRowBytes, kWarp>(tile + F::kTileBytes, values, k0, count,
                                               (int)a.value_dim * 2, lane_id());
      prefetch_pairs<F>(a.mask, a, place, k0);
      prefetch_pairs<F>(a.bias, a, place, k0);
    }
    copy_commit();
  };
  // Few keys have only two places, of which they take one.
  Address queries = F::key_tile(a.keys <= F::kStep ? 1 : F::kPlaces - 1);
  clear_columns<F>(a, F::key_tile(0), F::kKeys);
  if (a.keys > F::kStep) clear_columns<F>(a, F::key_tile(1), F::kKeys);
  clear_columns<F>(a, queries, F::kRows > F::kKeys ? F::kRows : F::kKeys);
  copy_decode_rows<F>(a, place, queries);
  copy_commit();
  int64_t k0 = begin + warp_id() * F::kKeys;
#pragma unroll
  for (int stage = 0; stage < F::kStages - 1; stage++) fetch(k0 + stage * F::kStep, stage);
  copy_wait<F::kStages - 1>();
  sync_warp();
  queries += swizzled<F::kRowBytes>(lane_id() % 16, lane_id() / 16);
  uint32_t q[F::kHeld][F::kFragments][4];
  if constexpr (!F::kQueriesStay) {
#pragma unroll
    for (int k = 0; k < F::kHeld; k++)
#pragma unroll
      for (int m = 0; m < F::kFragments; m++)
        load_matrices(q[k][m], stepped(queries, k) + 16 * m * F::kRowBytes);
  }

  RowState<F> rows;
  clear_rows<F>(rows);
#pragma unroll 1
  for (int stage = 0; k0 < end; k0 += F::kStep) {
    sync_warp();  // the tile before, or the queries, have been read
    fetch(k0 + (F::kStages - 1) * F::kStep, stage == 0 ? F::kStages - 1 : stage - 1);
    copy_wait<F::kStages - 1>();
    sync_warp();
    const bool whole = !a.mask.data && k0 >= all.begin && k0 + F::kKeys <= all.end;
    decode_tile<F>(a, place, q, queries, F::key_tile(stage), k0, whole, rows);
    stage = stage == F::kStages - 1 ? 0 : stage + 1;
  }
  copy_wait<0>();
  sync_block();
  merge_warps<F>(a, place, part, parts, sums, rows);
}

template <class S, int kWidth, int kFragments>
const char* decode_half(const Attention& a, void* scratch, Stream stream) {
  using F = HalfDecode<S, kWidth, kFragments>;
  const KeyParts parts = key_parts(a);
  const PartialSums<float> sums = partial_sums<float>(a, scratch);
  const int64_t rows = a.heads / a.kv_heads * a.queries;
  const char* error =
      launch(decode_half_kernel<F>, {ceil_div(rows, F::kRows) * parts.count, a.batch * a.kv_heads},
             F::kThreads, F::shared_bytes(a.keys <= F::kStep), stream, a, sums, parts);
  return error ? error : finish_rows<S>(a, sums, parts, rows, stream);
}

template <class S>
const char* decode_widths(const Attention& a, void* scratch, Stream stream) {
  if (a.heads == 0) return nullptr;
  const int64_t width = max_of(a.head_dim, a.value_dim);
  const bool few = a.heads / a.kv_heads * a.queries <= 16;
  if (width <= 64)
    return few ? decode_half<S, 64, 1>(a, scratch, stream)
               : decode_half<S, 64, 2>(a, scratch, stream);
  if (width <= 128)
    return few ? decode_half<S, 128, 1>(a, scratch, stream)
               : decode_half<S, 128, 2>(a, scratch, stream);
  return decode_half<S, 256, 1>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

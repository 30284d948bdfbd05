// Forward for float32 and float64.
//   S = scale Q K^T + bias,  P = exp(S - level),  O = sum P V / l,  lse = level + log l
#pragma once
#include "forward.cuh"
#include "wide.cuh"

namespace mha_ext::cuda {

template <class F>
struct WideRows {
  using T = typename F::T;
  T out[F::kChunks][4][4];
  T level[4], l[4];
};

// S -> P, in registers; hidden pairs are 0.
template <class F>
DEVICE void wide_softmax(bool partial, typename F::T (&s)[4][4], WideRows<F>& rows) {
  using T = typename F::T;
  const int y = thread_id() / 16, x = thread_id() % 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (partial) {
      const uint64_t word = load_shared<uint64_t>(F::kWords + 8 * (4 * y + i)) >> x;
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (!(word >> (16 * j) & 1)) s[i][j] = -(T)INFINITY;
    }
    T top = fmax(fmax(s[i][0], s[i][1]), fmax(s[i][2], s[i][3]));
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) top = fmax(top, shuffle_xor(top, lanes));
    const T old = rows.level[i];
    if (top > old + 5) {
      const T factor = Softmax<T>::power(old - top);
      rows.level[i] = top;
      rows.l[i] *= factor;
#pragma unroll
      for (int c = 0; c < F::kChunks; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) rows.out[c][i][e] *= factor;
    }
    const T level = rows.level[i] == -(T)INFINITY ? (T)0 : rows.level[i];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      s[i][j] = Softmax<T>::power(s[i][j] - level);
      rows.l[i] += s[i][j];
    }
  }
}

// Pairs that dropout drops are 0.
template <class F>
DEVICE void drop(const Attention& a, typename F::T (&p)[4][4]) {
  const int y = thread_id() / 16, x = thread_id() % 16;
  if (!a.dropout.seed) return;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint64_t kept = load_shared<uint64_t>(F::kWords + 8 * (64 + 4 * y + i)) >> x;
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (!(kept >> (16 * j) & 1)) p[i][j] = 0;
  }
}

template <class F>
DEVICE void store_wide(const Attention& a, const Place& place, const WideRows<F>& rows) {
  using T = typename F::T;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t q = place.q0 + thread_id() / 16 * 4 + i;
    if (q >= a.queries) continue;
    const T l = rows.l[i], factor = l != 0 ? (T)a.dropout.keep_scale / l : (T)0;
    T* out = (T*)a.out.data + place.b * a.out.batch + place.h * a.out.head + q * a.out.row;
    store_out_row<F>(out, 0, (int)a.value_dim, factor, i, rows.out);
  }
}
template <class F>
DEVICE void store_wide_part(const Attention& a, const Place& place, int64_t first,
                            const PartialSums<typename F::T>& sums, const WideRows<F>& rows) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t q = place.q0 + thread_id() / 16 * 4 + i;
    if (q >= a.queries) continue;
#pragma unroll
    for (int c = 0; c < F::kChunks; c++)
#pragma unroll
      for (int f = 0; f < 4; f++)
        if (out_column<F>(c, f) < a.value_dim)
          sums.out[(first + q) * a.value_dim + out_column<F>(c, f)] = rows.out[c][i][f];
    if (thread_id() % 16 == 0) {
      sums.rows[(first + q) * 2] = rows.level[i];
      sums.rows[(first + q) * 2 + 1] = rows.l[i];
    }
  }
}

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    forward_wide_kernel(const GRID_CONSTANT Attention a, const PartialSums<typename F::T> sums,
                        const KeyParts parts) {
  using T = typename F::T;
  const int64_t row = grid_row();
  if (row >= a.batch * a.heads) return;
  const Place place = place_of(a, row, F::kRows, parts.count);
  const int64_t block_rows = min_of(F::kRows, a.queries - place.q0);
  const Range any = seen_by_any(a, place.b, place.q0, place.q0 + block_rows - 1);
  const int64_t begin = max_of(any.begin, place.part * parts.size) / F::kKeys * F::kKeys;
  const int64_t end = min_of(any.end, (place.part + 1) * parts.size);

  WideRows<F> rows = {};
#pragma unroll
  for (int i = 0; i < 4; i++) rows.level[i] = -(T)INFINITY;
  for (int64_t k0 = begin; k0 < end; k0 += F::kKeys) {
    sync_block();  // the words have been read
    const TilePlace at{place.b, place.h, place.kv, place.q0, k0};
    const Visibility visible = tile_words<F>(a, at);
    if (visible == Visibility::kEmpty) continue;
    if (a.dropout.seed) tile_kept<F>(a, at);
    T s[4][4] = {};
    add_products<F>(tile_rows<T>(a.query, at.b, at.h, at.q0, a.queries),
                    tile_rows<T>(a.key, at.b, at.kv, k0, a.keys), (int)a.head_dim, s);
    scale_and_bias<F, false>(a, at, s);
    wide_softmax<F>(visible == Visibility::kPartial, s, rows);
    sync_block();
    drop<F>(a, s);
    store_pairs<F>(s);
    add_weighted<F, false>(tile_rows<T>(a.value, at.b, at.kv, k0, a.keys), 0, (int)a.value_dim,
                           visible == Visibility::kPartial, rows.out);
  }

#pragma unroll
  for (int i = 0; i < 4; i++) {
    T& l = rows.l[i];
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) l += shuffle_xor(l, lanes);
    const int64_t q = place.q0 + thread_id() / 16 * 4 + i;
    if (parts.count == 1 && q < a.queries && thread_id() % 16 == 0)
      store_lse(a, row * a.queries + q, rows.level[i], l);
  }
  if (parts.count == 1)
    store_wide<F>(a, place, rows);
  else
    store_wide_part<F>(a, place, (row * parts.count + place.part) * a.queries, sums, rows);
}

template <class T, int kWidth>
const char* forward_wide(const Attention& a, void* scratch, Stream stream) {
  using F = Wide<T, kWidth>;
  const KeyParts parts = key_parts(a);
  const PartialSums<T> sums = partial_sums<T>(a, scratch);
  const int64_t tiles = ceil_div(a.queries, F::kRows);
  const char* error = launch(forward_wide_kernel<F>, {tiles * parts.count, a.batch * a.heads},
                             F::kThreads, F::kSharedBytes, stream, a, sums, parts);
  return error ? error : finish_rows<T>(a, sums, parts, a.queries, stream);
}

}  // namespace mha_ext::cuda

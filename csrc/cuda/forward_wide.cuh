// Forward for float32 and float64, in multiply-adds of the type itself. 256 threads hold a tile of
// 64 queries and 64 keys, 4 x 4 of it each: thread (y, x) = (id / 16, id % 16) has queries 4 y + i
// and keys x + 16 j. Products go through shared memory in pieces of the width; a piece of a sum is
// added up on its own.
//   S = scale Q K^T + bias,  P = exp(S - level),  O = sum P V / l,  lse = level + log l
#pragma once
#include "forward.cuh"

namespace mha_ext::cuda {

template <class T_, int kWidth_>
struct WideForward {
  using T = T_;
  static constexpr int kThreads = 256, kRows = 64, kKeys = 64;
  static constexpr int kWidth = kWidth_, kChunks = kWidth / 64;  // of 64 columns of the output
  static constexpr int kVector = 16 / (int)sizeof(T);            // numbers in 16 bytes
  static constexpr int kPiece = 32;                              // of the sum over the width
  // Rows are one vector apart from a multiple of 128 bytes: different rows, different banks.
  static constexpr int kPieceStride = (kPiece + kVector) * (int)sizeof(T);
  static constexpr int kTileStride = (64 + kVector) * (int)sizeof(T);
  static constexpr Address kQuery = 0, kKey = 64 * kPieceStride;  // [64][kPiece]
  static constexpr Address kValue = 0;                            // [64 keys][64 columns]
  static constexpr Address kWeights = 64 * kTileStride;           // [64 queries][64 keys]
  static constexpr Address kWords = 2 * 64 * kTileStride;         // visible, then kept
  static constexpr int kSharedBytes = kWords + 2 * 64 * 8;
  static_assert(2 * kPieceStride <= 2 * kTileStride);
};

template <class T>
struct Vector {
  static constexpr int kCount = 16 / (int)sizeof(T);
  alignas(16) T at[kCount];
};

// Columns [c0, c0 + kColumns) of 64 rows, zero outside of the tensor. Whether all are finite.
template <class T, int kColumns, int kStride>
DEVICE bool load_tile(Address to, const Rows& from, int64_t b, int64_t h, int64_t r0, int64_t rows,
                      int64_t c0, int64_t columns) {
  const T* first = (const T*)from.data + b * from.batch + h * from.head + c0;
  bool finite = true;
#pragma unroll 4
  for (int i = thread_id(); i < 64 * kColumns; i += 256) {
    const int r = i / kColumns, c = i % kColumns;
    T value = 0;
    if (r0 + r < rows && c0 + c < columns) value = first[(r0 + r) * from.row + c];
    finite &= value - value == 0;
    store_shared(to + (Address)(r * kStride + c * (int)sizeof(T)), value);
  }
  return finite;
}

template <class F>
struct WideRows {
  using T = typename F::T;
  T out[F::kChunks][4][4];
  T level[4], l[4];
};

// The words of all rows of a tile, by 256 threads: four to a row. kEmpty: nothing is visible.
template <class F>
DEVICE Visibility tile_words(const Attention& a, const Place& place, int64_t rows, int64_t k0) {
  const int r = thread_id() / 4;
  const int64_t i = place.q0 + r;
  uint64_t word = 0;
  const int64_t keys = min_of(F::kKeys, a.keys - k0);
  if (r < rows && thread_id() % 4 == 0) {
    word = row_visibility(a, place.b, place.h, i, k0, keys);
    if (a.bias.data) {
      const int64_t at = bias_index(a, place.b, place.h, i, k0);
      for (int j = 0; j < keys; j++)
        if (read_bias(a, typename F::T{}, at + j * a.bias.key) == -(typename F::T)INFINITY)
          word &= ~(1ull << j);
    }
  }
  if (thread_id() % 4 == 0) store_shared(F::kWords + 8 * r, word);
  const bool every = thread_id() % 4 || r >= rows || word == first_bits(F::kKeys);
  if (!sync_block_or(word != 0)) return Visibility::kEmpty;
  return sync_block_or(!every) ? Visibility::kPartial : Visibility::kFull;
}
template <class F>
DEVICE void tile_kept(const Attention& a, const Place& place, int64_t k0) {
  const int r = thread_id() / 4;
  const uint64_t word = kept_word(a, place.b, place.h, place.q0 + r, k0, F::kKeys);
  if (thread_id() % 4 == 0) store_shared(F::kWords + 64 * 8 + 8 * r, word);
}

template <class F>
DEVICE void wide_scores(const Attention& a, const Place& place, int64_t k0,
                        typename F::T (&s)[4][4]) {
  using T = typename F::T;
  const int y = thread_id() / 16, x = thread_id() % 16;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) s[i][j] = 0;
  for (int64_t d0 = 0; d0 < a.head_dim; d0 += F::kPiece) {
    sync_block();  // what stood there has been read
    load_tile<T, F::kPiece, F::kPieceStride>(F::kQuery, a.query, place.b, place.h, place.q0,
                                             a.queries, d0, a.head_dim);
    load_tile<T, F::kPiece, F::kPieceStride>(F::kKey, a.key, place.b, place.kv, k0, a.keys, d0,
                                             a.head_dim);
    sync_block();
    T piece[4][4] = {};
#pragma unroll 1
    for (int d = 0; d < F::kPiece; d += F::kVector) {
      Vector<T> q[4], k[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int column = d * (int)sizeof(T);
        q[i] = load_shared<Vector<T>>(F::kQuery + (4 * y + i) * F::kPieceStride + column);
        k[i] = load_shared<Vector<T>>(F::kKey + (x + 16 * i) * F::kPieceStride + column);
      }
#pragma unroll
      for (int v = 0; v < F::kVector; v++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) piece[i][j] = fma(q[i].at[v], k[j].at[v], piece[i][j]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) s[i][j] += piece[i][j];
  }
  const T scale = (T)a.scale;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      s[i][j] *= scale;
      const int64_t q = place.q0 + 4 * y + i, k = k0 + x + 16 * j;
      if (a.bias.data && q < a.queries && k < a.keys)
        s[i][j] = add_bias(s[i][j], read_bias(a, T{}, bias_index(a, place.b, place.h, q, k)));
    }
}

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

// out += P V. select: a product with a hidden pair is left out, for 0 * NaN is NaN.
template <class F>
DEVICE void wide_values(const Attention& a, const Place& place, int64_t k0, bool partial,
                        WideRows<F>& rows) {
  using T = typename F::T;
  const int y = thread_id() / 16, x = thread_id() % 16;
#pragma unroll
  for (int c = 0; c < F::kChunks; c++) {
    if (c * 64 >= a.value_dim) break;
    sync_block();
    const bool finite = load_tile<T, 64, F::kTileStride>(F::kValue, a.value, place.b, place.kv, k0,
                                                         a.keys, c * 64, a.value_dim);
    const bool select = sync_block_or(!finite) && partial;
#pragma unroll 1
    for (int n = 0; n < F::kKeys; n += F::kVector) {
      Vector<T> p[4], v[4];  // v: vector f of the row of key n + e stands in v[f + e 4 / kVector]
#pragma unroll
      for (int i = 0; i < 4; i++)
        p[i] =
            load_shared<Vector<T>>(F::kWeights + (4 * y + i) * F::kTileStride + n * (int)sizeof(T));
#pragma unroll
      for (int e = 0; e < F::kVector; e++) {
#pragma unroll
        for (int f = 0; f < 4 / F::kVector; f++)
          v[f] = load_shared<Vector<T>>(F::kValue + (n + e) * F::kTileStride + (f * 16 + x) * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          bool seen = true;
          if (select) seen = load_shared<uint64_t>(F::kWords + 8 * (4 * y + i)) >> (n + e) & 1;
          if (seen) {
#pragma unroll
            for (int f = 0; f < 4; f++)
              rows.out[c][i][f] =
                  fma(p[i].at[e], v[f / F::kVector].at[f % F::kVector], rows.out[c][i][f]);
          }
        }
      }
    }
  }
}

// P of this thread, those that dropout drops as 0, to where wide_values reads it.
template <class F>
DEVICE void store_weights(const Attention& a, const typename F::T (&p)[4][4]) {
  using T = typename F::T;
  const int y = thread_id() / 16, x = thread_id() % 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint64_t kept = ~0ull;
    if (a.dropout.seed) kept = load_shared<uint64_t>(F::kWords + 8 * (64 + 4 * y + i)) >> x;
#pragma unroll
    for (int j = 0; j < 4; j++)
      store_shared(
          F::kWeights + (Address)((4 * y + i) * F::kTileStride + (x + 16 * j) * (int)sizeof(T)),
          kept >> (16 * j) & 1 ? p[i][j] : (T)0);
  }
}

// The column of out that element f of chunk c of this thread is.
template <class F>
DEVICE int64_t out_column(int c, int f) {
  return c * 64 + (f / F::kVector * 16 + thread_id() % 16) * F::kVector + f % F::kVector;
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
#pragma unroll
    for (int c = 0; c < F::kChunks; c++)
#pragma unroll
      for (int f = 0; f < 4; f++)
        if (out_column<F>(c, f) < a.value_dim)
          out[out_column<F>(c, f)] = rows.out[c][i][f] * factor;
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
__global__ void LAUNCH_BOUNDS(F::kThreads)
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
    const Visibility visible = tile_words<F>(a, place, block_rows, k0);
    if (visible == Visibility::kEmpty) continue;
    if (a.dropout.seed) tile_kept<F>(a, place, k0);
    T s[4][4];
    wide_scores<F>(a, place, k0, s);
    wide_softmax<F>(visible == Visibility::kPartial, s, rows);
    sync_block();
    store_weights<F>(a, s);
    wide_values<F>(a, place, k0, visible == Visibility::kPartial, rows);
  }

#pragma unroll
  for (int i = 0; i < 4; i++) {
    T& l = rows.l[i];
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) l += shuffle_xor(l, lanes);
    const int64_t q = place.q0 + thread_id() / 16 * 4 + i;
    if (parts.count == 1 && q < a.queries && thread_id() % 16 == 0)
      store_lse<T>(a, row * a.queries + q, rows.level[i], l);
  }
  if (parts.count == 1)
    store_wide<F>(a, place, rows);
  else
    store_wide_part<F>(a, place, (row * parts.count + place.part) * a.queries, sums, rows);
}

template <class T, int kWidth>
const char* forward_wide(const Attention& a, void* scratch, Stream stream) {
  using F = WideForward<T, kWidth>;
  const KeyParts parts = key_parts(a);
  const PartialSums<T> sums = partial_sums<T>(a, scratch);
  const int64_t tiles = ceil_div(a.queries, F::kRows);
  const char* error = launch(forward_wide_kernel<F>, {tiles * parts.count, a.batch * a.heads},
                             F::kThreads, F::kSharedBytes, stream, a, sums, parts);
  return error ? error : finish_rows<T>(a, sums, parts, stream);
}

}  // namespace mha_ext::cuda

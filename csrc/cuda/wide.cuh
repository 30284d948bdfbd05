// What the kernels without tensor cores share: 256 threads hold a tile of 64 x 64 pairs, 4 x 4 of
// it each: thread (y, x) = (id / 16, id % 16) has rows 4 y + i and columns x + 16 j. Rows are
// queries and columns keys, or, with kOwnsKeys, the other way round. Products go through shared
// memory in multiply-adds of the type T that storage type S is summed in.
#pragma once
#include "softmax.cuh"

namespace mha_ext::cuda {

template <class S_, int kWidth_>
struct Wide {
  using S = S_;
  using T = typename Softmax<S>::T;
  static constexpr int kThreads = 256, kRows = 64, kKeys = 64;
  static constexpr int kWidth = kWidth_, kChunks = kWidth / 64;  // columns of the output, by 64
  static constexpr int kVector = 16 / (int)sizeof(T);            // numbers in 16 bytes
  static constexpr int kPiece = 32;                              // of a sum over the width
  // Rows are one vector apart from a multiple of 128 bytes: different rows, different banks.
  static constexpr int kPieceStride = (kPiece + kVector) * (int)sizeof(T);
  static constexpr int kTileStride = (64 + kVector) * (int)sizeof(T);
  static constexpr Address kLeft = 0, kRight = 64 * kPieceStride;  // [64][kPiece]
  static constexpr Address kFactors = 0;                           // [64 columns of pairs][64]
  static constexpr Address kPairs = 64 * kTileStride;              // [64 rows][64 columns]
  static constexpr Address kWords = 2 * 64 * kTileStride;          // visible, then kept
  static constexpr int kSharedBytes = kWords + 2 * 64 * 8;
  static_assert(2 * kPieceStride <= 2 * kTileStride);
};

template <class T>
struct Vector {
  static constexpr int kCount = 16 / (int)sizeof(T);
  alignas(16) T at[kCount];
};

// Rows [begin, begin + 64) of a head; those from `end` on are zero. The address is computed where
// it is needed: registers are scarce.
template <class S>
struct TileRows {
  const Rows& rows;
  int64_t b, h, begin, end;
};
template <class S>
DEVICE TileRows<S> tile_rows(const Rows& rows, int64_t b, int64_t h, int64_t begin, int64_t end) {
  return {rows, b, h, begin, end};
}

// Columns [c0, c0 + kColumns) of 64 rows, zero outside of the tensor. Whether all are finite.
template <class T, int kColumns, int kStride, class S>
DEVICE bool load_tile(Address to, const TileRows<S>& from, int c0, int columns) {
  const S* first = (const S*)from.rows.data + from.b * from.rows.batch + from.h * from.rows.head +
                   from.begin * from.rows.row + c0;
  const int64_t rows = from.end - from.begin;
  bool finite = true;
#pragma unroll(sizeof(T) == 8 ? 1 : 4)
  for (int i = thread_id(); i < 64 * kColumns; i += 256) {
    const int r = i / kColumns, c = i % kColumns;
    T value = 0;
    if (r < rows && c0 + c < columns) value = widen(first[r * from.rows.row + c]);
    finite &= value - value == 0;
    store_shared(to + (Address)(r * kStride + c * (int)sizeof(T)), value);
  }
  return finite;
}

// s[i][j] += sum over `width` columns of row 4 y + i of left times row x + 16 j of right. A piece
// of the sum is added up on its own.
template <class F>
DEVICE void add_products(const TileRows<typename F::S>& left, const TileRows<typename F::S>& right,
                         int width, typename F::T (&s)[4][4]) {
  using T = typename F::T;
  const int y = thread_id() / 16, x = thread_id() % 16;
#pragma unroll 1
  for (int d0 = 0; d0 < width; d0 += F::kPiece) {
    sync_block();  // what stood there has been read
    load_tile<T, F::kPiece, F::kPieceStride>(F::kLeft, left, d0, width);
    load_tile<T, F::kPiece, F::kPieceStride>(F::kRight, right, d0, width);
    sync_block();
    T piece[4][4] = {};
#pragma unroll 1
    for (int d = 0; d < F::kPiece; d += F::kVector) {
      Vector<T> l[4], r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int column = d * (int)sizeof(T);
        l[i] = load_shared<Vector<T>>(F::kLeft + (4 * y + i) * F::kPieceStride + column);
        r[i] = load_shared<Vector<T>>(F::kRight + (x + 16 * i) * F::kPieceStride + column);
      }
#pragma unroll
      for (int v = 0; v < F::kVector; v++)
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) piece[i][j] = fma(l[i].at[v], r[j].at[v], piece[i][j]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) s[i][j] += piece[i][j];
  }
}

// One tile: queries [q0, q0 + 64), those from `queries` on hidden, and keys [k0, k0 + 64).
struct TilePlace {
  int64_t b, h, kv, q0, k0;
};

// The words of all queries of a tile, by 256 threads: four to a query. kEmpty: nothing is visible.
template <class F>
DEVICE Visibility tile_words(const Attention& a, const TilePlace& at) {
  using T = typename F::T;
  const int r = thread_id() / 4;
  const int64_t i = at.q0 + r, keys = min_of(F::kKeys, a.keys - at.k0);
  uint64_t word = 0;
  if (i < a.queries && thread_id() % 4 == 0) {
    word = row_visibility(a, at.b, at.h, i, at.k0, keys);
    if (a.bias.data) {
      const int64_t first = bias_index(a, at.b, at.h, i, at.k0);
      for (int j = 0; j < keys; j++)
        if (read_bias(a, typename F::S{}, first + j * a.bias.key) == -(T)INFINITY)
          word &= ~(1ull << j);
    }
  }
  if (thread_id() % 4 == 0) store_shared(F::kWords + 8 * r, word);
  const bool every = thread_id() % 4 || word == first_bits(F::kKeys);
  if (!sync_block_or(word != 0)) return Visibility::kEmpty;
  return sync_block_or(!every) ? Visibility::kPartial : Visibility::kFull;
}
template <class F>
DEVICE void tile_kept(const Attention& a, const TilePlace& at) {
  const int r = thread_id() / 4;
  const uint64_t word = kept_word(a, at.b, at.h, at.q0 + r, at.k0, F::kKeys);
  if (thread_id() % 4 == 0) store_shared(F::kWords + 64 * 8 + 8 * r, word);
  sync_block();
}
// The bit of pair (row, column) of those words, from the first or the second set.
template <class F, bool kOwnsKeys>
DEVICE bool tile_bit(int set, int row, int column) {
  const int query = kOwnsKeys ? column : row, key = kOwnsKeys ? row : column;
  return load_shared<uint64_t>(F::kWords + 8 * (64 * set + query)) >> key & 1;
}

// s = scale s + bias
template <class F, bool kOwnsKeys>
DEVICE void scale_and_bias(const Attention& a, const TilePlace& at, typename F::T (&s)[4][4]) {
  using T = typename F::T;
  const int y = thread_id() / 16, x = thread_id() % 16;
  const T scale = (T)a.scale;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int row = 4 * y + i, column = x + 16 * j;
      s[i][j] *= scale;
      const int64_t q = at.q0 + (kOwnsKeys ? column : row), k = at.k0 + (kOwnsKeys ? row : column);
      if (a.bias.data && q < a.queries && k < a.keys)
        s[i][j] =
            add_bias(s[i][j], (T)read_bias(a, typename F::S{}, bias_index(a, at.b, at.h, q, k)));
    }
}

// Pairs of this thread to where add_weighted reads them.
template <class F>
DEVICE void store_pairs(const typename F::T (&p)[4][4]) {
  using T = typename F::T;
  const int y = thread_id() / 16, x = thread_id() % 16;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      store_shared(
          F::kPairs + (Address)((4 * y + i) * F::kTileStride + (x + 16 * j) * (int)sizeof(T)),
          p[i][j]);
}

// out += P R, where P are the stored pairs and row n of R belongs to their column n; columns
// [first, first + kWidth) of R. In a partial tile that is not finite a product with a hidden pair
// is left out, for 0 * NaN is NaN.
template <class F, bool kOwnsKeys>
DEVICE void add_weighted(const TileRows<typename F::S>& factors, int first, int width, bool partial,
                         typename F::T (&out)[F::kChunks][4][4]) {
  using T = typename F::T;
  const int y = thread_id() / 16, x = thread_id() % 16;
#pragma unroll
  for (int c = 0; c < F::kChunks; c++) {
    if (first + c * 64 >= width) break;
    sync_block();
    const bool finite =
        load_tile<T, 64, F::kTileStride>(F::kFactors, factors, first + c * 64, width);
    const bool select = sync_block_or(!finite) && partial;
#pragma unroll 1
    for (int n = 0; n < 64; n += F::kVector) {
      Vector<T> p[4], v[4];  // v: vector f of row n + e stands in v[f + e 4 / kVector]
#pragma unroll
      for (int i = 0; i < 4; i++)
        p[i] =
            load_shared<Vector<T>>(F::kPairs + (4 * y + i) * F::kTileStride + n * (int)sizeof(T));
#pragma unroll
      for (int e = 0; e < F::kVector; e++) {
#pragma unroll
        for (int f = 0; f < 4 / F::kVector; f++)
          v[f] = load_shared<Vector<T>>(F::kFactors + (n + e) * F::kTileStride + (f * 16 + x) * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (select && !tile_bit<F, kOwnsKeys>(0, 4 * y + i, n + e)) continue;
#pragma unroll
          for (int f = 0; f < 4; f++)
            out[c][i][f] = fma(p[i].at[e], v[f / F::kVector].at[f % F::kVector], out[c][i][f]);
        }
      }
    }
  }
}

// The column of out that element f of chunk c of this thread is.
template <class F>
DEVICE int out_column(int c, int f) {
  return c * 64 + (f / F::kVector * 16 + thread_id() % 16) * F::kVector + f % F::kVector;
}
// Row 4 y + i of out, times its factor, to columns [first, first + kWidth) of a row.
template <class F>
DEVICE void store_out_row(typename F::S* to, int first, int width, typename F::T factor, int i,
                          const typename F::T (&out)[F::kChunks][4][4]) {
#pragma unroll
  for (int c = 0; c < F::kChunks; c++)
#pragma unroll
    for (int f = 0; f < 4; f++) {
      const int column = first + out_column<F>(c, f);
      if (column < width) narrow(out[c][i][f] * factor, to + column);
    }
}

}  // namespace mha_ext::cuda

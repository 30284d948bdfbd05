// Products whose lanes are the width, for heads of one tile and for few queries: their rows are
// read and written where they lie, without a transpose, and few queries leave no lanes empty.
namespace mha_ext::cpu {
namespace {

// Heads are short, and no machine foresees where the next one starts. So what it reads and writes
// is asked for, into the second cache: the few buffers that wait for lines of the first one would
// hold up everything else. Only the output of forward is asked into the first (and lse, of which
// there is little): nothing else is written, and stores that wait for a line hold up those behind
// them. Where rows of this head are read or written here, the same places of the next one are asked
// for meanwhile, by an instruction for each line; many at once would wait for one another. By the
// last byte of a line's worth: the line of the first one is often that in which the row before it,
// or the head before, has ended.
enum class Cache { kSecond = 2, kFirst = 3 };  // as __builtin_prefetch numbers them
template <int64_t kBytes, Cache kInto = Cache::kSecond>
[[gnu::always_inline]] inline void ask_beside(const void* piece, int64_t next) {
#pragma GCC unroll 4
  for (int64_t end = kLine; end < kBytes + kLine; end += kLine)
    __builtin_prefetch((const void*)((uintptr_t)piece + next + min_of(end, kBytes) - 1), 0,
                       (int)kInto);
}
// How far it is from `here` to a row of a head.
template <class K>
int64_t bytes_to(const Rows& t, int64_t b, int64_t h, int64_t row, const void* here) {
  return (int64_t)((uintptr_t)row_of<K>(t, b, h, row) - (uintptr_t)here);
}
// What nobody walks beside, at once. Inline, as a compiler drops calls that do nothing but ask.
template <class K>
[[gnu::always_inline]] inline void ask_for(const Rows& t, int64_t b, int64_t h, int64_t rows,
                                           int64_t columns) {
  constexpr int64_t kItem = sizeof(typename K::S);
  if (t.row == columns) {  // the rows follow one another
    columns *= rows;
    rows = 1;
  }
  uintptr_t last = (uintptr_t)row_of<K>(t, b, h, 0) + columns * kItem - 1;
  for (int64_t r = 0; r < rows; r++, last += t.row * kItem)
#pragma GCC unroll 4
    for (int64_t at = 0; at < columns * kItem; at += kLine)
      __builtin_prefetch((const void*)(last - at), 0, 2);
}

// Rows in memory that are added up with weights. `next`: how many bytes further the rows are that
// are asked for beside them; 0: none. `then`: in place of `next`, for the second group of sums.
template <class K>
struct WidthRows {
  const typename K::S* data;
  int64_t stride, count, columns;
  int64_t next = 0, then = 0;
};
// So many rows of sums are one group.
constexpr int64_t kWidthGroup = 6;

// What becomes of the sums. Columns of `done` have got theirs.
template <bool kAdd, class X, class To>
[[gnu::always_inline]] inline void put_sum(To* to, typename X::V sum, int64_t done) {
  if constexpr (kAdd) sum = X::add(X::load(to), X::select(X::mask(~0ull << done), sum, X::zero()));
  X::store(to, sum);
}

// to[r][d] = sum_n weight(r, n) x[n][d], or with kAdd += that, for kRows rows r and kVectors
// vectors of d, and kHalf for a vector of half the lanes that begins at d = half; or, with kPart,
// for a part of one vector. The weights are those of a tile, tile[key][64 queries]: along m, r is
// the query; along t, n is. to_next: what is asked for beside `to`, as in WidthRows, into the cache
// kInto. The first `done` columns, of the half where there is one, are those of another product.
template <class K, class X, Contiguous kA, int kRows, int kVectors, bool kHalf, bool kPart,
          bool kAdd, Cache kInto, class To>
void width_product(const WidthRows<K>& x, const typename K::T* tile, To* to, int64_t to_stride,
                   int64_t to_next, int64_t half, int64_t done) {
  using Half = typename X::Half;
  constexpr int64_t kItem = sizeof(typename K::S), kPiece = kVectors * X::kLanes * kItem;
  typename X::V sum[kRows][kVectors];
  [[maybe_unused]] typename Half::V rest[kRows];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) sum[r][i] = X::zero();
    if constexpr (kHalf) rest[r] = Half::zero();
  }
  const typename K::S* row = x.data;
  const auto step = [&](int64_t n) __attribute__((always_inline)) {
    typename X::V v[kVectors];
    [[maybe_unused]] typename Half::V last;
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) {
      if constexpr (kPart)
        v[i] = X::load(row, x.columns);
      else
        v[i] = X::load(row + i * X::kLanes);
    }
    ask_beside<kPiece>(row, x.next);
    if constexpr (kHalf) {
      last = Half::load(row + half);
      ask_beside<Half::kLanes * kItem>(row + half, x.next);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++) {
      const typename K::T* weight =
          tile + (kA == Contiguous::kAlongM ? n * kRow + r : r * kRow + n);
      const typename X::V w = X::set(*weight);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) sum[r][i] = X::fma(v[i], w, sum[r][i]);
      if constexpr (kHalf) rest[r] = Half::fma(last, X::low(w), rest[r]);
    }
    row += x.stride;
  };
  if constexpr (X::kRegisters == 16) {
#pragma GCC unroll 2
    for (int64_t n = 0; n < x.count; n++) step(n);
  } else {
    for (int64_t n = 0; n < x.count; n++) step(n);
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++, to += to_stride) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) {
      if constexpr (kPart && kAdd)
        X::store(to, X::add(X::load(to, x.columns), sum[r][i]), x.columns);
      else if constexpr (kPart)
        X::store(to, sum[r][i], x.columns);
      else
        put_sum<kAdd, X>(to + i * X::kLanes, sum[r][i], kHalf || i > 0 ? 0 : done);
    }
    ask_beside<kPiece, kInto>(to, to_next);
    if constexpr (kHalf) {
      put_sum<kAdd, Half>(to + half, rest[r], done);
      ask_beside<Half::kLanes * kItem, kInto>(to + half, to_next);
    }
  }
}

// The weights of a tile as products take them: of pairs, two of those that are added up in a unit,
// unit[n / 2][64 r] along m, unit[r][n / 2] along t.
template <class K>
constexpr int64_t kWidthUnits = K::kPairs ? kFewRows / 2 * kRow : 1;
template <class K, Contiguous kA>
const typename K::Unit* width_weights(const typename K::T* tile, int64_t rows, int64_t count,
                                      typename K::Unit (&room)[kWidthUnits<K>]) {
  if constexpr (!K::kPairs) return tile;
  if constexpr (K::kPairs && kA == Contiguous::kAlongM)
    K::Dot::pair_rows(tile, count, vectors_of<K>(rows), room);
  if constexpr (K::kPairs && kA == Contiguous::kAlongT)
    K::Dot::pair_columns(tile, rows, count, room);
  return room;
}

// What width_product gives, of pairs of rows of x: for the 32 columns from the first on and, with
// kTwo, for 32 from `second` on; or, where there are no more, for 16. `left`: how many there are.
template <class K, Contiguous kA, int kRows, int kHalves, bool kTwo, Cache kInto>
void width_pairs(const WidthRows<K>& x, const typename K::Unit* weights, typename K::S* to,
                 int64_t to_stride, int64_t to_next, int64_t left, int64_t second) {
  using Dot = typename K::Dot;
  using V = typename K::X::V;
  constexpr int kPieces = kTwo ? 2 : 1;
  constexpr int64_t kBytes = kHalves * K::kLanes * (int64_t)sizeof(typename K::S);
  V sum[kRows][kPieces][kHalves];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int i = 0; i < kPieces; i++)
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; half++) sum[r][i][half] = K::X::zero();
  const typename K::S* row = x.data;
  const auto step = [&]<bool kBoth>(int64_t n) __attribute__((always_inline)) {
    V v[kPieces][kHalves];
#pragma GCC unroll 2
    for (int i = 0; i < kPieces; i++) {
      const typename K::S* const from = row + i * second;
      Dot::template load_two<kBoth>(from, x.stride, left, v[i]);
      ask_beside<kBytes>(from, x.next);
      if constexpr (kBoth) ask_beside<kBytes>(from + x.stride, x.next);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++) {
      const V w =
          Dot::set(weights[kA == Contiguous::kAlongM ? n / 2 * kRow + r : r * (kRow / 2) + n / 2]);
#pragma GCC unroll 2
      for (int i = 0; i < kPieces; i++)
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; half++)
          sum[r][i][half] = Dot::add_products(sum[r][i][half], v[i][half], w);
    }
    row += 2 * x.stride;
  };
  int64_t n = 0;
  for (; n + 2 <= x.count; n += 2) step.template operator()<true>(n);
  if (n < x.count) step.template operator()<false>(n);
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++, to += to_stride)
#pragma GCC unroll 2
    for (int i = 0; i < kPieces; i++) {
      Dot::store_sums(to + i * second, sum[r][i], left);
      ask_beside<kBytes, kInto>(to + i * second, to_next);
    }
}

// All columns for kRows rows, likewise.
template <class K, Contiguous kA, int kRows, Cache kInto>
void width_pair_columns(const WidthRows<K>& x, int64_t next, const typename K::Unit* weights,
                        typename K::S* to, int64_t to_stride, int64_t to_next) {
  constexpr int64_t kPiece = 2 * K::kLanes;
  const int64_t columns = x.columns, last = columns - kPiece;
  const auto some = [&]<int kHalves, bool kTwo>(int64_t at, int64_t left, int64_t second)
                        __attribute__((always_inline)) {
                          width_pairs<K, kA, kRows, kHalves, kTwo, kInto>(
                              {x.data + at, x.stride, x.count, columns, next}, weights, to + at,
                              to_stride, to_next, left, second);
                        };
  if (columns <= K::kLanes) return some.template operator()<1, false>(0, columns, 0);
  if (last < 0) return some.template operator()<2, false>(0, columns, 0);
  int64_t d = 0;
  for (; columns - d > kPiece; d += 2 * kPiece)
    some.template operator()<2, true>(d, kPiece, min_of(kPiece, last - d));
  if (d < columns) some.template operator()<2, false>(last, kPiece, 0);
}

// All columns for kRows rows; the last vectors are moved back, as in for_vectors. Where half a
// vector is enough for the last columns, and half the work, it is one.
template <class K, Contiguous kA, int kRows, bool kAdd, Cache kInto, class To>
void width_columns(const WidthRows<K>& x, int64_t next, const typename K::T* tile, To* to,
                   int64_t to_stride, int64_t to_next) {
  using X = typename K::X;
  using Half = typename X::Half;
  constexpr int64_t kLanes = X::kLanes;
  constexpr int64_t kHalf = K::kInPlace && has_half<X> ? Half::kLanes : 0;
  const auto from = [&](int64_t at) {
    return WidthRows<K>{x.data + at, x.stride, x.count, x.columns, next};
  };
  if (x.columns < kLanes)
    return width_product<K, X, kA, kRows, 1, false, true, kAdd, kInto>(from(0), tile, to, to_stride,
                                                                       to_next, 0, 0);
  int64_t d = 0;
  const auto some = [&]<int kVectors>() __attribute__((always_inline)) {
    constexpr int64_t kWidth = kVectors * kLanes;
    if constexpr (kHalf > 0 && kVectors < 4)
      if (x.columns - d > kWidth && x.columns - d <= kWidth + kHalf) {
        const int64_t at = x.columns - d - kHalf;
        width_product<K, X, kA, kRows, kVectors, true, false, kAdd, kInto>(
            from(d), tile, to + d, to_stride, to_next, at, kWidth - at);
        d = x.columns;
      }
    for (; x.columns - d > kWidth - kLanes + kHalf && x.columns >= kWidth; d += kWidth) {
      const int64_t at = min_of(d, x.columns - kWidth);
      width_product<K, X, kA, kRows, kVectors, false, false, kAdd, kInto>(
          from(at), tile, to + at, to_stride, to_next, 0, d - at);
    }
  };
  if constexpr (X::kRegisters == 32) {
    some.template operator()<4>();
    some.template operator()<3>();
  }
  some.template operator()<2>();
  some.template operator()<1>();
  if constexpr (kHalf > 0)
    if (d < x.columns) {
      const int64_t at = x.columns - kHalf;
      width_product<K, Half, kA, kRows, 1, false, false, kAdd, kInto>(
          from(at), tile, to + at, to_stride, to_next, 0, d - at);
    }
}

// All rows, in equal groups. (x by reference, as Operand is.)
template <class K, Contiguous kA, bool kAdd = false, class To = typename K::S,
          Cache kInto = Cache::kSecond>
void width_rows(const WidthRows<K>& x, int64_t rows, const typename K::T* tile, To* to,
                int64_t to_stride, int64_t to_next) {
  static_assert(!K::kPairs || !kAdd);
  if (rows == 0) return;
  const int64_t part = ceil_div(rows, ceil_div(rows, kWidthGroup));
  int64_t next = x.next, then = x.then;
  typename K::Unit room[kWidthUnits<K>];
  const typename K::Unit* weights = width_weights<K, kA>(tile, rows, x.count, room);
  const auto some = [&]<int kRows>() __attribute__((always_inline)) {
    for (; part >= kRows && rows >= kRows; rows -= kRows) {
      if constexpr (K::kPairs)
        width_pair_columns<K, kA, kRows, kInto>(x, next, weights, to, to_stride, to_next);
      else
        width_columns<K, kA, kRows, kAdd, kInto>(x, next, weights, to, to_stride, to_next);
      next = then;
      then = 0;
      weights += kRows * (kA == Contiguous::kAlongM ? 1 : kRow / K::Dot::kStep);
      to += kRows * to_stride;
    }
  };
  some.template operator()<6>();
  some.template operator()<5>();
  some.template operator()<4>();
  some.template operator()<3>();
  some.template operator()<2>();
  some.template operator()<1>();
}

// The same where x is not finite, and 0 * NaN must not be: the visible pairs alone, in the same
// order, so that the others leave no trace. Bit r of bits[key] says whether query r sees it. `sums`
// has room for a row.
template <class K, Contiguous kA>
void width_selected(const WidthRows<K>& x, int64_t rows, const typename K::T* tile,
                    const uint64_t* bits, typename K::S* to, int64_t to_stride,
                    typename K::T* sums) {
  constexpr bool kQueries = kA == Contiguous::kAlongM;  // rows are queries, and n keys
  typename K::T weight[kTile];
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t d = 0; d < few_width<K>(x.columns); d++) sums[d] = 0;
    for (int64_t n0 = 0; n0 < x.count; n0 += kTile) {
      uint64_t seen = 0;
      for (int64_t i = 0; i < min_of(kTile, x.count - n0); i++) {
        const int64_t n = n0 + i;
        weight[i] = tile[kQueries ? n * kRow + r : r * kRow + n];
        seen |= (kQueries ? bits[n] >> r & 1 : bits[r] >> n & 1) << i;
      }
      if constexpr (K::kPairs)
        few_seen_values<K>(x.data + n0 * x.stride, x.stride, seen, x.columns, weight, sums);
      else
        few_selected<K>(x.data + n0 * x.stride, x.stride, seen, x.columns, weight, sums);
    }
    if constexpr (K::kPairs) join_columns<K>(few_width<K>(x.columns), sums);
    scale_out<typename K::X>(sums, 0, 1, 1, x.columns, to + r * to_stride, to_stride);
  }
}

}  // namespace
}  // namespace mha_ext::cpu

// Products whose lanes are the width, for heads of one tile: their rows are read and written where
// they lie, without a transpose, and few queries leave no lanes empty.
namespace mha_ext::cpu {
namespace {

// What the next head reads and writes, and the last tile has not brought: heads are short, and no
// machine foresees where the next one starts. Every line that a row touches, into the second cache:
// the few buffers that wait for lines of the first one would hold up everything else. Inline, as a
// compiler drops calls that do nothing but ask.
template <class K>
[[gnu::always_inline]] inline void ask_for(const Rows& t, int64_t b, int64_t h, int64_t rows,
                                           int64_t columns) {
  constexpr int64_t kLine = 64;
  for (int64_t r = 0; r < rows; r++) {
    const char* row = (const char*)row_of<K>(t, b, h, r);
    const char* const end = row + columns * (int64_t)sizeof(typename K::S);
    for (row -= (uintptr_t)row % kLine; row < end; row += kLine) __builtin_prefetch(row, 0, 2);
  }
}

// Rows in memory that are added up with weights.
template <class K>
struct WidthRows {
  const typename K::S* data;
  int64_t stride, count, columns;
};

// to[r][d] = sum_n weight(r, n) x[n][d] for kRows rows r and kVectors vectors of d, or
// for a part of one. The weights are those of a tile, tile[key][64 queries]: along m, r is the
// query; along t, n is.
template <class K, Contiguous kA, int kRows, int kVectors, bool kPart>
void width_product(const WidthRows<K>& x, const typename K::T* tile, typename K::S* to,
                   int64_t to_stride) {
  using X = typename K::X;
  typename X::V sum[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) sum[r][i] = X::zero();
  const typename K::S* row = x.data;
  for (int64_t n = 0; n < x.count; n++, row += x.stride) {
    typename X::V v[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++)
      v[i] = kPart ? X::load(row, x.columns) : X::load(row + i * K::kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++) {
      const typename X::V weight =
          X::set(kA == Contiguous::kAlongM ? tile[n * kRow + r] : tile[r * kRow + n]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) sum[r][i] = X::fma(v[i], weight, sum[r][i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) {
      if constexpr (kPart)
        X::store(to + r * to_stride, sum[r][i], x.columns);
      else
        X::store(to + r * to_stride + i * K::kLanes, sum[r][i]);
    }
}

// All columns for kRows rows; the last vectors are moved back, as in for_vectors.
template <class K, Contiguous kA, int kRows>
void width_columns(const WidthRows<K>& x, const typename K::T* tile, typename K::S* to,
                   int64_t to_stride) {
  constexpr int64_t kLanes = K::kLanes;
  if (x.columns < kLanes) return width_product<K, kA, kRows, 1, true>(x, tile, to, to_stride);
  int64_t d = 0;
  const auto some = [&]<int kVectors>() __attribute__((always_inline)) {
    constexpr int64_t kWidth = kVectors * kLanes;
    for (; x.columns - d > kWidth - kLanes && x.columns >= kWidth; d += kWidth) {
      const int64_t at = min_of(d, x.columns - kWidth);
      width_product<K, kA, kRows, kVectors, false>({x.data + at, x.stride, x.count, x.columns},
                                                   tile, to + at, to_stride);
    }
  };
  if constexpr (K::X::kRegisters == 32) {
    some.template operator()<4>();
    some.template operator()<3>();
  }
  some.template operator()<2>();
  some.template operator()<1>();
}

// All rows, in equal parts of at most 6.
template <class K, Contiguous kA>
void width_rows(const WidthRows<K>& x, int64_t rows, const typename K::T* tile, typename K::S* to,
                int64_t to_stride) {
  if (rows == 0) return;
  const int64_t part = ceil_div(rows, ceil_div(rows, 6));
  const auto some = [&]<int kRows>() __attribute__((always_inline)) {
    for (; part >= kRows && rows >= kRows; rows -= kRows) {
      width_columns<K, kA, kRows>(x, tile, to, to_stride);
      tile += kRows * (kA == Contiguous::kAlongM ? 1 : kRow);
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

}  // namespace
}  // namespace mha_ext::cpu

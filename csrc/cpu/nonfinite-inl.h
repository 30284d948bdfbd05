// What is not finite in an operand: found, left out of a product, and added for the pairs that are
// visible.
namespace mha_ext::cpu {
namespace {

template <class K>
bool all_finite(const typename K::S* from, int64_t stride, int64_t rows, int64_t columns) {
  using X = typename K::X;
  typename X::V sums[4];  // 0 * x is NaN exactly where x is not finite
  for (int i = 0; i < 4; i++) sums[i] = X::zero();
  for (int64_t r = 0; r < rows; r++) {
    int64_t c = 0;
    for (; c + 4 * K::kLanes <= columns; c += 4 * K::kLanes)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        sums[i] = X::fma(X::load(from + r * stride + c + i * K::kLanes), X::zero(), sums[i]);
    for (; c + K::kLanes <= columns; c += K::kLanes)
      sums[r & 3] = X::fma(X::load(from + r * stride + c), X::zero(), sums[r & 3]);
    if (c < columns)
      sums[3] = X::fma(X::load(from + r * stride + c, columns - c), X::zero(), sums[3]);
  }
  const typename X::V sum = X::add(X::add(sums[0], sums[1]), X::add(sums[2], sums[3]));
  return X::bits(X::eq(sum, sum)) == first_bits(K::kLanes);
}

// A product over a partial tile would compute 0 * NaN for pairs that are hidden. So where an
// operand is not finite, it is multiplied as a clean copy, with 0 in place of what is not finite;
// then that is added for the visible pairs alone.
template <class K>
bool finite(typename K::S x) {
  return widen(x) - widen(x) == 0;
}
template <class K>
void clean_copy(const typename K::S* from, int64_t stride, int64_t rows, int64_t columns,
                typename K::S* to) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) {
      const typename K::S x = from[r * stride + c];
      to[r * columns + c] = finite<K>(x) ? x : typename K::S{};
    }
}
// What of an operand a product takes as it is; another Taken takes less.
template <class K>
struct TakenIfFinite {
  static bool takes(typename K::S x) { return finite<K>(x); }
};
// c[r * row + column * step] += tile[key][r] * from[key][column], of what is not taken
template <class K, class Taken>
void add_nonfinite(const typename K::T* tile, const uint64_t* bits, const typename K::S* from,
                   int64_t stride, int64_t keys, int64_t columns, typename K::T* c, int64_t row,
                   int64_t step) {
  for (int64_t n = 0; n < keys; n++)
    for (int64_t d = 0; d < columns; d++) {
      if (Taken::takes(from[n * stride + d])) continue;
      for (uint64_t left = bits[n]; left; left &= left - 1) {
        const int64_t r = __builtin_ctzll(left);
        c[r * row + d * step] += tile[n * kRow + r] * widen(from[n * stride + d]);
      }
    }
}
// c[column][64 r] += tile[key][r] * from[key][column]
template <class K, class Taken = TakenIfFinite<K>>
void add_nonfinite_lanes(const typename K::T* tile, const uint64_t* bits, const typename K::S* from,
                         int64_t stride, int64_t keys, int64_t columns, typename K::T* c) {
  add_nonfinite<K, Taken>(tile, bits, from, stride, keys, columns, c, 1, kRow);
}
// c[r][column] += tile[key][r] * from[key][column]
template <class K>
void add_nonfinite_queries(const typename K::T* tile, const uint64_t* bits,
                           const typename K::S* from, int64_t stride, int64_t keys, int64_t columns,
                           typename K::T* c, int64_t ld) {
  add_nonfinite<K, TakenIfFinite<K>>(tile, bits, from, stride, keys, columns, c, ld, 1);
}
// c[key][column] += tile[key][r] * from[r][column]
template <class K, class Taken = TakenIfFinite<K>>
void add_nonfinite_rows(const typename K::T* tile, const uint64_t* bits, const typename K::S* from,
                        int64_t stride, int64_t rows, int64_t keys, int64_t columns,
                        typename K::T* c, int64_t ld) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t d = 0; d < columns; d++) {
      if (Taken::takes(from[r * stride + d])) continue;
      for (int64_t n = 0; n < keys; n++)
        if (bits[n] >> r & 1) c[n * ld + d] += tile[n * kRow + r] * widen(from[r * stride + d]);
    }
}

}  // namespace
}  // namespace mha_ext::cpu

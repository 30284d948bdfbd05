// Rows in memory to the columns of a tile and back: in scratch it is stored [column][64 rows], so
// that the lanes of a vector are rows.
namespace mha_ext::cpu {
namespace {

constexpr int64_t kRow = kTile;  // lanes of a tile row

// The first n numbers of a vector, or all.
template <class X, class From>
typename X::V load_up_to(const From* p, int64_t n) {
  return n >= X::kLanes ? X::load(p) : X::load(p, n);
}
template <class X, class To>
void store_up_to(To* p, typename X::V v, int64_t n) {
  if (n >= X::kLanes)
    X::store(p, v);
  else
    X::store(p, v, n);
}

// block[c] = column c of kLanes rows.
template <class X, class From>
[[gnu::always_inline]] inline void load_columns(const From* from, int64_t stride,
                                                typename X::V (&block)[X::kLanes]) {
  if constexpr (sizeof(From) == sizeof(typename X::T)) {
    constexpr int kPieces = X::kLanes / X::kPiece;
    X::template load_columns<kPieces, kPieces>([&](int i) { return from + i * stride; }, block);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < X::kLanes; i++) block[i] = X::load(from + i * stride);
    X::transpose(block);
  }
}

// run(c) for every first column of a vector; the last vector is moved back, where that makes it
// whole: what is done twice to a column has the same result, and parts of vectors are slow to
// store.
template <int kLanes, class Run>
[[gnu::always_inline]] inline void for_vectors(int64_t columns, const Run& run) {
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) run(c);
  if (c < columns) run(columns < kLanes ? c : columns - kLanes);
}

// block[c] = column c of kLanes rows, of which there are `height`, and `width` columns: zero
// beyond.
template <class X, class From>
[[gnu::always_inline]] inline void load_block(const From* from, int64_t stride, int64_t height,
                                              int64_t width, typename X::V (&block)[X::kLanes]) {
  constexpr int kLanes = X::kLanes;
  if (height >= kLanes && width >= kLanes) return load_columns<X>(from, stride, block);
  if (width >= kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) block[i] = i < height ? X::load(from + i * stride) : X::zero();
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
      block[i] = i < height ? X::load(from + i * stride, width) : X::zero();
  }
  X::transpose(block);
}

// to[c][64 r] = from[r][c] of kGroups times as many rows as a piece has numbers, or, where they are
// kRagged, of `height` rows of these, and zero beyond; with kScale times factor. In pieces of 128
// bits, of which there is at least one.
template <class X, bool kScale, int kGroups, bool kRagged>
void transpose_pieces(const typename X::T* from, int64_t stride, int64_t height, int64_t columns,
                      typename X::T factor, typename X::T* to) {
  constexpr int kLanes = X::kLanes, kPiece = X::kPiece;
  const typename X::T* start[kGroups * kPiece];  // past the last row, that row again
  for (int i = 0; kRagged && i < kGroups * kPiece; i++)
    start[i] = from + min_of(i, height - 1) * stride;
  const typename X::M in = X::mask(first_bits(height));
  const typename X::V f = X::set(factor);
  const auto some = [&]<int kPieces>(int64_t c) __attribute__((always_inline)) {
    typename X::V block[kPieces * kPiece];
    X::template load_columns<kPieces, kGroups>(
        [&](int i) { return c + (kRagged ? start[i] : from + i * stride); }, block);
#pragma GCC unroll 16
    for (int i = 0; i < kPieces * kPiece; i++) {
      if (kScale) block[i] = X::mul(f, block[i]);
      X::store(to + (c + i) * kRow, kRagged ? X::select(in, block[i], X::zero()) : block[i]);
    }
  };
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) some.template operator()<kLanes / kPiece>(c);
  for (; c + kPiece <= columns; c += kPiece) some.template operator()<1>(c);
  if (c < columns) some.template operator()<1>(columns - kPiece);
}

// to[c][64 r] = from[r][c], zero in the lanes past `rows` (up to whole vectors). With kScale times
// factor.
template <class X, bool kScale, class From>
void transpose_in(const From* from, int64_t stride, int64_t rows, int64_t columns,
                  typename X::T factor, typename X::T* to) {
  constexpr int kLanes = X::kLanes;
  const typename X::V f = X::set(factor);
  for (int64_t r = 0; r < rows; r += kLanes, from += kLanes * stride, to += kLanes) {
    const int64_t height = rows - r;
    if constexpr (sizeof(From) == sizeof(typename X::T)) {
      if (columns >= X::kPiece) {
        constexpr int kAll = kLanes / X::kPiece;
        const auto groups = [&]<int kGroups, bool kRagged>() __attribute__((always_inline)) {
          transpose_pieces<X, kScale, kGroups, kRagged>(from, stride, height, columns, factor, to);
        };
        if (height >= kLanes)
          groups.template operator()<kAll, false>();
        else if (height % X::kPiece != 0)
          groups.template operator()<kAll, true>();
        else if (height * 2 == kLanes)
          groups.template operator()<(kAll + 1) / 2, false>();
        else if (height * 2 > kLanes)
          groups.template operator()<kAll == 1 ? 1 : kAll - 1, false>();
        else
          groups.template operator()<1, false>();
        continue;
      }
    }
    for_vectors<kLanes>(columns, [&](int64_t c) __attribute__((always_inline)) {
      typename X::V block[kLanes];
      load_block<X>(from + c, stride, height, columns, block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++)
        if (i < columns) X::store(to + (c + i) * kRow, kScale ? X::mul(f, block[i]) : block[i]);
    });
  }
}
template <class X, class From>
void transpose_in(const From* from, int64_t stride, int64_t rows, int64_t columns,
                  typename X::T* to) {
  transpose_in<X, false>(from, stride, rows, columns, 1, to);
}

// Rows of `columns` numbers, that are written once and whole, go past the caches, as whole lines,
// where all together (`bytes`) are more than these keep for who reads them: else each line would be
// read first, and drive out others. `strides`: what rows lie apart, or all of that joined by |.
template <class X>
struct PastCaches {
  static constexpr int64_t kLeast = int64_t{16} << 20;  // measured, with reading it all afterwards

  template <class To>
  PastCaches(const To* data, int64_t bytes, int64_t columns, int64_t strides)
      : on(bytes >= kLeast &&
           ((uintptr_t)data | (uintptr_t)((columns | strides) * (int64_t)sizeof(To))) % kLine ==
               0) {}
  ~PastCaches() {
    if constexpr (requires { X::end_streams(); })
      if (on) X::end_streams();
  }
  PastCaches(const PastCaches&) = delete;
  PastCaches& operator=(const PastCaches&) = delete;

  const bool on;
};

// to[r][c] = factor[r] * from[c][64 r]. kPast: past the caches, if there is a way.
template <class X, bool kPast = false, class To>
void transpose_out(const typename X::T* from, const typename X::T* factor, int64_t rows,
                   int64_t columns, To* to, int64_t stride) {
  constexpr int kLanes = X::kLanes;
  for (int64_t r = 0; r < rows; r += kLanes) {
    const int64_t height = min_of(kLanes, rows - r);
    for_vectors<kLanes>(columns, [&](int64_t c) __attribute__((always_inline)) {
      typename X::V block[kLanes];
      To* p = to + r * stride + c;
      if (columns >= kLanes) {
        load_columns<X>(from + c * kRow + r, kRow, block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++)
          if (i < height) {
            const typename X::V v = X::mul(X::set(factor[r + i]), block[i]);
            if constexpr (kPast && requires { X::stream(p, v); })
              X::stream(p + i * stride, v);
            else
              X::store(p + i * stride, v);
          }
        return;
      }
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++)
        block[i] = i < columns ? X::load(from + (c + i) * kRow + r) : X::zero();
      X::transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++)
        if (i < height) X::store(p + i * stride, X::mul(X::set(factor[r + i]), block[i]), columns);
    });
  }
}

// to[r][c] = factor * from[r][c]
template <class X, class To>
void scale_out(const typename X::T* from, int64_t ld, typename X::T factor, int64_t rows,
               int64_t columns, To* to, int64_t stride) {
  const typename X::V f = X::set(factor);
  for (int64_t r = 0; r < rows; r++)
    for_vectors<X::kLanes>(columns, [&](int64_t c) __attribute__((always_inline)) {
      const typename X::V v = X::mul(f, X::load(from + r * ld + c));
      if (columns >= X::kLanes)
        X::store(to + r * stride + c, v);
      else
        X::store(to + r * stride + c, v, columns);
    });
}

}  // namespace
}  // namespace mha_ext::cpu

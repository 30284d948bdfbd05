// What happens to one tile of 64 queries x 64 keys beside the products: packing, exp, masks,
// dropout. A tile in scratch is stored [key or column][64 queries]: the lanes are query rows, so
// softmax needs no reduction across lanes. K describes a kernel: X (vectors), Dot (products), S
// (storage type).
namespace mha_ext::cpu {
namespace {

constexpr int64_t kManyBlocks = INT64_MAX;

template <class X_, class Dot_, class S_>
struct Kind {
  using X = X_;
  using Dot = Dot_;
  using S = S_;
  using T = typename X::T;
  using Unit = typename Dot::Unit;
  static constexpr int kLanes = X::kLanes;
  static constexpr bool kPairs = Dot::kStep == 2;
  static constexpr bool kInPlace = sizeof(S) == sizeof(T);  // storage is what the products read
  // Of few queries, for which a head that lies dense is read in the order of memory.
  static constexpr int64_t kRowsInOrder = X::kRowsInOrder;
  // Of a head whose queries share a block with those of others: a matrix unit does whole tiles, and
  // has them; where it takes limbs, more than a vector of queries are a block of their own.
  static constexpr int64_t kGroupedQueries = [] {
    if constexpr (requires { typename Dot::InLimbs; })
      return Dot::InLimbs::kLimbs == 1 ? 0 : kLanes;
    else
      return Dot::kRowBlock > 1 ? (int64_t)0 : kTile * 5 / 8;
  }();
  // Where it takes long to widen rows, lanes of queries may be emptier. Where products are of
  // pairs, tiles are better for more than one block of queries, since these share what is packed of
  // K; on a matrix unit for more than a vector of them.
  static constexpr KernelLimits kLimits = {X::kRegisters == 32 || kInPlace ? 8 : 6,
                                           !kPairs               ? INT64_MAX
                                           : Dot::kRowBlock == 1 ? kTile
                                                                 : kLanes,
                                           kLanes, kRowsInOrder, kGroupedQueries};
  // Whether products read rows of K or V where they are: where they follow one another, or, on some
  // processors, where few blocks of queries read them. Else rows are packed: those that stand far
  // apart share few cache sets.
  static bool in_place(int64_t stride, int64_t columns, int64_t blocks) {
    if (!kInPlace) return false;
    if constexpr (requires { X::kInPlaceBlocks; })
      return stride == columns || blocks <= X::kInPlaceBlocks;
    else
      return stride == columns;
  }
  // The same for rows whose columns are lanes: these are read again for every few sums, so more
  // tiles than these make up for packing them.
  static bool vectors_in_place(int64_t stride, int64_t columns, int64_t tiles) {
    if constexpr (kInPlace && requires { X::in_place_tiles(); })
      return stride == columns || tiles <= X::in_place_tiles();
    else
      return in_place(stride, columns, tiles);
  }
  // How many limbs of a number go to a matrix unit in whole tiles (limbs-inl.h), or none. One is
  // the number itself; then forward alone has tiles of limbs, and all of its tiles are.
  static constexpr int kLimbs = [] {
    if constexpr (requires { typename Dot::InLimbs; })
      return Dot::InLimbs::kLimbs;
    else
      return 0;
  }();
  static constexpr bool kCut = kLimbs > 1, kOneLimb = kLimbs == 1;
  // Whether few queries take numbers at even and at odd places apart.
  static constexpr bool kSplit = !kPairs && requires(const S* p) { X::load_pairs(p, 0); };
  // Their sums over keys have two vectors of columns that lie apart, and are joined at the end.
  static constexpr bool kApart = kSplit || kPairs;
};

// The keys of a head that tiles are made of: as if those that lengths hide, the last ones, were not
// there. A matrix unit does whole tiles, where there are several.
template <class K>
int64_t keys_in_tiles(const Attention& a, int64_t b) {
  return K::Dot::kRowBlock > 1 || K::kCut ? a.keys : key_count(a, b);
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
template <class K>
int64_t vectors_of(int64_t n) {
  return (n + K::kLanes - 1) / K::kLanes;
}
template <class K>
int64_t units_of(int64_t n) {
  return round_up(n, K::Dot::kStep * K::Dot::kUnitBlock) / K::Dot::kStep;
}
template <class K>
int64_t height_of(int64_t n) {
  return round_up(n, K::Dot::kRowBlock);
}
template <class K>
int64_t padded(int64_t n) {
  return round_up(n, K::kLanes);
}

// Columns, in units, of the widest form in which a row of K or V is packed.
template <class K>
int64_t operand_width(int64_t n) {
  return round_up(n, K::kLanes > K::Dot::kStep * K::Dot::kUnitBlock
                         ? K::kLanes
                         : K::Dot::kStep * K::Dot::kUnitBlock);
}

// Hands out 64-byte aligned pieces of a scratch block; with base 0 it only measures.
struct Arena {
  char* base;
  int64_t used = 0;
  template <class Type>
  Type* take(int64_t count) {
    Type* p = base ? (Type*)(base + used) : nullptr;
    used += round_up(count * (int64_t)sizeof(Type), 64);
    return p;
  }
};

template <class K>
typename K::S* row_of(const Rows& t, int64_t b, int64_t h, int64_t row) {
  return (typename K::S*)t.data + b * t.batch + h * t.head + row * t.row;
}

// 2^y where an instruction multiplies by powers of two; 0 where x, of which y is a multiple, is
// less than `least`.
template <class X>
[[gnu::always_inline]] inline typename X::V power_of_two(typename X::V y, typename X::V x,
                                                         typename X::T least) {
  using V = typename X::V;
  using E = Exp<typename X::T>;
  const V f = X::fraction(y);
  V p = X::set(E::scale_coefficient[E::scale_degree - 1]);
#pragma GCC unroll 8
  for (int k = E::scale_degree - 2; k >= 0; k--) p = X::fma(p, f, X::set(E::scale_coefficient[k]));
  return X::scale_from(least, x, X::fma(p, f, X::set(1)), y);
}
// x -> e^x, for x up to 88 (double: 709); beyond, anything. What is hidden is selected away by the
// caller. Several vectors step by step: what waits in one runs beside the others.
template <class X, int N>
[[gnu::always_inline]] inline void exp_each(typename X::V (&x)[N]) {
  using V = typename X::V;
  using E = Exp<typename X::T>;
  const V log2e = X::set(E::log2e);
  [[maybe_unused]] const auto each = [&](const auto& step) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) step(i);
  };
  if constexpr (X::kExponential == Exponential::kScale) {
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) x[i] = power_of_two<X>(X::mul(x[i], log2e), x[i], E::power_lowest);
  } else if constexpr (X::kExponential == Exponential::kTable) {
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const V magic = X::set(E::power_magic), u = X::fma(x[i], log2e, magic);
      const V n = X::sub(u, magic), r = X::fms(x[i], log2e, n);
      V p = X::set(E::power_coefficient[E::power_degree - 1]);
#pragma GCC unroll 8
      for (int k = E::power_degree - 2; k >= 0; k--)
        p = X::fma(p, r, X::set(E::power_coefficient[k]));
      const V power = X::power(u);
      x[i] = X::from(E::power_lowest, x[i], X::fma(power, X::mul(p, r), power), n);
    }
  } else if constexpr (X::kExponential == Exponential::kShortTable) {
    const V magic = X::set(E::short_magic);
    V u[N], n[N], p[N], power[N];
    each([&](int i) { x[i] = X::max(X::set(E::short_lowest), x[i]); });  // NaN stays NaN
    each([&](int i) { u[i] = X::fma(x[i], log2e, magic); });
    each([&](int i) { n[i] = X::sub(u[i], magic); });
    each([&](int i) { x[i] = X::fms(x[i], log2e, n[i]); });
    each([&](int i) { power[i] = X::power(u[i]); });
    each([&](int i) { p[i] = X::set(E::short_coefficient[E::short_degree - 1]); });
#pragma GCC unroll 12
    for (int k = E::short_degree - 2; k >= 0; k--)
      each([&](int i) { p[i] = X::fma(p[i], x[i], X::set(E::short_coefficient[k])); });
    each([&](int i) { x[i] = X::mul(power[i], x[i]); });
    each([&](int i) { x[i] = X::fma(p[i], x[i], power[i]); });
  } else {
    const V magic = X::set(E::magic);
    V n[N], p[N];
    each([&](int i) { x[i] = X::max(X::set(E::lowest), x[i]); });  // NaN stays NaN
    each([&](int i) { n[i] = X::fma(x[i], log2e, magic); });
    each([&](int i) { p[i] = X::sub(n[i], magic); });
    each([&](int i) { x[i] = X::fma(p[i], X::set(-E::ln2_high), x[i]); });
    if constexpr (sizeof(typename X::T) == 8)
      each([&](int i) { x[i] = X::fma(p[i], X::set(-E::ln2_low), x[i]); });
    each([&](int i) { p[i] = X::set(E::coefficient[E::degree]); });
#pragma GCC unroll 12
    for (int k = E::degree - 1; k >= 0; k--)
      each([&](int i) { p[i] = X::fma(p[i], x[i], X::set(E::coefficient[k])); });
    each([&](int i) { x[i] = X::mul(p[i], X::power_of_two(n[i])); });
  }
}
template <class X>
typename X::V exp_of(typename X::V x) {
  typename X::V one[1] = {x};
  exp_each<X, 1>(one);
  return one[0];
}

// On a matrix unit whole tiles go by halves: so many queries at a time.
constexpr int64_t kHalfRow = kRow / 2;

// Asks for NV vectors of a row of sums, [row][64 queries], that a product will be added to: a
// matrix unit reads them no faster than they come.
template <class K, int NV>
[[gnu::always_inline]] inline void ask_sums(const typename K::T* sums, int64_t row) {
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) __builtin_prefetch(sums + row * kRow + i * K::kLanes, 1);
}

// Query-like rows as vectors along t = column: [units of columns][64 rows].
template <class K, bool kScale = false>
void pack_lanes(const typename K::S* from, int64_t stride, int64_t rows, int64_t columns,
                typename K::Unit* to, typename K::T factor = 1) {
  if constexpr (!K::kPairs) {
    transpose_in<typename K::X, kScale>(from, stride, rows, columns, factor, to);
  } else {
    using F = typename K::X;  // pairs of bfloat16 move as if they were floats
    const int64_t even = columns / 2;
    if (stride % 2 == 0 || rows == 1) {
      transpose_in<F>((const float*)from, stride / 2, rows, even, (float*)to);
    } else {
      for (int64_t r = 0; r < round_up(rows, K::kLanes); r++)
        for (int64_t c = 0; c < even; c++) {
          uint32_t unit = 0;
          if (r < rows) __builtin_memcpy(&unit, from + r * stride + 2 * c, 4);
          to[c * kRow + r] = unit;
        }
    }
    for (int64_t c = even; c < units_of<K>(columns); c++)
      for (int64_t r = 0; r < round_up(rows, K::kLanes); r++)
        to[c * kRow + r] = 2 * c < columns && r < rows ? from[r * stride + columns - 1].bits : 0;
  }
}

// Rows as units along t = row: [units of rows][ld], zero past the last column and row.
template <class K>
void pack_rows(const typename K::S* from, int64_t stride, int64_t rows, int64_t columns,
               typename K::Unit* to, int64_t ld) {
  using X = typename K::X;
  if constexpr (!K::kPairs) {
    for (int64_t r = 0; r < rows; r++) {
      int64_t c = 0;
#pragma GCC unroll 4
      for (; c + K::kLanes <= columns; c += K::kLanes)
        X::store(to + r * ld + c, X::load(from + r * stride + c));
      if (c < columns) X::store(to + r * ld + c, X::load(from + r * stride + c, columns - c));
    }
  } else {
    K::Dot::interleave(from, stride, rows, columns, to, ld);
  }
}

// to[r][c] = factor[r] * from[c][64 r]; factor has 64 numbers.
template <class K, bool kPast = false>
void write_rows(const typename K::T* from, const typename K::T* factor, int64_t rows,
                int64_t columns, typename K::S* to, int64_t stride) {
  int64_t done = 0;
  if constexpr (K::kPairs)
    done = K::Dot::template transpose_rows<kPast>(from, factor, rows, columns, to, stride);
  if (done < columns)
    transpose_out<typename K::X, kPast>(from + done * kRow, factor, rows, columns - done, to + done,
                                        stride);
}

// K or V as A with t = column, in place or packed. `blocks` of queries read it.
template <class K>
Operand rows_operand(const typename K::S* from, int64_t stride, int64_t rows, int64_t columns,
                     typename K::Unit* scratch, int64_t blocks = kManyBlocks) {
  constexpr int64_t kUnit = sizeof(typename K::Unit), kItem = sizeof(typename K::S);
  if constexpr (K::kPairs) {
    const int64_t units = units_of<K>(columns);
    if (stride == columns && columns == 2 * units && rows == height_of<K>(rows))
      return {(const char*)from, stride * kItem, kUnit};
    if constexpr (K::Dot::kRowBlock > 1) {  // rows of whole vectors
      for (int64_t r = 0; r < height_of<K>(rows); r++)
        for (int64_t c = 0; c < units; c += K::kLanes)
          K::X::store((float*)scratch + r * units + c,
                      K::Dot::load_row(from + (r < rows ? r * stride + 2 * c : 0),
                                       r < rows ? columns - 2 * c : 0));
      return {(const char*)scratch, units * kUnit, kUnit};
    }
    for (int64_t r = 0; r < height_of<K>(rows); r++) {
      for (int64_t c = r < rows ? columns / 2 : 0; c < units; c++) scratch[r * units + c] = 0;
      if (r < rows && columns)
        __builtin_memcpy(scratch + r * units, from + r * stride, (size_t)(columns * kItem));
    }
    return {(const char*)scratch, units * kUnit, kUnit};
  } else {
    if (K::in_place(stride, columns, blocks)) return {(const char*)from, stride * kItem, kUnit};
    const int64_t ld = padded<K>(columns);
    pack_rows<K>(from, stride, rows, columns, scratch, ld);
    return {(const char*)scratch, ld * kUnit, kUnit};
  }
}

// Rows as X with t = row, lanes along the width: `ld` units from one to the next.
template <class K>
struct VectorRows {
  const typename K::Unit* data;
  int64_t ld;
};
// How far packed ones are apart: of rows of whole KB (of panels of two vectors, whole 256 bytes), a
// panel's pieces would share a fourth of the sets of a cache, or fewer, if these were not a line
// longer.
template <class K>
int64_t vectors_width(int64_t columns) {
  constexpr int64_t kItem = sizeof(typename K::Unit);
  constexpr int64_t kLong = K::X::kRegisters == 32 ? 1024 : 256;
  const int64_t ld = padded<K>(columns);
  return !K::kPairs && ld > 0 && ld * kItem % kLong == 0 ? ld + kLine / kItem : ld;
}
template <class K>
VectorRows<K> packed_vectors(const typename K::S* from, int64_t stride, int64_t rows,
                             int64_t columns, typename K::Unit* scratch) {
  const int64_t ld = vectors_width<K>(columns);
  pack_rows<K>(from, stride, rows, columns, scratch, ld);
  return {scratch, ld};
}
// In place, where product_columns reads no more than these columns, or packed. `tiles` of keys read
// them.
template <class K>
VectorRows<K> vectors_operand(const typename K::S* from, int64_t stride, int64_t rows,
                              int64_t columns, typename K::Unit* scratch, int64_t tiles) {
  if constexpr (K::kInPlace)
    if (K::vectors_in_place(stride, columns, tiles) && columns % K::X::Half::kLanes == 0)
      return {from, stride};
  return packed_vectors<K>(from, stride, rows, columns, scratch);
}

// K or V as A with t = row.
template <class K>
Operand columns_operand(const typename K::S* from, int64_t stride, int64_t rows, int64_t columns,
                        typename K::Unit* scratch, int64_t blocks = kManyBlocks) {
  constexpr int64_t kUnit = sizeof(typename K::Unit);
  if constexpr (K::Dot::kRowBlock > 1) {
    K::Dot::transpose_pairs(from, stride, rows, columns, scratch);
    return {(const char*)scratch, units_of<K>(rows) * kUnit, kUnit};
  } else {
    if (K::in_place(stride, columns, blocks))
      return {(const char*)from, kUnit, stride * (int64_t)sizeof(*from)};
    const int64_t ld = padded<K>(columns);
    pack_rows<K>(from, stride, rows, columns, scratch, ld);
    return {(const char*)scratch, kUnit, ld * kUnit};
  }
}

// A score tile as X with t = key, and as A with m = key, t = query.
template <class K>
const typename K::Unit* tile_vectors(const typename K::T* tile, int64_t keys, int64_t vectors,
                                     typename K::Unit* scratch) {
  if constexpr (!K::kPairs) {
    return tile;
  } else {
    K::Dot::pair_rows(tile, keys, vectors, scratch);
    return scratch;
  }
}
// Pairs of queries of each key, `row` units from one key to the next.
template <class K>
Operand pairs_operand(const typename K::Unit* pairs, int64_t row = kRow / 2) {
  constexpr int64_t kUnit = sizeof(typename K::Unit);
  return {(const char*)pairs, row * kUnit, kUnit};
}
template <class K>
Operand tile_operand(const typename K::T* tile, int64_t keys, int64_t rows,
                     typename K::Unit* scratch) {
  constexpr int64_t kUnit = sizeof(typename K::Unit);
  if constexpr (!K::kPairs) {
    return {(const char*)tile, kRow * kUnit, kUnit};
  } else {
    K::Dot::pair_columns(tile, keys, rows, scratch);
    return pairs_operand<K>(scratch);
  }
}

// A tile of a [B, H, Lq, Lk] tensor, to[key][64 queries].
template <class K, class E>
void load_pairs(const Pairs& pairs, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0,
                int64_t keys, typename K::T* to) {
  using X = typename K::X;
  const E* from =
      (const E*)pairs.data + b * pairs.batch + h * pairs.head + q0 * pairs.query + k0 * pairs.key;
  if (pairs.query == 0) {
    for (int64_t n = 0; n < keys; n++) {
      const typename X::V v = X::set(widen(from[n * pairs.key]));
      for (int64_t r = 0; r < rows; r += K::kLanes) X::store(to + n * kRow + r, v);
    }
  } else if (pairs.key == 1) {
    transpose_in<X>(from, pairs.query, rows, keys, to);
  } else {
    for (int64_t n = 0; n < keys; n++) {
      for (int64_t r = 0; r < rows; r++)
        to[n * kRow + r] = widen(from[r * pairs.query + n * pairs.key]);
      for (int64_t r = rows; r < padded<K>(rows); r++) to[n * kRow + r] = 0;
    }
  }
}

// tile_visibility, with bytes of a mask read a vector at a time.
template <class K>
Visibility visibility_of(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows,
                         int64_t k0, int64_t keys, uint64_t* bits) {
  return tile_visibility<typename K::X::U::Bytes>(a, b, h, q0, rows, k0, keys, bits);
}

}  // namespace
}  // namespace mha_ext::cpu

// One row of forward for few queries, and a few rows together: what happens between their scores
// and their output. A tile is stored [row][64 keys]: the lanes of the scores are keys, those of the
// output the width.
namespace mha_ext::cpu {
namespace {

// One row: a head of the group and a query.
struct FewRow {
  int64_t head, query;
};
inline FewRow few_row(const Attention& a, int64_t kv, int64_t row) {
  return {kv * (a.heads / a.kv_heads) + row / a.queries, row % a.queries};
}

// The blocks of keys in which few_scores takes all of by_rows, and the groups of columns in which
// few_values does, of so many vectors each.
template <class K>
int64_t few_blocks(int64_t rows, int64_t keys) {
  int64_t blocks = 0;
  by_rows<K>(rows, [&]<int kRows>(int64_t) { blocks += ceil_div(keys, K::kLanes / kRows); });
  return blocks;
}
template <class K>
constexpr int few_vectors(int64_t rows) {
  return K::X::kRegisters / 2 / rows < 8 ? (int)(K::X::kRegisters / 2 / rows) : 8;
}
template <class K>
constexpr int kFewVectors = K::kApart ? 2 : 1;  // that are loaded together
template <class K>
int64_t few_groups(int64_t rows, int64_t width) {
  int64_t groups = 0;
  by_rows<K>(rows, [&]<int kRows>(int64_t) {
    constexpr int64_t kMost = few_vectors<K>(kRows), kLeast = kFewVectors<K>;
    const int64_t vectors[] = {kMost, min_of(kMost, 4), kLeast};
    int64_t d = 0;
    for (const int64_t some : vectors)
      for (; width - d > (some - kLeast) * K::kLanes; d += some * K::kLanes) groups++;
  });
  return max_of(1, groups);
}

// The bias of one row, added to its scores; a bias of -inf hides its key.
template <class K, class E>
uint64_t few_bias(const Attention& a, int64_t b, FewRow row, int64_t k0, int64_t keys,
                  typename K::T* bias, typename K::T* s) {
  const E* from = (const E*)a.bias.data + b * a.bias.batch + row.head * a.bias.head +
                  row.query * a.bias.query + k0 * a.bias.key;
  uint64_t hidden = 0;
  if (a.bias.key == 1) {
    using X = typename K::X;
    const typename X::V finite = X::set(Exp<typename K::T>::lowest_finite);
    for (int64_t n = 0; n < keys; n += K::kLanes) {
      const typename X::V v = load_up_to<X>(from + n, keys - n);
      hidden |= X::bits(X::eq(v, X::set(-(typename K::T)INFINITY))) << n;
      X::store(s + n, X::max(finite, X::add(X::load(s + n), v)));
    }
    return ~hidden;
  }
  for (int64_t n = 0; n < keys; n++) {
    bias[n] = widen(from[n * a.bias.key]);
    hidden |= (uint64_t)(bias[n] == -(typename K::T)INFINITY) << n;
    s[n] += bias[n];
    if (s[n] == -(typename K::T)INFINITY)
      s[n] = Exp<typename K::T>::lowest_finite;  // finite stays finite
  }
  return ~hidden;
}

// Scores to P for one row of a tile, as softmax_tile does for a column. kAll: the row sees all of
// 64 keys.
template <class K, bool kAll>
[[gnu::always_inline]] inline void few_softmax_of(uint64_t bits, int64_t keys, typename K::T* s,
                                                  typename K::T* m, typename K::T* l,
                                                  typename K::T* out, int64_t value_width) {
  using X = typename K::X;
  using V = typename X::V;
  using T = typename K::T;
  constexpr int kLanes = K::kLanes;
  const V lowest = X::set(-(T)INFINITY);
  V tops = lowest;
  for (int64_t n = 0; n < keys; n += kLanes) {
    V v = X::load(s + n);
    if constexpr (!kAll) {
      v = X::select(X::mask(bits >> n), v, lowest);
      X::store(s + n, v);
    }
    tops = X::max(v, tops);
  }
  const T top = X::largest(tops);
  if (top > *m + (T)5.5) {
    T lane[kLanes];
    X::store(lane, exp_of<X>(X::set(*m - top)));
    const V factor = X::set(lane[0]);
    *l *= lane[0];
    *m = top;
    for (int64_t d = 0; d < value_width; d += kLanes)
      X::store(out + d, X::mul(factor, X::load(out + d)));
  }
  const V level = X::set(*m == -(T)INFINITY ? 0 : *m);
  V sum = X::zero();
  for (int64_t n = 0; n < keys; n += kLanes) {
    const V p = exp_of<X>(X::sub(X::load(s + n), level));
    X::store(s + n, p);
    sum = X::add(sum, p);
  }
  *l += X::sum(sum);
}

template <class K>
void few_softmax(uint64_t bits, int64_t keys, typename K::T* s, typename K::T* m, typename K::T* l,
                 typename K::T* out, int64_t value_width) {
  if (keys == kTile && bits == ~0ull)
    few_softmax_of<K, true>(bits, kTile, s, m, l, out, value_width);
  else
    few_softmax_of<K, false>(bits, keys, s, m, l, out, value_width);
}

// Vectors of a row of values, of which `left` columns are left: as few_product adds them up.
template <class K, int kVectors>
[[gnu::always_inline]] inline void load_values(const typename K::S* value, int64_t left,
                                               typename K::X::V (&v)[kVectors]) {
  using X = typename K::X;
  if constexpr (K::kSplit) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i += 2) {
      const auto pairs = X::load_pairs(value + i * K::kLanes,
                                       i + 2 < kVectors ? 2 * K::kLanes : left - i * K::kLanes);
      v[i] = X::split(pairs, 0);
      v[i + 1] = X::split(pairs, 1);
    }
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++)
      v[i] = i + 1 < kVectors ? X::load(value + i * K::kLanes)
                              : load_up_to<X>(value + i * K::kLanes, left - i * K::kLanes);
  }
}
// The same of two rows, as pairs; of one and zeros where the second is not there.
template <class K, bool kBoth, int kVectors>
[[gnu::always_inline]] inline void load_value_pairs(const typename K::S* value, int64_t stride,
                                                    int64_t left, typename K::X::V (&v)[kVectors]) {
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; i += 2) {
    const int64_t at = i * K::kLanes, some = i + 2 < kVectors ? 2 * K::kLanes : left - at;
    const auto x = K::Dot::load_row(value + at, some);
    const auto y = kBoth ? K::Dot::load_row(value + stride + at, some) : K::X::zero();
    v[i] = K::Dot::pair_columns_of(x, y, 0);
    v[i + 1] = K::Dot::pair_columns_of(x, y, 1);
  }
}

// Weights of keys for so many rows, s[row][key], as the products with values take them: two keys in
// a unit where values are pairs.
template <class K>
constexpr int64_t kFewUnits = kTile / K::Dot::kStep;  // of a row
template <class K, int kRows>
const typename K::Unit* few_weights(const typename K::T* s, int64_t keys,
                                    typename K::Unit (&room)[kRows * kFewUnits<K>]) {
  if constexpr (!K::kPairs) return s;
  if constexpr (K::kPairs) K::Dot::pair_columns(s, kRows, keys, room);
  return room;
}

// sum += what a weight, of one key or of two, adds.
template <class K>
[[gnu::always_inline]] inline typename K::X::V add_weight(typename K::X::V sum, typename K::X::V v,
                                                          typename K::Unit weight) {
  if constexpr (K::kPairs)
    return K::Dot::add_products(sum, v, K::Dot::set(weight));
  else
    return K::X::fma(v, K::X::set(weight), sum);
}

// out[row][0:width of kVectors] += sum over the keys of weight[row][n] value[n], for kRows rows.
enum class Asks { kNothing, kNext, kBeside };
template <class K, int kRows, int kVectors, Asks kAsks>
void few_product(const typename K::S* value, int64_t stride, int64_t keys, int64_t left,
                 const typename K::Unit* weight, typename K::T* out, int64_t ld,
                 const FewAsk<K>& ask) {
  using X = typename K::X;
  constexpr int kStep = K::Dot::kStep;
  typename X::V sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) sum[r][i] = X::load(out + r * ld + i * K::kLanes);
  const auto add = [&]<int kKeys>(int64_t n) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int64_t k = n; k < n + kKeys; k++) {
      if constexpr (kAsks == Asks::kNext) ask.next->ask();
      if constexpr (kAsks == Asks::kBeside) {
        const typename K::S* const beside = ask.beside(value, stride, keys, k);
#pragma GCC unroll 8
        for (int64_t i = 0; i < kVectors * K::kLanes; i += kLineItems<K>)
          __builtin_prefetch(beside + i, 0, X::kAskedInto);
      }
    }
    typename X::V v[kVectors];
    if constexpr (K::kPairs)
      load_value_pairs<K, kKeys == 2>(value + n * stride, stride, left, v);
    else
      load_values<K>(value + n * stride, left, v);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const typename K::Unit w = weight[r * kFewUnits<K> + n / kStep];
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; i++) sum[r][i] = add_weight<K>(sum[r][i], v[i], w);
    }
  };
  int64_t n = 0;
  for (; n + kStep <= keys; n += kStep) add.template operator()<kStep>(n);
  if (n < keys) add.template operator()<1>(n);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) X::store(out + r * ld + i * K::kLanes, sum[r][i]);
}

template <class K, int kRows, bool kInOrder = false>
void few_values(const typename K::S* value, int64_t stride, int64_t keys, int64_t width,
                const typename K::T* s, typename K::T* out, int64_t ld, FewAsk<K> ask = {}) {
  constexpr int kMost = few_vectors<K>(kRows);
  constexpr bool kBeside = kAsksBeside<K, kRows, kInOrder>;
  typename K::Unit room[kRows * kFewUnits<K>];
  const typename K::Unit* const weights = few_weights<K, kRows>(s, keys, room);
  int64_t d = 0;
  const auto columns = [&]<int kVectors>() __attribute__((always_inline)) {
    constexpr int64_t kWidth = kVectors * K::kLanes;
    const auto add = [&]<Asks kAsks>() __attribute__((always_inline)) {
      few_product<K, kRows, kVectors, kAsks>(value + d, stride, keys, width - d, weights, out + d,
                                             ld, ask);
    };
    for (; width - d > kWidth - kFewVectors<K> * K::kLanes; d += kWidth) {
      const bool begins_line = kWidth >= kLineItems<K> || d % kLineItems<K> == 0;
      if (kBeside && ask.then && begins_line) {
        add.template operator()<Asks::kBeside>();
      } else if (ask.next) {
        add.template operator()<Asks::kNext>();
      } else {
        add.template operator()<Asks::kNothing>();
      }
      if (kBeside && ask.then) ask.then += kWidth;
    }
  };
  columns.template operator()<kMost>();
  if constexpr (kMost > 4) columns.template operator()<4>();
  columns.template operator()<kFewVectors<K>>();
}

// out += weight[n] value[n] for the keys in `bits` only, the columns in their order.
template <class K>
void few_selected(const typename K::S* value, int64_t stride, uint64_t bits, int64_t width,
                  const typename K::T* weight, typename K::T* out) {
  using X = typename K::X;
  for (; bits; bits &= bits - 1) {
    const int64_t n = __builtin_ctzll(bits);
    const typename X::V p = X::set(weight[n]);
    for (int64_t d = 0; d < width; d += K::kLanes)
      X::store(out + d,
               X::fma(load_up_to<X>(value + n * stride + d, width - d), p, X::load(out + d)));
  }
}
// What few_values adds, bit by bit, where the values of other keys than those in `bits`, whose
// weights are 0, may be anything.
template <class K>
void few_seen_values(const typename K::S* value, int64_t stride, uint64_t bits, int64_t width,
                     const typename K::T* s, typename K::T* out) {
  using X = typename K::X;
  if constexpr (!K::kApart) {
    few_selected<K>(value, stride, bits, width, s, out);
  } else {
    constexpr int kStep = K::Dot::kStep;
    typename K::Unit room[kFewUnits<K>];
    const int64_t keys = bits ? 64 - __builtin_clzll(bits) : 0;  // beyond, s may hold anything
    const typename K::Unit* const weights = few_weights<K, 1>(s, keys, room);
    for (int64_t n = 0; n < kTile; n += kStep) {
      const uint64_t seen = bits >> n & first_bits(kStep);
      if (!seen) continue;
      for (int64_t d = 0; d < width; d += 2 * K::kLanes) {
        typename X::V v[2];
        if constexpr (K::kPairs) {
          const auto row = [&](int64_t k) {
            return seen >> k & 1 ? K::Dot::load_row(value + (n + k) * stride + d, width - d)
                                 : X::zero();
          };
          const typename X::V x = row(0), y = row(1);
          for (int i = 0; i < 2; i++) v[i] = K::Dot::pair_columns_of(x, y, i);
        } else {
          load_values<K>(value + n * stride + d, width - d, v);
        }
        for (int i = 0; i < 2; i++) {
          typename K::T* const to = out + d + i * K::kLanes;
          X::store(to, add_weight<K>(X::load(to), v[i], weights[n / kStep]));
        }
      }
    }
  }
}

// The columns of few_product in their order.
template <class K>
void join_columns(int64_t width, typename K::T* out) {
  using X = typename K::X;
  if constexpr (K::kApart)
    for (int64_t d = 0; d < width; d += 2 * K::kLanes) {
      typename X::V v[2] = {X::load(out + d), X::load(out + d + K::kLanes)};
      if constexpr (K::kPairs)
        K::Dot::join(v);
      else
        X::join(v);
      X::store(out + d, v[0]);
      X::store(out + d + K::kLanes, v[1]);
    }
}

// A row that sees nothing, where P is uniform: the mean of all values.
template <class K>
void few_uniform(const Attention& a, int64_t b, int64_t kv, FewRow row, typename K::T* weight,
                 typename K::T* out) {
  for (int64_t d = 0; d < padded<K>(a.value_dim); d++) out[d] = 0;
  for (int64_t k0 = 0; k0 < a.keys; k0 += kTile) {
    const int64_t keys = min_of(kTile, a.keys - k0);
    const uint64_t keep =
        a.dropout.seed ? dropout_row<K>(a, b, row.head, row.query, k0, keys) : first_bits(keys);
    for (int64_t n = 0; n < keys; n++)
      weight[n] = keep >> n & 1 ? (typename K::T)1 / (typename K::T)a.keys : 0;
    few_selected<K>(row_of<K>(a.value, b, kv, k0), a.value.row, first_bits(keys), a.value_dim,
                    weight, out);
  }
}

}  // namespace
}  // namespace mha_ext::cpu

// Forward for few queries, as in decoding. Here the memory is the limit: K and V are read once, as
// they stand, for all rows that share them. A tile is stored [row][64 keys]: the lanes of the
// scores are keys, those of the output the width.
namespace mha_ext::cpu {
namespace {

template <class K>
struct FewScratch {
  using T = typename K::T;
  T *query, *out, *s, *m, *l, *bias;
  uint64_t* bits;

  FewScratch(const Attention& a, Arena& arena) {
    query = arena.take<T>(kFewRows * padded<K>(a.head_dim));
    out = arena.take<T>(kFewRows * padded<K>(a.value_dim));
    s = arena.take<T>(kFewRows * kTile);
    m = arena.take<T>(kFewRows);
    l = arena.take<T>(kFewRows);
    bias = arena.take<T>(kTile);
    bits = arena.take<uint64_t>(kFewRows);
  }
};

// One row: a head of the group and a query.
struct FewRow {
  int64_t head, query;
};
inline FewRow few_row(const Attention& a, int64_t kv, int64_t row) {
  return {kv * (a.heads / a.kv_heads) + row / a.queries, row % a.queries};
}

// Adds the lanes in order.
template <class X>
typename X::T sum_lanes(typename X::V v) {
  typename X::T lane[X::kLanes], sum = 0;
  X::store(lane, v);
  for (int i = 0; i < X::kLanes; i++) sum += lane[i];
  return sum;
}

// The bias of one row, added to its scores; a bias of -inf hides its key.
template <class K, class E>
uint64_t few_bias(const Attention& a, int64_t b, FewRow row, int64_t k0, int64_t keys,
                  typename K::T* bias, typename K::T* s) {
  const E* from = (const E*)a.bias.data + b * a.bias.batch + row.head * a.bias.head +
                  row.query * a.bias.query + k0 * a.bias.key;
  uint64_t hidden = 0;
  for (int64_t n = 0; n < keys; n++) {
    bias[n] = widen(from[n * a.bias.key]);
    hidden |= (uint64_t)(bias[n] == -(typename K::T)INFINITY) << n;
    s[n] += bias[n];
    if (s[n] == -(typename K::T)INFINITY)
      s[n] = Exp<typename K::T>::lowest_finite;  // finite stays finite
  }
  return ~hidden;
}

inline uint64_t few_keep(const Attention& a, int64_t b, FewRow row, int64_t k0, int64_t keys) {
  uint64_t keep = 0;
  for (int64_t n = 0; n < keys; n++)
    keep |= (uint64_t)keeps(a.dropout, a.origin.batch + b, a.origin.head + row.head,
                            a.origin.query + row.query, a.origin.key + k0 + n)
            << n;
  return keep;
}

// Scores to P for one row of a tile, as softmax_tile does for a column.
template <class K>
void few_softmax(uint64_t bits, int64_t keys, typename K::T* s, typename K::T* m, typename K::T* l,
                 typename K::T* out, int64_t value_width) {
  using X = typename K::X;
  using V = typename X::V;
  using T = typename K::T;
  constexpr int kLanes = K::kLanes;
  const V lowest = X::set(-(T)INFINITY);
  V tops = lowest;
  for (int64_t n = 0; n < keys; n += kLanes) {
    const V v = X::select(X::mask(bits >> n), X::load(s + n), lowest);
    X::store(s + n, v);
    tops = X::max(v, tops);
  }
  T lane[kLanes], top = -(T)INFINITY;
  X::store(lane, tops);
  for (int i = 0; i < kLanes; i++) top = lane[i] > top ? lane[i] : top;
  if (top > *m + (T)5.5) {
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
  *l += sum_lanes<X>(sum);
}

// out[row][0:width of kVectors] += sum over the keys of s[row][n] value[n], for kRows rows.
template <class K, int kRows, int kVectors>
void few_product(const typename K::S* value, int64_t stride, int64_t keys, int64_t left,
                 const typename K::T* s, typename K::T* out, int64_t ld) {
  using X = typename K::X;
  typename X::V sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) sum[r][i] = X::load(out + r * ld + i * K::kLanes);
  for (int64_t n = 0; n < keys; n++) {
    typename X::V v[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++)
      v[i] = i + 1 < kVectors
                 ? X::load(value + n * stride + i * K::kLanes)
                 : load_up_to<X>(value + n * stride + i * K::kLanes, left - i * K::kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const typename X::V p = X::set(s[r * kTile + n]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++) sum[r][i] = X::fma(v[i], p, sum[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) X::store(out + r * ld + i * K::kLanes, sum[r][i]);
}

template <class K, int kRows>
void few_values(const typename K::S* value, int64_t stride, int64_t keys, int64_t width,
                const typename K::T* s, typename K::T* out, int64_t ld) {
  constexpr int64_t kLanes = K::kLanes;
  int64_t d = 0;
  for (; width - d > 3 * kLanes; d += 4 * kLanes)
    few_product<K, kRows, 4>(value + d, stride, keys, width - d, s, out + d, ld);
  for (; d < width; d += kLanes)
    few_product<K, kRows, 1>(value + d, stride, keys, width - d, s, out + d, ld);
}

// out[row] += weight[n] value[n] for the keys in `bits` only.
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

// A row that sees nothing, where P is uniform: the mean of all values.
template <class K>
void few_uniform(const Attention& a, int64_t b, int64_t kv, FewRow row, typename K::T* weight,
                 typename K::T* out) {
  for (int64_t d = 0; d < padded<K>(a.value_dim); d++) out[d] = 0;
  for (int64_t k0 = 0; k0 < a.keys; k0 += kTile) {
    const int64_t keys = min_of(kTile, a.keys - k0);
    const uint64_t keep = a.dropout.seed ? few_keep(a, b, row, k0, keys) : first_bits(keys);
    for (int64_t n = 0; n < keys; n++)
      weight[n] = keep >> n & 1 ? (typename K::T)1 / (typename K::T)a.keys : 0;
    few_selected<K>(row_of<K>(a.value, b, kv, k0), a.value.row, first_bits(keys), a.value_dim,
                    weight, out);
  }
}

template <class K>
void forward_few(const Attention& a, int64_t b, int64_t kv, int64_t first, int64_t rows,
                 void* scratch) {
  using T = typename K::T;
  using X = typename K::X;
  Arena arena{(char*)scratch};
  FewScratch<K> w(a, arena);
  const int64_t ld = padded<K>(a.head_dim), ldv = padded<K>(a.value_dim);
  const auto row_at = [&](int64_t r) { return few_row(a, kv, first + r); };
  Range seen{a.keys, 0};
  for (int64_t r = 0; r < rows; r++) {
    const FewRow row = row_at(r);
    const Range band = band_keys(a, b, row.query);
    if (band.begin < band.end) seen = {min_of(seen.begin, band.begin), max_of(seen.end, band.end)};
    scale_query<K>(a, b, row.head, row.query, w.query + r * ld);
    for (int64_t d = 0; d < ldv; d++) w.out[r * ldv + d] = 0;
    w.m[r] = -(T)INFINITY;
    w.l[r] = 0;
  }

  for (int64_t k0 = seen.begin / kTile * kTile; k0 < seen.end; k0 += kTile) {
    const int64_t keys = min_of(kTile, a.keys - k0);
    const typename K::S* key = row_of<K>(a.key, b, kv, k0);
    const typename K::S* value = row_of<K>(a.value, b, kv, k0);
    uint64_t any = 0, all = ~0ull;
    for (int64_t r = 0; r < rows; r++) {
      w.bits[r] = row_visibility(a, b, row_at(r).head, row_at(r).query, k0, keys);
      any |= w.bits[r];
    }
    if (!any) continue;
    for (int64_t r = 0; r < rows; r++) {
      T* s = w.s + r * kTile;
      few_scores<K>(key, a.key.row, keys, a.head_dim, w.query + r * ld, s);
      if (a.bias.data)
        w.bits[r] &= a.bias_is_float32
                         ? few_bias<K, float>(a, b, row_at(r), k0, keys, w.bias, s)
                         : few_bias<K, typename K::S>(a, b, row_at(r), k0, keys, w.bias, s);
      few_softmax<K>(w.bits[r], keys, s, w.m + r, w.l + r, w.out + r * ldv, ldv);
      if (a.dropout.seed) {
        const uint64_t keep = few_keep(a, b, row_at(r), k0, keys);
        for (int64_t n = 0; n < keys; n++) s[n] = keep >> n & 1 ? s[n] : 0;
      }
      all &= w.bits[r];
    }
    if (all != first_bits(keys) && !all_finite<K>(value, a.value.row, keys, a.value_dim)) {
      for (int64_t r = 0; r < rows; r++)
        few_selected<K>(value, a.value.row, w.bits[r], a.value_dim, w.s + r * kTile,
                        w.out + r * ldv);
      continue;
    }
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
      few_values<K, 4>(value, a.value.row, keys, a.value_dim, w.s + r * kTile, w.out + r * ldv,
                       ldv);
    for (; r < rows; r++)
      few_values<K, 1>(value, a.value.row, keys, a.value_dim, w.s + r * kTile, w.out + r * ldv,
                       ldv);
  }

  for (int64_t r = 0; r < rows; r++) {
    const FewRow row = row_at(r);
    const int64_t at = (b * a.heads + row.head) * a.queries + row.query;
    T factor = (T)a.dropout.keep_scale;
    ((T*)a.lse)[at] = -(T)INFINITY;
    ((T*)a.lse_low)[at] = 0;
    if (w.l[r] != 0) {
      add_log(w.m[r], w.l[r], (T*)a.lse + at, (T*)a.lse_low + at);
      factor /= w.l[r];
    } else if (a.uniform_empty_rows) {
      few_uniform<K>(a, b, kv, row, w.s, w.out + r * ldv);
    }
    scale_out<X>(w.out + r * ldv, ldv, factor, 1, a.value_dim,
                 row_of<K>(a.out, b, row.head, row.query), a.out.row);
  }
}

}  // namespace
}  // namespace mha_ext::cpu

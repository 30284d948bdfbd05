// Forward for few queries, as in decoding. Here the memory is the limit: K and V are read once, as
// they stand, for all rows that share them. A tile is stored [row][64 keys]: the lanes of the
// scores are keys, those of the output the width. Heads that lie side by side are taken together,
// a few keys at a time, so that memory is read in its order, and what follows is asked for in that
// order too.
namespace mha_ext::cpu {
namespace {

// Rows of a task: those of all heads that share K and V, padded to what the products take.
inline int64_t few_rows(const Attention& a) {
  return round_up(min_of(kFewRows, a.heads / max_of(1, a.kv_heads) * a.queries), 4);
}

// Tiles of K, then of V, that are read together where a head's rows follow one another.
constexpr int64_t kFewTiles = 8;

// What the rows carry through the keys: maximum, sum, and the unnormalised output.
template <class K>
struct FewState {
  using T = typename K::T;
  T *m, *l, *out;

  FewState(const Attention& a, Arena& arena) {
    m = arena.take<T>(kFewRows);
    l = arena.take<T>(kFewRows);
    out = arena.take<T>(few_rows(a) * padded<K>(a.value_dim));
  }
};

// Of the key/value heads that are taken together.
template <class K>
struct FewStates {
  char* base;
  int64_t bytes;

  FewStates(const Attention& a, Arena& arena) {
    Arena one{nullptr};
    FewState<K> state(a, one);
    bytes = one.used;
    base = arena.take<char>(few_heads(a) * bytes);
  }
  FewState<K> of(const Attention& a, int64_t head) const {
    Arena one{base + head * bytes};
    return FewState<K>(a, one);
  }
};

template <class K>
struct FewScratch {
  using T = typename K::T;
  FewStates<K> state, sum;  // of one range of keys, and of those before it
  T *query, *s, *bias;      // of the rows of all heads; s: or of one head in kFewTiles tiles
  uint64_t *bits, *any;     // of the rows, of the heads; or so

  FewScratch(const Attention& a, Arena& arena) : state(a, arena), sum(a, arena) {
    const int64_t heads = few_heads(a), rows = few_rows(a), tiles = max_of(heads, kFewTiles);
    query = arena.take<T>(heads * rows * padded<K>(a.head_dim));
    s = arena.take<T>(tiles * rows * kTile);
    bias = arena.take<T>(kTile);
    bits = arena.take<uint64_t>(tiles * rows);
    any = arena.take<uint64_t>(tiles);
  }
};

// One row: a head of the group and a query.
struct FewRow {
  int64_t head, query;
};
inline FewRow few_row(const Attention& a, int64_t kv, int64_t row) {
  return {kv * (a.heads / a.kv_heads) + row / a.queries, row % a.queries};
}

// Blocks of keys in which few_scores takes the first of by_rows.
template <class K>
int64_t few_blocks(int64_t rows, int64_t keys) {
  const int64_t together = rows > 2 && K::kLanes >= 4 ? 4 : min_of(rows, 2);
  return ceil_div(keys, K::kLanes / together);
}

// run<n>(r) for rows r .. r + n - 1. Three rows are done as four: the padding holds zeros.
template <class K, class Run>
void by_rows(int64_t rows, const Run& run) {
  int64_t r = 0;
  if constexpr (K::kLanes >= 4)
    for (; rows - r > 2; r += 4) run.template operator()<4>(r);
  for (; rows - r > 1; r += 2) run.template operator()<2>(r);
  if (r < rows) run.template operator()<1>(r);
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

// out[row][0:width of kVectors] += sum over the keys of s[row][n] value[n], for kRows rows.
template <class K, int kRows, int kVectors, bool kAsk>
void few_product(const typename K::S* value, int64_t stride, int64_t keys, int64_t left,
                 const typename K::T* s, typename K::T* out, int64_t ld, NextRows* next) {
  using X = typename K::X;
  typename X::V sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) sum[r][i] = X::load(out + r * ld + i * K::kLanes);
  for (int64_t n = 0; n < keys; n++) {
    if constexpr (kAsk) next->ask();
    typename X::V v[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++)
      v[i] = i + 1 < kVectors
                 ? X::load(value + n * stride + i * K::kLanes)
                 : load_up_to<X>(value + n * stride + i * K::kLanes, left - i * K::kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const typename X::V p = X::set(s[r * kTile + n]);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; i++) sum[r][i] = X::fma(v[i], p, sum[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) X::store(out + r * ld + i * K::kLanes, sum[r][i]);
}

template <class K, int kRows>
void few_values(const typename K::S* value, int64_t stride, int64_t keys, int64_t width,
                const typename K::T* s, typename K::T* out, int64_t ld, NextRows* next) {
  constexpr int kSums = K::X::kRegisters / 2, kMost = kSums / kRows < 8 ? kSums / kRows : 8;
  int64_t d = 0;
  const auto columns = [&]<int kVectors>() __attribute__((always_inline)) {
    for (; width - d > (kVectors - 1) * K::kLanes; d += kVectors * K::kLanes)
      if (next && d == 0)
        few_product<K, kRows, kVectors, true>(value + d, stride, keys, width - d, s, out + d, ld,
                                              next);
      else
        few_product<K, kRows, kVectors, false>(value + d, stride, keys, width - d, s, out + d, ld,
                                               nullptr);
  };
  columns.template operator()<kMost>();
  if constexpr (kMost > 4) columns.template operator()<4>();
  columns.template operator()<1>();
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

// Task of few queries: rows [first, first + rows) of each of `heads` key/value heads.
struct FewTask {
  int64_t batch, kv, heads, first, rows;
};

// The keys of one range, into the states. So many keys of all heads, one head after the other; then
// the next keys. What comes is asked for kFewKeys early, or more where these are but little memory.
// One row alone leaves time to read the rows of a head, where they follow one another, in their
// order: kFewTiles tiles of K, then as many of V. Hardware foresees those better.
template <class K>
class FewScan {
  using T = typename K::T;

 public:
  FewScan(const Attention& a, const FewTask& task, const FewStates<K>& states, FewScratch<K>& w)
      : a_(a), task_(task), states_(states), w_(w) {}

  void run(Range range) {
    seen_ = {a_.keys, 0};
    for (int64_t r = 0; r < task_.rows; r++) {
      const Range band = band_keys(a_, task_.batch, row_at(0, r).query);
      if (band.begin < band.end)
        seen_ = {min_of(seen_.begin, band.begin), max_of(seen_.end, band.end)};
    }
    seen_ = {max_of(seen_.begin / kTile * kTile, range.begin), min_of(seen_.end, range.end)};
    for (int64_t head = 0; head < task_.heads; head++) {
      const FewState<K> state = states_.of(a_, head);
      for (int64_t r = 0; r < task_.rows; r++) {
        state.m[r] = -(T)INFINITY;
        state.l[r] = 0;
      }
      for (int64_t i = 0; i < ld_rows_ * ldv_; i++) state.out[i] = 0;
    }
    const int64_t tiles = in_order_ ? kFewTiles : 1;
    for (int64_t i = 0; i < tiles * task_.heads; i++)  // the rows that are padding
      for (int64_t r = task_.rows; r < ld_rows_; r++)
        for (int64_t n = 0; n < kTile; n++) w_.s[(i * ld_rows_ + r) * kTile + n] = 0;

    for (int64_t k0 = seen_.begin; k0 < seen_.end; k0 += tiles * kTile) {
      const int64_t count = min_of(tiles, ceil_div(seen_.end - k0, kTile));
      for (int64_t t = 0; t < count; t++) scores(k0 + t * kTile, t);
      for (int64_t t = 0; t < count; t++) values(k0 + t * kTile, t);
    }
  }

 private:
  FewRow row_at(int64_t head, int64_t r) const {
    return few_row(a_, task_.kv + head, task_.first + r);
  }
  // Of tile t of those that are taken together: scores of a head, what its rows see, and whether
  // any of them sees anything.
  T* s_of(int64_t t, int64_t head) const {
    return w_.s + (t * task_.heads + head) * ld_rows_ * kTile;
  }
  uint64_t* bits_of(int64_t t, int64_t head) const {
    return w_.bits + (t * task_.heads + head) * ld_rows_;
  }
  uint64_t& any_of(int64_t t, int64_t head) const { return w_.any[t * task_.heads + head]; }

  // kFewKeys rows of all heads, as far as they lie before `last`, a share with each of `units`.
  NextRows rows_ahead(const Rows& t, int64_t width, int64_t first, int64_t last,
                      int64_t units) const {
    constexpr int64_t kItem = sizeof(typename K::S);
    const int64_t bytes = ((task_.heads - 1) * t.head + width) * kItem;
    return NextRows((const char*)row_of<K>(t, task_.batch, task_.kv, first), t.row * kItem, bytes,
                    max_of(0, min_of(kFewKeys, last - first)), units);
  }
  static int64_t keys_ahead(const Attention& a, int64_t heads) {
    constexpr int64_t kLeast = 8192;  // bytes
    const int64_t widest = max_of(1, max_of(a.head_dim, a.value_dim));
    return min_of(kTile, round_up(ceil_div(kLeast, heads * widest * (int64_t)sizeof(typename K::S)),
                                  kFewKeys));
  }

  void scores(int64_t k0, int64_t t) {
    const int64_t keys = min_of(kTile, a_.keys - k0), b = task_.batch, rows = task_.rows;
    uint64_t any = 0;
    for (int64_t head = 0; head < task_.heads; head++) {
      uint64_t& seen = any_of(t, head);
      seen = 0;
      for (int64_t r = 0; r < rows; r++) {
        const FewRow row = row_at(head, r);
        seen |= bits_of(t, head)[r] = row_visibility(a_, b, row.head, row.query, k0, keys);
      }
      any |= seen;
    }
    if (!any) return;
    for (int64_t n = 0; n < keys; n += together_) {
      const int64_t some = min_of(together_, keys - n), then = n + ahead_;
      NextRows next;
      if (!in_order_) {
        const int64_t units = task_.heads * few_blocks<K>(rows, some);
        next = then < keys ? rows_ahead(a_.key, a_.head_dim, k0 + then, k0 + keys, units)
                           : rows_ahead(a_.value, a_.value_dim, k0 + then - keys, k0 + keys, units);
      }
      for (int64_t head = 0; head < task_.heads; head++) {
        if (!any_of(t, head)) continue;
        const typename K::S* key = row_of<K>(a_.key, b, task_.kv + head, k0 + n);
        const T* query = w_.query + head * ld_rows_ * ld_;
        T* s = s_of(t, head) + n;
        by_rows<K>(rows, [&]<int kRows>(int64_t r) __attribute__((always_inline)) {
          if (kRows == 1 && in_order_)
            few_scores<K, 1, true>(key, a_.key.row, some, a_.head_dim, query, ld_, (T)a_.scale, s);
          else
            few_scores<K, kRows>(key, a_.key.row, some, a_.head_dim, query + r * ld_, ld_,
                                 (T)a_.scale, s + r * kTile, r ? nullptr : &next);
        });
      }
    }
  }

  void values(int64_t k0, int64_t t) {
    const int64_t keys = min_of(kTile, a_.keys - k0), b = task_.batch, rows = task_.rows;
    uint64_t all = ~0ull, any = 0;
    for (int64_t head = 0; head < task_.heads; head++) {
      if (!any_of(t, head)) continue;
      any |= any_of(t, head);
      const FewState<K> state = states_.of(a_, head);
      for (int64_t r = 0; r < rows; r++) {
        T* s = s_of(t, head) + r * kTile;
        uint64_t& bits = bits_of(t, head)[r];
        const FewRow row = row_at(head, r);
        if (a_.bias.data)
          bits &= a_.bias_is_float32 ? few_bias<K, float>(a_, b, row, k0, keys, w_.bias, s)
                                     : few_bias<K, typename K::S>(a_, b, row, k0, keys, w_.bias, s);
        few_softmax<K>(bits, keys, s, state.m + r, state.l + r, state.out + r * ldv_, ldv_);
        if (a_.dropout.seed) {
          const uint64_t keep = few_keep(a_, b, row, k0, keys);
          for (int64_t n = 0; n < keys; n++) s[n] = keep >> n & 1 ? s[n] : 0;
        }
        all &= bits;
      }
    }
    if (!any) return;
    bool finite = true;
    for (int64_t head = 0; all != first_bits(keys) && finite && head < task_.heads; head++)
      finite = all_finite<K>(row_of<K>(a_.value, b, task_.kv + head, k0), a_.value.row, keys,
                             a_.value_dim);
    if (!finite) {
      for (int64_t head = 0; head < task_.heads; head++) {
        if (!any_of(t, head)) continue;
        const FewState<K> state = states_.of(a_, head);
        for (int64_t r = 0; r < rows; r++)
          few_selected<K>(row_of<K>(a_.value, b, task_.kv + head, k0), a_.value.row,
                          bits_of(t, head)[r], a_.value_dim, s_of(t, head) + r * kTile,
                          state.out + r * ldv_);
      }
      return;
    }
    for (int64_t n = 0; n < keys; n += together_) {
      const int64_t some = min_of(together_, keys - n), then = n + ahead_;
      NextRows next;
      if (!in_order_) {
        const int64_t units = task_.heads * some;
        next = then < keys
                   ? rows_ahead(a_.value, a_.value_dim, k0 + then, k0 + keys, units)
                   : rows_ahead(a_.key, a_.head_dim, k0 + kTile + then - keys, seen_.end, units);
      }
      for (int64_t head = 0; head < task_.heads; head++) {
        if (!any_of(t, head)) continue;
        const FewState<K> state = states_.of(a_, head);
        const typename K::S* value = row_of<K>(a_.value, b, task_.kv + head, k0 + n);
        by_rows<K>(rows, [&]<int kRows>(int64_t r) __attribute__((always_inline)) {
          few_values<K, kRows>(value, a_.value.row, some, a_.value_dim,
                               s_of(t, head) + r * kTile + n, state.out + r * ldv_, ldv_,
                               r || in_order_ ? nullptr : &next);
        });
      }
    }
  }

  const Attention& a_;
  const FewTask& task_;
  const FewStates<K>& states_;
  FewScratch<K>& w_;
  const int64_t ld_ = padded<K>(a_.head_dim), ldv_ = padded<K>(a_.value_dim);
  const int64_t ld_rows_ = few_rows(a_), ahead_ = keys_ahead(a_, task_.heads);
  const bool in_order_ = task_.heads == 1 && task_.rows == 1 && a_.key.row == a_.head_dim &&
                         a_.value.row == a_.value_dim;
  const int64_t together_ = in_order_ ? kTile : kFewKeys;
  Range seen_;
};

// Adds the state of the next range of keys to that of those before it.
template <class K>
void few_merge(const Attention& a, int64_t rows, const FewState<K>& next, const FewState<K>& sum) {
  using T = typename K::T;
  using X = typename K::X;
  const int64_t ldv = padded<K>(a.value_dim);
  T old_factor[kFewRows], factor[kFewRows];
  merge_levels<K>(round_up(rows, K::kLanes), next.m, next.l, sum.m, sum.l, old_factor, factor);
  for (int64_t r = 0; r < rows; r++) {
    const typename X::V f0 = X::set(old_factor[r]), f1 = X::set(factor[r]);
    for (int64_t at = r * ldv; at < (r + 1) * ldv; at += K::kLanes)
      X::store(sum.out + at, X::fma(f1, X::load(next.out + at), X::mul(f0, X::load(sum.out + at))));
  }
}

template <class K>
void few_finish(const Attention& a, int64_t b, int64_t kv, int64_t first, int64_t rows,
                const FewState<K>& state, FewScratch<K>& w) {
  using T = typename K::T;
  const int64_t ldv = padded<K>(a.value_dim);
  for (int64_t r = 0; r < rows; r++) {
    const FewRow row = few_row(a, kv, first + r);
    const int64_t at = (b * a.heads + row.head) * a.queries + row.query;
    T factor = (T)a.dropout.keep_scale;
    ((T*)a.lse)[at] = -(T)INFINITY;
    ((T*)a.lse_low)[at] = 0;
    if (state.l[r] != 0) {
      add_log(state.m[r], state.l[r], (T*)a.lse + at, (T*)a.lse_low + at);
      factor /= state.l[r];
    } else if (a.uniform_empty_rows) {
      few_uniform<K>(a, b, kv, row, w.s, state.out + r * ldv);
    }
    scale_out<typename K::X>(state.out + r * ldv, ldv, factor, 1, a.value_dim,
                             row_of<K>(a.out, b, row.head, row.query), a.out.row);
  }
}

template <class K>
int64_t few_state_bytes(const Attention& a) {
  Arena arena{nullptr};
  FewStates<K> states(a, arena);
  return arena.used;
}

template <class K>
void forward_few(const Attention& a, int64_t b, int64_t kv, int64_t heads, int64_t first,
                 int64_t rows, int64_t range, void* states, void* scratch) {
  using T = typename K::T;
  Arena arena{(char*)scratch};
  FewScratch<K> w(a, arena);
  const FewTask task{b, kv, heads, first, rows};
  const int64_t ld = padded<K>(a.head_dim), ld_rows = few_rows(a);
  const KeyRanges ranges = forward_ranges(a);
  for (int64_t head = 0; head < heads; head++) {
    T* query = w.query + head * ld_rows * ld;
    for (int64_t r = 0; r < rows; r++) {
      const FewRow row = few_row(a, kv + head, first + r);
      few_query<K>(a, b, row.head, row.query, query + r * ld);
    }
    for (int64_t i = rows * ld; i < ld_rows * ld; i++) query[i] = (T)0;
  }
  const auto scan = [&](int64_t i, const FewStates<K>& to) {
    FewScan<K>(a, task, to, w).run({i * ranges.size, min_of(a.keys, (i + 1) * ranges.size)});
  };
  if (range != kEveryRange) {
    Arena place{(char*)states + range * few_state_bytes<K>(a)};
    return scan(range, FewStates<K>(a, place));
  }
  scan(0, w.sum);
  for (int64_t i = 1; i < ranges.count; i++) {
    scan(i, w.state);
    for (int64_t head = 0; head < heads; head++)
      few_merge<K>(a, rows, w.state.of(a, head), w.sum.of(a, head));
  }
  for (int64_t head = 0; head < heads; head++)
    few_finish<K>(a, b, kv + head, first, rows, w.sum.of(a, head), w);
}

template <class K>
void merge_few(const Attention& a, int64_t b, int64_t kv, int64_t heads, int64_t first,
               int64_t rows, void* states, void* scratch) {
  Arena arena{(char*)scratch};
  FewScratch<K> w(a, arena);
  Arena place{(char*)states};
  const FewStates<K> sum(a, place);
  for (int64_t i = 1; i < forward_ranges(a).count; i++) {
    const FewStates<K> next(a, place);
    for (int64_t head = 0; head < heads; head++)
      few_merge<K>(a, rows, next.of(a, head), sum.of(a, head));
  }
  for (int64_t head = 0; head < heads; head++)
    few_finish<K>(a, b, kv + head, first, rows, sum.of(a, head), w);
}

}  // namespace
}  // namespace mha_ext::cpu

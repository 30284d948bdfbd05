// Forward for few queries, as in decoding. Here the memory is the limit: K and V are read once, as
// they stand, for all rows that share them. Heads that lie side by side are taken together, some
// keys of each in turn, so that memory is read nearly in its order, and what follows is asked for
// in that order, unless the processor is faster by itself.
namespace mha_ext::cpu {
namespace {

// Rows of a task: those of all heads that share K and V, padded to what the products take.
inline int64_t few_rows(const Attention& a) { return round_up(min_of(kFewRows, group_rows(a)), 4); }

// Tiles of K, then of V, that are read together where a head's rows follow one another.
constexpr int64_t kFewTiles = 8;

// What the rows carry through the keys: maximum, sum, and the unnormalised output, its columns as
// few_product has them.
template <class K>
struct FewState {
  using T = typename K::T;
  T *m, *l, *out;

  FewState(const Attention& a, Arena& arena) {
    m = arena.take<T>(kFewRows);
    l = arena.take<T>(kFewRows);
    out = arena.take<T>(few_rows(a) * few_width<K>(a.value_dim));
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
  T *query, *s, *bias;      // of the rows of all heads, or s of a few of one in kFewTiles tiles
  uint64_t *bits, *any;     // of the rows, of the heads; as many

  FewScratch(const Attention& a, Arena& arena) : state(a, arena), sum(a, arena) {
    const int64_t heads = few_heads(a), rows = few_rows(a);
    const bool in_order = few_in_order(a, 1, 1, K::kLimits);
    const int64_t in_tiles = in_order ? kFewTiles * round_up(K::kRowsInOrder, 4) : 0;
    query = arena.take<T>(heads * rows * few_width<K>(a.head_dim));
    s = arena.take<T>(max_of(heads * rows, in_tiles) * kTile);
    bias = arena.take<T>(kTile);
    bits = arena.take<uint64_t>(max_of(heads * rows, in_tiles));
    any = arena.take<uint64_t>(max_of(heads, in_order ? kFewTiles : 0));
  }
};

// Task of few queries: rows [first, first + rows) of each of `heads` key/value heads.
struct FewTask {
  int64_t batch, kv, heads, first, rows;
};

// How many keys of a head are taken before the next head's, and whether those that come are asked
// for. Measured on Zen 5: where a row is little work for each of its lines, the processor reads far
// enough ahead, and what is asked for is in its way.
struct FewPace {
  int64_t keys;
  bool asks;
};
constexpr int64_t kFewKeys = 16;  // at least
template <class K>
FewPace few_pace(const Attention& a, int64_t rows) {
  if (!whole_vectors()) return {kFewKeys, true};
  constexpr int64_t kItem = sizeof(typename K::S);
  const int64_t bytes = max_of(1, max_of(a.head_dim, a.value_dim)) * kItem;
  const bool light = rows * 4 <= kItem || (K::kPairs && rows == 1 && bytes >= 256);
  int64_t most = 8 << 10;  // bytes of a head
  if (light)
    most = 16 << 10;
  else if (rows == 1 || (kItem == 2 && !K::kPairs))
    most = 0;
  else if (rows <= 4)
    most = 32 << 10;
  int64_t keys = kFewKeys;
  while (keys < kTile && 2 * keys * bytes <= most) keys *= 2;
  return {keys, !light};
}

// The keys of one range, into the states. So many keys of all heads, one head after the other; then
// the next keys. What comes is asked for as many early, or more where these are but little memory.
// One row alone, or few, leave time to read the rows of a head, where they follow one another, in
// their order: kFewTiles tiles of K, then as many of V. Hardware foresees those better.
template <class K>
class FewScan {
  using T = typename K::T;
  using X = typename K::X;

 public:
  FewScan(const Attention& a, const FewTask& task, const FewStates<K>& states, FewScratch<K>& w)
      : a_(a), task_(task), states_(states), w_(w) {}

  // A function of its own: inlined, compilers keep less of its loops in registers (measured: up to
  // a fifth).
  [[gnu::noinline]] void run(Range range) {
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
    for (int64_t k0 = seen_.begin; k0 < seen_.end; k0 += tiles * kTile) {
      const int64_t count = min_of(tiles, ceil_div(seen_.end - k0, kTile));
      chunk_ = {k0, min_of(k0 + count * kTile, a_.keys)};
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
  T* s_of(int64_t t, int64_t head) const { return w_.s + (t * task_.heads + head) * ld_s_ * kTile; }
  uint64_t* bits_of(int64_t t, int64_t head) const {
    return w_.bits + (t * task_.heads + head) * ld_s_;
  }
  uint64_t& any_of(int64_t t, int64_t head) const { return w_.any[t * task_.heads + head]; }

  // As many rows of all heads, as far as they lie before `last`, a share with each of `units`.
  NextRows rows_ahead(const Rows& t, int64_t width, int64_t first, int64_t last,
                      int64_t units) const {
    constexpr int64_t kItem = sizeof(typename K::S);
    const int64_t bytes = ((task_.heads - 1) * t.head + width) * kItem;
    return NextRows((const char*)row_of<K>(t, task_.batch, task_.kv, first), t.row * kItem, bytes,
                    max_of(0, min_of(together_, last - first)), units);
  }
  static int64_t keys_ahead(const Attention& a, int64_t heads, int64_t together) {
    constexpr int64_t kLeast = 8192;  // bytes
    const int64_t widest = max_of(1, max_of(a.head_dim, a.value_dim));
    return min_of(kTile, round_up(ceil_div(kLeast, heads * widest * (int64_t)sizeof(typename K::S)),
                                  together));
  }
  // Keys at a time: where several rows take values of 16 bits in two groups of columns, fewer than
  // a tile are better.
  static int64_t keys_in_order(const Attention& a, const FewTask& task) {
    const bool in_groups = task.rows > 1 && a.value_dim > X::kRegisters / 8 * K::kLanes;
    return in_groups && sizeof(typename K::S) == 2 ? kTile / 2 : kTile;
  }

  // What is read after `count` rows of a head from `first` on: those of the next head, of the first
  // head after them, or, at the end of the tiles that are read together, of the other tensor.
  const typename K::S* follows(const Rows& t, int64_t head, int64_t first, int64_t count,
                               const Rows& other, int64_t other_first) const {
    const int64_t b = task_.batch;
    if (head + 1 < task_.heads) return row_of<K>(t, b, task_.kv + head + 1, first);
    return first + count < chunk_.end ? row_of<K>(t, b, task_.kv, first + count)
                                      : row_of<K>(other, b, task_.kv, other_first);
  }
  // read<n, in order>(r, what it asks for) for all rows, as by_rows.
  template <class Read>
  [[gnu::always_inline]] void read_rows(NextRows& next, const typename K::S* after, int64_t width,
                                        const Read& read) const {
    by_rows<K>(task_.rows, [&]<int kRows>(int64_t r) __attribute__((always_inline)) {
      if constexpr (kRows == 1 || K::kRowsInOrder > 1)
        if (in_order_)
          return read.template operator()<kRows, true>(r, few_ask_in_order<K>(r, after, width));
      read.template operator()<kRows, false>(
          r, pace_.asks ? few_ask<K>(beside_, r, next, after) : FewAsk<K>{});
    });
  }

  void scores(int64_t k0, int64_t t) {
    const int64_t keys = min_of(kTile, a_.keys - k0), b = task_.batch, rows = task_.rows;
    uint64_t any = 0;
    for (int64_t head = 0; head < task_.heads; head++) {
      uint64_t& seen = any_of(t, head);
      seen = 0;
      for (int64_t r = 0; r < rows; r++) {
        const FewRow row = row_at(head, r);
        seen |= bits_of(t, head)[r] =
            sees_all_ ? first_bits(keys) : row_visibility(a_, b, row.head, row.query, k0, keys);
      }
      any |= seen;
    }
    if (!any) return;
    for (int64_t n = 0; n < keys; n += together_) {
      const int64_t some = min_of(together_, keys - n), then = n + ahead_;
      NextRows next;
      if (!in_order_ && !beside_ && pace_.asks) {
        const int64_t units = task_.heads * few_blocks<K>(rows, some);
        next = then < keys ? rows_ahead(a_.key, a_.head_dim, k0 + then, k0 + keys, units)
                           : rows_ahead(a_.value, a_.value_dim, k0 + then - keys, k0 + keys, units);
      }
      for (int64_t head = 0; head < task_.heads; head++) {
        if (!any_of(t, head)) continue;
        const typename K::S* key = row_of<K>(a_.key, b, task_.kv + head, k0 + n);
        const T* query = w_.query + head * ld_rows_ * ld_;
        T* s = s_of(t, head) + n;
        const typename K::S* const after =
            follows(a_.key, head, k0 + n, some, a_.value, chunk_.begin);
        read_rows(next, after, a_.head_dim,
                  [&]<int kRows, bool kInOrder>(int64_t r, const FewAsk<K>& ask)
                      __attribute__((always_inline)) {
                        few_scores<K, kRows, kInOrder>(key, a_.key.row, some, a_.head_dim,
                                                       query + r * ld_, ld_, (T)a_.scale,
                                                       s + r * kTile, ask);
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
          const uint64_t keep = dropout_row<K>(a_, b, row.head, row.query, k0, keys);
          for (int64_t n = 0; n < keys; n += K::kLanes)
            X::store(s + n, X::select(X::mask(keep >> n), X::load(s + n), X::zero()));
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
          few_seen_values<K>(row_of<K>(a_.value, b, task_.kv + head, k0), a_.value.row,
                             bits_of(t, head)[r], a_.value_dim, s_of(t, head) + r * kTile,
                             state.out + r * ldv_);
      }
      return;
    }
    for (int64_t n = 0; n < keys; n += together_) {
      const int64_t some = min_of(together_, keys - n), then = n + ahead_;
      NextRows next;
      if (!in_order_ && !beside_ && pace_.asks) {
        const int64_t units = task_.heads * some * groups_;
        next = then < keys
                   ? rows_ahead(a_.value, a_.value_dim, k0 + then, k0 + keys, units)
                   : rows_ahead(a_.key, a_.head_dim, k0 + kTile + then - keys, seen_.end, units);
      }
      for (int64_t head = 0; head < task_.heads; head++) {
        if (!any_of(t, head)) continue;
        const FewState<K> state = states_.of(a_, head);
        const typename K::S* value = row_of<K>(a_.value, b, task_.kv + head, k0 + n);
        const typename K::S* const after =
            follows(a_.value, head, k0 + n, some, a_.key, chunk_.end);
        read_rows(next, after, a_.value_dim,
                  [&]<int kRows, bool kInOrder>(int64_t r, const FewAsk<K>& ask)
                      __attribute__((always_inline)) {
                        few_values<K, kRows, kInOrder>(value, a_.value.row, some, a_.value_dim,
                                                       s_of(t, head) + r * kTile + n,
                                                       state.out + r * ldv_, ldv_, ask);
                      });
      }
    }
  }

  const Attention& a_;
  const FewTask& task_;
  const FewStates<K>& states_;
  FewScratch<K>& w_;
  const int64_t ld_ = few_width<K>(a_.head_dim), ldv_ = few_width<K>(a_.value_dim);
  const int64_t ld_rows_ = few_rows(a_), ld_s_ = round_up(task_.rows, 4);
  const int64_t groups_ = few_groups<K>(task_.rows, a_.value_dim);
  const bool in_order_ = few_in_order(a_, task_.heads, task_.rows, K::kLimits);
  const FewPace pace_ = few_pace<K>(a_, task_.rows);
  const int64_t together_ = in_order_ ? keys_in_order(a_, task_) : pace_.keys;
  const int64_t ahead_ = keys_ahead(a_, task_.heads, together_);
  const bool sees_all_ = meets_all_tiles(a_), beside_ = asks_beside<K>(task_.rows);
  Range seen_, chunk_;  // chunk_: of the tiles that are read together
};

// Adds the state of the next range of keys to that of those before it.
template <class K>
void few_merge(const Attention& a, int64_t rows, const FewState<K>& next, const FewState<K>& sum) {
  using T = typename K::T;
  using X = typename K::X;
  const int64_t ldv = few_width<K>(a.value_dim);
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
  const int64_t ldv = few_width<K>(a.value_dim);
  for (int64_t r = 0; r < rows; r++) {
    const FewRow row = few_row(a, kv, first + r);
    const int64_t at = (b * a.heads + row.head) * a.queries + row.query;
    T factor = (T)a.dropout.keep_scale;
    if (a.lse) add_log(state.m[r], state.l[r], (T*)a.lse + at, (T*)a.lse_low + at);
    if (state.l[r] != 0) {
      factor /= state.l[r];
      join_columns<K>(ldv, state.out + r * ldv);
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
  if constexpr (K::kGroupedQueries > 0)
    if (takes_groups(a, K::kLimits))
      return forward_group<K>(a, b, kv, first, rows, range, states, scratch);
  Arena arena{(char*)scratch};
  FewScratch<K> w(a, arena);
  const FewTask task{b, kv, heads, first, rows};
  const int64_t ld = few_width<K>(a.head_dim), ld_rows = few_rows(a);
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
  if constexpr (K::kGroupedQueries > 0)
    if (takes_groups(a, K::kLimits)) return merge_group<K>(a, b, kv, first, rows, states, scratch);
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

// Forward: one pass over the keys with a running maximum m and sum l (Milakov & Gimelshein 2018;
// Dao et al. 2022).
//   S = scale Q K^T + bias,  P = exp(S - m),  O = sum P V / l,  lse = m + log l
namespace mha_ext::cpu {
namespace {

// What a block of 64 queries carries through the keys.
template <class K>
struct QueryBlock {
  typename K::Unit* query;
  typename K::T *out, *m, *l;
  int64_t q0, rows, vectors;
  Range seen;
  bool packed;   // query holds it
  bool started;  // has met a tile: before that, out holds nothing
};

// Blocks that share what is packed of K and V.
constexpr int64_t kGroup = 8;

// How far a score may lie above what exp subtracts.
template <class T>
constexpr T kSlack = (T)5.5;

// The state of one block after one range of keys: m [64], l [64], out [value_dim][64].
template <class K>
int64_t block_state_bytes(const Attention& a) {
  return (2 + a.value_dim) * kRow * (int64_t)sizeof(typename K::T);
}

template <class K>
struct ForwardScratch {
  using T = typename K::T;
  using Unit = typename K::Unit;
  QueryBlock<K> blocks[kGroup];
  Unit *key, *value, *pairs;
  T *s, *extra;
  uint64_t *bits, *keep;
  typename K::S* clean;
  char* sums;  // states of the blocks over the ranges of keys that are done
  Range bands[kMostBands];
  Ahead ahead;

  ForwardScratch(const Attention& a, Arena& arena) {
    for (int64_t i = 0; i < min_of(kGroup, max_of(1, ceil_div(a.queries, kTile))); i++) {
      QueryBlock<K>& q = blocks[i];
      q.query = arena.take<Unit>(units_of<K>(a.head_dim) * kRow);
      q.out = arena.take<T>(height_of<K>(a.value_dim) * kRow);
      q.m = arena.take<T>(kRow);
      q.l = arena.take<T>(kRow);
    }
    key = arena.take<Unit>(kTile * operand_width<K>(a.head_dim));
    value = arena.take<Unit>(kTile * operand_width<K>(a.value_dim));
    pairs = arena.take<Unit>(K::kPairs ? kTile * kRow / 2 : 0);
    s = arena.take<T>(kTile * kRow);
    extra = arena.take<T>(
        max_of(a.bias.data ? kTile : 0, a.uniform_empty_rows ? height_of<K>(a.value_dim) : 0) *
        kRow);
    bits = arena.take<uint64_t>(kTile);
    keep = arena.take<uint64_t>(kTile);
    clean = arena.take<typename K::S>(kTile * a.value_dim);
    sums =
        arena.take<char>(forward_ranges(a).count > 1
                             ? min_of(kGroup, ceil_div(a.queries, kTile)) * block_state_bytes<K>(a)
                             : 0);
  }
};

// m[r] -> the maximum with these scores, where it grows by more than 5.5: then l and the output are
// rescaled. For NV vectors of queries:
template <class K, int NV>
void raise_levels(int64_t keys, const typename K::T* s, typename K::T* m, typename K::T* l,
                  typename K::T* out, int64_t value_dim) {
  using X = typename K::X;
  using V = typename X::V;
  const V lowest = X::set(-(typename K::T)INFINITY), slack = X::set(kSlack<typename K::T>);
  V top[2][NV];  // of even and of odd keys
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) top[0][i] = top[1][i] = lowest;
  int64_t n = 0;
  for (; n + 2 <= keys; n += 2)
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) {
      top[0][i] = X::max(X::load(s + n * kRow + i * K::kLanes), top[0][i]);
      top[1][i] = X::max(X::load(s + (n + 1) * kRow + i * K::kLanes), top[1][i]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) {
    if (n < keys) top[0][i] = X::max(X::load(s + n * kRow + i * K::kLanes), top[0][i]);
    const V level = X::max(top[0][i], top[1][i]), old = X::load(m + i * K::kLanes);
    const typename X::M grows = X::gt(X::sub(level, old), slack);
    if (!X::bits(grows)) continue;
    const V raised = X::select(grows, level, old);
    X::store(m + i * K::kLanes, raised);
    const V factor = X::select(grows, exp_of<X>(X::sub(old, raised)), X::set(1));
    X::store(l + i * K::kLanes, X::mul(factor, X::load(l + i * K::kLanes)));
    typename K::T* o = out + i * K::kLanes;
    for (int64_t d = 0; d < value_dim; d++)
      X::store(o + d * kRow, X::mul(factor, X::load(o + d * kRow)));
  }
}

// What exp subtracts. A row that has seen nothing yet: -inf - -inf would be NaN.
template <class K>
typename K::X::V level_of(const typename K::T* m) {
  using X = typename K::X;
  const typename X::V level = X::load(m);
  return X::select(X::eq(level, X::set(-(typename K::T)INFINITY)), X::zero(), level);
}

// One tile of scores for NV vectors of queries: S -> P, adds P to l.
template <class K, int NV>
void softmax_lanes(int64_t keys, typename K::T* s, typename K::T* m, typename K::T* l,
                   typename K::T* out, int64_t value_dim) {
  using X = typename K::X;
  using V = typename X::V;
  raise_levels<K, NV>(keys, s, m, l, out, value_dim);
  V level[NV], sum[2][NV];  // of even and of odd keys: shorter chains round less
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) {
    level[i] = level_of<K>(m + i * K::kLanes);
    sum[0][i] = sum[1][i] = X::zero();
  }
  const auto exponentials = [&](int64_t key, V* to) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) {
      typename K::T* p = s + key * kRow + i * K::kLanes;
      const V e = exp_of<X>(X::sub(X::load(p), level[i]));
      X::store(p, e);
      to[i] = X::add(to[i], e);
    }
  };
  int64_t n = 0;
  for (; n + 2 <= keys; n += 2) {
    exponentials(n, sum[0]);
    exponentials(n + 1, sum[1]);
  }
  if (n < keys) exponentials(n, sum[0]);
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++)
    X::store(l + i * K::kLanes, X::add(X::load(l + i * K::kLanes), X::add(sum[0][i], sum[1][i])));
}

// The same for all 64 keys, P as pairs of keys; S stays. kTry: in the hope that no level has to be
// raised. False, where one has to: then l is as it was.
template <class K, int NV, bool kTry>
bool softmax_pairs_lanes(const typename K::T* s, const typename K::T* m, typename K::T* l,
                         typename K::Unit* pairs) {
  using X = typename K::X;
  using V = typename X::V;
  const V lowest = X::set(-(typename K::T)INFINITY);
  V level[NV], sum[2][NV], top[NV];
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++) {
    level[i] = level_of<K>(m + i * K::kLanes);
    if (kTry && X::bits(X::eq(X::load(m + i * K::kLanes), lowest))) return false;
    sum[0][i] = sum[1][i] = X::zero();
    top[i] = lowest;
  }
  for (int64_t n = 0; n < kTile; n += 2)
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) {
      const typename K::T* p = s + n * kRow + i * K::kLanes;
      const V x0 = X::sub(X::load(p), level[i]), x1 = X::sub(X::load(p + kRow), level[i]);
      if (kTry) top[i] = X::max(x1, X::max(x0, top[i]));
      const V e0 = exp_of<X>(x0), e1 = exp_of<X>(x1);
      sum[0][i] = X::add(sum[0][i], e0);
      sum[1][i] = X::add(sum[1][i], e1);
      K::Dot::store_pairs(e0, e1, pairs + n / 2 * kRow + i * K::kLanes);
    }
  uint64_t grows = 0;
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++)
    if (kTry) grows |= X::bits(X::gt(top[i], X::set(kSlack<typename K::T>)));
  if (grows) return false;
#pragma GCC unroll 4
  for (int i = 0; i < NV; i++)
    X::store(l + i * K::kLanes, X::add(X::load(l + i * K::kLanes), X::add(sum[0][i], sum[1][i])));
  return true;
}

// run<NV>(lane) for each NV vectors of queries.
template <class K, class Run>
void by_vectors(int64_t vectors, const Run& run) {
  constexpr int kMost = K::X::kRegisters == 32 ? 4 : 2;
  int64_t lane = 0;
  for (; vectors >= kMost; vectors -= kMost, lane += kMost * K::kLanes)
    run.template operator()<kMost>(lane);
  for (; vectors > 0; vectors--, lane += K::kLanes) run.template operator()<1>(lane);
}

template <class K>
void softmax_tile(int64_t keys, int64_t vectors, typename K::T* s, typename K::T* m,
                  typename K::T* l, typename K::T* out, int64_t value_dim) {
  by_vectors<K>(vectors, [&]<int NV>(int64_t lane) {
    softmax_lanes<K, NV>(keys, s + lane, m + lane, l + lane, out + lane, value_dim);
  });
}

// The same to the bit, rounded as tile_vectors rounds P.
template <class K>
void softmax_pairs(int64_t vectors, bool started, const typename K::T* s, typename K::T* m,
                   typename K::T* l, typename K::T* out, int64_t value_dim,
                   typename K::Unit* pairs) {
  by_vectors<K>(vectors, [&]<int NV>(int64_t lane) {
    if (started && softmax_pairs_lanes<K, NV, true>(s + lane, m + lane, l + lane, pairs + lane))
      return;
    raise_levels<K, NV>(kTile, s + lane, m + lane, l + lane, out + lane, value_dim);
    softmax_pairs_lanes<K, NV, false>(s + lane, m + lane, l + lane, pairs + lane);
  });
}

// tile[key][64 r] = bit ? tile : otherwise
template <class K>
void select_tile(const uint64_t* bits, int64_t keys, int64_t vectors, typename K::T otherwise,
                 typename K::T* tile) {
  using X = typename K::X;
  const typename X::V v = X::set(otherwise);
  for (int64_t n = 0; n < keys; n++)
    for (int64_t i = 0; i < vectors; i++) {
      typename K::T* p = tile + n * kRow + i * K::kLanes;
      X::store(p, X::select(X::mask(bits[n] >> (i * K::kLanes)), X::load(p), v));
    }
}

// out[d][64 r] += P V for the P in w.s (or w.pairs, where it is), or out = P V where the block has
// not started. Dirty: V is not finite, and the tile is partial.
template <class K>
void add_values(const Attention& a, const typename K::S* value, Operand columns, int64_t vectors,
                int64_t keys, const Range* bands, bool dirty, bool started, bool paired,
                ForwardScratch<K>& w, typename K::T* out) {
  using X = typename K::X;
  using Dot = typename K::Dot;
  const int64_t width = a.value_dim;
  if (dirty) {
    clean_copy<K>(value, a.value.row, keys, width, w.clean);
    columns = columns_operand<K>(w.clean, width, keys, width, w.value);
  }
  const typename K::Unit* p = paired ? w.pairs : tile_vectors<K>(w.s, keys, vectors, w.pairs);
  for_bands<K>(bands, keys, vectors, [&](Range seen, int64_t first, int64_t count) {
    const int64_t unit = seen.begin / Dot::kStep, lane = first * K::kLanes;
    const Operand from{columns.data + unit * columns.t_stride, columns.m_stride, columns.t_stride};
    const int64_t units = units_of<K>(seen.end - seen.begin);
    if (started)
      product<X, Dot, Contiguous::kAlongM, Update::kAdd>(from, width, units, p + unit * kRow + lane,
                                                         kRow, count, out + lane, kRow, &w.ahead);
    else
      product<X, Dot, Contiguous::kAlongM, Update::kStore>(
          from, width, units, p + unit * kRow + lane, kRow, count, out + lane, kRow, &w.ahead);
  });
  if (dirty) {
    add_nonfinite_lanes<K>(w.s, w.bits, value, a.value.row, keys, width, out);
    columns_operand<K>(value, a.value.row, keys, width, w.value);  // as the other blocks want it
  }
}

// Asks for rows [first, first + 64) of a head, to be there when their turn comes.
template <class K>
void ask_rows(const Rows& t, int64_t b, int64_t h, int64_t first, int64_t last, int64_t width,
              Ahead& ahead) {
  constexpr int64_t kItem = sizeof(typename K::S);
  ahead.add(row_of<K>(t, b, h, first), t.row * kItem, width * kItem, min_of(kTile, last - first));
}
template <class K>
void ask_keys(const Attention& a, int64_t b, int64_t h, int64_t first, bool with_values,
              Ahead& ahead) {
  ask_rows<K>(a.key, b, kv_head(a, h), first, a.keys, a.head_dim, ahead);
  if (with_values) ask_rows<K>(a.value, b, kv_head(a, h), first, a.keys, a.value_dim, ahead);
}
// The next head is what this thread will most likely work on next.
template <class K>
void ask_next_head(const Attention& a, int64_t b, int64_t h, bool with_values, Ahead& ahead) {
  if (++h == a.heads) {
    h = 0;
    if (++b == a.batch) return;
  }
  ask_rows<K>(a.query, b, h, 0, a.queries, a.head_dim, ahead);
  ask_keys<K>(a, b, h, 0, with_values, ahead);
}

// m, l and (with_values) the unnormalised output of queries [q0, q0 + rows), up to kGroup blocks,
// over the keys of `range`.
template <class K>
void scan_keys(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, Range range,
               bool with_values, ForwardScratch<K>& w) {
  using T = typename K::T;
  const int64_t value_dim = with_values ? a.value_dim : 0, kv = kv_head(a, h);
  const int64_t count = ceil_div(rows, kTile);
  Range seen{a.keys, 0};
  for (int64_t i = 0; i < count; i++) {
    QueryBlock<K>& q = w.blocks[i];
    q.q0 = q0 + i * kTile;
    q.rows = min_of(kTile, q0 + rows - q.q0);
    q.vectors = vectors_of<K>(q.rows);
    q.started = q.packed = false;
    q.seen = seen_by_any(a, b, q.q0, q.q0 + q.rows - 1);
    if (q.seen.begin < q.seen.end)
      seen = {min_of(seen.begin, q.seen.begin), max_of(seen.end, q.seen.end)};
    for (int64_t r = 0; r < kRow; r++) {
      q.m[r] = -(T)INFINITY;
      q.l[r] = 0;
    }
  }
  seen = {max_of(seen.begin / kTile * kTile, range.begin), min_of(seen.end, range.end)};
  for (int64_t k0 = seen.begin; k0 < seen.end; k0 += kTile) {
    const int64_t keys = min_of(kTile, a.keys - k0);
    const typename K::S* value = row_of<K>(a.value, b, kv, k0);
    Operand key_rows, value_columns;
    bool packed = false, checked = false, finite = true;
    for (int64_t i = 0; i < count; i++) {
      QueryBlock<K>& q = w.blocks[i];
      Visibility visible = visibility_of<K>(a, b, h, q.q0, q.rows, k0, keys, w.bits);
      if (visible == Visibility::kEmpty) continue;
      if (i + 1 < count)
        ask_pairs<K>(a, b, h, q.q0 + kTile, k0, w.ahead);
      else if (k0 + kTile < seen.end)
        ask_pairs<K>(a, b, h, q0, k0 + kTile, w.ahead);
      if (!q.packed) {
        pack_query<K>(a, b, h, q.q0, q.rows, q.query);
        q.packed = true;
        if (i + 1 < count) ask_rows<K>(a.query, b, h, q.q0 + kTile, q0 + rows, a.head_dim, w.ahead);
      }
      if (!packed) {
        key_rows = rows_operand<K>(row_of<K>(a.key, b, kv, k0), a.key.row, keys, a.head_dim, w.key);
        if (with_values)
          value_columns = columns_operand<K>(value, a.value.row, keys, a.value_dim, w.value);
        packed = true;
        if (k0 + kTile < seen.end) ask_keys<K>(a, b, h, k0 + kTile, with_values, w.ahead);
      }
      if (k0 + kTile >= q.seen.end) {
        if (with_values) ask_rows<K>(a.out, b, h, q.q0, q0 + rows, a.value_dim, w.ahead);
        if (q0 == 0 && i + 1 == count) ask_next_head<K>(a, b, h, with_values, w.ahead);
      }
      const Range* const bands =
          find_bands<K>(a, b, q.q0, q.rows, k0, keys, w.bands) ? w.bands : nullptr;
      visible = scores<K>(a, b, h, q.q0, q.rows, k0, keys, q.query, key_rows, visible, w.bits, w.s,
                          w.extra, &w.ahead, bands);
      const bool partial = visible == Visibility::kPartial;
      if (partial) select_tile<K>(w.bits, keys, q.vectors, -(T)INFINITY, w.s);
      const bool paired =
          K::kPairs && with_values && !partial && !bands && keys == kTile && !a.dropout.seed;
      if constexpr (K::kPairs) {
        if (paired)
          softmax_pairs<K>(q.vectors, q.started, w.s, q.m, q.l, q.out, q.started ? value_dim : 0,
                           w.pairs);
      }
      if (!paired)
        for_bands<K>(bands, keys, q.vectors, [&](Range seen, int64_t first, int64_t count) {
          const int64_t lane = first * K::kLanes;
          if (seen.begin < seen.end)
            softmax_tile<K>(seen.end - seen.begin, count, w.s + seen.begin * kRow + lane,
                            q.m + lane, q.l + lane, q.out + lane, q.started ? value_dim : 0);
        });
      if (!with_values) continue;
      if (partial && !checked) {
        finite = all_finite<K>(value, a.value.row, keys, a.value_dim);
        checked = true;
      }
      if (a.dropout.seed) {
        dropout_tile<K>(a, b, h, q.q0, q.rows, k0, keys, w.keep);
        select_tile<K>(w.keep, keys, q.vectors, 0, w.s);
      }
      add_values<K>(a, value, value_columns, q.vectors, keys, bands, partial && !finite, q.started,
                    paired, w, q.out);
      q.started = true;
    }
  }
}

// tile[key][64 r] = 1 / Lk in the rows of `empty` that dropout keeps, else 0: P of rows that see
// nothing.
template <class K>
void uniform_tile(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0,
                  int64_t keys, uint64_t empty, uint64_t* keep, typename K::T* tile) {
  if (a.dropout.seed) dropout_tile<K>(a, b, h, q0, rows, k0, keys, keep);
  for (int64_t n = 0; n < keys; n++) {
    if (a.dropout.seed)
      keep[n] &= empty;
    else
      keep[n] = empty;
  }
  for (int64_t i = 0; i < keys * kRow; i++) tile[i] = (typename K::T)1 / (typename K::T)a.keys;
  select_tile<K>(keep, keys, vectors_of<K>(rows), 0, tile);
}

// lse and the normalised output of one block.
template <class K>
void finish_block(const Attention& a, int64_t b, int64_t h, QueryBlock<K>& q,
                  ForwardScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  const T kept = (T)a.dropout.keep_scale;
  const int64_t at = (b * a.heads + h) * a.queries + q.q0, width = a.value_dim * kRow;
  T *lse = (T*)a.lse + at, *lse_low = (T*)a.lse_low + at;
  uint64_t empty = 0;
  add_logs(q.rows, q.m, q.l, -(T)INFINITY, lse, lse_low);
  for (int64_t r = 0; r < q.rows; r++) empty |= (uint64_t)(q.l[r] == 0) << r;
  if (!q.started) __builtin_memset(q.out, 0, (size_t)width * sizeof(T));
  for (int64_t r = 0; r < kRow; r++) q.l[r] = r < q.rows && q.l[r] != 0 ? kept / q.l[r] : 0;
  if (empty && a.uniform_empty_rows) {
    __builtin_memset(w.extra, 0, (size_t)width * sizeof(T));
    for (int64_t k0 = 0; k0 < a.keys; k0 += kTile) {
      const int64_t keys = min_of(kTile, a.keys - k0);
      const typename K::S* value = row_of<K>(a.value, b, kv_head(a, h), k0);
      uniform_tile<K>(a, b, h, q.q0, q.rows, k0, keys, empty, w.keep, w.s);
      const Operand columns = columns_operand<K>(value, a.value.row, keys, a.value_dim, w.value);
      add_values<K>(a, value, columns, q.vectors, keys, nullptr, false, k0 > 0, false, w, w.extra);
    }
    for (int64_t d = 0; d < a.value_dim; d++)
      for (int64_t i = 0; i < q.vectors; i++) {
        const int64_t lane = d * kRow + i * K::kLanes;
        X::store(q.out + lane, X::select(X::mask(empty >> (i * K::kLanes)), X::load(w.extra + lane),
                                         X::load(q.out + lane)));
      }
    for (int64_t r = 0; r < q.rows; r++)
      if (empty >> r & 1) q.l[r] = kept;
  }
  transpose_out<X>(q.out, q.l, q.rows, a.value_dim, row_of<K>(a.out, b, h, q.q0), a.out.row);
}

// The factors that bring the sums of two ranges of keys to one maximum; m and l become those of
// both. A range in which a row has seen nothing leaves no trace.
template <class K>
void merge_levels(int64_t lanes, const typename K::T* next_m, const typename K::T* next_l,
                  typename K::T* m, typename K::T* l, typename K::T* old_factor,
                  typename K::T* factor) {
  using X = typename K::X;
  using V = typename X::V;
  for (int64_t i = 0; i < lanes; i += K::kLanes) {
    const V m0 = X::load(m + i), m1 = X::load(next_m + i);
    const V l0 = X::load(l + i), l1 = X::load(next_l + i);
    const typename X::M none0 = X::eq(l0, X::zero()), none1 = X::eq(l1, X::zero());
    const V top = X::select(none1, m0, X::select(none0, m1, X::max(m0, m1)));
    const V f0 =
        X::select(none0, X::zero(), X::select(none1, X::set(1), exp_of<X>(X::sub(m0, top))));
    const V f1 =
        X::select(none1, X::zero(), X::select(none0, X::set(1), exp_of<X>(X::sub(m1, top))));
    X::store(m + i, top);
    X::store(l + i, X::fma(f1, l1, X::mul(f0, l0)));
    X::store(old_factor + i, f0);
    X::store(factor + i, f1);
  }
}

template <class K>
void use_state(void* state, QueryBlock<K>& q) {
  q.m = (typename K::T*)state;
  q.l = q.m + kRow;
  q.out = q.l + kRow;
  q.started = true;
}
template <class K>
void save_block(const Attention& a, const QueryBlock<K>& q, void* state) {
  using T = typename K::T;
  QueryBlock<K> to;
  use_state<K>(state, to);
  __builtin_memcpy(to.m, q.m, kRow * sizeof(T));
  __builtin_memcpy(to.l, q.l, kRow * sizeof(T));
  const size_t bytes = (size_t)(a.value_dim * kRow) * sizeof(T);
  if (q.started)
    __builtin_memcpy(to.out, q.out, bytes);
  else
    __builtin_memset(to.out, 0, bytes);
}

// Adds the next range of keys to those before it.
template <class K>
void merge_block(const Attention& a, const QueryBlock<K>& next, QueryBlock<K>& q) {
  using T = typename K::T;
  using X = typename K::X;
  bool none = true;
  for (int64_t r = 0; r < next.rows; r++) none &= next.l[r] == 0;
  if (none) return;  // its output may not be set
  T old_factor[kRow], factor[kRow];
  merge_levels<K>(kRow, next.m, next.l, q.m, q.l, old_factor, factor);
  for (int64_t d = 0; d < a.value_dim; d++)
    for (int64_t at = 0; at < next.vectors * K::kLanes; at += K::kLanes) {
      T* out = q.out + d * kRow + at;
      X::store(out, X::fma(X::load(factor + at), X::load(next.out + d * kRow + at),
                           X::mul(X::load(old_factor + at), X::load(out))));
    }
}

template <class K>
void forward(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t range,
             void* states, void* scratch) {
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  const KeyRanges ranges = forward_ranges(a);
  const int64_t blocks = ceil_div(rows, kTile), bytes = block_state_bytes<K>(a);
  const auto scan = [&](int64_t i) {
    const Range keys{i * ranges.size, min_of(a.keys, (i + 1) * ranges.size)};
    scan_keys<K>(a, b, h, q0, rows, keys, true, w);
  };
  if (range != kEveryRange) {
    scan(range);
    return save_block<K>(a, w.blocks[0], (char*)states + range * bytes);
  }
  scan(0);
  if (ranges.count > 1) {
    for (int64_t i = 0; i < blocks; i++) save_block<K>(a, w.blocks[i], w.sums + i * bytes);
    for (int64_t range = 1; range < ranges.count; range++) {
      scan(range);
      for (int64_t i = 0; i < blocks; i++) {
        QueryBlock<K> sum = w.blocks[i];
        use_state<K>(w.sums + i * bytes, sum);
        merge_block<K>(a, w.blocks[i], sum);
      }
    }
    for (int64_t i = 0; i < blocks; i++) use_state<K>(w.sums + i * bytes, w.blocks[i]);
  }
  for (int64_t i = 0; i < blocks; i++) finish_block<K>(a, b, h, w.blocks[i], w);
}

template <class K>
void merge(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, void* states,
           void* scratch) {
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  QueryBlock<K>& q = w.blocks[0];
  q.q0 = q0;
  q.rows = rows;
  q.vectors = vectors_of<K>(rows);
  use_state<K>(states, q);
  QueryBlock<K> next = q;
  for (int64_t i = 1; i < forward_ranges(a).count; i++) {
    use_state<K>((char*)states + i * block_state_bytes<K>(a), next);
    merge_block<K>(a, next, q);
  }
  finish_block<K>(a, b, h, q, w);
}

}  // namespace
}  // namespace mha_ext::cpu

// A block of 64 queries of forward: sums of P V, output, what two ranges of keys add up to.
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
  bool by_rows;  // out is [64 r][padded value_dim], else [value_dim][64 r]
};

// Where a tile begins.
struct TileStart {
  int64_t q0, k0;
};

template <class K, class BlockRows>
void pack_query_once(const BlockRows& of, QueryBlock<K>& q) {
  if (!q.packed) of.pack(q.q0, q.rows, q.query);
  q.packed = true;
}

// The lanes of P V lie along the width where that is whole vectors: then the output needs no
// transpose; and where there are so few queries that they would leave lanes empty. The same numbers
// are added in the same order either way.
template <class K>
constexpr int64_t kFewByRows = K::kLanes * 3 / 2;
template <class K, bool = (K::kLimbs > 0)>
struct ForwardLimbs {
  ForwardLimbs(const Attention&, Arena&) {}
};
template <class K>
bool fills_vectors(const Attention& a) {
  return a.value_dim % K::kLanes == 0;
}
template <class K, class BlockRows>
bool sums_by_rows(const BlockRows& of, int64_t rows) {
  if (!BlockRows::kGroup && takes_limbs<K>(of.a, rows)) return true;
  return !K::kPairs && (rows <= kFewByRows<K> || fills_vectors<K>(of.a));
}

// Blocks that share what is packed of K and V: more of them for a matrix unit, where that is dear,
// as long as what they keep, Q and sums, is at home in a second cache.
constexpr int64_t kGroup = 16;
template <class K>
bool packs(const Attention& a) {
  return K::kLimbs > 0 && takes_limbs<K>(a, min_of(kTile, a.queries));
}
template <class K>
int64_t group_of(const Attention& a) {
  constexpr int64_t kCache = 3 << 18, kItem = sizeof(uint16_t) * K::kLimbs;
  constexpr int64_t kSum = sizeof(typename K::T);
  const int64_t row =
      round_up(a.head_dim, K::kLanes) * kItem + (padded<K>(a.value_dim) + K::kLanes) * kSum;
  return packs<K>(a) && kGroup * kTile * row <= kCache ? kGroup : kGroup / 2;
}
template <class K>
int64_t blocks_of_group(const Attention& a) {
  const int64_t rows = takes_groups(a, K::kLimits) ? group_rows(a) : a.queries;
  return min_of(group_of<K>(a), max_of(1, ceil_div(rows, kTile)));
}

// Numbers of a block's out, and bytes of its state after one range of keys: m [64], l [64], out.
template <class K>
int64_t block_out_size(const Attention& a) {
  return max_of(height_of<K>(a.value_dim), padded<K>(a.value_dim)) * kRow;
}
template <class K>
int64_t block_state_bytes(const Attention& a) {
  return (2 * kRow + block_out_size<K>(a)) * (int64_t)sizeof(typename K::T);
}

// Bytes of the longest rows that are asked for ahead: from Zen 5 on of all.
template <class K>
int64_t longest_asked() {
  if constexpr (requires { K::X::kLongestAsked; })
    return K::X::kLongestAsked;
  else
    return whole_vectors() ? Ahead::kAnyLength : Ahead::kLongest;
}

template <class K>
struct ForwardScratch {
  using T = typename K::T;
  using Unit = typename K::Unit;
  QueryBlock<K> blocks[kGroup];
  Unit *key, *value, *pairs;
  T *s, *top, *extra;
  uint64_t *bits, *keep, *head_bits;
  typename K::S* clean;
  char* sums;  // states of the blocks over the ranges of keys that are done
  Range bands[kMostBands];
  Ahead ahead{longest_asked<K>()};
  ForwardLimbs<K> limbs;

  ForwardScratch(const Attention& a, Arena& arena) : limbs(a, arena) {
    for (int64_t i = 0; i < blocks_of_group<K>(a); i++) {
      QueryBlock<K>& q = blocks[i];
      q.query = arena.take<Unit>(units_of<K>(a.head_dim) * kRow);
      q.out = arena.take<T>(block_out_size<K>(a));
      q.m = arena.take<T>(kRow);
      q.l = arena.take<T>(kRow);
    }
    key = arena.take<Unit>(kTile * operand_width<K>(a.head_dim));
    value = arena.take<Unit>(kTile *
                             max_of(operand_width<K>(a.value_dim), vectors_width<K>(a.value_dim)));
    pairs = arena.take<Unit>(K::kPairs ? kTile * kRow / 2 : 0);
    s = arena.take<T>(kTile * kRow);
    top = arena.take<T>(kRow);
    extra = arena.take<T>(
        max_of(a.bias.data ? kTile : 0, a.uniform_empty_rows ? height_of<K>(a.value_dim) : 0) *
        kRow);
    bits = arena.take<uint64_t>(kTile);
    keep = arena.take<uint64_t>(kTile);
    head_bits = arena.take<uint64_t>(kTile);
    clean = arena.take<typename K::S>(kTile * a.value_dim);
    sums = arena.take<char>(
        forward_ranges(a).count > 1 ? blocks_of_group<K>(a) * block_state_bytes<K>(a) : 0);
  }
};

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
void add_values(const Attention& a, const typename K::S* value, Operand columns, int64_t rows,
                int64_t keys, const Range* bands, bool dirty, bool started, bool paired,
                ForwardScratch<K>& w, typename K::T* out) {
  using X = typename K::X;
  using Dot = typename K::Dot;
  const int64_t width = a.value_dim, vectors = vectors_of<K>(rows);
  if (dirty) {
    clean_copy<K>(value, a.value.row, keys, width, w.clean);
    columns = columns_operand<K>(w.clean, width, keys, width, w.value);
  }
  const typename K::Unit* p = paired ? w.pairs : tile_vectors<K>(w.s, keys, vectors, w.pairs);
  for_bands<K>(bands, keys, vectors, [&](Range seen, int64_t first, int64_t count) {
    const int64_t unit = seen.begin / Dot::kStep, lane = first * K::kLanes;
    const int64_t lanes = taken_lanes<K>(min_of(count * K::kLanes, rows - lane));
    const Operand from{columns.data + unit * columns.t_stride, columns.m_stride, columns.t_stride};
    const int64_t units = units_of<K>(seen.end - seen.begin);
    if (started)
      product_columns<X, Dot, Contiguous::kAlongM, Update::kAddSum>(
          from, width, units, p + unit * kRow + lane, kRow, lanes, out + lane, kRow, &w.ahead);
    else
      product_columns<X, Dot, Contiguous::kAlongM, Update::kStore>(
          from, width, units, p + unit * kRow + lane, kRow, lanes, out + lane, kRow, &w.ahead);
  });
  if (dirty) {
    add_nonfinite_lanes<K>(w.s, w.bits, value, a.value.row, keys, width, out);
    columns_operand<K>(value, a.value.row, keys, width, w.value);  // as the other blocks want it
  }
}

// What a block by rows reads of V: `packed`, where it is not nullptr, or in place; then `next` and
// `then` are as in WidthRows.
template <class K>
struct BlockValues {
  const typename K::S* value;
  VectorRows<K> packed;
  int64_t next, then;
};
// The same for a block by rows.
template <class K>
void add_values_by_rows(const Attention& a, const BlockValues<K>& from, const QueryBlock<K>& q,
                        int64_t keys, const Range* bands, bool dirty, ForwardScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  using Dot = typename K::Dot;
  const int64_t width = a.value_dim, ld = padded<K>(width);
  WidthRows<K> in_place{from.value, a.value.row, keys, width, from.next, from.then};
  if (dirty) {
    clean_copy<K>(from.value, a.value.row, keys, width, w.clean);
    in_place = {w.clean, width, keys, width};
  }
  const auto add = [&]<bool kAdd>() {
    for_bands<K>(bands, keys, q.vectors, [&](Range seen, int64_t first, int64_t count) {
      const int64_t lane = first * K::kLanes, rows = min_of(q.rows - lane, count * K::kLanes);
      const T* const p = w.s + seen.begin * kRow + lane;
      T* const to = q.out + lane * ld;
      if (dirty || !from.packed.data) {
        WidthRows<K> x = in_place;
        x.data += seen.begin * x.stride;
        x.count = seen.end - seen.begin;
        return width_rows<K, Contiguous::kAlongM, kAdd, T>(x, rows, p, to, ld, 0);
      }
      constexpr int64_t kItem = sizeof(T);
      product_columns<X, Dot, Contiguous::kAlongM, kAdd ? Update::kAddSum : Update::kStore>(
          Operand{(const char*)p, kItem, kRow * kItem}, rows, seen.end - seen.begin,
          from.packed.data + seen.begin * from.packed.ld, from.packed.ld, width, to, ld, &w.ahead);
    });
  };
  q.started ? add.template operator()<true>() : add.template operator()<false>();
  if (dirty) add_nonfinite_queries<K>(w.s, w.bits, from.value, a.value.row, keys, width, q.out, ld);
}

// The rows of `out` whose maximum m has grown from `old`.
template <class K>
void rescale_rows(int64_t rows, const typename K::T* old, const typename K::T* m,
                  typename K::T* out, int64_t ld) {
  using X = typename K::X;
  for (int64_t i = 0; i < rows; i += K::kLanes) {
    const typename X::V raised = X::load(m + i), before = X::load(old + i);
    const typename X::M grows = X::gt(raised, before);
    uint64_t left = X::bits(grows);
    if (!left) continue;
    typename K::T factor[K::kLanes];
    X::store(factor, exp_of<X>(X::sub(before, raised)));
    for (; left; left &= left - 1) {
      const int64_t r = __builtin_ctzll(left);
      typename K::T* const row = out + (i + r) * ld;
      scale_out<X>(row, 0, factor[r], 1, ld, row, 0);
    }
  }
}

// tile[key][64 r] = 1 / Lk in the rows of `empty` that dropout keeps, else 0: P of rows that see
// nothing.
template <class K, class BlockRows>
void uniform_tile(const BlockRows& of, int64_t q0, int64_t rows, int64_t k0, int64_t keys,
                  uint64_t empty, uint64_t* keep, typename K::T* tile) {
  const Attention& a = of.a;
  if (a.dropout.seed) of.dropout(q0, rows, k0, keys, keep);
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
template <class K, class BlockRows>
void finish_block(const BlockRows& of, QueryBlock<K>& q, ForwardScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  const Attention& a = of.a;
  const T kept = (T)a.dropout.keep_scale;
  const int64_t at = of.first_level() + q.q0, ld = padded<K>(a.value_dim);
  if (a.lse) add_logs(q.rows, q.m, q.l, -(T)INFINITY, (T*)a.lse + at, (T*)a.lse_low + at);
  uint64_t empty = 0;
  for (int64_t r = 0; r < q.rows; r++) empty |= (uint64_t)(q.l[r] == 0) << r;
  if (!q.started) __builtin_memset(q.out, 0, (size_t)block_out_size<K>(a) * sizeof(T));
  for (int64_t r = 0; r < kRow; r++) q.l[r] = r < q.rows && q.l[r] != 0 ? kept / q.l[r] : 0;
  if (empty && a.uniform_empty_rows) {
    __builtin_memset(w.extra, 0, (size_t)(a.value_dim * kRow) * sizeof(T));
    for (int64_t k0 = 0; k0 < a.keys; k0 += kTile) {
      const int64_t keys = min_of(kTile, a.keys - k0);
      const typename K::S* value = row_of<K>(a.value, of.b, of.kv(), k0);
      uniform_tile<K>(of, q.q0, q.rows, k0, keys, empty, w.keep, w.s);
      const Operand columns = columns_operand<K>(value, a.value.row, keys, a.value_dim, w.value);
      add_values<K>(a, value, columns, q.rows, keys, nullptr, false, k0 > 0, false, w, w.extra);
    }
    for (uint64_t left = empty; left; left &= left - 1) {
      const int64_t r = __builtin_ctzll(left);
      for (int64_t d = 0; d < a.value_dim; d++)
        q.out[q.by_rows ? r * ld + d : d * kRow + r] = w.extra[d * kRow + r];
      q.l[r] = kept;
    }
  }
  const WrittenRows<K> to = of.out(q.q0);
  if (q.by_rows)
    for (int64_t r = 0; r < q.rows; r++) {
      typename K::S* const row = to.data + r * to.stride;
      if constexpr (K::kPairs)
        K::Dot::scale_row(q.out + r * ld, q.l[r], a.value_dim, row);
      else
        scale_out<X>(q.out + r * ld, ld, q.l[r], 1, a.value_dim, row, 0);
    }
  else
    write_rows<K>(q.out, q.l, q.rows, a.value_dim, to.data, to.stride);
  of.wrote(q.q0, q.rows);
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
  const size_t bytes = (size_t)block_out_size<K>(a) * sizeof(T);
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
  const auto add = [&](int64_t at, typename X::V old, typename X::V added) {
    T* const out = q.out + at;
    X::store(out, X::fma(added, X::load(next.out + at), X::mul(old, X::load(out))));
  };
  const int64_t ld = padded<K>(a.value_dim);
  if (q.by_rows) {
    for (int64_t r = 0; r < next.rows; r++)
      for (int64_t d = 0; d < ld; d += K::kLanes)
        add(r * ld + d, X::set(old_factor[r]), X::set(factor[r]));
    return;
  }
  for (int64_t d = 0; d < a.value_dim; d++)
    for (int64_t lane = 0; lane < next.vectors * K::kLanes; lane += K::kLanes)
      add(d * kRow + lane, X::load(old_factor + lane), X::load(factor + lane));
}

}  // namespace
}  // namespace mha_ext::cpu

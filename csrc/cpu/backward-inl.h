// Backward, from dO and lse: five products a tile, two of scores (lanes: queries) and three of
// gradients.
//   P = exp(S - lse), Z = P o M, dP = (dO V^T) o M, dS = P o (dP - delta)
//   dV = Z^T dO, dK = scale dS^T Q, dQ = scale dS K, dB = dS, summed where the bias broadcasts
namespace mha_ext::cpu {
namespace {

// The operands of one block of queries and of one tile, and the tile's P and dS.
template <class K>
struct GradScratch {
  using T = typename K::T;
  using Unit = typename K::Unit;
  Unit *query, *grad_out;  // lanes, for the scores
  T *p, *ds, *extra, *high, *low;
  uint64_t *bits, *keep;

  GradScratch(const Attention& a, Arena& arena) {
    query = arena.take<Unit>(units_of<K>(a.head_dim) * kRow);
    grad_out = arena.take<Unit>(units_of<K>(a.value_dim) * kRow);
    p = arena.take<T>(kTile * kRow);
    ds = arena.take<T>(kTile * kRow);
    extra = arena.take<T>(kTile * kRow);
    high = arena.take<T>(kRow);
    low = arena.take<T>(kRow);
    bits = arena.take<uint64_t>(kTile);
    keep = arena.take<uint64_t>(kTile);
  }
};

template <class K>
struct BackwardScratch : GradScratch<K> {
  using T = typename K::T;
  using Unit = typename K::Unit;
  Unit *query_rows, *grad_out_rows;  // vectors along the width, for dK and dV
  Unit *keys_in, *keys_across, *values_in, *pairs, *pair_rows, *clean_keys;
  typename K::S* clean;
  T *grad_query, *grad_key, *grad_value, *one;

  BackwardScratch(const Attention& a, Arena& arena) : GradScratch<K>(a, arena) {
    const int64_t d = padded<K>(a.head_dim), dv = padded<K>(a.value_dim);
    const int64_t range = round_up(min_of(key_ranges(a).size, a.keys), kTile);
    query_rows = arena.take<Unit>(kTile * d);
    grad_out_rows = arena.take<Unit>(kTile * dv);
    keys_in = arena.take<Unit>(range * operand_width<K>(a.head_dim));
    keys_across = arena.take<Unit>(K::kPairs ? range / 2 * d : 0);
    values_in = arena.take<Unit>(range * operand_width<K>(a.value_dim));
    pairs = arena.take<Unit>(K::kPairs ? kTile * kRow / 2 : 0);
    pair_rows = arena.take<Unit>(K::kPairs ? kTile * kRow / 2 : 0);
    grad_query = arena.take<T>(height_of<K>(a.head_dim) * kRow);
    grad_key = arena.take<T>(range * d);
    grad_value = arena.take<T>(range * dv);
    one = arena.take<T>(kRow);
    clean = arena.take<typename K::S>(kTile * max_of(a.head_dim, a.value_dim));
    clean_keys = arena.take<Unit>(kTile * operand_width<K>(a.head_dim));
  }
};

template <class K>
void delta(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h, int64_t block) {
  using T = typename K::T;
  using X = typename K::X;
  const int64_t q0 = block * kTile, rows = min_of(kTile, a.queries - q0);
  const int64_t at = (b * a.heads + h) * a.queries + q0;
  for (int64_t r = 0; r < rows; r++) {
    const typename K::S* out = row_of<K>(a.out, b, h, q0 + r);
    const typename K::S* grad = row_of<K>(g.grad_out, b, h, q0 + r);
    typename X::V sum = X::zero();
    int64_t d = 0;
    for (; d + K::kLanes <= a.value_dim; d += K::kLanes)
      sum = X::fma(X::load(out + d), X::load(grad + d), sum);
    if (d < a.value_dim)
      sum = X::fma(X::load(out + d, a.value_dim - d), X::load(grad + d, a.value_dim - d), sum);
    T lanes[K::kLanes], total = 0;
    X::store(lanes, sum);
    for (int i = 0; i < K::kLanes; i++) total += lanes[i];
    ((T*)g.delta)[at + r] = g.grad_lse ? total - ((const T*)g.grad_lse)[at + r] : total;
  }
}

// Packs one block of queries: Q and dO as lanes, and what exp subtracts.
template <class K>
void load_queries(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h, int64_t q0,
                  int64_t rows, GradScratch<K>& w) {
  row_levels<K>(a, b, h, q0, rows, w.high, w.low);
  pack_query<K>(a, b, h, q0, rows, w.query);
  if (g.grad_out.data)
    pack_lanes<K>(row_of<K>(g.grad_out, b, h, q0), g.grad_out.row, rows, a.value_dim, w.grad_out);
}

// w.p = Z (without the factor of dropout), w.ds = dS of one tile; hidden pairs are 0, whatever they
// hold.
template <class K>
Visibility gradient_tile(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h,
                         int64_t q0, int64_t rows, int64_t k0, int64_t keys, Operand key_rows,
                         Operand value_rows, GradScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  using V = typename X::V;
  Visibility visible = tile_visibility(a, b, h, q0, rows, k0, keys, w.bits);
  if (visible == Visibility::kEmpty) return visible;
  visible =
      scores<K>(a, b, h, q0, rows, k0, keys, w.query, key_rows, visible, w.bits, w.p, w.extra);
  const int64_t vectors = vectors_of<K>(rows);
  if (g.grad_weights.data)
    load_pairs<K, typename K::S>(g.grad_weights, b, h, q0, rows, k0, keys, w.ds);
  else
    score_product<K>(value_rows, keys, a.value_dim, w.grad_out, vectors, w.ds);
  const bool partial = visible == Visibility::kPartial, dropout = a.dropout.seed != nullptr;
  if (dropout) dropout_tile<K>(a, b, h, q0, rows, k0, keys, w.keep);
  const V kept_scale = X::set((T)a.dropout.keep_scale);
  const T* delta = (const T*)g.delta + (b * a.heads + h) * a.queries + q0;
  for (int64_t i = 0; i < vectors; i++) {
    const int64_t lane = i * K::kLanes, left = rows - lane;
    const V high = X::load(w.high + lane), low = X::load(w.low + lane);
    const V shift = left < K::kLanes ? X::load(delta + lane, left) : X::load(delta + lane);
    for (int64_t n = 0; n < keys; n++) {
      T *p = w.p + n * kRow + lane, *ds = w.ds + n * kRow + lane;
      V weight = exp_of<X>(X::sub(X::sub(X::load(p), high), low));
      V grad = X::load(ds), kept = weight;
      if (dropout) {
        const typename X::M keep = X::mask(w.keep[n] >> lane);
        grad = X::select(keep, X::mul(kept_scale, grad), X::zero());
        kept = X::select(keep, weight, X::zero());
      }
      grad = X::mul(weight, X::sub(grad, shift));
      if (partial) {
        const typename X::M seen = X::mask(w.bits[n] >> lane);
        grad = X::select(seen, grad, X::zero());
        kept = X::select(seen, kept, X::zero());
      }
      X::store(p, kept);
      X::store(ds, grad);
    }
  }
  return visible;
}

template <class K>
void store_bias_tile(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h, int64_t q0,
                     int64_t rows, int64_t k0, int64_t keys, const typename K::T* one,
                     const typename K::T* tile) {
  using X = typename K::X;
  const int64_t at =
      b * g.grad_bias.batch + h * g.grad_bias.head + q0 * g.grad_bias.query + k0 * g.grad_bias.key;
  if (a.bias_is_float32)
    transpose_out<X>(tile, one, rows, keys, (float*)g.grad_bias.data + at, g.grad_bias.query);
  else
    transpose_out<X>(tile, one, rows, keys, (typename K::S*)g.grad_bias.data + at,
                     g.grad_bias.query);
}

// P of empty rows is 1/Lk over all keys: dV += Z^T dO of those rows only.
template <class K>
void add_uniform_values(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h,
                        int64_t q0, int64_t rows, int64_t begin, int64_t end,
                        BackwardScratch<K>& w) {
  using X = typename K::X;
  uint64_t empty = 0;
  const typename K::T* lse = (const typename K::T*)a.lse + (b * a.heads + h) * a.queries + q0;
  for (int64_t r = 0; r < rows; r++) empty |= (uint64_t)(lse[r] == -(typename K::T)INFINITY) << r;
  if (!empty) return;
  const int64_t ld = padded<K>(a.value_dim);
  for (int64_t k0 = begin; k0 < end; k0 += kTile) {
    const int64_t keys = min_of(kTile, end - k0);
    uniform_tile<K>(a, b, h, q0, rows, k0, keys, empty, w.keep, w.p);
    for (uint64_t left = empty; left; left &= left - 1) {
      const int64_t r = __builtin_ctzll(left);
      const typename K::S* grad_out = row_of<K>(g.grad_out, b, h, q0 + r);
      for (int64_t d = 0; d < a.value_dim; d += K::kLanes) {
        const typename X::V v = d + K::kLanes <= a.value_dim
                                    ? X::load(grad_out + d)
                                    : X::load(grad_out + d, a.value_dim - d);
        for (int64_t n = 0; n < keys; n++) {
          typename K::T* to = w.grad_value + (k0 - begin + n) * ld + d;
          X::store(to, X::fma(v, X::set(w.p[n * kRow + r]), X::load(to)));
        }
      }
    }
  }
}

// Where one tile stands: its queries and keys in memory, and their place among the keys of the
// range.
template <class K>
struct TilePlace {
  const typename K::S *query, *grad_out, *key;
  int64_t rows, keys, at;
  bool first;  // of its block: before it, grad_query holds nothing
};

// grad_value, grad_key and grad_query of one tile, from w.p and w.ds.
template <class K>
void add_gradients(const Attention& a, const AttentionGrad& g, const TilePlace<K>& tile,
                   Operand key_columns, BackwardScratch<K>& w) {
  using X = typename K::X;
  using Dot = typename K::Dot;
  const int64_t ld = padded<K>(a.head_dim), ldv = padded<K>(a.value_dim);
  const int64_t units = units_of<K>(tile.rows), vectors = vectors_of<K>(tile.rows);
  if (g.grad_value.data)
    product<X, Dot, Contiguous::kAlongT, Update::kAdd>(
        tile_operand<K>(w.p, tile.keys, tile.rows, w.pair_rows), tile.keys, units, w.grad_out_rows,
        ldv, ldv / K::kLanes, w.grad_value + tile.at * ldv, ldv);
  if (g.grad_key.data)
    product<X, Dot, Contiguous::kAlongT, Update::kAdd>(
        tile_operand<K>(w.ds, tile.keys, tile.rows, w.pair_rows), tile.keys, units, w.query_rows,
        ld, ld / K::kLanes, w.grad_key + tile.at * ld, ld);
  if (!g.grad_query.data) return;
  const typename K::Unit* ds = tile_vectors<K>(w.ds, tile.keys, vectors, w.pairs);
  const int64_t key_units = units_of<K>(tile.keys);
  if (tile.first)
    product<X, Dot, Contiguous::kAlongM, Update::kStore>(key_columns, a.head_dim, key_units, ds,
                                                         kRow, vectors, w.grad_query, kRow);
  else
    product<X, Dot, Contiguous::kAlongM, Update::kAdd>(key_columns, a.head_dim, key_units, ds, kRow,
                                                       vectors, w.grad_query, kRow);
}

// The same for a partial tile whose operands are not finite.
template <class K>
void add_dirty_gradients(const Attention& a, const AttentionGrad& g, const TilePlace<K>& tile,
                         BackwardScratch<K>& w) {
  const int64_t ld = padded<K>(a.head_dim), ldv = padded<K>(a.value_dim);
  const int64_t d = a.head_dim, dv = a.value_dim, rows = tile.rows, keys = tile.keys;
  if (g.grad_out.data) {
    clean_copy<K>(tile.grad_out, g.grad_out.row, rows, dv, w.clean);
    pack_rows<K>(w.clean, dv, rows, dv, w.grad_out_rows, ldv);
  }
  clean_copy<K>(tile.query, a.query.row, rows, d, w.clean);
  pack_rows<K>(w.clean, d, rows, d, w.query_rows, ld);
  clean_copy<K>(tile.key, a.key.row, keys, d, w.clean);
  add_gradients<K>(a, g, tile, columns_operand<K>(w.clean, d, keys, d, w.clean_keys), w);
  if (g.grad_value.data)
    add_nonfinite_rows<K>(w.p, w.bits, tile.grad_out, g.grad_out.row, rows, keys, dv,
                          w.grad_value + tile.at * ldv, ldv);
  if (g.grad_key.data)
    add_nonfinite_rows<K>(w.ds, w.bits, tile.query, a.query.row, rows, keys, d,
                          w.grad_key + tile.at * ld, ld);
  if (g.grad_query.data)
    add_nonfinite_lanes<K>(w.ds, w.bits, tile.key, a.key.row, keys, d, w.grad_query);
  // The next tile wants them as they were.
  if (g.grad_out.data) pack_rows<K>(tile.grad_out, g.grad_out.row, rows, dv, w.grad_out_rows, ldv);
  pack_rows<K>(tile.query, a.query.row, rows, d, w.query_rows, ld);
}

template <class K>
void backward(const Attention& a, const AttentionGrad& g, int64_t b, int64_t kv, int64_t range,
              void* partial_sums, void* scratch) {
  using T = typename K::T;
  using X = typename K::X;
  using Dot = typename K::Dot;
  constexpr int64_t kUnit = sizeof(typename K::Unit);
  [[maybe_unused]] const typename Dot::Session session;
  Arena arena{(char*)scratch};
  BackwardScratch<K> w(a, arena);
  const KeyRanges ranges = key_ranges(a);
  const int64_t begin = range * ranges.size, end = min_of(a.keys, begin + ranges.size);
  const int64_t length = max_of(0, end - begin);
  const int64_t ld = padded<K>(a.head_dim), ldv = padded<K>(a.value_dim);
  const int64_t group = a.heads / a.kv_heads, blocks = ceil_div(a.queries, kTile);
  const bool write_bias = g.grad_bias.data && bias_is_dense(a, g.grad_bias);
  for (int64_t r = 0; r < kRow; r++) w.one[r] = 1;
  for (int64_t i = 0; i < length * ld; i++) w.grad_key[i] = 0;
  for (int64_t i = 0; i < length * ldv; i++) w.grad_value[i] = 0;

  const typename K::S* key = row_of<K>(a.key, b, kv, begin);
  const typename K::S* value = row_of<K>(a.value, b, kv, begin);
  const Operand key_rows = rows_operand<K>(key, a.key.row, length, a.head_dim, w.keys_in);
  const Operand value_rows = rows_operand<K>(value, a.value.row, length, a.value_dim, w.values_in);
  Operand key_columns{key_rows.data, kUnit, key_rows.m_stride};
  if constexpr (K::kPairs)
    key_columns = columns_operand<K>(key, a.key.row, length, a.head_dim, w.keys_across);

  for (int64_t h = kv * group; h < (kv + 1) * group; h++)
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t q0 = block * kTile, rows = min_of(kTile, a.queries - q0);
      if (a.uniform_empty_rows && g.grad_value.data)
        add_uniform_values<K>(a, g, b, h, q0, rows, begin, end, w);

      const Range seen = seen_by_any(a, b, q0, q0 + rows - 1);
      bool loaded = false, finite = true, first = true;
      const typename K::S* query = row_of<K>(a.query, b, h, q0);
      const typename K::S* grad_out = row_of<K>(g.grad_out, b, h, q0);
      for (int64_t k0 = begin; k0 < end; k0 += kTile) {
        const int64_t keys = min_of(kTile, end - k0), at = k0 - begin;
        if (k0 >= seen.end || k0 + keys <= seen.begin) continue;
        if (!loaded) {
          load_queries<K>(a, g, b, h, q0, rows, w);
          pack_rows<K>(query, a.query.row, rows, a.head_dim, w.query_rows, ld);
          finite = all_finite<K>(query, a.query.row, rows, a.head_dim);
          if (g.grad_out.data) {
            pack_rows<K>(grad_out, g.grad_out.row, rows, a.value_dim, w.grad_out_rows, ldv);
            finite &= all_finite<K>(grad_out, g.grad_out.row, rows, a.value_dim);
          }
          loaded = true;
        }
        const auto from = [&](Operand o) {
          return Operand{o.data + at * o.m_stride, o.m_stride, o.t_stride};
        };
        const Visibility visible =
            gradient_tile<K>(a, g, b, h, q0, rows, k0, keys, from(key_rows), from(value_rows), w);
        if (visible == Visibility::kEmpty) continue;
        if (write_bias) store_bias_tile<K>(a, g, b, h, q0, rows, k0, keys, w.one, w.ds);

        const TilePlace<K> tile{query, grad_out, key + at * a.key.row, rows, keys, at, first};
        first = false;
        if (visible == Visibility::kPartial &&
            !(finite && all_finite<K>(tile.key, a.key.row, keys, a.head_dim)))
          add_dirty_gradients<K>(a, g, tile, w);
        else
          add_gradients<K>(a, g, tile,
                           {key_columns.data + at / Dot::kStep * key_columns.t_stride,
                            key_columns.m_stride, key_columns.t_stride},
                           w);
      }
      if (!g.grad_query.data) continue;
      if (first) __builtin_memset(w.grad_query, 0, (size_t)(a.head_dim * kRow) * sizeof(T));
      if (ranges.count == 1) {
        for (int64_t r = 0; r < kRow; r++) w.high[r] = (T)a.scale;
        transpose_out<X>(w.grad_query, w.high, rows, a.head_dim, row_of<K>(g.grad_query, b, h, q0),
                         g.grad_query.row);
      } else {
        T* to = (T*)partial_sums +
                (((h - kv * group) * ranges.count + range) * a.queries + q0) * a.head_dim;
        transpose_out<X>(w.grad_query, w.one, rows, a.head_dim, to, a.head_dim);
      }
    }
  if (g.grad_key.data)
    scale_out<X>(w.grad_key, ld, (T)a.scale, length, a.head_dim,
                 row_of<K>(g.grad_key, b, kv, begin), g.grad_key.row);
  if (g.grad_value.data)
    scale_out<X>(w.grad_value, ldv, (T)a.dropout.keep_scale, length, a.value_dim,
                 row_of<K>(g.grad_value, b, kv, begin), g.grad_value.row);
}

template <class K>
void add_ranges(const Attention& a, const AttentionGrad& g, const void* partial, int64_t b,
                int64_t h, int64_t block) {
  using T = typename K::T;
  using X = typename K::X;
  const int64_t q0 = block * kTile, rows = min_of(kTile, a.queries - q0),
                count = key_ranges(a).count;
  const typename X::V scale = X::set((T)a.scale);
  for (int64_t r = 0; r < rows; r++) {
    const T* from = (const T*)partial + (q0 + r) * a.head_dim;
    typename K::S* to = row_of<K>(g.grad_query, b, h, q0 + r);
    for (int64_t d = 0; d < a.head_dim; d += K::kLanes) {
      const int64_t n = min_of(K::kLanes, a.head_dim - d);
      typename X::V sum = X::zero();
      for (int64_t i = 0; i < count; i++) {
        const T* p = from + i * a.queries * a.head_dim + d;
        sum = X::add(sum, n == K::kLanes ? X::load(p) : X::load(p, n));
      }
      sum = X::mul(sum, scale);
      if (n == K::kLanes)
        X::store(to + d, sum);
      else
        X::store(to + d, sum, n);
    }
  }
}

// The gradient of a bias that broadcasts over (b, h) or the queries: each of its tiles has one
// owner, who computes dS again for every (b, h), and every block of queries it broadcasts over, in
// order; a share is a piece of that list. gradient(b, h, q0, rows, k0, keys) gives the tile dS, or
// nullptr where it is empty.
template <class K, class Gradient>
void add_bias_share(const Attention& a, const BiasPlan& plan, int64_t owner, int64_t chunk,
                    typename K::T* sums, const Gradient& gradient) {
  using X = typename K::X;
  for (int64_t i = 0; i < kTile * kRow; i++) sums[i] = 0;

  const int64_t key_tile = owner % plan.key_tiles,
                query_tile = owner / plan.key_tiles % plan.query_tiles;
  const int64_t head = owner / (plan.key_tiles * plan.query_tiles) % plan.heads;
  const int64_t batch = owner / (plan.key_tiles * plan.query_tiles * plan.heads);
  // How many terms each dimension adds: all of it where the bias broadcasts, else one.
  const int64_t batches = a.batch / plan.batches, heads = a.heads / plan.heads;
  const int64_t query_tiles = ceil_div(a.queries, kTile) / plan.query_tiles;
  const int64_t terms = batches * heads * query_tiles;
  const int64_t k0 = key_tile * kTile, keys = min_of(kTile, a.keys - k0);

  for (int64_t i = terms * chunk / plan.chunks; i < terms * (chunk + 1) / plan.chunks; i++) {
    const int64_t q0 = (query_tile + i % query_tiles) * kTile;
    const int64_t rows = min_of(kTile, a.queries - q0);
    const int64_t h = head + i / query_tiles % heads, b = batch + i / (query_tiles * heads);
    const Range seen = seen_by_any(a, b, q0, q0 + rows - 1);
    if (k0 >= seen.end || k0 + keys <= seen.begin) continue;
    const typename K::T* const tile = gradient(b, h, q0, rows, k0, keys);
    if (!tile) continue;
    const uint64_t exist = first_bits(rows);  // lanes past the last query hold anything
    for (int64_t n = 0; n < keys; n++)
      for (int64_t lane = 0; lane < rows; lane += K::kLanes) {
        const typename X::V ds = X::load(tile + n * kRow + lane);
        typename K::T* sum = sums + n * kRow + lane;
        X::store(sum, X::add(X::load(sum), X::select(X::mask(exist >> lane), ds, X::zero())));
      }
  }
}

template <class K>
void bias_share(const Attention& a, const AttentionGrad& g, const BiasPlan& plan, int64_t owner,
                int64_t chunk, void* sums, void* scratch) {
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  GradScratch<K> w(a, arena);
  auto* keys_in = arena.take<typename K::Unit>(kTile * operand_width<K>(a.head_dim));
  auto* values_in = arena.take<typename K::Unit>(kTile * operand_width<K>(a.value_dim));
  add_bias_share<K>(a, plan, owner, chunk, (typename K::T*)sums,
                    [&](int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0, int64_t keys) {
                      const int64_t kv = kv_head(a, h);
                      load_queries<K>(a, g, b, h, q0, rows, w);
                      const Operand key_rows = rows_operand<K>(
                          row_of<K>(a.key, b, kv, k0), a.key.row, keys, a.head_dim, keys_in);
                      const Operand value_rows = rows_operand<K>(
                          row_of<K>(a.value, b, kv, k0), a.value.row, keys, a.value_dim, values_in);
                      const Visibility visible =
                          gradient_tile<K>(a, g, b, h, q0, rows, k0, keys, key_rows, value_rows, w);
                      return visible == Visibility::kEmpty ? nullptr : w.ds;
                    });
}

template <class K>
void bias_finish(const Attention& a, const AttentionGrad& g, const BiasPlan& plan, int64_t owner,
                 void* sums_pointer, void* scratch) {
  using T = typename K::T;
  T* sums = (T*)sums_pointer;  // [chunks][64 keys][64 queries], added into the first
  T* one = (T*)scratch;
  for (int64_t r = 0; r < kRow; r++) one[r] = 1;
  for (int64_t c = 1; c < plan.chunks; c++)
    for (int64_t i = 0; i < kTile * kRow; i++) sums[i] += sums[c * kTile * kRow + i];
  int64_t rows = kTile;
  if (g.grad_bias.query == 0) {  // sum over the queries, into row 0
    for (int64_t n = 0; n < kTile; n++)
      for (int64_t r = 1; r < kRow; r++) sums[n * kRow] += sums[n * kRow + r];
    rows = 1;
  }
  const int64_t q0 = owner / plan.key_tiles % plan.query_tiles * kTile,
                k0 = owner % plan.key_tiles * kTile;
  const int64_t head = owner / (plan.key_tiles * plan.query_tiles) % plan.heads;
  const int64_t batch = owner / (plan.key_tiles * plan.query_tiles * plan.heads);
  store_bias_tile<K>(a, g, batch, head, q0, min_of(rows, a.queries - q0), k0,
                     min_of(kTile, a.keys - k0), one, sums);
}

}  // namespace
}  // namespace mha_ext::cpu

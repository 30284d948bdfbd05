// The tangent of backward: its derivative in a direction Q', K', V', B', dO', dL'.
//   P' = P o (S' - mu), Z' = P' o M
//   dP' = (dO' V^T + dO V'^T) o M,  delta' = rowsum(dO' o O + dO o O') - dL'
//   dS' = P' o (dP - delta) + P o (dP' - delta')
//   dV' = Z'^T dO + Z^T dO', dK' = scale (dS'^T Q + dS^T Q'), dQ' = scale (dS' K + dS K')
//   dB' = dS', summed where the bias broadcasts
// A direction that is missing is zero: its products are not computed.
namespace mha_ext::cpu {
namespace {

// sum over the width of x[d] y[d]
template <class K>
typename K::T dot(const typename K::S* x, const typename K::S* y, int64_t width) {
  using X = typename K::X;
  typename X::V sum = X::zero();
  for (int64_t d = 0; d < width; d += K::kLanes)
    sum = X::fma(load_up_to<X>(x + d, width - d), load_up_to<X>(y + d, width - d), sum);
  typename K::T lanes[K::kLanes], total = 0;
  X::store(lanes, sum);
  for (int i = 0; i < K::kLanes; i++) total += lanes[i];
  return total;
}

// delta' = rowsum(dO' o O + dO o O') - dL' for queries [64 block, …).
template <class K>
void delta_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t, int64_t b,
                   int64_t h, int64_t block) {
  using T = typename K::T;
  const int64_t q0 = block * kTile, rows = min_of(kTile, a.queries - q0);
  const int64_t at = (b * a.heads + h) * a.queries + q0;
  for (int64_t r = 0; r < rows; r++) {
    const auto row = [&](const Rows& from) { return row_of<K>(from, b, h, q0 + r); };
    T delta = t.grad_lse ? -((const T*)t.grad_lse)[at + r] : 0;
    if (t.grad_out.data) delta += dot<K>(row(t.grad_out), row(a.out), a.value_dim);
    if (t.out.data) delta += dot<K>(row(g.grad_out), row(t.out), a.value_dim);
    ((T*)t.delta)[at + r] = delta;
  }
}

// As GradScratch, and the same of the directions.
template <class K>
struct GradTangentScratch : GradScratch<K> {
  using T = typename K::T;
  using Unit = typename K::Unit;
  Unit *query_tangent, *grad_out_tangent;  // lanes
  T *pt, *dst, *mu, *delta, *delta_tangent;

  GradTangentScratch(const Attention& a, Arena& arena) : GradScratch<K>(a, arena) {
    query_tangent = arena.take<Unit>(units_of<K>(a.head_dim) * kRow);
    grad_out_tangent = arena.take<Unit>(units_of<K>(a.value_dim) * kRow);
    pt = arena.take<T>(kTile * kRow);
    dst = arena.take<T>(kTile * kRow);
    mu = arena.take<T>(kRow);
    delta = arena.take<T>(kRow);
    delta_tangent = arena.take<T>(kRow);
  }
};

template <class K, bool = K::kCut>
struct BackwardTangentLimbs {
  BackwardTangentLimbs(const Attention&, int64_t, Arena&) {}
};

template <class K>
struct BackwardTangentScratch : GradTangentScratch<K> {
  using T = typename K::T;
  using Unit = typename K::Unit;
  // Vectors along the width, for the sums over queries.
  Unit *query_rows, *query_tangent_rows, *grad_out_rows, *grad_out_tangent_rows, *clean_rows;
  Unit *keys_in, *key_tangents_in, *values_in, *value_tangents_in;
  Unit *keys_across, *key_tangents_across, *clean_keys, *pairs, *pair_rows;
  typename K::S* clean;
  T *grad_query, *grad_key, *grad_value, *one;
  BackwardTangentLimbs<K> limbs;

  static int64_t range_of(const Attention& a) {
    return round_up(min_of(key_ranges(a).size, a.keys), kTile);
  }
  BackwardTangentScratch(const Attention& a, Arena& arena)
      : GradTangentScratch<K>(a, arena), limbs(a, range_of(a) / kTile, arena) {
    const int64_t d = padded<K>(a.head_dim), dv = padded<K>(a.value_dim), range = range_of(a);
    query_rows = arena.take<Unit>(kTile * d);
    query_tangent_rows = arena.take<Unit>(kTile * d);
    grad_out_rows = arena.take<Unit>(kTile * dv);
    grad_out_tangent_rows = arena.take<Unit>(kTile * dv);
    clean_rows = arena.take<Unit>(kTile * max_of(d, dv));
    keys_in = arena.take<Unit>(range * operand_width<K>(a.head_dim));
    key_tangents_in = arena.take<Unit>(range * operand_width<K>(a.head_dim));
    values_in = arena.take<Unit>(range * operand_width<K>(a.value_dim));
    value_tangents_in = arena.take<Unit>(range * operand_width<K>(a.value_dim));
    keys_across = arena.take<Unit>(K::kPairs ? range / 2 * d : 0);
    key_tangents_across = arena.take<Unit>(K::kPairs ? range / 2 * d : 0);
    clean_keys = arena.take<Unit>(kTile * operand_width<K>(a.head_dim));
    pairs = arena.take<Unit>(K::kPairs ? kTile * kRow / 2 : 0);
    pair_rows = arena.take<Unit>(K::kPairs ? kTile * kRow / 2 : 0);
    clean = arena.take<typename K::S>(kTile * max_of(a.head_dim, a.value_dim));
    grad_query = arena.take<T>(height_of<K>(a.head_dim) * kRow);
    grad_key = arena.take<T>(range * d);
    grad_value = arena.take<T>(range * dv);
    one = arena.take<T>(kRow);
  }
};

// Whether dP' or delta' is there: what moves dS beside P'.
inline bool moves_grads(const AttentionTangent& t) {
  return t.grad_out.data || t.value.data || t.delta;
}

template <class K>
void load_queries_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                          int64_t b, int64_t h, int64_t q0, int64_t rows,
                          GradTangentScratch<K>& w) {
  using T = typename K::T;
  load_queries<K>(a, g, b, h, q0, rows, w);
  if (t.query.data) pack_query_tangent<K>(a, t, b, h, q0, rows, w.query_tangent);
  if (t.grad_out.data)
    pack_lanes<K>(row_of<K>(t.grad_out, b, h, q0), t.grad_out.row, rows, a.value_dim,
                  w.grad_out_tangent);
  const int64_t at = (b * a.heads + h) * a.queries + q0;
  for (int64_t r = 0; r < kRow; r++) {
    w.delta[r] = r < rows ? ((const T*)g.delta)[at + r] : 0;
    w.mu[r] = r < rows && t.lse ? ((const T*)t.lse)[at + r] : 0;
    w.delta_tangent[r] = r < rows && t.delta ? ((const T*)t.delta)[at + r] : 0;
  }
}

// Where a whole tile stands: its head, its first query, how many there are, its first key, and the
// place of this among the keys of the range.
struct TangentPlace {
  int64_t batch, head, q0, rows, k0, at;
};

// A tile's rows of K, V and of their directions, along t = column.
struct KeyOperands {
  Operand key, key_tangent, value, value_tangent;
};

// w.p = Z, w.pt = Z' (both without the factor of dropout), w.ds = dS and w.dst = dS' of one tile;
// hidden pairs are 0, whatever they hold. What nobody wants is not computed: w.pt where the scores
// do not move, w.ds and w.dst where only grad_value is asked for.
template <class K>
Visibility gradient_tangent_tile(const Attention& a, const AttentionGrad& g,
                                 const AttentionTangent& t, int64_t b, int64_t h, int64_t q0,
                                 int64_t rows, int64_t k0, int64_t keys, const KeyOperands& from,
                                 Visibility visible, GradTangentScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  using V = typename X::V;
  using M = typename X::M;
  visible =
      scores<K>(a, b, h, q0, rows, k0, keys, w.query, from.key, visible, w.bits, w.p, w.extra);
  const int64_t vectors = vectors_of<K>(rows);
  const bool with_scores = moves_scores(t), with_grads = moves_grads(t);
  const bool with_ds = g.grad_query.data || g.grad_key.data || g.grad_bias.data;
  const bool with_products = with_ds && (t.grad_out.data || t.value.data);
  if (with_scores)
    scores_tangent<K>(a, t, b, h, q0, rows, k0, keys, w.query, w.query_tangent, from.key,
                      from.key_tangent, w.pt, w.extra);
  if (with_ds && with_scores)
    score_product<K>(from.value, keys, a.value_dim, w.grad_out, rows, w.ds);
  if (with_products)
    two_score_products<K>(t.grad_out.data, from.value, w.grad_out_tangent, t.value.data,
                          from.value_tangent, w.grad_out, keys, a.value_dim, rows, w.dst);

  const bool partial = visible == Visibility::kPartial, dropout = a.dropout.seed != nullptr;
  if (dropout) dropout_tile<K>(a, b, h, q0, rows, k0, keys, w.keep);
  const V kept_scale = X::set((T)a.dropout.keep_scale), zero = X::zero();
  for (int64_t i = 0; i < vectors; i++) {
    const int64_t lane = i * K::kLanes;
    const V high = X::load(w.high + lane), low = X::load(w.low + lane), mu = X::load(w.mu + lane);
    const V delta = X::load(w.delta + lane), delta_tangent = X::load(w.delta_tangent + lane);
    for (int64_t n = 0; n < keys; n++) {
      const int64_t at = n * kRow + lane;
      V p = probability<X>(w.p + at, high, low), pt = zero;
      M keep{}, seen{};
      if (partial) {
        seen = X::mask(w.bits[n] >> lane);
        p = X::select(seen, p, zero);
      }
      if (with_scores) {
        pt = X::mul(p, X::sub(X::load(w.pt + at), mu));
        if (partial) pt = X::select(seen, pt, zero);
      }
      if (dropout) keep = X::mask(w.keep[n] >> lane);
      if (with_ds) {
        V ds = zero, dst = zero;
        if (with_scores) {
          V grad = X::load(w.ds + at);
          if (dropout) grad = X::select(keep, X::mul(kept_scale, grad), zero);
          grad = X::sub(grad, delta);
          ds = X::mul(p, grad);
          dst = X::mul(pt, grad);
        }
        if (with_grads) {
          V grad = with_products ? X::load(w.dst + at) : zero;
          if (dropout) grad = X::select(keep, X::mul(kept_scale, grad), zero);
          dst = X::fma(p, X::sub(grad, delta_tangent), dst);
        }
        if (partial) {
          ds = X::select(seen, ds, zero);
          dst = X::select(seen, dst, zero);
        }
        X::store(w.ds + at, ds);
        X::store(w.dst + at, dst);
      }
      X::store(w.p + at, dropout ? X::select(keep, p, zero) : p);
      if (with_scores) X::store(w.pt + at, dropout ? X::select(keep, pt, zero) : pt);
    }
  }
  return visible;
}

// Rows of one tile as they lie in memory, and packed.
template <class K>
struct PackedRows {
  const typename K::S* from;
  int64_t stride, width;
  const typename K::Unit* packed;
};

// to[key][column] += sum over queries of tile[key][r] rows[r][column].
template <class K>
void add_over_queries(const typename K::T* tile, const PackedRows<K>& side, int64_t rows,
                      int64_t keys, bool partial, BackwardTangentScratch<K>& w, typename K::T* to) {
  const int64_t ld = padded<K>(side.width);
  const typename K::Unit* packed = side.packed;
  const bool dirty = partial && !all_finite<K>(side.from, side.stride, rows, side.width);
  if (dirty) {
    clean_copy<K>(side.from, side.stride, rows, side.width, w.clean);
    pack_rows<K>(w.clean, side.width, rows, side.width, w.clean_rows, ld);
    packed = w.clean_rows;
  }
  product_columns<typename K::X, typename K::Dot, Contiguous::kAlongT, Update::kAddSum>(
      tile_operand<K>(tile, keys, rows, w.pair_rows), keys, units_of<K>(rows), packed, ld,
      side.width, to, ld);
  if (dirty)
    add_nonfinite_rows<K>(tile, w.bits, side.from, side.stride, rows, keys, side.width, to, ld);
}

// grad_query[column][64 r] += sum over keys of rows[key][column] tile[key][r].
template <class K>
void add_over_keys(const typename K::T* tile, const typename K::S* from, int64_t stride,
                   int64_t width, Operand columns, int64_t rows, int64_t keys, bool partial,
                   BackwardTangentScratch<K>& w) {
  const bool dirty = partial && !all_finite<K>(from, stride, keys, width);
  if (dirty) {
    clean_copy<K>(from, stride, keys, width, w.clean);
    columns = columns_operand<K>(w.clean, width, keys, width, w.clean_keys);
  }
  product_columns<typename K::X, typename K::Dot, Contiguous::kAlongM, Update::kAddSum>(
      columns, width, units_of<K>(keys), tile_vectors<K>(tile, keys, vectors_of<K>(rows), w.pairs),
      kRow, taken_lanes<K>(rows), w.grad_query, kRow);
  if (dirty) add_nonfinite_lanes<K>(tile, w.bits, from, stride, keys, width, w.grad_query);
}

// P of empty rows is 1 / Lk over all keys and does not move: dV' += Z^T dO' of those rows only.
template <class K>
void add_uniform_tangents(const Attention& a, const AttentionTangent& t, int64_t b, int64_t h,
                          int64_t q0, int64_t rows, int64_t begin, int64_t end,
                          BackwardTangentScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  const T* lse = (const T*)a.lse + (b * a.heads + h) * a.queries + q0;
  uint64_t empty = 0;
  for (int64_t r = 0; r < rows; r++) empty |= (uint64_t)(lse[r] == -(T)INFINITY) << r;
  if (!empty) return;
  const int64_t ld = padded<K>(a.value_dim);
  for (int64_t k0 = begin; k0 < end; k0 += kTile) {
    const int64_t keys = min_of(kTile, end - k0);
    uniform_tile<K>(HeadRows<K>{a, b, h}, q0, rows, k0, keys, empty, w.keep, w.p);
    for (uint64_t left = empty; left; left &= left - 1) {
      const int64_t r = __builtin_ctzll(left);
      const typename K::S* grad_out = row_of<K>(t.grad_out, b, h, q0 + r);
      for (int64_t d = 0; d < a.value_dim; d += K::kLanes) {
        const typename X::V v = load_up_to<X>(grad_out + d, a.value_dim - d);
        for (int64_t n = 0; n < keys; n++) {
          T* to = w.grad_value + (k0 - begin + n) * ld + d;
          X::store(to, X::fma(v, X::set(w.p[n * kRow + r]), X::load(to)));
        }
      }
    }
  }
}

// One range of keys of one key/value head, as `backward`: g holds dO and delta, and where the
// tangents of the gradients go.
template <class K>
void backward_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                      int64_t b, int64_t kv, int64_t range, void* partial_sums, void* scratch) {
  using T = typename K::T;
  using S = typename K::S;
  using X = typename K::X;
  using Unit = typename K::Unit;
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  BackwardTangentScratch<K> w(a, arena);
  const KeyRanges ranges = key_ranges(a);
  const int64_t begin = range * ranges.size, last = min_of(a.keys, begin + ranges.size);
  // Uniform rows see all keys.
  const int64_t end = end_of_existing<K>(a, b, begin, last, a.uniform_empty_rows);
  const int64_t length = max_of(0, end - begin);
  const int64_t d = a.head_dim, dv = a.value_dim, ld = padded<K>(d), ldv = padded<K>(dv);
  const int64_t group = a.heads / a.kv_heads, blocks = ceil_div(a.queries, kTile);
  const bool write_bias = g.grad_bias.data && bias_is_dense(a, g.grad_bias);
  const PastCaches<X> bias_past = bias_past_caches<K>(a, g.grad_bias, write_bias);
  const bool with_scores = moves_scores(t), moves = with_scores || moves_grads(t);
  for (int64_t r = 0; r < kRow; r++) w.one[r] = 1;
  for (int64_t i = 0; i < length * ld; i++) w.grad_key[i] = 0;
  for (int64_t i = 0; i < length * ldv; i++) w.grad_value[i] = 0;

  const auto rows_in = [&](const Rows& from, int64_t width, Unit* to) {
    if (!from.data) return Operand{};
    return rows_operand<K>(row_of<K>(from, b, kv, begin), from.row, length, width, to);
  };
  const KeyOperands whole{rows_in(a.key, d, w.keys_in), rows_in(t.key, d, w.key_tangents_in),
                          rows_in(a.value, dv, w.values_in),
                          rows_in(t.value, dv, w.value_tangents_in)};
  const auto columns_in = [&](const Rows& from, Operand rows, Unit* to) {
    if constexpr (K::kPairs) {
      if (from.data)
        return columns_operand<K>(row_of<K>(from, b, kv, begin), from.row, length, d, to);
    }
    return Operand{rows.data, (int64_t)sizeof(Unit), rows.m_stride};
  };
  const Operand key_columns = columns_in(a.key, whole.key, w.keys_across);
  const Operand key_tangent_columns = columns_in(t.key, whole.key_tangent, w.key_tangents_across);

  for (int64_t h = kv * group; h < (kv + 1) * group; h++)
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t q0 = block * kTile, rows = min_of(kTile, a.queries - q0);
      if (a.uniform_empty_rows && g.grad_value.data && t.grad_out.data)
        add_uniform_tangents<K>(a, t, b, h, q0, rows, begin, end, w);
      if (g.grad_query.data)
        __builtin_memset(w.grad_query, 0, (size_t)(height_of<K>(d) * kRow) * sizeof(T));

      const Range seen = seen_by_any(a, b, q0, q0 + rows - 1);
      const auto packed = [&](const Rows& from, int64_t width, Unit* to) {
        const S* first = row_of<K>(from, b, h, q0);
        if (from.data) pack_rows<K>(first, from.row, rows, width, to, padded<K>(width));
        return PackedRows<K>{first, from.row, width, to};
      };
      PackedRows<K> query, query_tangent, grad_out, grad_out_tangent;
      bool loaded = false;
      for (int64_t k0 = begin; moves && k0 < end; k0 += kTile) {
        const int64_t keys = min_of(kTile, end - k0), at = k0 - begin;
        if (k0 >= seen.end || k0 + keys <= seen.begin) continue;
        if (!loaded) {
          load_queries_tangent<K>(a, g, t, b, h, q0, rows, w);
          if constexpr (K::kCut) w.limbs.packed = false;
          query = packed(a.query, d, w.query_rows);
          query_tangent = packed(t.query, d, w.query_tangent_rows);
          grad_out = packed(g.grad_out, dv, w.grad_out_rows);
          grad_out_tangent = packed(t.grad_out, dv, w.grad_out_tangent_rows);
          loaded = true;
        }
        const auto rows_from = [&](Operand o) {
          return Operand{o.data + at * o.m_stride, o.m_stride, o.t_stride};
        };
        const auto columns_from = [&](Operand o) {
          return Operand{o.data + at / K::Dot::kStep * o.t_stride, o.m_stride, o.t_stride};
        };
        const KeyOperands tile{rows_from(whole.key), rows_from(whole.key_tangent),
                               rows_from(whole.value), rows_from(whole.value_tangent)};
        Visibility visible = visibility_of<K>(a, b, h, q0, rows, k0, keys, w.bits);
        if (visible == Visibility::kEmpty) continue;
        if constexpr (K::kCut) {
          if (!a.bias.data && !t.bias.data && g.grad_out.data && in_limbs<K>(a, b, q0, k0, keys)) {
            const TangentPlace place{b, h, q0, rows, k0, at};
            const bool partial = visible == Visibility::kPartial;
            if (!limbs_gradient_tangent<K>(a, g, t, place, partial, w)) continue;
            visible = Visibility::kPartial;
          }
          w.limbs.pending.finish();
        }
        visible = gradient_tangent_tile<K>(a, g, t, b, h, q0, rows, k0, keys, tile, visible, w);
        if (write_bias)
          store_bias_tile<K>(a, g, b, h, q0, rows, k0, keys, w.one, w.dst, bias_past.on);

        const bool partial = visible == Visibility::kPartial;
        if (g.grad_value.data) {
          T* to = w.grad_value + at * ldv;
          if (with_scores) add_over_queries<K>(w.pt, grad_out, rows, keys, partial, w, to);
          if (t.grad_out.data)
            add_over_queries<K>(w.p, grad_out_tangent, rows, keys, partial, w, to);
        }
        if (g.grad_key.data) {
          T* to = w.grad_key + at * ld;
          add_over_queries<K>(w.dst, query, rows, keys, partial, w, to);
          if (t.query.data) add_over_queries<K>(w.ds, query_tangent, rows, keys, partial, w, to);
        }
        if (g.grad_query.data) {
          add_over_keys<K>(w.dst, row_of<K>(a.key, b, kv, k0), a.key.row, d,
                           columns_from(key_columns), rows, keys, partial, w);
          if (t.key.data)
            add_over_keys<K>(w.ds, row_of<K>(t.key, b, kv, k0), t.key.row, d,
                             columns_from(key_tangent_columns), rows, keys, partial, w);
        }
      }
      if constexpr (K::kCut) w.limbs.pending.finish();
      if (!g.grad_query.data) continue;
      if (ranges.count == 1) {
        for (int64_t r = 0; r < kRow; r++) w.high[r] = (T)a.scale;
        write_rows<K>(w.grad_query, w.high, rows, d, row_of<K>(g.grad_query, b, h, q0),
                      g.grad_query.row);
      } else {
        T* to = (T*)partial_sums +
                (((h - kv * group) * ranges.count + range) * a.queries + q0) * a.head_dim;
        transpose_out<X>(w.grad_query, w.one, rows, d, to, d);
      }
    }
  write_unseen_keys<K>(a, g, b, kv, end, last);
  if (g.grad_key.data)
    scale_out<X>(w.grad_key, ld, (T)a.scale, length, d, row_of<K>(g.grad_key, b, kv, begin),
                 g.grad_key.row);
  if (g.grad_value.data)
    scale_out<X>(w.grad_value, ldv, (T)a.dropout.keep_scale, length, dv,
                 row_of<K>(g.grad_value, b, kv, begin), g.grad_value.row);
}

// As bias_share, for dS'.
template <class K>
void bias_share_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                        const BiasPlan& plan, int64_t owner, int64_t chunk, void* sums,
                        void* scratch) {
  using Unit = typename K::Unit;
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  GradTangentScratch<K> w(a, arena);
  Unit* packed[4];
  for (int i = 0; i < 4; i++)
    packed[i] = arena.take<Unit>(kTile * operand_width<K>(i < 2 ? a.head_dim : a.value_dim));
  add_bias_share<K>(
      a, plan, owner, chunk, (typename K::T*)sums,
      [&](int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0, int64_t keys) {
        const auto rows_at = [&](const Rows& from, int64_t width, Unit* to) {
          if (!from.data) return Operand{};
          return rows_operand<K>(row_of<K>(from, b, kv_head(a, h), k0), from.row, keys, width, to);
        };
        load_queries_tangent<K>(a, g, t, b, h, q0, rows, w);
        const KeyOperands from{
            rows_at(a.key, a.head_dim, packed[0]), rows_at(t.key, a.head_dim, packed[1]),
            rows_at(a.value, a.value_dim, packed[2]), rows_at(t.value, a.value_dim, packed[3])};
        const Visibility visible = visibility_of<K>(a, b, h, q0, rows, k0, keys, w.bits);
        if (visible == Visibility::kEmpty) return (typename K::T*)nullptr;
        gradient_tangent_tile<K>(a, g, t, b, h, q0, rows, k0, keys, from, visible, w);
        return w.dst;
      });
}

}  // namespace
}  // namespace mha_ext::cpu

// The tangent of forward: its derivative in a direction Q', K', V', B'.
//   S' = scale (Q' K^T + Q K'^T) + B',  mu = rowsum(P o S') = lse',  P' = P o (S' - mu)
//   O' = (P' o M) V + Z V'
// A direction that is missing is zero: its products are not computed.
namespace mha_ext::cpu {
namespace {

inline bool moves_scores(const AttentionTangent& t) {
  return t.query.data || t.key.data || t.bias.data;
}

// tile += what score_product stores.
template <class K>
void add_score_product(const Operand& rows, int64_t keys, int64_t columns,
                       const typename K::Unit* lanes, int64_t queries, typename K::T* tile) {
  constexpr int64_t kPiece = 128 / K::Dot::kStep;
  const int64_t units = units_of<K>(columns);
  for (int64_t i = 0; i < units; i += kPiece) {
    const Operand piece{rows.data + i * rows.t_stride, rows.m_stride, rows.t_stride};
    product_columns<typename K::X, typename K::Dot, Contiguous::kAlongT, Update::kAddSum>(
        piece, keys, min_of(units - i, kPiece), lanes + i * kRow, kRow, taken_lanes<K>(queries),
        tile, kRow);
  }
}

// tile = first product (+ second product), of those that are there.
template <class K>
void two_score_products(bool first, const Operand& first_rows, const typename K::Unit* first_lanes,
                        bool second, const Operand& second_rows,
                        const typename K::Unit* second_lanes, int64_t keys, int64_t columns,
                        int64_t queries, typename K::T* tile) {
  if (first) score_product<K>(first_rows, keys, columns, first_lanes, queries, tile);
  if (!second) return;
  if (first)
    add_score_product<K>(second_rows, keys, columns, second_lanes, queries, tile);
  else
    score_product<K>(second_rows, keys, columns, second_lanes, queries, tile);
}

// S'[key][64 queries]; hidden pairs hold anything.
template <class K>
void scores_tangent(const Attention& a, const AttentionTangent& t, int64_t b, int64_t h, int64_t q0,
                    int64_t rows, int64_t k0, int64_t keys, const typename K::Unit* query,
                    const typename K::Unit* query_tangent, const Operand& key_rows,
                    const Operand& key_tangent_rows, typename K::T* s, typename K::T* scratch) {
  using X = typename K::X;
  const int64_t vectors = vectors_of<K>(rows);
  two_score_products<K>(t.query.data, key_rows, query_tangent, t.key.data, key_tangent_rows, query,
                        keys, a.head_dim, rows, s);
  const bool products = t.query.data || t.key.data;
  if (K::kPairs && products) scale_tile<K>((typename K::T)a.scale, keys, vectors, s);
  if (!t.bias.data) return;
  typename K::T* const bias = products ? scratch : s;
  if (a.bias_is_float32)
    load_pairs<K, float>(t.bias, b, h, q0, rows, k0, keys, bias);
  else
    load_pairs<K, typename K::S>(t.bias, b, h, q0, rows, k0, keys, bias);
  if (!products) return;
  for (int64_t n = 0; n < keys; n++)
    for (int64_t i = 0; i < vectors; i++) {
      const int64_t at = n * kRow + i * K::kLanes;
      X::store(s + at, X::add(X::load(s + at), X::load(bias + at)));
    }
}

// Lanes of `rows` of a direction as pack_query makes them of the query.
template <class K>
void pack_query_tangent(const Attention& a, const AttentionTangent& t, int64_t b, int64_t h,
                        int64_t q0, int64_t rows, typename K::Unit* to) {
  pack_lanes<K>(row_of<K>(t.query, b, h, q0), t.query.row, rows, a.head_dim, to);
  if constexpr (!K::kPairs)
    scale_tile<K>((typename K::T)a.scale, a.head_dim, vectors_of<K>(rows), to);
}

// What a block of 64 queries carries through the keys.
template <class K>
struct TangentBlock {
  using T = typename K::T;
  typename K::Unit *query, *query_tangent;
  T *out, *high, *low, *mu;
  int64_t q0, rows, vectors;
  bool started;  // has met a tile: before that, out holds nothing
};

template <class K, bool = K::kCut>
struct ForwardTangentLimbs {
  ForwardTangentLimbs(const Attention&, Arena&) {}
};

template <class K>
struct ForwardTangentScratch {
  using T = typename K::T;
  using Unit = typename K::Unit;
  TangentBlock<K> blocks[kTangentGroup];
  Unit *key, *key_tangent, *value, *value_tangent, *clean_value, *pairs;
  T *s, *st, *extra;
  uint64_t *bits, *keep;
  typename K::S* clean;
  ForwardTangentLimbs<K> limbs;

  ForwardTangentScratch(const Attention& a, Arena& arena) : limbs(a, arena) {
    const int64_t width = operand_width<K>(a.head_dim), value_width = operand_width<K>(a.value_dim);
    for (int64_t i = 0; i < min_of(kTangentGroup, max_of(1, ceil_div(a.queries, kTile))); i++) {
      TangentBlock<K>& q = blocks[i];
      q.query = arena.take<Unit>(units_of<K>(a.head_dim) * kRow);
      q.query_tangent = arena.take<Unit>(units_of<K>(a.head_dim) * kRow);
      q.out = arena.take<T>(height_of<K>(a.value_dim) * kRow);
      q.high = arena.take<T>(kRow);
      q.low = arena.take<T>(kRow);
      q.mu = arena.take<T>(kRow);
    }
    key = arena.take<Unit>(kTile * width);
    key_tangent = arena.take<Unit>(kTile * width);
    value = arena.take<Unit>(kTile * value_width);
    value_tangent = arena.take<Unit>(kTile * value_width);
    clean_value = arena.take<Unit>(kTile * value_width);
    pairs = arena.take<Unit>(K::kPairs ? kTile * kRow / 2 : 0);
    s = arena.take<T>(kTile * kRow);
    st = arena.take<T>(kTile * kRow);
    extra = arena.take<T>(max_of(kTile, height_of<K>(a.value_dim)) * kRow);
    bits = arena.take<uint64_t>(kTile);
    keep = arena.take<uint64_t>(kTile);
    clean = arena.take<typename K::S>(kTile * a.value_dim);
  }
};

// P of one vector of lanes, from S.
template <class X>
typename X::V probability(const typename X::T* s, typename X::V high, typename X::V low) {
  return exp_of<X>(X::sub(X::sub(X::load(s), high), low));
}

// s: S -> P, st: S' -> P o S', which is added to mu; then dropped pairs are 0 in both, as hidden
// ones are before.
template <class K>
void tangent_tile(int64_t keys, bool partial, const uint64_t* bits, const uint64_t* keep,
                  bool with_scores, typename K::T* s, typename K::T* st, TangentBlock<K>& q) {
  using X = typename K::X;
  using V = typename X::V;
  for (int64_t i = 0; i < q.vectors; i++) {
    const int64_t lane = i * K::kLanes;
    const V high = X::load(q.high + lane), low = X::load(q.low + lane);
    V mu[2] = {X::zero(), X::zero()};  // of even and of odd keys: shorter chains round less
    const auto add = [&](int64_t n, V& sum) __attribute__((always_inline)) {
      typename K::T *to = s + n * kRow + lane, *to_tangent = st + n * kRow + lane;
      V p = probability<X>(to, high, low);
      const typename X::M seen = X::mask(partial ? bits[n] >> lane : ~0ull);
      const typename X::M kept = X::mask(keep ? keep[n] >> lane : ~0ull);
      if (partial) p = X::select(seen, p, X::zero());
      if (with_scores) {
        V x = X::mul(p, X::load(to_tangent));
        if (partial) x = X::select(seen, x, X::zero());
        sum = X::add(sum, x);
        X::store(to_tangent, keep ? X::select(kept, x, X::zero()) : x);
      }
      X::store(to, keep ? X::select(kept, p, X::zero()) : p);
    };
    int64_t n = 0;
    for (; n + 2 <= keys; n += 2) {
      add(n, mu[0]);
      add(n + 1, mu[1]);
    }
    if (n < keys) add(n, mu[0]);
    X::store(q.mu + lane, X::add(X::load(q.mu + lane), X::add(mu[0], mu[1])));
  }
}

// Rows of V or V' of one tile of keys, and the operand made of them.
template <class K>
struct ValueRows {
  const typename K::S* from;
  int64_t stride;
  Operand columns;
};

// out[d][64 r] += tile V, or out = tile V where `first`; as in forward, a partial tile of what is
// not finite takes a clean copy.
template <class K>
void add_weighted(const Attention& a, const ValueRows<K>& value, const typename K::T* tile,
                  int64_t rows, int64_t keys, bool partial, bool first, ForwardTangentScratch<K>& w,
                  typename K::T* out) {
  using X = typename K::X;
  using Dot = typename K::Dot;
  const int64_t width = a.value_dim, units = units_of<K>(keys);
  const bool dirty = partial && !all_finite<K>(value.from, value.stride, keys, width);
  Operand columns = value.columns;
  if (dirty) {
    clean_copy<K>(value.from, value.stride, keys, width, w.clean);
    columns = columns_operand<K>(w.clean, width, keys, width, w.clean_value);
  }
  const typename K::Unit* p = tile_vectors<K>(tile, keys, vectors_of<K>(rows), w.pairs);
  const int64_t lanes = taken_lanes<K>(rows);
  if (first)
    product_columns<X, Dot, Contiguous::kAlongM, Update::kStore>(columns, width, units, p, kRow,
                                                                 lanes, out, kRow);
  else
    product_columns<X, Dot, Contiguous::kAlongM, Update::kAddSum>(columns, width, units, p, kRow,
                                                                  lanes, out, kRow);
  if (dirty) add_nonfinite_lanes<K>(tile, w.bits, value.from, value.stride, keys, width, out);
}

// tangent_tile and add_weighted of a whole tile all of whose pairs are seen, without a bias, where
// a matrix unit does the products: by halves of its queries.
template <class K>
void matrix_tangent(const Attention& a, const AttentionTangent& t, const Operand& key_rows,
                    const Operand& key_tangent_rows, const Operand& value,
                    const Operand& value_tangent, const TangentBlock<K>& q,
                    ForwardTangentScratch<K>& w) {
  using X = typename K::X;
  using V = typename X::V;
  constexpr int kVectors = kHalfRow / K::kLanes;
  const bool with_scores = moves_scores(t);
  const uint64_t* const keep = a.dropout.seed ? w.keep : nullptr;
  const V scale = X::set((typename K::T)a.scale);
  typename K::Unit *const p_pairs = w.pairs, *const pairs = w.pairs + kTile / 2 * kHalfRow;
  for (int64_t lane = 0; lane < q.vectors * K::kLanes; lane += kHalfRow) {
    const int64_t vectors = min_of(kVectors, q.vectors - lane / K::kLanes);
    const auto product = [&](bool add, const Operand& from, int64_t rows, int64_t units,
                             const typename K::Unit* x, int64_t ldx, typename K::T* c,
                             int64_t ldc) {
      const auto run = add ? K::Dot::template product<Update::kAddSum>
                           : K::Dot::template product<Update::kStore>;
      run(from, rows, units, x, ldx, vectors, c, ldc);
    };
    const auto scores = [&](bool add, const Operand& rows, const typename K::Unit* x,
                            typename K::T* c) {
      product(add, rows, kTile, units_of<K>(a.head_dim), x + lane, kRow, c, kHalfRow);
    };
    scores(false, key_rows, q.query, w.s);
    if (t.query.data) scores(false, key_rows, q.query_tangent, w.st);
    if (t.key.data) scores(t.query.data, key_tangent_rows, q.query, w.st);

    V high[kVectors], low[kVectors], mu[2][kVectors];  // of even and of odd keys
    for (int i = 0; i < kVectors; i++) {
      high[i] = X::load(q.high + lane + i * K::kLanes);
      low[i] = X::load(q.low + lane + i * K::kLanes);
      mu[0][i] = mu[1][i] = X::zero();
    }
    // All vectors of the half: of those past the last query nothing is used.
    const auto weigh = [&]<bool kScores, bool kDropout>() __attribute__((always_inline)) {
      for (int64_t n = 0; n < kTile; n += 2)
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; i++) {
          const int64_t at = n * kHalfRow + i * K::kLanes, to = n / 2 * kHalfRow + i * K::kLanes;
          ask_sums<K, kVectors>(q.out + lane, n / 2 * kVectors + i);
          V p[2], x[2];
#pragma GCC unroll 2
          for (int k = 0; k < 2; k++)
            p[k] = X::sub(X::sub(X::mul(scale, X::load(w.s + at + k * kHalfRow)), high[i]), low[i]);
          exp_each<X, 2>(p);
#pragma GCC unroll 2
          for (int k = 0; k < 2; k++) {
            const typename X::M kept =
                X::mask(kDropout ? keep[n + k] >> (lane + i * K::kLanes) : ~0ull);
            if constexpr (kScores) {
              x[k] = X::mul(p[k], X::mul(scale, X::load(w.st + at + k * kHalfRow)));
              mu[k][i] = X::add(mu[k][i], x[k]);
              if constexpr (kDropout) x[k] = X::select(kept, x[k], X::zero());
            }
            if constexpr (kDropout) p[k] = X::select(kept, p[k], X::zero());
          }
          if constexpr (kScores) K::Dot::store_pairs(x[0], x[1], pairs + to);
          K::Dot::store_pairs(p[0], p[1], p_pairs + to);
        }
    };
    if (with_scores)
      keep ? weigh.template operator()<true, true>() : weigh.template operator()<true, false>();
    else
      keep ? weigh.template operator()<false, true>() : weigh.template operator()<false, false>();
    for (int64_t i = 0; i < vectors; i++) {
      typename K::T* const sum = q.mu + lane + i * K::kLanes;
      X::store(sum, X::add(X::load(sum), X::add(mu[0][i], mu[1][i])));
    }

    const auto weighted = [&](bool add, const Operand& columns, const typename K::Unit* x) {
      product(add, columns, height_of<K>(a.value_dim), units_of<K>(kTile), x, kHalfRow,
              q.out + lane, kRow);
    };
    if (with_scores) weighted(q.started, value, pairs);
    if (t.value.data) weighted(q.started || with_scores, value_tangent, p_pairs);
  }
}

// lse' = mu and O' = ((P o S') o M) V + Z V' - mu O of one block.
template <class K>
void finish_tangent(const Attention& a, const AttentionTangent& t, int64_t b, int64_t h,
                    TangentBlock<K>& q, ForwardTangentScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  const T kept = (T)a.dropout.keep_scale;
  const int64_t at = (b * a.heads + h) * a.queries + q.q0, width = a.value_dim * kRow;
  uint64_t empty = 0;
  for (int64_t r = 0; r < q.rows; r++) {
    empty |= (uint64_t)(q.high[r] == (T)INFINITY) << r;
    ((T*)t.lse)[at + r] = empty >> r & 1 ? 0 : q.mu[r];
  }
  if (!q.started) __builtin_memset(q.out, 0, (size_t)width * sizeof(T));
  if (empty && a.uniform_empty_rows && t.value.data) {
    // No score moves them, and P stays 1 / Lk.
    __builtin_memset(w.extra, 0, (size_t)width * sizeof(T));
    for (int64_t k0 = 0; k0 < a.keys; k0 += kTile) {
      const int64_t keys = min_of(kTile, a.keys - k0);
      const typename K::S* from = row_of<K>(t.value, b, kv_head(a, h), k0);
      uniform_tile<K>(HeadRows<K>{a, b, h}, q.q0, q.rows, k0, keys, empty, w.keep, w.s);
      const ValueRows<K> value{
          from, t.value.row,
          columns_operand<K>(from, t.value.row, keys, a.value_dim, w.value_tangent)};
      add_weighted<K>(a, value, w.s, q.rows, keys, false, k0 == 0, w, w.extra);
    }
    for (int64_t d = 0; d < a.value_dim; d++)
      for (int64_t i = 0; i < q.vectors; i++) {
        const int64_t lane = d * kRow + i * K::kLanes;
        X::store(q.out + lane, X::select(X::mask(empty >> (i * K::kLanes)), X::load(w.extra + lane),
                                         X::load(q.out + lane)));
      }
  }
  if (moves_scores(t)) {
    transpose_in<X>(row_of<K>(a.out, b, h, q.q0), a.out.row, q.rows, a.value_dim, w.extra);
    const typename X::V factor = X::set(1 / kept);
    for (int64_t i = 0; i < q.vectors; i++) {
      const int64_t lane = i * K::kLanes;
      const typename X::V mu = X::mul(factor, X::sub(X::zero(), X::load(q.mu + lane)));
      const typename X::M no = X::mask(empty >> lane);
      for (int64_t d = 0; d < a.value_dim; d++) {
        T* to = q.out + d * kRow + lane;
        const typename X::V out = X::load(w.extra + d * kRow + lane);
        X::store(to, X::select(no, X::load(to), X::fma(mu, out, X::load(to))));
      }
    }
  }
  for (int64_t r = 0; r < kRow; r++) q.high[r] = kept;
  write_rows<K>(q.out, q.high, q.rows, a.value_dim, row_of<K>(t.out, b, h, q.q0), t.out.row);
}

// O' and lse' of queries [q0, q0 + rows), up to kTangentGroup blocks. mu is known at the end only,
// so what is summed is P o S', not P o (S' - mu): both terms of the difference carry the rounding
// error of S' itself, no more.
template <class K>
void forward_tangent(const Attention& a, const AttentionTangent& t, int64_t b, int64_t h,
                     int64_t q0, int64_t rows, void* scratch) {
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  ForwardTangentScratch<K> w(a, arena);
  const int64_t kv = kv_head(a, h), count = ceil_div(rows, kTile);
  const bool with_scores = moves_scores(t);
  Range seen{a.keys, 0};
  for (int64_t i = 0; i < count; i++) {
    TangentBlock<K>& q = w.blocks[i];
    q.q0 = q0 + i * kTile;
    q.rows = min_of(kTile, q0 + rows - q.q0);
    q.vectors = vectors_of<K>(q.rows);
    q.started = false;
    const Range keys = seen_by_any(a, b, q.q0, q.q0 + q.rows - 1);
    if (keys.begin < keys.end) seen = {min_of(seen.begin, keys.begin), max_of(seen.end, keys.end)};
    for (int64_t r = 0; r < kRow; r++) q.mu[r] = 0;
    row_levels<K>(a, b, h, q.q0, q.rows, q.high, q.low);
    pack_query<K>(a, b, h, q.q0, q.rows, q.query);
    if (t.query.data) pack_query_tangent<K>(a, t, b, h, q.q0, q.rows, q.query_tangent);
  }
  if (!with_scores && !t.value.data) seen.end = 0;

  for (int64_t k0 = seen.begin / kTile * kTile; k0 < seen.end; k0 += kTile) {
    const int64_t keys = min_of(kTile, keys_in_tiles<K>(a, b) - k0);
    Operand key_rows, key_tangent_rows{};
    ValueRows<K> value{}, value_tangent{};
    bool packed = false;
    if constexpr (K::kCut) w.limbs.packed = false;
    for (int64_t i = 0; i < count; i++) {
      TangentBlock<K>& q = w.blocks[i];
      Visibility visible = visibility_of<K>(a, b, h, q.q0, q.rows, k0, keys, w.bits);
      if (visible == Visibility::kEmpty) continue;
      if (a.dropout.seed) dropout_tile<K>(a, b, h, q.q0, q.rows, k0, keys, w.keep);
      if constexpr (K::kCut) {
        if (!a.bias.data && !t.bias.data && in_limbs<K>(a, b, q.q0, k0, keys)) {
          const bool partial = visible == Visibility::kPartial;
          if (!limbs_tangent<K>(a, t, b, kv, k0, i, partial, w)) continue;
          visible = Visibility::kPartial;
        }
        w.limbs.pending.finish();
      }
      if (!packed) {
        const auto rows_at = [&](const Rows& from, typename K::Unit* to) {
          return rows_operand<K>(row_of<K>(from, b, kv, k0), from.row, keys, a.head_dim, to);
        };
        const auto columns_at = [&](const Rows& from, typename K::Unit* to) {
          const typename K::S* first = row_of<K>(from, b, kv, k0);
          return ValueRows<K>{first, from.row,
                              columns_operand<K>(first, from.row, keys, a.value_dim, to)};
        };
        key_rows = rows_at(a.key, w.key);
        if (t.key.data) key_tangent_rows = rows_at(t.key, w.key_tangent);
        if (with_scores) value = columns_at(a.value, w.value);
        if (t.value.data) value_tangent = columns_at(t.value, w.value_tangent);
        packed = true;
      }
      if constexpr (K::Dot::kRowBlock > 1) {
        if (visible == Visibility::kFull && keys == kTile && !a.bias.data && !t.bias.data &&
            !has_few_queries(a, K::kLimits)) {
          matrix_tangent<K>(a, t, key_rows, key_tangent_rows, value.columns, value_tangent.columns,
                            q, w);
          q.started = true;
          continue;
        }
      }
      visible = scores<K>(a, b, h, q.q0, q.rows, k0, keys, q.query, key_rows, visible, w.bits, w.s,
                          w.extra);
      if (with_scores)
        scores_tangent<K>(a, t, b, h, q.q0, q.rows, k0, keys, q.query, q.query_tangent, key_rows,
                          key_tangent_rows, w.st, w.extra);
      const bool partial = visible == Visibility::kPartial;
      tangent_tile<K>(keys, partial, w.bits, a.dropout.seed ? w.keep : nullptr, with_scores, w.s,
                      w.st, q);
      if (with_scores) add_weighted<K>(a, value, w.st, q.rows, keys, partial, !q.started, w, q.out);
      if (t.value.data)
        add_weighted<K>(a, value_tangent, w.s, q.rows, keys, partial, !q.started && !with_scores, w,
                        q.out);
      q.started = true;
    }
  }
  if constexpr (K::kCut) w.limbs.pending.finish();
  for (int64_t i = 0; i < count; i++) finish_tangent<K>(a, t, b, h, w.blocks[i], w);
}

}  // namespace
}  // namespace mha_ext::cpu

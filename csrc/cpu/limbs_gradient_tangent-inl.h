// A whole tile of the tangent of backward, without a bias, whose products are multiplied in limbs.
namespace mha_ext::cpu {
namespace {

// What the tangent of backward keeps in limbs, of what is added up where it is multiplied: the term
// with the direction of the weights or of the gradient comes first.
template <class K>
struct BackwardTangentLimbs<K, true> {
  struct Keys {
    LimbsPair<K> key, value, across;  // K and K', V and V', K and K' across
    uint64_t unusual;
    bool packed;
  };
  Keys* keys;                              // of each tile
  LimbsPair<K> query, grad_out;            // lanes: Q' and Q, dO' and dO
  LimbsPair<K> query_rows, grad_out_rows;  // Q and Q', dO and dO'
  LimbsPair<K> p, ds, ds_lanes;            // Z' and Z, dS' and dS
  float *query_sum, *value_sum, *key_sum;  // the products that are added to gradients
  PendingSum<K> pending;
  TakenPairs pairs;
  uint64_t* usual;           // pairs of the tile whose Z', dS' and dS limbs can hold
  uint64_t unusual_queries;  // of the block
  bool packed;

  BackwardTangentLimbs(const Attention& a, int64_t tiles, Arena& arena) : pairs(arena) {
    const bool taken = takes_limbs<K>(a, min_of(kTile, a.queries));
    const auto take = [&](int64_t along, int64_t across) {
      return LimbsPair<K>(along, across, taken, arena);
    };
    keys = arena.take<Keys>(taken ? tiles : 0);
    for (int64_t i = 0; i < (taken ? tiles : 0); i++) {
      const LimbsPair<K> key = take(a.head_dim, kTile), value = take(a.value_dim, kTile),
                         across = take(kTile, a.head_dim);
      if (arena.base) keys[i] = {key, value, across, 0, false};
    }
    query = take(a.head_dim, kRow);
    grad_out = take(a.value_dim, kRow);
    query_rows = take(kRow, a.head_dim);
    grad_out_rows = take(kRow, a.value_dim);
    p = take(kRow, kTile);
    ds = take(kRow, kTile);
    ds_lanes = take(kTile, kRow);
    query_sum = arena.take<float>(taken ? padded<K>(a.head_dim) * kRow : 0);
    value_sum = arena.take<float>(taken ? padded<K>(a.value_dim) * kTile : 0);
    key_sum = arena.take<float>(taken ? padded<K>(a.head_dim) * kTile : 0);
    usual = arena.take<uint64_t>(kTile);
  }
};

// Half a block of queries whose S, S', dP and dP' are there, [key][kHalfRow], the last two times
// kLimbsScale^2. Two keys at a time these become Z' and Z, dS' and dS in limbs, times kLimbsScale.
template <class K>
struct HalfGradientTangents {
  using X = typename K::X;
  struct Lanes {
    typename X::V high, low, mu, delta, delta_tangent;
  };
  int64_t lane;
  const BackwardTangentScratch<K>* w;
  const uint64_t* kept;
  typename X::V keep_scale;
  Lanes of[2];
  void (*run)(const HalfGradientTangents&, int64_t n);
  static int64_t pieces() { return kTile / 2; }
  void piece(int64_t i) const { run(*this, 2 * i); }
};

template <class K, bool kScores, bool kProducts, bool kMasked>
void two_gradient_tangents(const HalfGradientTangents<K>& half, int64_t n) {
  using X = typename K::X;
  using V = typename X::V;
  constexpr int kVectors = kHalfRow / X::kLanes;
  const BackwardTangentScratch<K>& w = *half.w;
  const BackwardTangentLimbs<K>& t = w.limbs;
  const V scale = X::set(kLimbsScale), back = X::set(1 / kLimbsScale);
  V p[kVectors][2], pt[kVectors][2], ds[kVectors][2], dst[kVectors][2];
  uint64_t usual[2] = {};
#pragma GCC unroll 2
  for (int i = 0; i < kVectors; i++) {
    const typename HalfGradientTangents<K>::Lanes& of = half.of[i];
    const auto load = [&](const float* tile, int k) __attribute__((always_inline)) {
      return X::load(tile + half.lane * kTile + (n + k) * kHalfRow + i * X::kLanes);
    };
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) p[i][k] = X::sub(X::sub(load(w.p, k), of.high), of.low);
    exp_each<X, 2>(p[i]);
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
      const int64_t at = half.lane + i * X::kLanes;
      const auto those_of = [&](const uint64_t* bits, V v) __attribute__((always_inline)) {
        if constexpr (!kMasked) return v;
        return X::select(X::mask(bits[n + k] >> at), v, X::zero());
      };
      const auto gradient = [&](const float* product, V shift) __attribute__((always_inline)) {
        V grad = X::mul(back, load(product, k));
        if constexpr (kMasked) grad = those_of(half.kept, X::mul(half.keep_scale, grad));
        return X::sub(grad, shift);
      };
      typename X::M in{};
      if constexpr (kScores) {
        pt[i][k] = X::mul(p[i][k], X::sub(load(w.pt, k), of.mu));
        const V grad = gradient(w.ds, of.delta);
        ds[i][k] = X::mul(p[i][k], grad);
        dst[i][k] = X::mul(pt[i][k], grad);
      } else {
        dst[i][k] = X::zero();
      }
      const V grad =
          kProducts ? gradient(w.dst, of.delta_tangent) : X::sub(X::zero(), of.delta_tangent);
      dst[i][k] = those_of(t.pairs.taken, X::fma(p[i][k], grad, dst[i][k]));
      in = usual_lanes<X>(dst[i][k], kUnusualGradient * kLimbsScale);
      uint64_t all_in = X::bits(in);
      if constexpr (kScores) {
        ds[i][k] = those_of(t.pairs.taken, ds[i][k]);
        pt[i][k] = those_of(t.pairs.taken, pt[i][k]);
        all_in &= X::bits(usual_lanes<X>(ds[i][k], kUnusualGradient * kLimbsScale)) &
                  X::bits(usual_lanes<X>(pt[i][k], kUnusualGradient));
        pt[i][k] = those_of(half.kept, X::mul(scale, pt[i][k]));
      }
      p[i][k] = those_of(half.kept, those_of(t.pairs.taken, X::mul(scale, p[i][k])));
      usual[k] |= all_in << (i * X::kLanes);
    }
  }
  for (int k = 0; k < 2; k++)
    ((uint32_t*)t.usual)[2 * (n + k) + half.lane / kHalfRow] = (uint32_t)usual[k];
  if constexpr (kScores) {
    store_gradients<K>(pt, dst, n, half.lane, t.p.of[0], t.ds.of[0], t.ds_lanes.of[0]);
    store_gradients<K>(p, ds, n, half.lane, t.p.of[1], t.ds.of[1], t.ds_lanes.of[1]);
  } else {
    store_gradients<K>(p, dst, n, half.lane, t.p.of[1], t.ds.of[0], t.ds_lanes.of[0]);
  }
}
template <class K>
HalfGradientTangents<K> half_gradient_tangents(const Attention& a, int64_t lane, bool with_scores,
                                               bool with_products,
                                               const BackwardTangentScratch<K>& w) {
  using X = typename K::X;
  HalfGradientTangents<K> half{lane,
                               &w,
                               a.dropout.seed ? w.keep : w.limbs.pairs.all,
                               X::set((float)a.dropout.keep_scale),
                               {},
                               nullptr};
  const typename X::V scale = X::set(kLimbsScale);
  for (int i = 0; i < 2; i++) {
    const int64_t at = lane + i * X::kLanes;
    half.of[i] = {X::load(w.high + at), X::load(w.low + at), X::load(w.mu + at),
                  X::mul(scale, X::load(w.delta + at)),
                  X::mul(scale, X::load(w.delta_tangent + at))};
  }
  const auto choose = [&]<bool kScores, bool kProducts>() {
    half.run = w.limbs.pairs.masked || a.dropout.seed
                   ? two_gradient_tangents<K, kScores, kProducts, true>
                   : two_gradient_tangents<K, kScores, kProducts, false>;
  };
  if (with_scores)
    with_products ? choose.template operator()<true, true>()
                  : choose.template operator()<true, false>();
  else
    with_products ? choose.template operator()<false, true>()
                  : choose.template operator()<false, false>();
  return half;
}

// Cuts what belongs to the tile of keys, and to the block of queries.
template <class K>
void pack_gradient_tangents(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                            const TangentPlace& place, BackwardTangentScratch<K>& w) {
  BackwardTangentLimbs<K>& l = w.limbs;
  typename BackwardTangentLimbs<K>::Keys& keys = l.keys[place.at / kTile];
  const int64_t b = place.batch, h = place.head, d = a.head_dim, dv = a.value_dim;
  if (!keys.packed) {
    const int64_t kv = kv_head(a, h);
    const auto cut = [&](const Rows& from, int64_t width, float factor, Limbs& to) {
      if (!from.data) return;
      rows_in_limbs<K>(row_of<K>(from, b, kv, place.k0), from.row, kTile, width, factor, to);
    };
    const auto across = [&](const Rows& from, Limbs& to) {
      if (!from.data) return;
      turned_in_limbs<K, true>(row_of<K>(from, b, kv, place.k0), from.row, kTile, d, kLimbsScale,
                               to);
    };
    cut(a.key, d, 1, keys.key.of[0]);
    cut(t.key, d, 1, keys.key.of[1]);
    cut(a.value, dv, kLimbsScale, keys.value.of[0]);
    cut(t.value, dv, kLimbsScale, keys.value.of[1]);
    across(a.key, keys.across.of[0]);
    across(t.key, keys.across.of[1]);
    const auto find = [&](const Rows& from, int64_t width) {
      return unusual_rows<K>(from, b, kv, place.k0, kTile, width);
    };
    if (keys.key.unusual() || keys.value.unusual())
      keys.unusual = find(a.key, d) | find(t.key, d) | find(a.value, dv) | find(t.value, dv);
    keys.packed = true;
  }
  if (l.packed) return;
  const auto lanes = [&](const Rows& from, float* packed, int64_t width, float factor, Limbs& to) {
    if (!from.data) return;
    fill_lanes<K>(place.rows, width, 0, packed);
    lanes_in_limbs<K>(packed, kRow, width, round_up(place.rows, kHalfRow), factor, to);
  };
  const auto rows = [&](const Rows& from, int64_t width, Limbs& to) {
    if (!from.data) return;
    lanes_in_limbs<K>(row_of<K>(from, b, h, place.q0), from.row, place.rows, width, kLimbsScale,
                      to);
  };
  fill_lanes<K>(place.rows, 1, (float)INFINITY, w.high);
  fill_lanes<K>(place.rows, 1, 0, w.low);
  lanes(t.query, w.query_tangent, d, 1, l.query.of[0]);
  lanes(a.query, w.query, d, 1, l.query.of[1]);
  lanes(t.grad_out, w.grad_out_tangent, dv, kLimbsScale, l.grad_out.of[0]);
  lanes(g.grad_out, w.grad_out, dv, kLimbsScale, l.grad_out.of[1]);
  LimbsPair<K>* const over_queries[] = {&l.query_rows, &l.grad_out_rows, &l.p, &l.ds};
  for (LimbsPair<K>* pair : over_queries) pair->set_along(place.rows);
  rows(a.query, d, l.query_rows.of[0]);
  rows(t.query, d, l.query_rows.of[1]);
  rows(g.grad_out, dv, l.grad_out_rows.of[0]);
  rows(t.grad_out, dv, l.grad_out_rows.of[1]);
  l.unusual_queries = 0;
  if (l.query.unusual() || l.query_rows.unusual() || l.grad_out.unusual()) {
    const auto find = [&](const Rows& from, int64_t width) {
      return unusual_rows<K>(from, b, h, place.q0, place.rows, width);
    };
    l.unusual_queries =
        find(a.query, d) | find(t.query, d) | find(g.grad_out, dv) | find(t.grad_out, dv);
    l.unusual_queries |= unusual_lanes(w.query, place.rows, d);  // with the scale
    if (t.query.data) l.unusual_queries |= unusual_lanes(w.query_tangent, place.rows, d);
  }
  l.packed = true;
}

// The tangents of all gradients of one tile, of the pairs that are seen, as limbs_gradient computes
// the gradients. The last sum is left to wait. True where pairs are left to multiply-adds, w.bits.
template <class K>
bool limbs_gradient_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                            const TangentPlace& place, bool partial, BackwardTangentScratch<K>& w) {
  BackwardTangentLimbs<K>& l = w.limbs;
  pack_gradient_tangents<K>(a, g, t, place, w);
  const typename BackwardTangentLimbs<K>::Keys& keys = l.keys[place.at / kTile];
  l.pairs.choose(partial ? w.bits : nullptr, place.rows, l.unusual_queries, keys.unusual);
  const int64_t d = a.head_dim, dv = a.value_dim, ld = padded<K>(d), ldv = padded<K>(dv);
  const bool with_scores = moves_scores(t), with_products = t.grad_out.data || t.value.data;
  if (a.dropout.seed)
    dropout_tile<K>(a, place.batch, place.head, place.q0, place.rows, place.k0, kTile, w.keep);

  struct Product {
    bool wanted;
    Limbs rows, lanes;
    float* to;
  };
  const Product all[4] = {{true, keys.key.of[0], l.query.of[1], w.p},
                          {with_scores, keys.key.both(t.query.data, t.key.data),
                           l.query.both(t.query.data, t.key.data), w.pt},
                          {with_scores, keys.value.of[0], l.grad_out.of[1], w.ds},
                          {with_products, keys.value.both(t.grad_out.data, t.value.data),
                           l.grad_out.both(t.grad_out.data, t.value.data), w.dst}};
  int64_t steps = 0;
  for (const Product& one : all) steps += one.wanted ? K::Dot::steps(one.rows, kTile, 2) : 0;
  const auto products = [&](int64_t lane, auto& beside) __attribute__((always_inline)) {
    for (const Product& one : all)
      if (one.wanted)
        K::Dot::product_beside(one.rows, kTile, one.lanes, lane, 2, one.to + lane * kTile, kHalfRow,
                               beside);
  };
  PendingSum<K> before = l.pending;  // in registers
  before.beside(steps);
  products(0, before);
  before.finish();

  constexpr float kTwice = 1 / kLimbsScale / kLimbsScale;
  const bool query = g.grad_query.data, both = place.rows > kHalfRow;
  const Limbs across = keys.across.both(true, t.key.data);
  const Limbs ds_lanes = l.ds_lanes.both(true, t.key.data);
  const auto first_query = [&](auto& beside) __attribute__((always_inline)) {
    if (query) K::Dot::product_beside(across, d, ds_lanes, 0, 2, l.query_sum, kRow, beside);
  };
  using Half = PiecesBeside<HalfGradientTangents<K>>;
  const auto gradients = [&](int64_t lane, int64_t beside) {
    return Half(half_gradient_tangents<K>(a, lane, with_scores, with_products, w), beside);
  };
  Half half = gradients(0, steps);
  if (both) {
    products(kHalfRow, half);
    half.finish();
    half = gradients(kHalfRow, K::Dot::steps(across, d, 2));
    first_query(half);
  }
  half.finish();
  if (!both)
    for (int64_t n = 0; n < kTile; n++) l.usual[n] |= ~first_bits(kHalfRow);
  if (l.pairs.leave_out(l.usual)) {  // once more, without these
    gradients(0, 1).finish();
    if (both) gradients(kHalfRow, 1).finish();
    NothingBeside nothing;
    if (both) first_query(nothing);
  }

  PendingSum<K> pending;
  const auto multiply = [&](const Limbs& x, int64_t rows, const Limbs& y, int64_t lane,
                            const PendingSum<K>& next) {
    product_beside_sum<K>(x, rows, y, lane, next.vectors, (float*)next.sum, next.sum_row, pending);
    pending = next;
  };
  if (query) {
    const auto sum = [&](int64_t lane) {
      return PendingSum<K>{l.query_sum + lane, w.grad_query + lane, d, 2, kRow, kRow, kTwice};
    };
    if (both) pending = sum(0);
    const int64_t lane = both ? kHalfRow : 0;
    multiply(across, d, ds_lanes, lane, sum(lane));
  }
  if (g.grad_value.data && (with_scores || t.grad_out.data))
    multiply(
        l.p.both(with_scores, t.grad_out.data), kTile,
        l.grad_out_rows.both(with_scores, t.grad_out.data), 0,
        {l.value_sum, w.grad_value + place.at * ldv, kTile, ldv / K::kLanes, ldv, ldv, kTwice});
  if (g.grad_key.data)
    multiply(l.ds.both(true, t.query.data), kTile, l.query_rows.both(true, t.query.data), 0,
             {l.key_sum, w.grad_key + place.at * ld, kTile, ld / K::kLanes, ld, ld, kTwice});
  l.pending = pending;
  return l.pairs.left(w.bits);
}

}  // namespace
}  // namespace mha_ext::cpu

// A whole tile of backward whose products are multiplied in limbs.
namespace mha_ext::cpu {
namespace {

// What backward keeps in limbs. As the products of scores and of dP read them: K and V of each
// tile, Q and dO of the block; as those of gradients do: K across, P and dS, Q and dO by rows.
// Those that may be small carry kLimbsScale, so that no bit of theirs is lost.
template <class K>
struct BackwardLimbs<K, true> {
  struct Keys {
    Limbs key, value, across;
    bool packed;
  };
  Keys* keys;  // of each tile
  Limbs query, grad_out, query_rows, grad_out_rows, p, ds, ds_lanes;
  float *query_sum, *value_sum, *key_sum;  // the products that are added to gradients
  float *p_tile, *ds_tile;                 // P and dS as they are, where somebody looks at them
  bool packed, unusual;                    // of the block

  BackwardLimbs() = default;
  BackwardLimbs(const Attention& a, int64_t tiles, bool all_once, Arena& arena) {
    const bool taken = takes_limbs<K>(a, min_of(kTile, a.queries)) && !all_once;
    const auto take = [&](int64_t along, int64_t across) {
      Limbs t;
      t.data = arena.take<uint32_t>(taken ? limbs_size<K>(along, across) : 0);
      return t;
    };
    keys = arena.take<Keys>(taken ? tiles : 0);
    for (int64_t i = 0; i < (taken ? tiles : 0); i++) {
      const Limbs key = take(a.head_dim, kTile), value = take(a.value_dim, kTile),
                  across = take(kTile, a.head_dim);
      if (arena.base) keys[i] = {key, value, across, false};
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
    p_tile = arena.take<float>(taken ? kTile * kRow : 0);
    ds_tile = arena.take<float>(taken ? kTile * kRow : 0);
  }
};

// Cuts P and dS of two keys of half a block of queries: as rows of keys, and dS as lanes too.
template <class K>
[[gnu::always_inline]] inline void store_gradients(const typename K::X::V (&kept)[2][2],
                                                   const typename K::X::V (&grad)[2][2], int64_t n,
                                                   int64_t lane, const Limbs& p_rows,
                                                   const Limbs& ds_rows, const Limbs& ds_lanes) {
  using V = typename K::X::V;
  const int64_t step = lane / kLimbsStep, block = n / K::kLanes, row = n % K::kLanes;
  V ds[2][2][K::kLimbs];  // of each vector, of each key
#pragma GCC unroll 2
  for (int k = 0; k < 2; k++) {
    V p[2][K::kLimbs];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      K::Dot::template cut<false>(kept[i][k], p[i]);
      K::Dot::template cut<false>(grad[i][k], ds[i][k]);
    }
    K::Dot::store_pair(p[0], p[1], p_rows.plane, p_rows.at(step, block) + (row + k) * p_rows.row);
    K::Dot::store_pair(ds[0][k], ds[1][k], ds_rows.plane,
                       ds_rows.at(step, block) + (row + k) * ds_rows.row);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    K::Dot::store_pair(
        ds[i][0], ds[i][1], ds_lanes.plane,
        ds_lanes.at(n / kLimbsStep, lane / K::kLanes + i) + n % kLimbsStep / 2 * ds_lanes.row);
}

// Whether P and dS of a tile are kept as they are, too: dS for who adds it up, or both because some
// may not be usual; these are 0 in limbs.
enum class Kept { kNo, kUsual, kAny };

// Half a block of queries whose S and dP (times kLimbsScale^2), [key][kHalfRow], are there. Two
// keys at a time these become P and dS (times kLimbsScale) in limbs.
template <class K>
struct HalfGradients {
  using X = typename K::X;
  int64_t lane;
  GradScratch<K>* w;
  const BackwardLimbs<K>* t;
  const float *s, *dp;
  GradLanes<X> of[2];
  void (*run)(const HalfGradients&, int64_t n);
  static int64_t pieces() { return kTile / 2; }
  void piece(int64_t i) const { run(*this, 2 * i); }
};

// kAny: ds_tile has the terms of dP that dP lacks, and gets dS.
template <class K, bool kDropout, bool kPartial, Kept kKept, bool kBias>
void two_gradients(const HalfGradients<K>& half, int64_t n) {
  using X = typename K::X;
  using V = typename X::V;
  constexpr int kVectors = kHalfRow / X::kLanes;
  GradScratch<K>& w = *half.w;
  if (kBias && n % BiasStrips<K>::kStrip == 0) w.bias.turn(half.lane, n);
  const auto bias = w.bias.view();
  const PairsAhead next = w.next;
  next.mask.ask(half.lane + n / 2);
  const BackwardLimbs<K>& t = *half.t;
  const V scale = X::set(kLimbsScale), back = X::set(1 / kLimbsScale);
  V all_kept[kVectors][2], all_grad[kVectors][2];
#pragma GCC unroll 2
  for (int i = 0; i < kVectors; i++) {
    const int64_t at = half.lane + i * X::kLanes;
    V(&kept)[2] = all_kept[i];
    V(&grad)[2] = all_grad[i];
    uint64_t keep[2];
    const auto score = [&](int k) __attribute__((always_inline)) {
      const V product = X::load(half.s + (n + k) * kHalfRow + i * X::kLanes);
      return kBias ? add_to_score<X>(product, bias.load(n + k, i * X::kLanes)) : product;
    };
    if (kBias) next.bias.ask(half.lane + n / 2, i * next.apart);
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
      kept[k] = score(k);
      grad[k] = X::mul(back, X::load(half.dp + (n + k) * kHalfRow + i * X::kLanes));
      if constexpr (kKept == Kept::kAny)
        grad[k] = X::fma(scale, X::load(t.ds_tile + (n + k) * kRow + at), grad[k]);
      keep[k] = kDropout ? w.keep[n + k] >> at : 0;
    }
    gradient_vectors<X, kDropout, 2>(half.of[i], keep, kept, grad);
    if constexpr (kPartial) {
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) {
        const typename X::M visible = X::mask(w.bits[n + k] >> at);
        grad[k] = X::select(visible, grad[k], X::zero());
        kept[k] = X::select(visible, kept[k], X::zero());
      }
    }
    if constexpr (kKept == Kept::kUsual)
      for (int k = 0; k < 2; k++) X::store(t.ds_tile + (n + k) * kRow + at, X::mul(back, grad[k]));
    if constexpr (kKept == Kept::kAny) {
      // Without the scale, which may have made it infinite.
      for (int k = 0; k < 2; k++) {
        V whole[1] = {score(k)};
        V exact[1] = {X::fma(X::mul(back, back),
                             X::load(half.dp + (n + k) * kHalfRow + i * X::kLanes),
                             X::load(t.ds_tile + (n + k) * kRow + at))};
        const GradLanes<X> as_it_is{half.of[i].high, half.of[i].low, X::load(w.shift + at),
                                    half.of[i].keep_scale};
        const uint64_t one[1] = {keep[k]};
        gradient_vectors<X, kDropout, 1>(as_it_is, one, whole, exact);
        if constexpr (kPartial)
          exact[0] = X::select(X::mask(w.bits[n + k] >> at), exact[0], X::zero());
        const typename X::M in = usual_lanes<X>(exact[0], kUnusualGradient);
        X::store(t.p_tile + (n + k) * kRow + at, kept[k]);
        const V there = X::mul(back, grad[k]);
        const typename X::M same = usual_lanes<X>(there, kUnusualGradient);
        X::store(t.ds_tile + (n + k) * kRow + at, X::select(same, there, exact[0]));
        grad[k] = X::select(same, grad[k], X::mul(scale, exact[0]));
        grad[k] = X::select(in, grad[k], X::zero());
      }
    }
  }
  store_gradients<K>(all_kept, all_grad, n, half.lane, t.p, t.ds, t.ds_lanes);
}
template <class K>
HalfGradients<K> half_gradients(const Attention& a, int64_t lane, bool partial, Kept kept,
                                GradScratch<K>& w, const BackwardLimbs<K>& t) {
  using X = typename K::X;
  HalfGradients<K> half{lane, &w, &t, w.p + lane * kTile, w.ds + lane * kTile, {}, nullptr};
  for (int i = 0; i < 2; i++) {
    const int64_t at = lane + i * X::kLanes;
    half.of[i] = {X::load(w.high + at), X::load(w.low + at),
                  X::mul(X::set(kLimbsScale), X::load(w.shift + at)),
                  X::set((float)a.dropout.keep_scale)};
  }
  const auto choose = [&]<bool kDropout, bool kPartial, bool kBias>() {
    half.run = kept == Kept::kAny     ? two_gradients<K, kDropout, kPartial, Kept::kAny, kBias>
               : kept == Kept::kUsual ? two_gradients<K, kDropout, kPartial, Kept::kUsual, kBias>
                                      : two_gradients<K, kDropout, kPartial, Kept::kNo, kBias>;
  };
  const auto choose_bias = [&]<bool kDropout, bool kPartial>() {
    w.bias ? choose.template operator()<kDropout, kPartial, true>()
           : choose.template operator()<kDropout, kPartial, false>();
  };
  if (a.dropout.seed)
    partial ? choose_bias.template operator()<true, true>()
            : choose_bias.template operator()<true, false>();
  else
    partial ? choose_bias.template operator()<false, true>()
            : choose_bias.template operator()<false, false>();
  return half;
}

// The terms of grad_query and grad_key whose dS is not usual, but for those of what is not usual
// in K and Q.
template <class K>
void add_unusual_gradients(const Attention& a, const AttentionGrad& g, const TilePlace<K>& tile,
                           const float* ds, BackwardScratch<K>& w) {
  float* const grad_key = w.grad_key + tile.at * padded<K>(a.head_dim);
  for (int64_t n = 0; n < kTile; n++)
    for (int64_t r = 0; r < tile.rows; r++) {
      const float x = ds[n * kRow + r];
      if (usual(x, kUnusualGradient)) continue;
      for (int64_t d = 0; d < a.head_dim; d++) {
        const float key = widen(tile.key[n * a.key.row + d]);
        const float query = widen(tile.query[r * a.query.row + d]);
        if (g.grad_query.data && usual(key)) tile.grad_query[d * kRow + r] += x * key;
        if (g.grad_key.data && usual(query)) grad_key[n * padded<K>(a.head_dim) + d] += x * query;
      }
    }
}

// Cuts what belongs to the block of queries, and to the tile of keys.
template <class K>
void pack_limbs(const Attention& a, const AttentionGrad& g, const TilePlace<K>& tile,
                const typename K::S* value, BackwardScratch<K>& w,
                typename BackwardLimbs<K>::Keys& keys) {
  BackwardLimbs<K>& t = w.limbs;
  if (!keys.packed) {
    rows_in_limbs<K>(tile.key, a.key.row, kTile, a.head_dim, 1, keys.key);
    rows_in_limbs<K>(value, a.value.row, kTile, a.value_dim, kLimbsScale, keys.value);
    turned_in_limbs<K, true>(tile.key, a.key.row, kTile, a.head_dim, kLimbsScale, keys.across);
    keys.packed = true;
  }
  if (t.packed) return;
  t.packed = true;
  const int64_t lanes = round_up(tile.rows, kHalfRow);
  fill_lanes<K>(tile.rows, a.head_dim, 0, w.query);
  fill_lanes<K>(tile.rows, a.value_dim, 0, w.grad_out);
  fill_lanes<K>(tile.rows, 1, (float)INFINITY, w.high);
  fill_lanes<K>(tile.rows, 1, 0, w.low);
  fill_lanes<K>(tile.rows, 1, 0, w.shift);
  lanes_in_limbs<K>(w.query, kRow, a.head_dim, lanes, 1, t.query);
  lanes_in_limbs<K>(w.grad_out, kRow, a.value_dim, lanes, kLimbsScale, t.grad_out);
  lanes_in_limbs<K>(tile.query, a.query.row, tile.rows, a.head_dim, kLimbsScale, t.query_rows);
  lanes_in_limbs<K>(tile.grad_out, g.grad_out.row, tile.rows, a.value_dim, kLimbsScale,
                    t.grad_out_rows);
  lay_out<K>(tile.rows, t.p);
  lay_out<K>(tile.rows, t.ds);
  lay_out<K>(kTile, t.ds_lanes);
  t.unusual = t.query.unusual || t.query_rows.unusual || t.grad_out.unusual;
  for (int64_t r = 0; r < tile.rows; r++) t.unusual |= !usual(w.shift[r]);
}

// All gradients of one tile, of whose pairs some may be hidden. `wanted`: dS as it is comes to
// limbs.ds_tile. P and dS of a half, and the sums of gradients, are computed beside the products
// that follow.
template <class K>
void limbs_gradient(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h, int64_t q0,
                    int64_t k0, const typename K::S* value, const TilePlace<K>& tile,
                    Visibility visible, bool wanted, BackwardScratch<K>& w) {
  using Half = PiecesBeside<HalfGradients<K>>;
  BackwardLimbs<K>& t = w.limbs;
  typename BackwardLimbs<K>::Keys& keys = t.keys[tile.at / kTile];
  pack_limbs<K>(a, g, tile, value, w, keys);
  const bool unusual = t.unusual || keys.key.unusual || keys.value.unusual;
  const Kept kept = unusual ? Kept::kAny : wanted ? Kept::kUsual : Kept::kNo;
  const int64_t d = a.head_dim, dv = a.value_dim, ld = padded<K>(d), ldv = padded<K>(dv);
  if (a.dropout.seed) dropout_tile<K>(a, b, h, q0, tile.rows, k0, kTile, w.keep);
  if (a.bias.data) {
    w.bias = BiasStrips<K>(a, b, h, q0, tile.rows, k0, w.extra);
    if (w.bias_hides || unusual) visible = w.bias.hide(visible, w.bits);
  }
  const auto products = [&](int64_t lane, auto& beside) __attribute__((always_inline)) {
    K::Dot::product_beside(keys.key, kTile, t.query, lane, 2, w.p + lane * kTile, kHalfRow, beside);
    K::Dot::product_beside(keys.value, kTile, t.grad_out, lane, 2, w.ds + lane * kTile, kHalfRow,
                           beside);
  };
  const auto gradients = [&](int64_t lane, int64_t steps) {
    const int64_t queries = min_of(kHalfRow, tile.rows - lane);
    float* const s = w.p + lane * kTile;
    if (keys.key.unusual || t.query.unusual)
      add_unusual_scores<K, kHalfRow>(tile.key, a.key.row, d, w.query + lane, queries, s);
    if (unusual) {
      for (int64_t n = 0; n < kTile; n++)
        for (int64_t r = lane; r < lane + kHalfRow; r++) t.ds_tile[n * kRow + r] = 0;
      add_unusual_scores<K, kRow>(value, a.value.row, dv, w.grad_out + lane, queries,
                                  t.ds_tile + lane);
    }
    return Half(half_gradients<K>(a, lane, visible == Visibility::kPartial, kept, w, t), steps);
  };
  // Once more, where its bias has hidden what nobody knew of.
  const auto finish = [&](Half& half) {
    half.finish();
    if (!w.bias || !w.bias.hides()) return;
    w.bias_hides = true;
    visible = w.bias.hide(visible, w.bits);
    half = gradients(half.of.lane, 1);
    half.finish();
  };
  NothingBeside nothing;
  products(0, nothing);
  Half half = gradients(0, K::Dot::steps(keys.key, kTile, 2) + K::Dot::steps(keys.value, kTile, 2));
  const bool both = tile.rows > kHalfRow;
  if (both) {
    if constexpr (K::kLimbs == 3)
      products(kHalfRow, half);
    else  // for P and dS beside the unit it takes too little time
      products(kHalfRow, nothing);
    finish(half);
    half = gradients(kHalfRow, K::Dot::steps(keys.across, d, 2));
  }
  constexpr float kTwice = 1 / kLimbsScale / kLimbsScale;
  const int64_t vectors = vectors_of<K>(tile.rows);
  const bool fresh = tile.query_update == Update::kStore;
  PendingSum<K> pending;
  if (both && g.grad_query.data) {  // of the first half, beside the other's P and dS
    K::Dot::product_beside(keys.across, d, t.ds_lanes, 0, 2, t.query_sum, kRow, half);
    pending = {t.query_sum, tile.grad_query, d, 2, kRow, kRow, kTwice, fresh};
  }
  finish(half);
  const auto multiply = [&](const Limbs& x, int64_t rows, const Limbs& y, int64_t lane,
                            int64_t count, const PendingSum<K>& next) {
    product_beside_sum<K>(x, rows, y, lane, count, (float*)next.sum, next.sum_row, pending);
    pending = next;
  };
  if (g.grad_query.data) {
    const int64_t lane = both ? kHalfRow : 0, count = vectors - lane / K::kLanes;
    multiply(keys.across, d, t.ds_lanes, lane, count,
             {t.query_sum + lane, tile.grad_query + lane, d, count, kRow, kRow, kTwice, fresh});
  }
  float* const grad_value = w.grad_value + tile.at * ldv;
  if (g.grad_value.data)
    multiply(
        t.p, kTile, t.grad_out_rows, 0, ldv / K::kLanes,
        {t.value_sum, grad_value, kTile, ldv / K::kLanes, ldv, ldv, 1 / kLimbsScale, tile.fresh});
  float* const grad_key = w.grad_key + tile.at * ld;
  if (g.grad_key.data)
    multiply(t.ds, kTile, t.query_rows, 0, ld / K::kLanes,
             {t.key_sum, grad_key, kTile, ld / K::kLanes, ld, ld, kTwice, tile.fresh});
  pending.finish();
  if (!unusual) return;
  uint64_t all[kTile];
  for (int64_t n = 0; n < kTile; n++) all[n] = first_bits(tile.rows);
  const uint64_t* const bits = visible == Visibility::kPartial ? w.bits : all;
  if (g.grad_query.data)
    add_nonfinite_lanes<K, TakenIfUsual>(t.ds_tile, bits, tile.key, a.key.row, kTile, d,
                                         tile.grad_query);
  if (g.grad_value.data)
    add_nonfinite_rows<K, TakenIfUsual>(t.p_tile, bits, tile.grad_out, g.grad_out.row, tile.rows,
                                        kTile, dv, grad_value, ldv);
  if (g.grad_key.data)
    add_nonfinite_rows<K, TakenIfUsual>(t.ds_tile, bits, tile.query, a.query.row, tile.rows, kTile,
                                        d, grad_key, ld);
  add_unusual_gradients<K>(a, g, tile, t.ds_tile, w);
}

}  // namespace
}  // namespace mha_ext::cpu

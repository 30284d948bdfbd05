// The tile of backward: P and dS from S and dP.
//   P = exp(S - lse), Z = P o M, dP = (dO V^T) o M, dS = P o (dP - delta)
namespace mha_ext::cpu {
namespace {

// Blocks of queries that backward takes together, so that a matrix unit reads and writes the sums
// of keys once for all of them; and the units of their pairs, of a key.
template <class K>
constexpr int64_t kTogether = K::Dot::kRowBlock > 1 ? 2 : 1;
template <class K>
constexpr int64_t kPairRow = kTogether<K> * kRow / 2;

// The operands of one block of queries and of one tile, and the tile's P and dS.
template <class K>
struct GradScratch {
  using T = typename K::T;
  using Unit = typename K::Unit;
  Unit *query, *grad_out;                   // lanes, for the scores
  LaneRows<K> query_lanes, grad_out_lanes;  // these, or the rows in place of them
  T *p, *ds, *extra;
  T *high, *low, *shift;  // of each query: exp subtracts lse = high + low, dP its delta
  uint64_t *bits, *keep, *head_bits;
  Range bands_storage[kMostBands];
  const Range* bands = nullptr;  // of the tile, if it has any
  Ahead ahead{longest_asked<K>()};
  // Whether the tile has all keys of its queries, and delta = sum P o dP - dL comes out of it; then
  // `shift` is dL before it.
  bool whole = false;
  // Where there is room for them, P and dS of a whole tile in pairs come here, in place of p and
  // ds: of queries, and dS of keys too. Then `paired` says so.
  Unit *p_queries = nullptr, *ds_queries = nullptr, *ds_keys = nullptr;
  bool paired = false;
  bool keeps_ds = false;    // in ds too, if a vector unit does the products
  const T* sums = nullptr;  // [head_dim][64 queries] that dS of the tile will be multiplied into
  // What a matrix unit's tiles add while they read S, and the mask and bias that they ask for.
  BiasStrips<K> bias;
  bool bias_hides = false;  // whether it did
  PairsAhead next;

  GradScratch() = default;
  GradScratch(const Attention& a, Arena& arena) {
    query = arena.take<Unit>(units_of<K>(a.head_dim) * kRow);
    grad_out = arena.take<Unit>(units_of<K>(a.value_dim) * kRow);
    query_lanes = query;
    grad_out_lanes = grad_out;
    p = arena.take<T>(kTile * kRow);
    ds = arena.take<T>(kTile * kRow);
    extra = arena.take<T>(kTile * kRow);
    next = PairsAhead(p);
    high = arena.take<T>(kRow);
    low = arena.take<T>(kRow);
    shift = arena.take<T>(kRow);
    bits = arena.take<uint64_t>(kTile);
    keep = arena.take<uint64_t>(kTile);
    head_bits = arena.take<uint64_t>(kTile);
  }
};

// delta = rowsum(dO o O) - dL: a vector of partial sums a row, whose lanes are then added for
// several rows at once.
template <class K>
void delta(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h, int64_t block) {
  using T = typename K::T;
  using X = typename K::X;
  constexpr int kLanes = K::kLanes;
  const int64_t q0 = block * kTile, rows = min_of(kTile, a.queries - q0);
  const int64_t at = (b * a.heads + h) * a.queries + q0;
  for (int64_t r = 0; r < rows; r += kLanes) {
    const int64_t height = min_of(kLanes, rows - r);
    typename X::V sums[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) sums[i] = X::zero();
    for (int i = 0; i < height; i++) {
      const typename K::S* out = row_of<K>(a.out, b, h, q0 + r + i);
      const typename K::S* grad = row_of<K>(g.grad_out, b, h, q0 + r + i);
      typename X::V sum = X::zero();
      int64_t d = 0;
      for (; d + kLanes <= a.value_dim; d += kLanes)
        sum = X::fma(X::load(out + d), X::load(grad + d), sum);
      if (d < a.value_dim)
        sum = X::fma(X::load(out + d, a.value_dim - d), X::load(grad + d, a.value_dim - d), sum);
      sums[i] = sum;
    }
    typename X::V found = X::sum_each(sums);
    if (g.grad_lse) found = X::sub(found, load_up_to<X>((const T*)g.grad_lse + at + r, height));
    T* to = (T*)g.delta + at + r;
    store_up_to<X>(to, found, height);
  }
}

// Packs one block of queries: Q and dO as lanes, or, where takes_rows allows it for `in_rows` keys,
// as they are; and what is subtracted from S and dP, from `lane` on.
template <class K>
void load_queries(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h, int64_t q0,
                  int64_t rows, GradScratch<K>& w, int64_t in_rows = 0, int64_t lane = 0) {
  row_levels<K>(a, b, h, q0, rows, w.high + lane, w.low + lane);
  const typename K::T* shift = (const typename K::T*)(w.whole ? g.grad_lse : g.delta);
  if (shift) shift += (b * a.heads + h) * a.queries + q0;
  using X = typename K::X;
  for (int64_t r = 0; r < rows; r += K::kLanes)
    X::store(w.shift + lane + r, shift ? load_up_to<X>(shift + r, rows - r) : X::zero());
  w.query_lanes = w.query;
  w.grad_out_lanes = w.grad_out;
  const typename K::S* const grad_out = row_of<K>(g.grad_out, b, h, q0);
  if (takes_rows<K>(rows, in_rows, a.head_dim))
    w.query_lanes = {row_of<K>(a.query, b, h, q0), a.query.row, (typename K::T)a.scale};
  else
    pack_query<K>(a, b, h, q0, rows, w.query);
  if (takes_rows<K>(rows, in_rows, a.value_dim))
    w.grad_out_lanes = {grad_out, g.grad_out.row, 1};
  else if (g.grad_out.data)
    pack_lanes<K>(grad_out, g.grad_out.row, rows, a.value_dim, w.grad_out);
}

// What belongs to the queries of a vector.
template <class X>
struct GradLanes {
  typename X::V high, low, shift, keep_scale;
};

// S -> P, or Z without the factor of dropout; dP -> dS, of a vector for each of N keys.
template <class X, bool kDropout, int N>
[[gnu::always_inline]] inline void gradient_vectors(const GradLanes<X>& of,
                                                    const uint64_t (&keep)[N],
                                                    typename X::V (&p)[N], typename X::V (&ds)[N]) {
#pragma GCC unroll 2
  for (int i = 0; i < N; i++) p[i] = X::sub(X::sub(p[i], of.high), of.low);
  exp_each<X, N>(p);
#pragma GCC unroll 2
  for (int i = 0; i < N; i++) {
    const typename X::V weight = p[i];
    if constexpr (kDropout) {
      const typename X::M in = X::mask(keep[i]);
      ds[i] = X::select(in, X::mul(of.keep_scale, ds[i]), X::zero());
      p[i] = X::select(in, weight, X::zero());
    }
    ds[i] = X::mul(weight, X::sub(ds[i], of.shift));
  }
}

// From S and dP of the keys of `seen`: w.p = P, or Z without the factor of dropout, w.ds = dS.
// `kVectors` of them are the lanes of one pass, so that what belongs to a query stays in registers.
// kPaired: of whole pairs of keys, in pairs. kLd: the queries of which p and ds hold rows; where
// these are not all, S is multiplied by `factor`, and the first rows of w.sums and those of w.next
// are asked for. kBias: what w.bias has of them is added.
template <class K, bool kDropout, bool kPartial, bool kPaired, int kVectors, int64_t kLd = kRow,
          bool kBias = false>
void gradient_lanes(int64_t lane, Range seen, typename K::T keep_scale, GradScratch<K>& w,
                    typename K::T factor = 1) {
  using X = typename K::X;
  using V = typename X::V;
  GradLanes<X> of[kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; i++) {
    const int64_t at = lane + i * K::kLanes;
    of[i] = {X::load(w.high + at), X::load(w.low + at), X::load(w.shift + at), X::set(keep_scale)};
  }
  constexpr bool kPart = kLd < kRow;
  const V f = X::set(factor);
  const PairsAhead next = w.next;
  const auto bias = w.bias.view();
  const int64_t first = seen.begin * kLd + lane % kLd;
  typename K::T *p = w.p + first, *ds = w.ds + first;
  const auto keys = [&]<int kKeys>(int64_t n) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) {
      const int at = i * K::kLanes;
      if constexpr (kPart) ask_sums<K, kVectors>(w.sums + lane, n / 2 * kVectors + i);
      if constexpr (kPart && kKeys == 2) {
        if (i == 0) next.mask.ask(lane + n / 2);
        if constexpr (kBias) next.bias.ask(lane + n / 2, i * next.apart);
      }
      V kept[kKeys], grad[kKeys];
      uint64_t keep[kKeys];
#pragma GCC unroll 2
      for (int k = 0; k < kKeys; k++) {
        kept[k] = X::load(p + k * kLd + at);
        if constexpr (kPart) kept[k] = X::mul(f, kept[k]);
        if constexpr (kBias) kept[k] = add_to_score<X>(kept[k], bias.load(n + k, at));
        grad[k] = X::load(ds + k * kLd + at);
        keep[k] = kDropout ? w.keep[n + k] >> (lane + at) : 0;
      }
      gradient_vectors<X, kDropout, kKeys>(of[i], keep, kept, grad);
      if constexpr (kPartial) {
#pragma GCC unroll 2
        for (int k = 0; k < kKeys; k++) {
          const typename X::M visible = X::mask(w.bits[n + k] >> (lane + at));
          grad[k] = X::select(visible, grad[k], X::zero());
          kept[k] = X::select(visible, kept[k], X::zero());
        }
      }
      if constexpr (kPaired) {
        if constexpr (kKeys == 2) {
          constexpr int64_t kNext = kPairRow<K>;
          const int64_t to = n * kNext + (lane + at) / 2;
          K::Dot::store_each(kept[0], kept[1], w.p_queries + to, w.p_queries + to + kNext);
          K::Dot::store_each(grad[0], grad[1], w.ds_queries + to, w.ds_queries + to + kNext);
          K::Dot::store_pairs(grad[0], grad[1], w.ds_keys + n / 2 * kRow + lane + at);
          if (!kPart && w.keeps_ds) {
            X::store(ds + at, grad[0]);
            X::store(ds + kLd + at, grad[1]);
          }
        }
      } else {
#pragma GCC unroll 2
        for (int k = 0; k < kKeys; k++) {
          X::store(p + k * kLd + at, kept[k]);
          X::store(ds + k * kLd + at, grad[k]);
        }
      }
    }
    p += kKeys * kLd;
    ds += kKeys * kLd;
  };
  int64_t n = seen.begin;
  for (; n + 2 <= seen.end; n += 2) keys.template operator()<2>(n);
  if (!kPaired && n < seen.end) keys.template operator()<1>(n);
}

// The same for queries whose delta is not known yet: first w.p = P and w.ds = dP. A dropped pair
// counts as in O, so what is not finite there reaches its row.
template <class K, bool kDropout, bool kPartial, int kVectors>
void gradient_whole(int64_t lane, Range seen, typename K::T keep_scale, GradScratch<K>& w) {
  using X = typename K::X;
  using V = typename X::V;
  const V kept = X::set(keep_scale);
  typename K::T *const p = w.p + lane, *const ds = w.ds + lane;
  V high[kVectors], low[kVectors], delta[kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; i++) {
    const int64_t at = lane + i * K::kLanes;
    high[i] = X::load(w.high + at);
    low[i] = X::load(w.low + at);
    delta[i] = X::sub(X::zero(), X::load(w.shift + at));
  }
  const auto keys = [&]<int kKeys>(int64_t n) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) {
      const int at = i * K::kLanes;
      V weight[kKeys];
#pragma GCC unroll 2
      for (int k = 0; k < kKeys; k++)
        weight[k] = X::sub(X::sub(X::load(p + (n + k) * kRow + at), high[i]), low[i]);
      exp_each<X, kKeys>(weight);
#pragma GCC unroll 2
      for (int k = 0; k < kKeys; k++) {
        V grad = X::load(ds + (n + k) * kRow + at);
        if constexpr (kDropout)
          grad = X::mul(X::select(X::mask(w.keep[n + k] >> (lane + at)), kept, X::zero()), grad);
        if constexpr (kPartial) {
          const typename X::M visible = X::mask(w.bits[n + k] >> (lane + at));
          weight[k] = X::select(visible, weight[k], X::zero());
          grad = X::select(visible, grad, X::zero());
        }
        X::store(p + (n + k) * kRow + at, weight[k]);
        X::store(ds + (n + k) * kRow + at, grad);
        delta[i] = X::fma(weight[k], grad, delta[i]);
      }
    }
  };
  int64_t n = seen.begin;
  for (; n + 2 <= seen.end; n += 2) keys.template operator()<2>(n);
  if (n < seen.end) keys.template operator()<1>(n);
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; i++) X::store(w.shift + lane + i * K::kLanes, delta[i]);
  for (int64_t n = seen.begin; n < seen.end; n++)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) {
      const int at = i * K::kLanes;
      const V weight = X::load(p + n * kRow + at);
      V grad = X::mul(weight, X::sub(X::load(ds + n * kRow + at), delta[i]));
      if constexpr (kPartial) grad = X::select(X::mask(w.bits[n] >> (lane + at)), grad, X::zero());
      X::store(ds + n * kRow + at, grad);
      if constexpr (kDropout)
        X::store(p + n * kRow + at,
                 X::select(X::mask(w.keep[n] >> (lane + at)), weight, X::zero()));
    }
}

template <class K, bool kDropout, bool kPartial>
void gradient_rows(int64_t vectors, int64_t keys, double keep_scale, GradScratch<K>& w) {
  constexpr int kMost = K::X::kRegisters == 32 ? 4 : 1;
  if constexpr (K::kPairs) {
    if (w.paired) {
      for (int64_t lane = 0; lane < kRow; lane += kMost * K::kLanes)
        gradient_lanes<K, kDropout, kPartial, true, kMost>(lane, {0, kTile},
                                                           (typename K::T)keep_scale, w);
      return;
    }
  }
  const auto zero = [&](Range range, int64_t lane, int64_t count) {
    for (int64_t n = range.begin; n < range.end; n++)
      for (int64_t i = lane; i < lane + count * K::kLanes; i += K::kLanes) {
        K::X::store(w.p + n * kRow + i, K::X::zero());
        K::X::store(w.ds + n * kRow + i, K::X::zero());
      }
  };
  for_bands<K>(w.bands, keys, vectors, [&](Range seen, int64_t first, int64_t count) {
    int64_t i = first;
    const auto some = [&]<int kVectors>() {
      const auto kept = (typename K::T)keep_scale;
      for (; i + kVectors <= first + count; i += kVectors)
        if (w.whole)
          gradient_whole<K, kDropout, kPartial, kVectors>(i * K::kLanes, seen, kept, w);
        else
          gradient_lanes<K, kDropout, kPartial, false, kVectors>(i * K::kLanes, seen, kept, w);
    };
    some.template operator()<kMost>();
    some.template operator()<1>();
    zero({0, seen.begin}, first * K::kLanes, count);
    zero({seen.end, keys}, first * K::kLanes, count);
  });
}

// S and dP of a tile that is not empty, in the lanes of w.p and w.ds from `lane` on, of w.bands.
template <class K>
Visibility gradient_products(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h,
                             int64_t q0, int64_t rows, int64_t k0, int64_t keys,
                             const Operand& key_rows, const Operand& value_rows, Visibility visible,
                             int64_t lane, uint64_t* bits, GradScratch<K>& w) {
  visible = scores<K>(a, b, h, q0, rows, k0, keys, w.query_lanes, key_rows, visible, bits,
                      w.p + lane, w.extra, &w.ahead, w.bands);
  if (g.grad_weights.data)
    load_pairs<K, typename K::S>(g.grad_weights, b, h, q0, rows, k0, keys, w.ds + lane);
  else
    score_product_bands<K>(w.bands, value_rows, keys, a.value_dim, w.grad_out_lanes, rows,
                           w.ds + lane, &w.ahead);
  return visible;
}

// w.p = Z (without the factor of dropout) and w.ds = dS from S and dP, or these in pairs; hidden
// pairs, where there are `partial` ones, are 0, whatever they hold.
template <class K>
void gradient_pairs(const Attention& a, int64_t vectors, int64_t keys, bool partial,
                    GradScratch<K>& w) {
  const bool dropout = a.dropout.seed != nullptr;
  const auto run = dropout ? partial ? gradient_rows<K, true, true> : gradient_rows<K, true, false>
                   : partial ? gradient_rows<K, false, true>
                             : gradient_rows<K, false, false>;
  run(vectors, keys, a.dropout.keep_scale, w);
}

// Both where a matrix unit does the products: P and dS in pairs of a whole tile, by halves of its
// queries.
template <class K>
Visibility matrix_gradient(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t k0,
                           const Operand& key_rows, const Operand& value_rows, Visibility visible,
                           GradScratch<K>& w) {
  constexpr int kVectors = kHalfRow / K::kLanes;
  const auto pairs = [&]<bool kDropout, bool kPartial>(int64_t lane, Range keys) {
    const auto run = w.bias
                         ? gradient_lanes<K, kDropout, kPartial, true, kVectors, kHalfRow, true>
                         : gradient_lanes<K, kDropout, kPartial, true, kVectors, kHalfRow, false>;
    run(lane, keys, (typename K::T)a.dropout.keep_scale, w, (typename K::T)a.scale);
  };
  const auto product = [&](const Operand& rows, int64_t width, const typename K::Unit* x,
                           typename K::T* c) {
    K::Dot::template product<Update::kStore>(rows, kTile, units_of<K>(width), x, kRow, kVectors, c,
                                             kHalfRow);
  };
  if (a.bias.data) w.bias = BiasStrips<K>(a, b, h, q0, kTile, k0, w.extra);
  if (w.bias_hides) visible = w.bias.hide(visible, w.bits);
  const int64_t step = w.bias ? BiasStrips<K>::kStrip : kTile;
  for (int64_t lane = 0; lane < kRow; lane += kHalfRow) {
    product(key_rows, a.head_dim, w.query + lane, w.p);
    product(value_rows, a.value_dim, w.grad_out + lane, w.ds);
    for (int64_t n = 0; n < kTile; n += step) {
      if (w.bias) w.bias.turn(lane, n);
      if (w.bias && w.bias.hides()) {
        w.bias_hides = true;
        visible = w.bias.hide(visible, w.bits);
        w.bias.turn(lane, n);
      }
      const Range keys{n, n + step};
      if (visible == Visibility::kPartial)
        a.dropout.seed ? pairs.template operator()<true, true>(lane, keys)
                       : pairs.template operator()<false, true>(lane, keys);
      else
        a.dropout.seed ? pairs.template operator()<true, false>(lane, keys)
                       : pairs.template operator()<false, false>(lane, keys);
    }
  }
  return visible;
}

// Where nobody says so, operands may hold what is not finite.
struct MayBeDirty {
  bool operator()() const { return false; }
};
// Both for one tile of a head. clean(): whether its operands are finite, for which hidden pairs can
// be 0 in pairs, too.
template <class K, class Clean = MayBeDirty>
Visibility gradient_tile(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h,
                         int64_t q0, int64_t rows, int64_t k0, int64_t keys,
                         const Operand& key_rows, const Operand& value_rows, GradScratch<K>& w,
                         const Clean& clean = {}) {
  Visibility visible = visibility_of<K>(a, b, h, q0, rows, k0, keys, w.bits);
  if (visible == Visibility::kEmpty) return visible;
  w.bands = find_bands<K>(a, b, q0, rows, k0, keys, w.bands_storage) ? w.bands_storage : nullptr;
  if (a.dropout.seed) dropout_tile<K>(a, b, h, q0, rows, k0, keys, w.keep);
  const bool whole = w.p_queries && !w.bands && rows == kTile && keys == kTile;
  if constexpr (K::Dot::kRowBlock > 1) {
    w.paired = whole && !g.grad_weights.data && !has_few_queries(a, K::kLimits) &&
               ((visible == Visibility::kFull && !a.bias.data) || clean());
    if (w.paired) return matrix_gradient<K>(a, b, h, q0, k0, key_rows, value_rows, visible, w);
  }
  visible = gradient_products<K>(a, g, b, h, q0, rows, k0, keys, key_rows, value_rows, visible, 0,
                                 w.bits, w);
  const bool partial = visible == Visibility::kPartial;
  w.paired = whole && (!partial || clean());
  gradient_pairs<K>(a, vectors_of<K>(rows), keys, partial, w);
  return visible;
}

}  // namespace
}  // namespace mha_ext::cpu

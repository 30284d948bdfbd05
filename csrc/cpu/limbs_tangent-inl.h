// A whole tile of the tangent of forward, without a bias, whose products are multiplied in limbs,
// and what both tangents share. Two products that are added up are one here, whose operands stand
// side by side along t. Pairs that limbs cannot hold, as a number of theirs is not `usual`, are
// left to multiply-adds: which these are depends on nothing but their own query and key.
namespace mha_ext::cpu {
namespace {

// Two operands side by side along t: one, the other, or both.
template <class K>
struct LimbsPair {
  Limbs of[2];

  LimbsPair() = default;
  LimbsPair(int64_t along, int64_t across, bool taken, Arena& arena) {
    const int64_t room = 2 * round_up(along, kLimbsStep);
    of[0].data = arena.take<uint32_t>(taken ? limbs_size<K>(room, across) : 0);
    if (arena.base) set_along(along);
  }
  void set_along(int64_t count) {
    for (Limbs& one : of) {
      one.room = 2 * ceil_div(count, kLimbsStep);
      lay_out<K>(count, one);
    }
    of[1].data = of[0].data + of[0].along * of[0].step;
  }
  Limbs both(bool first, bool second) const {
    Limbs some = of[first ? 0 : 1];
    if (first && second) some.along *= 2;
    return some;
  }
  bool unusual() const { return of[0].unusual || of[1].unusual; }
};

// The pairs of a tile: those that limbs take, and the others that are seen. `masked`: limbs do not
// take all.
struct TakenPairs {
  uint64_t *taken, *all, *unusual;
  bool masked, any_unusual;

  explicit TakenPairs(Arena& arena)
      : taken(arena.take<uint64_t>(kTile)),
        all(arena.take<uint64_t>(kTile)),
        unusual(arena.take<uint64_t>(kTile)) {
    if (arena.base) __builtin_memset(all, -1, kTile * sizeof(uint64_t));
  }
  // Of the pairs that are seen, `bits` or all.
  void choose(const uint64_t* bits, int64_t count, uint64_t unusual_rows, uint64_t unusual_keys) {
    const uint64_t rows = first_bits(count);
    any_unusual = unusual_rows || unusual_keys;
    masked = bits || any_unusual;
    for (int64_t n = 0; n < kTile; n++) {
      const uint64_t seen = bits ? bits[n] & rows : rows;
      unusual[n] = unusual_keys >> n & 1 ? seen : seen & unusual_rows;
      taken[n] = seen & ~unusual[n];
    }
  }
  // Leaves out those whose bits are 0; false where there are none.
  bool leave_out(const uint64_t* usual) {
    uint64_t lost = 0;
    for (int64_t n = 0; n < kTile; n++) {
      const uint64_t out = taken[n] & ~usual[n];
      lost |= out;
      unusual[n] |= out;
      taken[n] &= ~out;
    }
    if (lost) masked = any_unusual = true;
    return lost;
  }
  // What is left to multiply-adds; false where nothing is.
  bool left(uint64_t* bits) const {
    if (any_unusual) __builtin_memcpy(bits, unusual, kTile * sizeof *bits);
    return any_unusual;
  }
};

// Bit r: row `first` + r has a number that is not usual; none where there is no tensor.
template <class K>
uint64_t unusual_rows(const Rows& from, int64_t b, int64_t h, int64_t first, int64_t rows,
                      int64_t columns) {
  uint64_t found = 0;
  for (int64_t r = 0; from.data && r < rows; r++) {
    const typename K::S* const row = row_of<K>(from, b, h, first + r);
    for (int64_t c = 0; c < columns; c++) found |= (uint64_t)!usual(widen(row[c])) << r;
  }
  return found;
}
// The same of lanes of queries.
inline uint64_t unusual_lanes(const float* lanes, int64_t queries, int64_t columns) {
  uint64_t found = 0;
  for (int64_t c = 0; c < columns; c++)
    for (int64_t r = 0; r < queries; r++) found |= (uint64_t)!usual(lanes[c * kRow + r]) << r;
  return found;
}

// What the tangent of forward keeps in limbs: of the tile, of each block of queries, of each half
// of its weights.
template <class K>
struct ForwardTangentLimbs<K, true> {
  LimbsPair<K> key, value;            // K and K', V and V'
  LimbsPair<K> query[kTangentGroup];  // Q' and Q
  LimbsPair<K> weights[2];            // P o S' and P
  float* sums[2];                     // [value_dim][kHalfRow] of the last products
  PendingSum<K> pending;              // one of them
  TakenPairs pairs;
  uint64_t unusual_keys, unusual_queries[kTangentGroup];
  bool packed, query_packed[kTangentGroup] = {};

  ForwardTangentLimbs(const Attention& a, Arena& arena) : pairs(arena) {
    const bool taken = takes_limbs<K>(a, min_of(kTile, a.queries));
    key = {a.head_dim, kTile, taken, arena};
    value = {kTile, a.value_dim, taken, arena};
    for (int64_t i = 0; i < min_of(kTangentGroup, ceil_div(a.queries, kTile)); i++)
      query[i] = {a.head_dim, kRow, taken, arena};
    for (LimbsPair<K>& half : weights) half = {kTile, kHalfRow, taken, arena};
    for (float*& sum : sums)
      sum = arena.take<float>(taken ? round_up(a.value_dim, K::kLanes) * kHalfRow : 0);
  }
};

// P and P o S' of half a block of queries, from S and S', [key][kHalfRow]: two keys at a time, in
// limbs and times kLimbsScale.
template <class K, bool kScores, bool kMasked>
class HalfTangents {
  using X = typename K::X;
  using V = typename X::V;
  static constexpr int kVectors = 2;

 public:
  HalfTangents(const TangentBlock<K>& q, int64_t lane, const uint64_t* kept,
               const ForwardTangentScratch<K>& w)
      : s_(w.s + lane * kTile),
        st_(w.st + lane * kTile),
        taken_(w.limbs.pairs.taken),
        kept_(kept),
        lane_(lane),
        x_(w.limbs.weights[lane / kHalfRow].of[0]),
        p_(w.limbs.weights[lane / kHalfRow].of[1]) {
    for (int i = 0; i < kVectors; i++) {
      high_[i] = X::load(q.high + lane + i * K::kLanes);
      low_[i] = X::load(q.low + lane + i * K::kLanes);
      mu_[0][i] = mu_[1][i] = X::zero();
    }
  }
  static int64_t pieces() { return kTile / 2; }
  [[gnu::always_inline]] void piece(int64_t two_keys) {
    const V scale = X::set(kLimbsScale);
    const int64_t n = 2 * two_keys, to = n % kLimbsStep / 2 * p_.row;
#pragma GCC unroll 2
    for (int i = 0; i < kVectors; i++) {
      V p[2], x[2];
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++)
        p[k] = X::sub(X::sub(X::load(s_ + (n + k) * kHalfRow + i * K::kLanes), high_[i]), low_[i]);
      exp_each<X, 2>(p);
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) {
        const auto those_of = [&](const uint64_t* bits, V v) __attribute__((always_inline)) {
          if constexpr (!kMasked) return v;
          return X::select(X::mask(bits[n + k] >> (lane_ + i * K::kLanes)), v, X::zero());
        };
        if constexpr (kScores) {
          x[k] = X::mul(p[k], X::load(st_ + (n + k) * kHalfRow + i * K::kLanes));
          x[k] = those_of(taken_, x[k]);
          mu_[k][i] = X::add(mu_[k][i], x[k]);
          x[k] = those_of(kept_, X::mul(scale, x[k]));
        }
        p[k] = those_of(kept_, those_of(taken_, X::mul(scale, p[k])));
      }
      const auto store = [&](const V(&of)[2], const Limbs& limbs) __attribute__((always_inline)) {
        store_limbs<K, false, false>(of[0], of[1], limbs.plane, limbs.at(n / kLimbsStep, i) + to);
      };
      if constexpr (kScores) store(x, x_);
      store(p, p_);
    }
  }
  void finish(float* mu) const {
    for (int i = 0; i < kVectors; i++) {
      float* const sum = mu + lane_ + i * K::kLanes;
      X::store(sum, X::add(X::load(sum), X::add(mu_[0][i], mu_[1][i])));
    }
  }

 private:
  const float *s_, *st_;
  const uint64_t *taken_, *kept_;
  int64_t lane_;
  Limbs x_, p_;
  V high_[kVectors], low_[kVectors], mu_[2][kVectors];
};

// Cuts what belongs to the tile of keys, and to the i-th block of queries.
template <class K>
void pack_tangents(const Attention& a, const AttentionTangent& t, int64_t b, int64_t kv, int64_t k0,
                   int64_t i, ForwardTangentScratch<K>& w) {
  ForwardTangentLimbs<K>& l = w.limbs;
  const int64_t d = a.head_dim, dv = a.value_dim;
  if (!l.packed) {
    const auto cut_key = [&](const Rows& from, Limbs& to) {
      if (from.data) rows_in_limbs<K>(row_of<K>(from, b, kv, k0), from.row, kTile, d, 1, to);
    };
    const auto cut_value = [&](const Rows& from, Limbs& to) {
      if (!from.data) return;
      turned_in_limbs<K, true>(row_of<K>(from, b, kv, k0), from.row, kTile, dv, kLimbsScale, to);
    };
    cut_key(a.key, l.key.of[0]);
    cut_key(t.key, l.key.of[1]);
    cut_value(a.value, l.value.of[0]);
    cut_value(t.value, l.value.of[1]);
    const auto find = [&](const Rows& from, int64_t width) {
      return unusual_rows<K>(from, b, kv, k0, kTile, width);
    };
    l.unusual_keys = 0;
    if (l.key.unusual() || l.value.unusual())
      l.unusual_keys = find(a.key, d) | find(t.key, d) | find(a.value, dv) | find(t.value, dv);
    l.packed = true;
  }
  if (l.query_packed[i]) return;
  TangentBlock<K>& q = w.blocks[i];
  fill_lanes<K>(q.rows, 1, (float)INFINITY, q.high);
  fill_lanes<K>(q.rows, 1, 0, q.low);
  const auto cut_query = [&](float* from, Limbs& to) {
    fill_lanes<K>(q.rows, d, 0, from);
    lanes_in_limbs<K>(from, kRow, d, round_up(q.rows, kHalfRow), 1, to);
  };
  if (t.query.data) cut_query(q.query_tangent, l.query[i].of[0]);
  cut_query(q.query, l.query[i].of[1]);
  l.unusual_queries[i] = 0;
  if (l.query[i].unusual()) {
    l.unusual_queries[i] = unusual_lanes(q.query, q.rows, d);
    if (t.query.data) l.unusual_queries[i] |= unusual_lanes(q.query_tangent, q.rows, d);
  }
  l.query_packed[i] = true;
}

// As matrix_tangent, of the i-th block and the pairs that are seen. What is made of a half's scores
// is computed beside the next products, and the last sum is left to wait. True where pairs are left
// to multiply-adds, w.bits.
template <class K>
bool limbs_tangent(const Attention& a, const AttentionTangent& t, int64_t b, int64_t kv, int64_t k0,
                   int64_t i, bool partial, ForwardTangentScratch<K>& w) {
  ForwardTangentLimbs<K>& l = w.limbs;
  TangentBlock<K>& q = w.blocks[i];
  pack_tangents<K>(a, t, b, kv, k0, i, w);
  l.pairs.choose(partial ? w.bits : nullptr, q.rows, l.unusual_queries[i], l.unusual_keys);
  const bool with_scores = moves_scores(t);
  const Limbs key = l.key.of[0], query = l.query[i].of[1];
  const Limbs keys = l.key.both(t.query.data, t.key.data);
  const Limbs queries = l.query[i].both(t.query.data, t.key.data);
  const Limbs values = l.value.both(with_scores, t.value.data);
  const int64_t score_steps =
      K::Dot::steps(key, kTile, 2) + (with_scores ? K::Dot::steps(keys, kTile, 2) : 0);
  const int64_t value_steps = K::Dot::steps(values, a.value_dim, 2);
  const auto scores = [&](int64_t lane, auto& beside) __attribute__((always_inline)) {
    K::Dot::product_beside(key, kTile, query, lane, 2, w.s + lane * kTile, kHalfRow, beside);
    if (with_scores)
      K::Dot::product_beside(keys, kTile, queries, lane, 2, w.st + lane * kTile, kHalfRow, beside);
  };
  const auto weights = [&](int half) { return l.weights[half].both(with_scores, t.value.data); };
  const auto to_add = [&](int half) {
    return PendingSum<K>{l.sums[half], q.out + half * kHalfRow,       a.value_dim, 2, kHalfRow,
                         kRow,         1 / kLimbsScale / kLimbsScale, !q.started};
  };

  PendingSum<K> before = l.pending;  // in registers
  before.beside(score_steps);
  scores(0, before);
  before.finish();
  const auto run = [&]<bool kScores, bool kMasked>() {
    using Half = HalfTangents<K, kScores, kMasked>;
    const uint64_t* const kept = a.dropout.seed ? w.keep : l.pairs.all;
    PiecesBeside<Half> first(Half(q, 0, kept, w), score_steps);
    if (q.rows > kHalfRow) {
      scores(kHalfRow, first);
      first.finish();
      PiecesBeside<Half> second(Half(q, kHalfRow, kept, w), value_steps);
      K::Dot::product_beside(values, a.value_dim, weights(0), 0, 2, l.sums[0], kHalfRow, second);
      second.finish();
      second.of.finish(q.mu);
      l.pending = to_add(0);
      product_beside_sum<K>(values, a.value_dim, weights(1), 0, 2, l.sums[1], kHalfRow, l.pending);
      l.pending = to_add(1);
    } else {
      first.finish();
      K::Dot::product(values, a.value_dim, weights(0), 0, 2, l.sums[0], kHalfRow);
      l.pending = to_add(0);
    }
    first.of.finish(q.mu);
  };
  if (l.pairs.masked || a.dropout.seed)
    with_scores ? run.template operator()<true, true>() : run.template operator()<false, true>();
  else
    with_scores ? run.template operator()<true, false>() : run.template operator()<false, false>();
  q.started = true;
  return l.pairs.left(w.bits);
}

}  // namespace
}  // namespace mha_ext::cpu

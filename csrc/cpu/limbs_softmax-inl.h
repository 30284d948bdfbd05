// The softmax of half a tile of forward whose products are multiplied in limbs. The rows of its
// scores are queries and the lanes keys, so that a mask and a bias are read as they lie.
namespace mha_ext::cpu {
namespace {

// A bias of float32, or of the storage type: rows of keys that are neighbours, the same one for all
// queries where the stride is 0.
struct BiasRows {
  const void* data = nullptr;
  int64_t stride = 0;
  bool is_float32 = true;
  int64_t ahead = 0;  // bytes to those that will be wanted next
};
struct NoBias {};
struct Unscaled {};  // scores that lack their scale
template <class E>
constexpr bool kIsBias = true;
template <>
constexpr bool kIsBias<NoBias> = false;
template <>
constexpr bool kIsBias<Unscaled> = false;
template <class E>
constexpr bool kIsUnscaled = false;
template <>
constexpr bool kIsUnscaled<Unscaled> = true;

// Sums of P for each query of half a block, [query][kLanes], that l still lacks: what the next tile
// adds up stands beside them until it is known that no level has to be raised.
struct HalfSums {
  float *now, *next;
};

// Half a block of queries and a tile of keys whose scores are there.
template <class K>
struct ScoredHalf {
  float* s = nullptr;  // [query][kTile]; nothing waits without
  const typename K::S* value = nullptr;
  int64_t keys = 0, reach = 0;  // all of the tile, and those before which all that is seen lies
  BiasRows bias;                // that is not in s yet
  float *m, *l, *out;
  HalfSums* sums;
  uint64_t* seen;        // of each query, bit n: whether it sees key n
  const uint64_t* kept;  // likewise, or nullptr
  int64_t queries;
  float scale;  // that s lacks
  bool masked;  // whether anybody has to look at `seen`
  bool started;
};

// What forward keeps in limbs: of the tile, of half of its weights, and of each block of queries.
template <class K>
struct ForwardLimbs<K, true> {
  Limbs key, value, weights, query[kGroup];
  float* sums[2];  // [kHalfRow][padded value_dim] of the last products, of which one is pending
  PendingSum<K> pending;
  ScoredHalf<K> half;
  RowsAhead next_mask, asked;               // of all queries, and of those asked for with a half
  const typename K::S* value_of = nullptr;  // of which rows `value` is
  bool value_checked = false;               // whether these are known to be finite, or unusual
  uint64_t *seen[2], *keep[2];              // of this tile, and of the one before
  float* bias[2];                           // of a half, where its keys are no neighbours
  float* levels;                            // of a half
  int64_t out_row;                          // numbers between two queries of a block's out
  HalfSums half_sums[kGroup][2];
  int turn = 0;             // of the two halves that w.s has room for
  int side = 0;             // of the two tiles
  bool bias_hides = false;  // whether one has
  bool packed, query_packed[kGroup];

  ForwardLimbs(const Attention& a, Arena& arena) {
    const bool taken = takes_limbs<K>(a, a.queries);
    const auto take = [&](int64_t along, int64_t across) {
      Limbs t;
      t.data = arena.take<uint32_t>(taken ? limbs_size<K>(along, across) : 0);
      return t;
    };
    out_row = padded<K>(a.value_dim);
    key = take(a.head_dim, kTile);
    value = take(kTile, a.value_dim);
    weights = take(kTile, kHalfRow);
    weights.plane = kHalfRow * K::kLanes;
    weights.along = kTile / kLimbsStep;
    weights.step = K::kLimbs * weights.plane;
    weights.across = K::kLanes * K::kLanes;
    for (int64_t i = 0; K::kCut && i < blocks_of_group<K>(a); i++)
      query[i] = take(a.head_dim, kRow);
    for (float*& sum : sums)
      sum = arena.take<float>(taken && K::kCut ? padded<K>(a.value_dim) * kHalfRow : 0);
    for (float*& rows : bias)
      rows = arena.take<float>(
          taken && a.bias.data && (a.bias.key != 1 || a.keys % kTile) ? kHalfRow * kTile : 0);
    for (int i = 0; i < 2; i++) {
      seen[i] = arena.take<uint64_t>(taken ? kTile : 0);
      keep[i] = arena.take<uint64_t>(taken ? kTile : 0);
    }
    levels = arena.take<float>(kHalfRow);
    for (int64_t i = 0; i < blocks_of_group<K>(a); i++)
      for (HalfSums& half : half_sums[i]) {
        half.now = arena.take<float>(taken ? kHalfRow * K::kLanes : 0);
        half.next = arena.take<float>(taken ? kHalfRow * K::kLanes : 0);
      }
  }
};

// The exponentials of a row of 64 scores with each piece, or of the first 32: P comes in limbs, S
// stays. In the hope that no level has to be raised, and that no bias is infinite. kAsk: a line of
// what is wanted next is asked for with each vector. Unscaled, P is 2^y for y = S scale log2 e less
// the level's log2 e: one multiply-add, as exact as S unless the level is large.
template <class K, bool kAsk, bool kMasked, bool kDropout, class E, int kKeys = kTile>
class RowExponentials {
  using X = typename K::X;
  using V = typename X::V;
  static constexpr int kVectors = kKeys / K::kLanes;
  static constexpr bool kUnscaled = kIsUnscaled<E>;
  static constexpr int64_t kPlane = kHalfRow * K::kLanes;

 public:
  RowExponentials(const ScoredHalf<K>& half, const ForwardLimbs<K>& t, Ahead& ahead)
      : s_(half.s),
        levels_(t.levels),
        bias_((const E*)half.bias.data),
        bias_stride_(half.bias.stride),
        bias_ahead_(half.bias.ahead),
        queries_(half.queries),
        seen_{half.seen},
        kept_{half.kept},
        sums_(half.sums->now),
        next_sums_(half.sums->next),
        out_(half.out),
        out_row_(t.out_row),
        weights_(t.weights.data),
        mask_(t.asked.first ? t.asked : RowsAhead{(const char*)half.s}),  // no row asks whether
        ahead_(&ahead) {
    for (int i = 0; i < 2; i++) {
      top_[i] = X::set(-(float)INFINITY);
      finite_[i] = X::zero();
    }
    constexpr float kUnit = kUnscaled ? Exp<float>::log2e : 1;
    for (int64_t r = 0; r < kHalfRow; r += K::kLanes)
      X::store(t.levels + r, X::mul(X::set(kUnit), level_of<K>(half.m + r)));
    factor_ = X::set(half.scale * kUnit);
    if constexpr (kAsk) lines_ = ahead.lines();
  }
  int64_t pieces() const { return queries_; }
  [[gnu::always_inline]] void piece(int64_t r) {
    mask_.ask(r);
    if constexpr (K::kOneLimb)  // the product of the values is added to what the unit reads there
      for (int64_t d = 0; d < out_row_; d += K::kLanes)
        __builtin_prefetch(out_ + r * out_row_ + d, 1);
    const V level = X::set(levels_[r]), lowest = X::set(Exp<float>::lowest_finite);
    uint32_t* const to = weights_ + r * K::kLanes;
    V sum = X::load(sums_ + r * K::kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i += 2) {
      V e[2];
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) {
        if constexpr (kAsk) ahead_->ask(lines_);
        const int64_t at = (i + k) * K::kLanes;
        V x = X::load(s_ + r * kTile + at);
        if constexpr (kIsBias<E>) {
          const E* const bias = bias_ + r * bias_stride_ + at;
          if (at * (int64_t)sizeof(E) % kLine == 0)
            __builtin_prefetch((const char*)bias + bias_ahead_, 0, 2);
          x = X::add(K::kOneLimb ? X::mul(factor_, x) : x, X::load(bias));
        } else if constexpr (K::kOneLimb && !kUnscaled) {
          x = X::mul(factor_, x);
        }
        x = kUnscaled ? X::fms(factor_, x, level) : X::sub(x, level);
        x = seen_or<X, kMasked>(seen_, r, i + k, x, lowest);
        if constexpr (kIsBias<E>)
          finite_[k] = X::fma(x, X::zero(), finite_[k]);  // NaN where x is not
        top_[k] = X::max(x, top_[k]);
        e[k] = kUnscaled ? power_of_two<X>(x, x, kLeastPower) : exp_of<X>(x);
      }
      sum = X::add(sum, X::add(e[0], e[1]));
      const V kept[2] = {seen_or<X, kDropout>(kept_, r, i, e[0], X::zero()),
                         seen_or<X, kDropout>(kept_, r, i + 1, e[1], X::zero())};
      uint32_t* const pairs = to + i / 2 * K::kLimbs * kPlane;
      if constexpr (K::kOneLimb)
        K::Dot::store_row(kept[0], kept[1], pairs);
      else
        store_limbs<K, false, false>(kept[0], kept[1], kPlane, pairs);
    }
    X::store(next_sums_ + r * K::kLanes, sum);
  }
  // Whether that was more than a hope.
  bool finish() {
    if constexpr (kAsk) ahead_->stopped(lines_);
    const V finite = X::add(finite_[0], finite_[1]);
    return !X::bits(X::gt(X::max(top_[0], top_[1]), X::set(kMostSlack))) &&
           X::bits(X::eq(finite, finite)) == first_bits(K::kLanes);
  }

 private:
  // Unscaled, less by more than a rounding: whether a level rises is for raise_rows to say, since
  // there each row decides by itself.
  static constexpr float kMostSlack =
      kUnscaled ? (kSlack<float> - 0.01f) * Exp<float>::log2e : kSlack<float>;
  static constexpr float kLeastPower = Exp<float>::power_lowest * Exp<float>::log2e;

  const float *s_, *levels_;
  const E* bias_;
  int64_t bias_stride_, bias_ahead_, queries_;
  Seen seen_, kept_;
  const float* sums_;
  float *next_sums_, *out_;
  int64_t out_row_;
  uint32_t* weights_;
  RowsAhead mask_;
  Ahead* ahead_;
  Ahead::Lines lines_{};
  V factor_, top_[2], finite_[2];
};

// run<E>() for the type of a bias, and whether there is a scale left.
template <class K, class Run>
auto by_bias(const BiasRows& bias, const Run& run, bool unscaled = false) {
  if constexpr (K::kOneLimb)
    if (!bias.data && unscaled) return run.template operator()<Unscaled>();
  if (!bias.data) return run.template operator()<NoBias>();
  return bias.is_float32 ? run.template operator()<float>()
                         : run.template operator()<typename K::S>();
}

// seen[query] without the keys that a bias of -inf hides.
template <class K>
void hide_by_bias(const BiasRows& bias, int64_t queries, uint64_t* seen) {
  using X = typename K::X;
  const typename X::V hidden = X::set(-(float)INFINITY);
  by_bias<K>(bias, [&]<class E>() {
    if constexpr (kIsBias<E>)
      for (int64_t r = 0; r < queries; r++)
        for (int64_t n = 0; n < kTile; n += K::kLanes) {
          const auto v = X::load((const E*)bias.data + r * bias.stride + n);
          seen[r] &= ~(X::bits(X::eq(v, hidden)) << n);
        }
  });
}

// Adds the bias to the scores, finds what it hides, and raises the levels that have to be: what was
// summed with the old ones is rescaled.
template <class K>
void raise_rows(const Attention& a, ForwardLimbs<K>& t, ScoredHalf<K>& half) {
  using X = typename K::X;
  if (half.bias.data) {
    if (!half.masked)
      for (int64_t r = 0; r < half.queries; r++) half.seen[r] = ~0ull;
    hide_by_bias<K>(half.bias, half.queries, half.seen);
    uint64_t every = ~0ull;
    for (int64_t r = 0; r < half.queries; r++) every &= half.seen[r];
    t.bias_hides |= !half.masked && ~every;
    half.masked |= ~every != 0;
    by_bias<K>(half.bias, [&]<class E>() {
      if constexpr (kIsBias<E>)
        for (int64_t r = 0; r < half.queries; r++)
          for (int64_t n = 0; n < kTile; n += K::kLanes) {
            float* const to = half.s + r * kTile + n;
            const auto bias = X::load((const E*)half.bias.data + r * half.bias.stride + n);
            X::store(to, add_to_score<X>(X::mul(X::set(half.scale), X::load(to)), bias));
          }
    });
    half.bias = {};
    half.scale = 1;
  }
  const Seen seen{half.seen};
  const typename X::V lowest = X::set(-(float)INFINITY), scale = X::set(half.scale);
  float top[kHalfRow] = {}, old[kHalfRow];
  __builtin_memcpy(old, half.m, sizeof old);
  for (int64_t r = 0; r < half.queries; r++) {
    typename X::V all = lowest;
    for (int i = 0; i < kTile / K::kLanes; i++) {
      const typename X::V score = X::mul(scale, X::load(half.s + r * kTile + i * K::kLanes));
      all = X::max(half.masked ? seen_or<X, true>(seen, r, i, score, lowest) : score, all);
    }
    top[r] = X::largest(all);
  }
  raise_levels<K, kHalfRow / K::kLanes, false>(0, nullptr, top, {}, half.m, half.l, nullptr, 0);
  if (!half.started) return;
  rescale_rows<K>(half.queries, old, half.m, half.sums->now, K::kLanes);
  rescale_rows<K>(half.queries, old, half.m, half.out, padded<K>(a.value_dim));
}
// Whether a query that has no level yet sees something.
template <class K>
bool lacks_level(const ScoredHalf<K>& half) {
  using X = typename K::X;
  uint64_t lacks = 0;
  for (int64_t r = 0; r < kHalfRow; r += K::kLanes)
    lacks |= X::bits(X::eq(X::load(half.m + r), X::set(-(float)INFINITY))) << r;
  lacks &= first_bits(half.queries);
  for (; half.masked && lacks; lacks &= lacks - 1)
    if (half.seen[__builtin_ctzll(lacks)]) return true;
  return lacks != 0;
}

// The queries whose level is so large that, times log2 e, it would be wrong by more than 0.001.
template <class K>
uint64_t large_levels(const ScoredHalf<K>& half) {
  using X = typename K::X;
  constexpr float kLarge = 4096;
  uint64_t large = 0;
  for (int64_t r = 0; r < kHalfRow; r += K::kLanes) {
    const typename X::V level = level_of<K>(half.m + r);
    large |= X::bits(X::gt(X::max(level, X::sub(X::zero(), level)), X::set(kLarge))) << r;
  }
  return large & first_bits(half.queries);
}

// P of half a block, in limbs; m and its sums over its keys, too. run(rows) computes what
// rows.step() and rows.finish() do, beside a product of so many steps.
template <class K, class Run>
void softmax_rows(const Attention& a, ScoredHalf<K>& half, int64_t steps, ForwardScratch<K>& w,
                  const Run& run) {
  ForwardLimbs<K>& t = w.limbs;
  const auto attempt = [&]<bool kMayAsk>(const auto& compute) {
    bool done = false;
    const auto by_keys = [&]<bool kAsk, bool kMasked, bool kDropout, class E>() {
      const auto all = [&]<int kKeys>() {
        using Rows = RowExponentials<K, kAsk, kMasked, kDropout, E, kKeys>;
        PiecesBeside<Rows> rows(Rows(half, t, w.ahead), steps);
        compute(rows);
        done = rows.of.finish();
        if constexpr (kIsUnscaled<E>) {
          uint64_t large = large_levels<K>(half);
          if (!large) return;
          RowExponentials<K, false, kMasked, kDropout, NoBias, kKeys> scaled(half, t, w.ahead);
          for (; large; large &= large - 1) scaled.piece(__builtin_ctzll(large));
          done &= scaled.finish();
        }
      };
      if constexpr (K::kOneLimb && kMasked) {
        if (half.reach <= kTile / 2) return all.template operator()<kTile / 2>();
      }
      all.template operator()<kTile>();
    };
    const auto by_bias_type = [&]<class E>() {
      by_masks(Seen{half.masked ? half.seen : nullptr}, Seen{half.kept},
               [&]<bool kMasked, bool kDropout>() {
                 if constexpr (kMayAsk) {
                   if (w.ahead.waiting())
                     return by_keys.template operator()<true, kMasked, kDropout, E>();
                 }
                 by_keys.template operator()<false, kMasked, kDropout, E>();
               });
    };
    // A scale of no more than this can be multiplied by log2 e.
    const bool unscaled = half.scale != 1 && -1e38f < half.scale && half.scale < 1e38f;
    by_bias<K>(half.bias, by_bias_type, unscaled);
    return done;
  };
  if (!half.started || lacks_level<K>(half)) raise_rows<K>(a, t, half);
  if (!attempt.template operator()<true>(run)) {
    raise_rows<K>(a, t, half);
    attempt.template operator()<false>([](auto& rows)
                                           __attribute__((always_inline)) { rows.finish(); });
  }
  *half.sums = {half.sums->next, half.sums->now};
}

}  // namespace
}  // namespace mha_ext::cpu

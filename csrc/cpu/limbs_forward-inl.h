// A tile of forward whose products are multiplied in limbs: what is not a product is computed
// beside one.
namespace mha_ext::cpu {
namespace {

// softmax_pairs of rows of two vectors beside another product, run(beside), of so many steps. A
// bias that all queries share is added to the scores where the exponentials are computed, so that
// nobody touches once more what the unit has stored.
template <class K, int64_t kLd, class Product>
void softmax_beside(int64_t steps, const Product& run, bool started, typename K::T* s,
                    const typename K::T* bias, Seen seen, Seen kept, typename K::T* m,
                    typename K::T* l, typename K::T* out, int64_t value_dim,
                    typename K::Unit* pairs, Ahead& ahead) {
  using X = typename K::X;
  constexpr int NV = 2;
  static_assert(kLd == NV * K::kLanes);
  const auto add_bias = [&] {
    for (int64_t n = 0; bias && n < kTile; n++)
      for (typename K::T* to = s + n * kLd; to < s + (n + 1) * kLd; to += K::kLanes)
        X::store(to, add_to_score<X>(X::load(to), X::set(bias[n])));
    bias = nullptr;
  };
  bool done = false;
  const auto beside = [&]<bool kAsk, bool kMasked, bool kDropout, bool kBias>() {
    using Of = PairExponentials<K, NV, kLd, true, kAsk, kMasked, kDropout, kBias>;
    KeysBeside<Of> exponentials(Of(s, 1, seen, kept, m, pairs, ahead, bias), steps);
    run(exponentials);
    exponentials.finish();
    done = exponentials.of.finish(l);
  };
  by_masks(seen, kept, [&]<bool kMasked, bool kDropout>() {
    if (!started || (!kMasked && lacks_level<K, NV>(m))) {
      add_bias();
      raise_levels<K, NV, kMasked, kLd>(kTile, s, nullptr, seen, m, l, out, value_dim);
    }
    if (ahead.waiting())
      bias ? beside.template operator()<true, kMasked, kDropout, true>()
           : beside.template operator()<true, kMasked, kDropout, false>();
    else
      bias ? beside.template operator()<false, kMasked, kDropout, true>()
           : beside.template operator()<false, kMasked, kDropout, false>();
  });
  if (done) return;
  add_bias();
  softmax_pairs<K, kLd>(NV, false, s, 1, seen, kept, m, l, out, value_dim, pairs, ahead,
                        NothingBeside{});
}

// Half a block of queries and a tile of keys whose scores are there.
template <class K>
struct PendingHalf {
  float* s = nullptr;           // [key][kHalfRow]; nothing waits without
  const float* bias = nullptr;  // [key], that is not in s yet
  const typename K::S* value = nullptr;
  float *m, *l, *out;
  Seen seen, kept;
  int64_t vectors, queries;
  bool started;
};

// What forward keeps in limbs: of the tile, of half of its weights, and of each block of queries.
template <class K>
struct ForwardLimbs<K, true> {
  Limbs key, value, weights, query[kGroup];
  float* sums[2];  // [value_dim][kHalfRow] of the last products, of which one is pending
  PendingSum<K> pending;
  PendingHalf<K> half;
  const typename K::S* value_of = nullptr;  // of which rows `value` is
  uint64_t *other_bits, *other_keep;        // of the tile before, which may still be wanted
  float bias[2][kTile];                     // of the keys of the tile, for each half
  int turn = 0;                             // of the two halves that w.s has room for
  bool packed, query_packed[kGroup];

  ForwardLimbs(const Attention& a, Arena& arena) {
    const bool taken = takes_limbs<K>(a, a.queries);
    const auto take = [&](int64_t along, int64_t across) {
      Limbs t;
      t.data = arena.take<uint32_t>(taken ? limbs_size<K>(along, across) : 0);
      return t;
    };
    key = take(a.head_dim, kTile);
    value = take(kTile, a.value_dim);
    weights = take(kTile, kHalfRow);
    weights.row = kHalfRow;  // as store_pairs of Weights has them
    weights.plane = kTile / 2 * kHalfRow;
    weights.step = kLimbsStep / 2 * kHalfRow;
    weights.across = K::kLanes;
    for (int64_t i = 0; i < min_of(kGroup, ceil_div(a.queries, kTile)); i++)
      query[i] = take(a.head_dim, kRow);
    for (float*& sum : sums)
      sum = arena.take<float>(taken ? round_up(a.value_dim, K::kLanes) * kHalfRow : 0);
    other_bits = arena.take<uint64_t>(kTile);
    other_keep = arena.take<uint64_t>(kTile);
  }
};

// A product of scores takes so many steps. Of many it takes long enough for exponentials beside it;
// beside fewer they take as long as alone, since while the unit works one port less multiplies
// vectors.
template <class K>
int64_t score_steps(const Attention& a) {
  return kTile / 32 * ceil_div(a.head_dim, kLimbsStep) * K::Dot::kSteps;
}
constexpr int64_t kManySteps = 12;
template <class K>
bool computes_beside(const Attention& a, int64_t vectors) {
  return vectors == 2 && score_steps<K>(a) >= kManySteps;
}

// Runs a product of scores, product(beside), and beside it the exponentials of the half that waits;
// then its values, and beside them the sums of the half before. Or one after the other, with these
// sums beside the exponentials.
template <class K, class Product>
void finish_half(const Attention& a, const Product& product, ForwardScratch<K>& w) {
  using Pairs = Kind<typename K::X, typename K::Dot::Weights, float>;
  ForwardLimbs<K>& t = w.limbs;
  const PendingHalf<K> half = t.half;
  t.half.s = nullptr;
  NothingBeside nothing;
  if (!half.s) return product(nothing);
  if (t.pending.out == half.out) t.pending.finish();  // before its level may rise
  const bool beside = computes_beside<K>(a, half.vectors);
  const int64_t rescaled = half.started ? a.value_dim : 0;
  if (beside) {
    softmax_beside<Pairs, kHalfRow>(score_steps<K>(a), product, half.started, half.s, half.bias,
                                    half.seen, half.kept, half.m, half.l, half.out, rescaled,
                                    t.weights.data, w.ahead);
  } else {
    product(nothing);
    t.pending.beside(kTile / 2 * half.vectors);
    softmax_pairs<Pairs, kHalfRow>(half.vectors, half.started, half.s, 1, half.seen, half.kept,
                                   half.m, half.l, half.out, rescaled, t.weights.data, w.ahead,
                                   t.pending);
    t.pending.finish();
  }
  if (t.value_of != half.value)
    columns_in_limbs<K>(half.value, a.value.row, kTile, a.value_dim, kLimbsScale, t.value);
  t.value_of = half.value;
  float* const sum = t.pending.rows > 0 && t.pending.sum == t.sums[0] ? t.sums[1] : t.sums[0];
  product_beside_sum<K>(t.value, a.value_dim, t.weights, 0, half.vectors, sum, kHalfRow, t.pending);
  t.pending = {sum,      half.out, a.value_dim,     half.vectors,
               kHalfRow, kRow,     1 / kLimbsScale, !half.started};
  if (t.value.unusual) {
    t.pending.finish();
    add_unusual_values<K>(half.value, a.value.row, a.value_dim, t.weights, half.seen.bits,
                          half.seen.first, half.queries, half.out);
  }
}
// All that waits.
template <class K>
void finish_limbs(const Attention& a, ForwardScratch<K>& w) {
  finish_half<K>(a, [](auto&) {}, w);
  w.limbs.pending.finish();
}

// The bias of keys that all queries share; false where it is another, or hides a key.
template <class K, class E>
bool bias_of_keys(const Attention& a, int64_t b, int64_t h, int64_t k0, float* to) {
  if (a.bias.query != 0) return false;
  const E* const from =
      (const E*)a.bias.data + b * a.bias.batch + h * a.bias.head + k0 * a.bias.key;
  bool hides = false;
  for (int64_t n = 0; n < kTile; n++) {
    to[n] = widen(from[n * a.bias.key]);
    hides |= to[n] == -(float)INFINITY;
  }
  return !hides;
}

// As matrix_tile, of the i-th block: m, l and `out` over 64 more keys, by halves of the queries.
// The last one is left to wait.
template <class K>
void limbs_tile(const Attention& a, int64_t b, int64_t h, int64_t k0, int64_t i, Visibility visible,
                ForwardScratch<K>& w) {
  ForwardLimbs<K>& t = w.limbs;
  const QueryBlock<K>& q = w.blocks[i];
  const int64_t kv = kv_head(a, h);
  const typename K::S* const key = row_of<K>(a.key, b, kv, k0);
  if (!t.packed) rows_in_limbs<K>(key, a.key.row, kTile, a.head_dim, 1, t.key);
  t.packed = true;
  Limbs& query = t.query[i];
  if (!t.query_packed[i])
    lanes_in_limbs<K>(q.query, kRow, a.head_dim, q.vectors * K::kLanes, 1, query);
  t.query_packed[i] = true;
  if (a.dropout.seed) dropout_tile<K>(a, b, h, q.q0, q.rows, k0, kTile, w.keep);
  const Seen kept{a.dropout.seed ? w.keep : nullptr};
  for (int64_t lane = 0; lane < q.vectors * K::kLanes; lane += kHalfRow) {
    const int64_t vectors = min_of(kHalfRow / K::kLanes, q.vectors - lane / K::kLanes);
    const int64_t queries = min_of(kHalfRow, q.rows - lane);
    if (t.half.s) t.turn = 1 - t.turn;
    float* const s = w.s + t.turn * kTile * kHalfRow;
    const auto product = [&](auto& beside) __attribute__((always_inline)) {
      K::Dot::product_beside(t.key, kTile, query, lane, vectors, s, kHalfRow, beside);
    };
    finish_half<K>(a, product, w);
    if (t.key.unusual || query.unusual)
      add_unusual_scores<K, kHalfRow>(key, a.key.row, a.head_dim, q.query + lane, queries, s);
    const float* bias = nullptr;
    if (a.bias.data && computes_beside<K>(a, vectors)) {
      const auto of_keys =
          a.bias_is_float32 ? bias_of_keys<K, float> : bias_of_keys<K, typename K::S>;
      if (of_keys(a, b, h, k0, t.bias[t.turn])) bias = t.bias[t.turn];
    }
    if (a.bias.data && !bias)
      visible = add_biases<K, kHalfRow>(a, b, h, q.q0, q.rows, lane, queries, k0, kTile, visible,
                                        w.bits, s, w.extra);
    const Seen seen{visible == Visibility::kPartial ? w.bits : nullptr};
    t.half = {s,
              bias,
              row_of<K>(a.value, b, kv, k0),
              q.m + lane,
              q.l + lane,
              q.out + lane,
              seen.from(0, lane),
              kept.from(0, lane),
              vectors,
              queries,
              q.started};
    if (!computes_beside<K>(a, vectors)) finish_half<K>(a, [](auto&) {}, w);
  }
  const auto exchange = [](uint64_t*& x, uint64_t*& y) {
    uint64_t* const one = x;
    x = y;
    y = one;
  };
  exchange(w.bits, t.other_bits);
  exchange(w.keep, t.other_keep);
}

}  // namespace
}  // namespace mha_ext::cpu

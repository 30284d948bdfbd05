// A tile of forward whose products are multiplied in limbs: what is not a product is computed
// beside one.
namespace mha_ext::cpu {
namespace {

// A product of scores takes so many steps. Of many it takes long enough for exponentials beside it;
// beside fewer they take as long as alone, since while the unit works one port less multiplies
// vectors.
template <class K>
int64_t score_steps(const Attention& a) {
  return kTile / 32 * ceil_div(a.head_dim, kLimbsStep) * K::Dot::kSteps;
}
constexpr int64_t kManySteps = 12;
template <class K>
bool computes_beside(const Attention& a, int64_t queries) {
  return queries > K::kLanes && score_steps<K>(a) >= kManySteps;
}

// out[query][ld columns] += P V, of the terms of V that are not usual and of pairs that are seen.
template <class K>
void add_unusual_values(const Attention& a, const ScoredHalf<K>& half, const Limbs& p, int64_t ld) {
  for (int64_t n = 0; n < kTile; n++)
    for (int64_t d = 0; d < a.value_dim; d++) {
      const float x = widen(half.value[n * a.value.row + d]);
      if (usual(x)) continue;
      for (int64_t r = 0; r < half.queries; r++) {
        if (half.masked && !(half.seen[r] >> n & 1)) continue;
        const uint32_t* const pair = p.at(n / kLimbsStep, r / K::kLanes) + r % K::kLanes * p.row;
        const bool second = n % kLimbsStep >= K::kLanes;
        float weight = 0;
        for (int i = K::kLimbs - 1; i >= 0; i--) {
          const uint32_t both = pair[i * p.plane + n % K::kLanes];
          weight += widen(BFloat16{(uint16_t)(second ? both >> 16 : both)});
        }
        half.out[r * ld + d] += weight * x;
      }
    }
}

// Runs a product of scores, product(beside), and beside it the exponentials of the half that waits;
// then its values, and beside them the sums of the half before. Or one after the other, with these
// sums beside the exponentials.
template <class K, class Product>
void finish_half(const Attention& a, const Product& product, ForwardScratch<K>& w) {
  ForwardLimbs<K>& t = w.limbs;
  ScoredHalf<K> half = t.half;
  t.half.s = nullptr;
  NothingBeside nothing;
  if (!half.s) return product(nothing);
  if (t.pending.out == half.out) t.pending.finish();  // before its level may rise
  if (computes_beside<K>(a, half.queries)) {
    softmax_rows<K>(a, half, score_steps<K>(a), w, [&](auto& rows) __attribute__((always_inline)) {
      product(rows);
      rows.finish();
    });
  } else {
    product(nothing);
    PendingSum<K>& pending = t.pending;
    pending.beside(half.queries);
    softmax_rows<K>(a, half, half.queries, w, [&](auto& rows) __attribute__((always_inline)) {
      for (int64_t r = 0; r < half.queries; r++) {
        pending.step();
        rows.step();
      }
    });
    pending.finish();
  }
  if (t.value_of != half.value)
    lanes_in_limbs<K>(half.value, a.value.row, kTile, a.value_dim, kLimbsScale, t.value);
  t.value_of = half.value;
  const int64_t ld = padded<K>(a.value_dim), vectors = ld / K::kLanes;
  float* const sum = t.pending.rows > 0 && t.pending.sum == t.sums[0] ? t.sums[1] : t.sums[0];
  product_beside_sum<K, true>(t.weights, half.queries, t.value, 0, vectors, sum, ld, t.pending);
  const int64_t together = vectors % 2 ? 1 : 2, numbers = together * K::kLanes;
  t.pending = {sum,
               half.out,
               half.queries * vectors / together,
               together,
               numbers,
               numbers,
               1 / kLimbsScale,
               !half.started};
  if (t.value.unusual) {
    t.pending.finish();
    add_unusual_values<K>(a, half, t.weights, ld);
  }
}
// All that waits; then l of the i-th block lacks nothing.
template <class K>
void finish_limbs(const Attention& a, int64_t i, ForwardScratch<K>& w) {
  using X = typename K::X;
  ForwardLimbs<K>& t = w.limbs;
  finish_half<K>(a, [](auto&) {}, w);
  t.pending.finish();
  if (!t.query_packed[i]) return;
  float* l = w.blocks[i].l;
  for (const HalfSums& half : t.half_sums[i]) {
    for (int64_t r = 0; r < kHalfRow; r += K::kLanes, l += K::kLanes) {
      typename X::V rows[K::kLanes];
#pragma GCC unroll 16
      for (int n = 0; n < K::kLanes; n++) rows[n] = X::load(half.now + (r + n) * K::kLanes);
      X::store(l, X::add(X::load(l), X::sum_each(rows)));
    }
    __builtin_memset(half.now, 0, kHalfRow * K::kLanes * sizeof(float));
  }
}

// The bias of so many queries from q0 on; what is no row of neighbours is copied to be one.
template <class K>
BiasRows bias_rows(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t queries,
                   int64_t k0, float* scratch, int64_t ahead = 0) {
  using X = typename K::X;
  if (!a.bias.data) return {};
  const Pairs& bias = a.bias;
  const int64_t at = b * bias.batch + h * bias.head + q0 * bias.query + k0 * bias.key;
  const auto rows = [&]<class E>() {
    const E* const from = (const E*)bias.data + at;
    if (bias.key == 1)
      return BiasRows{from, bias.query, a.bias_is_float32, ahead * (int64_t)sizeof(E)};
    static_assert(kRow == kTile);  // as transpose_in has it
    if (bias.query == 1) {
      transpose_in<X>(from, bias.key, kTile, queries, scratch);
    } else {
      for (int64_t r = 0; r < queries; r++) {
        const E* const row = from + r * bias.query;
        for (int64_t n = 0; bias.key == 0 && n < kTile; n += K::kLanes)
          X::store(scratch + r * kTile + n, X::set(widen(*row)));
        for (int64_t n = 0; bias.key != 0 && n < kTile; n++)
          scratch[r * kTile + n] = widen(row[n * bias.key]);
      }
    }
    return BiasRows{scratch, kTile, true};
  };
  return a.bias_is_float32 ? rows.template operator()<float>()
                           : rows.template operator()<typename K::S>();
}

// Numbers from a tile to the one that comes next.
inline int64_t numbers_ahead(const Pairs& pairs, TileStart from, TileStart to) {
  return (to.q0 - from.q0) * pairs.query + (to.k0 - from.k0) * pairs.key;
}
// What the queries of a block see of a tile in limbs, which no band cuts: bit n of the next tile's
// seen[r], of key n.
template <class K>
Visibility limbs_visibility(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows,
                            int64_t k0, TileStart next, ForwardLimbs<K>& t) {
  using Bytes = typename K::X::U::Bytes;
  const bool biased = a.bias.data && t.bias_hides;
  if (!a.mask.data && !biased) return Visibility::kFull;
  uint64_t* const seen = t.seen[t.side];
  const int32_t size = a.mask.item_size;
  const char* const mask =
      (const char*)a.mask.data +
      (b * a.mask.batch + h * a.mask.head + q0 * a.mask.query + k0 * a.mask.key) * size;
  if (!a.mask.data) {
    for (int64_t r = 0; r < rows; r++) seen[r] = ~0ull;
  } else if (takes_bytes<Bytes>(a.mask.key, size, kTile)) {  // in a loop that asks nothing else
    const int64_t ahead = numbers_ahead(a.mask, {q0, k0}, next);
    for (int64_t r = 0; r < rows; r++) {
      const char* const row = mask + r * a.mask.query;
      __builtin_prefetch(row + ahead, 0, 2);
      seen[r] = Bytes::nonzero(row);
    }
  } else {
    for (int64_t r = 0; r < rows; r++)
      seen[r] = mask_row(mask + r * a.mask.query * size, a.mask.key, size, kTile);
  }
  for (int64_t lane = 0; biased && lane < rows; lane += kHalfRow) {
    const int64_t queries = min_of(kHalfRow, rows - lane);
    hide_by_bias<K>(bias_rows<K>(a, b, h, q0 + lane, queries, k0, t.bias[1 - t.turn]), queries,
                    seen + lane);
  }
  uint64_t any = 0, every = ~0ull;
  for (int64_t r = 0; r < rows; r++) {
    any |= seen[r];
    every &= seen[r];
  }
  return !any ? Visibility::kEmpty : ~every ? Visibility::kPartial : Visibility::kFull;
}

// m, l and `out` of the i-th block over 64 more keys, by halves of its queries. The last one is
// left to wait.
template <class K>
void limbs_tile(const Attention& a, int64_t b, int64_t h, int64_t k0, int64_t i, TileStart next,
                Visibility visible, ForwardScratch<K>& w) {
  ForwardLimbs<K>& t = w.limbs;
  QueryBlock<K>& q = w.blocks[i];
  const int64_t kv = kv_head(a, h), ld = padded<K>(a.value_dim);
  const typename K::S* const key = row_of<K>(a.key, b, kv, k0);
  if (!t.packed) turned_in_limbs<K, false>(key, a.key.row, kTile, a.head_dim, 1, t.key);
  t.packed = true;
  Limbs& query = t.query[i];
  if (!t.query_packed[i]) {
    rows_in_limbs<K>(row_of<K>(a.query, b, h, q.q0), a.query.row, q.rows, a.head_dim, 1, query,
                     (float)a.scale);
    for (const HalfSums& half : t.half_sums[i])
      __builtin_memset(half.now, 0, kHalfRow * K::kLanes * sizeof(float));
  }
  t.query_packed[i] = true;
  uint64_t *const seen = t.seen[t.side], *const keep = t.keep[t.side];
  if (a.dropout.seed) dropout_rows<K>(a, b, h, q.q0, q.rows, k0, keep);
  for (int64_t lane = 0; lane < q.rows; lane += kHalfRow) {
    const int64_t queries = min_of(kHalfRow, q.rows - lane);
    if (t.half.s) t.turn = 1 - t.turn;
    float* const s = w.s + t.turn * kHalfRow * kTile;
    const auto product = [&](auto& beside) __attribute__((always_inline)) {
      K::Dot::template product_beside<true>(query.from(lane / K::kLanes), queries, t.key, 0,
                                            kTile / K::kLanes, s, kTile, beside);
    };
    finish_half<K>(a, product, w);
    if (t.key.unusual || query.unusual) {
      pack_query_once<K>(a, b, h, q);
      add_unusual_scores<K, 1, kTile>(key, a.key.row, a.head_dim, q.query + lane, queries, s);
    }
    t.half = {s,
              row_of<K>(a.value, b, kv, k0),
              bias_rows<K>(a, b, h, q.q0 + lane, queries, k0, t.bias[t.turn],
                           numbers_ahead(a.bias, {q.q0, k0}, next)),
              q.m + lane,
              q.l + lane,
              q.out + lane * ld,
              &t.half_sums[i][lane / kHalfRow],
              seen + lane,
              a.dropout.seed ? keep + lane : nullptr,
              queries,
              visible == Visibility::kPartial,
              q.started};
    if (!computes_beside<K>(a, queries)) finish_half<K>(a, [](auto&) {}, w);
  }
  t.side = 1 - t.side;
}

}  // namespace
}  // namespace mha_ext::cpu

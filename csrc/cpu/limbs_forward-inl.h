// A tile of forward whose products are multiplied in limbs: what is not a product is computed
// beside one.
namespace mha_ext::cpu {
namespace {

// A product of scores takes so many steps. Of many it takes long enough for exponentials beside it;
// beside fewer they take as long as alone, since while the unit works one port less multiplies
// vectors. One limb has few steps, but fewer instructions beside them, too.
template <class K>
int64_t score_steps(const Attention& a) {
  return kTile / 32 * ceil_div(a.head_dim, kLimbsStep) * K::Dot::InLimbs::kSteps;
}
constexpr int64_t kManySteps = 12;
template <class K>
bool computes_beside(const Attention& a, int64_t queries) {
  return K::kOneLimb || (queries > K::kLanes && score_steps<K>(a) >= kManySteps);
}

// K, V and Q of a tile in limbs, whose `usual` numbers are multiplied. One limb leaves numbers as
// they are, in pairs of neighbours along t. The scores of K and Q take what is not finite as it is
// then, since a hidden pair's is not looked at; of V it is not usual, once some pair is hidden.
template <class K>
void cut_keys(const Attention& a, const typename K::S* from, int64_t keys, ForwardScratch<K>& w) {
  Limbs& to = w.limbs.key;
  if constexpr (K::kOneLimb) {
    pack_lanes<K>(from, a.key.row, keys, a.head_dim, to.data);
    to = {to.data, kRow, 0, kRow * K::kLanes, K::kLanes, units_of<K>(a.head_dim) / K::kLanes};
  } else {
    turned_in_limbs<K, false>(from, a.key.row, kTile, a.head_dim, 1, to);
  }
}
template <class K>
void cut_values(const Attention& a, const ScoredHalf<K>& half, ForwardScratch<K>& w) {
  ForwardLimbs<K>& t = w.limbs;
  const bool there = t.value_of == half.value;
  if constexpr (K::kOneLimb) {
    const int64_t ld = t.out_row, width = a.value_dim, units = units_of<K>(half.keys);
    const auto pack = [&](const typename K::S* from, int64_t stride) {
      pack_rows<K>(from, stride, half.keys, width, t.value.data, ld);
    };
    if (!there) {
      pack(half.value, a.value.row);
      t.value = {t.value.data, ld, 0, ld * K::kLanes, K::kLanes, units / K::kLanes};
      t.value_checked = false;
    }
    if (half.masked && !t.value_checked) {
      t.value_checked = true;
      t.value.unusual = !all_finite<K>(half.value, a.value.row, half.keys, width);
      if (t.value.unusual) {
        clean_copy<K>(half.value, a.value.row, half.keys, width, w.clean);
        pack(w.clean, width);
      }
    }
  } else if (!there) {
    lanes_in_limbs<K>(half.value, a.value.row, kTile, a.value_dim, kLimbsScale, t.value);
  }
  t.value_of = half.value;
}
template <class K>
void cut_queries(const Attention& a, int64_t b, int64_t h, int64_t i, ForwardScratch<K>& w) {
  const QueryBlock<K>& q = w.blocks[i];
  const typename K::S* const from = row_of<K>(a.query, b, h, q.q0);
  Limbs& to = w.limbs.query[i];
  if constexpr (K::kOneLimb) {
    const int64_t units = units_of<K>(a.head_dim);
    const Operand rows = rows_operand<K>(from, a.query.row, q.rows, a.head_dim, q.query);
    to = {(uint32_t*)rows.data, units, 0, K::kLanes, units * K::kLanes, units / K::kLanes};
  } else {
    rows_in_limbs<K>(from, a.query.row, q.rows, a.head_dim, 1, to, (float)a.scale);
  }
}

// P of the r-th query of half a block and of a key.
template <class K>
float weight_at(const Limbs& p, int64_t r, int64_t key) {
  const uint32_t* const row = p.at(key / kLimbsStep, r / K::kLanes) + r % K::kLanes * p.row;
  const int64_t n = key % kLimbsStep;
  const bool second = K::kOneLimb ? n % 2 : n >= K::kLanes;
  float weight = 0;
  for (int i = K::kLimbs - 1; i >= 0; i--) {
    const uint32_t both = row[i * p.plane + (K::kOneLimb ? n / 2 : n % K::kLanes)];
    weight += widen(BFloat16{(uint16_t)(second ? both >> 16 : both)});
  }
  return weight;
}
// out[query][ld columns] += P V, of the terms of V that are not usual and of pairs that are seen.
template <class K>
void add_unusual_values(const Attention& a, const ScoredHalf<K>& half, const Limbs& p, int64_t ld) {
  for (int64_t n = 0; n < half.keys; n++)
    for (int64_t d = 0; d < a.value_dim; d++) {
      const auto number = half.value[n * a.value.row + d];
      const float x = widen(number);
      if (K::kOneLimb ? finite<K>(number) : usual(x)) continue;
      for (int64_t r = 0; r < half.queries; r++)
        if (!half.masked || half.seen[r] >> n & 1)
          half.out[r * ld + d] += weight_at<K>(p, r, n) * x;
    }
}

// The values of a half whose weights are there. Of one limb the unit adds to `out` what it
// multiplies; of more these sums are left to wait, and those of the half before run beside.
template <class K>
void add_half(const Attention& a, const ScoredHalf<K>& half, ForwardScratch<K>& w) {
  ForwardLimbs<K>& t = w.limbs;
  cut_values<K>(a, half, w);
  const int64_t ld = t.out_row, vectors = ld / K::kLanes;
  if constexpr (K::kOneLimb) {
    using Products = typename K::Dot::InLimbs;
    t.weights.along = ceil_div(half.reach, kLimbsStep);
    if (half.started)
      Products::template product<true>(t.weights, half.queries, t.value, 0, vectors, half.out, ld);
    else
      Products::product(t.weights, half.queries, t.value, 0, vectors, half.out, ld);
  } else {
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
  }
  if (!t.value.unusual) return;
  t.pending.finish();
  add_unusual_values<K>(a, half, t.weights, ld);
}

// Runs a product of scores, product(beside), and beside it the exponentials of the half that waits;
// then its values. Or one after the other, with the sums of the half before beside the
// exponentials.
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
  add_half<K>(a, half, w);
}
// All that waits; then l of the i-th block lacks nothing.
template <class K>
void finish_limbs(const Attention& a, int64_t i, ForwardScratch<K>& w) {
  using X = typename K::X;
  ForwardLimbs<K>& t = w.limbs;
  t.asked = {};
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
                   int64_t k0, int64_t keys, float* scratch, int64_t ahead = 0) {
  using X = typename K::X;
  if (!a.bias.data) return {};
  const Pairs& bias = a.bias;
  const int64_t at = b * bias.batch + h * bias.head + q0 * bias.query + k0 * bias.key;
  const auto rows = [&]<class E>() {
    const E* const from = (const E*)bias.data + at;
    if (bias.key == 1 && keys == kTile)
      return BiasRows{from, bias.query, a.bias_is_float32, ahead * (int64_t)sizeof(E)};
    static_assert(kRow == kTile);  // as transpose_in has it
    if (bias.query == 1 && keys == kTile) {
      transpose_in<X>(from, bias.key, kTile, queries, scratch);
    } else {
      for (int64_t r = 0; r < queries; r++) {
        const E* const row = from + r * bias.query;
        for (int64_t n = 0; bias.key == 0 && n < kTile; n += K::kLanes)
          X::store(scratch + r * kTile + n, X::set(widen(*row)));
        for (int64_t n = 0; bias.key == 1 && n < kTile; n += K::kLanes)
          X::store(scratch + r * kTile + n, load_or_zero<X>(row + n, keys - n));
        for (int64_t n = 0; bias.key > 1 && n < kTile; n++)
          scratch[r * kTile + n] = n < keys ? widen(row[n * bias.key]) : 0;
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
// What the queries of a block see of a tile in limbs: bit n of the next tile's seen[r], of key n.
// No band cuts it, but for one limb.
template <class K>
Visibility limbs_visibility(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows,
                            int64_t k0, int64_t keys, TileStart next, ForwardLimbs<K>& t) {
  using Bytes = typename K::X::U::Bytes;
  const bool biased = a.bias.data && t.bias_hides;
  bool cut = false;
  if constexpr (K::kOneLimb) {
    const Range any = seen_by_any(a, b, q0, q0 + rows - 1);
    const Range all = seen_by_all(a, b, q0, q0 + rows - 1);
    if (any.begin >= k0 + keys || any.end <= k0) return Visibility::kEmpty;
    cut = all.begin > k0 || all.end < k0 + kTile;
  }
  if (!a.mask.data && !biased && !cut) return Visibility::kFull;
  uint64_t* const seen = t.seen[t.side];
  const int32_t size = a.mask.item_size;
  const char* const mask =
      (const char*)a.mask.data +
      (b * a.mask.batch + h * a.mask.head + q0 * a.mask.query + k0 * a.mask.key) * size;
  if (!a.mask.data) {
    for (int64_t r = 0; r < rows; r++) seen[r] = ~0ull;
  } else if (a.mask.query == 0) {
    const uint64_t row = mask_row<Bytes>(mask, a.mask.key, size, keys);
    for (int64_t r = 0; r < rows; r++) seen[r] = row;
  } else if (takes_bytes<Bytes>(a.mask.key, size, keys)) {  // in a loop that asks nothing else
    t.next_mask = {mask + numbers_ahead(a.mask, {q0, k0}, next), a.mask.query};
    for (int64_t r = 0; r < rows; r++) seen[r] = Bytes::nonzero(mask + r * a.mask.query);
  } else {
    for (int64_t r = 0; r < rows; r++)
      seen[r] = mask_row<Bytes>(mask + r * a.mask.query * size, a.mask.key, size, keys);
  }
  if (cut) {  // as band_keys has it
    const int64_t position = q0 + diagonal(a, b) - k0, count = min_of(keys, key_count(a, b) - k0);
    const int64_t left = a.band.left_bounded ? position - a.band.left : -rows;
    const int64_t right = a.band.right_bounded ? position + a.band.right + 1 : count;
    const bool moves = a.band.right_bounded;
    for (int64_t r = 0; r < rows; r++)
      seen[r] &= first_bits(max_of(0, min_of(count, right + (moves ? r : 0)))) &
                 ~first_bits(max_of(0, left + r));
  }
  for (int64_t lane = 0; biased && lane < rows; lane += kHalfRow) {
    const int64_t queries = min_of(kHalfRow, rows - lane);
    hide_by_bias<K>(bias_rows<K>(a, b, h, q0 + lane, queries, k0, keys, t.bias[1 - t.turn]),
                    queries, seen + lane);
  }
  uint64_t any = 0, every = ~0ull;
  for (int64_t r = 0; r < rows; r++) {
    any |= seen[r];
    every &= seen[r];
  }
  if (!any) t.next_mask.ask_all(0, rows);
  return !any ? Visibility::kEmpty : ~every ? Visibility::kPartial : Visibility::kFull;
}

// m, l and `out` of the i-th block over 64 more keys, by halves of its queries. The last one is
// left to wait.
template <class K>
void limbs_tile(const Attention& a, int64_t b, int64_t h, int64_t k0, int64_t keys, int64_t i,
                TileStart next, Visibility visible, ForwardScratch<K>& w) {
  ForwardLimbs<K>& t = w.limbs;
  QueryBlock<K>& q = w.blocks[i];
  const int64_t kv = kv_head(a, h), ld = padded<K>(a.value_dim);
  const typename K::S* const key = row_of<K>(a.key, b, kv, k0);
  if (!t.packed) cut_keys<K>(a, key, keys, w);
  t.packed = true;
  const Limbs& query = t.query[i];
  if (!t.query_packed[i]) {
    cut_queries<K>(a, b, h, i, w);
    for (const HalfSums& half : t.half_sums[i])
      __builtin_memset(half.now, 0, kHalfRow * K::kLanes * sizeof(float));
  }
  t.query_packed[i] = true;
  uint64_t *const seen = t.seen[t.side], *const keep = t.keep[t.side];
  if (a.dropout.seed) dropout_rows<K>(a, b, h, q.q0, q.rows, k0, keep);
  for (int64_t lane = 0; lane < q.rows; lane += kHalfRow) {
    const int64_t queries = min_of(kHalfRow, q.rows - lane);
    int64_t reach = keys;
    if (K::kOneLimb && visible == Visibility::kPartial) {
      uint64_t any = 0;
      for (int64_t r = lane; r < lane + queries; r++) any |= seen[r];
      if (!any && q.started) {
        t.next_mask.ask_all(lane, lane + queries);
        continue;
      }
      if (!(any >> kTile / 2)) reach = min_of(keys, kTile / 2);
    }
    if (t.half.s) t.turn = 1 - t.turn;
    float* const s = w.s + t.turn * kHalfRow * kTile;
    const auto product = [&](auto& beside) __attribute__((always_inline)) {
      K::Dot::InLimbs::template product_beside<true>(query.from(lane / K::kLanes), queries, t.key,
                                                     0, vectors_of<K>(reach), s, kTile, beside);
    };
    t.asked = t.next_mask;
    if (t.asked.first) t.asked.first += lane * t.asked.stride;
    finish_half<K>(a, product, w);
    if constexpr (K::kCut)
      if (t.key.unusual || query.unusual) {
        pack_query_once<K>(HeadRows<K>{a, b, h}, q);
        add_unusual_scores<K, 1, kTile>(key, a.key.row, a.head_dim, q.query + lane, queries, s);
      }
    t.half = {s,
              row_of<K>(a.value, b, kv, k0),
              keys,
              reach,
              bias_rows<K>(a, b, h, q.q0 + lane, queries, k0, keys, t.bias[t.turn],
                           numbers_ahead(a.bias, {q.q0, k0}, next)),
              q.m + lane,
              q.l + lane,
              q.out + lane * ld,
              &t.half_sums[i][lane / kHalfRow],
              seen + lane,
              a.dropout.seed ? keep + lane : nullptr,
              queries,
              K::kOneLimb ? (float)a.scale : 1,
              visible == Visibility::kPartial,
              q.started};
    if (!computes_beside<K>(a, queries)) finish_half<K>(a, [](auto&) {}, w);
  }
  t.side = 1 - t.side;
}

}  // namespace
}  // namespace mha_ext::cpu

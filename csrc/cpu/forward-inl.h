// Forward: one pass over the keys with a running maximum m and sum l (Milakov & Gimelshein 2018;
// Dao et al. 2022).
//   S = scale Q K^T + bias,  P = exp(S - m),  O = sum P V / l,  lse = m + log l
namespace mha_ext::cpu {
namespace {

// Whether what comes after all tiles up to `end` is asked for in this one: in the last, or, where
// that is short, in the one before, since a short one does not take long enough.
inline bool asks_for_what_follows(int64_t begin, int64_t end, bool first) {
  constexpr int64_t kShort = kTile / 2;
  const int64_t after = end - (begin + kTile);
  return after < kShort && (first || after >= -kShort);
}
// m, l and (with_values) the unnormalised output of rows [q0, q0 + rows), up to kGroup blocks, over
// the keys of `range`.
template <class K, class BlockRows>
void scan_keys(const BlockRows& of, int64_t q0, int64_t rows, Range range, bool with_values,
               ForwardScratch<K>& w) {
  using T = typename K::T;
  constexpr bool kLimbs = K::kLimbs > 0 && !BlockRows::kGroup;
  const Attention& a = of.a;
  const int64_t value_dim = with_values ? a.value_dim : 0, b = of.b, kv = of.kv();
  const int64_t count = ceil_div(rows, kTile);
  Range seen{a.keys, 0};
  for (int64_t i = 0; i < count; i++) {
    QueryBlock<K>& q = w.blocks[i];
    q.q0 = q0 + i * kTile;
    q.rows = min_of(kTile, q0 + rows - q.q0);
    q.vectors = vectors_of<K>(q.rows);
    q.started = q.packed = false;
    if constexpr (kLimbs) w.limbs.query_packed[i] = false;
    q.by_rows = with_values && sums_by_rows<K>(of, q.rows);
    q.seen = of.seen(q.q0, q.rows);
    if (q.seen.begin < q.seen.end)
      seen = {min_of(seen.begin, q.seen.begin), max_of(seen.end, q.seen.end)};
    for (int64_t r = 0; r < kRow; r++) {
      q.m[r] = -(T)INFINITY;
      q.l[r] = 0;
    }
  }
  seen = {max_of(seen.begin / kTile * kTile, range.begin), min_of(seen.end, range.end)};
  // One block of few queries asks for values beside those that it reads, and for keys beside those
  // that it reads once more.
  const bool alone = !K::kPairs && w.blocks[0].by_rows && rows <= kFewByRows<K>;
  const bool keys_beside =
      alone && rows > kWidthGroup && a.key.row == a.value.row && a.head_dim == a.value_dim;
  const NextHead next = of.next();
  const auto ask_tile = [&](int64_t batch, int64_t kv_head, int64_t first) {
    const int64_t exist = keys_in_tiles<K>(a, batch);
    if (!keys_beside) ask_rows<K>(a.key, batch, kv_head, first, exist, a.head_dim, w.ahead);
    if (!alone) ask_rows<K>(a.value, batch, kv_head, first, exist, value_dim, w.ahead);
  };
  for (int64_t k0 = seen.begin; k0 < seen.end; k0 += kTile) {
    const int64_t keys = min_of(kTile, keys_in_tiles<K>(a, b) - k0);
    const typename K::S* value = row_of<K>(a.value, b, kv, k0);
    Operand key_rows, value_columns;
    VectorRows<K> value_rows{};
    T old[kRow];
    bool asked = false, packed = false, checked = false, finite = true;
    if constexpr (kLimbs) w.limbs.packed = false;
    for (int64_t i = 0; i < count; i++) {
      QueryBlock<K>& q = w.blocks[i];
      const bool score_limbs = kLimbs && in_limbs<K>(a, b, q.q0, k0, keys);
      const bool limbs = score_limbs && with_values;
      const TileStart after = i + 1 < count           ? TileStart{q.q0 + kTile, k0}
                              : k0 + kTile < seen.end ? TileStart{q0, k0 + kTile}
                                                      : TileStart{q.q0, k0};
      Visibility visible;
      bool met = q.packed;
      if constexpr (kLimbs) {
        met |= w.limbs.query_packed[i];
        visible = limbs ? limbs_visibility<K>(a, b, of.h, q.q0, q.rows, k0, keys, after, w.limbs)
                        : of.visibility(q.q0, q.rows, k0, keys, w.bits);
      } else {
        visible = of.visibility(q.q0, q.rows, k0, keys, w.bits);
      }
      if (visible == Visibility::kEmpty) continue;
      if (!limbs && (after.q0 != q.q0 || after.k0 != k0)) of.ask_pairs(after.q0, after.k0, w.ahead);
      if (!met && i + 1 < count) of.ask_rows(a.query, q.q0 + kTile, q0 + rows, a.head_dim, w.ahead);
      if (!limbs) pack_query_once<K>(of, q);
      const Range* const bands = of.bands(q.q0, q.rows, k0, keys, w.bands);
      if (!asked && k0 + kTile < seen.end) ask_tile(b, kv, k0 + kTile);
      asked = true;
      if (!packed && !limbs) {
        key_rows =
            rows_operand<K>(row_of<K>(a.key, b, kv, k0), a.key.row, keys, a.head_dim, w.key, count);
        if (!q.by_rows && with_values)
          value_columns = columns_operand<K>(value, a.value.row, keys, a.value_dim, w.value, count);
        else if (q.rows > kFewByRows<K> && with_values)
          value_rows = vectors_operand<K>(value, a.value.row, keys, a.value_dim, w.value, count);
        packed = true;
      }
      if (asks_for_what_follows(k0, q.seen.end, k0 <= max_of(seen.begin, q.seen.begin))) {
        if (with_values) of.ask_rows(a.out, q.q0, q0 + rows, a.value_dim, w.ahead);
        if (q0 == 0 && asks_for_what_follows(q.q0, rows, i == 0) && next.batch < a.batch) {
          ask_rows<K>(a.query, next.batch, next.head, 0, a.queries, a.head_dim, w.ahead);
          if (next.other_keys) ask_tile(next.batch, kv_head(a, next.head), 0);
        }
      }
      const auto known_finite = [&] {
        if (!checked) finite = all_finite<K>(value, a.value.row, keys, a.value_dim);
        checked = true;
        return finite;
      };
      if constexpr (kLimbs) {
        if (limbs) {
          limbs_tile<K>(a, b, of.h, k0, keys, i, after, visible, w);
          q.started = true;
          continue;
        }
        finish_limbs<K>(a, i, w);
      }
      // Pairs, where all of the tile is there and no hidden pair meets what is not finite.
      constexpr bool kMayPair = K::kPairs && !K::kOneLimb;
      const bool whole = kMayPair && with_values && !bands && keys == kTile;
      T* const top = scores_are_product<K>(a, bands) && !score_limbs ? w.top : nullptr;
      visible = of.scores(q.q0, q.rows, k0, keys, q.query, key_rows, visible, w.bits, w.s, w.extra,
                          &w.ahead, bands, top);
      const bool partial = visible == Visibility::kPartial;
      const bool dropout = a.dropout.seed && with_values;
      if (dropout) of.dropout(q.q0, q.rows, k0, keys, w.keep);
      const Seen visible_pairs{partial ? w.bits : nullptr}, kept_pairs{dropout ? w.keep : nullptr};
      const int64_t rescaled = q.started && !q.by_rows ? value_dim : 0;
      if (q.by_rows) __builtin_memcpy(old, q.m, sizeof old);
      const bool paired = whole && (!partial || known_finite());
      if constexpr (kMayPair) {
        if (paired)
          softmax_pairs<K>(q.vectors, q.started, w.s, visible_pairs, kept_pairs, q.m, q.l, q.out,
                           rescaled, w.pairs);
      }
      if (!paired)
        for_bands<K>(bands, keys, q.vectors, [&](Range seen, int64_t first, int64_t count) {
          const int64_t lane = first * K::kLanes;
          if (seen.begin < seen.end)
            softmax_tile<K>(seen.end - seen.begin, count, w.s + seen.begin * kRow + lane, top,
                            visible_pairs.from(seen.begin, lane), kept_pairs.from(seen.begin, lane),
                            q.m + lane, q.l + lane, q.out + lane, rescaled);
        });
      if (!with_values) continue;
      const bool dirty = partial && !known_finite();
      if (q.by_rows) {
        const bool goes_on = k0 + kTile < seen.end, known = goes_on || next.batch < a.batch;
        const auto to_next = [&](const Rows& t) {
          return goes_on ? bytes_to<K>(t, b, kv, k0 + kTile, value)
                         : bytes_to<K>(t, next.batch, kv_head(a, next.head), 0, value);
        };
        const BlockValues<K> from{value, value_rows, alone && known ? to_next(a.value) : 0,
                                  keys_beside && known ? to_next(a.key) : 0};
        if constexpr (!K::kPairs) {
          if (q.started) rescale_rows<K>(q.rows, old, q.m, q.out, padded<K>(value_dim));
          add_values_by_rows<K>(a, from, q, keys, bands, dirty, w);
        }
      } else {
        add_values<K>(a, value, value_columns, q.rows, keys, bands, dirty, q.started, paired, w,
                      q.out);
      }
      q.started = true;
    }
  }
  if constexpr (kLimbs)
    for (int64_t i = 0; i < count; i++) finish_limbs<K>(a, i, w);
}

template <class K, class BlockRows>
void forward_rows(const BlockRows& of, int64_t q0, int64_t rows, int64_t range, void* states,
                  ForwardScratch<K>& w) {
  const Attention& a = of.a;
  const KeyRanges ranges = forward_ranges(a);
  const int64_t blocks = ceil_div(rows, kTile), bytes = block_state_bytes<K>(a);
  const auto scan = [&](int64_t i) {
    const Range keys{i * ranges.size, min_of(a.keys, (i + 1) * ranges.size)};
    scan_keys<K>(of, q0, rows, keys, true, w);
  };
  if (range != kEveryRange) {
    scan(range);
    return save_block<K>(a, w.blocks[0], (char*)states + range * bytes);
  }
  scan(0);
  if (ranges.count > 1) {
    for (int64_t i = 0; i < blocks; i++) save_block<K>(a, w.blocks[i], w.sums + i * bytes);
    for (int64_t range = 1; range < ranges.count; range++) {
      scan(range);
      for (int64_t i = 0; i < blocks; i++) {
        QueryBlock<K> sum = w.blocks[i];
        use_state<K>(w.sums + i * bytes, sum);
        merge_block<K>(a, w.blocks[i], sum);
      }
    }
    for (int64_t i = 0; i < blocks; i++) use_state<K>(w.sums + i * bytes, w.blocks[i]);
  }
  for (int64_t i = 0; i < blocks; i++) finish_block<K>(of, w.blocks[i], w);
}

template <class K, class BlockRows>
void merge_rows(const BlockRows& of, int64_t q0, int64_t rows, void* states, ForwardScratch<K>& w) {
  const Attention& a = of.a;
  QueryBlock<K>& q = w.blocks[0];
  q.q0 = q0;
  q.rows = rows;
  q.vectors = vectors_of<K>(rows);
  q.by_rows = sums_by_rows<K>(of, rows);
  use_state<K>(states, q);
  QueryBlock<K> next = q;
  for (int64_t i = 1; i < forward_ranges(a).count; i++) {
    use_state<K>((char*)states + i * block_state_bytes<K>(a), next);
    merge_block<K>(a, next, q);
  }
  finish_block<K>(of, q, w);
}

template <class K>
void forward(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t range,
             void* states, void* scratch) {
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  forward_rows<K>(HeadRows<K>{a, b, h}, q0, rows, range, states, w);
}
template <class K>
void merge(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, void* states,
           void* scratch) {
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  merge_rows<K>(HeadRows<K>{a, b, h}, q0, rows, states, w);
}

// The same for rows of a group.
template <class K>
void forward_group(const Attention& a, int64_t b, int64_t kv, int64_t first, int64_t rows,
                   int64_t range, void* states, void* scratch) {
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  const GroupScratch<K> room(a, arena);
  forward_rows<K>(GroupRows<K>(a, b, kv, room), first, rows, range, states, w);
}
template <class K>
void merge_group(const Attention& a, int64_t b, int64_t kv, int64_t first, int64_t rows,
                 void* states, void* scratch) {
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  const GroupScratch<K> room(a, arena);
  merge_rows<K>(GroupRows<K>(a, b, kv, room), first, rows, states, w);
}

}  // namespace
}  // namespace mha_ext::cpu

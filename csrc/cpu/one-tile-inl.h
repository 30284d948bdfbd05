// Forward where all keys fit into one tile. The output is never rescaled, so its lanes can lie
// along the width: it needs no transpose, and few queries leave no lanes empty.
namespace mha_ext::cpu {
namespace {

// tile[key][64 r] *= factor[r]
template <class K>
void scale_lanes(const typename K::T* factor, int64_t keys, int64_t vectors, typename K::T* tile) {
  using X = typename K::X;
  for (int64_t i = 0; i < vectors * K::kLanes; i += K::kLanes) {
    const typename X::V f = X::load(factor + i);
    for (int64_t n = 0; n < keys; n++) {
      typename K::T* p = tile + n * kRow + i;
      X::store(p, X::mul(f, X::load(p)));
    }
  }
}

// What the rows of a head need of its keys, or nullptr: all of them. The same for all heads but for
// lengths; without those, rows of one band need most of the keys.
template <class K>
class OneTileBands {
 public:
  OneTileBands(const Attention& a, int64_t keys, const QueryBlock<K>& q, Range* room)
      : a_(a), keys_(keys), q_(q), room_(room) {}
  const Range* of(int64_t b) {
    if (!known_ || a_.key_lengths) {
      cut_ = (a_.key_lengths || q_.rows > kBandQueries<K>) &&
             find_bands<K>(a_, b, q_.q0, q_.rows, 0, keys_, room_);
      known_ = true;
    }
    return cut_ ? room_ : nullptr;
  }

 private:
  const Attention& a_;
  const int64_t keys_;
  const QueryBlock<K>& q_;
  Range* room_;
  bool known_ = false, cut_ = false;
};

// S of the heads, in w.s, and the largest of each query, where scores_are_product, in w.top.
// Whether some pairs are hidden; then w.bits says which. prepare(b, h) is called before each head,
// and returns its keys. `asks`: for later heads, and `all` as asks_for_all says.
template <class K, class Prepare>
bool one_tile_scores(const Attention& a, Heads heads, const MetKeys& met, bool asks, bool all,
                     QueryBlock<K>& q, ForwardScratch<K>& w, const Prepare& prepare) {
  using T = typename K::T;
  T* const top = scores_are_product<K>(a, nullptr) ? w.top : nullptr;
  const int64_t keys = met.count;
  SeenByHeads seen(keys, w.bits);
  OneTileBands<K> bands(a, keys, q, w.bands);
  const bool plain = all_are_products<K>(a, met);
  const bool in_rows = takes_rows<K>(q.rows, keys, a.head_dim);
  const auto lanes = [&](int64_t b, int64_t h) {
    if (in_rows) return LaneRows<K>(row_of<K>(a.query, b, h, q.q0), a.query.row, (T)a.scale);
    pack_query<K>(a, b, h, q.q0, q.rows, q.query);
    return LaneRows<K>(q.query);
  };
  for_heads<K>(a, heads, q.rows, [&](int64_t, int64_t b, int64_t h, int64_t lane) {
    const Operand key_rows = prepare(b, h);
    LaneRows<K> query = lanes(b, h);
    const LaterHead next(a, b, h, heads.count);
    if (asks && next.batch < a.batch) {
      if (all || in_rows)
        ask_with_product<K>(a.query, next.batch, next.head, a.queries, a.head_dim, query, w.ahead);
      else
        ask_for<K>(a.query, next.batch, next.head, a.queries, a.head_dim);
      if (all) ask_head<K>(a.key, next.batch, kv_head(a, next.head), keys, a.head_dim, w.ahead);
    }
    if constexpr (kTakesRows<K>) {
      if (in_rows && plain) {  // the shortest way, for the shortest heads
        for (int64_t r = 0; top && r < padded<K>(q.rows); r++) top[lane + r] = -(T)INFINITY;
        product_of_rows<K, true>(query, q.rows, a.head_dim, key_rows, keys, w.s + lane,
                                 top ? top + lane : nullptr);
        w.ahead.ask_rest();
        return seen.add(Visibility::kFull, nullptr, q.rows, lane);
      }
    }
    uint64_t* const bits = w.head_bits;
    Visibility visible = visibility_of<K>(a, b, h, q.q0, q.rows, 0, keys, bits);
    if (visible != Visibility::kEmpty)
      visible =
          scores<K>(a, b, h, q.q0, q.rows, 0, keys, query, key_rows, visible, bits, w.s + lane,
                    w.extra, &w.ahead, top ? nullptr : bands.of(b), top ? top + lane : nullptr);
    w.ahead.ask_rest();
    seen.add(visible, bits, q.rows, lane);
  });
  return seen.partial();
}

template <class K>
void one_tile_lse(const Attention& a, Heads heads, const QueryBlock<K>& q) {
  using T = typename K::T;
  using X = typename K::X;
  T high[kRow], low[kRow];
  if (a.queries <= kTile) {
    const int64_t next = (heads.first + heads.count) * a.queries, count = heads.count * a.queries;
    ask_levels<K>(a.lse, next, count);
    ask_levels<K>(a.lse_low, next, count);
  }
  add_logs(q.vectors * K::kLanes, q.m, q.l, -(T)INFINITY, high, low);
  for_heads<K>(a, heads, q.rows, [&](int64_t i, int64_t, int64_t, int64_t lane) {
    const int64_t at = (heads.first + i) * a.queries + q.q0;
    for (int64_t r = 0; r < q.rows; r += K::kLanes) {
      store_up_to<X>((T*)a.lse + at + r, X::load(high + lane + r), q.rows - r);
      store_up_to<X>((T*)a.lse_low + at + r, X::load(low + lane + r), q.rows - r);
    }
  });
}

// P of the heads, dropped, in w.s, and lse.
template <class K>
void one_tile_weights(const Attention& a, Heads heads, int64_t keys, bool partial, QueryBlock<K>& q,
                      ForwardScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  const T* const top = scores_are_product<K>(a, nullptr) ? w.top : nullptr;
  softmax_one_tile<K>(keys, q.vectors, w.s, top, Seen{partial ? w.bits : nullptr}, q.m, q.l);
  const int64_t lanes = q.vectors * K::kLanes;
  if (a.lse) one_tile_lse<K>(a, heads, q);
  uint64_t rows = 0;
  for_heads<K>(a, heads, q.rows, [&](int64_t, int64_t, int64_t, int64_t lane) {
    rows |= first_bits(q.rows) << lane;
  });
  uint64_t empty = 0;
  for (int64_t i = 0; i < lanes; i += K::kLanes)
    empty |= X::bits(X::eq(X::load(q.l + i), X::zero())) << i;
  empty &= rows;
  if (empty && a.uniform_empty_rows) {  // P = 1 / Lk over all keys
    for (int64_t n = 0; n < keys; n++) {
      w.bits[n] = partial ? w.bits[n] | empty : rows;
      for (int64_t i = 0; i < lanes; i += K::kLanes) {
        T* p = w.s + n * kRow + i;
        X::store(p, X::select(X::mask(empty >> i), X::set((T)1 / (T)a.keys), X::load(p)));
      }
    }
  }
  for (uint64_t left = empty; left; left &= left - 1) q.l[__builtin_ctzll(left)] = 1;
  if (a.dropout.seed) {
    drop_heads<K>(a, heads, q.q0, q.rows, keys, w.head_bits, w.keep);
    select_tile<K>(w.keep, keys, q.vectors, 0, w.s);
  }
  const T kept = (T)a.dropout.keep_scale;
  for (int64_t r = 0; r < lanes; r++) q.l[r] = kept / q.l[r];
  scale_lanes<K>(q.l, keys, q.vectors, w.s);
}

template <class K>
void forward_one_tile(const Attention& a, Heads heads, int64_t q0, int64_t rows,
                      ForwardScratch<K>& w) {
  const MetKeys met(a, heads);
  const int64_t keys = met.count, columns = a.value_dim;
  const bool asks = a.queries <= kTile, all = asks && asks_for_all<K>(a, keys);
  QueryBlock<K>& q = w.blocks[0];
  Operand packed{nullptr, 0, 0};
  for (q.q0 = q0; q.q0 < q0 + rows; q.q0 += kTile) {
    q.rows = min_of(kTile, q0 + rows - q.q0);
    q.vectors = heads.count * vectors_of<K>(q.rows);
    const bool beside = !all && q.rows > kWidthGroup && a.key.row == a.value.row;
    const bool partial =
        one_tile_scores<K>(a, heads, met, asks, all, q, w, [&](int64_t b, int64_t h) {
          const typename K::S* key = row_of<K>(a.key, b, kv_head(a, h), 0);
          if ((K::kInPlace && rows <= kTile) || takes_rows<K>(q.rows, keys, a.head_dim))
            return Operand{(const char*)key, a.key.row * (int64_t)sizeof(*key),
                           sizeof(typename K::Unit)};
          if (!packed.data || heads.count > 1)
            packed = rows_operand<K>(key, a.key.row, keys, a.head_dim, w.key);
          return packed;
        });
    one_tile_weights<K>(a, heads, keys, partial, q, w);
    OneTileBands<K> bands(a, keys, q, w.bands);
    for_heads<K>(a, heads, q.rows, [&](int64_t, int64_t b, int64_t h, int64_t lane) {
      const typename K::S* value = row_of<K>(a.value, b, kv_head(a, h), 0);
      typename K::S* to = row_of<K>(a.out, b, h, q.q0);
      WidthRows<K> values{value, a.value.row, keys, columns};
      int64_t to_next = 0;
      const LaterHead next(a, b, h, heads.count);
      if (asks && next.batch < a.batch) {
        const int64_t kv = kv_head(a, next.head);
        to_next = bytes_to<K>(a.out, next.batch, next.head, 0, to);
        values.next = bytes_to<K>(a.value, next.batch, kv, 0, value);
        if (beside)
          values.then = bytes_to<K>(a.key, next.batch, kv, 0, value);
        else if (!all)
          ask_for<K>(a.key, next.batch, kv, keys, a.head_dim);
      }
      if (partial && !all_finite<K>(value, a.value.row, keys, columns)) {
        for (int64_t n = 0; n < keys; n++) w.head_bits[n] = w.bits[n] >> lane;
        width_selected<K, Contiguous::kAlongM>(values, q.rows, w.s + lane, w.head_bits, to,
                                               a.out.row, q.out);
        return;
      }
      // A row that sees nothing may need all keys.
      const Range* const some = partial && !a.uniform_empty_rows ? bands.of(b) : nullptr;
      if (!some)
        return width_rows<K, Contiguous::kAlongM, false, typename K::S, Cache::kFirst>(
            values, q.rows, w.s + lane, to, a.out.row, to_next);
      for_bands<K>(some, keys, vectors_of<K>(q.rows), [&](Range seen, int64_t i, int64_t count) {
        const int64_t r = i * K::kLanes;
        WidthRows<K> x = values;
        x.data += seen.begin * x.stride;
        x.count = seen.end - seen.begin;
        width_rows<K, Contiguous::kAlongM, false, typename K::S, Cache::kFirst>(
            x, min_of(q.rows - r, count * K::kLanes), w.s + seen.begin * kRow + lane + r,
            to + r * a.out.row, a.out.row, to_next);
      });
    });
  }
}

template <class K>
void forward_any(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t range,
                 void* states, void* scratch) {
  if (!fits_one_tile(a, K::kLimits)) return forward<K>(a, b, h, q0, rows, range, states, scratch);
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  forward_one_tile<K>(a, {b * a.heads + h, 1}, q0, rows, w);
}

template <class K>
void forward_heads(const Attention& a, int64_t first, int64_t count, void* scratch) {
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  forward_one_tile<K>(a, {first, count}, 0, a.queries, w);
}

}  // namespace
}  // namespace mha_ext::cpu

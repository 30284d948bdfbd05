// Backward, from dO and lse: five products a tile, two of scores (lanes: queries) and three of
// gradients.
//   P = exp(S - lse), Z = P o M, dP = (dO V^T) o M, dS = P o (dP - delta)
//   dV = Z^T dO, dK = scale dS^T Q, dQ = scale dS K, dB = dS, summed where the bias broadcasts
namespace mha_ext::cpu {
namespace {

// to += from, or to += 0: -0 becomes 0, as if a range that sees nothing had been added.
template <class K>
void add_lanes(const typename K::T* from, int64_t columns, int64_t vectors, typename K::T* to) {
  using X = typename K::X;
  for (int64_t c = 0; c < columns; c++)
    for (int64_t i = 0; i < vectors; i++) {
      typename K::T* p = to + c * kRow + i * K::kLanes;
      X::store(p, X::add(X::load(p), from ? X::load(from + (p - to)) : X::zero()));
    }
}

// Where the thread will most likely go on: with the next ranges of the head, or the next head.
struct NextPart {
  int64_t batch, kv_head, begin;
};
inline NextPart next_head(const Attention& a, const AttentionGrad& g, int64_t b, int64_t kv) {
  if (g.batch_first)
    return b + 1 < a.batch ? NextPart{b + 1, kv, 0}
                           : NextPart{kv + 1 < a.kv_heads ? 0 : b + 1, kv + 1, 0};
  return kv + 1 < a.kv_heads ? NextPart{b, kv + 1, 0} : NextPart{b + 1, 0, 0};
}
inline NextPart next_part(const Attention& a, const AttentionGrad& g, int64_t b, int64_t kv,
                          KeyPart part) {
  const KeyRanges ranges = grad_ranges(a);
  if (!part.apart && part.last < ranges.count) return {b, kv, part.last * ranges.size};
  NextPart next = next_head(a, g, b, kv);
  if (part.apart) next.begin = part.first * ranges.size;
  return next;
}

template <class K>
void backward(const Attention& a, const AttentionGrad& g, int64_t b, int64_t kv, KeyPart part,
              void* sums, void* scratch) {
  using T = typename K::T;
  using X = typename K::X;
  using Dot = typename K::Dot;
  [[maybe_unused]] const typename Dot::Session session;
  const KeyRanges ranges = grad_ranges(a);
  Arena arena{(char*)scratch};
  BackwardScratch<K> w(a, arena);
  const int64_t ld = padded<K>(a.head_dim), ldv = padded<K>(a.value_dim);
  const int64_t group = a.heads / a.kv_heads, blocks = ceil_div(a.queries, kTile);
  const bool write_bias = g.grad_bias.data && !g.adds_bias && bias_is_dense(a, g.grad_bias);
  const PastCaches<X> bias_past = bias_past_caches<K>(a, g.grad_bias, write_bias);
  // Of the heads that share a row of sums, the first.
  const auto begins_bias = [&](int64_t h) {
    return part.begins_bias && (g.grad_bias.head || h == kv * group);
  };
  const bool once_of_head = may_meet_once<K>(a);
  const bool uniform = a.uniform_empty_rows && !(once_of_head && !any_empty_row<K>(a, b, kv));
  const int64_t begin = part.first * ranges.size, last = min_of(a.keys, part.last * ranges.size);
  // Uniform rows see all keys.
  const int64_t end = end_of_existing<K>(a, b, begin, last, uniform);
  const int64_t length = max_of(0, end - begin);
  const bool with_delta = is_whole_head(a, part) && !g.grad_weights.data;
  const bool writes_query = !part.apart && part.last == ranges.count;
  const NextPart next = next_part(a, g, b, kv, part);
  w.once = once_of_head && !uniform;
  for (int64_t r = 0; r < kRow; r++) w.one[r] = 1;
  w.keeps_ds = g.grad_bias.data && Dot::kRowBlock == 1;
  if (K::kPairs && !w.once && (w.keeps_ds || !g.grad_bias.data)) {
    w.p_queries = w.p_rows;
    w.ds_queries = w.pair_rows;
    w.ds_keys = w.pairs;
  }
  if (uniform) {
    for (int64_t i = 0; i < length * ld; i++) w.grad_key[i] = 0;
    for (int64_t i = 0; i < length * ldv; i++) w.grad_value[i] = 0;
  }

  const typename K::S* key = row_of<K>(a.key, b, kv, begin);
  const typename K::S* value = row_of<K>(a.value, b, kv, begin);
  // What the products read of K and V: where a tile is met once, of that tile, and in place if they
  // can.
  Operand key_rows{}, value_rows{};
  const auto read_rows = [&](int64_t at, int64_t keys) {
    const auto operand = [&](const typename K::S* from, const Rows& t, int64_t width,
                             typename K::Unit* to) {
      if constexpr (K::kInPlace) {
        constexpr int64_t kItem = sizeof(typename K::S);
        if (w.once) return Operand{(const char*)(from + at * t.row), t.row * kItem, kItem};
      }
      return rows_operand<K>(from + at * t.row, t.row, keys, width, to, 2 * group * blocks);
    };
    key_rows = operand(key, a.key, a.head_dim, w.keys_in);
    value_rows = operand(value, a.value, a.value_dim, w.values_in);
  };
  const auto columns_of = [&](int64_t at, int64_t keys, Operand rows, typename K::Unit* to) {
    if constexpr (K::kPairs)
      return columns_operand<K>(key + at * a.key.row, a.key.row, keys, a.head_dim, to);
    else
      return Operand{rows.data, sizeof(typename K::Unit), rows.m_stride};
  };
  const auto rows_from = [](Operand o, int64_t at) {
    return Operand{o.data + at * o.m_stride, o.m_stride, o.t_stride};
  };
  if (!w.once) read_rows(0, length);
  for (int64_t at = 0; at < length; at += kTile) {
    if (!w.once)
      w.key_columns[at / kTile] =
          columns_of(at, min_of(kTile, length - at), rows_from(key_rows, at),
                     w.keys_across + at / 2 * padded<K>(a.head_dim));
    w.touched[at / kTile] = uniform;
    w.finite[at / kTile] = Finite::kUnknown;
  }

  // What is added for rows without any key comes before the tiles of its block.
  const int64_t most = w.p_queries && !uniform ? kTogether<K> : 1;
  BackwardScratch<K> of_others[kTogether<K>];
  GradBlock<K> together[kTogether<K>];
  together[0].w = &w;
  for (int64_t i = 1; i < most; i++) {
    of_others[i] = w.of_block(a, i);
    together[i].w = &of_others[i];
  }

  const auto ask_queries = [&](int64_t batch, int64_t head, int64_t first, Ahead& ahead) {
    ask_rows<K>(a.query, batch, head, first, a.queries, a.head_dim, ahead);
    ask_rows<K>(g.grad_out, batch, head, first, a.queries, a.value_dim, ahead);
    if (with_delta) ask_rows<K>(a.out, batch, head, first, a.queries, a.value_dim, ahead);
  };
  const auto begin_block = [&](GradBlock<K>& q, int64_t h, int64_t block) {
    const int64_t q0 = block * kTile, rows = min_of(kTile, a.queries - q0);
    if (uniform && g.grad_value.data) add_uniform_values<K>(a, g, b, h, q0, rows, begin, end, *q.w);
    q.block = block;
    q.q0 = q0;
    q.rows = rows;
    q.seen = seen_by_any(a, b, q0, q0 + rows - 1);
    q.query = row_of<K>(a.query, b, h, q0);
    q.grad_out = row_of<K>(g.grad_out, b, h, q0);
    q.query_in = q.grad_out_in = {};
    q.loaded = q.checked = q.skipped = false;
    q.finite = true;
    q.total = part.apart || !sums
                  ? q.w->total
                  : (T*)sums + ((h - kv * group) * blocks + block) * query_sum_size(a);
  };
  const auto begin_range = [&](GradBlock<K>& q, int64_t h, int64_t range, int64_t keys) {
    // The first sum of all is the total; a range of one tile is added to it by the product, except
    // on a matrix unit, which would add term by term.
    q.add_sum = range > 0 && keys <= kTile && Dot::kRowBlock == 1 && !K::kCut;
    q.sum = part.apart ? (T*)sums + (((h - kv * group) * ranges.count + range) * blocks + q.block) *
                                        query_sum_size(a)
            : range == 0 || q.add_sum ? q.total
                                      : q.w->grad_query;
    q.first = true;
  };
  const auto load_block = [&](GradBlock<K>& q, int64_t h) {
    if (with_delta) delta<K>(a, g, b, h, q.block);
    load_queries<K>(a, g, b, h, q.q0, q.rows, *q.w);
    if (!w.once) {
      const int64_t tiles = ceil_div(end - begin, kTile);
      q.query_in =
          vectors_operand<K>(q.query, a.query.row, q.rows, a.head_dim, q.w->query_rows, tiles);
      if (g.grad_out.data)
        q.grad_out_in = vectors_operand<K>(q.grad_out, g.grad_out.row, q.rows, a.value_dim,
                                           q.w->grad_out_rows, tiles);
    }
    q.loaded = true;
    if constexpr (K::kCut) w.limbs.packed = false;
  };
  // What is wanted soon, beside the products; a matrix unit asks for nothing there.
  const auto ask_ahead = [&](const GradBlock<K>& q, int64_t h, int64_t k0) {
    Ahead& ahead = q.w->ahead;
    const bool last_block = q.block + 1 == blocks, last_head = h + 1 == (kv + 1) * group;
    const bool ends = asks_for_what_follows(q.q0, a.queries, q.block == 0);
    // Before the last tile of keys: what is asked for earlier may be gone again.
    if (asks_for_what_follows(k0, min_of(q.seen.end, end), k0 <= max_of(begin, q.seen.begin))) {
      if (writes_query) ask_rows<K>(g.grad_query, b, h, q.q0, a.queries, a.head_dim, ahead);
      if (!last_block) ask_queries(b, h, q.q0 + kTile, ahead);
      if (ends && !last_head)
        ask_queries(b, h + 1, 0, ahead);
      else if (ends && next.batch < a.batch)
        ask_queries(next.batch, next.kv_head * group, 0, ahead);
    }
    if (ends && last_head) {
      ask_rows<K>(g.grad_key, b, kv, k0, end, a.head_dim, ahead);
      ask_rows<K>(g.grad_value, b, kv, k0, end, a.value_dim, ahead);
      if (next.batch < a.batch) {
        const int64_t then = next.begin + k0 - begin;
        const int64_t exist = keys_in_tiles<K>(a, next.batch);
        ask_rows<K>(a.key, next.batch, next.kv_head, then, exist, a.head_dim, ahead);
        ask_rows<K>(a.value, next.batch, next.kv_head, then, exist, a.value_dim, ahead);
      }
    }
    const bool more = k0 + kTile < end;
    const int64_t then = more ? q.q0 : q.q0 + most * kTile, from = more ? k0 + kTile : begin;
    if constexpr (Dot::kRowBlock > 1 || K::kCut)
      q.w->next = pairs_ahead<K>(a, b, h, then, from, q.w->p);
    else if (more || !last_block)
      ask_pairs<K>(a, b, h, then, from, ahead,
                   g.adds_bias && !begins_bias(h) ? g.grad_bias : Pairs{});
  };
  // Whether the keys of a tile hold what is not finite, or its queries.
  const auto is_dirty = [&](GradBlock<K>& q, int64_t at, int64_t keys) {
    if (!q.checked)
      q.finite =
          all_finite<K>(q.query, a.query.row, q.rows, a.head_dim) &&
          (!g.grad_out.data || all_finite<K>(q.grad_out, g.grad_out.row, q.rows, a.value_dim));
    q.checked = true;
    Finite& keys_finite = w.finite[at / kTile];
    if (keys_finite == Finite::kUnknown)
      keys_finite = all_finite<K>(key + at * a.key.row, a.key.row, keys, a.head_dim) ? Finite::kYes
                                                                                     : Finite::kNo;
    return !q.finite || keys_finite == Finite::kNo;
  };
  // A tile of blocks side by side whose gradients of keys are left to be added together; the
  // operands are those of the first.
  TilePlace<K> left{};
  BackwardScratch<K>* left_of = &w;
  const auto add_left = [&] {
    if (left.rows) add_key_gradients<K>(a, g, left, *left_of);
    left.rows = 0;
  };
  const auto keep_bias = [&](const GradBlock<K>& q, int64_t h, int64_t k0, int64_t keys,
                             const T* ds) {
    if (write_bias)
      store_bias_tile<K>(a, g, b, h, q.q0, q.rows, k0, keys, w.one, ds, bias_past.on);
    else if (g.adds_bias)
      add_bias_tile<K>(g, b, h, q.q0, q.rows, k0, keys, w.one, ds, begins_bias(h));
  };
  // A block's gradients of one tile, but for what is left.
  const auto add_tile = [&](GradBlock<K>& q, int64_t h, int64_t k0, int64_t keys) {
    BackwardScratch<K>& of = *q.w;
    const int64_t at = k0 - begin;
    if (k0 >= q.seen.end || k0 + keys <= q.seen.begin) return add_left();
    if (!q.loaded) load_block(q, h);
    ask_ahead(q, h, k0);
    if (w.once) read_rows(at, keys);
    const int64_t in = w.once ? 0 : at;
    of.sums = q.sum;
    TilePlace<K> tile{q.query,
                      q.grad_out,
                      q.query_in,
                      q.grad_out_in,
                      key + at * a.key.row,
                      row_of<K>(g.grad_key, b, kv, k0),
                      row_of<K>(g.grad_value, b, kv, k0),
                      q.rows,
                      keys,
                      at,
                      !w.touched[at / kTile],
                      q.sum,
                      q.first && (!q.add_sum || part.apart) ? Update::kStore : Update::kAddSum};
    if constexpr (K::kCut)
      if (!w.once && g.grad_out.data && !g.grad_weights.data && in_limbs<K>(a, b, q.q0, k0, keys)) {
        Visibility visible = visibility_of<K>(a, b, h, q.q0, q.rows, k0, keys, w.bits);
        if (visible == Visibility::kEmpty) return;
        limbs_gradient<K>(a, g, b, h, q.q0, k0, value + at * a.value.row, tile, visible,
                          g.grad_bias.data, w);
        keep_bias(q, h, k0, keys, w.limbs.ds_tile);
        q.first = false;
        w.touched[at / kTile] = true;
        return;
      }
    const Visibility visible =
        gradient_tile<K>(a, g, b, h, q.q0, q.rows, k0, keys, rows_from(key_rows, in),
                         rows_from(value_rows, in), of, [&] { return !is_dirty(q, at, keys); });
    if (visible == Visibility::kEmpty) return add_left();
    keep_bias(q, h, k0, keys, of.ds);

    q.first = false;
    w.touched[at / kTile] = true;
    if (visible == Visibility::kPartial && is_dirty(q, at, keys)) {
      add_left();
      add_dirty_gradients<K>(a, g, tile, of);
      return;
    }
    add_query_gradient<K>(
        a, g, tile,
        w.once ? columns_of(at, keys, key_rows, w.keys_across) : w.key_columns[at / kTile], of);
    if (w.once) return write_key_gradients<K>(a, g, tile, false, w);
    if (most > 1 && of.paired) {
      if (left.rows) {
        left.rows += tile.rows;
      } else {
        left = tile;
        left_of = &of;
      }
      return;
    }
    add_left();
    add_key_gradients<K>(a, g, tile, of);
  };
  const auto end_range = [&](GradBlock<K>& q, int64_t range) {
    if (!g.grad_query.data) return;
    if (q.first && (part.apart || range == 0))
      __builtin_memset(q.sum, 0, (size_t)query_sum_size(a) * sizeof(T));
    else if (q.first)
      q.skipped = true;
    else if (!part.apart && q.sum != q.total)
      add_lanes<K>(q.sum, a.head_dim, vectors_of<K>(q.rows), q.total);
  };
  const auto end_block = [&](GradBlock<K>& q, int64_t h) {
    if (!g.grad_query.data || part.apart) return;
    if (q.skipped) add_lanes<K>(nullptr, a.head_dim, vectors_of<K>(q.rows), q.total);
    if (part.last < ranges.count) return;
    for (int64_t r = 0; r < kRow; r++) w.high[r] = (T)a.scale;
    write_rows<K>(q.total, w.high, q.rows, a.head_dim, row_of<K>(g.grad_query, b, h, q.q0),
                  g.grad_query.row);
  };
  for (int64_t h = kv * group; h < (kv + 1) * group; h++)
    for (int64_t block = 0; block < blocks; block += most) {
      const int64_t count = min_of(most, blocks - block);
      for (int64_t i = 0; i < count; i++) begin_block(together[i], h, block + i);
      for (int64_t range = part.first; range < part.last; range++) {
        const int64_t from = range * ranges.size, to = min_of(end, from + ranges.size);
        for (int64_t i = 0; i < count; i++) begin_range(together[i], h, range, to - from);
        for (int64_t k0 = from; k0 < to; k0 += kTile) {
          for (int64_t i = 0; i < count; i++) add_tile(together[i], h, k0, min_of(kTile, to - k0));
          add_left();
        }
        for (int64_t i = 0; i < count; i++) end_range(together[i], range);
      }
      for (int64_t i = 0; i < count; i++) end_block(together[i], h);
    }

  for (int64_t at = 0; at < length; at += kTile) {
    if (w.touched[at / kTile]) continue;
    if (w.once) {
      const int64_t keys = min_of(kTile, length - at);
      zero_rows<K>(g.grad_key, b, kv, begin + at, keys, a.head_dim);
      zero_rows<K>(g.grad_value, b, kv, begin + at, keys, a.value_dim);
      continue;
    }
    for (int64_t i = at * ld; i < (at + kTile) * ld; i++) w.grad_key[i] = 0;
    for (int64_t i = at * ldv; i < (at + kTile) * ldv; i++) w.grad_value[i] = 0;
  }
  if (w.once) {
    zero_rows<K>(g.grad_key, b, kv, end, last - end, a.head_dim);
    zero_rows<K>(g.grad_value, b, kv, end, last - end, a.value_dim);
    return;
  }
  write_unseen_keys<K>(a, g, b, kv, end, last);
  if (g.grad_key.data)
    scale_out<X>(w.grad_key, ld, (T)a.scale, length, a.head_dim,
                 row_of<K>(g.grad_key, b, kv, begin), g.grad_key.row);
  if (g.grad_value.data)
    scale_out<X>(w.grad_value, ldv, (T)a.dropout.keep_scale, length, a.value_dim,
                 row_of<K>(g.grad_value, b, kv, begin), g.grad_value.row);
}

// Sums of few queries, [queries][few_width]: to += from.
template <class K>
void few_add(const typename K::T* from, int64_t width, typename K::T* to) {
  using X = typename K::X;
  for (int64_t d = 0; d < width; d += K::kLanes)
    X::store(to + d, X::add(X::load(to + d), X::load(from + d)));
}
// grad_query of a row of them.
template <class K>
void few_grad_query(const Attention& a, const AttentionGrad& g, int64_t b, FewRow row,
                    typename K::T* sum) {
  const int64_t ld = few_width<K>(a.head_dim);
  join_columns<K>(ld, sum);
  scale_out<typename K::X>(sum, ld, 1, 1, a.head_dim,
                           row_of<K>(g.grad_query, b, row.head, row.query), g.grad_query.row);
}

template <class K>
void add_sums(const Attention& a, const AttentionGrad& g, void* sums, int64_t b, int64_t h,
              int64_t block) {
  using T = typename K::T;
  const int64_t q0 = block * kTile, rows = min_of(kTile, a.queries - q0);
  const int64_t count = grad_ranges(a).count, blocks = ceil_div(a.queries, kTile);
  T* const total = (T*)sums + block * query_sum_size(a);
  if (backward_kernel(a, g, K::kLimits) == BackwardKernel::kFew) {
    const int64_t ld = few_width<K>(a.head_dim);
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t i = 1; i < count; i++)
        few_add<K>(total + i * query_sum_size(a) + r * ld, ld, total + r * ld);
      few_grad_query<K>(a, g, b, {h, r}, total + r * ld);
    }
    return;
  }
  for (int64_t i = 1; i < count; i++)
    add_lanes<K>(total + i * blocks * query_sum_size(a), a.head_dim, vectors_of<K>(rows), total);
  T scale[kRow];
  for (int64_t r = 0; r < kRow; r++) scale[r] = (T)a.scale;
  write_rows<K>(total, scale, rows, a.head_dim, row_of<K>(g.grad_query, b, h, q0),
                g.grad_query.row);
}

template <class K>
void add_ranges(const Attention& a, const AttentionGrad& g, const void* partial, int64_t b,
                int64_t h, int64_t block) {
  using T = typename K::T;
  using X = typename K::X;
  const int64_t q0 = block * kTile, rows = min_of(kTile, a.queries - q0),
                count = key_ranges(a).count;
  const typename X::V scale = X::set((T)a.scale);
  for (int64_t r = 0; r < rows; r++) {
    const T* from = (const T*)partial + (q0 + r) * a.head_dim;
    typename K::S* to = row_of<K>(g.grad_query, b, h, q0 + r);
    for (int64_t d = 0; d < a.head_dim; d += K::kLanes) {
      const int64_t n = min_of(K::kLanes, a.head_dim - d);
      typename X::V sum = X::zero();
      for (int64_t i = 0; i < count; i++) {
        const T* p = from + i * a.queries * a.head_dim + d;
        sum = X::add(sum, n == K::kLanes ? X::load(p) : X::load(p, n));
      }
      sum = X::mul(sum, scale);
      if (n == K::kLanes)
        X::store(to + d, sum);
      else
        X::store(to + d, sum, n);
    }
  }
}

}  // namespace
}  // namespace mha_ext::cpu

// Backward for few queries. As in forward (few-inl.h), a tile is stored [row][64 keys], its rows
// are those of all heads that share K and V, and the lanes of the products are keys or the width.
// Each key is met once: K and V are read once, and grad_key and grad_value written where they
// belong, with what comes next asked for meanwhile.
namespace mha_ext::cpu {
namespace {

// Whether the products of scores have rows as lanes: where forward takes groups, whose order they
// have to follow, and of few queries, which have one order, where that is faster.
template <class K>
bool backward_in_lanes(const Attention& a) {
  constexpr bool kFaster = K::X::kRegisters == 32;
  return takes_groups(a, K::kLimits) && (kFaster || !has_few_queries(a, K::kLimits));
}

// Rows of Q or dO for their products with K or V: as few_scores takes them, or as lanes, in blocks
// of 64.
template <class K>
struct FewOperand {
  typename K::T* rows;
  typename K::Unit* lanes;
  int64_t row, block;  // numbers of a row, units of a block

  FewOperand(const Attention& a, int64_t columns, Arena& arena) {
    const bool in_lanes = backward_in_lanes<K>(a);
    row = few_width<K>(columns);
    block = units_of<K>(columns) * kRow;
    rows = arena.take<typename K::T>(in_lanes ? 0 : few_rows(a) * row);
    lanes = arena.take<typename K::Unit>(in_lanes ? ceil_div(few_rows(a), kRow) * block : 0);
  }
};

template <class K>
struct BackwardFewScratch {
  using T = typename K::T;
  using S = typename K::S;
  FewOperand<K> query, grad_out;
  S *query_rows, *grad_out_rows;  // rows as they are, for grad_key and grad_value
  typename K::Unit* packed;       // a tile of K or V, for rows as lanes, and one of their scores
  T* tile;
  T *p, *ds, *bias, *sums;
  uint64_t *seen, *weighted;  // the keys for which dS and Z of a row may be other than 0
  T *sum, *total;  // grad_query over one range of keys, and over all, columns as in few_product

  BackwardFewScratch(const Attention& a, Arena& arena)
      : query(a, a.head_dim, arena), grad_out(a, a.value_dim, arena) {
    const int64_t rows = few_rows(a), d = few_width<K>(a.head_dim), dv = few_width<K>(a.value_dim);
    const int64_t in_lanes = backward_in_lanes<K>(a) ? kTile : 0;
    query_rows = arena.take<S>(rows * a.head_dim);
    grad_out_rows = arena.take<S>(rows * a.value_dim);
    packed =
        arena.take<typename K::Unit>(in_lanes * operand_width<K>(max_of(a.head_dim, a.value_dim)));
    tile = arena.take<T>(in_lanes * kRow);
    p = arena.take<T>(rows * kTile);
    ds = arena.take<T>(rows * kTile);
    bias = arena.take<T>(kTile);
    sums = arena.take<T>(max_of(d, dv));
    seen = arena.take<uint64_t>(rows);
    weighted = arena.take<uint64_t>(rows);
    sum = arena.take<T>(rows * d);
    total = arena.take<T>(rows * d);
  }
};

// What belongs to a row: exp subtracts lse = high + low, dP its delta.
template <class T>
struct FewLevels {
  T high, low, shift;
};

// One row of a tile: S -> Z, and dP -> dS.
template <class K, bool kDropout>
void few_gradient(uint64_t seen, uint64_t keep, int64_t keys, FewLevels<typename K::T> of,
                  typename K::T keep_scale, typename K::T* p, typename K::T* ds) {
  using X = typename K::X;
  using V = typename X::V;
  const V high = X::set(of.high), low = X::set(of.low), shift = X::set(of.shift);
  const V kept = X::set(keep_scale);
  for (int64_t n = 0; n < keys; n += K::kLanes) {
    const typename X::M in = X::mask(seen >> n);
    const V weight = X::select(in, exp_of<X>(X::sub(X::sub(X::load(p + n), high), low)), X::zero());
    V grad = X::load(ds + n), dropped = weight;
    if constexpr (kDropout) {
      const typename X::M stays = X::mask(keep >> n);
      grad = X::select(stays, X::mul(kept, grad), X::zero());
      dropped = X::select(stays, X::mul(kept, weight), X::zero());
    }
    X::store(p + n, dropped);
    X::store(ds + n, X::select(in, X::mul(weight, X::sub(grad, shift)), X::zero()));
  }
}

// grad_bias of one row of a tile, written or added.
template <class K, class E, bool kAdd>
void few_bias_gradient(const Pairs& bias, int64_t b, FewRow row, int64_t k0, int64_t keys,
                       const typename K::T* ds) {
  using X = typename K::X;
  E* to = (E*)bias.data + b * bias.batch + row.head * bias.head + row.query * bias.query +
          k0 * bias.key;
  for (int64_t n = 0; n < keys; n += K::kLanes) {
    typename X::V v = X::load(ds + n);
    if constexpr (kAdd) v = X::add(v, load_up_to<X>(to + n, keys - n));
    store_up_to<X>(to + n, v, keys - n);
  }
}

// The keys of one part of a key/value head, for all rows.
template <class K>
class BackwardFew {
  using T = typename K::T;
  using S = typename K::S;
  using X = typename K::X;

 public:
  BackwardFew(const Attention& a, const AttentionGrad& g, int64_t b, int64_t kv, KeyPart part,
              T* sums, BackwardFewScratch<K>& w)
      : a_(a), g_(g), b_(b), kv_(kv), part_(part), sums_(sums), w_(w) {}

  void run() {
    load();
    for (int64_t range = part_.first; range < part_.last; range++) {
      const int64_t begin = range * ranges_.size, end = min_of(a_.keys, begin + ranges_.size);
      for (int64_t i = 0; i < few_rows(a_) * ld_; i++) w_.sum[i] = 0;
      for (int64_t k0 = begin; k0 < end; k0 += kTile) tile(k0, min_of(kTile, end - k0));
      if (g_.grad_query.data) add_range(range);
    }
    if (!g_.grad_query.data || part_.apart || part_.last < ranges_.count) return;
    for (int64_t r = 0; r < rows_; r++) few_grad_query<K>(a_, g_, b_, row_at(r), total_of(r, 0));
  }

 private:
  FewRow row_at(int64_t r) const { return few_row(a_, kv_, r); }

  void load() {
    const bool with_delta = is_whole_head(a_, part_);
    T high[kFewRows], low[kFewRows];
    for (int64_t h = 0; h < group_; h++) {
      T head_high[kRow], head_low[kRow];
      if (with_delta) delta<K>(a_, g_, b_, kv_ * group_ + h, 0);
      row_levels<K>(a_, b_, kv_ * group_ + h, 0, a_.queries, head_high, head_low);
      for (int64_t i = 0; i < a_.queries; i++) {
        high[h * a_.queries + i] = head_high[i];
        low[h * a_.queries + i] = head_low[i];
      }
    }
    const int64_t d = a_.head_dim, dv = a_.value_dim;
    for (int64_t r = 0; r < rows_; r++) {
      const FewRow row = row_at(r);
      const S *query = row_of<K>(a_.query, b_, row.head, row.query),
              *grad_out = row_of<K>(g_.grad_out, b_, row.head, row.query);
      if (!in_lanes_) {
        few_operand<K>(query, d, (T)a_.scale, w_.query.rows + r * w_.query.row);
        few_operand<K>(grad_out, dv, 1, w_.grad_out.rows + r * w_.grad_out.row);
      }
      __builtin_memcpy(w_.query_rows + r * d, query, (size_t)d * sizeof(S));
      __builtin_memcpy(w_.grad_out_rows + r * dv, grad_out, (size_t)dv * sizeof(S));
      const int64_t at = (b_ * a_.heads + row.head) * a_.queries + row.query;
      levels_[r] = {high[r], low[r], ((const T*)g_.delta)[at]};
      uniform_[r] = a_.uniform_empty_rows && ((const T*)a_.lse)[at] == -(T)INFINITY;
    }
    for (int64_t r = 0; in_lanes_ && r < rows_; r += kRow) {
      const int64_t rows = min_of(kRow, rows_ - r), block = r / kRow;
      typename K::Unit* const room = over_lanes_ ? w_.packed : nullptr;
      pack_score_lanes<K, !K::kPairs>(w_.query_rows + r * d, d, rows, d, room,
                                      w_.query.lanes + block * w_.query.block, (T)a_.scale);
      pack_score_lanes<K>(w_.grad_out_rows + r * dv, dv, rows, dv, room,
                          w_.grad_out.lanes + block * w_.grad_out.block);
    }
    // Rows past the last one, which stand in where the products take four: zeros.
    for (int64_t r = rows_; !in_lanes_ && r < few_rows(a_); r++) {
      __builtin_memset(w_.query.rows + r * w_.query.row, 0, (size_t)w_.query.row * sizeof(T));
      __builtin_memset(w_.grad_out.rows + r * w_.grad_out.row, 0,
                       (size_t)w_.grad_out.row * sizeof(T));
    }
    for (int64_t i = rows_ * kTile; i < few_rows(a_) * kTile; i++) w_.p[i] = w_.ds[i] = 0;
  }

  // Where the grad_query of a row is summed: a head has less than two vectors of queries, and so
  // room for them, few_width apart, in query_sum_size.
  T* total_of(int64_t r, int64_t range) const {
    if (!sums_) return w_.total + r * ld_;
    const int64_t head = r / a_.queries, query = r % a_.queries;
    return sums_ + (part_.apart ? head * ranges_.count + range : head) * query_sum_size(a_) +
           query * ld_;
  }
  void add_range(int64_t range) const {
    for (int64_t r = 0; r < rows_; r++) {
      const T* from = w_.sum + r * ld_;
      T* const to = total_of(r, range);
      if (part_.apart || range == 0)
        __builtin_memcpy(to, from, (size_t)ld_ * sizeof(T));
      else
        few_add<K>(from, ld_, to);
    }
  }

  // The tile after that of k0, of this head or of the next.
  const S* after(const Rows& t, int64_t k0) const {
    if (k0 + kTile < min_of(a_.keys, part_.last * ranges_.size))
      return row_of<K>(t, b_, kv_, k0 + kTile);
    const NextPart next = next_part(a_, g_, b_, kv_, part_);
    return next.batch < a_.batch ? row_of<K>(t, next.batch, next.kv_head, next.begin) : nullptr;
  }
  // Scores of rows of t, before `count` rows of `other` from `then` on.
  void product(const Rows& t, int64_t k0, int64_t keys, int64_t width, const FewOperand<K>& by,
               T scale, T* to, const Rows& other, const S* then, int64_t count,
               int64_t other_width) {
    constexpr int64_t kItem = sizeof(S);
    const S* from = row_of<K>(t, b_, kv_, k0);
    if (in_lanes_) {
      if (then) ahead_.add(then, other.row * kItem, other_width * kItem, count);
      return lanes_product(
          rows_operand<K>(from, t.row, keys, width, w_.packed, ceil_div(rows_, kRow)), keys, width,
          by, scale, to);
    }
    const bool beside = asks_beside<K>(rows_);
    NextRows next((const char*)then, other.row * kItem, other_width * kItem, then ? count : 0,
                  few_blocks<K>(rows_, keys));
    by_rows<K>(rows_, [&]<int kRows>(int64_t r) __attribute__((always_inline)) {
      few_scores<K, kRows>(from, t.row, keys, width, by.rows + r * by.row, by.row, scale,
                           to + r * kTile, few_ask<K>(beside, r, next, then));
    });
  }
  // The same with rows as lanes.
  void lanes_product(const Operand& from, int64_t keys, int64_t width, const FewOperand<K>& by,
                     T scale, T* to) {
    T one[kRow];
    for (T& x : one) x = 1;
    for (int64_t r = 0; r < rows_; r += kRow) {
      const int64_t rows = min_of(kRow, rows_ - r);
      const typename K::Unit* const lanes = by.lanes + r / kRow * by.block;
      if (over_lanes_)
        sums_over_lanes<K>(from, keys, width, lanes, rows, scale, w_.tile, ahead_);
      else
        score_product<K, K::kPairs>(from, keys, width, lanes, rows, w_.tile, &ahead_, scale);
      transpose_out<X>(w_.tile, one, rows, keys, to + r * kTile, kTile);
    }
  }

  void tile(int64_t k0, int64_t keys) {
    const uint64_t every = first_bits(keys);
    uint64_t any = 0;
    for (int64_t r = 0; r < rows_; r++) {
      const FewRow row = row_at(r);
      w_.seen[r] = row_visibility(a_, b_, row.head, row.query, k0, keys);
      any |= uniform_[r] ? every : w_.seen[r];
    }
    if (!any) {
      zero_rows<K>(g_.grad_key, b_, kv_, k0, keys, a_.head_dim);
      zero_rows<K>(g_.grad_value, b_, kv_, k0, keys, a_.value_dim);
      return;
    }
    const S *key = row_of<K>(a_.key, b_, kv_, k0), *value = row_of<K>(a_.value, b_, kv_, k0);
    product(a_.key, k0, keys, a_.head_dim, w_.query, (T)a_.scale, w_.p, a_.value, value, keys,
            a_.value_dim);
    product(a_.value, k0, keys, a_.value_dim, w_.grad_out, 1, w_.ds, a_.key, after(a_.key, k0),
            kTile, a_.head_dim);
    for (int64_t r = 0; r < rows_; r++) gradient(r, k0, keys);

    uint64_t all_seen = every, all_weighted = every;
    for (int64_t r = 0; r < rows_; r++) {
      all_seen &= w_.seen[r];
      all_weighted &= w_.weighted[r];
    }
    const int64_t d = a_.head_dim, dv = a_.value_dim;
    if (g_.grad_value.data)
      write(w_.grad_out_rows, dv, keys, w_.p, w_.weighted, all_weighted == every, g_.grad_value,
            k0);
    if (g_.grad_query.data) {
      if (all_seen == every || all_finite<K>(key, a_.key.row, keys, d)) {
        by_rows<K>(rows_, [&]<int kRows>(int64_t r) __attribute__((always_inline)) {
          few_values<K, kRows>(key, a_.key.row, keys, d, w_.ds + r * kTile, w_.sum + r * ld_, ld_);
        });
      } else {
        for (int64_t r = 0; r < rows_; r++)
          few_seen_values<K>(key, a_.key.row, w_.seen[r], d, w_.ds + r * kTile, w_.sum + r * ld_);
      }
    }
    if (g_.grad_key.data)
      write(w_.query_rows, d, keys, w_.ds, w_.seen, all_seen == every, g_.grad_key, k0);
  }

  // Z and scale dS of a row, and its grad_bias.
  void gradient(int64_t r, int64_t k0, int64_t keys) {
    const FewRow row = row_at(r);
    T *const p = w_.p + r * kTile, *const ds = w_.ds + r * kTile;
    const uint64_t keep =
        a_.dropout.seed ? dropout_row<K>(a_, b_, row.head, row.query, k0, keys) : first_bits(keys);
    if (a_.bias.data)
      w_.seen[r] &= a_.bias_is_float32 ? few_bias<K, float>(a_, b_, row, k0, keys, w_.bias, p)
                                       : few_bias<K, S>(a_, b_, row, k0, keys, w_.bias, p);
    w_.weighted[r] = w_.seen[r];
    const T keep_scale = (T)a_.dropout.keep_scale;
    if (a_.dropout.seed)
      few_gradient<K, true>(w_.seen[r], keep, keys, levels_[r], keep_scale, p, ds);
    else
      few_gradient<K, false>(w_.seen[r], keep, keys, levels_[r], keep_scale, p, ds);
    if (uniform_[r]) {
      w_.weighted[r] = first_bits(keys);
      for (int64_t n = 0; n < keys; n++) p[n] = keep >> n & 1 ? keep_scale / (T)a_.keys : 0;
    }
    if (g_.adds_bias)
      few_bias_gradient<K, T, true>(g_.grad_bias, b_, row, k0, keys, ds);
    else if (write_bias_ && a_.bias_is_float32)
      few_bias_gradient<K, float, false>(g_.grad_bias, b_, row, k0, keys, ds);
    else if (write_bias_)
      few_bias_gradient<K, S, false>(g_.grad_bias, b_, row, k0, keys, ds);
    const typename X::V scale = X::set((T)a_.scale);
    for (int64_t n = 0; n < keys; n += K::kLanes) X::store(ds + n, X::mul(scale, X::load(ds + n)));
  }

  // grad[key] = sum over the rows of weights[row][key] rows[row]
  void write(const S* rows, int64_t width, int64_t keys, const T* weights, const uint64_t* bits,
             bool whole, const Rows& grad, int64_t k0) const {
    const WidthRows<K> x{rows, width, rows_, width};
    S* const to = row_of<K>(grad, b_, kv_, k0);
    if (whole || all_finite<K>(rows, width, rows_, width)) {
      const S* const next = after(grad, k0);
      width_rows<K, Contiguous::kAlongM>(x, keys, weights, to, grad.row,
                                         next ? (int64_t)((uintptr_t)next - (uintptr_t)to) : 0);
    } else {
      width_selected<K, Contiguous::kAlongM>(x, keys, weights, bits, to, grad.row, w_.sums);
    }
  }

  const Attention& a_;
  const AttentionGrad& g_;
  const int64_t b_, kv_;
  const KeyPart part_;
  T* const sums_;
  BackwardFewScratch<K>& w_;
  const KeyRanges ranges_ = grad_ranges(a_);
  const int64_t group_ = a_.heads / a_.kv_heads, rows_ = group_ * a_.queries;
  const int64_t ld_ = few_width<K>(a_.head_dim);
  const bool in_lanes_ = backward_in_lanes<K>(a_);
  const bool over_lanes_ = in_lanes_ && has_few_queries(a_, K::kLimits);
  Ahead ahead_{longest_asked<K>()};
  const bool write_bias_ = g_.grad_bias.data && !g_.adds_bias && bias_is_dense(a_, g_.grad_bias);
  FewLevels<T> levels_[kFewRows];
  bool uniform_[kFewRows];
};

template <class K>
void backward_few(const Attention& a, const AttentionGrad& g, int64_t b, int64_t kv, KeyPart part,
                  void* sums, void* scratch) {
  Arena arena{(char*)scratch};
  BackwardFewScratch<K> w(a, arena);
  BackwardFew<K>(a, g, b, kv, part, (typename K::T*)sums, w).run();
}

}  // namespace
}  // namespace mha_ext::cpu

// Backward of heads whose queries and keys fit into one tile each, several at a time where they are
// short. Every gradient is one product, so it is written where it belongs, without sums in scratch;
// and what the next heads need is asked for meanwhile, since no machine foresees where a short head
// starts. Where the keys are all of those that lse is of, delta is the sum of P o dP, and O is not
// read; the sum of P is then 1 to the last bits, which takes lse_low.
//   dV = Z^T dO,  dK = scale dS^T Q,  dQ = scale dS K
namespace mha_ext::cpu {
namespace {

// One head of them: its operands, and where the thread will go on.
template <class K>
struct ShortHead {
  using S = typename K::S;
  const Attention& a;
  const AttentionGrad& g;
  int64_t b, h;
  NextPart next;
  bool ahead;  // there is a next head
  bool all;    // the products of queries and keys ask for it; pairs have no room for that
  // These products ask for its Q, and for its dO. The scores of few queries are made otherwise.
  bool asks_query, asks_grad_out;
  bool value_too;  // its values are asked for beside grad_query
  int64_t keys;    // that it meets
  const S *query, *key, *value, *grad_out;

  ShortHead(const Attention& attention, const AttentionGrad& grad, int64_t batch, int64_t head,
            int64_t together, int64_t met)
      : a(attention), g(grad), b(batch), h(head), keys(met) {
    const LaterHead later(a, b, h, together);
    next = together > 1 ? NextPart{later.batch, later.head, 0} : next_head(a, g, b, h);
    ahead = next.batch < a.batch;
    all = !K::kPairs && asks_for_all<K>(a, keys);
    const auto asks = [&](int64_t columns) {
      return all || (!K::kPairs && takes_rows<K>(a.queries, keys, columns));
    };
    asks_query = asks(a.head_dim) && !has_few_queries(a, K::kLimits);
    asks_grad_out = asks(a.value_dim);
    value_too = !all && g.grad_query.data && a.queries > kWidthGroup && a.value.row == a.key.row;
    query = row_of<K>(a.query, b, h, 0);
    key = row_of<K>(a.key, b, h, 0);
    value = row_of<K>(a.value, b, h, 0);
    grad_out = row_of<K>(g.grad_out, b, h, 0);
  }

  // What no gradient asks for beside the rows that it reads.
  [[gnu::always_inline]] void ask_next(BackwardScratch<K>& w) const {
    if (!ahead) return;
    const auto ask = [&](const Rows& queries, bool with_product, bool queries_beside,
                         const Rows& others, bool others_beside, int64_t columns,
                         LaneRows<K>& lanes) __attribute__((always_inline)) {
      if (with_product)
        ask_with_product<K>(queries, next.batch, next.kv_head, a.queries, columns, lanes, w.ahead);
      else if (!queries_beside)
        ask_for<K>(queries, next.batch, next.kv_head, a.queries, columns);
      if (all)
        ask_head<K>(others, next.batch, next.kv_head, keys, columns, w.ahead);
      else if (!others_beside)
        ask_for<K>(others, next.batch, next.kv_head, keys, columns);
    };
    ask(a.query, asks_query, g.grad_key.data, a.key, g.grad_query.data, a.head_dim, w.query_lanes);
    if (!g.grad_out.data) return;
    ask(g.grad_out, asks_grad_out, g.grad_value.data, a.value, value_too, a.value_dim,
        w.grad_out_lanes);
    if (!w.whole) ask_for<K>(a.out, next.batch, next.kv_head, a.queries, a.value_dim);
  }
  // lse and the like, of as many heads.
  [[gnu::always_inline]] void ask_next_levels(int64_t heads) const {
    const int64_t first = (next.batch * a.heads + next.kv_head) * a.queries;
    const void* const levels[] = {a.lse, a.lse_low, g.delta, g.grad_lse};
    for (const void* each : levels) ask_levels<K>(each, first, heads * a.queries);
  }
  int64_t to_next(const Rows& t, const void* here) const {
    return ahead ? bytes_to<K>(t, next.batch, next.kv_head, 0, here) : 0;
  }
  // `asked`: for those of the next head.
  WidthRows<K> read(const S* data, const Rows& t, int64_t count, int64_t columns,
                    bool asked) const {
    return {data, t.row, count, columns, asked ? 0 : to_next(t, data)};
  }
  bool finite() const {
    return all_finite<K>(query, a.query.row, a.queries, a.head_dim) &&
           all_finite<K>(key, a.key.row, keys, a.head_dim) &&
           (!g.grad_out.data || all_finite<K>(grad_out, g.grad_out.row, a.queries, a.value_dim));
  }
};

// S and dP of the heads in w.p and w.ds, and what they see.
template <class K>
SeenByHeads short_products(const Attention& a, const AttentionGrad& g, Heads heads,
                           const MetKeys& met, BackwardScratch<K>& w) {
  using S = typename K::S;
  const int64_t rows = a.queries, keys = met.count;
  const auto in_place = [&](const S* from, const Rows& t, int64_t columns, typename K::Unit* to) {
    if (K::kInPlace || takes_rows<K>(rows, keys, columns))
      return Operand{(const char*)from, t.row * (int64_t)sizeof(S), sizeof(typename K::Unit)};
    return rows_operand<K>(from, t.row, keys, columns, to);
  };
  const bool in_rows = takes_rows<K>(rows, keys, a.head_dim) &&
                       takes_rows<K>(rows, keys, a.value_dim) && !g.grad_weights.data &&
                       all_are_products<K>(a, met);
  SeenByHeads seen(keys, w.bits);
  w.paired = false;
  for_heads<K>(a, heads, rows, [&](int64_t i, int64_t b, int64_t h, int64_t lane) {
    const ShortHead<K> head(a, g, b, h, heads.count, keys);
    if (i == 0) head.ask_next_levels(heads.count);
    load_queries<K>(a, g, b, h, 0, rows, w, keys, lane);
    head.ask_next(w);
    const auto key_rows = [&] { return in_place(head.key, a.key, a.head_dim, w.keys_in); };
    const auto value_rows = [&] { return in_place(head.value, a.value, a.value_dim, w.values_in); };
    w.bands = nullptr;
    if constexpr (kTakesRows<K>) {
      if (in_rows) {  // the shortest way, for the shortest heads
        product_of_rows<K, true>(w.query_lanes, rows, a.head_dim, key_rows(), keys, w.p + lane,
                                 nullptr);
        product_of_rows<K, false>(w.grad_out_lanes, rows, a.value_dim, value_rows(), keys,
                                  w.ds + lane, nullptr);
        w.ahead.ask_rest();
        return seen.add(Visibility::kFull, nullptr, rows, lane);
      }
    }
    Visibility visible = visibility_of<K>(a, b, h, 0, rows, 0, keys, w.head_bits);
    if (visible != Visibility::kEmpty) {
      if (find_bands<K>(a, b, 0, rows, 0, keys, w.bands_storage)) w.bands = w.bands_storage;
      visible = gradient_products<K>(a, g, b, h, 0, rows, 0, keys, key_rows(), value_rows(),
                                     visible, lane, w.head_bits, w);
    }
    w.ahead.ask_rest();
    seen.add(visible, w.head_bits, rows, lane);
  });
  if (heads.count > 1) w.bands = nullptr;  // each has its own; what they leave out is hidden
  return seen;
}

// The gradients of one head, from Z and dS in the lanes of w.p and w.ds from `lane` on, which carry
// their factors. `dirty`: the operands are not finite, and some pairs are hidden.
template <class K>
void write_short_head(const ShortHead<K>& head, int64_t lane, bool dirty, BackwardScratch<K>& w) {
  using T = typename K::T;
  const Attention& a = head.a;
  const AttentionGrad& g = head.g;
  const int64_t rows = a.queries, keys = head.keys, d = a.head_dim, dv = a.value_dim;
  // The head's lanes, as if they were the first.
  for (int64_t n = 0; dirty && n < keys; n++) w.head_bits[n] = w.bits[n] >> lane;
  const auto write = [&]<Contiguous kA>(const WidthRows<K>& x, int64_t count, const T* weights,
                                        const Rows& t) __attribute__((always_inline)) {
    typename K::S* to = row_of<K>(t, head.b, head.h, 0);
    if (dirty)
      width_selected<K, kA>(x, count, weights, w.head_bits, to, t.row, w.extra);
    else
      width_rows<K, kA>(x, count, weights, to, t.row, head.to_next(t, to));
  };
  if (g.grad_value.data)
    write.template operator()<Contiguous::kAlongT>(
        head.read(head.grad_out, g.grad_out, rows, dv, head.asks_grad_out), keys, w.p + lane,
        g.grad_value);
  if (g.grad_key.data)
    write.template operator()<Contiguous::kAlongT>(
        head.read(head.query, a.query, rows, d, head.asks_query), keys, w.ds + lane, g.grad_key);
  if (g.grad_query.data) {
    WidthRows<K> x = head.read(head.key, a.key, keys, d, head.all);
    if (head.value_too) x.then = head.to_next(a.value, head.key);
    write.template operator()<Contiguous::kAlongM>(x, rows, w.ds + lane, g.grad_query);
  }
}

template <class K>
void backward_one_tile(const Attention& a, const AttentionGrad& g, Heads heads,
                       BackwardScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  // Its own: `backward` ends that of its caller.
  [[maybe_unused]] const typename K::Dot::Session session;
  const MetKeys met(a, heads);
  const int64_t rows = a.queries, keys = met.count, vectors = heads.count * vectors_of<K>(rows);
  const SeenByHeads seen = short_products<K>(a, g, heads, met, w);
  const int64_t seen_keys = seen.any() ? keys : 0;
  for_heads<K>(a, heads, rows, [&](int64_t, int64_t b, int64_t h, int64_t) {
    if (!seen.any()) zero_rows<K>(g.grad_query, b, h, 0, rows, a.head_dim);
    zero_rows<K>(g.grad_key, b, h, seen_keys, a.keys - seen_keys, a.head_dim);
    zero_rows<K>(g.grad_value, b, h, seen_keys, a.keys - seen_keys, a.value_dim);
  });
  if (!seen.any()) return;
  if (a.dropout.seed) drop_heads<K>(a, heads, 0, rows, keys, w.head_bits, w.keep);
  gradient_pairs<K>(a, vectors, keys, seen.partial(), w);
  const bool dense = g.grad_bias.data && !g.adds_bias && bias_is_dense(a, g.grad_bias);
  for (int64_t r = 0; dense && r < kRow; r++) w.one[r] = 1;
  for_heads<K>(a, heads, rows, [&](int64_t i, int64_t b, int64_t h, int64_t lane) {
    if (w.whole)  // a bias that is constant along the keys wants it
      for (int64_t r = 0; r < rows; r += K::kLanes)
        store_up_to<X>((T*)g.delta + (heads.first + i) * rows + r, X::load(w.shift + lane + r),
                       rows - r);
    if (dense) store_bias_tile<K>(a, g, b, h, 0, rows, 0, keys, w.one, w.ds + lane, false);
    if (g.adds_bias) add_bias_tile<K>(g, b, h, 0, rows, 0, keys, w.one, w.ds + lane, false);
  });
  if (g.grad_value.data) scale_tile<K>((T)a.dropout.keep_scale, keys, vectors, w.p);
  scale_tile<K>((T)a.scale, keys, vectors, w.ds);
  for_heads<K>(a, heads, rows, [&](int64_t, int64_t b, int64_t h, int64_t lane) {
    const ShortHead<K> head(a, g, b, h, heads.count, keys);
    write_short_head<K>(head, lane, seen.partial() && !head.finite(), w);
  });
}

template <class K>
void backward_heads(const Attention& a, const AttentionGrad& g, int64_t first, int64_t count,
                    void* scratch) {
  const Heads heads{first, count};
  Arena arena{(char*)scratch};
  BackwardScratch<K> w(a, arena);
  w.whole = g.all_keys && a.lse_low && !g.grad_weights.data;
  uint64_t uniform = 0;  // heads with uniform rows, which take more than one product
  for_heads<K>(a, heads, a.queries, [&](int64_t i, int64_t b, int64_t h, int64_t) {
    uniform |= (uint64_t)(a.uniform_empty_rows && any_empty_row<K>(a, b, h)) << i;
    if (!w.whole && !g.grad_weights.data) delta<K>(a, g, b, h, 0);
  });
  if (!uniform) return backward_one_tile<K>(a, g, heads, w);
  for_heads<K>(a, heads, a.queries, [&](int64_t i, int64_t b, int64_t h, int64_t) {
    if (uniform >> i & 1)
      backward<K>(a, g, b, h, {0, grad_ranges(a).count, false}, nullptr, scratch);
    else
      backward_one_tile<K>(a, g, {heads.first + i, 1}, w);
  });
}

template <class K>
void backward_any(const Attention& a, const AttentionGrad& g, int64_t b, int64_t kv, KeyPart part,
                  void* sums, void* scratch) {
  const BackwardKernel kernel = backward_kernel(a, g, K::kLimits);
  if (kernel == BackwardKernel::kOneTile)
    return backward_heads<K>(a, g, b * a.heads + kv, 1, scratch);
  [[maybe_unused]] const typename K::Dot::Session session;
  if (kernel == BackwardKernel::kFew) return backward_few<K>(a, g, b, kv, part, sums, scratch);
  backward<K>(a, g, b, kv, part, sums, scratch);
}

}  // namespace
}  // namespace mha_ext::cpu

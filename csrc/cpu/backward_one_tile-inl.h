// Backward of a head whose queries and keys fit into one tile each. Every gradient is one product,
// so it is written where it belongs, without sums in scratch; and what the next head needs is asked
// for meanwhile, since heads are short, and no machine foresees where the next one starts. Where
// the keys are all of those that lse is of, delta is the sum of P o dP, and O is not read; the sum
// of P is then 1 to the last bits, which takes lse_low.
//   dV = Z^T dO,  dK = scale dS^T Q,  dQ = scale dS K
namespace mha_ext::cpu {
namespace {

// False where it takes more than one product, since rows without any key count as uniform. Then
// nothing is written yet.
template <class K>
bool backward_one_tile(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h,
                       BackwardScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  using S = typename K::S;
  const int64_t rows = a.queries, keys = a.keys, d = a.head_dim, dv = a.value_dim;
  if (a.uniform_empty_rows && any_empty_row<K>(a, b, h)) return false;
  const S *query = row_of<K>(a.query, b, h, 0), *key = row_of<K>(a.key, b, h, 0);
  const S *value = row_of<K>(a.value, b, h, 0), *grad_out = row_of<K>(g.grad_out, b, h, 0);
  const NextPart next = next_head(a, g, b, h);
  const bool ahead = next.batch < a.batch, grads = g.grad_out.data != nullptr;
  // Beside which product the next head is asked for, if there is that product.
  const bool value_too = g.grad_query.data && rows > kWidthGroup && a.value.row == a.key.row;
  const auto ask = [&](bool beside, const Rows& t, int64_t count, int64_t columns)
                       __attribute__((always_inline)) {
                         if (ahead && !beside)
                           ask_for<K>(t, next.batch, next.kv_head, count, columns);
                       };
  load_queries<K>(a, g, b, h, 0, rows, w);
  ask(g.grad_key.data, a.query, rows, d);
  ask(g.grad_query.data, a.key, keys, d);
  if (grads) {
    ask(g.grad_value.data, g.grad_out, rows, dv);
    ask(value_too, a.value, keys, dv);
    ask(w.whole, a.out, rows, dv);
  }
  const auto in_place = [&](const S* from, const Rows& t, int64_t columns, typename K::Unit* to) {
    if constexpr (K::kInPlace)
      return Operand{(const char*)from, t.row * (int64_t)sizeof(S), sizeof(S)};
    else
      return rows_operand<K>(from, t.row, keys, columns, to);
  };
  const Visibility visible =
      gradient_tile<K>(a, g, b, h, 0, rows, 0, keys, in_place(key, a.key, d, w.keys_in),
                       in_place(value, a.value, dv, w.values_in), w);
  if (visible == Visibility::kEmpty) {
    zero_rows<K>(g.grad_query, b, h, 0, rows, d);
    zero_rows<K>(g.grad_key, b, h, 0, keys, d);
    zero_rows<K>(g.grad_value, b, h, 0, keys, dv);
    return true;
  }
  const bool dirty =
      visible == Visibility::kPartial &&
      !(all_finite<K>(query, a.query.row, rows, d) && all_finite<K>(key, a.key.row, keys, d) &&
        (!grads || all_finite<K>(grad_out, g.grad_out.row, rows, dv)));
  const auto to_next = [&](const Rows& t, const void* here) {
    return ahead ? bytes_to<K>(t, next.batch, next.kv_head, 0, here) : 0;
  };
  const auto read = [&](const S* data, const Rows& t, int64_t count, int64_t columns) {
    return WidthRows<K>{data, t.row, count, columns, to_next(t, data)};
  };
  const auto write = [&]<Contiguous kA>(const WidthRows<K>& x, int64_t count, const T* weights,
                                        const Rows& t) __attribute__((always_inline)) {
    S* to = row_of<K>(t, b, h, 0);
    if (dirty)
      width_selected<K, kA>(x, count, weights, w.bits, to, t.row, w.extra);
    else
      width_rows<K, kA>(x, count, weights, to, t.row, to_next(t, to));
  };
  if (w.whole)  // a bias that is constant along the keys wants it
    for (int64_t r = 0; r < rows; r += K::kLanes)
      store_up_to<X>((T*)g.delta + (b * a.heads + h) * rows + r, X::load(w.shift + r), rows - r);
  if (g.grad_bias.data && !g.adds_bias && bias_is_dense(a, g.grad_bias)) {
    for (int64_t r = 0; r < kRow; r++) w.one[r] = 1;
    store_bias_tile<K>(a, g, b, h, 0, rows, 0, keys, w.one, w.ds);
  }
  if (g.adds_bias) add_bias_tile<K>(g, b, h, 0, rows, 0, keys, w.ds);
  if (g.grad_value.data) {
    scale_tile<K>((T)a.dropout.keep_scale, keys, vectors_of<K>(rows), w.p);
    write.template operator()<Contiguous::kAlongT>(read(grad_out, g.grad_out, rows, dv), keys, w.p,
                                                   g.grad_value);
  }
  scale_tile<K>((T)a.scale, keys, vectors_of<K>(rows), w.ds);
  if (g.grad_key.data)
    write.template operator()<Contiguous::kAlongT>(read(query, a.query, rows, d), keys, w.ds,
                                                   g.grad_key);
  if (g.grad_query.data) {
    WidthRows<K> x = read(key, a.key, keys, d);
    if (value_too) x.then = to_next(a.value, key);
    write.template operator()<Contiguous::kAlongM>(x, rows, w.ds, g.grad_query);
  }
  return true;
}

template <class K>
void backward_any(const Attention& a, const AttentionGrad& g, int64_t b, int64_t kv, KeyPart part,
                  void* sums, void* scratch) {
  [[maybe_unused]] const typename K::Dot::Session session;
  const BackwardKernel kernel = backward_kernel(a, g, K::kLimits);
  if (kernel == BackwardKernel::kFew) return backward_few<K>(a, g, b, kv, part, sums, scratch);
  if (kernel == BackwardKernel::kOneTile) {
    Arena arena{(char*)scratch};
    BackwardScratch<K> w(a, arena);
    w.whole = g.all_keys && a.lse_low && !g.grad_weights.data;
    if (!w.whole && !g.grad_weights.data) delta<K>(a, g, b, kv, 0);
    if (backward_one_tile<K>(a, g, b, kv, w)) return;
    if (w.whole) delta<K>(a, g, b, kv, 0);
  }
  backward<K>(a, g, b, kv, part, sums, scratch);
}

}  // namespace
}  // namespace mha_ext::cpu

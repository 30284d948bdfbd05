// The formulas of docs/derivatives.md over whole matrices of scores. Whoever is hidden is selected
// away here too: a NaN behind a mask reaches no result.
#include "composite.h"

#include <ATen/ATen.h>

#include <limits>

#include "spec/dropout.h"

namespace mha_ext::composite {
namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<at::Tensor>;

// An undefined tensor is a zero, and costs nothing.
template <class... Tensors>
Tensor plus(const Tensor& x, const Tensor& y, const Tensors&... more) {
  const Tensor sum = !x.defined() ? y : !y.defined() ? x : at::add(x, y);
  if constexpr (sizeof...(more) == 0)
    return sum;
  else
    return plus(sum, more...);
}
Tensor minus(const Tensor& x, const Tensor& y) { return y.defined() ? plus(x, y.neg()) : x; }
Tensor times(const Tensor& x, const Tensor& y) {
  return x.defined() && y.defined() ? at::mul(x, y) : Tensor();
}
Tensor scaled(const Tensor& x, double scale) { return x.defined() ? at::mul(x, scale) : x; }
Tensor row_sum(const Tensor& x) { return x.defined() ? x.sum(-1, /*keepdim=*/true) : x; }
Tensor transposed(const Tensor& x) { return x.defined() ? x.transpose(-1, -2) : x; }
Tensor product_t(const Tensor& x, const Tensor& y) {  // x yᵀ
  return x.defined() && y.defined() ? at::matmul(x, y.transpose(-1, -2)) : Tensor();
}
at::ScalarType sum_type(const Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// 0, 1, ... count - 1, plus first, along the dimension that is `dim` from the last.
Tensor positions(const SymInt& count, const SymInt& first, int64_t dim, const Tensor& like) {
  Tensor range = at::arange(c10::Scalar(count), like.options().dtype(at::kLong)).add(first);
  for (int64_t i = 0; i < dim; i++) range = range.unsqueeze(-1);
  return range;
}

// Which pairs are visible: bool, broadcastable to [*G, B, H, Lq, Lk]; the last two are whole.
Tensor visible(const Inputs& in) {
  const Options& options = in.options;
  const SymInt queries = in.query.sym_size(-2), keys = in.key.sym_size(-2);
  const Tensor j = positions(keys, 0, 0, in.query);
  Tensor i = positions(queries, 0, 1, in.query), length;
  if (in.key_lengths) {
    length = in.key_lengths->to(at::kLong).clamp_min(0).clamp_max(keys);
    length = length.unsqueeze(-1).unsqueeze(-1).unsqueeze(-1);  // [*G, B, 1, 1, 1]
  }
  if (options.corner && *options.corner == "lower_right")
    i = (length.defined() ? i.add(length) : i.add(keys)).sub(queries);
  else
    i = i.add(options.origin[2] - options.origin[3]);

  const SymInt far = int64_t{1} << 61;  // no sum of it and a position leaves int64
  Tensor seen = j.ge(0).expand_symint({queries, keys});
  if (length.defined()) seen = seen.logical_and(j.lt(length));
  if (options.window_left) seen = seen.logical_and(j.ge(i.sub(options.window_left->min(far))));
  if (options.window_right) seen = seen.logical_and(j.le(i.add(options.window_right->min(far))));
  if (in.mask) seen = seen.logical_and(in.mask->ne(0));
  if (in.bias) seen = seen.logical_and(in.bias->ne(-std::numeric_limits<double>::infinity()));
  return seen;
}

// High and low 32 bits of factor * x for 32-bit words, by halves: no step leaves int64.
std::pair<Tensor, Tensor> multiply_words(int64_t factor, const Tensor& x) {
  const Tensor upper = x.mul(factor >> 16), lower = x.mul(factor & 0xffff);
  return {upper.add(lower.bitwise_right_shift(16)).bitwise_right_shift(16),
          upper.bitwise_and(0xffff).bitwise_left_shift(16).add(lower).bitwise_and(0xffffffff)};
}

// spec/dropout.h over tensors: 0 for a dropped pair, else keep_scale; undefined without dropout.
Tensor dropout_factor(const Inputs& in) {
  const uint32_t threshold = drop_threshold(in.options.dropout_p);
  if (threshold == 0) return {};
  constexpr int64_t word = 0xffffffff;
  const auto origin = in.options.origin;
  const Tensor k = positions(in.key.sym_size(-2), origin[3], 0, in.query);
  Tensor c0 = k.bitwise_right_shift(3).bitwise_and(word),
         c1 = positions(in.query.sym_size(-2), origin[2], 1, in.query).bitwise_and(word),
         c2 = positions(in.query.sym_size(-3), origin[1], 2, in.query).bitwise_and(word),
         c3 = positions(in.query.sym_size(-4), origin[0], 3, in.query).bitwise_and(word);
  const auto seed_word = [&](int64_t i) {  // [*G, 1, 1, 1, 1]
    const Tensor seed = in.seed->select(-1, i).bitwise_and(word);
    return seed.unsqueeze(-1).unsqueeze(-1).unsqueeze(-1).unsqueeze(-1);
  };
  Tensor key0 = seed_word(0), key1 = seed_word(1);
  for (int round = 0; round < 10; round++) {
    const auto [high0, low0] = multiply_words(0xD2511F53, c0);
    const auto [high1, low1] = multiply_words(0xCD9E8D57, c2);
    c0 = high1.bitwise_xor(c1).bitwise_xor(key0);
    c1 = low1;
    c2 = high0.bitwise_xor(c3).bitwise_xor(key1);
    c3 = low0;
    key0 = key0.add(0x9E3779B9).bitwise_and(word);
    key1 = key1.add(0xBB67AE85).bitwise_and(word);
  }
  const Tensor lane = k.bitwise_and(7), index = lane.bitwise_right_shift(1);
  Tensor chosen = at::where(index.eq(0), c0, at::where(index.eq(1), c1, c2));
  chosen = at::where(index.eq(3), c3, chosen);
  chosen = at::where(lane.bitwise_and(1).eq(1), chosen.bitwise_right_shift(16), chosen);
  const Tensor kept = chosen.bitwise_and(0xffff).ge(static_cast<int64_t>(threshold));
  return kept.to(sum_type(in.query)).mul(keep_scale(threshold));
}

// [*G, B, Hkv, L, D] -> [*G, B, H, L, D], and the sum that is its transpose.
Tensor share_heads(const Tensor& key, const SymInt& heads) {
  if (key.sym_size(-3) == heads) return key;
  c10::SymDimVector sizes(key.sym_sizes().begin(), key.sym_sizes().end());
  sizes.insert(sizes.end() - 2, heads / key.sym_size(-3));
  const Tensor shared = key.unsqueeze(-3).expand_symint(sizes);
  sizes.erase(sizes.end() - 3);
  sizes[sizes.size() - 3] = heads;
  return shared.reshape_symint(sizes);
}
Tensor sum_heads(const Tensor& grad, const SymInt& kv_heads) {
  if (grad.sym_size(-3) == kv_heads) return grad;
  c10::SymDimVector sizes(grad.sym_sizes().begin(), grad.sym_sizes().end());
  sizes.insert(sizes.end() - 2, grad.sym_size(-3) / kv_heads);
  sizes[sizes.size() - 4] = kv_heads;
  return grad.reshape_symint(sizes).sum(-3);
}

// In the precision of the sums, with a key and a value for each query head.
Direction widened(const Inputs& in, const Direction& d) {
  const auto type = sum_type(in.query);
  const SymInt heads = in.query.sym_size(-3);
  const auto wide = [&](const Tensor& x) { return x.defined() ? x.to(type) : x; };
  const auto shared = [&](const Tensor& x) {
    return x.defined() ? share_heads(wide(x), heads) : x;
  };
  return {wide(d.query),    shared(d.key),
          shared(d.value),  wide(d.bias),
          wide(d.grad_out), d.grad_lse.defined() ? wide(d.grad_lse).unsqueeze(-1) : Tensor()};
}

// What may be selected from a matrix of scores.
Tensor select_pairs(const Tensor& seen, const Tensor& x) {
  return x.defined() ? at::where(seen, x, at::zeros({}, x.options())) : x;
}

// a x, where row i of `a` is zero for whatever it does not see (`seen`), and 0 * NaN must not show.
Tensor product(const Tensor& seen, const Tensor& a, const Tensor& x) {
  if (!a.defined() || !x.defined()) return {};
  const Tensor finite = x.isfinite();
  const Tensor reached =
      at::matmul(seen.to(x.scalar_type()), finite.logical_not().to(x.scalar_type()));
  return at::matmul(a, select_pairs(finite, x))
      .masked_fill(reached.gt(0), std::numeric_limits<double>::quiet_NaN());
}

// P [*G, B, H, Lq, Lk] and what it is made of, in the precision of the sums.
struct Attended {
  Direction given;  // the inputs themselves
  double scale;
  Tensor seen, used;  // used: seen, or in a uniform empty row every key
  Tensor factor;      // of dropout; undefined is 1
  Tensor weights;
  Tensor rows, columns;  // queries and keys that are part of a visible pair, [..., 1]

  Attended(const Inputs& in, const Tensor& grad_out = {}, const Tensor& grad_lse = {})
      : given(widened(
            in, {in.query, in.key, in.value, in.bias.value_or(Tensor()), grad_out, grad_lse})),
        scale(in.options.scale),
        factor(dropout_factor(in)) {
    c10::SymDimVector sizes(in.query.sym_sizes().begin(), in.query.sym_sizes().end());
    sizes.back() = in.key.sym_size(-2);
    seen = visible(in).expand_symint(sizes);
    const Tensor empty = seen.any(-1, /*keepdim=*/true).logical_not();
    used = in.options.uniform_empty_rows ? seen.logical_or(empty) : seen;
    rows = used.any(-1).unsqueeze(-1);
    columns = used.any(-2).unsqueeze(-1);
    given = visible_part(given);

    const bool wide = given.query.scalar_type() == at::kDouble;
    const Tensor scores =
        plus(product_t(given.query, given.key).mul(scale), select_pairs(seen, given.bias))
            .clamp_min(wide ? std::numeric_limits<double>::lowest()
                            : std::numeric_limits<float>::lowest())
            .masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity())
            .masked_fill(empty, 0.0);  // whose softmax is uniform
    weights = select_pairs(used, scores.softmax(-1));
  }

  // Zero for queries that see nothing and keys that no query sees: PyTorch's derivatives of a
  // product multiply by them.
  Direction visible_part(const Direction& d) const {
    return {select_pairs(rows, d.query),    select_pairs(columns, d.key),
            select_pairs(columns, d.value), d.bias,
            select_pairs(rows, d.grad_out), select_pairs(rows, d.grad_lse)};
  }
  Direction direction(const Inputs& in, const Direction& d) const {
    return visible_part(widened(in, d));
  }

  Tensor dropped(const Tensor& p) const { return factor.defined() ? times(p, factor) : p; }
  Tensor select(const Tensor& x) const { return select_pairs(seen, x); }

  // The derivatives of S along a, and along a and b.
  Tensor scores(const Direction& a) const {
    const Tensor products = plus(product_t(a.query, given.key), product_t(given.query, a.key));
    return select(plus(scaled(products, scale), a.bias));
  }
  Tensor scores(const Direction& a, const Direction& b) const {
    return select(scaled(plus(product_t(a.query, b.key), product_t(b.query, a.key)), scale));
  }
  // dP, and its derivatives.
  Tensor grad_weights() const { return select(dropped(product_t(given.grad_out, given.value))); }
  Tensor grad_weights(const Direction& a) const {
    const Tensor products =
        plus(product_t(a.grad_out, given.value), product_t(given.grad_out, a.value));
    return select(dropped(products));
  }
  Tensor grad_weights(const Direction& a, const Direction& b) const {
    return select(dropped(plus(product_t(a.grad_out, b.value), product_t(b.grad_out, a.value))));
  }

  // Sums over the keys (a x) and over the queries (aᵀ x).
  Tensor over_keys(const Tensor& a, const Tensor& x) const { return product(used, a, x); }
  Tensor over_queries(const Tensor& a, const Tensor& x) const {
    return product(used.transpose(-1, -2), transposed(a), x);
  }
};

// P' = P ∘ (S' - mu), mu = rowsum(P ∘ S'), along a and b and both.
struct WeightsDerivatives {
  Tensor a, b, ab, lse_ab;

  WeightsDerivatives(const Attended& pairs, const Tensor& scores_a, const Tensor& scores_b,
                     const Tensor& scores_ab) {
    const Tensor& p = pairs.weights;
    const Tensor centred_a = minus(scores_a, row_sum(times(p, scores_a)));
    const Tensor centred_b = minus(scores_b, row_sum(times(p, scores_b)));
    a = times(p, centred_a);
    b = times(p, centred_b);
    lse_ab = row_sum(plus(times(b, scores_a), times(p, scores_ab)));
    ab = plus(times(b, centred_a), times(p, minus(scores_ab, lse_ab)));
  }
};

Tensor bias_grad(const Tensor& grad, const Tensor& bias) {
  return grad.sum_to_size_symint(bias.sym_sizes()).to(bias.scalar_type());
}

// x in the form of `like`; a zero is written out.
Tensor as(const Tensor& like, const Tensor& x) {
  return x.defined() ? x.to(like.scalar_type()) : at::zeros_like(like);
}

}  // namespace

std::tuple<Tensor, Tensor> forward_second(const Inputs& in, const Direction& a,
                                          const Direction& b) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const Attended pairs(in);
  const Direction da = pairs.direction(in, a), db = pairs.direction(in, b);
  const WeightsDerivatives p(pairs, pairs.scores(da), pairs.scores(db), pairs.scores(da, db));
  const Tensor out = plus(pairs.over_keys(pairs.dropped(p.ab), pairs.given.value),
                          pairs.over_keys(pairs.dropped(p.a), db.value),
                          pairs.over_keys(pairs.dropped(p.b), da.value));
  c10::SymDimVector sizes(in.query.sym_sizes().begin(), in.query.sym_sizes().end() - 1);
  const auto lse_options = in.query.options().dtype(sum_type(in.query));
  const Tensor lse =
      p.lse_ab.defined() ? p.lse_ab.squeeze(-1) : at::zeros_symint(sizes, lse_options);
  sizes.push_back(in.value.sym_size(-1));
  return {
      out.defined() ? out.to(in.query.scalar_type()) : at::zeros_symint(sizes, in.query.options()),
      lse};
}

std::array<Tensor, 4> backward_second(const Inputs& in, const Tensor& grad_out,
                                      const Tensor& grad_lse, const Direction& a,
                                      const Direction& b, const std::array<bool, 4>& wanted) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const Attended pairs(in, grad_out, grad_lse);
  const Direction da = pairs.direction(in, a), db = pairs.direction(in, b);
  const WeightsDerivatives p(pairs, pairs.scores(da), pairs.scores(db), pairs.scores(da, db));

  // dS = P ∘ (dP - delta), with delta = rowsum(P ∘ dP) - dL: the product rule, twice.
  const Tensor g = pairs.grad_weights(), g_a = pairs.grad_weights(da), g_b = pairs.grad_weights(db),
               g_ab = pairs.grad_weights(da, db);
  const Tensor& w = pairs.weights;
  const Tensor c = minus(g, minus(row_sum(times(w, g)), pairs.given.grad_lse)),
               c_a = minus(g_a, minus(row_sum(plus(times(p.a, g), times(w, g_a))), da.grad_lse)),
               c_b = minus(g_b, minus(row_sum(plus(times(p.b, g), times(w, g_b))), db.grad_lse)),
               c_ab = minus(g_ab, row_sum(plus(times(p.ab, g), times(p.a, g_b), times(p.b, g_a),
                                               times(w, g_ab))));
  const Tensor s = pairs.select(times(w, c)),
               s_a = pairs.select(plus(times(p.a, c), times(w, c_a))),
               s_b = pairs.select(plus(times(p.b, c), times(w, c_b))),
               s_ab = pairs.select(
                   plus(times(p.ab, c), times(p.a, c_b), times(p.b, c_a), times(w, c_ab)));

  std::array<Tensor, 4> grads;
  if (wanted[0])
    grads[0] = as(in.query, scaled(plus(pairs.over_keys(s_ab, pairs.given.key),
                                        pairs.over_keys(s_a, db.key), pairs.over_keys(s_b, da.key)),
                                   pairs.scale));
  const auto for_keys = [&](const Tensor& like, const Tensor& x, double factor) {
    return as(like, x.defined() ? sum_heads(x.mul(factor), like.sym_size(-3)) : x);
  };
  if (wanted[1])
    grads[1] = for_keys(in.key,
                        plus(pairs.over_queries(s_ab, pairs.given.query),
                             pairs.over_queries(s_a, db.query), pairs.over_queries(s_b, da.query)),
                        pairs.scale);
  if (wanted[2])
    grads[2] = for_keys(in.value,
                        plus(pairs.over_queries(pairs.dropped(p.ab), pairs.given.grad_out),
                             pairs.over_queries(pairs.dropped(p.a), db.grad_out),
                             pairs.over_queries(pairs.dropped(p.b), da.grad_out)),
                        1.0);
  if (wanted[3]) grads[3] = s_ab.defined() ? bias_grad(s_ab, *in.bias) : at::zeros_like(*in.bias);
  return grads;
}

namespace {

Tensor index_of(at::IntArrayRef values, const Tensor& like) {
  std::vector<Tensor> items;
  for (const int64_t value : values)
    items.push_back(at::full({}, value, like.options().dtype(at::kLong)));
  return items.empty() ? at::empty({0}, like.options().dtype(at::kLong)) : at::stack(items);
}

// The parts of the inputs that the selected weights are made of, in the precision of the sums.
struct Selected {
  const Inputs& in;
  Tensor heads, rows;  // undefined: all
  double scale;
  Tensor query, key, seen, weights;

  Selected(const Inputs& in, const Weights& w)
      : in(in),
        heads(w.heads ? index_of(*w.heads, in.query) : Tensor()),
        rows(w.rows ? index_of(*w.rows, in.query) : Tensor()),
        scale(in.options.scale) {
    query = of_query(in.query);
    key = of_key(in.key);
    seen = of_pairs(visible(in));
    weights = w.weights.to(sum_type(in.query));
  }
  Tensor of_query(const Tensor& x) const { return pick(pick(wide(x), heads, -3), rows, -2); }
  Tensor of_key(const Tensor& x) const {
    return x.defined() ? pick(share_heads(wide(x), in.query.sym_size(-3)), heads, -3) : x;
  }
  Tensor of_pairs(const Tensor& x) const {
    if (!x.defined()) return x;
    c10::SymDimVector sizes(in.query.sym_sizes().begin(), in.query.sym_sizes().end() - 1);
    sizes.push_back(in.key.sym_size(-2));
    return pick(pick(x.expand_symint(sizes), heads, -3), rows, -2);
  }
  Tensor scores(const Direction& a) const {
    const Tensor products =
        plus(product_t(of_query(a.query), key), product_t(query, of_key(a.key)));
    return select_pairs(seen, plus(scaled(products, scale), of_pairs(wide(a.bias))));
  }
  // The transposes of the selections: what was not selected has no gradient.
  Tensor query_grad(const Tensor& x) const {
    const Tensor grad = spread(x, rows, -2, in.query.sym_size(-2));
    return as(in.query, spread(grad, heads, -3, in.query.sym_size(-3)));
  }
  Tensor key_grad(const Tensor& x) const {
    const Tensor grad = spread(x, heads, -3, in.query.sym_size(-3));
    return as(in.key, sum_heads(grad, in.key.sym_size(-3)));
  }
  Tensor bias_grad_of(const Tensor& x) const {
    const Tensor grad = spread(x, rows, -2, in.query.sym_size(-2));
    return bias_grad(spread(grad, heads, -3, in.query.sym_size(-3)), *in.bias);
  }

 private:
  Tensor wide(const Tensor& x) const { return x.defined() ? x.to(sum_type(in.query)) : x; }
  static Tensor pick(const Tensor& x, const Tensor& index, int64_t dim) {
    return x.defined() && index.defined() ? x.index_select(dim, index) : x;
  }
  static Tensor spread(const Tensor& x, const Tensor& index, int64_t dim, const SymInt& size) {
    if (!index.defined()) return x;
    c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    sizes[sizes.size() + dim] = size;
    return at::zeros_symint(sizes, x.options()).index_add(dim, index, x);
  }
};

}  // namespace

Tensor weights_tangent(const Inputs& in, const Weights& weights, const Direction& a) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const Selected part(in, weights);
  const Tensor s = part.scores(a);
  return as(weights.weights, times(part.weights, minus(s, row_sum(times(part.weights, s)))));
}

std::array<Tensor, 3> weights_backward_tangent(const Inputs& in, const Weights& weights,
                                               const Tensor& grad_weights, const Direction& a,
                                               const Tensor& grad_weights_tangent,
                                               const std::array<bool, 3>& wanted) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const Selected part(in, weights);
  const auto type = part.weights.scalar_type();
  const Tensor& w = part.weights;
  const Tensor s = part.scores(a), w_a = times(w, minus(s, row_sum(times(w, s))));
  const Tensor g = select_pairs(part.seen, grad_weights.to(type));
  const Tensor g_a = grad_weights_tangent.defined()
                         ? select_pairs(part.seen, grad_weights_tangent.to(type))
                         : Tensor();
  const Tensor centred = minus(g, row_sum(times(w, g)));
  const Tensor centred_a = minus(g_a, row_sum(plus(times(w_a, g), times(w, g_a))));
  const Tensor t = select_pairs(part.seen, times(w, centred)),
               t_a = select_pairs(part.seen, plus(times(w_a, centred), times(w, centred_a)));

  std::array<Tensor, 3> grads;
  if (wanted[0])
    grads[0] = part.query_grad(
        plus(product(part.seen, t_a, part.key), product(part.seen, t, part.of_key(a.key)))
            .mul(part.scale));
  if (wanted[1])
    grads[1] = part.key_grad(
        plus(product(part.seen.transpose(-1, -2), t_a.transpose(-1, -2), part.query),
             product(part.seen.transpose(-1, -2), t.transpose(-1, -2), part.of_query(a.query)))
            .mul(part.scale));
  if (wanted[2]) grads[2] = part.bias_grad_of(t_a);
  return grads;
}

}  // namespace mha_ext::composite

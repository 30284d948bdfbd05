// Every check of an argument: one line that names it, what it must be, what it was and the fix.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "problem.h"
#include "sizes.h"

namespace mha_ext {
namespace {

// With this bound and that of a window (problem.cpp) no sum of positions leaves int64.
constexpr int64_t kMaxOrigin = int64_t{1} << 60;

struct DTypeName {
  at::ScalarType type;
};
std::ostream& operator<<(std::ostream& stream, DTypeName name) {
  return stream << c10::getDtypeNames(name.type).first;
}
DTypeName dtype_of(const Tensor& tensor) { return {tensor.scalar_type()}; }

bool is_floating(const Tensor& t) { return c10::isFloatingType(t.scalar_type()); }
bool is_integer(const Tensor& t) {
  return c10::isIntegralType(t.scalar_type(), /*includeBool=*/false);
}

void check_device(const char* name, const Tensor& tensor, const Tensor& query) {
  require_value(tensor.device() == query.device(), name, " must be on query's device ",
                query.device(), ", but is on ", tensor.device(), "; pass ", name,
                ".to(query.device)");
}

void check_same_dtype(const char* name, const Tensor& tensor, const Tensor& query) {
  require_type(tensor.scalar_type() == query.scalar_type(), name, " must have query's dtype ",
               dtype_of(query), ", but is ", dtype_of(tensor), "; pass ", name, ".to(query.dtype)");
}

SymBool same_sizes(const Tensor& tensor, c10::SymIntArrayRef sizes) {
  if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  SymBool same = true;
  for (size_t i = 0; i < sizes.size(); i++) same = same & tensor.sym_size(i).sym_eq(sizes[i]);
  return same;
}

// Query decides how many dimensions of groups there are.
void check_rank(const char* name, const Tensor& tensor, const Tensor& query) {
  const int64_t rank = std::max<int64_t>(4, query.dim());
  require_value(tensor.dim() == rank, name, " must have ", rank, " dimensions [",
                rank > 4 ? "..., " : "", "batch, heads, length, head_dim], but has shape ",
                tensor.sym_sizes(), "; split the heads with ", name,
                ".unflatten(-1, (heads, head_dim)).transpose(1, 2)");
}

void check_groups(const char* name, const Tensor& tensor, const Tensor& query) {
  if (group_dims(query) == 0) return;
  SymBool same = true;
  for (int64_t i = 0; i < group_dims(query); i++)
    same = same & tensor.sym_size(i).sym_eq(query.sym_size(i));
  require_value(same, name, " must have query's leading dimensions ", group_sizes(query),
                ", but has shape ", tensor.sym_sizes(), "; expand it to them");
}

void check_query_dtype(const Tensor& query) {
  const at::ScalarType type = query.scalar_type();
  require_type(
      type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble,
      "query must be float64, float32, bfloat16 or float16, but is ", dtype_of(query),
      query.is_complex() ? "; pass its real part, query.real" : "; pass query.float()");
}

void check_key(const Tensor& query, const Tensor& key) {
  check_groups("key", key, query);
  require_value(key.sym_size(-4).sym_eq(query.sym_size(-4)), "key must have query's batch size ",
                query.sym_size(-4), ", but has shape ", key.sym_sizes(),
                "; expand or repeat the smaller of the two");
  const SymInt heads = query.sym_size(-3), kv_heads = key.sym_size(-3);
  const bool none = TORCH_GUARD_OR_FALSE(kv_heads.sym_eq(0));
  require_value(none ? heads.sym_eq(0) : (heads % kv_heads).sym_eq(0),
                "key must have a number of heads that divides query's ", heads, ", but has ",
                kv_heads, "; repeat its heads, e.g. key.repeat_interleave(n, 1)");
  require_value(key.sym_size(-1).sym_eq(query.sym_size(-1)), "key must have query's head_dim ",
                query.sym_size(-1), ", but has ", key.sym_size(-1),
                "; project both to the same width");
  require_value(query.sym_size(-1).sym_ge(1) & query.sym_size(-1).sym_le(kMaxHeadDim),
                "query must have a head_dim from 1 to ", kMaxHeadDim, ", but has ",
                query.sym_size(-1), "; split the width over another number of heads");
}

void check_value(const Tensor& key, const Tensor& value) {
  check_groups("value", value, key);
  const char* fix[] = {"expand or repeat the smaller of the two", "give both the same heads",
                       "give each key one value"};
  const char* what[] = {"batch size ", "number of heads ", "length "};
  for (int i = 0; i < 3; i++)
    require_value(value.sym_size(i - 4).sym_eq(key.sym_size(i - 4)), "value must have key's ",
                  what[i], key.sym_size(i - 4), ", but has ", value.sym_size(i - 4), " (shape ",
                  value.sym_sizes(), "); ", fix[i]);
  require_value(value.sym_size(-1).sym_le(kMaxHeadDim), "value must have a head_dim of at most ",
                kMaxHeadDim, ", but has ", value.sym_size(-1),
                "; split the width over another number of heads");
}

// "mask" or "bias" against [*G, B, H, Lq, Lk]; without any dimension of groups it is shared by
// them.
void check_pairs(const char* name, const Tensor& pairs, const Tensor& query, const Tensor& key) {
  std::vector<SymInt> full = query.sym_sizes().vec();
  full.back() = key.sym_size(-2);
  const auto sizes = pairs.sym_sizes();
  const int64_t missing = query.dim() - pairs.dim();
  const bool rank_fits = pairs.dim() <= 4 || missing == 0;
  SymBool fits = rank_fits;
  for (int64_t i = missing; rank_fits && i < query.dim(); i++) {
    const SymInt& size = sizes[i - missing];
    fits = fits & (size.sym_eq(full[i]) | size.sym_eq(1));
  }
  require_value(fits, name, " must broadcast to [", group_dims(query) ? "..., " : "",
                "batch, heads, queries, keys] = ", c10::SymIntArrayRef(full), ", but has shape ",
                sizes, "; give it dimensions of size 1, e.g. ", name,
                "[:, None, None, :] for [batch, keys]");
}

void check_mask(const Tensor& mask, const Tensor& query, const Tensor& key) {
  require_type(!is_floating(mask), "mask must be bool or integer (nonzero = attend), but is ",
               dtype_of(mask),
               "; pass mask.bool() to keep nonzero positions, or bias=mask to add it");
  require_type(c10::isIntegralType(mask.scalar_type(), /*includeBool=*/true),
               "mask must be bool or integer (nonzero = attend), but is ", dtype_of(mask),
               "; pass mask != 0");
  check_device("mask", mask, query);
  check_pairs("mask", mask, query, key);
}

void check_bias(const Tensor& bias, const Tensor& query, const Tensor& key) {
  const char* also = query.scalar_type() == at::kFloat ? "" : " or float32";
  require_type(bias.scalar_type() == query.scalar_type() || bias.scalar_type() == at::kFloat,
               "bias must have query's dtype ", dtype_of(query), also, ", but is ", dtype_of(bias),
               "; pass ",
               is_floating(bias) ? "bias.to(query.dtype)" : "mask=bias if nonzero means attend");
  check_device("bias", bias, query);
  check_pairs("bias", bias, query, key);
}

void check_key_lengths(const Tensor& key_lengths, const Tensor& query) {
  require_type(is_integer(key_lengths), "key_lengths must be an integer tensor, but is ",
               dtype_of(key_lengths), "; pass key_lengths.long(), or mask=... for a mask");
  check_device("key_lengths", key_lengths, query);
  const std::vector<SymInt> full = with_groups(query, {query.sym_size(-4)});
  require_value(same_sizes(key_lengths, c10::SymIntArrayRef(full).slice(group_dims(query))) |
                    same_sizes(key_lengths, full),
                "key_lengths must have shape [", group_dims(query) ? "..., " : "",
                "batch] = ", c10::SymIntArrayRef(full), ", but has ", key_lengths.sym_sizes(),
                "; pass one length for each batch entry");
}

void check_seed(const Tensor& seed, const Tensor& query) {
  const char* fix = "; draw it with torch.randint(0, 2**32, (2,), device=query.device)";
  require_type(seed.scalar_type() == at::kLong, "seed must be an int64 tensor, but is ",
               dtype_of(seed), fix);
  check_device("seed", seed, query);
  const std::vector<SymInt> full = with_groups(query, {SymInt(2)});
  require_value(same_sizes(seed, {SymInt(2)}) | same_sizes(seed, full), "seed must have shape ",
                c10::SymIntArrayRef(full), ", but has ", seed.sym_sizes(), fix);
}

void check_window(const char* name, const std::optional<SymInt>& window) {
  if (window)
    require_value(window->sym_ge(0), name, " must be None (unbounded) or at least 0, but is ",
                  *window, "; pass None for no bound");
}

void check_options(const Options& options, bool has_seed) {
  if (const auto& corner = options.corner)
    require_value(*corner == "upper_left" || *corner == "lower_right",
                  "corner must be None, \"upper_left\" or \"lower_right\", but is \"", *corner,
                  "\"; name the corner that the diagonal runs through");
  check_window("window_left", options.window_left);
  check_window("window_right", options.window_right);
  require_value(std::isfinite(options.scale), "scale must be finite, but is ", options.scale,
                "; pass head_dim ** -0.5, the usual one");
  require_value(options.dropout_p >= 0.0 && options.dropout_p < 1.0,
                "dropout_p must be at least 0 and less than 1, but is ", options.dropout_p,
                "; pass the fraction to drop, e.g. 0.1");
  require_value(options.dropout_p == 0.0 || has_seed,
                "seed must be given where dropout_p is greater than 0, but is None; draw it with "
                "torch.randint(0, 2**32, (2,), device=query.device)");
  require_value(options.origin.size() == 4,
                "origin must be the 4 positions (batch, head, query, key), but is ", options.origin,
                "; pass (0, 0, 0, 0) for the whole");
  for (const SymInt& position : options.origin)
    require_value(position.sym_ge(0) & position.sym_le(kMaxOrigin),
                  "origin must hold positions from 0 to 2**60, but is ", options.origin,
                  "; pass (0, 0, 0, 0) for the whole");
}

// A tensor that an earlier call returned, or its gradient.
void check_like(const char* name, const Tensor& tensor, at::ScalarType type,
                c10::SymIntArrayRef sizes, const Tensor& query) {
  require_type(tensor.scalar_type() == type, name, " must be ", DTypeName{type}, ", but is ",
               dtype_of(tensor), "; pass what the forward returned or gave a gradient to");
  check_device(name, tensor, query);
  require_value(same_sizes(tensor, sizes), name, " must have shape ", sizes, ", but has ",
                tensor.sym_sizes(), "; pass what the forward returned or gave a gradient to");
}

void check_lse(const char* name, const Tensor& lse, const Tensor& query) {
  check_like(name, lse, lse_type(query), query.sym_sizes().slice(0, query.dim() - 1), query);
}

// A direction of the derivative in a tensor, or a tangent that an earlier call returned.
void check_tangent(const char* name, const OptionalTensor& tangent, const char* of,
                   const Tensor& tensor) {
  if (!tangent) return;
  require_type(tangent->scalar_type() == tensor.scalar_type(), name, " must have ", of, "'s dtype ",
               dtype_of(tensor), ", but is ", dtype_of(*tangent), "; pass ", name, ".to(", of,
               ".dtype)");
  require_value(tangent->device() == tensor.device(), name, " must be on ", of, "'s device ",
                tensor.device(), ", but is on ", tangent->device(), "; pass ", name, ".to(", of,
                ".device)");
  require_value(same_sizes(*tangent, tensor.sym_sizes()), name, " must have ", of, "'s shape ",
                tensor.sym_sizes(), ", but has ", tangent->sym_sizes(),
                "; pass one number for each of ", of, ", or None for zero");
}

void check_indices(const char* name, at::OptionalIntArrayRef indices, const SymInt& count) {
  if (!indices || indices->empty()) return;
  const auto [first, last] = std::minmax_element(indices->begin(), indices->end());
  require_value(SymBool(*first >= 0) & count.sym_gt(*last), name,
                " must be indices from 0 to below ", count, ", but are ", *indices,
                "; leave it out for all of them");
}

}  // namespace

void check_shapes(const Tensor& query, const Tensor& key, const Tensor* value,
                  const OptionalTensor& mask, const OptionalTensor& bias,
                  const OptionalTensor& key_lengths, const OptionalTensor& seed,
                  const Options& options) {
  check_rank("query", query, query);
  check_query_dtype(query);
  check_rank("key", key, query);
  check_same_dtype("key", key, query);
  check_device("key", key, query);
  if (value) {
    check_rank("value", *value, query);
    check_same_dtype("value", *value, query);
    check_device("value", *value, query);
  }
  check_key(query, key);
  if (value) check_value(key, *value);
  if (mask) check_mask(*mask, query, key);
  if (bias) check_bias(*bias, query, key);
  if (key_lengths) check_key_lengths(*key_lengths, query);
  if (seed) check_seed(*seed, query);
  check_options(options, seed.has_value());
}

void check_saved(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                 const Tensor& query, const Tensor& value, const Tensor& out, const Tensor& lse,
                 const OptionalTensor& lse_low) {
  std::vector<SymInt> sizes = query.sym_sizes().vec();
  sizes.back() = value.sym_size(-1);
  if (grad_out) check_like("grad_out", *grad_out, query.scalar_type(), sizes, query);
  check_like("out", out, query.scalar_type(), sizes, query);
  check_lse("lse", lse, query);
  if (lse_low) check_lse("lse_low", *lse_low, query);
  if (grad_lse) check_lse("grad_lse", *grad_lse, query);
}

void check_tangents(const Tangents& tangents, const Tensor& query, const Tensor& key,
                    const Tensor& value, const OptionalTensor& bias) {
  check_tangent("query_tangent", tangents.query, "query", query);
  check_tangent("key_tangent", tangents.key, "key", key);
  check_tangent("value_tangent", tangents.value, "value", value);
  require_value(bias || !tangents.bias,
                "bias_tangent must be None where bias is None, but is a tensor; pass both, or "
                "neither");
  if (bias) check_tangent("bias_tangent", tangents.bias, "bias", *bias);
}

void check_saved_tangents(const SavedTangents& tangents, const Tensor& out, const Tensor& lse) {
  check_tangent("out_tangent", tangents.out, "out", out);
  check_tangent("lse_tangent", tangents.lse, "lse", lse);
  check_tangent("grad_out_tangent", tangents.grad_out, "out", out);
  check_tangent("grad_lse_tangent", tangents.grad_lse, "lse", lse);
}

void check_selection(const Tensor& query, const OptionalTensor& lse, const OptionalTensor& lse_low,
                     at::OptionalIntArrayRef heads, at::OptionalIntArrayRef rows) {
  if (lse) check_lse("lse", *lse, query);
  if (lse_low) check_lse("lse_low", *lse_low, query);
  require_value(lse || !lse_low,
                "lse_low must be None where lse is None, but is a tensor; pass both, or "
                "neither to compute them");
  check_indices("heads", heads, query.sym_size(-3));
  check_indices("rows", rows, query.sym_size(-2));
}

void check_weights(const char* name, const Tensor& weights, const Tensor& query, const Tensor& key,
                   at::OptionalIntArrayRef heads, at::OptionalIntArrayRef rows) {
  check_like(name, weights, query.scalar_type(), weight_sizes(query, key, heads, rows), query);
}

}  // namespace mha_ext

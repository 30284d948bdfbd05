#include "problem.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/DimVector.h>

#include <algorithm>
#include <cmath>

#include "sizes.h"
#include "spec/dropout.h"

namespace mha_ext {
namespace {

// A window this wide is unbounded; with the bound of origin (checks.cpp) no sum leaves int64.
constexpr int64_t kFar = int64_t{1} << 61;

DType dtype(const Tensor& query) {
  switch (query.scalar_type()) {
    case at::kDouble:
      return DType::kFloat64;
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat16;
  }
}

Band band(const Options& options) {
  Band band;
  band.lower_right = options.corner && *options.corner == "lower_right";
  band.left_bounded = options.window_left.has_value();
  band.right_bounded = options.window_right.has_value();
  if (band.left_bounded) band.left = std::min(options.window_left->expect_int(), kFar);
  if (band.right_bounded) band.right = std::min(options.window_right->expect_int(), kFar);
  return band;
}

Dropout dropout(double p) {
  Dropout dropout;
  dropout.threshold = drop_threshold(p);
  dropout.keep_scale = keep_scale(dropout.threshold);
  return dropout;
}

// int64, contiguous where a group reads them, and of values that mean something.
Tensor lengths(const Tensor& key_lengths, int64_t keys, std::vector<Tensor>& keep) {
  const Tensor as_long = key_lengths.to(at::kLong), found = *contiguous_in(as_long, 1, keep);
  keep.push_back(found);
  if (!key_lengths.is_cpu()) return found;
  const Tensor each = found.contiguous();
  const int64_t* length = each.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < each.numel(); i++)
    require_value(0 <= length[i] && length[i] <= keys,
                  "key_lengths must be from 0 to the length of key, ", keys, ", but entry ", i,
                  " is ", length[i], "; pass key_lengths.clamp(0, ", keys, ")");
  return found;
}

// Elements from the first group to this one, in a tensor whose own dimensions are the last `own`.
int64_t group_offset(const Tensor& tensor, int64_t own, int64_t group) {
  int64_t offset = 0;
  for (int64_t i = tensor.dim() - own - 1; group && i >= 0; group /= tensor.size(i), i--)
    offset += group % tensor.size(i) * tensor.stride(i);
  return offset;
}

// A mask or bias that some groups share, expanded to all of them: group_offset counts in them.
Tensor in_groups(const Tensor& pairs, const Tensor& query) {
  if (pairs.dim() <= 4) return pairs;
  std::vector<int64_t> sizes = query.sizes().slice(0, group_dims(query)).vec();
  sizes.insert(sizes.end(), 4, -1);
  return pairs.expand(sizes);
}

// The kernels write only to what the binding has just allocated, so no copy-on-write tensor is
// written.
void* address(const Tensor& tensor, int64_t offset) {
  void* const data = const_cast<void*>(tensor.const_data_ptr());
  return offset ? static_cast<char*>(data) + offset * tensor.element_size() : data;
}

// A tensor on the device of `like`. The dispatcher would take longer than a small problem on a CPU.
Tensor empty(c10::SymIntArrayRef sizes, const Tensor& like, at::ScalarType type) {
  if (!like.is_cpu()) return at::empty_symint(sizes, like.options().dtype(type));
  return at::detail::empty_cpu(C10_AS_INTARRAYREF_SLOW(sizes), type);
}
Tensor empty_nothing(const Tensor& like) { return empty({0}, like, like.scalar_type()); }

// `sizes` = [..., heads, length, dim] as a view of a contiguous [..., length, heads, dim] buffer.
Tensor empty_heads(c10::SymIntArrayRef sizes, const Tensor& like) {
  c10::SymDimVector buffer(sizes.begin(), sizes.end());
  std::swap(buffer[buffer.size() - 3], buffer[buffer.size() - 2]);
  const Tensor made = empty(buffer, like, like.scalar_type());
  if (!like.is_cpu()) return made.transpose(-3, -2);
  c10::DimVector strides(made.strides().begin(), made.strides().end());
  std::swap(strides[strides.size() - 3], strides[strides.size() - 2]);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), strides);
  return made;
}

}  // namespace

int64_t group_count(const Tensor& query) {
  int64_t count = 1;
  for (int64_t i = 0; i < group_dims(query); i++) count *= query.size(i);
  return count;
}

Groups<Attention> describe(const Tensor& query, const Tensor& key, const Tensor* value,
                           const OptionalTensor& mask, const OptionalTensor& bias,
                           const OptionalTensor& key_lengths, const OptionalTensor& seed,
                           const Options& options, std::vector<Tensor>& keep) {
  check_shapes(query, key, value, mask, bias, key_lengths, seed, options);
  Attention a;
  a.dtype = dtype(query);
  a.batch = query.size(-4);
  a.heads = query.size(-3);
  a.kv_heads = key.size(-3);
  a.queries = query.size(-2);
  a.keys = key.size(-2);
  a.head_dim = query.size(-1);
  a.value_dim = value ? value->size(-1) : 0;
  a.scale = options.scale;
  a.uniform_empty_rows = options.uniform_empty_rows;
  a.bias_is_float32 = bias && bias->scalar_type() == at::kFloat;
  a.band = band(options);
  a.dropout = dropout(options.dropout_p);
  a.origin = {options.origin[0].expect_int(), options.origin[1].expect_int(),
              options.origin[2].expect_int(), options.origin[3].expect_int()};

  Groups<Attention> groups(static_cast<size_t>(std::max<int64_t>(1, group_count(query))), a);
  set(groups, &Attention::query, query, keep);
  set(groups, &Attention::key, key, keep);
  if (value) set(groups, &Attention::value, *value, keep);
  if (mask) set(groups, &Attention::mask, in_groups(*mask, query));
  if (bias) set(groups, &Attention::bias, in_groups(*bias, query));
  Tensor each_length, each_seed;
  if (key_lengths) each_length = lengths(*key_lengths, a.keys, keep);
  if (a.dropout.threshold) each_seed = *contiguous_in(*seed, 1, keep);
  for (size_t i = 0; i < groups.size(); i++) {
    const int64_t group = static_cast<int64_t>(i);
    if (key_lengths)
      groups[i].key_lengths = static_cast<const int64_t*>(values_of(each_length, 1, group));
    if (a.dropout.threshold)
      groups[i].dropout.seed = static_cast<const int64_t*>(values_of(each_seed, 1, group));
  }
  return groups;
}

c10::MaybeOwned<Tensor> contiguous_in(const Tensor& tensor, int64_t own,
                                      std::vector<Tensor>& keep) {
  int64_t stride = 1;
  bool contiguous = true;
  for (int64_t i = tensor.dim() - 1; i >= tensor.dim() - own; i--) {
    contiguous &= tensor.stride(i) == stride || tensor.size(i) <= 1;
    stride *= tensor.size(i);
  }
  using Found = c10::MaybeOwned<Tensor>;
  if (contiguous || tensor.numel() == 0) return Found::borrowed(tensor);
  Tensor once = tensor;
  for (int64_t i = 0; i < tensor.dim() - own; i++)
    if (tensor.stride(i) == 0) once = once.narrow(i, 0, 1);
  keep.push_back(once.contiguous());
  return Found::owned(keep.back().expand(tensor.sizes()));
}

Rows rows_of(const Tensor& tensor, int64_t group) {
  return {address(tensor, group_offset(tensor, 4, group)), tensor.stride(-4), tensor.stride(-3),
          tensor.stride(-2)};
}

Pairs pairs_of(const Tensor& tensor, int64_t group) {
  int64_t strides[4] = {0, 0, 0, 0};
  const int64_t groups = std::max<int64_t>(0, tensor.dim() - 4);
  for (int64_t i = groups; i < tensor.dim(); i++)
    if (tensor.size(i) != 1) strides[4 - tensor.dim() + i] = tensor.stride(i);
  int64_t bits = 0;
  for (int64_t i = 0; i + 1 < tensor.dim(); i++) bits |= tensor.stride(i);
  return {address(tensor, group_offset(tensor, 4, group)),
          strides[0],
          strides[1],
          strides[2],
          strides[3],
          static_cast<int32_t>(tensor.element_size()),
          static_cast<int32_t>(bits & 0xff)};
}

void* values_of(const Tensor& tensor, int64_t own, int64_t group) {
  return address(tensor, group_offset(tensor, own, group));
}

Tensor empty_lse(const Tensor& query, bool wanted) {
  if (!wanted) return empty({0}, query, lse_type(query));
  return empty(query.sym_sizes().slice(0, query.dim() - 1), query, lse_type(query));
}

Tensor empty_out(const Tensor& query, const Tensor& value) {
  c10::SymDimVector sizes(query.sym_sizes().begin(), query.sym_sizes().end());
  sizes.back() = value.sym_size(-1);
  return empty_heads(sizes, query);
}

Tensor empty_grad(const Tensor& tensor, bool wanted) {
  if (!wanted) return empty_nothing(tensor);
  return tensor.is_contiguous_or_false() ? empty(tensor.sym_sizes(), tensor, tensor.scalar_type())
                                         : empty_heads(tensor.sym_sizes(), tensor);
}

Tensor empty_grad_bias(const Tensor& query, const OptionalTensor& bias, bool wanted) {
  if (!bias || !wanted) return empty_nothing(query);
  if (group_dims(query) > 0) {
    SymBool same = bias->dim() == query.dim();
    for (int64_t i = 0; bias->dim() == query.dim() && i < group_dims(query); i++)
      same = same & bias->sym_size(i).sym_eq(query.sym_size(i));
    require_value(same, "bias must have query's leading dimensions ", group_sizes(query),
                  " where its gradient is wanted, but has shape ", bias->sym_sizes(),
                  "; expand it to them");
  }
  return empty(bias->sym_sizes(), *bias, bias->scalar_type());
}
Tensor zero_grad_bias(const Tensor& query, const OptionalTensor& bias, bool wanted) {
  return empty_grad_bias(query, bias, wanted).zero_();
}

Tensor empty_weights(const Tensor& query, const Tensor& key, at::OptionalIntArrayRef heads,
                     at::OptionalIntArrayRef rows) {
  return empty(weight_sizes(query, key, heads, rows), query, query.scalar_type());
}

}  // namespace mha_ext

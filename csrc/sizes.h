// What the checks and the description of a problem share: sizes of its tensors, groups in front,
// and how a check raises.
#pragma once
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <vector>

namespace mha_ext {

using at::Tensor;
using c10::SymBool;
using c10::SymInt;
using OptionalTensor = std::optional<at::Tensor>;

// Functions and not macros: the words are passed by reference and put together only on failure.
template <class... Words>
void require_value(const SymBool& condition, const Words&... words) {
  const std::optional<bool> known = condition.maybe_as_bool();
  const bool holds = known ? *known : condition.expect_true(__FILE__, __LINE__);
  if (!holds) TORCH_CHECK_VALUE(false, words...);
}

template <class... Words>
void require_type(bool condition, const Words&... words) {
  if (!condition) TORCH_CHECK_TYPE(false, words...);
}

inline at::ScalarType lse_type(const Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Dimensions of query, or of a tensor like it, before the last four: vmap puts groups there.
inline int64_t group_dims(const Tensor& query) { return query.dim() - 4; }
inline c10::SymIntArrayRef group_sizes(const Tensor& query) {
  return query.sym_sizes().slice(0, group_dims(query));
}

// [*G, own...], where query is [*G, B, H, Lq, D].
inline std::vector<SymInt> with_groups(const Tensor& query, std::initializer_list<SymInt> own) {
  std::vector<SymInt> sizes = group_sizes(query).vec();
  sizes.insert(sizes.end(), own);
  return sizes;
}

inline SymInt selected(at::OptionalIntArrayRef indices, const SymInt& count) {
  return indices ? SymInt(static_cast<int64_t>(indices->size())) : count;
}

inline std::vector<SymInt> weight_sizes(const Tensor& query, const Tensor& key,
                                        at::OptionalIntArrayRef heads,
                                        at::OptionalIntArrayRef rows) {
  return with_groups(query, {query.sym_size(-4), selected(heads, query.sym_size(-3)),
                             selected(rows, query.sym_size(-2)), key.sym_size(-2)});
}

}  // namespace mha_ext

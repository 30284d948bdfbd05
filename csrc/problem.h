// From what the dispatcher passes to the plain struct of spec/attention.h. The only place that
// validates.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/MaybeOwned.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "spec/attention.h"

namespace mha_ext {

// The keyword-only options, as they come from the dispatcher.
struct Options {
  std::optional<std::string_view> corner;
  std::optional<c10::SymInt> window_left, window_right;
  double dropout_p = 0.0;
  double scale = 1.0;
  bool uniform_empty_rows = false;
  c10::SymIntArrayRef origin;  // batch, head, query, key
};

// Each check raises ValueError or TypeError: one line that names the argument, what it must be,
// what it was and the fix. They hold for symbolic sizes too and never read data.

// `value` is nullptr for attention_weights.
void check_shapes(const at::Tensor& query, const at::Tensor& key, const at::Tensor* value,
                  const std::optional<at::Tensor>& mask, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& key_lengths,
                  const std::optional<at::Tensor>& seed, const Options& options);

// Query may have any number of leading dimensions *G before [B, H, Lq, D] (vmap puts them there);
// then key, value and whatever is like them have the same. Mask and bias have all of these (1 where
// they are shared) or none, key_lengths [*G, B] and seed [*G, 2] all or none.

// What attention_backward takes beside that; no grad_out in attention_forward_tangent.
void check_saved(const std::optional<at::Tensor>& grad_out,
                 const std::optional<at::Tensor>& grad_lse, const at::Tensor& query,
                 const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
                 const std::optional<at::Tensor>& lse_low);

// The direction of a derivative; None = zero.
struct Tangents {
  const std::optional<at::Tensor>&query, &key, &value, &bias;
};
void check_tangents(const Tangents& tangents, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, const std::optional<at::Tensor>& bias);

// What attention_backward_tangent takes beside that.
struct SavedTangents {
  const std::optional<at::Tensor>&out, &lse, &grad_out, &grad_lse;
};
void check_saved_tangents(const SavedTangents& tangents, const at::Tensor& out,
                          const at::Tensor& lse);

// What attention_weights takes beside that.
void check_selection(const at::Tensor& query, const std::optional<at::Tensor>& lse,
                     const std::optional<at::Tensor>& lse_low, at::OptionalIntArrayRef heads,
                     at::OptionalIntArrayRef rows);

// What attention_weights_backward takes beside both: `name` is grad_weights or weights.
void check_weights(const char* name, const at::Tensor& weights, const at::Tensor& query,
                   const at::Tensor& key, at::OptionalIntArrayRef heads,
                   at::OptionalIntArrayRef rows);

// One struct for each group, at least one: they differ in nothing but addresses.
template <class Struct>
using Groups = c10::SmallVector<Struct, 1>;
int64_t group_count(const at::Tensor& query);

// Checks (check_shapes, and the values of key_lengths on the CPU) and fills the structs, except
// out, lse and lse_low. Tensors are read in place; `keep` owns what had to be copied or converted.
Groups<Attention> describe(const at::Tensor& query, const at::Tensor& key, const at::Tensor* value,
                           const std::optional<at::Tensor>& mask,
                           const std::optional<at::Tensor>& bias,
                           const std::optional<at::Tensor>& key_lengths,
                           const std::optional<at::Tensor>& seed, const Options& options,
                           std::vector<at::Tensor>& keep);

// How a group sees a tensor: with the dimensions of groups in front, or without, shared by them.

// [*G, B, H, L, D], the columns side by side.
Rows rows_of(const at::Tensor& tensor, int64_t group);
// Whatever broadcasts to [B, H, Lq, Lk]: stride 0 where the dimension is missing or has size 1.
Pairs pairs_of(const at::Tensor& tensor, int64_t group);
// Address of contiguous values whose own dimensions are the last `own`.
void* values_of(const at::Tensor& tensor, int64_t own, int64_t group);

// The tensor itself, or a copy (that `keep` owns) where its last `own` dimensions are not
// contiguous. What groups share by a stride of 0 is copied once.
c10::MaybeOwned<at::Tensor> contiguous_in(const at::Tensor& tensor, int64_t own,
                                          std::vector<at::Tensor>& keep);

// The same member of the struct of each group.
template <class Struct>
void set(Groups<Struct>& groups, Rows Struct::* member, const at::Tensor& tensor,
         std::vector<at::Tensor>& keep) {
  const auto rows = contiguous_in(tensor, 1, keep);
  for (size_t i = 0; i < groups.size(); i++)
    groups[i].*member = rows_of(*rows, static_cast<int64_t>(i));
}
template <class Struct>
void set(Groups<Struct>& groups, Pairs Struct::* member, const at::Tensor& tensor) {
  for (size_t i = 0; i < groups.size(); i++)
    groups[i].*member = pairs_of(tensor, static_cast<int64_t>(i));
}
// [*G, B, H, Lq].
template <class Struct>
void set(Groups<Struct>& groups, void* Struct::* member, const at::Tensor& tensor,
         std::vector<at::Tensor>& keep) {
  const auto values = contiguous_in(tensor, 3, keep);
  for (size_t i = 0; i < groups.size(); i++)
    groups[i].*member = values_of(*values, 3, static_cast<int64_t>(i));
}

// What the operators return, with the same strides from every backend and from the Meta key.

// [*G, B, H, Lq, Dv] as a view of a contiguous [*G, B, Lq, H, Dv] buffer, and [*G, B, H, Lq]; or an
// empty [0] where it is not wanted.
at::Tensor empty_out(const at::Tensor& query, const at::Tensor& value);
at::Tensor empty_lse(const at::Tensor& query, bool wanted = true);

// Gradient of a [*G, B, H, L, D] tensor: contiguous where it is, so that autograd can keep it as
// the leaf's, else of the form of out; or an empty [0] where it is not wanted.
at::Tensor empty_grad(const at::Tensor& tensor, bool wanted);

// Gradient of the bias, contiguous, or an empty [0] where it is not wanted or there is no bias. A
// bias that groups share has none: no sum runs across groups.
at::Tensor empty_grad_bias(const at::Tensor& query, const std::optional<at::Tensor>& bias,
                           bool wanted);
at::Tensor zero_grad_bias(const at::Tensor& query, const std::optional<at::Tensor>& bias,
                          bool wanted);

// [*G, B, heads, rows, Lk] contiguous.
at::Tensor empty_weights(const at::Tensor& query, const at::Tensor& key,
                         at::OptionalIntArrayRef heads, at::OptionalIntArrayRef rows);

}  // namespace mha_ext

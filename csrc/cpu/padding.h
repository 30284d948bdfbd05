// A mask that hides the last keys of a batch entry from all its queries, as padding does, says what
// lengths say, and they cost nothing: what they hide is as if it were not there.
#pragma once
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <vector>

#include "../problem.h"
#include "../spec/mask.h"
#include "attention.h"

namespace mha_ext::cpu {

// How many keys a row of a mask shows, if it shows the first ones and no others; else -1.
inline int64_t shown_keys(const Attention& a, int64_t b) {
  const Pairs& mask = a.mask;
  const int64_t step = mask.key * mask.item_size;
  const char* row = static_cast<const char*>(mask.data) + b * mask.batch * mask.item_size;
  int64_t shown = 0;
  for (int64_t k0 = 0; k0 < a.keys; k0 += kTile) {
    const int64_t keys = std::min(kTile, a.keys - k0);
    const uint64_t seen = mask_row(row + k0 * step, mask.key, mask.item_size, keys);
    if (seen & (seen + 1) || (seen && shown < k0)) return -1;
    shown += __builtin_popcountll(seen);
  }
  return shown;
}

// Puts lengths in the place of such a mask, where that moves no diagonal, and all groups have one.
// Where operands are cut into limbs, tiles that lengths cut have other bits than those that a mask
// does, and whether the masks of a whole batch are of padding must change none.
inline void find_padding(Groups<Attention>& groups, std::vector<at::Tensor>& keep) {
  const Attention& first = groups[0];
  const bool bounded = first.band.left_bounded || first.band.right_bounded;
  if (!first.mask.data || first.mask.query || first.mask.head ||
      (bounded && first.band.lower_right) || kernels_for(first).packs(first))
    return;
  c10::SmallVector<int64_t, 64> lengths;
  for (const Attention& a : groups)
    for (int64_t b = 0; b < a.batch; b++) {
      const int64_t shown = b && !a.mask.batch ? lengths.back() : shown_keys(a, b);
      if (shown < 0) return;
      lengths.push_back(shown);
    }
  const auto count = static_cast<int64_t>(lengths.size());
  keep.push_back(at::detail::empty_cpu({count}, at::kLong));
  int64_t* to = keep.back().mutable_data_ptr<int64_t>();
  std::copy(lengths.begin(), lengths.end(), to);
  for (Attention& a : groups) {
    for (int64_t b = 0; b < a.batch; b++) to[b] = std::min(to[b], key_count(a, b));
    a.key_lengths = to;
    a.mask = {};
    to += a.batch;
  }
}

// `describe`, and what padding is.
inline Groups<Attention> describe_padded(const at::Tensor& query, const at::Tensor& key,
                                         const at::Tensor* value, const OptionalTensor& mask,
                                         const OptionalTensor& bias,
                                         const OptionalTensor& key_lengths,
                                         const OptionalTensor& seed, const Options& options,
                                         std::vector<at::Tensor>& keep) {
  Groups<Attention> groups =
      describe(query, key, value, mask, bias, key_lengths, seed, options, keep);
  find_padding(groups, keep);
  return groups;
}

}  // namespace mha_ext::cpu

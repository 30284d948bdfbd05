// Rows of 16-bit elements that cannot be copied 16 bytes at a time, such as those of 50 columns.
// Where a kernel needs that, they are copied once to where it holds.
#pragma once
#include "launch.cuh"

namespace mha_ext::cuda {

// Where the launches of a few more kernels are little beside the rest.
HOST_DEVICE bool copies_are_little(const Attention& a) {
  constexpr int64_t kManyPairs = 1 << 16;
  return a.queries * a.keys >= kManyPairs;
}

// visit(rows, heads, length, width) for the rows that a kernel copies; g: in backward.
template <class Problem, class Grad, class Visit>
void for_each_rows(Problem& a, Grad* g, const Visit& visit) {
  visit(a.query, a.heads, a.queries, a.head_dim);
  visit(a.key, a.kv_heads, a.keys, a.head_dim);
  visit(a.value, a.kv_heads, a.keys, a.value_dim);
  if (g) visit(g->grad_out, a.heads, a.queries, a.value_dim);
}
inline bool all_in_pieces(const Attention& a, const AttentionGrad* g = nullptr) {
  bool all = true;
  for_each_rows(a, g, [&](const Rows& rows, int64_t, int64_t, int64_t) { all &= in_pieces(rows); });
  return all;
}

// Whether a bias of 16-bit type can be copied 16 bytes at a time: eight keys of a query. The sizes
// have no say, as in in_pieces.
inline bool bias_in_pieces(const Attention& a) {
  const Pairs& bias = a.bias;
  return !a.bias_is_float32 && bias.key == 1 && bias.row_bits % 8 == 0 &&
         (uintptr_t)bias.data % 16 == 0;
}

// The copies, for those rows that need one: their bytes of scratch; and makes them, so that a and g
// have their rows there.
int64_t aligned_bytes(const Attention& a, const AttentionGrad* g = nullptr);
const char* align_rows(Attention& a, AttentionGrad* g, void*& scratch, Stream stream);

}  // namespace mha_ext::cuda

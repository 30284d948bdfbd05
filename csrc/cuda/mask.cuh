// A mask as bits. The kernels of 16-bit types read a mask once for each head that shares it and
// each product, and a byte a pair is as much as they can wait for: a large mask is packed first.
#pragma once
#include "launch.cuh"

namespace mha_ext::cuda {

// A packed mask has this item size: its rows are words of 64 keys, its strides count words.
constexpr int32_t kPacked = 0;

// Where the launch of one more kernel is little beside the rest.
HOST_DEVICE bool mask_is_packed(const Attention& a) {
  constexpr int64_t kManyPairs = 1 << 16;
  return a.mask.data && a.queries * a.keys >= kManyPairs;
}
HOST_DEVICE Pairs packed_mask(const Attention& a, void* words) {
  Pairs to{words, 0, 0, 0, 1, kPacked};
  const int64_t row = ceil_div(a.keys, 64), head = (a.mask.query ? a.queries : 1) * row;
  if (a.mask.query) to.query = row;
  if (a.mask.head) to.head = head;
  if (a.mask.batch) to.batch = (a.mask.head ? a.heads : 1) * head;
  return to;
}
HOST_DEVICE int64_t packed_mask_bytes(const Attention& a) {
  if (!mask_is_packed(a)) return 0;
  const int64_t rows =
      (a.mask.batch ? a.batch : 1) * (a.mask.head ? a.heads : 1) * (a.mask.query ? a.queries : 1);
  return ceil_div(rows * ceil_div(a.keys, 64) * 8, 256) * 256;
}

// Writes the packed mask of `a` to the start of scratch, where it is packed at all: `a` has it then
// and scratch begins behind it.
const char* pack_mask(Attention& a, void*& scratch, Stream stream);

}  // namespace mha_ext::cuda

// The pairs of a block that decodes: which head and query its rows are, what they see, their bias.
#pragma once
#include "half.cuh"

namespace mha_ext::cuda {

// A block's batch entry, keys and rows, and the head and query of one of its rows; those that do
// not exist are as the last one.
struct DecodePlace {
  int64_t b, kv;
  int row0, rows;
};
struct DecodeRow {
  int64_t h;
  int i;
};
DEVICE DecodeRow decode_row(const Attention& a, const DecodePlace& place, int r) {
  const unsigned row = (unsigned)(place.row0 + (r < place.rows ? r : place.rows - 1));
  const unsigned queries = (unsigned)a.queries;
  return {place.kv * (a.heads / a.kv_heads) + row / queries, (int)(row % queries)};
}
// That of row 16 m + 8 half + g of the fragments.
DEVICE DecodeRow lane_row(const Attention& a, const DecodePlace& place, int m, int half) {
  return decode_row(a, place, 16 * m + 8 * half + lane_id() / 4);
}

// Bits of the keys that this lane's rows see, in the order of half.cuh.
template <class F>
DEVICE void decode_visible(const Attention& a, const DecodePlace& place, int64_t k0,
                           uint32_t (&visible)[F::kFragments]) {
  const Pairs& mask = a.mask;
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < F::kFragments; m++) {
    visible[m] = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const DecodeRow row = lane_row(a, place, m, half);
      uint32_t bits = pairs_of_bytes(band_word(a, place.b, row.i, k0, F::kKeys) >> lane % 4 * 2);
      if (mask.data) {
        const int64_t at = place.b * mask.batch + row.h * mask.head + row.i * mask.query +
                           (k0 + lane % 4 * 2) * mask.key;
        const char* item = (const char*)mask.data + at * mask.item_size;
        const int64_t step = mask.key * mask.item_size;
        uint32_t seen = 0;
#pragma unroll
        for (int n = 0; n < 2 * F::kColumns; n++) {
          const char* from = item + (n / 2 * 8 + n % 2) * step;
          bool one = bits >> n & 1;
          if (one) one = mask.item_size == 1 ? *from != 0 : nonzero(from, mask.item_size);
          seen |= (uint32_t)one << n;
        }
        bits = seen;
      }
      visible[m] |= bits << 16 * half;
    }
  }
}

// What a tile of these pairs has, to the cache: it is read when the tile is.
template <class F>
DEVICE void prefetch_pairs(const Pairs& pairs, const Attention& a, const DecodePlace& place,
                           int64_t k0) {
  if (!pairs.data) return;
#pragma unroll
  for (int n = 0; n < 2 * F::kFragments; n++) {
    if (8 * n >= place.rows) break;
    const DecodeRow row = lane_row(a, place, n / 2, n % 2);
    const int64_t at =
        place.b * pairs.batch + row.h * pairs.head + row.i * pairs.query + k0 * pairs.key;
    prefetch((const char*)pairs.data + at * pairs.item_size);
  }
}

// Adds the bias of visible pairs; -inf takes the pair's bit away. Whether any was.
template <class F>
DEVICE bool decode_bias(const Attention& a, const DecodePlace& place, int64_t k0,
                        float (&s)[F::kFragments][F::kColumns][4],
                        uint32_t (&visible)[F::kFragments]) {
  bool hides = false;
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const DecodeRow row = lane_row(a, place, m, half);
      const int64_t at = bias_index(a, place.b, row.h, row.i, k0 + lane_id() % 4 * 2);
#pragma unroll
      for (int n = 0; n < 2 * F::kColumns; n++) {
        const uint32_t bit = 1u << (16 * half + n);
        if (!(visible[m] & bit)) continue;
        const float bias = read_bias(a, typename F::S{}, at + (n / 2 * 8 + n % 2) * a.bias.key);
        float& score = s[m][n / 2][2 * half + n % 2];
        score = add_bias(score, bias);
        if (bias != -INFINITY) continue;
        hides = true;
        visible[m] &= ~bit;
      }
    }
  return hides;
}

}  // namespace mha_ext::cuda

// Tiles of pairs as fragments: their visibility, dropout and bias; and rows of fragments to memory.
// A warp owns 16 kFragments rows; those of the other side are the columns. Rows are queries and
// columns keys, or, with kOwnsKeys, the other way round. Bit (16 half + 2 j + e) of bits[m] belongs
// to element [2 half + e] of the fragment [m][j].
#pragma once
#include "fragments.cuh"
#include "pairs.cuh"
#include "rows.cuh"

namespace mha_ext::cuda {

// From the words of the rows: lane r of the warp holds that of row r.
template <class F>
DEVICE void fragment_bits(uint64_t word, uint32_t (&bits)[F::kFragments]) {
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < F::kFragments; m++) {
    const uint64_t low = shuffle(word, 16 * m + lane / 4),
                   high = shuffle(word, 16 * m + lane / 4 + 8);
    bits[m] = pairs_of_bytes(low >> lane % 4 * 2) | pairs_of_bytes(high >> lane % 4 * 2) << 16;
  }
}
template <class F>
DEVICE void kept_bits(const Attention& a, int64_t b, int64_t h, int64_t i0, int64_t k0,
                      uint32_t (&bits)[F::kFragments]) {
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < F::kFragments; m++) {
    uint32_t halves[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t i = i0 + 16 * m + 8 * half + lane / 4;
      halves[half] = pairs_of_bytes(kept_word(a, b, h, i, k0, F::kColumns * 8) >> lane % 4 * 2);
    }
    bits[m] = halves[0] | halves[1] << 16;
  }
}

// From the words of the columns, where the rows are 16 keys: lane c holds those of query c (in the
// low half) and c + 32.
template <class F>
DEVICE void fragment_bits_across(uint32_t words, uint32_t (&bits)[F::kFragments]) {
  static_assert(F::kFragments == 1 && F::kColumns <= 8);
  const int lane = lane_id(), g = lane / 4;
  uint32_t found = 0;
#pragma unroll
  for (int j = 0; j < (F::kColumns < 4 ? F::kColumns : 4); j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const uint32_t word = shuffle(words, 8 * j + 2 * (lane % 4) + e);
#pragma unroll
      for (int part = 0; part < (F::kColumns + 3) / 4; part++) {
        const uint32_t both = word >> (16 * part + g), at = 2 * (j + 4 * part) + e;
        found |= (both & 1) << at | (both >> 8 & 1) << (16 + at);
      }
    }
  bits[0] = found;
}
// Such words: which of the keys [k0, k0 + 16) are seen by, or kept for, query q0 + c.
template <class F>
DEVICE uint32_t visible_words_across(const Attention& a, int64_t b, int64_t h, int64_t q0, int rows,
                                     int64_t k0) {
  uint32_t words = 0;
#pragma unroll 1
  for (int r = lane_id(); r < rows; r += kWarp)
    words |= (uint32_t)row_visibility(a, b, h, q0 + r, k0, min_of(16, a.keys - k0))
             << (r < kWarp ? 0 : 16);
  return words;
}
template <class F>
DEVICE uint32_t kept_words_across(const Attention& a, int64_t b, int64_t h, int64_t q0,
                                  int64_t k0) {
  uint32_t words = 0;
#pragma unroll 1
  for (int r = lane_id(); r < F::kColumns * 8; r += kWarp)
    words |= kept_half_word(a, b, h, q0 + r, k0) << (r < kWarp ? 0 : 16);
  return words;
}

// visit(m, j, e, index) for the element [e] of each fragment [m][j] of one warp that is a pair,
// with its index in `of`.
template <class F, class Visit>
DEVICE void for_each_pair(const Attention& a, const Pairs& of, int64_t b, int64_t h, int64_t row0,
                          int64_t column0, const Visit& visit) {
  constexpr bool kKeys = F::kOwnsKeys;
  row0 += lane_id() / 4;
  column0 += 2 * (lane_id() % 4);
  const int rows = (int)min_of(16 * F::kFragments, (kKeys ? a.keys : a.queries) - row0);
  const int columns = (int)min_of(8 * F::kColumns, (kKeys ? a.queries : a.keys) - column0);
  const int64_t down = kKeys ? of.key : of.query, right = kKeys ? of.query : of.key;
  const int64_t first = b * of.batch + h * of.head + row0 * down + column0 * right;
#pragma unroll
  for (int half = 0; half < 2 * F::kFragments; half++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int64_t from = first + 8 * half * down + e * right;
#pragma unroll
      for (int j = 0; j < F::kColumns; j++)
        if (8 * half < rows && 8 * j + e < columns)
          visit(half / 2, j, half % 2 * 2 + e, from + 8 * j * right);
    }
}

// Adds the bias to the scores of one warp; -inf takes the pair's bit away. Whether any was.
template <class F>
DEVICE bool add_bias_tile(const Attention& a, int64_t b, int64_t h, int64_t row0, int64_t column0,
                          float (&s)[F::kFragments][F::kColumns][4],
                          uint32_t (&visible)[F::kFragments]) {
  bool hides = false;
  for_each_pair<F>(a, a.bias, b, h, row0, column0, [&](int m, int j, int e, int64_t at) {
    const float bias = read_bias(a, typename F::S{}, at);
    s[m][j][e] = add_bias(s[m][j][e], bias);
    if (bias != -INFINITY) return;
    hides = true;
    visible[m] &= ~(1u << (e / 2 * 16 + 2 * j + e % 2));
  });
  return hides;
}

// s = bit ? s : otherwise
template <class F>
DEVICE void select_tile(const uint32_t (&bits)[F::kFragments], float otherwise,
                        float (&s)[F::kFragments][F::kColumns][4]) {
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int j = 0; j < F::kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (!(bits[m] >> (e / 2 * 16 + 2 * j + e % 2) & 1)) s[m][j][e] = otherwise;
}

// Rows row0 + 16 m + 8 half + g of a head, below `rows`: c times the factor of the row.
template <class S, int kFragments, int kColumns>
DEVICE void store_fragments(const Rows& to, int64_t b, int64_t h, int64_t row0, int64_t rows,
                            int columns, const float (&factor)[kFragments][2],
                            const float (&c)[kFragments][kColumns][4]) {
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t i = row0 + 16 * m + 8 * half + lane / 4;
      if (i >= rows) continue;
      S* out = (S*)to.data + b * to.batch + h * to.head + i * to.row;
      const bool pairs = (uintptr_t)out % 4 == 0 && columns % 2 == 0;
#pragma unroll
      for (int n = 0; n < kColumns; n++) {
        const int d = 8 * n + lane % 4 * 2;
        if (d >= columns) break;
        const uint32_t pair =
            pack(S{}, c[m][n][2 * half] * factor[m][half], c[m][n][2 * half + 1] * factor[m][half]);
        if (pairs) {
          *(uint32_t*)(out + d) = pair;
        } else {
          out[d].bits = (uint16_t)pair;
          if (d + 1 < columns) out[d + 1].bits = (uint16_t)(pair >> 16);
        }
      }
    }
}

}  // namespace mha_ext::cuda

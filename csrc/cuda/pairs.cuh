// What a pair of a query and a key has beside its product: whether it is visible, kept by dropout,
// and its bias. A row of a tile is one word, bit j = key k0 + j, as in spec/mask.h.
#pragma once
#include "../spec/dropout.h"
#include "mask.cuh"
#include "tile.cuh"

namespace mha_ext::cuda {

// Tiles of kKeys keys of which some, and of which all, are seen by all of a few queries, as far as
// lengths and the band say: [any, any_end) and [all, all_end).
struct SeenTiles {
  int any, any_end, all, all_end;
};
template <int kKeys>
DEVICE SeenTiles seen_tiles(const Attention& a, int64_t b, int64_t first, int64_t rows) {
  if (rows <= 0) return {0, 0, 0, 0};
  if (hides_nothing(a)) return {0, (int)ceil_div(a.keys, kKeys), 0, (int)(a.keys / kKeys)};
  const Range any = seen_by_any(a, b, first, first + rows - 1);
  const Range all = seen_by_all(a, b, first, first + rows - 1);
  return {(int)(any.begin / kKeys), any.end > any.begin ? (int)ceil_div(any.end, kKeys) : 0,
          (int)ceil_div(all.begin, kKeys), (int)(all.end / kKeys)};
}

// The same the other way round: tiles of kQueries queries of which some, and of which all, see all
// of a few keys.
template <int kQueries>
DEVICE SeenTiles seeing_tiles(const Attention& a, int64_t b, int64_t k0, int64_t keys) {
  const int64_t count = key_count(a, b);
  if (k0 >= count) return {0, 0, 0, 0};
  if (hides_nothing(a))
    return {0, (int)ceil_div(a.queries, kQueries), 0,
            k0 + keys <= count ? (int)(a.queries / kQueries) : 0};
  const Band& band = a.band;
  const int64_t offset = k0 - diagonal(a, b);
  // Query i sees keys [i + diagonal - left, i + diagonal + right].
  const int64_t begin = band.right_bounded ? max_of(0, offset - band.right) : 0;
  const int64_t end = band.left_bounded ? min_of(a.queries, offset + keys + band.left) : a.queries;
  int64_t all = band.right_bounded ? max_of(0, offset + keys - 1 - band.right) : 0;
  int64_t all_end = band.left_bounded ? min_of(a.queries, offset + band.left + 1) : a.queries;
  if (k0 + keys > count) all = all_end = 0;
  return {(int)(min_of(begin, a.queries) / kQueries),
          end > begin ? (int)ceil_div(end, kQueries) : 0,
          (int)ceil_div(min_of(all, a.queries), kQueries),
          all_end > all ? (int)(all_end / kQueries) : 0};
}

DEVICE uint64_t band_word(const Attention& a, int64_t b, int64_t i, int64_t k0, int keys) {
  if (hides_nothing(a)) return first_bits(max_of(0, min_of(keys, a.keys - k0)));
  const Range band = band_keys(a, b, i);
  const int64_t first = max_of(0, band.begin - k0), last = min_of(keys, band.end - k0);
  return last <= first ? 0 : first_bits(last) & ~first_bits(first);
}

// Bit i: byte i is not zero.
DEVICE uint32_t nonzero_bytes(Bytes16 bytes) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t x = bytes.word[i], low7 = 0x7f7f7f7f;
    // Bit 7 of each byte, then the four next to each other.
    bits |= ((((x & low7) + low7) | x) & ~low7) * 0x00204081u >> 28 << 4 * i;
  }
  return bits;
}
// Whether the keys of a row lie in pieces of 16 bytes.
DEVICE bool mask_is_in_pieces(const Pairs& mask, const char* row) {
  return mask.item_size == 1 && mask.key == 1 && (uintptr_t)row % 16 == 0;
}
DEVICE bool item_is_set(const char* item, int32_t size) {
  if (size == 1) return *item;
  if (size == 2) return *(const uint16_t*)item;
  if (size == 4) return *(const uint32_t*)item;
  return *(const uint64_t*)item;
}
// Up to 16 keys of a row; none where there are less than 0.
DEVICE uint32_t mask_bits(const Pairs& mask, const char* at, int keys) {
  if (keys == 16 && mask_is_in_pieces(mask, at)) return nonzero_bytes(*(const Bytes16*)at);
  uint32_t bits = 0;
#pragma unroll 4
  for (int j = 0; j < 16; j++)
    if (j < keys)
      bits |= (uint32_t)item_is_set(at + j * mask.key * mask.item_size, mask.item_size) << j;
  return bits;
}
DEVICE const char* mask_row_of(const Pairs& mask, int64_t b, int64_t h, int64_t i, int64_t k0) {
  return (const char*)mask.data +
         (b * mask.batch + h * mask.head + i * mask.query + k0 * mask.key) * mask.item_size;
}
// The same of a packed mask.
DEVICE const uint64_t* packed_row_of(const Pairs& mask, int64_t b, int64_t h, int64_t i) {
  return (const uint64_t*)mask.data + (b * mask.batch + h * mask.head + i * mask.query);
}

// For one warp: lane r gets the word of query first + r (0 from `rows` on, rows <= 32). The tile
// lies in one word: keys <= 64, and k0 % 64 + keys <= 64.
DEVICE uint64_t visible_word(const Attention& a, int64_t b, int64_t h, int64_t first, int rows,
                             int64_t k0, int keys) {
  const int lane = lane_id();
  uint64_t word = lane < rows ? band_word(a, b, first + lane, k0, keys) : 0;
  const Pairs& mask = a.mask;
  if (!mask.data) return word;
  if (mask.item_size == kPacked) {
    return word ? word & packed_row_of(mask, b, h, first + lane)[k0 / 64] >> k0 % 64 : 0;
  }
  const char* item = mask_row_of(mask, b, h, first, k0);
  const int exist = (int)min_of(keys, a.keys - k0);
  if (exist == keys && mask_is_in_pieces(mask, item) && mask.query % 16 == 0) {
    // A lane reads a row for itself, all of it before it uses any.
    const char* row = item + (lane < rows ? lane : 0) * mask.query;
    Bytes16 bytes[4];
#pragma unroll
    for (int n = 0; n < 4; n++)
      bytes[n] = 16 * n < keys ? *(const Bytes16*)(row + 16 * n) : Bytes16{};
    uint64_t bits = 0;
#pragma unroll
    for (int n = 0; n < 4; n++) bits |= (uint64_t)nonzero_bytes(bytes[n]) << 16 * n;
    return word & bits;
  }
  // The lanes read the keys of one row together, as they lie.
  item += lane * mask.key * mask.item_size;
  const bool low_exists = lane < exist, high_exists = lane + kWarp < exist;
  for (int r = 0; r < (mask.query ? rows : 1); r++) {
    const uint32_t low = ballot(low_exists && item_is_set(item, mask.item_size));
    const uint32_t high = ballot(
        high_exists && item_is_set(item + kWarp * mask.key * mask.item_size, mask.item_size));
    if (lane == r || !mask.query) word &= low | (uint64_t)high << 32;
    item += mask.query * mask.item_size;
  }
  return word;
}

// For one lane: those of the 16 keys from k0 on that query i sees; k0 % 16 = 0.
DEVICE uint32_t visible_half_word(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t k0) {
  const uint32_t word = (uint32_t)band_word(a, b, i, k0, 16);
  const Pairs& mask = a.mask;
  if (!mask.data) return word;
  if (mask.item_size == kPacked)
    return word & ((const uint16_t*)packed_row_of(mask, b, h, i))[k0 / 16];
  return word & mask_bits(mask, mask_row_of(mask, b, h, i, k0), (int)min_of(16, a.keys - k0));
}

// A random word, faster where there are registers for it: a product is one instruction, where nvcc
// also adds up halves of one of 64 bits that are 0; and what is kept is found in float32, since the
// units for integers are busy with the words.
struct FastWord {
  uint32_t bits;
};
DEVICE void multiply(uint32_t factor, FastWord x, FastWord* high, FastWord* low) {
  *high = {multiply_high(factor, x.bits)};
  *low = {factor * x.bits};
}
DEVICE FastWord exclusive_or(FastWord a, FastWord b, uint32_t key) {
  return {a.bits ^ b.bits ^ key};
}
// Those of eight keys, of which the first has global position 8 `group`: two keys a word.
template <class Word>
DEVICE Philox<Word> random_words(const Attention& a, int64_t b, int64_t h, int64_t i,
                                 int64_t group) {
  return philox(Word{(uint32_t)group}, Word{(uint32_t)(a.origin.query + i)},
                Word{(uint32_t)(a.origin.head + h)}, Word{(uint32_t)(a.origin.batch + b)},
                (uint32_t)a.dropout.seed[0], (uint32_t)a.dropout.seed[1]);
}
// Whether a key is kept, as 1 or 0, from the low or the high half of its word: with kUnit above it
// that is the mantissa of a float.
constexpr uint32_t kUnit = 0x4b000000u;  // 2^23
DEVICE float drop_level(const Attention& a) { return float_of(kUnit | a.dropout.threshold) - 1; }
DEVICE float keeps_low(FastWord word, float level) {
  return saturate(float_of((word.bits & 0xffff) | kUnit) - level);
}
DEVICE float keeps_high(FastWord word, float level) {
  return saturate(float_of(word.bits >> 16 | kUnit) - level);
}
// The keys that dropout keeps: bit j = key j of the group.
DEVICE uint32_t kept_of(const Attention& a, const Philox<uint32_t>& random) {
  const uint32_t threshold = a.dropout.threshold << 16;  // 16 bits each: compared as high halves
  uint32_t kept = 0;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    kept |= random.word[w] << 16 >= threshold ? 1u << 2 * w : 0;
    kept |= random.word[w] >= threshold ? 2u << 2 * w : 0;
  }
  return kept;
}
DEVICE uint32_t kept_of(const Attention& a, const Philox<FastWord>& random) {
  const float level = drop_level(a);
  float kept = float_of(kUnit);
#pragma unroll
  for (int w = 0; w < 4; w++) {
    kept = fmaf(keeps_low(random.word[w], level), (float)(1 << 2 * w), kept);
    kept = fmaf(keeps_high(random.word[w], level), (float)(2 << 2 * w), kept);
  }
  return bits_of(kept) & 0xff;
}
template <class Word = uint32_t>
DEVICE uint32_t kept_group(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t group) {
  return kept_of(a, random_words<Word>(a, b, h, i, group));
}

// For four lanes with the same query, the next four of a warp: the keys of the tile that dropout
// keeps. Each lane draws every fourth group of eight keys.
DEVICE uint64_t kept_word(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t k0,
                          int keys) {
  const int64_t first = a.origin.key + k0;
  const int offset = (int)(first & 7);  // keys of the first group that come before the tile
  uint64_t word = 0;
  if (offset == 0 && keys == 64) {  // both groups of a lane at the same time
    const int group = lane_id() % 4;
    const uint32_t low = kept_group(a, b, h, i, (first >> 3) + group),
                   high = kept_group(a, b, h, i, (first >> 3) + group + 4);
    word = (uint64_t)(high << 8 * group) << 32 | low << 8 * group;
    word |= shuffle_xor(word, 1);
    return word | shuffle_xor(word, 2);
  }
#pragma unroll 1
  for (int group = lane_id() % 4; group * 8 < keys + offset; group += 4) {
    const uint64_t kept = kept_group(a, b, h, i, (first >> 3) + group);
    const int at = group * 8 - offset;
    word |= at < 0 ? kept >> -at : kept << at;
  }
  word |= shuffle_xor(word, 1);
  return word | shuffle_xor(word, 2);
}

// For one lane: those of the 16 keys from k0 on.
template <class Word>
DEVICE uint32_t kept_half_word(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t k0) {
  const int64_t first = a.origin.key + k0;
  const int offset = (int)(first & 7);
  if (offset == 0)
    return kept_group<Word>(a, b, h, i, first >> 3) | kept_group<Word>(a, b, h, i, (first >> 3) + 1)
                                                          << 8;
  uint32_t word = 0;
#pragma unroll 1
  for (int group = 0; group * 8 < 16 + offset; group++)
    word |= kept_group<Word>(a, b, h, i, (first >> 3) + group) << 8 * group;
  return word >> offset & 0xffff;
}

template <class S>
DEVICE auto read_bias(const Attention& a, S, int64_t at) -> decltype(widen(S{})) {
  return a.bias_is_float32 ? widen(((const float*)a.bias.data)[at])
                           : widen(((const S*)a.bias.data)[at]);
}
DEVICE int64_t bias_index(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t k) {
  return b * a.bias.batch + h * a.bias.head + i * a.bias.query + k * a.bias.key;
}

DEVICE float lowest_finite(float) { return -3.40282347e38f; }
DEVICE double lowest_finite(double) { return -1.7976931348623157e308; }

// S + bias: what is finite stays finite, NaN stays NaN.
template <class T>
DEVICE T add_bias(T score, T bias) {
  const T sum = score + bias;
  return sum < lowest_finite(T()) ? lowest_finite(T()) : sum;
}

// x + y as high + low, rounded once each.
template <class T>
DEVICE void split_sum(double x, double y, T* high, T* low) {
  *high = (T)(x + y);
  const bool ordered = fabs(x) >= fabs(y);
  const double large = ordered ? x : y, small = ordered ? y : x;
  *low = (T)((large - (double)*high) + small);
}

}  // namespace mha_ext::cuda

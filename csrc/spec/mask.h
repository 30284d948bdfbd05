// Which keys a query sees: key lengths, the diagonal band (causal, window) and the mask tensor.
// The bias is not seen here; its -inf entries hide pairs too, and the kernels add them to the bits
// below.
#pragma once
#include "attention.h"

namespace mha_ext {

constexpr int64_t kTile =
    64;  // queries and keys of one tile: a row of visibility is one 64-bit word

struct Range {
  int64_t begin, end;  // half open
};

// Whether lengths and band hide no pair.
HOST_DEVICE bool hides_nothing(const Attention& a) {
  return !a.key_lengths && !a.band.left_bounded && !a.band.right_bounded;
}

// Key position at which query 0 of batch entry b stands.
HOST_DEVICE int64_t diagonal(const Attention& a, int64_t b) {
  return a.band.lower_right ? key_count(a, b) - a.queries : a.origin.query - a.origin.key;
}

// Keys inside the length and the band of query i; empty ranges have end == begin.
HOST_DEVICE Range band_keys(const Attention& a, int64_t b, int64_t i) {
  const int64_t count = key_count(a, b), position = i + diagonal(a, b);
  const int64_t begin = a.band.left_bounded ? max_of(0, position - a.band.left) : 0;
  const int64_t end = a.band.right_bounded ? min_of(count, position + a.band.right + 1) : count;
  return {begin, max_of(begin, end)};
}

// Both ends of band_keys never fall as i rises. So of the queries [first, last]:
HOST_DEVICE Range seen_by_any(const Attention& a, int64_t b, int64_t first, int64_t last) {
  const int64_t begin = band_keys(a, b, first).begin;
  return {begin, max_of(begin, band_keys(a, b, last).end)};
}
HOST_DEVICE Range seen_by_all(const Attention& a, int64_t b, int64_t first, int64_t last) {
  const int64_t begin = band_keys(a, b, last).begin;
  return {begin, max_of(begin, band_keys(a, b, first).end)};
}

HOST_DEVICE bool nonzero(const char* item, int32_t size) {
  for (int32_t i = 0; i < size; i++)
    if (item[i]) return true;
  return false;
}

// Bit c of word r becomes bit r of word c.
HOST_DEVICE void transpose_bits(uint64_t* words) {
  uint64_t low = 0x00000000ffffffffull;
  for (int width = 32; width; width >>= 1, low ^= low << width)
    for (int r = 0; r < 64; r = ((r | width) + 1) & ~width) {
      const uint64_t t = ((words[r] >> width) ^ words[r | width]) & low;
      words[r] ^= t << width;
      words[r | width] ^= t;
    }
}

// What a processor may have instructions for: `nonzero`, whose bit j says whether byte j of 64 is,
// and `transpose`, which is transpose_bits.
struct PlainBytes {
  static constexpr bool kWhole = false;  // whether these exist
};

// Whether 64 keys of a row are bytes that such an instruction takes.
template <class Bytes>
HOST_DEVICE bool takes_bytes(int64_t key_stride, int32_t size, int64_t keys) {
  return Bytes::kWhole && size == 1 && key_stride == 1 && keys == 64;
}
// Visibility of up to 64 keys of one query in the mask tensor: bit j = key j.
template <class Bytes = PlainBytes>
HOST_DEVICE uint64_t mask_row(const char* row, int64_t key_stride, int32_t size, int64_t keys) {
  uint64_t word = 0;
  int64_t j = 0;
  if constexpr (Bytes::kWhole)
    if (takes_bytes<Bytes>(key_stride, size, keys)) return Bytes::nonzero(row);
  if (size == 1 && key_stride == 1) {  // eight bytes at a time: nonzero -> 1, then gather the bits
    for (; j + 8 <= keys; j += 8) {
      uint64_t x;
      __builtin_memcpy(&x, row + j, 8);
      const uint64_t low7 = 0x7f7f7f7f7f7f7f7full;
      x = (((x & low7) + low7) | x) >> 7 & 0x0101010101010101ull;
      word |= (x * 0x0102040810204080ull >> 56) << j;
    }
  }
  for (; j < keys; j++) word |= (uint64_t)nonzero(row + j * key_stride * size, size) << j;
  return word;
}

HOST_DEVICE uint64_t first_bits(int64_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

// Visibility of keys [k0, k0 + keys), at most 64, for one query: bit j = key k0 + j.
HOST_DEVICE uint64_t row_visibility(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t k0,
                                    int64_t keys) {
  const Range band = band_keys(a, b, i);
  const int64_t first = max_of(0, band.begin - k0), last = min_of(keys, band.end - k0);
  if (last <= first) return 0;
  const uint64_t word = first_bits(last) & ~first_bits(first);
  if (!a.mask.data) return word;
  const char* row =
      (const char*)a.mask.data +
      (b * a.mask.batch + h * a.mask.head + i * a.mask.query + k0 * a.mask.key) * a.mask.item_size;
  return word & mask_row(row, a.mask.key, a.mask.item_size, keys);
}

enum class Visibility { kEmpty, kPartial, kFull };

// Visibility of the tile of queries [q0, q0 + rows) and keys [k0, k0 + keys), at most 64 of each.
// Unless the tile is full or empty, bit r of bits[j] says whether query q0 + r sees key k0 + j.
template <class Bytes = PlainBytes>
HOST_DEVICE Visibility tile_visibility(const Attention& a, int64_t b, int64_t h, int64_t q0,
                                       int64_t rows, int64_t k0, int64_t keys, uint64_t* bits) {
  const Range any = seen_by_any(a, b, q0, q0 + rows - 1);
  if (any.begin >= k0 + keys || any.end <= k0) return Visibility::kEmpty;
  const Range all = seen_by_all(a, b, q0, q0 + rows - 1);
  const bool band_full = all.begin <= k0 && k0 + keys <= all.end;
  if (band_full && !a.mask.data) return Visibility::kFull;

  const uint64_t every = first_bits(rows);
  if (a.mask.data) {
    const int32_t size = a.mask.item_size;
    const char* tile =
        (const char*)a.mask.data +
        (b * a.mask.batch + h * a.mask.head + q0 * a.mask.query + k0 * a.mask.key) * size;
    if (a.mask.query == 0) {
      const uint64_t row = mask_row<Bytes>(tile, a.mask.key, size, keys);
      for (int64_t j = 0; j < keys; j++) bits[j] = row >> j & 1 ? every : 0;
    } else {
      uint64_t any = 0, every_row = ~0ull;
      const auto take = [&](int64_t r, uint64_t row) {
        bits[r] = row;
        any |= row;
        every_row &= row;
      };
      const bool whole = takes_bytes<Bytes>(a.mask.key, size, keys);
      if constexpr (Bytes::kWhole)  // in a loop that asks nothing else
        for (int64_t r = 0; whole && r < rows; r++)
          take(r, Bytes::nonzero(tile + r * a.mask.query));
      for (int64_t r = 0; !whole && r < rows; r++)
        take(r, mask_row<Bytes>(tile + r * a.mask.query * size, a.mask.key, size, keys));
      if (!any) return Visibility::kEmpty;
      if (band_full && every_row == first_bits(keys)) return Visibility::kFull;
      for (int64_t r = rows; r < 64; r++) bits[r] = 0;
      if constexpr (Bytes::kWhole)
        Bytes::transpose(bits);
      else
        transpose_bits(bits);
    }
  } else {
    for (int64_t j = 0; j < keys; j++) bits[j] = every;
  }
  if (!band_full) {
    const int64_t position = q0 + diagonal(a, b), count = key_count(a, b);
    for (int64_t j = 0; j < keys;
         j++) {  // queries r with position + r - left <= k0 + j <= position + r + right
      const int64_t offset = k0 + j - position;
      const int64_t first = a.band.right_bounded ? max_of(0, offset - a.band.right) : 0;
      const int64_t last = a.band.left_bounded ? offset + a.band.left : 63;
      const bool none = k0 + j >= count || first > 63 || last < first;
      bits[j] &= none ? 0 : first_bits(last + 1) & ~first_bits(first);
    }
  }
  uint64_t seen = 0, hidden = 0;
  for (int64_t j = 0; j < keys; j++) {
    seen |= bits[j];
    hidden |= bits[j] ^ every;
  }
  return !seen ? Visibility::kEmpty : hidden ? Visibility::kPartial : Visibility::kFull;
}

}  // namespace mha_ext

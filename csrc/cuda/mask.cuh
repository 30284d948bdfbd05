// A mask as bits. The kernels of 16-bit types read a mask once for each head that shares it and
// each product, and a byte a pair is as much as they can wait for: a large mask is packed first.
// Behind the bits is a summary: which squares of 64 queries and 64 keys have any visible pair, and
// which have nothing else.
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
// Of one query, and of one block of 64 queries: words of bits, and words of squares.
struct MaskShape {
  int64_t places, rows, row_words, blocks, block_words;
};
HOST_DEVICE MaskShape mask_shape(const Attention& a) {
  const int64_t rows = a.mask.query ? a.queries : 1, words = ceil_div(a.keys, 64);
  return {(a.mask.batch ? a.batch : 1) * (a.mask.head ? a.heads : 1), rows, words,
          ceil_div(rows, 64), ceil_div(words, 64)};
}
HOST_DEVICE int64_t packed_mask_bytes(const Attention& a) {
  if (!mask_is_packed(a)) return 0;
  const MaskShape of = mask_shape(a);
  const int64_t each = of.rows * of.row_words + of.blocks * 2 * of.block_words;
  return ceil_div(of.places * each * 8, 256) * 256;
}

// Of the 64 queries from q0 on (a multiple of 64): a word for 64 squares each, `any`, then `all`.
DEVICE const uint64_t* squares_of(const Attention& a, int64_t b, int64_t h, int64_t q0) {
  const MaskShape of = mask_shape(a);
  const int64_t place =
      (a.mask.batch ? b : 0) * (a.mask.head ? a.heads : 1) + (a.mask.head ? h : 0);
  const int64_t block = place * of.blocks + (a.mask.query ? q0 / 64 : 0);
  return (const uint64_t*)a.mask.data + of.places * of.rows * of.row_words +
         block * 2 * of.block_words;
}
// Whether squares that stand side by side, 64 `queries` times 64 `keys`, have any visible pair; and
// whether the one of 64 queries and 64 `keys` has nothing else. Of masks that are not packed
// nothing is known.
DEVICE bool squares_have_any(const Attention& a, int64_t b, int64_t h, int64_t q0, int queries,
                             int64_t k0, int keys) {
  if (!a.mask.data || a.mask.item_size != kPacked) return true;
  const uint64_t* any = squares_of(a, b, h, q0) + k0 / 64 / 64;
  const int64_t step = a.mask.query ? 2 * mask_shape(a).block_words : 0;
  uint64_t found = 0;
  for (int i = 0; i < queries; i++)
    if (q0 + 64 * i < a.queries) found |= any[i * step] >> k0 / 64 % 64;
  return found & first_bits(keys);
}
DEVICE bool square_has_all(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t k0,
                           int keys) {
  if (!a.mask.data) return true;
  if (a.mask.item_size != kPacked) return false;
  const uint64_t* all = squares_of(a, b, h, q0) + mask_shape(a).block_words + k0 / 64 / 64;
  return (~(*all >> k0 / 64 % 64) & first_bits(keys)) == 0;
}

// Goes over the tiles of kKeys keys in [at, end) of which some query of the kQueries from q0 on
// sees any, as far as a packed mask says. kMasks: whether there can be a mask.
template <int kQueries, int kKeys, bool kMasks>
struct TileWalk {
  static constexpr int kSquares = kKeys / 64;  // of a tile, in a row
  int at, end;
  const uint64_t* any = nullptr;  // null: all tiles
  int step = 0, blocks = 0;
  DEVICE_MEMBER TileWalk(const Attention& a, int64_t b, int64_t h, int64_t q0, int from, int to)
      : at(from), end(to) {
    if constexpr (kMasks)
      if (a.mask.data && a.mask.item_size == kPacked) {
        any = squares_of(a, b, h, q0);
        step = a.mask.query ? 2 * (int)mask_shape(a).block_words : 0;
        blocks = (int)min_of(kQueries / 64, ceil_div(a.queries - q0, 64));
        seek();
      }
  }
  // Of the word that has a tile's first square: the first squares of all its tiles.
  DEVICE_MEMBER uint64_t word(int square) const {
    uint64_t found = 0;
    for (int i = 0; i < blocks; i++) found |= any[i * step + square / 64];
    return kSquares == 1 ? found : (found | found >> 1) & 0x5555555555555555ull;
  }
  DEVICE_MEMBER void seek() {
    while (at < end) {
      const int square = at * kSquares;
      if (const uint64_t found = word(square) >> square % 64) {
        at += lowest_bit(found) / kSquares;
        break;
      }
      at = (square / 64 + 1) * 64 / kSquares;
    }
    at = (int)min_of(at, end);
  }
  DEVICE_MEMBER void next() {
    at++;
    if constexpr (kMasks)
      if (any) seek();
  }
};

// Writes the packed mask of `a` to the start of scratch, where it is packed at all: `a` has it then
// and scratch begins behind it.
const char* pack_mask(Attention& a, void*& scratch, Stream stream);

}  // namespace mha_ext::cuda

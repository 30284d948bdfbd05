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

// Four lanes next to each other, with four words each: lane l gets word l of each of them.
DEVICE void exchange_words(FastWord (&word)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane_id() & step;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      uint32_t& low = word[step == 1 ? 2 * n : n].bits;
      uint32_t& high = word[step == 1 ? 2 * n + 1 : n + 2].bits;
      const uint32_t other = shuffle_xor(upper ? low : high, step);
      low = upper ? other : low;
      high = upper ? high : other;
    }
  }
}
// Zeroes what dropout drops of a tile whose first key has a global position that 8 divides. The two
// keys of a lane in a group of eight have one random word.
template <class F>
DEVICE void drop_pairs(const Attention& a, int64_t b, int64_t h, int64_t i0, int64_t k0,
                       float (&p)[F::kFragments][F::kColumns][4]) {
  static_assert(F::kColumns % 4 == 0);
  const int lane = lane_id();
  const int64_t group = ((a.origin.key + k0) >> 3) + lane % 4;
  const float level = drop_level(a);
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int j = 0; j < F::kColumns; j += 4)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        auto random = random_words<FastWord>(a, b, h, i0 + 16 * m + 8 * half + lane / 4, group + j);
        exchange_words(random.word);
#pragma unroll
        for (int n = 0; n < 4; n++) {
          p[m][j + n][2 * half] *= keeps_low(random.word[n], level);
          p[m][j + n][2 * half + 1] *= keeps_high(random.word[n], level);
        }
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
// The same without moving bits to their places: bit 16 (j / 4) + 8 half of found[2 (j % 4) + e]
// belongs to element [2 half + e] of fragment j.
DEVICE void turn_words_across(uint32_t words, uint32_t (&found)[8]) {
  const int lane = lane_id();
#pragma unroll
  for (int n = 0; n < 8; n++)
    found[n] = shuffle(words, 8 * (n / 2) + 2 * (lane % 4) + n % 2) >> lane / 4;
}
DEVICE bool is_found(const uint32_t (&found)[8], int j, int e) {
  return found[j % 4 * 2 + e % 2] >> (j / 4 * 16 + e / 2 * 8) & 1;
}
// Such words: which of the keys [k0, k0 + 16) are seen by, or kept for, query q0 + c.
template <class F>
DEVICE uint32_t visible_words_across(const Attention& a, int64_t b, int64_t h, int64_t q0, int rows,
                                     int64_t k0) {
  uint32_t words = 0;
#pragma unroll
  for (int part = 0; part < (F::kColumns + 3) / 4; part++) {
    const int r = lane_id() + part * kWarp;
    if (r < rows) words |= visible_half_word(a, b, h, q0 + r, k0) << 16 * part;
  }
  return words;
}
template <class F, class Word = uint32_t>
DEVICE uint32_t kept_words_across(const Attention& a, int64_t b, int64_t h, int64_t q0,
                                  int64_t k0) {
  uint32_t words = 0;
#pragma unroll 1
  for (int r = lane_id(); r < F::kColumns * 8; r += kWarp)
    words |= kept_half_word<Word>(a, b, h, q0 + r, k0) << (r < kWarp ? 0 : 16);
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

// Batch entry and head of a row of blocks, as b heads + h. A bias without batch is read once for
// all entries where their blocks run at the same time.
DEVICE int64_t bias_row(const Attention& a, int64_t row, int64_t heads) {
  if (!a.bias.data || a.bias.batch) return row;
  return row % a.batch * heads + row / a.batch;
}

// Whether the lanes may take a bias of 16-bit type two keys at a time.
template <class S>
HOST_DEVICE bool bias_has_pairs(const Attention& a, const Pairs& bias) {
  if constexpr (sizeof(S) != 2) return false;
  const int64_t strides = bias.batch | bias.head | bias.query;
  return bias.data && !a.bias_is_float32 && bias.key == 1 && strides % 2 == 0 &&
         (uintptr_t)bias.data % 4 == 0;
}
// A kernel copies tiles of the bias into shared memory beside those of the rows, if there is room
// for two of them.
constexpr int kPairBytes = 128;  // of a row of 16-bit pairs, which may be less than full
template <class F>
HOST_DEVICE bool bias_is_copied(const Attention& a) {
  constexpr int kMostBytes = 99 * 1024;
  if constexpr (F::kSharedBytes + 2 * F::kQueries * kPairBytes > kMostBytes) return false;
  return bias_has_pairs<typename F::S>(a, a.bias) && a.bias.query;
}
template <class F>
HOST_DEVICE int shared_bytes(const Attention& a) {
  return F::kSharedBytes + (bias_is_copied<F>(a) ? 2 * F::kQueries * kPairBytes : 0);
}
template <class F>
DEVICE Address bias_tile(int stage) {
  return (Address)(F::kSharedBytes + stage * F::kQueries * kPairBytes);
}

// A tile of pairs, [queries][keys], for all warps of a block.
template <class F>
DEVICE void copy_pairs(const Attention& a, const Pairs& from, int64_t b, int64_t h, int64_t q0,
                       int64_t k0, Address to) {
  using S = typename F::S;
  const Rows rows{(S*)from.data + k0, from.batch, from.head, from.query};
  copy_rows<F::kQueries, kPairBytes, F::kThreads>(to, head_rows<S>(rows, b, h), q0,
                                                  (int)min_of(F::kQueries, a.queries - q0),
                                                  (int)min_of(F::kKeys, a.keys - k0) * 2);
}
// visit(m, j, half, pair): two columns of row 8 half + g of the fragment [m][j] of one warp.
template <class F, class Visit>
DEVICE void for_each_copied(Address tile, const Visit& visit) {
  const int lane = lane_id(), r = lane % 8, half = lane / 8 % 2, next = lane / 16;
#pragma unroll
  for (int m = 0; m < F::kFragments; m++)
#pragma unroll
    for (int j = 0; j < F::kColumns; j += 2) {
      const int own = F::kFragments * warp_id() + m;
      uint32_t x[4];
      if constexpr (F::kOwnsKeys)
        load_matrices_transposed(x,
                                 tile + swizzled<kPairBytes>(8 * (j + next) + r, 2 * own + half));
      else
        load_matrices(x, tile + swizzled<kPairBytes>(16 * own + 8 * half + r, j + next));
#pragma unroll
      for (int i = 0; i < 4; i++) visit(m, j + i / 2, i % 2, x[i]);
    }
}

// Adds a copied tile of the bias to the scores of one warp; -inf takes the pair's bit away. Whether
// any was.
template <class F>
DEVICE bool add_copied_bias(Address tile, float (&s)[F::kFragments][F::kColumns][4],
                            uint32_t (&visible)[F::kFragments]) {
  using S = typename F::S;
  uint32_t least = 0;
  for_each_copied<F>(tile, [&](int m, int j, int half, uint32_t pair) {
    least = min_pair(S{}, least, pair);
    float& low = s[m][j][2 * half];
    float& high = s[m][j][2 * half + 1];
    low = max_or_nan(low + widen(S{(uint16_t)pair}), lowest_finite(0.0f));
    high = max_or_nan(high + widen(S{(uint16_t)(pair >> 16)}), lowest_finite(0.0f));
  });
  const auto hidden = [](uint16_t bits) { return widen(S{bits}) == -INFINITY; };
  const bool hides = hidden((uint16_t)least) || hidden((uint16_t)(least >> 16));
  if (!ballot(hides)) return false;
  for_each_copied<F>(tile, [&](int m, int j, int half, uint32_t pair) {
    const uint32_t bits =
        (hidden((uint16_t)pair) ? 1u : 0u) | (hidden((uint16_t)(pair >> 16)) ? 2u : 0u);
    visible[m] &= ~(bits << (16 * half + 2 * j));
  });
  return hides;
}

// The same of a bias as it lies, all of a row before any is used.
template <class F>
DEVICE bool add_bias_tile(const Attention& a, int64_t b, int64_t h, int64_t row0, int64_t column0,
                          float (&s)[F::kFragments][F::kColumns][4],
                          uint32_t (&visible)[F::kFragments]) {
  using S = typename F::S;
  constexpr bool kKeys = F::kOwnsKeys;
  row0 += lane_id() / 4;
  column0 += 2 * (lane_id() % 4);
  const Pairs& of = a.bias;
  const int rows = (int)min_of(16 * F::kFragments, (kKeys ? a.keys : a.queries) - row0);
  const int columns = (int)min_of(8 * F::kColumns, (kKeys ? a.queries : a.keys) - column0);
  const int64_t down = kKeys ? of.key : of.query, right = kKeys ? of.query : of.key;
  const int64_t first = b * of.batch + h * of.head + row0 * down + column0 * right;
  bool hides = false;
#pragma unroll
  for (int half = 0; half < 2 * F::kFragments; half++) {
    const int64_t from = first + 8 * half * down;
    const int count = 8 * half < rows ? columns : 0;
    if (half) sync_warp();  // one row at a time: registers are scarce
    float bias[F::kColumns][2];
    const auto read = [&](auto item) {
#pragma unroll
      for (int j = 0; j < F::kColumns; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          using Item = decltype(item);
          bias[j][e] =
              8 * j + e < count ? widen(((const Item*)of.data)[from + (8 * j + e) * right]) : 0;
        }
    };
    if (a.bias_is_float32)
      read(0.0f);
    else
      read(S{});
#pragma unroll
    for (int j = 0; j < F::kColumns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& score = s[half / 2][j][half % 2 * 2 + e];
        score = add_bias(score, bias[j][e]);
        if (bias[j][e] != -INFINITY) continue;
        hides = true;
        visible[half / 2] &= ~(1u << (half % 2 * 16 + 2 * j + e));
      }
  }
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

// Whether something that this thread has copied of a tile, as copy_rows does, is not finite; to be
// asked when its copies have arrived, and before the barrier for those of the others.
template <class F, int kRows>
DEVICE bool copied_nonfinite(Address tile, int columns) {
  constexpr int kPieces = F::kRowBytes / 16, kStep = F::kThreads / kPieces;
  constexpr uint32_t kBelow = 0x8000 - kExponent<typename F::S>;  // such numbers reach the sign
  const int p = thread_id() % kPieces, r0 = thread_id() / kPieces;
  if (p * 8 >= (columns + 15) / 16 * 16) return false;
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < kRows / kStep; i++) {
    const auto x = load_shared<Bytes16>(tile + swizzled<F::kRowBytes>(r0 + i * kStep, p));
#pragma unroll
    for (int w = 0; w < 4; w++) found |= (x.word[w] & 0x7fff7fff) + kBelow * 0x10001;
  }
  return found & 0x80008000;
}
// Whether the threads look for what is not finite in the tiles that they copy: where hidden pairs
// would meet it. Under a mask or a bias from the first tile on that has some.
struct Cleaning {
  bool looks, met;  // the same for the block; whether this warp has met hidden pairs
  DEVICE_MEMBER explicit Cleaning(const Attention& a)
      : looks(!a.mask.data && !a.bias.data), met(false) {}
  // Whether to look at a tile; of `block` tiles lengths and band hide none.
  DEVICE_MEMBER bool looks_at(const Attention& a, const SeenTiles& block, int tile) const {
    return looks && (a.mask.data || a.bias.data || tile < block.all || tile >= block.all_end);
  }
  // A barrier of the block; whether the tile is known to be finite.
  DEVICE_MEMBER bool sync(bool looked, bool nonfinite) {
    const bool any = sync_block_or(looks ? looked && nonfinite : met);
    if (looks) return looked && !any;
    looks = any;
    return false;
  }
};

// Rows row0 + 16 m + 8 half + g of a head, below `rows`: c times the factor of the row.
template <class S, int kFragments, int kColumns>
DEVICE void store_fragments(const Rows& to, int64_t b, int64_t h, int64_t row0, int64_t rows,
                            int columns, const float (&factor)[kFragments][2],
                            const float (&c)[kFragments][kColumns][4]) {
  static_assert(kColumns % 4 == 0);
  const int lane = lane_id();
  S* const first = (S*)to.data + b * to.batch + h * to.head;
  // The four lanes of a row exchange pairs, so that each has pieces of 16 bytes.
  if ((((uintptr_t)first | (uintptr_t)(to.row * 2)) & 15) == 0 && columns % 8 == 0) {
#pragma unroll
    for (int m = 0; m < kFragments; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int64_t i = row0 + 16 * m + 8 * half + lane / 4;
        S* const out = first + i * to.row + lane % 4 * 8;
        const int left = i < rows ? columns - lane % 4 * 8 : 0;
#pragma unroll
        for (int n = 0; n < kColumns; n += 4) {
          FastWord four[4];
#pragma unroll
          for (int e = 0; e < 4; e++)
            four[e].bits = pack(S{}, c[m][n + e][2 * half] * factor[m][half],
                                c[m][n + e][2 * half + 1] * factor[m][half]);
          exchange_words(four);
          if (8 * n < left)
            *(Bytes16*)(out + 8 * n) = {{four[0].bits, four[1].bits, four[2].bits, four[3].bits}};
        }
      }
    return;
  }
#pragma unroll
  for (int m = 0; m < kFragments; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t i = row0 + 16 * m + 8 * half + lane / 4;
      if (i >= rows) continue;
      S* out = first + i * to.row;
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

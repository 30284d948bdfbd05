// Products of 16-bit tiles on the tensor cores. A warp holds kFragments x 16 rows of the result;
// with g = lane / 4 and t = lane % 4 a lane has, of the fragment [m][j], rows 16 m + g (elements 0
// and 1) and 16 m + g + 8 (2 and 3), columns 8 j + 2 t and the next.
#pragma once
#include "tile.cuh"

namespace mha_ext::cuda {

template <int kFragments, int kColumns>
DEVICE void clear_fragments(float (&c)[kFragments][kColumns][4]) {
#pragma unroll
  for (int m = 0; m < kFragments; m++)
#pragma unroll
    for (int j = 0; j < kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) c[m][j][e] = 0;
}

template <int kFragments, int kColumns>
DEVICE void scale_fragments(float scale, float (&c)[kFragments][kColumns][4]) {
#pragma unroll
  for (int m = 0; m < kFragments; m++)
#pragma unroll
    for (int j = 0; j < kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) c[m][j][e] *= scale;
}

// c[m][j] += sum over `columns` of rows of `left` (from left_row on) times rows of `right`: both
// tiles have their rows along the sum.
template <class S, int kRowBytes, int kFragments, int kColumns>
DEVICE void add_rows(Address left, int left_row, Address right, int columns,
                     float (&c)[kFragments][kColumns][4]) {
  const int lane = lane_id();
  left += swizzled<kRowBytes>(left_row + lane % 16, lane / 16);
  right += swizzled<kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < kRowBytes / 32; k++) {
    if (k * 16 >= columns) break;
    uint32_t x[kFragments][4];
#pragma unroll
    for (int m = 0; m < kFragments; m++) load_matrices(x[m], stepped(left, k) + 16 * m * kRowBytes);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      uint32_t y[4];
      load_matrices(y, stepped(right, k) + 8 * j * kRowBytes);
#pragma unroll
      for (int m = 0; m < kFragments; m++) {
        multiply_add(S{}, c[m][j], x[m], y[0], y[1]);
        multiply_add(S{}, c[m][j + 1], x[m], y[2], y[3]);
      }
    }
  }
}

// The same from zero on.
template <class S, int kRowBytes, int kFragments, int kColumns>
DEVICE void multiply_rows(Address left, int left_row, Address right, int columns,
                          float (&c)[kFragments][kColumns][4]) {
  clear_fragments(c);
  add_rows<S, kRowBytes>(left, left_row, right, columns, c);
}

// c and moved from zero on: the products of two tiles of rows, `step` bytes apart, with the same
// tile.
template <class S, int kRowBytes, int kFragments, int kColumns>
DEVICE void multiply_two_rows(Address left, int left_row, Address step, Address right, int columns,
                              float (&c)[kFragments][kColumns][4],
                              float (&moved)[kFragments][kColumns][4]) {
  const int lane = lane_id();
  clear_fragments(c);
  clear_fragments(moved);
  left += swizzled<kRowBytes>(left_row + lane % 16, lane / 16);
  right += swizzled<kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < kRowBytes / 32; k++) {
    if (k * 16 >= columns) break;
    uint32_t x[kFragments][4], x_moved[kFragments][4];
#pragma unroll
    for (int m = 0; m < kFragments; m++) {
      load_matrices(x[m], stepped(left, k) + 16 * m * kRowBytes);
      load_matrices(x_moved[m], stepped(left, k) + step + 16 * m * kRowBytes);
    }
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      uint32_t y[4];
      load_matrices(y, stepped(right, k) + 8 * j * kRowBytes);
#pragma unroll
      for (int m = 0; m < kFragments; m++) {
        multiply_add(S{}, c[m][j], x[m], y[0], y[1]);
        multiply_add(S{}, c[m][j + 1], x[m], y[2], y[3]);
        multiply_add(S{}, moved[m][j], x_moved[m], y[0], y[1]);
        multiply_add(S{}, moved[m][j + 1], x_moved[m], y[2], y[3]);
      }
    }
  }
}

// The fragments of a result become the left operand of the next product, rounded to 16 bits.
template <class S, int kFragments, int kColumns>
DEVICE void round_fragments(const float (&c)[kFragments][kColumns][4],
                            uint32_t (&x)[kFragments][kColumns / 2][4]) {
#pragma unroll
  for (int m = 0; m < kFragments; m++)
#pragma unroll
    for (int k = 0; k < kColumns / 2; k++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        x[m][k][half] = pack(S{}, c[m][2 * k][2 * half], c[m][2 * k][2 * half + 1]);
        x[m][k][2 + half] = pack(S{}, c[m][2 * k + 1][2 * half], c[m][2 * k + 1][2 * half + 1]);
      }
}

template <class S>
constexpr uint32_t kExponent = 0x7f80;
template <>
constexpr uint32_t kExponent<Float16> = 0x7c00;

// Puts 0 in place of what is not finite; whether there was any.
template <class S>
DEVICE bool clean(uint32_t& pair) {
  constexpr uint32_t kLow = kExponent<S>, kHigh = kLow << 16;
  const bool low = (pair & kLow) == kLow, high = (pair & kHigh) == kHigh;
  pair &= (low ? 0xffff0000u : 0xffffffffu) & (high ? 0x0000ffffu : 0xffffffffu);
  return low || high;
}

// The four matrices of rows [16 k, 16 k + 16) and columns [16 n, 16 n + 16) of a tile whose rows
// are what a product sums over: b0, b1 of its left half, then of its right half.
template <int kRowBytes>
DEVICE void load_across(uint32_t (&to)[4], Address tile, int k, int n) {
  const int lane = lane_id();
  const Address first = tile + swizzled<kRowBytes>(lane % 8 + lane / 8 % 2 * 8, lane / 16);
  load_matrices_transposed(to, stepped(first, n) + 16 * k * kRowBytes);
}

// c[m][n] += x[m] tile[kSteps 16, columns]. kClean: without what is not finite in the tile; whether
// this lane met any.
template <class S, int kRowBytes, bool kClean, int kFragments, int kSteps, int kColumns>
DEVICE bool multiply_across(const uint32_t (&x)[kFragments][kSteps][4], Address tile, int columns,
                            float (&c)[kFragments][kColumns][4]) {
  bool dirty = false;
#pragma unroll
  for (int n = 0; n < kColumns / 2; n++) {
    if (n * 16 >= columns) break;
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      uint32_t y[4];
      load_across<kRowBytes>(y, tile, k, n);
      if constexpr (kClean) {
#pragma unroll
        for (int i = 0; i < 4; i++) dirty |= clean<S>(y[i]);
      }
#pragma unroll
      for (int m = 0; m < kFragments; m++) {
        multiply_add(S{}, c[m][2 * n], x[m][k], y[0], y[1]);
        multiply_add(S{}, c[m][2 * n + 1], x[m][k], y[2], y[3]);
      }
    }
  }
  return dirty;
}

// What is not finite, as a number: sums of up to 64 of them can be told apart again.
constexpr float kPlusInfinity = 1, kMinusInfinity = 128, kNaN = 16384;
template <class S>
DEVICE float kind_of(uint32_t bits) {
  if ((bits & kExponent<S>) != kExponent<S>) return 0;
  if (bits & 0x7fff & ~kExponent<S>) return kNaN;
  return bits & 0x8000 ? kMinusInfinity : kPlusInfinity;
}

// What multiply_across left out, for the visible pairs alone: x * infinity and NaN. Bit
// (16 half + 2 j + e) of visible[m] is the pair of element [2 half + e] of the fragment [m][j].
// The products count: how often a visible x other than 0 meets which kind, and a visible 0
// anything. Without kSigned, x is P >= 0, or the gradient of scores, which is 0 or NaN where its
// factor is not finite; with it, those below 0 are counted apart.
template <class S, int kRowBytes, bool kSigned, int kFragments, int kSteps, int kColumns>
DEVICE void add_nonfinite(const uint32_t (&x)[kFragments][kSteps][4],
                          const uint32_t (&visible)[kFragments], Address tile, int columns,
                          float (&c)[kFragments][kColumns][4]) {
#pragma unroll
  for (int m = 0; m < kFragments; m++)
#pragma unroll
    for (int n = 0; n < kColumns / 2; n++) {
      if (n * 16 >= columns) break;
#pragma unroll
      for (int side = 0; side < 2; side++) {
        float some[4] = {}, none[4] = {}, below[4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; k++) {
          uint32_t y[4], kinds[2], any[2], other[4], zero[4], negative[4];
          load_across<kRowBytes>(y, tile, k, n);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const uint32_t pair = y[2 * side + i];
            const float low = kind_of<S>(pair & 0xffff), high = kind_of<S>(pair >> 16);
            kinds[i] = pack(S{}, low, high);
            any[i] = pack(S{}, low > 0, high > 0);
          }
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const uint32_t pair = x[m][k][i];
            const uint32_t bits = visible[m] >> (i % 2 * 16 + (2 * k + i / 2) * 2);
            const bool low_zero = !(pair & 0x7fff), high_zero = !(pair & 0x7fff0000);
            const bool low_below = kSigned && pair & 0x8000, high_below = kSigned && pair >> 31;
            other[i] = pack(S{}, bits & 1 && !low_zero && !low_below,
                            bits & 2 && !high_zero && !high_below);
            zero[i] = pack(S{}, bits & 1 && low_zero, bits & 2 && high_zero);
            if constexpr (kSigned)
              negative[i] = pack(S{}, bits & 1 && !low_zero && low_below,
                                 bits & 2 && !high_zero && high_below);
          }
          if constexpr (kSigned) multiply_add(S{}, below, negative, kinds[0], kinds[1]);
          multiply_add(S{}, some, other, kinds[0], kinds[1]);
          multiply_add(S{}, none, zero, any[0], any[1]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int count = (int)some[e], turned = (int)below[e];
          float& sum = c[m][2 * n + side][e];
          if (count & 127 || turned >> 7 & 127) sum += INFINITY;
          if (count >> 7 & 127 || turned & 127) sum -= INFINITY;
          if (count >> 14 || turned >> 14 || none[e] > 0) sum = NAN;
        }
      }
    }
}

}  // namespace mha_ext::cuda

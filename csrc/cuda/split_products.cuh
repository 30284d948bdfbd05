// Products of tiles of three planes: see split.cuh; the layouts are those of fragments.cuh.
#pragma once
#include "fragments.cuh"
#include "split.cuh"

namespace mha_ext::cuda {

// large += x y of the high planes, small += the five others, smallest first; for two fragments side
// by side. kSwapped: in the order in which x and y change places: as exact sums are, those of the
// tensor cores are then the same for a tile and its transpose.
template <bool kSwapped, int kFragments>
DEVICE void multiply_planes(const uint32_t (&x)[kPlanes][kFragments][4],
                            const uint32_t (&y)[kPlanes][4], float (&large)[kFragments][2][4],
                            float (&small)[kFragments][2][4]) {
  constexpr int kOne[] = {2, 0, 1, 1, 0, 0}, kOther[] = {0, 2, 1, 0, 1, 0};
#pragma unroll
  for (int i = 0; i < 6; i++)
#pragma unroll
    for (int m = 0; m < kFragments; m++)
#pragma unroll
      for (int side = 0; side < 2; side++)
        multiply_add(BFloat16{}, i == 5 ? large[m][side] : small[m][side],
                     x[kSwapped ? kOther[i] : kOne[i]][m],
                     y[kSwapped ? kOne[i] : kOther[i]][2 * side],
                     y[kSwapped ? kOne[i] : kOther[i]][2 * side + 1]);
}

// c = rows of `left` (from left_row on) times rows of `right`. Planes are kLeft and kRight bytes
// apart. Each 16 columns have a sum of their own, for scores are to be right to the last bit.
template <int kRowBytes, int kLeft, int kRight, bool kSwapped, int kFragments, int kColumns>
DEVICE void multiply_split_rows(Address left, int left_row, Address right, int columns,
                                float (&c)[kFragments][kColumns][4]) {
  const int lane = lane_id();
  left += swizzled<kRowBytes>(left_row + lane % 16, lane / 16);
  right += swizzled<kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  float sum[kColumns / 2][kFragments][2][4] = {}, small[kColumns / 2][kFragments][2][4] = {};
#pragma unroll
  for (int k = 0; k < kRowBytes / 32; k++) {
    if (k * 16 >= columns) break;
    uint32_t x[kPlanes][kFragments][4];
#pragma unroll
    for (int plane = 0; plane < kPlanes; plane++)
#pragma unroll
      for (int m = 0; m < kFragments; m++)
        load_matrices(x[plane][m], stepped(left, k) + plane * kLeft + 16 * m * kRowBytes);
#pragma unroll
    for (int j = 0; j < kColumns / 2; j++) {
      uint32_t y[kPlanes][4];
#pragma unroll
      for (int plane = 0; plane < kPlanes; plane++)
        load_matrices(y[plane], stepped(right, k) + plane * kRight + 16 * j * kRowBytes);
      float large[kFragments][2][4] = {};
      multiply_planes<kSwapped>(x, y, large, small[j]);
#pragma unroll
      for (int m = 0; m < kFragments; m++)
#pragma unroll
        for (int side = 0; side < 2; side++)
#pragma unroll
          for (int e = 0; e < 4; e++) sum[j][m][side][e] += large[m][side][e];
    }
  }
#pragma unroll
  for (int m = 0; m < kFragments; m++)
#pragma unroll
    for (int j = 0; j < kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) c[m][j][e] = sum[j / 2][m][j % 2][e] + small[j / 2][m][j % 2][e];
}

// The fragments of a result become the left operand of the next product.
template <int kFragments, int kColumns>
DEVICE void split_fragments(const float (&c)[kFragments][kColumns][4],
                            uint32_t (&x)[kColumns / 2][kPlanes][kFragments][4]) {
#pragma unroll
  for (int m = 0; m < kFragments; m++)
#pragma unroll
    for (int j = 0; j < kColumns; j++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint32_t pair[kPlanes];
        split_pair(c[m][j][2 * half], c[m][j][2 * half + 1], pair);
#pragma unroll
        for (int plane = 0; plane < kPlanes; plane++)
          x[j / 2][plane][m][j % 2 * 2 + half] = pair[plane];
      }
}

// Numbers of a warp so small that their low planes would not be exact become larger; what their
// products are to be multiplied by.
template <int kFragments, int kColumns>
DEVICE float lift_tiny(float (&c)[kFragments][kColumns][4]) {
  constexpr float kTiny = 8.67361738e-19f, kLift = 1.84467441e19f;  // 2^-60, 2^64
  float top = 0;
#pragma unroll
  for (int m = 0; m < kFragments; m++)
#pragma unroll
    for (int j = 0; j < kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) top = fmaxf(top, fabsf(c[m][j][e]));
  if (ballot(top >= kTiny)) return 1;
#pragma unroll
  for (int m = 0; m < kFragments; m++)
#pragma unroll
    for (int j = 0; j < kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) c[m][j][e] *= kLift;
  return 1 / kLift;
}

// c += factor x tile, the sum over the tile's rows taken on its own.
template <int kRowBytes, int kPlaneBytes, int kFragments, int kSteps, int kColumns>
DEVICE void add_split_across(const uint32_t (&x)[kSteps][kPlanes][kFragments][4], Address tile,
                             int columns, float factor, float (&c)[kFragments][kColumns][4]) {
#pragma unroll
  for (int n = 0; n < kColumns / 2; n++) {
    if (n * 16 >= columns) break;
    float large[kFragments][2][4] = {}, small[kFragments][2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      uint32_t y[kPlanes][4];
#pragma unroll
      for (int plane = 0; plane < kPlanes; plane++)
        load_across<kRowBytes>(y[plane], tile + plane * kPlaneBytes, k, n);
      multiply_planes<false>(x[k], y, large, small);
    }
#pragma unroll
    for (int m = 0; m < kFragments; m++)
#pragma unroll
      for (int side = 0; side < 2; side++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          c[m][2 * n + side][e] =
              fmaf(large[m][side][e] + small[m][side][e], factor, c[m][2 * n + side][e]);
  }
}

// Rows of float32 in memory: the first one of a tile, and how many there are from there on.
struct FloatRows {
  const float* first;
  int64_t stride, count;
};
DEVICE FloatRows float_rows(const Rows& rows, int64_t b, int64_t h, int64_t begin, int64_t end) {
  return {(const float*)rows.data + b * rows.batch + h * rows.head + begin * rows.row, rows.row,
          end - begin};
}

// What multiply_split_rows left out: products with special numbers.
template <int kFragments, int kColumns>
DEVICE void add_special_rows(const FloatRows& left, const FloatRows& right, int columns,
                             float (&c)[kFragments][kColumns][4]) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll 1
  for (int d = 0; d < columns; d++) {
    float x[2 * kFragments];
#pragma unroll
    for (int i = 0; i < 2 * kFragments; i++)
      x[i] = 8 * i + g < left.count ? left.first[(8 * i + g) * left.stride + d] : 0;
#pragma unroll
    for (int j = 0; j < 2 * kColumns; j++) {
      const int r = j / 2 * 8 + 2 * t + j % 2;
      const float y = r < right.count ? right.first[r * right.stride + d] : 0;
#pragma unroll
      for (int i = 0; i < 2 * kFragments; i++)
        if (is_special(x[i]) || is_special(y)) {
          float& sum = c[i / 2][j / 2][i % 2 * 2 + j % 2];
          sum = fmaf(x[i], y, sum);
        }
    }
  }
}

// What add_split_across left out, for the visible pairs x alone, since 0 * NaN is NaN.
template <int kFragments, int kPairs, int kColumns>
DEVICE void add_special_across(const float (&x)[kFragments][kPairs][4],
                               const uint32_t (&visible)[kFragments], const FloatRows& tile,
                               int columns, float (&c)[kFragments][kColumns][4]) {
  const int lane = lane_id();
#pragma unroll 1
  for (int r = 0; r < 8 * kPairs && r < tile.count; r++) {
    const int owner = lane / 4 * 4 + r % 8 / 2, bit = r / 8 * 2 + r % 2;
    float factor[2 * kFragments], y = 0;
    bool seen[2 * kFragments], any = false;
#pragma unroll
    for (int i = 0; i < 2 * kFragments; i++) {
      float mine = 0;
#pragma unroll
      for (int j = 0; j < 2 * kPairs; j++)
        if (j == bit) mine = x[i / 2][j / 2][i % 2 * 2 + j % 2];
      factor[i] = shuffle(mine, owner);
      seen[i] = shuffle(visible[i / 2], owner) >> (i % 2 * 16 + bit) & 1;
    }
#pragma unroll
    for (int n = 0; n < kColumns; n++) {
      if (n % 4 == 0) {  // the lanes read 32 columns together
        const int d = 8 * n + lane;
        y = d < columns ? tile.first[r * tile.stride + d] : 0;
        any = ballot(is_special(y)) != 0;
      }
      if (!any) continue;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float mine = shuffle(y, n % 4 * 8 + lane % 4 * 2 + e);
        if (!is_special(mine)) continue;
#pragma unroll
        for (int i = 0; i < 2 * kFragments; i++)
          if (seen[i]) {
            float& sum = c[i / 2][n][i % 2 * 2 + e];
            sum = fmaf(factor[i], mine, sum);
          }
      }
    }
  }
}

// Rows row0 + 16 m + 8 half + g of a head, below `rows`: c times the factor of the row.
template <int kFragments, int kColumns>
DEVICE void store_float_fragments(const Rows& to, int64_t b, int64_t h, int64_t row0, int64_t rows,
                                  int columns, const float (&factor)[kFragments][2],
                                  const float (&c)[kFragments][kColumns][4]) {
  struct alignas(8) Two {
    float at[2];
  };
#pragma unroll
  for (int i = 0; i < 2 * kFragments; i++) {
    const int64_t r = row0 + 8 * i + lane_id() / 4;
    if (r >= rows) continue;
    float* out = (float*)to.data + b * to.batch + h * to.head + r * to.row;
    const bool pairs = (uintptr_t)out % 8 == 0 && columns % 2 == 0;
    const float by = factor[i / 2][i % 2];
#pragma unroll
    for (int n = 0; n < kColumns; n++) {
      const int d = 8 * n + lane_id() % 4 * 2;
      if (d >= columns) break;
      const Two two{{c[i / 2][n][i % 2 * 2] * by, c[i / 2][n][i % 2 * 2 + 1] * by}};
      if (pairs) {
        *(Two*)(out + d) = two;
      } else {
        out[d] = two.at[0];
        if (d + 1 < columns) out[d + 1] = two.at[1];
      }
    }
  }
}

}  // namespace mha_ext::cuda

// float32 on the tensor cores. A number is exactly the sum of three of bfloat16, high + middle +
// low, each the upper half of what those before it left; so a tile is three planes, and a product
// of two tiles six of planes: what is left out is below 2^-24 of it. The tensor cores truncate
// their sums: the five small products have a sum of their own, and long sums are taken tile by
// tile.
//
// Numbers below 2^-103, whose low part would not be exact, and those that are not finite, whose
// parts would make NaN of 0 * inf, are special: zero in the planes, and multiplied by themselves
// where a tile is flagged. So what is hidden changes no bit of what is seen.
#pragma once
#include "launch.cuh"
#include "pairs.cuh"
#include "rows.cuh"

namespace mha_ext::cuda {

constexpr int kPlanes = 3, kFlagRows = 64;

HOST_DEVICE bool is_split(const Attention& a) {
  return a.dtype == DType::kFloat32 && a.value_dim > 0 &&
         max_of(a.head_dim, a.value_dim) <= kSplitWidth;
}

DEVICE bool is_special(float x) {
  constexpr uint32_t kSmallest = 24u << 23, kInfinite = 255u << 23;
  return (bits_of(x) & kInfinite) - kSmallest >= kInfinite - kSmallest && x != 0;
}

// Two numbers that are not special, next to each other in each plane.
DEVICE void split_pair(float x, float y, uint32_t (&to)[kPlanes]) {
#pragma unroll
  for (int plane = 0; plane < kPlanes; plane++) {
    to[plane] = upper_halves(bits_of(x), bits_of(y));
    if (plane == kPlanes - 1) break;
    x -= float_of(bits_of(x) & 0xffff0000u);
    y -= float_of(bits_of(y) & 0xffff0000u);
  }
}

// Rows of a tensor in memory, split: [heads][plane][rows][columns], columns being a multiple of 16,
// and a flag for each 64 rows of a head.
struct Planes {
  char* data;
  uint32_t* flags;
  int64_t rows;
  int columns;
  DEVICE_MEMBER HeadRows plane(int64_t head, int plane) const {
    return {data + (head * kPlanes + plane) * rows * columns * 2, columns * 2, 16};
  }
  DEVICE_MEMBER uint32_t* flag(int64_t head, int64_t row) const {
    return flags + head * ceil_div(rows, kFlagRows) + row / kFlagRows;
  }
};
// Takes its memory from `at` on; without memory the sizes alone.
HOST_DEVICE Planes take_planes(int64_t& at, void* memory, int64_t heads, int64_t rows,
                               int64_t width) {
  const int64_t columns = ceil_div(width, 16) * 16;
  const int64_t flags = at + heads * kPlanes * rows * columns * 2;
  const Planes planes{(char*)memory + at, (uint32_t*)((char*)memory + flags), rows, (int)columns};
  at = ceil_div(flags + heads * ceil_div(rows, kFlagRows) * 4, 256) * 256;
  return planes;
}

// What backward multiplies.
struct SplitSides {
  Planes query, key, grad_out, value;
};
HOST_DEVICE SplitSides split_sides(const Attention& a, void* memory, int64_t& at) {
  const int64_t heads = a.batch * a.heads, kv_heads = a.batch * a.kv_heads;
  SplitSides sides;
  sides.query = take_planes(at, memory, heads, a.queries, a.head_dim);
  sides.key = take_planes(at, memory, kv_heads, a.keys, a.head_dim);
  sides.grad_out = take_planes(at, memory, heads, a.queries, a.value_dim);
  sides.value = take_planes(at, memory, kv_heads, a.keys, a.value_dim);
  return sides;
}

// For lse of scores in float32 arithmetic: a forward without values.
HOST_DEVICE Attention without_values(Attention a) {
  a.value_dim = 0;
  a.dropout = {};
  return a;
}
HOST_DEVICE int64_t level_bytes(const Attention& a) {
  return ceil_div(a.batch * a.heads * a.queries * 4, 256) * 256;
}

// Two tensors with the same rows.
struct SplitTask {
  Rows from[2];
  int width[2];
  Planes to[2];
  int64_t batch, heads, rows;
};
constexpr int kSplitThreads = 256;
// 64 rows of one tensor; 16 threads a row, four numbers each.
static __global__ void LAUNCH_BOUNDS(kSplitThreads, 4)
    split_kernel(const GRID_CONSTANT SplitTask task) {
  const int64_t head = grid_row();
  if (head >= task.batch * task.heads) return;
  const int which = blockIdx.x & 1, width = task.width[which];
  const Rows& from = task.from[which];
  const Planes& to = task.to[which];
  const int64_t first = (int64_t)(blockIdx.x >> 1) * kFlagRows;
  const float* source =
      (const float*)from.data + head / task.heads * from.batch + head % task.heads * from.head;
  const bool aligned = ((uintptr_t)source & 15) == 0 && from.row % 4 == 0 && width % 4 == 0;
  bool special = false;
  for (int c = thread_id() % 16 * 4; c < to.columns; c += 64) {
#pragma unroll
    for (int i = 0; i < kFlagRows / 16; i++) {
      const int64_t r = first + thread_id() / 16 + 16 * i;
      if (r >= task.rows) continue;
      const float* row = source + r * from.row + c;
      Bytes16 four = {};
      if (aligned) {
        if (c < width) four = *(const Bytes16*)row;
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (c + e < width) four.word[e] = bits_of(row[e]);
      }
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        x[e] = float_of(four.word[e]);
        if (!is_special(x[e])) continue;
        special = true;
        x[e] = 0;
      }
      uint32_t low[kPlanes], high[kPlanes];
      split_pair(x[0], x[1], low);
      split_pair(x[2], x[3], high);
#pragma unroll
      for (int plane = 0; plane < kPlanes; plane++)
        *(uint64_t*)(to.plane(head, plane).first + (r * to.columns + c) * 2) =
            low[plane] | (uint64_t)high[plane] << 32;
    }
  }
  special = sync_block_or(special);
  if (thread_id() == 0) *to.flag(head, first) = special;
}
inline const char* run_split(const SplitTask& task, Stream stream) {
  const Grid grid{2 * ceil_div(task.rows, kFlagRows), task.batch * task.heads};
  return launch(split_kernel, grid, kSplitThreads, 0, stream, task);
}

// The same from memory into the planes of a tile, by all threads of a block. Whether this one met
// any special number.
template <int kRows, int kRowBytes, int kThreads>
DEVICE bool split_tile(Address to, const Rows& from, int64_t b, int64_t h, int64_t begin,
                       int64_t end, int width) {
  constexpr int kPairs = kRowBytes / 4;
  const float* source = (const float*)from.data + b * from.batch + h * from.head + begin * from.row;
  const int rows = (int)min_of(kRows, end - begin);
  bool special = false;
#pragma unroll 4
  for (int i = thread_id(); i < kRows * kPairs; i += kThreads) {
    const int r = i / kPairs, c = i % kPairs * 2;
    float x[2] = {};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (r < rows && c + e < width) x[e] = source[r * from.row + c + e];
      if (!is_special(x[e])) continue;
      special = true;
      x[e] = 0;
    }
    uint32_t pair[kPlanes];
    split_pair(x[0], x[1], pair);
#pragma unroll
    for (int plane = 0; plane < kPlanes; plane++)
      store_shared(to + plane * kRows * kRowBytes + swizzled<kRowBytes>(r, c / 8) + c % 8 * 2,
                   pair[plane]);
  }
  return special;
}
// Planes of rows [begin, begin + kRows) into those of a tile.
template <int kRows, int kRowBytes, int kThreads>
DEVICE void copy_planes(Address to, const Planes& from, int64_t head, int64_t begin) {
  const int rows = (int)min_of(kRows, from.rows - begin);
#pragma unroll
  for (int plane = 0; plane < kPlanes; plane++)
    copy_rows<kRows, kRowBytes, kThreads>(to + plane * kRows * kRowBytes, from.plane(head, plane),
                                          begin, rows, from.columns * 2);
}

}  // namespace mha_ext::cuda

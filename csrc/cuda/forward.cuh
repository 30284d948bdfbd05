// What the forward kernels share: the cut of the keys into parts, what a part leaves for the
// others, and the end of a row.
#pragma once
#include "softmax.cuh"

namespace mha_ext::cuda {

// Forward of one storage type: float, double, BFloat16, Float16; each is a source of its own.
template <class S>
const char* forward_of(const Attention& a, void* scratch, Stream stream);

// Of 16-bit types on a GPU of compute capability 9.0, where hopper_takes(a).
template <class S>
const char* forward_hopper_of(const Attention& a, Stream stream);

// Few queries leave most of a GPU idle, so their keys are cut into parts. The cut depends on the
// lengths alone: a result does not depend on what else is in the batch.
struct KeyParts {
  int64_t count, size;
};
HOST_DEVICE KeyParts key_parts(const Attention& a) {
  constexpr int64_t kSize = 1024, kFewQueries = 16, kOneTile = 128;
  if (a.queries > kOneTile) return {1, max_of(a.keys, 1)};
  const int64_t limit = a.queries <= kFewQueries ? 64 : 8;
  const int64_t count = max_of(1, min_of(limit, ceil_div(a.keys, kSize)));
  const int64_t size = max_of(kTile, ceil_div(ceil_div(a.keys, count), kTile) * kTile);
  return {max_of(1, ceil_div(a.keys, size)), size};
}

inline bool in_pieces(const Rows& rows, int64_t batch, int64_t heads) {
  const int64_t strides = (batch > 1 ? rows.batch : 0) | (heads > 1 ? rows.head : 0) | rows.row;
  return (uintptr_t)rows.data % 16 == 0 && strides % 8 == 0;
}
inline bool hopper_takes(const Attention& a) {
  constexpr int64_t kFewQueries = 64;
  return a.queries > kFewQueries && key_parts(a).count == 1 &&
         max_of(a.head_dim, a.value_dim) <= 128 && in_pieces(a.query, a.batch, a.heads) &&
         in_pieces(a.key, a.batch, a.kv_heads) && in_pieces(a.value, a.batch, a.kv_heads) &&
         on_hopper();
}

// What parts leave, T [B H, parts, Lq, Dv] and [B H, parts, Lq, 2]: sums of P V, and the level and
// sum of P of each row.
template <class T>
struct PartialSums {
  T *out, *rows;
};
HOST_DEVICE int64_t parts_bytes(const Attention& a) {
  const int64_t parts = key_parts(a).count, item = a.dtype == DType::kFloat64 ? 8 : 4;
  return parts == 1 ? 0 : a.batch * a.heads * parts * a.queries * (a.value_dim + 2) * item;
}
template <class T>
PartialSums<T> partial_sums(const Attention& a, void* scratch) {
  const int64_t rows = a.batch * a.heads * key_parts(a).count * a.queries;
  return {(T*)scratch, (T*)scratch + rows * a.value_dim};
}

// The block of queries, and the part of the keys, that one block of threads has. Later queries come
// first, since under a causal mask they see more keys.
struct Place {
  int64_t b, h, kv, q0, part;
};
DEVICE Place place_of(const Attention& a, int64_t row, int64_t queries, int64_t parts) {
  const int64_t tiles = ceil_div(a.queries, queries), tile = blockIdx.x / parts;
  const int64_t b = row / a.heads, h = row % a.heads;
  return {b, h, kv_head(a, h), (tiles - 1 - tile) * queries, blockIdx.x % parts};
}

// Adds the parts of one row in order; one warp a row, its lanes along the width.
template <class S, class T>
__global__ void LAUNCH_BOUNDS(kRowThreads, 8)
    combine_kernel(const GRID_CONSTANT Attention a, const PartialSums<T> sums,
                   const KeyParts parts) {
  const int64_t row = grid_row();
  const int64_t i = (int64_t)blockIdx.x * (kRowThreads / kWarp) + warp_id();
  if (row >= a.batch * a.heads || i >= a.queries) return;
  const int64_t b = row / a.heads, h = row % a.heads;
  const int64_t first = row * parts.count * a.queries + i;
  T level = -(T)INFINITY, l = 0;
  for (int64_t p = 0; p < parts.count; p++) {
    const T* part = sums.rows + (first + p * a.queries) * 2;
    if (part[1] != 0 && part[0] > level) level = part[0];
  }
  // A part that has seen nothing has l = 0; -inf - -inf would be NaN.
#pragma unroll 1
  for (int64_t p = 0; p < parts.count; p++) {
    const T* part = sums.rows + (first + p * a.queries) * 2;
    if (part[1] != 0) l += part[1] * Softmax<S>::power(part[0] - level);
  }
  const T factor = l != 0 ? (T)a.dropout.keep_scale / l : (T)0;
  S* out = (S*)a.out.data + b * a.out.batch + h * a.out.head + i * a.out.row;
  for (int64_t d = lane_id(); d < a.value_dim; d += kWarp) {
    T sum = 0;
#pragma unroll 1
    for (int64_t p = 0; p < parts.count; p++) {
      const int64_t at = first + p * a.queries;
      if (sums.rows[at * 2 + 1] != 0)
        sum += sums.out[at * a.value_dim + d] * Softmax<S>::power(sums.rows[at * 2] - level);
    }
    narrow(sum * factor, out + d);
  }
  if (lane_id() == 0) store_lse<S>(a, row * a.queries + i, level, l);
}

// With empty_rows="uniform" a row without any key has P = 1 / Lk over all of them. Such rows are
// few: one warp takes the mean, its lanes along the width, 64 keys at a time. `factor` is 1 / Lk,
// and that of dropout.
template <class S>
__global__ void LAUNCH_BOUNDS(kRowThreads, 8)
    uniform_rows_kernel(const GRID_CONSTANT Attention a, typename Softmax<S>::T factor) {
  using T = typename Softmax<S>::T;
  const int64_t row = grid_row();
  const int64_t i = (int64_t)blockIdx.x * (kRowThreads / kWarp) + warp_id();
  if (row >= a.batch * a.heads || i >= a.queries) return;
  if (((const T*)a.lse)[row * a.queries + i] != -(T)INFINITY) return;
  const int64_t b = row / a.heads, h = row % a.heads;
  const S* value = (const S*)a.value.data + b * a.value.batch + kv_head(a, h) * a.value.head;
  S* out = (S*)a.out.data + b * a.out.batch + h * a.out.head + i * a.out.row;
  for (int64_t d0 = 0; d0 < a.value_dim; d0 += kWarp) {
    const int64_t d = d0 + lane_id();
    T total = 0;
    for (int64_t k0 = 0; k0 < a.keys; k0 += kTile) {
      uint64_t kept = ~0ull;
      if (a.dropout.seed) kept = kept_word(a, b, h, i, k0, (int)kTile);
      T sum = 0;
      if (d < a.value_dim)
        for (int64_t j = 0; j < min_of(kTile, a.keys - k0); j++)
          sum += (kept >> j & 1 ? (T)1 : (T)0) * widen(value[(k0 + j) * a.value.row + d]);
      total += sum;
    }
    if (d < a.value_dim) narrow(total * factor, out + d);
  }
}

// What is left when the tiles are done: the parts are added, empty rows get what they ask for.
template <class S, class T>
const char* finish_rows(const Attention& a, const PartialSums<T>& sums, const KeyParts& parts,
                        Stream stream) {
  const Grid grid{ceil_div(a.queries, kRowThreads / kWarp), a.batch * a.heads};
  const char* error = nullptr;
  if (parts.count > 1)
    error = launch(combine_kernel<S, T>, grid, kRowThreads, 0, stream, a, sums, parts);
  if (!error && a.uniform_empty_rows && a.keys > 0)
    error = launch(uniform_rows_kernel<S>, grid, kRowThreads, 0, stream, a,
                   (T)(a.dropout.keep_scale / (double)a.keys));
  return error;
}

}  // namespace mha_ext::cuda

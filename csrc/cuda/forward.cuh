// What the forward kernels share: the cut of the keys into parts, what a part leaves for the
// others, and the end of a row.
#pragma once
#include "aligned.cuh"
#include "softmax.cuh"

namespace mha_ext::cuda {

// Forward of one storage type: float, double, BFloat16, Float16; each is a source of its own.
template <class S>
const char* forward_of(const Attention& a, void* scratch, Stream stream);

// Of 16-bit types on a GPU of compute capability 9.0, where hopper_takes(a).
template <class S>
const char* forward_hopper_of(const Attention& a, Stream stream);

// In 16 bits few queries have a kernel of their own (decode_half.cuh).
template <class S>
const char* decode_of(const Attention& a, void* scratch, Stream stream);
constexpr int64_t kFewQueries = 16;
HOST_DEVICE bool decodes(const Attention& a) {
  return a.queries <= kFewQueries && (a.dtype == DType::kBFloat16 || a.dtype == DType::kFloat16);
}

// Few queries leave most of a GPU idle, so their keys are cut into parts. The cut depends on the
// lengths and widths alone: a result does not depend on what else is in the batch.
struct KeyParts {
  int64_t count, size;
};
HOST_DEVICE KeyParts key_parts(const Attention& a) {
  constexpr int64_t kOneTile = 128;
  if (a.queries > kOneTile) return {1, max_of(a.keys, 1)};
  int64_t limit = a.queries <= kFewQueries ? 64 : 8, least = 1024;
  if (decodes(a)) {  // a block reads 64 or 128 KiB
    const int64_t width = max_of(a.head_dim, a.value_dim);
    limit = 128;
    least = width <= 64 ? 512 : width <= 128 && a.keys > 2048 ? 256 : 128;
  }
  const int64_t count = max_of(1, min_of(limit, ceil_div(a.keys, least)));
  const int64_t size = max_of(kTile, ceil_div(ceil_div(a.keys, count), kTile) * kTile);
  return {max_of(1, ceil_div(a.keys, size)), size};
}

// Once align_rows has been. Keys are dropped in whole groups of eight.
inline bool hopper_takes(const Attention& a) {
  constexpr int64_t kOneFragment = 64;
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (a.bias.data && (width > 128 || !bias_in_pieces(a))) return false;
  return a.queries > kOneFragment && key_parts(a).count == 1 && width <= 256 &&
         (copies_are_little(a) || all_in_pieces(a)) && !(a.dropout.seed && a.origin.key % 8) &&
         on_hopper();
}

// What parts leave: sums of P V, and the level and sum of P of each row. The rows [B H Lq] are cut
// into groups of `rows` (those of one head, or of all heads that share their keys), and there are
// T [groups, parts, rows, Dv] and T [groups, parts, rows, 2].
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

// Adds the parts of one row, which is a block's: its warps take parts in turn, their lanes columns.
// `rows`: see PartialSums.
constexpr int kCombineWarps = 4;
template <class T>
constexpr int kCombineColumns = 4 * kWarp * 4 / (int)sizeof(T);  // at once
template <class T>
constexpr int kCombineBytes = kCombineWarps * kCombineColumns<T> * (int)sizeof(T);
template <class S, class T>
__global__ void LAUNCH_BOUNDS(kCombineWarps* kWarp, 6)
    combine_kernel(const GRID_CONSTANT Attention a, const PartialSums<T> sums, const KeyParts parts,
                   int64_t rows) {
  const int64_t row = grid_row(), i = blockIdx.x;
  if (row >= a.batch * a.heads) return;
  const int64_t b = row / a.heads, h = row % a.heads, n = row * a.queries + i;
  const int64_t first = n / rows * parts.count * rows + n % rows;
  const int lane = lane_id(), count = (int)parts.count;
  // A part that has seen nothing has l = 0, and nothing else; -inf - -inf would be NaN.
  T level = -(T)INFINITY, l = 0;
  for (int p = lane; p < count; p += kWarp) {
    const T* part = sums.rows + (first + p * rows) * 2;
    if (part[1] != 0 && part[0] > level) level = part[0];
  }
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    const T other = shuffle_xor(level, lanes);
    level = other > level ? other : level;
  }
  for (int p = lane; p < count; p += kWarp) {
    const T* part = sums.rows + (first + p * rows) * 2;
    if (part[1] != 0) l += part[1] * Softmax<S>::power(part[0] - level);
  }
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) l += shuffle_xor(l, lanes);
  const T factor = l != 0 ? (T)a.dropout.keep_scale / l : (T)0;
  S* out = (S*)a.out.data + b * a.out.batch + h * a.out.head + i * a.out.row;

  constexpr int kColumns = kCombineColumns<T>, kEach = kColumns / kWarp;
  constexpr int kParts = kWarp / kCombineWarps;  // of 32, those of one warp
  for (int64_t d0 = 0; d0 < a.value_dim; d0 += kColumns) {
    T sum[kEach] = {};
#pragma unroll 1
    for (int p0 = 0; p0 < count; p0 += kWarp) {
      const T* part = sums.rows + (first + (p0 + lane) * rows) * 2;
      const bool some = p0 + lane < count && part[1] != 0;
      const T weight = some ? Softmax<S>::power(part[0] - level) : (T)0;
      const uint32_t seen = ballot(some);
      T x[kParts][kEach];
#pragma unroll
      for (int j = 0; j < kParts; j++) {
        const int p = kCombineWarps * j + warp_id();
        const T* from = sums.out + (first + (p0 + p) * rows) * a.value_dim + d0 + lane;
#pragma unroll
        for (int e = 0; e < kEach; e++) {
          x[j][e] = 0;
          if (seen >> p & 1 && d0 + lane + kWarp * e < a.value_dim) x[j][e] = from[kWarp * e];
        }
      }
#pragma unroll
      for (int j = 0; j < kParts; j++) {
        const T w = shuffle(weight, kCombineWarps * j + warp_id());
#pragma unroll
        for (int e = 0; e < kEach; e++) sum[e] += x[j][e] * w;
      }
    }
    sync_block();  // what was here has been read
#pragma unroll
    for (int e = 0; e < kEach; e++)
      store_shared((Address)((warp_id() * kColumns + lane + kWarp * e) * sizeof(T)), sum[e]);
    sync_block();
    const int64_t d = d0 + thread_id();
    if (thread_id() >= kColumns || d >= a.value_dim) continue;
    T total = 0;
#pragma unroll
    for (int w = 0; w < kCombineWarps; w++)
      total += load_shared<T>((Address)((w * kColumns + thread_id()) * sizeof(T)));
    narrow(total * factor, out + d);
  }
  if (thread_id() == 0) store_lse(a, n, level, l);
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
// `rows`: see PartialSums.
template <class S, class T>
const char* finish_rows(const Attention& a, const PartialSums<T>& sums, const KeyParts& parts,
                        int64_t rows, Stream stream) {
  const Grid grid{ceil_div(a.queries, kRowThreads / kWarp), a.batch * a.heads};
  const char* error = nullptr;
  if (parts.count > 1)
    error = launch(combine_kernel<S, T>, {a.queries, a.batch * a.heads}, kCombineWarps * kWarp,
                   kCombineBytes<T>, stream, a, sums, parts, rows);
  if (!error && a.uniform_empty_rows && a.keys > 0)
    error = launch(uniform_rows_kernel<S>, grid, kRowThreads, 0, stream, a,
                   (T)(a.dropout.keep_scale / (double)a.keys));
  return error;
}

}  // namespace mha_ext::cuda

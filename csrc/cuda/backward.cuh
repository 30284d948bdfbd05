// What the backward kernels share: delta, the rows without any key, and the gradient of a bias that
// broadcasts.
#pragma once
#include "aligned.cuh"
#include "softmax.cuh"

namespace mha_ext::cuda {

// Backward of one storage type: float, double, BFloat16, Float16; each is a source of its own.
template <class S>
const char* backward_of(const Attention& a, const AttentionGrad& g, void* scratch, Stream stream);

// Of 16-bit types on a GPU of compute capability 9.0, where backward_hopper_takes it; delta is
// there.
template <class S>
const char* backward_hopper_of(const Attention& a, const AttentionGrad& g, Stream stream);
template <class S>
const char* backward_hopper_wide_of(const Attention& a, const AttentionGrad& g, Stream stream);
template <class S>
const char* backward_hopper_bias_of(const Attention& a, const AttentionGrad& g, Stream stream);

// Once align_rows has been. As in forward, keys are dropped in whole groups of eight.
inline bool backward_hopper_takes(const Attention& a, const AttentionGrad& g) {
  constexpr int64_t kFew = 64;
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (a.bias.data && (width > 128 || a.dropout.seed || !bias_in_pieces(a))) return false;
  if (g.grad_bias.data && g.grad_bias.key != 1) return false;
  return !g.grad_weights.data && !a.uniform_empty_rows && a.queries > kFew && a.keys > kFew &&
         width <= 256 && (copies_are_little(a) || all_in_pieces(a, &g)) &&
         !(a.dropout.seed && a.origin.key % 8) && on_hopper();
}

// All three gradients by one kernel, which adds dQ up in scratch memory: the sums, then the number
// of the next block and two signals for each 64 queries. The sizes of the batch have no say.
template <class S>
const char* backward_joint_of(const Attention& a, const AttentionGrad& g, void* scratch,
                              Stream stream);
inline int64_t joint_width(const Attention& a) { return max_of(a.head_dim, a.value_dim); }
// Where it was measured to be faster than two kernels. Fewer queries are over before its blocks are
// in step; few keys are few blocks, and of many more keys than queries each block waits for the
// one behind at every tile.
inline bool backward_joint_takes(const Attention& a, const AttentionGrad& g) {
  constexpr int64_t kMany = 1024;
  const bool hides = a.mask.data || !hides_nothing(a);
  return !a.bias.data && a.queries >= kMany && a.keys >= kMany && a.keys <= 4 * a.queries &&
         joint_width(a) <= 128 && (joint_width(a) > 64 || a.dropout.seed || hides) &&
         g.grad_query.data && (g.grad_key.data || g.grad_value.data);
}
struct JointScratch {
  int64_t sums, all;  // bytes
};
inline JointScratch joint_scratch(const Attention& a) {
  const int64_t tiles = a.batch * a.heads * ceil_div(a.queries, kTile);
  const int64_t sums = tiles * kTile * (joint_width(a) <= 64 ? 64 : 128) * 4;
  return {sums, sums + ceil_div(4 * (1 + 2 * tiles), 256) * 256};
}

template <class S>
DEVICE const S* row_of(const Rows& rows, int64_t b, int64_t h, int64_t i) {
  return (const S*)rows.data + b * rows.batch + h * rows.head + i * rows.row;
}

// A row of queries for eight lanes of a warp, each of which has every eighth piece of 16 bytes,
// wherever the row begins: so its sums have one order.
constexpr int kRowLanes = 8;
struct LaneRow {
  int64_t b, h, i, at;
  bool exists;
  int lane;
};
DEVICE LaneRow lane_row(const Attention& a) {
  const int64_t row = grid_row();
  const int64_t i =
      (int64_t)blockIdx.x * (kRowThreads / kRowLanes) + (uint32_t)thread_id() / kRowLanes;
  const uint32_t heads = (uint32_t)a.heads;
  return {(uint32_t)row / heads, (uint32_t)row % heads, i,
          row * a.queries + i,   i < a.queries,         (int)((uint32_t)lane_id() % kRowLanes)};
}
inline Grid lane_rows(const Attention& a) {
  return {ceil_div(a.queries, kRowThreads / kRowLanes), a.batch * a.heads};
}
// The product of the row in two tensors, in all of its lanes; all lanes of the warp come here.
template <class S>
DEVICE typename Softmax<S>::T product_of_rows(const Attention& a, const LaneRow& of,
                                              const Rows& left, const Rows& right) {
  constexpr int kPiece = 16 / sizeof(S);
  typename Softmax<S>::T sum = 0;
  if (of.exists) {
    const S *from_left = row_of<S>(left, of.b, of.h, of.i),
            *from_right = row_of<S>(right, of.b, of.h, of.i);
    const bool aligned = (((uintptr_t)from_left | (uintptr_t)from_right) & 15) == 0;
    for (int64_t d = of.lane * kPiece; d < a.value_dim; d += kRowLanes * kPiece) {
      S x[kPiece], y[kPiece];
      if (aligned && d + kPiece <= a.value_dim) {
        const Bytes16 of_left = *(const Bytes16*)(from_left + d),
                      of_right = *(const Bytes16*)(from_right + d);
        __builtin_memcpy(x, &of_left, 16);
        __builtin_memcpy(y, &of_right, 16);
      } else {
#pragma unroll
        for (int e = 0; e < kPiece; e++) {
          x[e] = d + e < a.value_dim ? from_left[d + e] : S{};
          y[e] = d + e < a.value_dim ? from_right[d + e] : S{};
        }
      }
      typename Softmax<S>::T piece = 0;
#pragma unroll
      for (int e = 0; e < kPiece; e++) piece = fma(widen(x[e]), widen(y[e]), piece);
      sum += piece;
    }
  }
  for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
  return sum;
}

// delta = rowsum(dO o O) - dL.
template <class S>
__global__ void LAUNCH_BOUNDS(kRowThreads, 8)
    delta_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g) {
  using T = typename Softmax<S>::T;
  if (grid_row() >= a.batch * a.heads) return;
  const LaneRow of = lane_row(a);
  const T sum = product_of_rows<S>(a, of, a.out, g.grad_out);
  if (of.exists && of.lane == 0)
    ((T*)g.delta)[of.at] = g.grad_lse ? sum - ((const T*)g.grad_lse)[of.at] : sum;
}
template <class S>
const char* run_delta(const Attention& a, const AttentionGrad& g, Stream stream) {
  return launch(delta_kernel<S>, lane_rows(a), kRowThreads, 0, stream, a, g);
}

// With empty_rows="uniform" P of such a row is 1 / Lk over all keys. add(i) for each of them of one
// head, in order; every warp finds them for itself.
template <class T, class Add>
DEVICE void for_each_empty_row(const Attention& a, int64_t b, int64_t h, const Add& add) {
  const T* lse = (const T*)a.lse + (b * a.heads + h) * a.queries;
  for (int64_t i0 = 0; i0 < a.queries; i0 += kWarp) {
    const int64_t i = i0 + lane_id();
    uint32_t empty = ballot(i < a.queries && lse[i] == -(T)INFINITY);
    for (int r = 0; empty; r++, empty >>= 1)
      if (empty & 1) add(i0 + r);
  }
}

// Whether each pair has its own bias: then dS is its gradient, and no sum is left.
HOST_DEVICE bool bias_is_dense(const Attention& a, const Pairs& grad_bias) {
  return (grad_bias.batch || a.batch == 1) && (grad_bias.head || a.heads == 1) &&
         (grad_bias.query || a.queries == 1) && (grad_bias.key || a.keys == 1);
}
// Whether the bias is the same for all keys of a row: then the sum over a row of dS is dL.
HOST_DEVICE bool bias_is_constant(const Attention& a, const Pairs& grad_bias) {
  return !grad_bias.key && a.keys > 1;
}
// Whether the owner of queries has something to do.
inline bool queries_are_wanted(const Attention& a, const AttentionGrad& g) {
  return g.grad_query.data || (g.grad_bias.data && bias_is_dense(a, g.grad_bias));
}
HOST_DEVICE bool bias_is_summed(const Attention& a, const Pairs& grad_bias) {
  return grad_bias.data && !bias_is_dense(a, grad_bias) && !bias_is_constant(a, grad_bias) &&
         a.batch * a.heads * a.queries * a.keys > 0;
}

// Whether what is summed for a bias may have lse of its own: of these keys, in float32 arithmetic.
HOST_DEVICE bool takes_own_levels(const Attention& a, const AttentionGrad& g) {
  return g.all_keys && bias_is_summed(a, g.grad_bias);
}

template <class S, class T>
DEVICE void store_bias(const Attention& a, const Pairs& bias, int64_t at, T value) {
  if (a.bias_is_float32)
    ((float*)bias.data)[at] = (float)value;
  else
    narrow(value, (S*)bias.data + at);
}

// The gradient of a bias that broadcasts over batch, heads or queries: each of its tiles [64, 64]
// has one owner, who computes dS again for all that it broadcasts over and adds it up in order. Few
// owners would leave most of a GPU idle: then each sum is cut into chunks, that leave their sums, T
// [owners, chunks, 64 queries, 64 keys], to be added in order. The cut depends on neither the
// groups nor, where the bias has a batch of its own, on the size of the batch.
struct BiasPlan {
  int64_t batches, heads, query_tiles, key_tiles;  // owners: distinct tiles of the bias
  int64_t chunks;
};
HOST_DEVICE BiasPlan bias_plan(const Attention& a, const Pairs& bias) {
  constexpr int64_t kBlocksEnough = 128, kMostChunks = 16;
  BiasPlan plan{bias.batch ? a.batch : 1, bias.head ? a.heads : 1,
                bias.query ? ceil_div(a.queries, kTile) : 1, ceil_div(a.keys, kTile), 1};
  const int64_t owners = plan.heads * plan.query_tiles * plan.key_tiles;
  const int64_t terms = a.batch / plan.batches * (a.heads / plan.heads) *
                        (ceil_div(a.queries, kTile) / plan.query_tiles);
  plan.chunks = max_of(1, min_of(min_of(terms, kMostChunks), kBlocksEnough / max_of(1, owners)));
  return plan;
}
HOST_DEVICE int64_t owner_count(const BiasPlan& plan) {
  return plan.batches * plan.heads * plan.query_tiles * plan.key_tiles;
}
// Whether sums are left for bias_finish_kernel; else the owner writes its tile of grad_bias.
HOST_DEVICE bool bias_in_chunks(const Attention& a, const BiasPlan& plan, const Pairs& bias) {
  return plan.chunks > 1 || (!bias.query && a.queries > 1);
}

// The same sums on a GPU of compute capability 9.0, in tiles of 128 queries; few of them would
// leave too many multiprocessors idle.
template <class S>
const char* bias_hopper_of(const Attention& a, const AttentionGrad& g, const BiasPlan& plan,
                           Stream stream);
inline bool bias_hopper_takes(const Attention& a, const BiasPlan& plan, const Pairs& bias) {
  constexpr int64_t kOwnersEnough = 256;
  return !bias_in_chunks(a, plan, bias) &&
         plan.heads * plan.query_tiles * plan.key_tiles >= kOwnersEnough;
}

// Of the sums that are left.
HOST_DEVICE int64_t bias_bytes(const Attention& a, const Pairs& bias) {
  if (!bias_is_summed(a, bias)) return 0;
  const BiasPlan plan = bias_plan(a, bias);
  if (!bias_in_chunks(a, plan, bias)) return 0;
  return owner_count(plan) * plan.chunks * kTile * kTile * (a.dtype == DType::kFloat64 ? 8 : 4);
}

// The tile of the bias that an owner has.
struct BiasTile {
  int64_t b, h, q0, k0;
};
DEVICE BiasTile bias_tile(const BiasPlan& plan, int64_t owner) {
  const int64_t row = owner / plan.key_tiles, head = row / plan.query_tiles;
  return {head / plan.heads, head % plan.heads, row % plan.query_tiles * kTile,
          owner % plan.key_tiles * kTile};
}
// Runs add(b, h, q0) for one chunk of the terms of an owner.
template <class Add>
DEVICE void for_each_term(const Attention& a, const BiasPlan& plan, const BiasTile& tile,
                          int64_t chunk, const Add& add) {
  const int64_t heads = a.heads / plan.heads;
  const int64_t query_tiles = ceil_div(a.queries, kTile) / plan.query_tiles;
  const int64_t terms = a.batch / plan.batches * heads * query_tiles;
  for (int64_t i = terms * chunk / plan.chunks; i < terms * (chunk + 1) / plan.chunks; i++)
    add(tile.b + i / (query_tiles * heads), tile.h + i / query_tiles % heads,
        tile.q0 + i % query_tiles * kTile);
}
// Where the sum of pair (r, c) of an owner's tile goes.
template <class S, class T>
DEVICE void store_bias_sum(const Attention& a, const Pairs& bias, const BiasPlan& plan,
                           int64_t owner, int64_t chunk, int r, int c, T sum, T* sums) {
  if (bias_in_chunks(a, plan, bias)) {
    sums[((owner * plan.chunks + chunk) * kTile + r) * kTile + c] = sum;
    return;
  }
  const BiasTile tile = bias_tile(plan, owner);
  if (tile.q0 + r >= a.queries || tile.k0 + c >= a.keys) return;
  store_bias<S>(a, bias,
                tile.b * bias.batch + tile.h * bias.head + (tile.q0 + r) * bias.query +
                    (tile.k0 + c) * bias.key,
                sum);
}

constexpr int kFinishThreads = 256;
template <class S, class T>
__global__ void LAUNCH_BOUNDS(kFinishThreads, 4)
    bias_finish_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT Pairs bias,
                       const BiasPlan plan, const T* sums) {
  const int64_t owner = blockIdx.x;
  const BiasTile tile = bias_tile(plan, owner);
  const int rows = bias.query ? (int)kTile : 1, added = bias.query ? 1 : (int)kTile;
  for (int at = thread_id(); at < rows * kTile; at += kFinishThreads) {
    const int r = at / (int)kTile, c = at % (int)kTile;
    if (tile.q0 + r >= a.queries || tile.k0 + c >= a.keys) continue;
    T total = 0;
    for (int64_t chunk = 0; chunk < plan.chunks; chunk++) {
      const T* from = sums + ((owner * plan.chunks + chunk) * kTile + r) * kTile + c;
      T sum = 0;
      for (int i = 0; i < added; i++) sum += from[i * kTile];
      total += sum;
    }
    store_bias<S>(a, bias,
                  tile.b * bias.batch + tile.h * bias.head + (tile.q0 + r) * bias.query +
                      (tile.k0 + c) * bias.key,
                  total);
  }
}

// The gradient of a bias that is constant along the keys: the sum of dL over what it broadcasts
// over, in double. NaN in delta stays NaN. One warp has one element of the bias.
template <class S>
__global__ void LAUNCH_BOUNDS(kRowThreads, 8)
    constant_bias_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT Pairs bias,
                         const void* grad_lse, const void* delta) {
  using T = typename Softmax<S>::T;
  const int64_t batches = bias.batch ? a.batch : 1, heads = bias.head ? a.heads : 1;
  const int64_t queries = bias.query ? a.queries : 1;
  const int64_t element = (int64_t)blockIdx.x * (kRowThreads / kWarp) + warp_id();
  if (element >= batches * heads * queries) return;
  const int64_t b0 = element / (heads * queries), h0 = element / queries % heads;
  const int64_t i0 = element % queries;
  const int64_t added_heads = a.heads / heads, added_queries = a.queries / queries;
  const int64_t terms = a.batch / batches * added_heads * added_queries;
  double sum = 0;
  for (int64_t n = lane_id(); n < terms; n += kWarp) {
    const int64_t b = b0 + n / (added_heads * added_queries);
    const int64_t h = h0 + n / added_queries % added_heads;
    const int64_t at = (b * a.heads + h) * a.queries + i0 + n % added_queries;
    if (((const T*)a.lse)[at] == -(T)INFINITY) continue;
    const T rest = ((const T*)delta)[at] - ((const T*)delta)[at];
    sum += (grad_lse ? ((const T*)grad_lse)[at] : (T)0) + rest;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
  if (lane_id() == 0)
    store_bias<S>(a, bias, b0 * bias.batch + h0 * bias.head + i0 * bias.query, (T)sum);
}

// grad_bias of a bias that broadcasts. run(plan, sums) starts the owners of its tiles.
template <class S, class Run>
const char* run_bias(const Attention& a, const Pairs& bias, const void* grad_lse, const void* delta,
                     void* scratch, Stream stream, const Run& run) {
  using T = typename Softmax<S>::T;
  if (!bias.data || bias_is_dense(a, bias)) return nullptr;
  if (bias_is_constant(a, bias)) {
    const int64_t elements =
        (bias.batch ? a.batch : 1) * (bias.head ? a.heads : 1) * (bias.query ? a.queries : 1);
    return launch(constant_bias_kernel<S>, {ceil_div(elements, kRowThreads / kWarp), 1},
                  kRowThreads, 0, stream, a, bias, grad_lse, delta);
  }
  if (!bias_is_summed(a, bias)) return nullptr;
  const BiasPlan plan = bias_plan(a, bias);
  const char* error = run(plan, (T*)scratch);
  if (error || !bias_in_chunks(a, plan, bias)) return error;
  return launch(bias_finish_kernel<S, T>, {owner_count(plan), 1}, kFinishThreads, 0, stream, a,
                bias, plan, (const T*)scratch);
}

}  // namespace mha_ext::cuda

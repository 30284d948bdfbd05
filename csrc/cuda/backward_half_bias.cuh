// The gradient of a bias that broadcasts, for 16-bit types; and the backward of such a type.
#pragma once
#include "backward_half.cuh"

namespace mha_ext::cuda {

// One chunk of the sum of kOthers keys of one owner's tile of grad_bias.
template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, F::kBlocks)
    bias_half_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT AttentionGrad g,
                     const BiasPlan plan, float* sums) {
  constexpr int kParts = (int)kTile / F::kOthers;
  const int64_t chunk = blockIdx.x % plan.chunks, owner = blockIdx.x / plan.chunks / kParts;
  const int part = (int)(blockIdx.x / plan.chunks % kParts);
  const BiasTile tile = bias_tile(plan, owner);
  const int64_t k0 = tile.k0 + part * F::kOthers;
  const int lane = lane_id();
  float total[F::kColumns][4] = {};
  for_each_term(a, plan, tile, chunk, [&](int64_t b, int64_t h, int64_t q0) {
    const int key_tile = (int)(k0 / F::kOthers);
    const SeenTiles seen = seen_tiles<F::kOthers>(a, b, q0, min_of(F::kRows, a.queries - q0));
    if (key_tile < seen.any || key_tile >= seen.any_end) return;
    const int64_t own0 = q0 + warp_id() * 16;
    sync_block();  // what stood there has been read
    copy_own<F>(a, g, b, h, q0);
    copy_others<F>(a, g, b, h, q0, k0, 0);
    copy_commit();
    QueryNumbers own[2];
    own_numbers(a, g, b, h, own0, own);
    copy_wait<0>();
    sync_block();
    HalfPairs<F> pairs;
    const SeenTiles rows = seen_tiles<F::kOthers>(a, b, own0, min_of(16, a.queries - own0));
    if (!half_gradient<F>(a, {b, (int)(own0 / 16), (int)h, key_tile, 0}, rows, own, pairs)) return;
#pragma unroll
    for (int j = 0; j < F::kColumns; j++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (own0 + 8 * (e / 2) + lane / 4 < a.queries) total[j][e] += pairs.ds[0][j][e];
  });
#pragma unroll
  for (int j = 0; j < F::kColumns; j++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      store_bias_sum<typename F::S>(
          a, g.grad_bias, plan, owner, chunk, warp_id() * 16 + 8 * (e / 2) + lane / 4,
          part * F::kOthers + 8 * j + 2 * (lane % 4) + e % 2, total[j][e], sums);
}

template <class F>
const char* run_backward_half(const Attention& a, const AttentionGrad& g, Stream stream) {
  const Grid grid{ceil_div(F::kOwnsKeys ? a.keys : a.queries, F::kRows),
                  a.batch * (F::kOwnsKeys ? a.kv_heads : a.heads)};
  return launch(backward_half_kernel<F>, grid, F::kThreads, shared_bytes<F>(a), stream, a, g);
}

template <class F>
const char* launch_bias_half(const Attention& a, const AttentionGrad& g, const BiasPlan& plan,
                             float* sums, Stream stream) {
  const Grid grid{owner_count(plan) * (kTile / F::kOthers) * plan.chunks, 1};
  return launch(bias_half_kernel<F>, grid, F::kThreads, shared_bytes<F>(a), stream, a, g, plan,
                sums);
}
template <class F>
const char* run_bias_half(const Attention& a, const AttentionGrad& g, void* scratch,
                          Stream stream) {
  return run_bias<typename F::S>(a, g.grad_bias, g.grad_lse, g.delta, scratch, stream,
                                 [&](const BiasPlan& plan, float* sums) {
                                   return launch_bias_half<F>(a, g, plan, sums, stream);
                                 });
}
// Where the kernels of compute capability 9.0 do the rest.
template <class S, int kWidth>
const char* run_bias_hopper(const Attention& a, const AttentionGrad& g, void* scratch,
                            Stream stream) {
  using OfQueries = HalfBackward<S, kWidth, false, true, false>;
  return run_bias<S>(a, g.grad_bias, g.grad_lse, g.delta, scratch, stream,
                     [&](const BiasPlan& plan, float* sums) {
                       return bias_hopper_takes(a, plan, g.grad_bias)
                                  ? bias_hopper_of<S>(a, g, plan, stream)
                                  : launch_bias_half<OfQueries>(a, g, plan, sums, stream);
                     });
}

template <class S, int kWidth>
const char* backward_half(const Attention& a, const AttentionGrad& g, void* scratch,
                          Stream stream) {
  using OfQueries = HalfBackward<S, kWidth, false, true, false>;
  const char* error = run_delta<S>(a, g, stream);
  if (!error && queries_are_wanted(a, g)) error = run_backward_half<OfQueries>(a, g, stream);
  if constexpr (kWidth <= 128) {
    if (!error && (g.grad_key.data || g.grad_value.data))
      error = run_backward_half<HalfBackward<S, kWidth, true, true, true>>(a, g, stream);
  } else {  // the two sums do not fit into the registers together
    if (!error && g.grad_key.data)
      error = run_backward_half<HalfBackward<S, kWidth, true, true, false>>(a, g, stream);
    if (!error && g.grad_value.data)
      error = run_backward_half<HalfBackward<S, kWidth, true, false, true>>(a, g, stream);
  }
  return error ? error : run_bias_half<OfQueries>(a, g, scratch, stream);
}

// Where the cotangent is that of P; delta is there.
template <class S, int kWidth>
const char* weights_backward_half(const Attention& a, const AttentionGrad& g, void* scratch,
                                  Stream stream) {
  using OfQueries = HalfBackward<S, kWidth, false, true, false, true>;
  using OfKeys = HalfBackward<S, kWidth, true, true, false, true>;
  const char* error = nullptr;
  if (queries_are_wanted(a, g)) error = run_backward_half<OfQueries>(a, g, stream);
  if (!error && g.grad_key.data) error = run_backward_half<OfKeys>(a, g, stream);
  return error ? error : run_bias_half<OfQueries>(a, g, scratch, stream);
}

template <class S>
const char* backward_of_half(const Attention& given, const AttentionGrad& g, void* scratch,
                             Stream stream) {
  Attention a = given;
  if (const char* error = pack_mask(a, scratch, stream)) return error;
  if (backward_hopper_takes(a, g)) {
    AttentionGrad grads = g;
    const char* error = run_delta<S>(a, g, stream);
    if (!error) error = align_rows(a, &grads, scratch, stream);
    if (!error)
      error = backward_joint_takes(a, grads) ? backward_joint_of<S>(a, grads, scratch, stream)
                                             : backward_hopper_of<S>(a, grads, stream);
    if (error) return error;
    return max_of(a.head_dim, a.value_dim) <= 64
               ? run_bias_hopper<S, 64>(a, grads, scratch, stream)
               : run_bias_hopper<S, 128>(a, grads, scratch, stream);
  }
  if (g.grad_weights.data) {
    if (a.head_dim <= 128) return weights_backward_half<S, 128>(a, g, scratch, stream);
    return weights_backward_half<S, 256>(a, g, scratch, stream);
  }
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (width <= 64) return backward_half<S, 64>(a, g, scratch, stream);
  if (width <= 128) return backward_half<S, 128>(a, g, scratch, stream);
  return backward_half<S, 256>(a, g, scratch, stream);
}

}  // namespace mha_ext::cuda

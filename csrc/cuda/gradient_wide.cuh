// Gradients without tensor cores. A block has 64 rows of one result, goes over all tiles of the
// other side, and adds up products of the tile's pairs: of one term in backward, of two in its
// tangent. A task says what they are:
//   kTerms                         how many
//   a, g                           the problem, and where its gradients (or their tangents) go
//   factors(output, term)          what the pairs of this term are multiplied by; data = nullptr:
//   none uniform_factors()              what the rows without any key of the result of value are
//   pairs<F, output>(at, ...)      the pairs of one tile, hidden ones 0; [0] is the gradient of S
#pragma once
#include "backward.cuh"
#include "wide.cuh"

namespace mha_ext::cuda {

enum class Output { kQuery, kKey, kValue };

// grad_value += Z^T dO of rows without any key.
template <class F>
DEVICE void add_uniform_rows(const Attention& a, const Rows& factors, int64_t b, int64_t h,
                             int64_t k0, int first, typename F::T (&out)[F::kChunks][4][4]) {
  using T = typename F::T;
  for_each_empty_row<T>(a, b, h, [&](int64_t i) {
    const typename F::S* row = row_of<typename F::S>(factors, b, h, i);
    const int64_t k = k0 + thread_id() / 16 * 4;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const bool kept = !a.dropout.seed || keeps(a.dropout, a.origin.batch + b, a.origin.head + h,
                                                 a.origin.query + i, a.origin.key + k + n);
      const T weight = kept ? 1 / (T)a.keys : (T)0;
#pragma unroll
      for (int c = 0; c < F::kChunks; c++)
#pragma unroll
        for (int f = 0; f < 4; f++) {
          const int column = first + out_column<F>(c, f);
          if (column < a.value_dim) out[c][n][f] = fma(weight, widen(row[column]), out[c][n][f]);
        }
    }
  });
}

template <class F>
DEVICE void store_dense_bias(const Attention& a, const Pairs& bias, const TilePlace& at,
                             const typename F::T (&ds)[4][4]) {
  const int y = thread_id() / 16, x = thread_id() % 16;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int64_t q = at.q0 + 4 * y + i, k = at.k0 + x + 16 * j;
      if (q < a.queries && k < a.keys)
        store_bias<typename F::S>(
            a, bias, at.b * bias.batch + at.h * bias.head + q * bias.query + k * bias.key,
            ds[i][j]);
    }
}

template <class F, Output kOutput, class Task>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1) wide_gradient_kernel(const GRID_CONSTANT Task task) {
  using S = typename F::S;
  using T = typename F::T;
  constexpr bool kOwnsKeys = kOutput != Output::kQuery;
  const Attention& a = task.a;
  const AttentionGrad& g = task.g;
  const int64_t row = grid_row(), heads = kOwnsKeys ? a.kv_heads : a.heads;
  if (row >= a.batch * heads) return;
  const Rows& result = kOutput == Output::kQuery ? g.grad_query
                       : kOutput == Output::kKey ? g.grad_key
                                                 : g.grad_value;
  const int width = (int)(kOutput == Output::kValue ? a.value_dim : a.head_dim);
  const int parts = (int)max_of(1, ceil_div(width, F::kWidth));
  const int64_t tile = blockIdx.x / parts;
  const int first = (int)(blockIdx.x % parts) * F::kWidth;
  const int64_t rows = kOwnsKeys ? a.keys : a.queries;
  // Under a causal mask early keys and late queries have the most to do.
  const int64_t own0 = (kOwnsKeys ? tile : ceil_div(rows, 64) - 1 - tile) * 64;
  const int64_t b = row / heads, h0 = row % heads;
  const int64_t group = kOwnsKeys ? a.heads / a.kv_heads : 1;
  const SeenTiles seen = kOwnsKeys ? seeing_tiles<64>(a, b, own0, min_of(64, rows - own0))
                                   : seen_tiles<64>(a, b, own0, min_of(64, rows - own0));
  const bool dense_bias =
      kOutput == Output::kQuery && first == 0 && g.grad_bias.data && bias_is_dense(a, g.grad_bias);

  T out[F::kChunks][4][4] = {};
  for (int64_t h = h0 * group; h < (h0 + 1) * group; h++) {
    const int64_t kv = kv_head(a, h);
    if constexpr (kOutput == Output::kValue) {
      const Rows& uniform = task.uniform_factors();
      if (a.uniform_empty_rows && uniform.data)
        add_uniform_rows<F>(a, uniform, b, h, own0, first, out);
    }
#pragma unroll 1
    for (int n = seen.any; n < seen.any_end; n++) {
      const int64_t other0 = (int64_t)n * 64;
      const TilePlace at{b, h, kv, kOwnsKeys ? other0 : own0, kOwnsKeys ? own0 : other0};
      sync_block();  // the words have been read
      const Visibility visible = tile_words<F>(a, at);
      if (visible == Visibility::kEmpty) continue;
      const bool partial = visible == Visibility::kPartial;
      if (a.dropout.seed) tile_kept<F>(a, at);
      T pairs[Task::kTerms][4][4];
      task.template pairs<F, kOutput>(at, partial, pairs);
      if (dense_bias) store_dense_bias<F>(a, g.grad_bias, at, pairs[0]);
      if (!result.data) continue;
#pragma unroll
      for (int t = 0; t < Task::kTerms; t++) {
        const Rows& factors = task.factors(kOutput, t);
        if (!factors.data) continue;
        sync_block();
        store_pairs<F>(pairs[t]);
        add_weighted<F, kOwnsKeys>(
            tile_rows<S>(factors, b, kOwnsKeys ? h : kv, other0, kOwnsKeys ? a.queries : a.keys),
            first, width, partial, out);
      }
    }
  }

  if (!result.data) return;
  const T factor = kOutput == Output::kValue ? (T)a.dropout.keep_scale : (T)a.scale;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t r = own0 + thread_id() / 16 * 4 + i;
    if (r < rows) store_out_row<F>((S*)row_of<S>(result, b, h0, r), first, width, factor, i, out);
  }
}

// One chunk of the sum of one owner's tile of grad_bias.
template <class F, class Task>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    wide_bias_kernel(const GRID_CONSTANT Task task, const BiasPlan plan, typename F::T* sums) {
  using T = typename F::T;
  const Attention& a = task.a;
  const int64_t owner = blockIdx.x / plan.chunks, chunk = blockIdx.x % plan.chunks;
  const BiasTile tile = bias_tile(plan, owner);
  T total[4][4] = {};
  for_each_term(a, plan, tile, chunk, [&](int64_t b, int64_t h, int64_t q0) {
    const SeenTiles seen = seen_tiles<64>(a, b, q0, min_of(64, a.queries - q0));
    if (tile.k0 / 64 < seen.any || tile.k0 / 64 >= seen.any_end) return;
    const TilePlace at{b, h, kv_head(a, h), q0, tile.k0};
    sync_block();
    const Visibility visible = tile_words<F>(a, at);
    if (visible == Visibility::kEmpty) return;
    if (a.dropout.seed) tile_kept<F>(a, at);
    T pairs[Task::kTerms][4][4];
    task.template pairs<F, Output::kQuery>(at, visible == Visibility::kPartial, pairs);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) total[i][j] += pairs[0][i][j];
  });
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      store_bias_sum<typename F::S>(a, task.g.grad_bias, plan, owner, chunk,
                                    thread_id() / 16 * 4 + i, thread_id() % 16 + 16 * j,
                                    total[i][j], sums);
}

template <class F, Output kOutput, class Task>
const char* run_wide_gradient(const Task& task, Stream stream) {
  const Attention& a = task.a;
  constexpr bool kOwnsKeys = kOutput != Output::kQuery;
  const int64_t width = kOutput == Output::kValue ? a.value_dim : a.head_dim;
  const int64_t tiles = ceil_div(kOwnsKeys ? a.keys : a.queries, 64);
  const Grid grid{tiles * max_of(1, ceil_div(width, F::kWidth)),
                  a.batch * (kOwnsKeys ? a.kv_heads : a.heads)};
  return launch(wide_gradient_kernel<F, kOutput, Task>, grid, F::kThreads, F::kSharedBytes, stream,
                task);
}

// grad_query and grad_key, and the gradient of a bias that is dense, as F has room for them.
template <class F, class Task>
const char* run_wide_scores(const Task& task, Stream stream) {
  const AttentionGrad& g = task.g;
  const char* error = nullptr;
  if (g.grad_query.data || (g.grad_bias.data && bias_is_dense(task.a, g.grad_bias)))
    error = run_wide_gradient<F, Output::kQuery>(task, stream);
  if (!error && g.grad_key.data) error = run_wide_gradient<F, Output::kKey>(task, stream);
  return error;
}
template <class F, class Task>
const char* run_wide_bias(const Task& task, const void* grad_lse, const void* delta, void* scratch,
                          Stream stream) {
  using T = typename F::T;
  return run_bias<typename F::S>(task.a, task.g.grad_bias, grad_lse, delta, scratch, stream,
                                 [&](const BiasPlan& plan, T* sums) {
                                   return launch(wide_bias_kernel<F, Task>,
                                                 {owner_count(plan) * plan.chunks, 1}, F::kThreads,
                                                 F::kSharedBytes, stream, task, plan, sums);
                                 });
}

}  // namespace mha_ext::cuda

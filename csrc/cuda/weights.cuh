// The weights P = exp(S - lse), for the heads and rows that are asked for. A block has one tile.
#pragma once
#include "backward_wide.cuh"

namespace mha_ext::cuda {

template <class F>
__global__ void LAUNCH_BOUNDS(F::kThreads, 1)
    weights_kernel(const GRID_CONSTANT Attention a, const GRID_CONSTANT Selection selected,
                   typename F::S* out) {
  using T = typename F::T;
  const int64_t row = grid_row();
  if (row >= a.batch * selected.head_count) return;
  const int64_t key_tiles = ceil_div(a.keys, 64), run = blockIdx.x / key_tiles;
  const RowRun rows = selected.runs ? selected.runs[run]
                                    : RowRun{run * 64, min_of(64, a.queries - run * 64), run * 64};
  const int64_t b = row / selected.head_count, place = row % selected.head_count;
  const int64_t h = selected.heads ? selected.heads[place] : place;
  const TilePlace at{b, h, kv_head(a, h), rows.query, blockIdx.x % key_tiles * 64};
  const Visibility visible = tile_words<F>(a, at);
  T p[4][4] = {}, lse[4];
  if (visible != Visibility::kEmpty) {
    probabilities<F, false>(a, at, p);
    select<F, false>(visible == Visibility::kPartial, 0, p);
  }
  query_numbers<false>(a, at, a.lse, lse);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int r = thread_id() / 16 * 4 + i;
    if (r >= rows.count) continue;
    const bool uniform = a.uniform_empty_rows && lse[i] == -(T)INFINITY;
    typename F::S* to = out + (row * selected.row_count + rows.to + r) * a.keys;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int64_t k = at.k0 + thread_id() % 16 + 16 * j;
      if (k < a.keys) narrow(uniform ? 1 / (T)a.keys : p[i][j], to + k);
    }
  }
}

template <class S>
const char* weights_wide(const Attention& a, const Selection& selected, void* out, Stream stream) {
  using F = Wide<S, 64>;
  if (selected.row_count == 0) return nullptr;  // no runs are not all rows
  const int64_t runs = selected.runs ? selected.run_count : ceil_div(a.queries, 64);
  const Grid grid{runs * ceil_div(a.keys, 64), a.batch * selected.head_count};
  return launch(weights_kernel<F>, grid, F::kThreads, F::kSharedBytes, stream, a, selected,
                (S*)out);
}

}  // namespace mha_ext::cuda

// Backward for float32: on the tensor cores up to 128 wide, but for the gradient of a bias that
// broadcasts.
#include "backward_split.cuh"
#include "backward_wide.cuh"
#include "forward.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_of<float>(const Attention& a, void* scratch, Stream stream);

namespace {

const char* backward_planes(const Attention& a, const AttentionGrad& g, void* scratch,
                            Stream stream) {
  char* memory = (char*)scratch + ceil_div(bias_bytes(a, g.grad_bias), 256) * 256;
  const char* error = run_delta<float>(a, g, stream);
  if (!error)
    error = max_of(a.head_dim, a.value_dim) <= 64 ? backward_split<64>(a, g, memory, stream)
                                                  : backward_split<128>(a, g, memory, stream);
  // What is summed for a bias takes scores in float32 arithmetic, and lse with them where it is of
  // these keys. The planes have had their use.
  Attention own = a;
  if (!error && takes_own_levels(a, g)) {
    Attention levels = without_values(a);
    own.lse = levels.lse = memory;
    own.lse_low = levels.lse_low = memory + level_bytes(a);
    error = forward_of<float>(levels, memory + 2 * level_bytes(a), stream);
  }
  if (error) return error;
  return run_wide_bias<Wide<float, 64>>(BackwardTask{own, g}, g.grad_lse, g.delta, scratch, stream);
}

}  // namespace

template <>
const char* backward_of<float>(const Attention& a, const AttentionGrad& g, void* scratch,
                               Stream stream) {
  if (g.grad_weights.data) return backward_scores<float, 128>(a, g, scratch, stream);
  if (is_split(a)) return backward_planes(a, g, scratch, stream);
  return backward_wide<float, 256>(a, g, scratch, stream);
}

}  // namespace mha_ext::cuda

// Backward for float32: on the tensor cores up to 128 wide, but for the gradient of a bias that
// broadcasts.
#include "backward_split.cuh"
#include "backward_wide.cuh"

namespace mha_ext::cuda {
namespace {

const char* backward_planes(const Attention& a, const AttentionGrad& g, void* scratch,
                            Stream stream) {
  void* memory = (char*)scratch + ceil_div(bias_bytes(a, g.grad_bias), 256) * 256;
  const char* error = run_delta<float>(a, g, stream);
  if (!error)
    error = max_of(a.head_dim, a.value_dim) <= 64 ? backward_split<64>(a, g, memory, stream)
                                                  : backward_split<128>(a, g, memory, stream);
  if (error) return error;
  return run_wide_bias<Wide<float, 64>>(BackwardTask{a, g}, g.grad_lse, g.delta, scratch, stream);
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

// Backward for float32.
#include "backward_wide.cuh"

namespace mha_ext::cuda {

template <>
const char* backward_of<float>(const Attention& a, const AttentionGrad& g, void* scratch,
                               Stream stream) {
  if (g.grad_weights.data) return backward_scores<float, 128>(a, g, scratch, stream);
  if (max_of(a.head_dim, a.value_dim) <= 64) return backward_wide<float, 64>(a, g, scratch, stream);
  return backward_wide<float, 256>(a, g, scratch, stream);
}

}  // namespace mha_ext::cuda

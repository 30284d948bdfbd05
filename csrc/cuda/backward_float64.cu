// Backward for float64.
#include "backward_wide.cuh"

namespace mha_ext::cuda {

template <>
const char* backward_of<double>(const Attention& a, const AttentionGrad& g, void* scratch,
                                Stream stream) {
  if (g.grad_weights.data) return backward_scores<double, 64>(a, g, scratch, stream);
  return backward_wide<double, 64>(a, g, scratch, stream);
}

}  // namespace mha_ext::cuda

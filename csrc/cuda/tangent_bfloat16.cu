// The tangents of forward and backward for bfloat16.
#include "backward_tangent_half.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_tangent_of<BFloat16>(const Attention& a, const AttentionTangent& t,
                                         Stream stream) {
  return forward_tangent_of_half<BFloat16>(a, t, stream);
}
template <>
const char* backward_tangent_of<BFloat16>(const Attention& a, const AttentionGrad& g,
                                          const AttentionTangent& t, void* scratch, Stream stream) {
  return backward_tangent_of_half<BFloat16>(a, g, t, scratch, stream);
}

}  // namespace mha_ext::cuda

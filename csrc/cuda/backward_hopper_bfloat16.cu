// Backward for bfloat16 on GPUs of compute capability 9.0.
#include "backward_hopper.cuh"

namespace mha_ext::cuda {

template <>
const char* backward_hopper_wide_of<BFloat16>(const Attention& a, const AttentionGrad& g,
                                              Stream stream);

template <>
const char* backward_hopper_bias_of<BFloat16>(const Attention& a, const AttentionGrad& g,
                                              Stream stream);

template <>
const char* backward_hopper_of<BFloat16>(const Attention& a, const AttentionGrad& g,
                                         Stream stream) {
  return backward_hopper<BFloat16>(a, g, stream);
}

}  // namespace mha_ext::cuda

// Backward for float16 on GPUs of compute capability 9.0.
#include "backward_hopper.cuh"

namespace mha_ext::cuda {

template <>
const char* backward_hopper_wide_of<Float16>(const Attention& a, const AttentionGrad& g,
                                             Stream stream);

template <>
const char* backward_hopper_bias_of<Float16>(const Attention& a, const AttentionGrad& g,
                                             Stream stream);

template <>
const char* backward_hopper_of<Float16>(const Attention& a, const AttentionGrad& g, Stream stream) {
  return backward_hopper<Float16>(a, g, stream);
}

}  // namespace mha_ext::cuda

// Backward for bfloat16 with a bias on GPUs of compute capability 9.0.
#include "bias_hopper.cuh"

namespace mha_ext::cuda {

template <>
const char* backward_hopper_bias_of<BFloat16>(const Attention& a, const AttentionGrad& g,
                                              Stream stream) {
  return backward_hopper_bias<BFloat16>(a, g, stream);
}
template <>
const char* bias_hopper_of<BFloat16>(const Attention& a, const AttentionGrad& g,
                                     const BiasPlan& plan, Stream stream) {
  return bias_hopper<BFloat16>(a, g, plan, stream);
}

}  // namespace mha_ext::cuda

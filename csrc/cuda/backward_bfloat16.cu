// Backward for bfloat16.
#include "backward_half_bias.cuh"

namespace mha_ext::cuda {

template <>
const char* backward_hopper_of<BFloat16>(const Attention& a, const AttentionGrad& g, Stream stream);

template <>
const char* backward_joint_of<BFloat16>(const Attention& a, const AttentionGrad& g, void* scratch,
                                        Stream stream);

template <>
const char* bias_hopper_of<BFloat16>(const Attention& a, const AttentionGrad& g,
                                     const BiasPlan& plan, Stream stream);

template <>
const char* backward_of<BFloat16>(const Attention& a, const AttentionGrad& g, void* scratch,
                                  Stream stream) {
  return backward_of_half<BFloat16>(a, g, scratch, stream);
}

}  // namespace mha_ext::cuda

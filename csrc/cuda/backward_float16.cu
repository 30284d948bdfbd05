// Backward for float16.
#include "backward_half_bias.cuh"

namespace mha_ext::cuda {

template <>
const char* backward_hopper_of<Float16>(const Attention& a, const AttentionGrad& g, Stream stream);

template <>
const char* backward_joint_of<Float16>(const Attention& a, const AttentionGrad& g, void* scratch,
                                       Stream stream);

template <>
const char* bias_hopper_of<Float16>(const Attention& a, const AttentionGrad& g,
                                    const BiasPlan& plan, Stream stream);

template <>
const char* backward_of<Float16>(const Attention& a, const AttentionGrad& g, void* scratch,
                                 Stream stream) {
  return backward_of_half<Float16>(a, g, scratch, stream);
}

}  // namespace mha_ext::cuda

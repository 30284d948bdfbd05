// Backward for float16 on GPUs of compute capability 9.0, all gradients by one kernel.
#include "backward_hopper_joint.cuh"

namespace mha_ext::cuda {

template <>
const char* backward_joint_of<Float16>(const Attention& a, const AttentionGrad& g, void* scratch,
                                       Stream stream) {
  return backward_joint<Float16>(a, g, scratch, stream);
}

}  // namespace mha_ext::cuda

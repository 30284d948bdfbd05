// Backward for float16 wider than 128 on GPUs of compute capability 9.0.
#include "backward_hopper.cuh"

namespace mha_ext::cuda {

template <>
const char* backward_hopper_wide_of<Float16>(const Attention& a, const AttentionGrad& g,
                                             Stream stream) {
  return backward_hopper<Float16, 256>(a, g, stream);
}

}  // namespace mha_ext::cuda

// Forward for bfloat16 on GPUs of compute capability 9.0.
#include "forward_hopper.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_hopper_of<BFloat16>(const Attention& a, Stream stream) {
  return forward_hopper<BFloat16>(a, stream);
}

}  // namespace mha_ext::cuda

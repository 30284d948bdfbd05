// Forward for float16 on GPUs of compute capability 9.0.
#include "forward_hopper.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_hopper_of<Float16>(const Attention& a, Stream stream) {
  return forward_hopper<Float16>(a, stream);
}

}  // namespace mha_ext::cuda

// Forward for float16.
#include "forward_half.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_hopper_of<Float16>(const Attention& a, Stream stream);
template <>
const char* decode_of<Float16>(const Attention& a, void* scratch, Stream stream);

template <>
const char* forward_of<Float16>(const Attention& a, void* scratch, Stream stream) {
  return forward_of_half<Float16>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

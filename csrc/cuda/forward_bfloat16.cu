// Forward for bfloat16.
#include "forward_half.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_hopper_of<BFloat16>(const Attention& a, Stream stream);
template <>
const char* decode_of<BFloat16>(const Attention& a, void* scratch, Stream stream);

template <>
const char* forward_of<BFloat16>(const Attention& a, void* scratch, Stream stream) {
  return forward_of_half<BFloat16>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

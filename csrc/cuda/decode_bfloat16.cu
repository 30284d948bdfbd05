// Forward of few queries for bfloat16.
#include "decode_half.cuh"

namespace mha_ext::cuda {

template <>
const char* decode_of<BFloat16>(const Attention& a, void* scratch, Stream stream) {
  return decode_widths<BFloat16>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

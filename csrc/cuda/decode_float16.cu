// Forward of few queries for float16.
#include "decode_half.cuh"

namespace mha_ext::cuda {

template <>
const char* decode_of<Float16>(const Attention& a, void* scratch, Stream stream) {
  return decode_widths<Float16>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

// Forward for float16.
#include "forward_half.cuh"

namespace mha_ext::cuda {

template <>
const char* decode_of<Float16>(const Attention& a, void* scratch, Stream stream);

template <>
const char* forward_of<Float16>(const Attention& a, void* scratch, Stream stream) {
  if (decodes(a)) return decode_of<Float16>(a, scratch, stream);
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (width <= 64) return forward_half<Float16, 64>(a, scratch, stream);
  if (width <= 128) return forward_half<Float16, 128>(a, scratch, stream);
  return forward_half<Float16, 256>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

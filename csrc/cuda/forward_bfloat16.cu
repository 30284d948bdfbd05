// Forward for bfloat16.
#include "forward_half.cuh"

namespace mha_ext::cuda {

template <>
const char* decode_of<BFloat16>(const Attention& a, void* scratch, Stream stream);

template <>
const char* forward_of<BFloat16>(const Attention& a, void* scratch, Stream stream) {
  if (decodes(a)) return decode_of<BFloat16>(a, scratch, stream);
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (width <= 64) return forward_half<BFloat16, 64>(a, scratch, stream);
  if (width <= 128) return forward_half<BFloat16, 128>(a, scratch, stream);
  return forward_half<BFloat16, 256>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

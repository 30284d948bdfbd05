// Forward for float32: on the tensor cores up to 128 wide.
#include "forward_split.cuh"
#include "forward_wide.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_of<float>(const Attention& a, void* scratch, Stream stream) {
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (width <= 64) return forward_split<64>(a, scratch, stream);
  if (width <= kSplitWidth) return forward_split<128>(a, scratch, stream);
  return forward_wide<float, 256>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

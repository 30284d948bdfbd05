// Forward for float64.
#include "forward_wide.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_of<double>(const Attention& a, void* scratch, Stream stream) {
  if (max_of(a.head_dim, a.value_dim) <= 64) return forward_wide<double, 64>(a, scratch, stream);
  return forward_wide<double, 256>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

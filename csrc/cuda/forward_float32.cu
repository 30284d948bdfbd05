// Forward for float32: on the tensor cores up to 128 wide, unless there are no values.
#include "forward_split.cuh"
#include "forward_wide.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_of<float>(const Attention& a, void* scratch, Stream stream) {
  const bool narrow = max_of(a.head_dim, a.value_dim) <= 64;
  if (is_split(a))
    return narrow ? forward_split<64>(a, scratch, stream) : forward_split<128>(a, scratch, stream);
  return narrow ? forward_wide<float, 64>(a, scratch, stream)
                : forward_wide<float, 256>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

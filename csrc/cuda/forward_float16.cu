// Forward for float16.
#include "forward_half.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_hopper_of<Float16>(const Attention& a, Stream stream);

template <>
const char* forward_of<Float16>(const Attention& a, void* scratch, Stream stream) {
  if (hopper_takes(a)) {
    const char* error = forward_hopper_of<Float16>(a, stream);
    return error ? error
                 : finish_rows<Float16>(a, partial_sums<float>(a, scratch), key_parts(a), stream);
  }
  const int64_t width = max_of(a.head_dim, a.value_dim);
  if (width <= 64) return forward_half<Float16, 64>(a, scratch, stream);
  if (width <= 128) return forward_half<Float16, 128>(a, scratch, stream);
  return forward_half<Float16, 256>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

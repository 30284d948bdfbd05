// Forward for float32 and float64.
#include "forward_wide.cuh"

namespace mha_ext::cuda {
namespace {

template <class T>
const char* by_width(const Attention& a, void* scratch, Stream stream) {
  if (max_of(a.head_dim, a.value_dim) <= 64) return forward_wide<T, 64>(a, scratch, stream);
  return forward_wide<T, 256>(a, scratch, stream);
}

}  // namespace

template <>
const char* forward_of<float>(const Attention& a, void* scratch, Stream stream) {
  return by_width<float>(a, scratch, stream);
}
template <>
const char* forward_of<double>(const Attention& a, void* scratch, Stream stream) {
  return by_width<double>(a, scratch, stream);
}

}  // namespace mha_ext::cuda

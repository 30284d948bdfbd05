// Forward: the kernels of each dtype are in the sources beside this one.
#include "forward.cuh"
#include "mask.cuh"
#include "split.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_of<double>(const Attention& a, void* scratch, Stream stream);
template <>
const char* forward_of<float>(const Attention& a, void* scratch, Stream stream);
template <>
const char* forward_of<BFloat16>(const Attention& a, void* scratch, Stream stream);
template <>
const char* forward_of<Float16>(const Attention& a, void* scratch, Stream stream);

int64_t forward_scratch_bytes(const Attention& a) {
  const bool half = a.dtype == DType::kBFloat16 || a.dtype == DType::kFloat16;
  int64_t parts = parts_bytes(a);
  if (half) parts += packed_mask_bytes(a);
  if (half && hopper_takes(a)) parts += aligned_bytes(a);
  if (!is_split(a)) return parts;
  int64_t at = ceil_div(parts, 256) * 256;
  take_planes(at, nullptr, a.batch * a.kv_heads, a.keys, a.head_dim);
  take_planes(at, nullptr, a.batch * a.kv_heads, a.keys, a.value_dim);
  return at;
}

const char* forward(const Attention& a, void* scratch, Stream stream) {
  switch (a.dtype) {
    case DType::kFloat64:
      return forward_of<double>(a, scratch, stream);
    case DType::kFloat32:
      return forward_of<float>(a, scratch, stream);
    case DType::kBFloat16:
      return forward_of<BFloat16>(a, scratch, stream);
    case DType::kFloat16:
      return forward_of<Float16>(a, scratch, stream);
  }
  return "unknown dtype";
}

}  // namespace mha_ext::cuda

// Backward: the kernels of each dtype are in the sources beside this one.
#include "backward.cuh"
#include "forward.cuh"
#include "mask.cuh"
#include "split.cuh"

namespace mha_ext::cuda {

template <>
const char* backward_of<double>(const Attention& a, const AttentionGrad& g, void* scratch,
                                Stream stream);
template <>
const char* backward_of<float>(const Attention& a, const AttentionGrad& g, void* scratch,
                               Stream stream);
template <>
const char* backward_of<BFloat16>(const Attention& a, const AttentionGrad& g, void* scratch,
                                  Stream stream);
template <>
const char* backward_of<Float16>(const Attention& a, const AttentionGrad& g, void* scratch,
                                 Stream stream);

int64_t backward_scratch_bytes(const Attention& a, const AttentionGrad& g) {
  const bool half = a.dtype == DType::kBFloat16 || a.dtype == DType::kFloat16;
  int64_t at = half ? packed_mask_bytes(a) : 0;
  if (half && backward_hopper_takes(a, g)) {
    at += aligned_bytes(a, &g);
    if (backward_joint_takes(a, g)) at += joint_scratch(a).all;
  }
  at += ceil_div(bias_bytes(a, g.grad_bias), 256) * 256;
  if (!is_split(a) || g.grad_weights.data) return at;
  int64_t levels = at;  // in the same place, one after the other
  if (takes_own_levels(a, g)) levels += 2 * level_bytes(a) + parts_bytes(without_values(a));
  split_sides(a, nullptr, at);
  return max_of(at, levels);
}

const char* backward(const Attention& a, const AttentionGrad& g, void* scratch, Stream stream) {
  switch (a.dtype) {
    case DType::kFloat64:
      return backward_of<double>(a, g, scratch, stream);
    case DType::kFloat32:
      return backward_of<float>(a, g, scratch, stream);
    case DType::kBFloat16:
      return backward_of<BFloat16>(a, g, scratch, stream);
    case DType::kFloat16:
      return backward_of<Float16>(a, g, scratch, stream);
  }
  return "unknown dtype";
}

}  // namespace mha_ext::cuda

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

static bool is_half(const Attention& a) {
  return a.dtype == DType::kBFloat16 || a.dtype == DType::kFloat16;
}
// The sums of a bias behind `at` bytes, or what float32 takes beside it.
static int64_t bytes_after(int64_t at, const Attention& a, const AttentionGrad& g) {
  at += ceil_div(bias_bytes(a, g.grad_bias), 256) * 256;
  if (!is_split(a) || g.grad_weights.data) return at;
  int64_t levels = at;  // in the same place, one after the other
  if (takes_own_levels(a, g)) levels += 2 * level_bytes(a) + parts_bytes(without_values(a));
  split_sides(a, nullptr, at);
  return max_of(at, levels);
}
int64_t backward_scratch_bytes(const Attention& a, const AttentionGrad& g) {
  int64_t at = is_half(a) ? packed_mask_bytes(a) : 0;
  if (is_half(a) && backward_hopper_takes(a, g)) {
    at += aligned_bytes(a, &g);
    if (backward_joint_takes(a, g)) at += joint_scratch(a).all;
  }
  return bytes_after(at, a, g);
}
int64_t backward_tangent_scratch_bytes(const Attention& a, const AttentionGrad& g) {
  return bytes_after(is_half(a) ? packed_mask_bytes(a) : 0, a, g);
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

// The tangents of forward and backward: the kernels of each dtype are in the sources beside this
// one.
#include "tangent.cuh"

namespace mha_ext::cuda {

template <>
const char* forward_tangent_of<double>(const Attention& a, const AttentionTangent& t,
                                       Stream stream);
template <>
const char* forward_tangent_of<float>(const Attention& a, const AttentionTangent& t, Stream stream);
template <>
const char* forward_tangent_of<BFloat16>(const Attention& a, const AttentionTangent& t,
                                         Stream stream);
template <>
const char* forward_tangent_of<Float16>(const Attention& a, const AttentionTangent& t,
                                        Stream stream);
template <>
const char* backward_tangent_of<double>(const Attention& a, const AttentionGrad& g,
                                        const AttentionTangent& t, void* scratch, Stream stream);
template <>
const char* backward_tangent_of<float>(const Attention& a, const AttentionGrad& g,
                                       const AttentionTangent& t, void* scratch, Stream stream);
template <>
const char* backward_tangent_of<BFloat16>(const Attention& a, const AttentionGrad& g,
                                          const AttentionTangent& t, void* scratch, Stream stream);
template <>
const char* backward_tangent_of<Float16>(const Attention& a, const AttentionGrad& g,
                                         const AttentionTangent& t, void* scratch, Stream stream);

const char* forward_tangent(const Attention& a, const AttentionTangent& t, Stream stream) {
  switch (a.dtype) {
    case DType::kFloat64:
      return forward_tangent_of<double>(a, t, stream);
    case DType::kFloat32:
      return forward_tangent_of<float>(a, t, stream);
    case DType::kBFloat16:
      return forward_tangent_of<BFloat16>(a, t, stream);
    case DType::kFloat16:
      return forward_tangent_of<Float16>(a, t, stream);
  }
  return "unknown dtype";
}

const char* backward_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                             void* scratch, Stream stream) {
  switch (a.dtype) {
    case DType::kFloat64:
      return backward_tangent_of<double>(a, g, t, scratch, stream);
    case DType::kFloat32:
      return backward_tangent_of<float>(a, g, t, scratch, stream);
    case DType::kBFloat16:
      return backward_tangent_of<BFloat16>(a, g, t, scratch, stream);
    case DType::kFloat16:
      return backward_tangent_of<Float16>(a, g, t, scratch, stream);
  }
  return "unknown dtype";
}

}  // namespace mha_ext::cuda

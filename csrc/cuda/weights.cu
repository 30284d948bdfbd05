// The weights, for every dtype.
#include "weights.cuh"
#include "weights_half.cuh"

namespace mha_ext::cuda {

const char* weights(const Attention& a, const Selection& selected, void* out, Stream stream) {
  switch (a.dtype) {
    case DType::kFloat64:
      return weights_wide<double>(a, selected, out, stream);
    case DType::kFloat32:
      return weights_wide<float>(a, selected, out, stream);
    case DType::kBFloat16:
      return weights_half<BFloat16>(a, selected, out, stream);
    case DType::kFloat16:
      return weights_half<Float16>(a, selected, out, stream);
  }
  return "unknown dtype";
}

}  // namespace mha_ext::cuda

// The weights, for every dtype; and the lists of heads and rows.
#include "weights.cuh"
#include "weights_half.cuh"

namespace mha_ext::cuda {

constexpr int kSent = 256;  // by one launch
struct Numbers {
  int64_t at[kSent];
};
static __global__ void LAUNCH_BOUNDS(kSent, 1)
    upload_kernel(const GRID_CONSTANT Numbers numbers, const int64_t count, int64_t* to) {
  if (thread_id() < count) to[thread_id()] = numbers.at[thread_id()];
}
const char* upload(const int64_t* numbers, int64_t count, int64_t* to, Stream stream) {
  const char* error = nullptr;
  for (int64_t first = 0; first < count && !error; first += kSent) {
    Numbers part = {};
    const int64_t size = min_of(kSent, count - first);
    for (int64_t i = 0; i < size; i++) part.at[i] = numbers[first + i];
    error = launch(upload_kernel, {1, 1}, kSent, 0, stream, part, size, to + first);
  }
  return error;
}

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

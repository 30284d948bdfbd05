// One way to start a kernel: g++ cannot read <<<>>>, and every launch is checked.
#pragma once
#include "kernels.h"
#include "tile.cuh"

namespace mha_ext::cuda {

// The first dimension may be 2^31 - 1, the others 65535: rows of blocks go over y and z.
struct Grid {
  int64_t x, rows;
};
DEVICE int64_t grid_row() { return blockIdx.y + (int64_t)blockIdx.z * gridDim.y; }

constexpr int kHopperSharedBytes = 227 * 1024;  // for kernels of compute capability 9.0
#ifdef __CUDACC__
// Blocks that a multiprocessor shall hold at once: registers are given out accordingly.
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
// What the smallest GPUs of compute capability 8.0 and later give a block that asks for it. Always
// the same: another thread may start the kernel, with another size, between the two calls.
constexpr int kMostSharedBytes = 99 * 1024;
// Whether the current device is one of compute capability 9.0.
inline bool on_hopper() {
#ifdef MHA_EXT_HOPPER  // its kernels have been compiled
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0;
#else
  return false;
#endif
}
// nullptr, or what CUDA says is wrong.
template <class... Parameters>
const char* launch(void (*kernel)(Parameters...), Grid grid, int threads, int shared_bytes,
                   Stream stream, const Parameters&... parameters) {
  if (grid.x == 0 || grid.rows == 0) return nullptr;
  if (shared_bytes > 48 * 1024) {
    const int most = shared_bytes > kMostSharedBytes ? kHopperSharedBytes : kMostSharedBytes;
    const cudaError_t error = cudaFuncSetAttribute(
        (const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  constexpr int64_t kGridLimit = 65535;
  const int64_t y = min_of(grid.rows, kGridLimit);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)grid.x, (unsigned)y, (unsigned)ceil_div(grid.rows, y));
  config.blockDim = dim3((unsigned)threads);
  config.dynamicSmemBytes = (size_t)shared_bytes;
  config.stream = (cudaStream_t)stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, parameters...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
// Zeros for memory of the device.
inline const char* clear(void* to, int64_t bytes, Stream stream) {
  const cudaError_t error = cudaMemsetAsync(to, 0, (size_t)bytes, (cudaStream_t)stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
// Multiprocessors of the current device.
inline int64_t processors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}
#else
#define LAUNCH_BOUNDS(threads, blocks)
inline int64_t processors() { return emulator::processors(); }
inline bool on_hopper() { return emulator::is_hopper(); }
inline const char* clear(void* to, int64_t bytes, Stream) {
  __builtin_memset(to, 0, (size_t)bytes);
  return nullptr;
}
template <class... Parameters>
const char* launch(void (*kernel)(Parameters...), Grid grid, int threads, int shared_bytes, Stream,
                   const Parameters&... parameters) {
  if (grid.x == 0 || grid.rows == 0) return nullptr;
  const int64_t y = min_of(grid.rows, emulator::grid_limit());
  return emulator::run({grid.x, y, ceil_div(grid.rows, y)}, threads, shared_bytes,
                       [&] { kernel(parameters...); });
}
#endif

// Whether rows of 16-bit elements can be copied 16 bytes at a time. The sizes have no say: one
// batch entry alone has the kernel that it has among others.
inline bool in_pieces(const Rows& rows) {
  const int64_t strides = rows.batch | rows.head | rows.row;
  return (uintptr_t)rows.data % 16 == 0 && strides % 8 == 0;
}
}  // namespace mha_ext::cuda

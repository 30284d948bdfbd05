// What the CUDA glue asks of its device, where the device is the emulator: tensors are the CPU's,
// and the stream is null.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

namespace {

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CPU> {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  void* getStreamNativeHandle(const c10::Stream) const override { return nullptr; }
#endif
};
C10_REGISTER_GUARD_IMPL(CPU, Guard)

}  // namespace

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

// The C interface of the emulated kernels, for ctypes.
#include "../../csrc/cuda/kernels.h"
#include "emulator.h"

extern "C" {

int64_t emulated_struct_size() { return sizeof(mha_ext::Attention); }
int64_t emulated_forward_scratch_bytes(const mha_ext::Attention* a) {
  return mha_ext::cuda::forward_scratch_bytes(*a);
}
// nullptr, or what the emulator or the launch says is wrong.
const char* emulated_forward(const mha_ext::Attention* a, void* scratch) {
  return mha_ext::cuda::forward(*a, scratch, nullptr);
}

void emulator_start(const emulator::Options* options) { emulator::start(*options); }
void emulator_report(emulator::Report* report) { *report = emulator::report(); }
}

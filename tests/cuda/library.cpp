// The C interface of the emulated kernels, for ctypes.
#include "../../csrc/cuda/kernels.h"
#include "emulator.h"

extern "C" {

int64_t emulated_struct_size() { return sizeof(mha_ext::Attention); }
int64_t emulated_grad_size() { return sizeof(mha_ext::AttentionGrad); }
int64_t emulated_forward_scratch_bytes(const mha_ext::Attention* a) {
  return mha_ext::cuda::forward_scratch_bytes(*a);
}
// nullptr, or what the emulator or the launch says is wrong.
const char* emulated_forward(const mha_ext::Attention* a, void* scratch) {
  return mha_ext::cuda::forward(*a, scratch, nullptr);
}
int64_t emulated_backward_scratch_bytes(const mha_ext::Attention* a,
                                        const mha_ext::AttentionGrad* g) {
  return mha_ext::cuda::backward_scratch_bytes(*a, *g);
}
const char* emulated_backward(const mha_ext::Attention* a, const mha_ext::AttentionGrad* g,
                              void* scratch) {
  return mha_ext::cuda::backward(*a, *g, scratch, nullptr);
}

void emulator_start(const emulator::Options* options) { emulator::start(*options); }
void emulator_report(emulator::Report* report) { *report = emulator::report(); }
}

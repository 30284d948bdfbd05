// The C interface of the emulated kernels, for ctypes.
#include "../../csrc/cuda/kernels.h"
#include "emulator.h"

extern "C" {

int64_t emulated_struct_size() { return sizeof(mha_ext::Attention); }
int64_t emulated_grad_size() { return sizeof(mha_ext::AttentionGrad); }
int64_t emulated_tangent_size() { return sizeof(mha_ext::AttentionTangent); }
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
const char* emulated_weights(const mha_ext::Attention* a, const int64_t* heads, int64_t head_count,
                             const int64_t* runs, int64_t run_count, int64_t row_count, void* out) {
  mha_ext::cuda::Selection selected;
  selected.heads = heads;
  selected.runs = (const mha_ext::cuda::RowRun*)runs;
  selected.head_count = head_count;
  selected.run_count = run_count;
  selected.row_count = row_count;
  return mha_ext::cuda::weights(*a, selected, out, nullptr);
}
const char* emulated_upload(const int64_t* numbers, int64_t count, int64_t* to) {
  return mha_ext::cuda::upload(numbers, count, to, nullptr);
}
const char* emulated_forward_tangent(const mha_ext::Attention* a,
                                     const mha_ext::AttentionTangent* t) {
  return mha_ext::cuda::forward_tangent(*a, *t, nullptr);
}
const char* emulated_backward_tangent(const mha_ext::Attention* a, const mha_ext::AttentionGrad* g,
                                      const mha_ext::AttentionTangent* t, void* scratch) {
  return mha_ext::cuda::backward_tangent(*a, *g, *t, scratch, nullptr);
}

void emulator_start(const emulator::Options* options) { emulator::start(*options); }
void emulator_report(emulator::Report* report) { *report = emulator::report(); }
}

// The seam of CUDA: torch above it, raw pointers and a stream below. Every function enqueues its
// kernels on the stream and returns nullptr, or what CUDA says is wrong.
#pragma once
#include "../spec/attention.h"
#include "../spec/mask.h"

namespace mha_ext::cuda {

using Stream = void*;  // a cudaStream_t

constexpr int64_t kMaxWidth = 256;  // of D and Dv

// out, lse and lse_low, from scratch memory of forward_scratch_bytes.
int64_t forward_scratch_bytes(const Attention& a);
const char* forward(const Attention& a, void* scratch, Stream stream);

// The gradients that g has room for, from scratch memory of backward_scratch_bytes. delta is
// written first, unless the cotangent is that of P: then it is read. grad_bias is zero where no
// pair is visible: it must be before.
int64_t backward_scratch_bytes(const Attention& a, const AttentionGrad& g);
const char* backward(const Attention& a, const AttentionGrad& g, void* scratch, Stream stream);

}  // namespace mha_ext::cuda

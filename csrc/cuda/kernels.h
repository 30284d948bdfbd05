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

}  // namespace mha_ext::cuda

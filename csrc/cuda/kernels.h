// The seam of CUDA: torch above it, raw pointers and a stream below. Every function enqueues its
// kernels on the stream and returns nullptr, or what CUDA says is wrong.
#pragma once
#include "../spec/attention.h"
#include "../spec/mask.h"

namespace mha_ext::cuda {

using Stream = void*;  // a cudaStream_t

constexpr int64_t kMaxWidth = 256;  // of D and Dv
// float32 up to so wide takes scores from the tensor cores in forward and backward; weights and
// tangents, and a forward without values (Dv = 0), take them in float32 arithmetic. Beside large
// scores P = exp(S - lse) has the difference of the two where lse is of the other kind.
constexpr int64_t kSplitWidth = 128;

// out, lse and lse_low, from scratch memory of forward_scratch_bytes.
int64_t forward_scratch_bytes(const Attention& a);
const char* forward(const Attention& a, void* scratch, Stream stream);

// The gradients that g has room for, from scratch memory of backward_scratch_bytes. delta is
// written first, unless the cotangent is that of P: then it is read; in 16 bits the keys of that
// cotangent stand next to each other. grad_bias is zero where no pair is visible: it must be
// before.
int64_t backward_scratch_bytes(const Attention& a, const AttentionGrad& g);
const char* backward(const Attention& a, const AttentionGrad& g, void* scratch, Stream stream);

// Numbers of the host to memory of the device, as parameters of kernels: nothing waits for the GPU,
// and a graph keeps them.
const char* upload(const int64_t* numbers, int64_t count, int64_t* to, Stream stream);

// The rows of P that are wanted, in runs of at most 64 queries that stand one after the other: run
// r has queries [query, query + count) and goes to rows [to, to + count). All in memory of the
// device.
struct RowRun {
  int64_t query, count, to;
};
struct Selection {
  const int64_t* heads = nullptr;  // nullptr = all, in order
  const RowRun* runs = nullptr;    // nullptr = all rows, in order
  int64_t head_count = 0, run_count = 0, row_count = 0;
};
// P of the selected heads and rows from a.lse, into out [B, heads, rows, Lk].
const char* weights(const Attention& a, const Selection& selected, void* out, Stream stream);

// t.out and t.lse.
const char* forward_tangent(const Attention& a, const AttentionTangent& t, Stream stream);
// The tangents of what backward gives, to where g says, from scratch memory of
// backward_tangent_scratch_bytes. g.delta is written first, and t.delta if there is room for it.
int64_t backward_tangent_scratch_bytes(const Attention& a, const AttentionGrad& g);
const char* backward_tangent(const Attention& a, const AttentionGrad& g, const AttentionTangent& t,
                             void* scratch, Stream stream);

}  // namespace mha_ext::cuda

// The problem, described once: plain structs that the binding fills and every kernel reads.
// No torch, no device, no standard library: CPU, CUDA and tests share this file.
#pragma once
#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define HOST_DEVICE [[maybe_unused]] static inline
#endif

namespace mha_ext {

enum class DType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16 };
constexpr int kDTypes = 4;
constexpr int64_t kMaxHeadDim = 1024;  // of query and key; the head_dim of value has the same limit

// [batch, head, row, column] with contiguous columns; strides count elements, 0 = broadcast.
struct Rows {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
};

// One value for each (query, key) pair, broadcast to [batch, head, query, key] through strides of
// 0.
struct Pairs {
  void* data = nullptr;
  int64_t batch = 0, head = 0, query = 0, key = 0;
  int32_t item_size = 0;  // bytes; a mask is read as an integer of this size
  // Low bits of the strides of rows, those of a single entry or of a group too: what they are
  // multiples of does not depend on the sizes.
  int32_t row_bits = 0;
};

// Query i stands at key position i + diagonal(b) and sees `left` keys before it and `right` after
// it.
struct Band {
  bool lower_right = false;  // which corner the diagonal runs through
  bool left_bounded = false, right_bounded = false;
  int64_t left = 0, right = 0;
};

struct Dropout {
  const int64_t* seed = nullptr;  // two words; nullptr = no dropout
  uint32_t threshold = 0;         // a 16-bit lane below it is dropped
  double keep_scale = 1.0;        // 65536 / (65536 - threshold)
};

// Global position of the first batch, head, query and key: a shard gives what the whole would.
struct Origin {
  int64_t batch = 0, head = 0, query = 0, key = 0;
};

struct Attention {
  DType dtype = DType::kFloat32;
  int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0, head_dim = 0, value_dim = 0;
  double scale = 1.0;
  bool uniform_empty_rows = false;

  Rows query, key, value;                // [B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv]
  Pairs mask, bias;                      // data = nullptr where there is none
  bool bias_is_float32 = false;          // otherwise the bias has the dtype of the query
  const int64_t* key_lengths = nullptr;  // [B]
  Band band;
  Dropout dropout;
  Origin origin;

  Rows out;  // [B, H, Lq, Dv]
  // [B, H, Lq] contiguous, float (double for float64). lse + lse_low is lse to twice the precision:
  // where |lse| is large, P = exp(S - lse) needs it. nullptr = zero, and
  // in forward that nobody reads it.
  void* lse = nullptr;
  void* lse_low = nullptr;
};

// What backward reads and writes beside Attention (whose out and lse it reads).
struct AttentionGrad {
  Rows grad_out;              // [B, H, Lq, Dv]
  Pairs grad_weights;         // the cotangent of P itself, in place of grad_out (attention_weights)
  void* grad_lse = nullptr;   // dL, [B, H, Lq] contiguous, type of lse; nullptr = zero
  void* delta = nullptr;      // rowsum(dO * O) - dL, like it
  Rows grad_query;            // [B, H, Lq, D], data = nullptr where it is not wanted; likewise:
  Rows grad_key, grad_value;  // [B, Hkv, Lk, D], [B, Hkv, Lk, Dv]
  Pairs grad_bias;            // strides of the bias' own shape (0 where it broadcasts)
  bool all_keys = false;      // O and lse are the results for these keys, not for more
  bool adds_bias = false;     // grad_bias is in the type of the sums, and dS is to be added to it
  bool batch_first = false;   // a head is followed by its place in the next entry of the batch
};

// The direction of a derivative, each like what it belongs to; data = nullptr: zero. With it a
// tangent of AttentionGrad's results is written to where AttentionGrad says.
struct AttentionTangent {
  Rows query, key, value;
  Pairs bias;
  Rows out;                  // O', a result of forward_tangent
  void* lse = nullptr;       // lse' = rowsum(P * S'), a result too; like lse, nullptr = zero
  Rows grad_out;             // dO'
  void* grad_lse = nullptr;  // dL', like lse; nullptr = zero
  void* delta = nullptr;     // rowsum(dO' * O + dO * O') - dL'; nullptr = zero
};

HOST_DEVICE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
HOST_DEVICE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Keys of batch entry b that exist: min(key_lengths[b], Lk).
HOST_DEVICE int64_t key_count(const Attention& a, int64_t b) {
  if (!a.key_lengths) return a.keys;
  return max_of(0, min_of(a.key_lengths[b], a.keys));
}

// The key/value head that query head h reads (grouped-query attention).
HOST_DEVICE int64_t kv_head(const Attention& a, int64_t h) { return h / (a.heads / a.kv_heads); }

}  // namespace mha_ext

// The numbers of the softmax, and how a row is given to a warp.
#pragma once
#include "launch.cuh"
#include "pairs.cuh"

namespace mha_ext::cuda {

constexpr int kRowThreads = 128;  // of kernels that give each row to one warp

// The numbers of the softmax of storage type S, and e^x as exactly as it asks for.
constexpr float kLog2E = 1.44269504f;
template <class S>
struct Softmax {
  using T = float;
  DEVICE_MEMBER static T power(T x) { return exp2_approximate(x * kLog2E); }
};
template <>
struct Softmax<float> {
  using T = float;
  DEVICE_MEMBER static T power(T x) { return expf(x); }
};
template <>
struct Softmax<double> {
  using T = double;
  DEVICE_MEMBER static T power(T x) { return exp(x); }
};

// What exp subtracts from S for P, from lse: +inf in a row that sees nothing, or only -inf.
template <class T>
DEVICE T row_level(T lse) {
  return lse == -(T)INFINITY ? (T)INFINITY : lse;
}

// lse of a row with this level and sum of P, or -inf where the row has seen nothing.
template <class T>
DEVICE void store_lse(const Attention& a, int64_t at, T level, T l) {
  T high = -(T)INFINITY, low = 0;
  if (l != 0) split_sum((double)level, log((double)l), &high, &low);
  ((T*)a.lse)[at] = high;
  ((T*)a.lse_low)[at] = low;
}

}  // namespace mha_ext::cuda

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

// log l of a sum that is not near the smallest numbers, to 3e-8: units for double are few, and a
// logarithm in them takes as long as the scores of a tile.
DEVICE double log_of_sum(float l) {
  if (!(l < INFINITY)) return l;
  constexpr int32_t kRootOfHalf = 0x3f3504f3;
  const int32_t bits = (int32_t)bits_of(l), exponent = (bits - kRootOfHalf) >> 23;
  const float mantissa = float_of((uint32_t)(bits - exponent * (1 << 23)));  // about 1
  return exponent * 0.69314718055994531 + (double)logf(mantissa);
}
DEVICE double log_of_sum(double l) { return log(l); }

// lse of a row with this level and sum of P, or -inf where the row has seen nothing.
template <class T>
DEVICE void store_lse(const Attention& a, int64_t at, T level, T l) {
  T high = -(T)INFINITY, low = 0;
  if (l != 0) split_sum((double)level, log_of_sum(l), &high, &low);
  ((T*)a.lse)[at] = high;
  ((T*)a.lse_low)[at] = low;
}

}  // namespace mha_ext::cuda

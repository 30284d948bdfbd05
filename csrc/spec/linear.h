// The product of a linear layer, as plain structs.
#pragma once
#include <stdint.h>

namespace mha_ext {

// Strides count elements; one of the two is 1.
struct Matrix {
  const float* data = nullptr;
  int64_t row = 0, column = 0;
};

// out[m, n] = bias[n] + sum_t a[m, t] x[t, n]; a [rows, depth], x [depth, columns], out has
// contiguous rows.
struct Linear {
  Matrix a, x;
  const float* bias = nullptr;
  float* out = nullptr;
  int64_t rows = 0, columns = 0, depth = 0;
};

}  // namespace mha_ext

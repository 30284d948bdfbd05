// Comes before every source of the CUDA glue: what it registers for CUDA goes to a key that no
// tensor has, where operators.py takes it.
#pragma once
#include <torch/library.h>

#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(ns, k, m)                                                \
  static_assert(#k[0] == 'C' && #k[1] == 'U', "the glue registers for CUDA alone"); \
  _TORCH_LIBRARY_IMPL(ns, PrivateUse1, m, C10_UID)

// AVX2 with FMA and F16C (Haswell, Zen and later).
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "kernels.h"
#include "target.h"

TARGET_BEGIN("avx2,fma,f16c,bmi,bmi2")
#include "../spec/dropout.h"
#include "scalar-inl.h"
#include "vec_avx2-inl.h"
//
#include "product-inl.h"
#include "transpose-inl.h"
//
#include "tile-inl.h"
//
#include "nonfinite-inl.h"
//
#include "dropout-inl.h"
//
#include "bands-inl.h"
//
#include "lane_rows-inl.h"
//
#include "bias_lanes-inl.h"
//
#include "scores-inl.h"
//
#include "softmax-inl.h"
//
#include "lane_sums-inl.h"
//
#include "few_rows-inl.h"
//
#include "block_rows-inl.h"
//
#include "width-inl.h"
//
#include "forward_block-inl.h"
//
#include "forward-inl.h"
//
#include "weights-inl.h"
//
#include "few-inl.h"
//
#include "heads-inl.h"
//
#include "one-tile-inl.h"
//
#include "gradient-inl.h"
//
#include "bias-inl.h"
//
#include "backward_tile-inl.h"
//
#include "backward-inl.h"
//
#include "backward_few-inl.h"
//
#include "backward_one_tile-inl.h"
//
#include "tangent-inl.h"
//
#include "backward_tangent-inl.h"
//
#include "linear-inl.h"
//
#include "table-inl.h"

namespace mha_ext::cpu {
extern const Kernels kAvx2;
constexpr Kernels kAvx2 = kernels<F32x8, F64x4>("avx2");
}  // namespace mha_ext::cpu
TARGET_END

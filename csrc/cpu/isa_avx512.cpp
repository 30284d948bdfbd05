// AVX-512 without bfloat16 products (Skylake-X and later): 16-bit types are widened to float.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "kernels.h"
#include "target.h"

#ifdef MHA_EXT_EMULATE_AVX512
TARGET_BEGIN("avx2,fma,f16c,bmi,bmi2")
#include "avx512_emulated.h"
#else
TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#endif
#include "../spec/dropout.h"
#include "scalar-inl.h"
#include "words_avx512-inl.h"
//
#include "vec_avx512-inl.h"
//
#include "vec_avx512_intel-inl.h"
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
extern const Kernels kAvx512;
constexpr Kernels kAvx512 = kernels<F32x16Intel, F64x8Intel>("avx512");
}  // namespace mha_ext::cpu
TARGET_END

// AVX-512 with AVX512_BF16 (Zen 4, Cooper Lake and later): vdpbf16ps multiplies pairs of bfloat16
// neighbours into float sums, twice the work of a float multiply-add on Zen.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "kernels.h"
#include "target.h"

#ifdef MHA_EXT_EMULATE_AVX512
TARGET_BEGIN("avx2,fma,f16c,bmi,bmi2")
#include "avx512_emulated.h"
#else
TARGET_BEGIN("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#endif
#include "../spec/dropout.h"
#include "scalar-inl.h"
#include "words_avx512-inl.h"
//
#include "vec_avx512-inl.h"
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
#include "pairs_avx512-inl.h"

namespace mha_ext::cpu {
namespace {

struct MultiplyHalfPairs {
  using Unit = uint32_t;
  using Vector = __m256i;
  static Vector load(const Unit* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static Vector broadcast(const char* p) {
    int unit;
    __builtin_memcpy(&unit, p, sizeof unit);
    return _mm256_set1_epi32(unit);
  }
  static __m256 accumulate(__m256 sum, Vector x, Vector a) {
    return _mm256_dpbf16_ps(sum, (__m256bh)x, (__m256bh)a);
  }
};
struct MultiplyPairs : PairUnits<1> {
  using Half = MultiplyHalfPairs;
  using Vector = __m512i;
  static constexpr int kRowBlock = 1;
  struct Session {};
  static Vector load(const Unit* p) { return _mm512_loadu_si512(p); }
  static Vector broadcast(const char* p) {
    int unit;
    __builtin_memcpy(&unit, p, sizeof unit);
    return _mm512_set1_epi32(unit);
  }
  static __m512 accumulate(__m512 sum, Vector x, Vector a) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)a);
  }
};

}  // namespace
}  // namespace mha_ext::cpu

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
extern const Kernels kAvx512Bf16;
constexpr Kernels kAvx512Bf16 = [] {
  Kernels k = kernels<F32x16, F64x8>("avx512_bf16");
  k.types[(int)DType::kBFloat16] = type_kernels<F32x16, MultiplyPairs, BFloat16>();
  return k;
}();
}  // namespace mha_ext::cpu
TARGET_END

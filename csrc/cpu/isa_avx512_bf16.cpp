// AVX-512 with AVX512_BF16 (Zen 4, Cooper Lake and later): vdpbf16ps multiplies pairs of bfloat16 neighbours into
// float sums, twice the work of a float multiply-add on Zen.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "kernels.h"
#include "target.h"

TARGET_BEGIN("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#include "../spec/dropout.h"
#include "scalar-inl.h"
#include "vec_avx512-inl.h"
//
#include "product-inl.h"
#include "tile-inl.h"

namespace mha_ext::cpu {
namespace {

// A unit is a pair of neighbours along t: the first in the low half.
struct MultiplyPairs {
  using Unit = uint32_t;
  using Vector = __m512i;
  static constexpr int kStep = 2;
  static Vector load(const Unit* p) { return _mm512_loadu_si512(p); }
  static Vector broadcast(const char* p) {
    int unit;
    __builtin_memcpy(&unit, p, sizeof unit);
    return _mm512_set1_epi32(unit);
  }
  static __m512 accumulate(__m512 sum, Vector x, Vector a) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)a);
  }

  static __m512i pair(__m256i first, __m256i second) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
  }
  static __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

  // to[r / 2][c] = (from[r][c], from[r + 1][c]); zero past the last row and column.
  static void interleave(const BFloat16* from, int64_t stride, int64_t rows, int64_t columns,
                         Unit* to, int64_t ld) {
    for (int64_t r = 0; r < rows; r += 2)
      for (int64_t c = 0; c < columns; c += 16) {
        const __mmask16 in = columns - c < 16 ? F32x16::first(columns - c) : (__mmask16)0xffff;
        const BFloat16* p = from + r * stride + c;
        const __m256i first = _mm256_maskz_loadu_epi16(in, p);
        const __m256i second = _mm256_maskz_loadu_epi16(r + 1 < rows ? in : (__mmask16)0, p + (r + 1 < rows ? stride : 0));
        _mm512_storeu_si512(to + r / 2 * ld + c, pair(first, second));
      }
  }
  // to[n / 2][64 lanes] = (tile[n], tile[n + 1])
  static void pair_rows(const float* tile, int64_t keys, int64_t vectors, Unit* to) {
    for (int64_t n = 0; n < keys; n += 2)
      for (int64_t i = 0; i < vectors; i++) {
        const float* p = tile + n * kRow + i * 16;
        const __m256i second = n + 1 < keys ? rounded(_mm512_loadu_ps(p + kRow)) : _mm256_setzero_si256();
        _mm512_storeu_si512(to + n / 2 * kRow + i * 16, pair(rounded(_mm512_loadu_ps(p)), second));
      }
  }
  // to[n][32 pairs of lanes], zero in the lanes past `rows`
  static void pair_columns(const float* tile, int64_t keys, int64_t rows, Unit* to) {
    for (int64_t n = 0; n < keys; n++)
      for (int64_t r = 0; r < rows; r += 16) {
        const __mmask16 in = rows - r < 16 ? F32x16::first(rows - r) : (__mmask16)0xffff;
        _mm256_storeu_si256((__m256i*)(to + n * kRow / 2 + r / 2),
                            rounded(_mm512_maskz_loadu_ps(in, tile + n * kRow + r)));
      }
  }
};

}  // namespace
}  // namespace mha_ext::cpu

#include "forward-inl.h"
//
#include "backward-inl.h"
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

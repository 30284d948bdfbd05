// AVX-512 with AMX (Sapphire Rapids and later): bfloat16 products on tiles of 16 x 16 sums, each
// instruction adding 32 products to every sum. Everything else is AVX-512.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "kernels.h"
#include "target.h"
#ifdef MHA_EXT_EMULATE_AMX
#include "amx_emulated.h"
#endif

#ifdef MHA_EXT_EMULATE_AVX512
TARGET_BEGIN("amx-tile,amx-bf16,avx2,fma,f16c,bmi,bmi2")
#include "avx512_emulated.h"
#else
TARGET_BEGIN(
    "amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
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
#include "pairs_avx512-inl.h"

namespace mha_ext::cpu {
namespace {

#ifndef MHA_EXT_EMULATE_AMX
struct TileConfig {
  char bytes[64];
};
// g++ 12's intrinsic reads only 8 of the 64 bytes.
inline void load_tile_config(const void* config) {
  asm volatile("ldtilecfg %0" : : "m"(*(const TileConfig*)config));
}
#endif

template <int kLimbs>
struct MultiplyLimbs;

// Tile registers: sums 0-3 (two by two), A 4-5 (16 m x 32 t), X 6-7 (32 t in pairs x 16 lanes).
struct MultiplyTiles : PairUnits<16> {
  static constexpr int kRowBlock = 16;
  using InLimbs = MultiplyLimbs<1>;  // what forward takes

  // All tiles 16 rows of 64 bytes; released at the end, so that the state is clean for whoever
  // comes next.
  struct Session {
    Session() {
      struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } config;
      load_tile_config(&config);
    }
    ~Session() { _tile_release(); }
  };

  template <Update kC, bool kTwoRows, bool kTwoColumns>
  static void block(Operand a, int64_t count, const Unit* x, int64_t ldx, float* c, int64_t ldc) {
    const int64_t c_stride = ldc * 4, x_stride = ldx * 4;
    asm volatile(""
                 :
                 :
                 : "memory");  // the compiler does not know that tiles are loaded from memory,
    if constexpr (kC != Update::kStore) {
      _tile_loadd(0, c, c_stride);
      if constexpr (kTwoColumns) _tile_loadd(1, c + 16, c_stride);
      if constexpr (kTwoRows) _tile_loadd(2, c + 16 * ldc, c_stride);
      if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, c + 16 * ldc + 16, c_stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t t = 0; t < count; t += 16) {
      _tile_loadd(6, x + t * ldx, x_stride);
      _tile_loadd(4, a.data + t * 4, a.m_stride);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kTwoColumns) {
        _tile_loadd(7, x + t * ldx + 16, x_stride);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTwoRows) {
        _tile_loadd(5, a.data + 16 * a.m_stride + t * 4, a.m_stride);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, c_stride);
    if constexpr (kTwoColumns) _tile_stored(1, c + 16, c_stride);
    if constexpr (kTwoRows) _tile_stored(2, c + 16 * ldc, c_stride);
    if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, c + 16 * ldc + 16, c_stride);
    asm volatile("" : : : "memory");  // nor that they are stored to it
  }

  // t is contiguous in A: columns_operand packs the transpose.
  template <Update kC>
  static void product(const Operand& a, int64_t rows, int64_t count, const Unit* x, int64_t ldx,
                      int64_t vectors, float* c, int64_t ldc) {
    for (int64_t m = 0; m < rows; m += 32) {
      const Operand part{a.data + m * a.m_stride, a.m_stride, a.t_stride};
      const bool two_rows = m + 16 < rows;
      for (int64_t v = 0; v < vectors; v += 2) {
        const Unit* from = x + v * 16;
        float* to = c + m * ldc + v * 16;
        const bool two_columns = v + 1 < vectors;
        if (two_rows && two_columns)
          block<kC, true, true>(part, count, from, ldx, to, ldc);
        else if (two_rows)
          block<kC, true, false>(part, count, from, ldx, to, ldc);
        else if (two_columns)
          block<kC, false, true>(part, count, from, ldx, to, ldc);
        else
          block<kC, false, false>(part, count, from, ldx, to, ldc);
      }
    }
  }

  // to[c][r / 2] = (from[r][c], from[r + 1][c]): rows of the transpose, padded to whole tiles.
  static void transpose_pairs(const BFloat16* from, int64_t stride, int64_t rows, int64_t columns,
                              Unit* to) {
    const int64_t ld = units(rows);
    for (int64_t c = 0; c < columns; c += 32)
      for (int64_t u = 0; u < ld; u += 16) {
        __m512 block[2][16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
          const int64_t r = 2 * (u + i), left = columns - c;
          const __m512 x = load_row(from + (r < rows ? r * stride + c : 0), r < rows ? left : 0);
          const __m512 y =
              load_row(from + (r + 1 < rows ? (r + 1) * stride + c : 0), r + 1 < rows ? left : 0);
          block[0][i] = pair_columns_of(x, y, 0);
          block[1][i] = pair_columns_of(x, y, 1);
        }
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          F32x16::transpose(block[part]);
#pragma GCC unroll 16
          for (int i = 0; i < 16; i++) {
            const int64_t column = c + i / 4 * 8 + part * 4 + i % 4;
            if (column < round_up(columns, 16))
              _mm512_storeu_ps((float*)(to + column * ld + u), block[part][i]);
          }
        }
      }
  }

  // 32 numbers of a row, rounded.
  static void store_row(__m512 first, __m512 second, Unit* to) {
    _mm512_storeu_si512(to, both(first, second));
  }

  static double multiply_add(int64_t count) {
    const Session session;
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t n = 0; n < count; n++) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    return 4.0 * 2 * 16 * 16 * 32 * (double)count;
  }
};

}  // namespace
}  // namespace mha_ext::cpu

#include "limbs_product-inl.h"
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
#include "limbs-inl.h"
//
#include "limbs_softmax-inl.h"
//
#include "limbs_forward-inl.h"
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
#include "limbs_gradient-inl.h"
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
#include "limbs_tangent-inl.h"
//
#include "limbs_gradient_tangent-inl.h"
//
#include "linear-inl.h"
//
#include "limbs_linear-inl.h"
//
#include "table-inl.h"

namespace mha_ext::cpu {
extern const Kernels kAmx;
constexpr Kernels kAmx = [] {
  Kernels k = kernels<F32x16Intel, F64x8Intel>("amx");
  k.types[(int)DType::kFloat32] = type_kernels<F32x16Intel, MultiplyLimbs<3>, float>();
  k.types[(int)DType::kFloat16] = type_kernels<F32x16Intel, MultiplyLimbs<2>, Float16>();
  k.types[(int)DType::kBFloat16] = type_kernels<F32x16Intel, MultiplyTiles, BFloat16>();
  using Float = Kind<F32x16Intel, MultiplyLimbs<3>, float>;
  k.long_linear = {
      512, 1024, kLimbsBlock, 64, 2, true, linear_in_limbs_bytes<Float>, linear_in_limbs<Float>};
  return k;
}();
}  // namespace mha_ext::cpu
TARGET_END

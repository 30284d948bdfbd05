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

// An operand of a product in limbs (limbs-inl.h): tiles of 16 rows of A by 32 numbers along t, or
// of 16 pairs along t by 16 lanes of X. Strides in pairs: of the rows of a tile, of the tiles of
// its limbs, of tiles along t and of those across.
struct Limbs {
  uint32_t* data = nullptr;
  int64_t row = 16, plane = 256, step = 0, across = 0;
  int64_t along = 0;     // tiles along t
  int64_t room = 0;      // for so many of them, where another operand stands beside
  bool unusual = false;  // some number is not `usual`, and counts as 0 here
  uint32_t* at(int64_t along, int64_t across_) const {
    return data + along * step + across_ * across;
  }
  Limbs from(int64_t across_) const {
    Limbs some = *this;
    some.data = at(0, across_);
    return some;
  }
};

struct NothingBeside {
  void step() {}
};

// Multiply-adds, but for whole tiles in limbs: three of a float32, two of what is as exact as a
// float16; a bfloat16 is its only one.
template <int kLimbs_>
struct MultiplyLimbs : Multiply<F32x16Intel> {
  using InLimbs = MultiplyLimbs;
  static constexpr int kLimbs = kLimbs_;
  static constexpr int kSteps = kLimbs * (kLimbs + 1) / 2;  // products of limbs that are added up
  using Session = MultiplyTiles::Session;

  static __m512 add_half_unit(__m512 x) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)));
  }
  template <bool kRounded>
  static __m512 high_half(__m512 x) {
    if constexpr (kRounded) x = add_half_unit(x);
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0xffff0000)));
  }
  // Numbers in limbs, 32 of a row or 16 pairs. The low halves of limbs are zero, but for the last:
  // of three it is subnormal then, and counts as zero; of two it is rounded.
  static void store_row(const __m512 (&first)[kLimbs], const __m512 (&second)[kLimbs],
                        int64_t plane, uint32_t* to) {
#pragma GCC unroll 3
    for (int i = 0; i < kLimbs; i++)
      _mm512_storeu_si512(to + i * plane, MultiplyTiles::both(first[i], second[i]));
  }
  static void store_pair(const __m512 (&first)[kLimbs], const __m512 (&second)[kLimbs],
                         int64_t plane, uint32_t* to) {
    constexpr int kFirstOrHalfOfSecond = 0xf8;  // a | (b & c)
#pragma GCC unroll 3
    for (int i = 0; i < kLimbs; i++) {
      const bool rounded = kLimbs == 2 && i == 1;
      const __m512 x = rounded ? add_half_unit(first[i]) : first[i];
      const __m512 y = rounded ? add_half_unit(second[i]) : second[i];
      _mm512_storeu_si512(to + i * plane,
                          _mm512_ternarylogic_epi32(
                              _mm512_srli_epi32(_mm512_castps_si512(x), 16), _mm512_castps_si512(y),
                              _mm512_set1_epi32((int)0xffff0000), kFirstOrHalfOfSecond));
    }
  }
  // The larger absolute value, where that of NaN is the largest; and whether all are smaller than a
  // limit.
  static __m512 larger(__m512 worst, __m512 x) {
    const __m512i number = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(worst), number));
  }
  static bool all_below(float limit, __m512 worst) {
    return _mm512_cmp_ps_mask(_mm512_set1_ps(limit), worst, _CMP_GT_OQ) == 0xffff;
  }
  // x = the sum of its limbs. Cut off, or rounded: then what is left is half as large, and of
  // either sign.
  template <bool kRounded>
  [[gnu::always_inline]] static void cut(__m512 x, __m512 (&limb)[kLimbs]) {
#pragma GCC unroll 2
    for (int i = 0; i < kLimbs - 1; i++) {
      limb[i] = high_half<kRounded>(x);
      x = _mm512_sub_ps(x, limb[i]);
    }
    limb[kLimbs - 1] = x;
  }
  // `beside` takes a step with each addition. It is kept in registers: what goes through memory
  // waits for the stores of the unit. kMirrored: the bits of the same sums with A and X exchanged.
  template <bool kAdd, bool kMirrored, bool kTwoRows, bool kTwoColumns, class Beside>
  [[gnu::always_inline]] static void block(const Limbs& a, int64_t row, const Limbs& x,
                                           int64_t lane, float* c, int64_t ldc, Beside& beside) {
    asm volatile(""
                 :
                 :
                 : "memory");  // the compiler does not know that tiles are loaded from memory
    if constexpr (kAdd) {
      _tile_loadd(0, c, ldc * 4);
      if constexpr (kTwoColumns) _tile_loadd(1, c + 16, ldc * 4);
      if constexpr (kTwoRows) _tile_loadd(2, c + 16 * ldc, ldc * 4);
      if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const int64_t a_row = a.row * 4, x_row = x.row * 4;
    for (int64_t t = 0; t < a.along; t++) {
      const auto rows = [&](int part) __attribute__((always_inline)) {
        const uint32_t* const from = a.at(t, row) + part * a.plane;
        _tile_loadd(4, from, a_row);
        if constexpr (kTwoRows) _tile_loadd(5, from + a.across, a_row);
      };
      const auto lanes = [&](int part) __attribute__((always_inline)) {
        const uint32_t* const from = x.at(t, lane) + part * x.plane;
        _tile_loadd(6, from, x_row);
        if constexpr (kTwoColumns) _tile_loadd(7, from + x.across, x_row);
      };
      const auto add = [&]() __attribute__((always_inline)) {
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kTwoColumns && !kMirrored) _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTwoRows) _tile_dpbf16ps(2, 5, 6);
        if constexpr (kTwoColumns && kMirrored) _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTwoRows && kTwoColumns) _tile_dpbf16ps(3, 5, 7);
        beside.step();
      };
      const auto one = [&](int part)
                           __attribute__((always_inline)) { kMirrored ? lanes(part) : rows(part); };
      const auto other = [&](int part) __attribute__((always_inline)) {
        kMirrored ? rows(part) : lanes(part);
      };
      if constexpr (kLimbs == 3) {
        one(0), other(2), add();
        other(1), add();
        one(1), add();
        other(0), add();
        one(2), add();
        one(0), add();
      } else if constexpr (kLimbs == 1) {
        one(0), other(0), add();
      } else {
        one(0), other(1), add();
        other(0), add();
        one(1), add();
      }
    }
    _tile_stored(0, c, ldc * 4);
    if constexpr (kTwoColumns) _tile_stored(1, c + 16, ldc * 4);
    if constexpr (kTwoRows) _tile_stored(2, c + 16 * ldc, ldc * 4);
    if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
    asm volatile("" : : : "memory");  // nor that they are stored to it
  }

  // c[rows, vectors * 16] = A X, or c += term by term; rows padded to 16, of the lanes from `lane`
  // on.
  template <bool kAdd = false, bool kMirrored = false>
  static void product(const Limbs& a, int64_t rows, const Limbs& x, int64_t lane, int64_t vectors,
                      float* c, int64_t ldc) {
    NothingBeside nothing;
    for (int64_t m = 0; m < rows; m += 32)
      for (int64_t i = 0; i < vectors; i += 2) {
        const int64_t v = column(m, i, vectors);
        const auto run = [&]<bool kTwoRows, bool kTwoColumns>() {
          block<kAdd, kMirrored, kTwoRows, kTwoColumns>(a, m / 16, x, lane / 16 + v,
                                                        c + m * ldc + v * 16, ldc, nothing);
        };
        if (m + 16 < rows)
          v + 1 < vectors ? run.template operator()<true, true>()
                          : run.template operator()<true, false>();
        else
          v + 1 < vectors ? run.template operator()<false, true>()
                          : run.template operator()<false, false>();
      }
  }
  // The same beside something else, and how many steps that takes.
  template <bool kMirrored = false, class Beside>
  [[gnu::always_inline]] static void product_beside(const Limbs& a, int64_t rows, const Limbs& x,
                                                    int64_t lane, int64_t vectors, float* c,
                                                    int64_t ldc, Beside& beside) {
    for (int64_t m = 0; m < rows; m += 32)
      for (int64_t i = 0; i < vectors; i += 2) {
        const int64_t v = column(m, i, vectors);
        float* const to = c + m * ldc + v * 16;
        if (m + 16 < rows && v + 1 < vectors)
          block<false, kMirrored, true, true>(a, m / 16, x, lane / 16 + v, to, ldc, beside);
        else
          product<false, kMirrored>(a.from(m / 16), min_of(32, rows - m), x, lane + v * 16,
                                    min_of(2, vectors - v), to, ldc);
      }
  }
  static int64_t steps(const Limbs& a, int64_t rows, int64_t vectors) {
    return (rows + 15) / 32 * (vectors / 2) * a.along * kSteps;
  }

 private:
  // Which vector comes i-th: one operand is still near.
  static int64_t column(int64_t m, int64_t i, int64_t vectors) {
    return m % 64 == 0 ? i : (vectors - 1) / 2 * 2 - i;
  }
};

}  // namespace
}  // namespace mha_ext::cpu

#include "lane_rows-inl.h"
//
#include "scores-inl.h"
//
#include "softmax-inl.h"
//
#include "few_rows-inl.h"
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

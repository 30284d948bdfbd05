// Products in limbs on AMX: operands in tiles, and what of them is added up, alone or beside
// something else.
namespace mha_ext::cpu {
namespace {

// An operand in limbs (limbs-inl.h): tiles of 16 rows of A by 32 numbers along t, or
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

// AVX2, FMA and F16C: 8 floats or 4 doubles, 16 registers; a lane mask is a vector of all-ones
// lanes.
namespace mha_ext::cpu {
namespace {

struct Bytes64 {  // for tile_visibility
  static constexpr bool kWhole = true;
  static uint32_t zero(const char* p) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)p);
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256()));
  }
  static uint64_t nonzero(const char* p) { return ~((uint64_t)zero(p + 32) << 32 | zero(p)); }
  static void transpose(uint64_t* words) { transpose_bits(words); }
};

// Eight numbers: those at even places in the low halves of four lanes, those at odd places
// likewise. The high halves may be anything, as multiplications do not read them.
struct U32x8 {
  using Bytes = Bytes64;
  __m256i even, odd;
  static constexpr int kLanes = 8;
  static U32x8 set(uint32_t x) {
    const __m256i all = _mm256_set1_epi32((int)x);
    return {all, all};
  }
  static U32x8 from(uint32_t first) {
    const __m256i all = _mm256_set1_epi32((int)first);
    return {_mm256_add_epi32(all, _mm256_setr_epi32(0, 0, 2, 0, 4, 0, 6, 0)),
            _mm256_add_epi32(all, _mm256_setr_epi32(1, 0, 3, 0, 5, 0, 7, 0))};
  }
};
inline U32x8 exclusive_or(U32x8 a, U32x8 b, U32x8 c) {
  return {_mm256_xor_si256(_mm256_xor_si256(b.even, c.even), a.even),
          _mm256_xor_si256(_mm256_xor_si256(b.odd, c.odd), a.odd)};
}
inline void multiply(uint32_t factor, U32x8 x, U32x8* high, U32x8* low) {
  const __m256i f = _mm256_set1_epi32((int)factor);
  *low = {_mm256_mul_epu32(x.even, f), _mm256_mul_epu32(x.odd, f)};
  *high = {_mm256_srli_epi64(low->even, 32), _mm256_srli_epi64(low->odd, 32)};
}
// Bit i: the low (or high) 16 bits of number i are at least t.
inline void at_least(U32x8 x, uint32_t t, uint64_t* low, uint64_t* high) {
  const __m256i all = _mm256_blend_epi32(x.even, _mm256_slli_epi64(x.odd, 32), 0xaa);
  const __m256i both = _mm256_cmpeq_epi16(_mm256_max_epu16(all, _mm256_set1_epi16((short)t)), all);
  *low = (uint64_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)));
  *high = (uint64_t)_mm256_movemask_ps(_mm256_castsi256_ps(both));
}

struct F32x8 {
  using T = float;
  using V = __m256;
  using Half = F32x8;
  using M = __m256;
  using U = U32x8;
  static constexpr int kLanes = 8, kRegisters = 16;
  static constexpr int64_t kAskedBeside = 32, kAskedInOrder = 0, kRowsInOrder = 1;
  static constexpr int64_t kLightRows = 1;
  static constexpr int kAskedInto = 2;

  static V zero() { return _mm256_setzero_ps(); }
  static V set(float x) { return _mm256_set1_ps(x); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  static V min(V a, V b) { return _mm256_min_ps(a, b); }
  static M gt(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static M eq(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static M mask(uint64_t bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32((int)(uint32_t)bits), lane);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane));
  }
  static uint64_t bits(M m) { return (uint64_t)_mm256_movemask_ps(m); }
  static V select(M m, V a, V b) { return _mm256_blendv_ps(b, a, m); }
  static constexpr Exponential kExponential = Exponential::kShortTable;
  static V fms(V a, V b, V c) { return _mm256_fmsub_ps(a, b, c); }  // a b - c
  // 2^(k / 8) for the k in the low bits of u.
  static V power(V u) {
    const __m256i k = _mm256_castps_si256(u), table = *(const __m256i*)Exp<T>::short_power;
    const __m256i rest = _mm256_permutevar8x32_epi32(table, k);
    return _mm256_castsi256_ps(_mm256_add_epi32(rest, _mm256_slli_epi32(k, 20)));
  }
  static __m256i first(int64_t n) { return _mm256_castps_si256(mask((1ull << n) - 1)); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  // In a register: a compiler that is short of them loads again for each multiply-add, and two of
  // these a cycle leave no time for other loads.
  static void keep(V& v) { asm("" : "+x"(v)); }
  static V load(const float* p, int64_t n) { return _mm256_maskload_ps(p, first(n)); }
  static void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  // Past the caches; p lies on a whole vector. PastCaches says when.
  static void stream(float* p, V v) { _mm256_stream_ps(p, v); }
  static void end_streams() { _mm_sfence(); }
  static void store(float* p, V v, int64_t n) { _mm256_maskstore_ps(p, first(n), v); }

  static V widen_bf16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static __m128i narrow_bf16(V v) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i all = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  }
  // Of n < 8 numbers, without a call: where one may be made, a loop keeps its sums in memory.
  static __m128i load_part(const void* p, int64_t n) {
    const uint16_t* from = (const uint16_t*)p;
    uint64_t x[2] = {0, 0};
    uint64_t& rest = x[n >= 4];
    if (n >= 4) {
      __builtin_memcpy(x, from, 8);
      from += 4;
      n -= 4;
    }
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++)
      if (i < n) rest |= (uint64_t)from[i] << (16 * i);
    return _mm_set_epi64x((int64_t)x[1], (int64_t)x[0]);
  }
  static void store_part(void* p, __m128i x, int64_t n) { __builtin_memcpy(p, &x, (size_t)n * 2); }
  static V load(const BFloat16* p) { return widen_bf16(_mm_loadu_si128((const __m128i*)p)); }
  static V load(const BFloat16* p, int64_t n) { return widen_bf16(load_part(p, n)); }
  static void store(BFloat16* p, V v) { _mm_storeu_si128((__m128i*)p, narrow_bf16(v)); }
  static void store(BFloat16* p, V v, int64_t n) { store_part(p, narrow_bf16(v), n); }
  // 16 numbers, or n of them and zero beyond; and those at even (part 0) or at odd places. A shift
  // or a mask, where widening in their order has to move each to another place first.
  static __m256i load_pairs(const BFloat16* p, int64_t n) {
    if (n >= 16) return _mm256_loadu_si256((const __m256i*)p);
    const __m128i low = n >= 8 ? _mm_loadu_si128((const __m128i*)p) : load_part(p, n);
    return _mm256_set_m128i(n > 8 ? load_part(p + 8, n - 8) : _mm_setzero_si128(), low);
  }
  static V split(__m256i x, int part) {
    return _mm256_castsi256_ps(part == 0 ? _mm256_slli_epi32(x, 16)
                                         : _mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
  }
  // Back to their order.
  static void join(V (&v)[2]) {
    const V low = _mm256_unpacklo_ps(v[0], v[1]), high = _mm256_unpackhi_ps(v[0], v[1]);
    v[0] = _mm256_permute2f128_ps(low, high, 0x20);
    v[1] = _mm256_permute2f128_ps(low, high, 0x31);
  }
  static V load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static V load(const Float16* p, int64_t n) { return _mm256_cvtph_ps(load_part(p, n)); }
  static void store(Float16* p, V v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store(Float16* p, V v, int64_t n) {
    store_part(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT), n);
  }

  // r[c] = column c of 8 rows; the halves find their places while they are loaded.
  static constexpr int kPiece = 4;
  template <int kPieces, int kGroups, class Row>
  [[gnu::always_inline]] static void load_columns(const Row& row, V* r) {
#pragma GCC unroll 2
    for (int c = 0; c < kPieces; c++) {
      V t[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        t[i] = _mm256_insertf128_ps(
            _mm256_castps128_ps256(_mm_loadu_ps(row(i) + 4 * c)),
            kGroups > 1 ? _mm_loadu_ps(row(i + 4) + 4 * c) : _mm_setzero_ps(), 1);
      const V low = _mm256_unpacklo_ps(t[0], t[1]), low2 = _mm256_unpacklo_ps(t[2], t[3]);
      const V high = _mm256_unpackhi_ps(t[0], t[1]), high2 = _mm256_unpackhi_ps(t[2], t[3]);
      r[4 * c] = _mm256_shuffle_ps(low, low2, 0x44);
      r[4 * c + 1] = _mm256_shuffle_ps(low, low2, 0xee);
      r[4 * c + 2] = _mm256_shuffle_ps(high, high2, 0x44);
      r[4 * c + 3] = _mm256_shuffle_ps(high, high2, 0xee);
    }
  }
  static void transpose(V (&r)[8]) {
    V t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = t[i];
  }

  // Lane i is the sum of the lanes of r[i]: lanes 4 apart first, then 2, 1.
  static V sum_each(V (&r)[8]) {
    V u[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      u[i] = add(_mm256_permute2f128_ps(r[i], r[i + 4], 0x20),
                 _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    const V a = add(_mm256_unpacklo_ps(u[0], u[2]), _mm256_unpackhi_ps(u[0], u[2]));
    const V b = add(_mm256_unpacklo_ps(u[1], u[3]), _mm256_unpackhi_ps(u[1], u[3]));
    return add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
  static T sum(V v) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }
  static T largest(V v) {  // no lane is NaN
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
  }
};

struct F64x4 {
  using T = double;
  using V = __m256d;
  using Half = F64x4;
  using M = __m256d;
  using U = U32x8;
  static constexpr int kLanes = 4, kRegisters = 16;
  static constexpr int64_t kAskedBeside = F32x8::kAskedBeside;
  static constexpr int64_t kAskedInOrder = F32x8::kAskedInOrder;
  static constexpr int64_t kRowsInOrder = F32x8::kRowsInOrder;
  static constexpr int64_t kLightRows = F32x8::kLightRows;
  static constexpr int kAskedInto = F32x8::kAskedInto;

  static V zero() { return _mm256_setzero_pd(); }
  static V set(double x) { return _mm256_set1_pd(x); }
  static V add(V a, V b) { return _mm256_add_pd(a, b); }
  static V sub(V a, V b) { return _mm256_sub_pd(a, b); }
  static V mul(V a, V b) { return _mm256_mul_pd(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_pd(a, b, c); }
  static V max(V a, V b) { return _mm256_max_pd(a, b); }
  static V min(V a, V b) { return _mm256_min_pd(a, b); }
  static M gt(V a, V b) { return _mm256_cmp_pd(a, b, _CMP_GT_OQ); }
  static M eq(V a, V b) { return _mm256_cmp_pd(a, b, _CMP_EQ_OQ); }
  static M mask(uint64_t bits) {
    const __m256i lane = _mm256_setr_epi64x(1, 2, 4, 8);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi64x((int64_t)bits), lane);
    return _mm256_castsi256_pd(_mm256_cmpeq_epi64(set, lane));
  }
  static uint64_t bits(M m) { return (uint64_t)_mm256_movemask_pd(m); }
  static V select(M m, V a, V b) { return _mm256_blendv_pd(b, a, m); }
  static constexpr Exponential kExponential = Exponential::kShortTable;
  static V fms(V a, V b, V c) { return _mm256_fmsub_pd(a, b, c); }  // a b - c
  // 2^(k / 2) for the k in the low bits of u; the second lowest bit of a number looks up.
  static V power(V u) {
    const __m256i k = _mm256_castpd_si256(u), table = *(const __m256i*)Exp<T>::short_power;
    const V rest = _mm256_permutevar_pd(_mm256_castsi256_pd(table), _mm256_add_epi64(k, k));
    return _mm256_castsi256_pd(
        _mm256_add_epi64(_mm256_castpd_si256(rest), _mm256_slli_epi64(k, 51)));
  }
  static __m256i first(int64_t n) { return _mm256_castpd_si256(mask((1ull << n) - 1)); }
  static V load(const double* p) { return _mm256_loadu_pd(p); }
  static V load(const double* p, int64_t n) { return _mm256_maskload_pd(p, first(n)); }
  static void store(double* p, V v) { _mm256_storeu_pd(p, v); }
  static void stream(double* p, V v) { _mm256_stream_pd(p, v); }
  static void end_streams() { F32x8::end_streams(); }
  static void store(double* p, V v, int64_t n) { _mm256_maskstore_pd(p, first(n), v); }
  static V load(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
  static V load(const float* p, int64_t n) {
    __m128 x = _mm_setzero_ps();
    __builtin_memcpy(&x, p, (size_t)n * 4);
    return _mm256_cvtps_pd(x);
  }
  static void store(float* p, V v) { _mm_storeu_ps(p, _mm256_cvtpd_ps(v)); }
  static void store(float* p, V v, int64_t n) {
    const __m128 x = _mm256_cvtpd_ps(v);
    __builtin_memcpy(p, &x, (size_t)n * 4);
  }

  static constexpr int kPiece = 2;
  template <int kPieces, int kGroups, class Row>
  [[gnu::always_inline]] static void load_columns(const Row& row, V* r) {
#pragma GCC unroll 2
    for (int c = 0; c < kPieces; c++) {
      V t[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++)
        t[i] = _mm256_insertf128_pd(
            _mm256_castpd128_pd256(_mm_loadu_pd(row(i) + 2 * c)),
            kGroups > 1 ? _mm_loadu_pd(row(i + 2) + 2 * c) : _mm_setzero_pd(), 1);
      r[2 * c] = _mm256_unpacklo_pd(t[0], t[1]);
      r[2 * c + 1] = _mm256_unpackhi_pd(t[0], t[1]);
    }
  }
  static void transpose(V (&r)[4]) {
    const V a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
    const V c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
    r[0] = _mm256_permute2f128_pd(a, c, 0x20);
    r[1] = _mm256_permute2f128_pd(b, d, 0x20);
    r[2] = _mm256_permute2f128_pd(a, c, 0x31);
    r[3] = _mm256_permute2f128_pd(b, d, 0x31);
  }

  static V sum_each(V (&r)[4]) {
    V u[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
      u[i] = add(_mm256_permute2f128_pd(r[i], r[i + 2], 0x20),
                 _mm256_permute2f128_pd(r[i], r[i + 2], 0x31));
    return add(_mm256_unpacklo_pd(u[0], u[1]), _mm256_unpackhi_pd(u[0], u[1]));
  }
  static T sum(V v) {
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
  }
  static T largest(V v) {
    const __m128d half = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(half, _mm_unpackhi_pd(half, half)));
  }
};

}  // namespace
}  // namespace mha_ext::cpu

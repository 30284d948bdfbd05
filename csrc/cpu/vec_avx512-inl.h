// AVX-512 (F, BW, DQ, VL): 16 floats or 8 doubles, 32 registers.
namespace mha_ext::cpu {
namespace {

// Half a vector, for what is left of a row: what products need of it.
struct F32x8 {
  using T = float;
  using V = __m256;
  using Half = F32x8;
  using M = __m256;
  static constexpr int kLanes = 8, kRegisters = 32;
  static V zero() { return _mm256_setzero_ps(); }
  static V set(T x) { return _mm256_set1_ps(x); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  static V load(const T* p) { return _mm256_loadu_ps(p); }
  static void store(T* p, V v) { _mm256_storeu_ps(p, v); }
  static M mask(uint64_t bits) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), bit), bit));
  }
  static V select(M m, V a, V b) { return _mm256_blendv_ps(b, a, m); }
};
struct F64x4 {
  using T = double;
  using V = __m256d;
  using Half = F64x4;
  using M = __m256d;
  static constexpr int kLanes = 4, kRegisters = 32;
  static V zero() { return _mm256_setzero_pd(); }
  static V set(T x) { return _mm256_set1_pd(x); }
  static V add(V a, V b) { return _mm256_add_pd(a, b); }
  static V mul(V a, V b) { return _mm256_mul_pd(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_pd(a, b, c); }
  static V max(V a, V b) { return _mm256_max_pd(a, b); }
  static V load(const T* p) { return _mm256_loadu_pd(p); }
  static void store(T* p, V v) { _mm256_storeu_pd(p, v); }
  static M mask(uint64_t bits) {
    const __m256i bit = _mm256_setr_epi64x(1, 2, 4, 8);
    return _mm256_castsi256_pd(
        _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x((int64_t)bits), bit), bit));
  }
  static V select(M m, V a, V b) { return _mm256_blendv_pd(b, a, m); }
};

struct F32x16 {
  using T = float;
  using V = __m512;
  using Half = F32x8;
  using M = __mmask16;
  using U = U32x16;
  static constexpr int kLanes = 16, kRegisters = 32;
  static constexpr int64_t kInPlaceBlocks = 8;  // measured on Zen 4: all of a call of forward
  static constexpr bool kHalfQueries = true;    // there half a vector is half the work
  static constexpr int64_t kAskedBeside = 0, kAskedInOrder = 8192, kRowsInOrder = 8;
  static constexpr int kAskedInto = 3;
  static int64_t in_place_tiles() { return whole_vectors() ? 3 : kInPlaceBlocks; }

  static V zero() { return _mm512_setzero_ps(); }
  static V set(float x) { return _mm512_set1_ps(x); }
  static Half::V low(V v) { return _mm512_castps512_ps256(v); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  // b where either is NaN. (Without the mask g++ 12 warns of its own undefined operand.)
  static V max(V a, V b) { return _mm512_maskz_max_ps(0xffff, a, b); }
  static V min(V a, V b) { return _mm512_maskz_min_ps(0xffff, a, b); }
  static M gt(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static M eq(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static M mask(uint64_t bits) { return (M)bits; }
  static uint64_t bits(M m) { return m; }
  static V select(M m, V a, V b) { return _mm512_mask_mov_ps(b, m, a); }  // m ? a : b
  static constexpr Exponential kExponential = Exponential::kTable;
  static V fms(V a, V b, V c) { return _mm512_fmsub_ps(a, b, c); }  // a b - c
  // 2^(k / 32) for the k in the low bits of u; a, or 0 where x < least (NaN is not).
  static V power(V u) {
    const __m512i k = _mm512_castps_si512(u);
    const __m512i* const p = (const __m512i*)Exp<T>::power;
    const __m512i rest =
        _mm512_permutex2var_epi32(_mm512_loadu_si512(p), k, _mm512_loadu_si512(p + 1));
    return _mm512_castsi512_ps(_mm512_add_epi32(rest, _mm512_slli_epi32(k, 18)));
  }
  static V from(T least, V x, V a, V /* k / 32 */) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set(least), _CMP_NLT_UQ), a);
  }

  static M first(int64_t n) { return (M)((1u << n) - 1); }  // n < 16
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static V load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  // Past the caches; p lies on a whole vector. PastCaches says when.
  static void stream(float* p, V v) { _mm512_stream_ps(p, v); }
  static void end_streams() { _mm_sfence(); }
  static void store(float* p, V v, int64_t n) { _mm512_mask_storeu_ps(p, first(n), v); }

  static V widen_bf16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static __m256i narrow_bf16(V v) {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const M nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
  }
  static V load(const BFloat16* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
  static V load(const BFloat16* p, int64_t n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static void store(BFloat16* p, V v) { _mm256_storeu_si256((__m256i*)p, narrow_bf16(v)); }
  static void store(BFloat16* p, V v, int64_t n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow_bf16(v));
  }
  // 32 numbers, or n of them and zero beyond; and those at even (part 0) or at odd places: a shift
  // or a mask, where widening in their order has to move each to another place first.
  static __m512i load_pairs(const BFloat16* p, int64_t n) {
    return n >= 32 ? _mm512_loadu_si512(p)
                   : _mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
  }
  static V split(__m512i x, int part) {
    return _mm512_castsi512_ps(part == 0 ? _mm512_slli_epi32(x, 16)
                                         : _mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
  }
  // Lanes of both in another order: the first by the numbers of `low`, the second by eight more.
  static void place(V (&v)[2], __m512i low) {
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512i x = _mm512_castps_si512(v[0]), y = _mm512_castps_si512(v[1]);
    v[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi32(x, low, y));
    v[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi32(x, high, y));
  }
  // Even and odd places back to their order.
  static void join(V (&v)[2]) {
    place(v, _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
  }
  static V load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static V load(const Float16* p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static void store(Float16* p, V v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store(Float16* p, V v, int64_t n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  // r[c] = column c of the 16 rows that begin at row(0), row(1), ..., for kPieces pieces of 128
  // bits of each. They find their places while they are loaded, which leaves half of the shuffles
  // that a transpose of whole rows takes.
  static constexpr int kPiece = 4;
  static __m128 load_piece(const float* p) { return _mm_loadu_ps(p); }
  static __m128 load_piece(const BFloat16* p) {
    return _mm_castsi128_ps(
        _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p)), 16));
  }
  static __m128 load_piece(const Float16* p) {
    return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p));
  }
  template <int kPieces, int kGroups, class Row>
  [[gnu::always_inline]] static void load_columns(const Row& row, V* r) {
    V t[kPieces][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#pragma GCC unroll 4
      for (int c = 0; c < kPieces; c++)
        t[c][i] = _mm512_zextps128_ps512(load_piece(row(i) + 4 * c));
#pragma GCC unroll 4
      for (int g = 1; g < kGroups; g++)
#pragma GCC unroll 4
        for (int c = 0; c < kPieces; c++)
          t[c][i] = _mm512_mask_broadcast_f32x4(t[c][i], (__mmask16)(0xf << 4 * g),
                                                load_piece(row(i + 4 * g) + 4 * c));
    }
#pragma GCC unroll 4
    for (int c = 0; c < kPieces; c++) {
      const V low = _mm512_unpacklo_ps(t[c][0], t[c][1]),
              low2 = _mm512_unpacklo_ps(t[c][2], t[c][3]);
      const V high = _mm512_unpackhi_ps(t[c][0], t[c][1]),
              high2 = _mm512_unpackhi_ps(t[c][2], t[c][3]);
      r[4 * c] = _mm512_shuffle_ps(low, low2, 0x44);
      r[4 * c + 1] = _mm512_shuffle_ps(low, low2, 0xee);
      r[4 * c + 2] = _mm512_shuffle_ps(high, high2, 0x44);
      r[4 * c + 3] = _mm512_shuffle_ps(high, high2, 0xee);
    }
  }
  static void transpose(V (&r)[16]) {
    V t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
      t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
      r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
      r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
      r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
  }

  // Lane i is the sum of the lanes of r[i]: lanes 8 apart first, then 4, 2, 1.
  static V sum_each(V (&r)[16]) {
    V t[8], u[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const V a = r[i % 4 + i / 4 * 8], b = r[i % 4 + i / 4 * 8 + 4];
      t[i] = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      u[i] = add(_mm512_shuffle_f32x4(t[i], t[i + 4], 0x88),
                 _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd));
    const V a = add(_mm512_unpacklo_ps(u[0], u[2]), _mm512_unpackhi_ps(u[0], u[2]));
    const V b = add(_mm512_unpacklo_ps(u[1], u[3]), _mm512_unpackhi_ps(u[1], u[3]));
    return add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  static T sum(V v) {
    v = add(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = add(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    v = add(v, _mm512_permute_ps(v, 0x4e));
    return _mm512_cvtss_f32(add(v, _mm512_permute_ps(v, 0xb1)));
  }
  static T largest(V v) {  // no lane is NaN
    v = max(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = max(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    v = max(v, _mm512_permute_ps(v, 0x4e));
    return _mm512_cvtss_f32(max(v, _mm512_permute_ps(v, 0xb1)));
  }
};

struct F64x8 {
  using T = double;
  using V = __m512d;
  using Half = F64x4;
  using M = __mmask8;
  using U = U32x16;
  static constexpr int kLanes = 8, kRegisters = 32;
  static constexpr int64_t kInPlaceBlocks = F32x16::kInPlaceBlocks;
  static constexpr bool kHalfQueries = F32x16::kHalfQueries;
  static constexpr int64_t kAskedBeside = F32x16::kAskedBeside;
  static constexpr int64_t kAskedInOrder = F32x16::kAskedInOrder;
  static constexpr int kAskedInto = F32x16::kAskedInto;
  static constexpr int64_t kRowsInOrder = F32x16::kRowsInOrder;
  static int64_t in_place_tiles() { return F32x16::in_place_tiles(); }

  static V zero() { return _mm512_setzero_pd(); }
  static V set(double x) { return _mm512_set1_pd(x); }
  static Half::V low(V v) { return _mm512_castpd512_pd256(v); }
  static V add(V a, V b) { return _mm512_add_pd(a, b); }
  static V sub(V a, V b) { return _mm512_sub_pd(a, b); }
  static V mul(V a, V b) { return _mm512_mul_pd(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_pd(a, b, c); }
  static V max(V a, V b) { return _mm512_max_pd(a, b); }
  static V min(V a, V b) { return _mm512_maskz_min_pd(0xff, a, b); }
  static M gt(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ); }
  static M eq(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
  static M mask(uint64_t bits) { return (M)bits; }
  static uint64_t bits(M m) { return m; }
  static V select(M m, V a, V b) { return _mm512_mask_mov_pd(b, m, a); }
  static constexpr Exponential kExponential = Exponential::kTable;
  static V fms(V a, V b, V c) { return _mm512_fmsub_pd(a, b, c); }  // a b - c
  // 2^(k / 16) for the k in the low bits of u; a, or 0 where x < least (NaN is not).
  static V power(V u) {
    const __m512i k = _mm512_castpd_si512(u);
    const __m512i* const p = (const __m512i*)Exp<T>::power;
    const __m512i rest =
        _mm512_permutex2var_epi64(_mm512_loadu_si512(p), k, _mm512_loadu_si512(p + 1));
    return _mm512_castsi512_pd(_mm512_add_epi64(rest, _mm512_slli_epi64(k, 48)));
  }
  static V from(T least, V x, V a, V /* k / 16 */) {
    return _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x, set(least), _CMP_NLT_UQ), a);
  }
  static M first(int64_t n) { return (M)((1u << n) - 1); }  // n < 8
  static V load(const double* p) { return _mm512_loadu_pd(p); }
  static V load(const double* p, int64_t n) { return _mm512_maskz_loadu_pd(first(n), p); }
  static void store(double* p, V v) { _mm512_storeu_pd(p, v); }
  static void stream(double* p, V v) { _mm512_stream_pd(p, v); }
  static void end_streams() { F32x16::end_streams(); }
  static void store(double* p, V v, int64_t n) { _mm512_mask_storeu_pd(p, first(n), v); }
  static V load(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
  static V load(const float* p, int64_t n) {
    return _mm512_cvtps_pd(_mm256_maskz_loadu_ps(first(n), p));
  }
  static void store(float* p, V v) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
  static void store(float* p, V v, int64_t n) {
    _mm256_mask_storeu_ps(p, first(n), _mm512_cvtpd_ps(v));
  }

  static constexpr int kPiece = 2;
  template <int kPieces, int kGroups, class Row>
  [[gnu::always_inline]] static void load_columns(const Row& row, V* r) {
    V t[kPieces][2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
#pragma GCC unroll 4
      for (int c = 0; c < kPieces; c++)
        t[c][i] = _mm512_zextpd128_pd512(_mm_loadu_pd(row(i) + 2 * c));
#pragma GCC unroll 4
      for (int g = 1; g < kGroups; g++)
#pragma GCC unroll 4
        for (int c = 0; c < kPieces; c++)
          t[c][i] = _mm512_mask_broadcast_f64x2(t[c][i], (__mmask8)(3 << 2 * g),
                                                _mm_loadu_pd(row(i + 2 * g) + 2 * c));
    }
#pragma GCC unroll 4
    for (int c = 0; c < kPieces; c++) {
      r[2 * c] = _mm512_unpacklo_pd(t[c][0], t[c][1]);
      r[2 * c + 1] = _mm512_unpackhi_pd(t[c][0], t[c][1]);
    }
  }
  static void transpose(V (&r)[8]) {
    V t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      r[i] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0x88);
      r[i + 2] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd);
      r[i + 4] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0x88);
      r[i + 6] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0xdd);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      t[i] = _mm512_shuffle_f64x2(r[i], r[i + 4], 0x88);
      t[i + 2] = _mm512_shuffle_f64x2(r[i + 2], r[i + 6], 0x88);
      t[i + 4] = _mm512_shuffle_f64x2(r[i], r[i + 4], 0xdd);
      t[i + 6] = _mm512_shuffle_f64x2(r[i + 2], r[i + 6], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = t[i];
  }

  static V sum_each(V (&r)[8]) {
    V t[4], u[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const V a = r[i % 2 + i / 2 * 4], b = r[i % 2 + i / 2 * 4 + 2];
      t[i] = add(_mm512_shuffle_f64x2(a, b, 0x44), _mm512_shuffle_f64x2(a, b, 0xee));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
      u[i] = add(_mm512_shuffle_f64x2(t[i], t[i + 2], 0x88),
                 _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd));
    return add(_mm512_unpacklo_pd(u[0], u[1]), _mm512_unpackhi_pd(u[0], u[1]));
  }
  static T sum(V v) {
    v = add(v, _mm512_shuffle_f64x2(v, v, 0x4e));
    v = add(v, _mm512_shuffle_f64x2(v, v, 0xb1));
    return _mm512_cvtsd_f64(add(v, _mm512_permute_pd(v, 0x55)));
  }
  static T largest(V v) {
    v = max(v, _mm512_shuffle_f64x2(v, v, 0x4e));
    v = max(v, _mm512_shuffle_f64x2(v, v, 0xb1));
    return _mm512_cvtsd_f64(max(v, _mm512_permute_pd(v, 0x55)));
  }
};

// Bit c of word r becomes bit r of word c: first all bytes of one column of bytes side by side,
// then one bit of each of the 64.
inline void Bytes64::transpose(uint64_t* words) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  8,  16, 24, 1,  9,  17, 25, 2,  10, 18,
                                                      26, 3,  11, 19, 27, 4,  12, 20, 28, 5,  13,
                                                      21, 29, 6,  14, 22, 30, 7,  15, 23, 31};
  alignas(64) static constexpr uint8_t kPairs[64] = {
      0, 8,  1, 9,  2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15, 0, 8,  1, 9,  2, 10,
      3, 11, 4, 12, 5, 13, 6, 14, 7, 15, 0, 8,  1, 9,  2, 10, 3, 11, 4, 12, 5, 13,
      6, 14, 7, 15, 0, 8,  1, 9,  2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
  const __m512i order = _mm512_loadu_si512(kOrder), pairs = _mm512_loadu_si512(kPairs);
  __m512d r[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    r[i] = _mm512_castsi512_pd(_mm512_permutexvar_epi16(
        order, _mm512_shuffle_epi8(_mm512_loadu_si512(words + 8 * i), pairs)));
  F64x8::transpose(r);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
#pragma GCC unroll 8
    for (int bit = 0; bit < 8; bit++)
      words[8 * i + bit] =
          _mm512_test_epi8_mask(_mm512_castpd_si512(r[i]), _mm512_set1_epi8((char)(1 << bit)));
}

}  // namespace
}  // namespace mha_ext::cpu

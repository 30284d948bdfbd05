// The AVX-512 instructions that the kernels use, with vectors of 256 bits under their own names, so
// that those kernels can be tested on machines that have AVX2 only. Slow; compiled only with
// MHA_EXT_EMULATE_AVX512. Semantics: Intel 64 and IA-32 Architectures Software Developer's Manual,
// volume 2. vdpbf16ps takes subnormal numbers for zeros, and rounds after each of its two products.
#pragma once
#include <immintrin.h>
#include <stdint.h>

// What takes a constant becomes a template; what may be a macro is none.
#undef _mm512_cmp_pd_mask
#undef _mm512_cmp_ps_mask
#undef _mm512_cmpge_epu16_mask
#undef _mm512_cvtps_ph
#undef _mm512_extracti64x4_epi64
#undef _mm512_fpclass_ps_mask
#undef _mm512_mask_shuffle_epi32
#undef _mm512_permute_pd
#undef _mm512_reduce_ps
#undef _mm512_permute_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_f64x2
#undef _mm512_shuffle_ps
#undef _mm512_ternarylogic_epi32
#define _mm512_cmp_pd_mask(a, b, what) emulated_compare<what, uint8_t>(a, b)
#define _mm512_cmp_ps_mask(a, b, what) emulated_compare<what, uint16_t>(a, b)
#define _mm512_cvtps_ph(a, rounding) emulated_cvtps_ph<rounding>(a)
#define _mm512_extracti64x4_epi64(a, which) emulated_half<__m256i, which>(a)
#define _mm512_fpclass_ps_mask(a, classes) emulated_classes<classes>(a)
#define _mm512_mask_shuffle_epi32(otherwise, k, a, order) \
  emulated_select((__mmask16)(k), (__m512i)emulated_permute_ps<order>((__m512)(a)), otherwise)
#define _mm512_permute_pd(a, order) emulated_permute_pd<order>(a)
#define _mm512_reduce_ps(a, rounding) emulated_reduce_ps<rounding>(a)
#define _mm512_permute_ps(a, order) emulated_permute_ps<order>(a)
#define _mm512_shuffle_f32x4(a, b, order) emulated_shuffle_quarters<order>(a, b)
#define _mm512_shuffle_f64x2(a, b, order) emulated_shuffle_quarters<order>(a, b)
#define _mm512_shuffle_ps(a, b, order) emulated_shuffle_ps<order>(a, b)
#define _mm512_ternarylogic_epi32(a, b, c, table) emulated_logic<table>(a, b, c)

#pragma GCC diagnostic ignored "-Wpsabi"  // nothing here is called from another file

namespace mha_ext::cpu {
namespace {

#define INLINE [[maybe_unused, gnu::always_inline]] static inline

// The same bits as another type, and the parts of a vector.
typedef uint8_t EmulatedU8 __attribute__((vector_size(64)));
typedef uint16_t EmulatedU16 __attribute__((vector_size(64)));
typedef int32_t EmulatedI32 __attribute__((vector_size(64)));
typedef uint32_t EmulatedU32 __attribute__((vector_size(64)));
typedef int64_t EmulatedI64 __attribute__((vector_size(64)));
typedef uint64_t EmulatedU64 __attribute__((vector_size(64)));
template <class To, class From>
INLINE To emulated_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
template <class Half, int kWhich, class V>
INLINE Half emulated_half(V v) {
  Half half;
  __builtin_memcpy(&half, (const char*)&v + kWhich * (int)sizeof half, sizeof half);
  return half;
}
template <class V, class Half>
INLINE V emulated_join(Half low, Half high) {
  V v;
  __builtin_memcpy(&v, &low, sizeof low);
  __builtin_memcpy((char*)&v + sizeof low, &high, sizeof high);
  return v;
}
// run(half of each), for both halves.
template <class Half, class V, class Run, class... More>
INLINE V emulated_halves(const Run& run, V a, More... more) {
  return emulated_join<V>(run(emulated_half<Half, 0>(a), emulated_half<Half, 0>(more)...),
                          run(emulated_half<Half, 1>(a), emulated_half<Half, 1>(more)...));
}

// Bit i of a mask is lane i.
INLINE EmulatedI32 emulated_lanes(uint16_t k) {
  const EmulatedI32 bit = {1,     2,     4,     8,     0x10,   0x20,   0x40,   0x80,
                           0x100, 0x200, 0x400, 0x800, 0x1000, 0x2000, 0x4000, 0x8000};
  return (bit & (int32_t)k) != 0;
}
INLINE EmulatedI64 emulated_lanes(uint8_t k) {
  const EmulatedI64 bit = {1, 2, 4, 8, 0x10, 0x20, 0x40, 0x80};
  return (bit & (int64_t)k) != 0;
}
INLINE uint16_t emulated_mask(EmulatedI32 lanes) {
  return (uint16_t)(_mm256_movemask_ps(emulated_half<__m256, 0>(lanes)) |
                    _mm256_movemask_ps(emulated_half<__m256, 1>(lanes)) << 8);
}
INLINE uint8_t emulated_mask(EmulatedI64 lanes) {
  return (uint8_t)(_mm256_movemask_pd(emulated_half<__m256d, 0>(lanes)) |
                   _mm256_movemask_pd(emulated_half<__m256d, 1>(lanes)) << 4);
}
template <class V, class K>
INLINE V emulated_select(K k, V a, V b) {
  const auto lanes = emulated_bits<EmulatedU64>(emulated_lanes(k));
  return emulated_bits<V>((emulated_bits<EmulatedU64>(a) & lanes) |
                          (emulated_bits<EmulatedU64>(b) & ~lanes));
}
template <int kWhat, class K, class V>
INLINE K emulated_compare(V a, V b) {
  static_assert(kWhat == _CMP_GT_OQ || kWhat == _CMP_EQ_OQ || kWhat == _CMP_NLT_UQ ||
                kWhat == _CMP_UNORD_Q);
  if constexpr (kWhat == _CMP_GT_OQ) return emulated_mask(a > b);
  if constexpr (kWhat == _CMP_EQ_OQ) return emulated_mask(a == b);
  if constexpr (kWhat == _CMP_NLT_UQ) return (K)~emulated_mask(a < b);
  return (K)(emulated_mask(a != a) | emulated_mask(b != b));
}

// Memory. What a mask leaves out is not touched.
template <class V>
INLINE V emulated_load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
INLINE V emulated_load(uint64_t k, const void* p) {
  V v = {};
  for (int i = 0; i < (int)(sizeof v / sizeof(T)); i++)
    if (k >> i & 1) __builtin_memcpy((char*)&v + i * (int)sizeof(T), (const T*)p + i, sizeof(T));
  return v;
}
template <class T, class V>
INLINE void emulated_store(void* p, uint64_t k, V v) {
  for (int i = 0; i < (int)(sizeof v / sizeof(T)); i++)
    if (k >> i & 1) __builtin_memcpy((T*)p + i, (const char*)&v + i * (int)sizeof(T), sizeof(T));
}
INLINE __m512 _mm512_loadu_ps(const void* p) { return emulated_load<__m512>(p); }
INLINE __m512d _mm512_loadu_pd(const void* p) { return emulated_load<__m512d>(p); }
INLINE __m512i _mm512_loadu_si512(const void* p) { return emulated_load<__m512i>(p); }
INLINE void _mm512_storeu_ps(void* p, __m512 v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE void _mm512_storeu_pd(void* p, __m512d v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE void _mm512_stream_ps(void* p, __m512 v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE void _mm512_stream_pd(void* p, __m512d v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE void _mm512_stream_si512(void* p, __m512i v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE void _mm512_storeu_si512(void* p, __m512i v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE __m512 _mm512_maskz_loadu_ps(__mmask16 k, const void* p) {
  return emulated_load<__m512, float>(k, p);
}
INLINE __m512d _mm512_maskz_loadu_pd(__mmask8 k, const void* p) {
  return emulated_load<__m512d, double>(k, p);
}
INLINE __m512i _mm512_maskz_loadu_epi16(__mmask32 k, const void* p) {
  return emulated_load<__m512i, uint16_t>(k, p);
}
INLINE __m256 _mm256_maskz_loadu_ps(__mmask8 k, const void* p) {
  return emulated_load<__m256, float>(k, p);
}
INLINE __m256i _mm256_maskz_loadu_epi16(__mmask16 k, const void* p) {
  return emulated_load<__m256i, uint16_t>(k, p);
}
INLINE void _mm512_mask_storeu_ps(void* p, __mmask16 k, __m512 v) {
  emulated_store<float>(p, k, v);
}
INLINE void _mm512_mask_storeu_pd(void* p, __mmask8 k, __m512d v) {
  emulated_store<double>(p, k, v);
}
INLINE void _mm256_mask_storeu_ps(void* p, __mmask8 k, __m256 v) { emulated_store<float>(p, k, v); }
INLINE void _mm256_mask_storeu_epi16(void* p, __mmask16 k, __m256i v) {
  emulated_store<uint16_t>(p, k, v);
}

// Constants and casts.
INLINE __m512 _mm512_setzero_ps() { return __m512{}; }
INLINE __m512d _mm512_setzero_pd() { return __m512d{}; }
INLINE __m512 _mm512_set1_ps(float x) { return x - __m512{}; }
INLINE __m512d _mm512_set1_pd(double x) { return x - __m512d{}; }
INLINE __m512i _mm512_set1_epi8(char x) { return (__m512i)(EmulatedU8{} + (uint8_t)x); }
INLINE __m512i _mm512_set1_epi32(int x) { return (__m512i)(x - EmulatedI32{}); }
INLINE __m512i _mm512_set1_epi16(short x) { return (__m512i)(EmulatedU16{} + (uint16_t)x); }
INLINE __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i,
                                 int j, int k, int l, int m, int n, int o, int p) {
  return (__m512i)EmulatedI32{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
INLINE __m256 _mm512_castps512_ps256(__m512 v) { return emulated_half<__m256, 0>(v); }
INLINE __m256d _mm512_castpd512_pd256(__m512d v) { return emulated_half<__m256d, 0>(v); }
INLINE __m512i _mm512_castps_si512(__m512 v) { return (__m512i)v; }
INLINE __m512i _mm512_castpd_si512(__m512d v) { return (__m512i)v; }
INLINE __m512 _mm512_castsi512_ps(__m512i v) { return (__m512)v; }
INLINE __m512d _mm512_castsi512_pd(__m512i v) { return (__m512d)v; }
INLINE __m256i _mm512_castsi512_si256(__m512i v) { return emulated_half<__m256i, 0>(v); }
INLINE float _mm512_cvtss_f32(__m512 v) { return v[0]; }
INLINE double _mm512_cvtsd_f64(__m512d v) { return v[0]; }
INLINE __m512 _mm512_zextps128_ps512(__m128 x) {
  __m512 v = {};
  __builtin_memcpy(&v, &x, sizeof x);
  return v;
}
INLINE __m512d _mm512_zextpd128_pd512(__m128d x) {
  __m512d v = {};
  __builtin_memcpy(&v, &x, sizeof x);
  return v;
}

// Arithmetic.
INLINE __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
INLINE __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
INLINE __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
INLINE __m512d _mm512_add_pd(__m512d a, __m512d b) { return a + b; }
INLINE __m512d _mm512_sub_pd(__m512d a, __m512d b) { return a - b; }
INLINE __m512d _mm512_mul_pd(__m512d a, __m512d b) { return a * b; }
INLINE __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return emulated_halves<__m256>(
      [](__m256 x, __m256 y, __m256 z)
          __attribute__((always_inline)) { return _mm256_fmadd_ps(x, y, z); },
      a, b, c);
}
INLINE __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, -c); }
INLINE __m512d _mm512_fmadd_pd(__m512d a, __m512d b, __m512d c) {
  return emulated_halves<__m256d>(
      [](__m256d x, __m256d y, __m256d z)
          __attribute__((always_inline)) { return _mm256_fmadd_pd(x, y, z); },
      a, b, c);
}
INLINE __m512d _mm512_fmsub_pd(__m512d a, __m512d b, __m512d c) {
  return _mm512_fmadd_pd(a, b, -c);
}
// The second where either is NaN.
INLINE __m512d _mm512_max_pd(__m512d a, __m512d b) {
  return emulated_select(emulated_mask(a > b), a, b);
}
INLINE __m512 _mm512_maskz_max_ps(__mmask16 k, __m512 a, __m512 b) {
  return emulated_select(k, emulated_select(emulated_mask(a > b), a, b), __m512{});
}
INLINE __m512 _mm512_maskz_min_ps(__mmask16 k, __m512 a, __m512 b) {
  return emulated_select(k, emulated_select(emulated_mask(a < b), a, b), __m512{});
}
INLINE __m512d _mm512_maskz_min_pd(__mmask8 k, __m512d a, __m512d b) {
  return emulated_select(k, emulated_select(emulated_mask(a < b), a, b), __m512d{});
}
INLINE __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return (__m512i)((EmulatedU32)a + (EmulatedU32)b);
}
INLINE __m512i _mm512_add_epi64(__m512i a, __m512i b) {
  return (__m512i)((EmulatedU64)a + (EmulatedU64)b);
}
INLINE __m512i _mm512_mul_epu32(__m512i a, __m512i b) {
  const EmulatedU64 low = 0xffffffffull - EmulatedU64{};
  return (__m512i)(((EmulatedU64)a & low) * ((EmulatedU64)b & low));
}
INLINE __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
INLINE __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
template <int kTable>
INLINE __m512i emulated_logic(__m512i a, __m512i b, __m512i c) {
  static_assert(kTable == 0x96);
  return a ^ b ^ c;
}
INLINE __m512i _mm512_slli_epi32(__m512i v, int n) { return (__m512i)((EmulatedU32)v << n); }
INLINE __m512i _mm512_srli_epi32(__m512i v, int n) { return (__m512i)((EmulatedU32)v >> n); }
INLINE __m512i _mm512_slli_epi64(__m512i v, int n) { return (__m512i)((EmulatedU64)v << n); }
INLINE __m512i _mm512_srli_epi64(__m512i v, int n) { return (__m512i)((EmulatedU64)v >> n); }

// Masks.
INLINE uint64_t emulated_byte_mask(__m512i set) {
  return (uint32_t)_mm256_movemask_epi8(emulated_half<__m256i, 0>(set)) |
         (uint64_t)(uint32_t)_mm256_movemask_epi8(emulated_half<__m256i, 1>(set)) << 32;
}
INLINE __mmask32 _mm512_cmpge_epu16_mask(__m512i a, __m512i b) {
  return (__mmask32)_pext_u64(emulated_byte_mask((__m512i)((EmulatedU16)a >= (EmulatedU16)b)),
                              0x5555555555555555);
}
INLINE __mmask64 _mm512_test_epi8_mask(__m512i a, __m512i b) {
  return emulated_byte_mask((__m512i)(((EmulatedU8)a & (EmulatedU8)b) != 0));
}
INLINE __m512 _mm512_mask_mov_ps(__m512 otherwise, __mmask16 k, __m512 v) {
  return emulated_select(k, v, otherwise);
}
INLINE __m512d _mm512_mask_mov_pd(__m512d otherwise, __mmask8 k, __m512d v) {
  return emulated_select(k, v, otherwise);
}
INLINE __m512i _mm512_mask_mov_epi32(__m512i otherwise, __mmask16 k, __m512i v) {
  return emulated_select(k, v, otherwise);
}
INLINE __m512 _mm512_maskz_mov_ps(__mmask16 k, __m512 v) { return emulated_select(k, v, __m512{}); }
INLINE __m512d _mm512_maskz_mov_pd(__mmask8 k, __m512d v) {
  return emulated_select(k, v, __m512d{});
}

// Lanes from place to place.
template <class V>
INLINE V emulated_quarters(const V& a, int i, const V& b, int j, const V& c, int k, const V& d,
                           int l) {
  V v;
  __builtin_memcpy((char*)&v, (const char*)&a + 16 * i, 16);
  __builtin_memcpy((char*)&v + 16, (const char*)&b + 16 * j, 16);
  __builtin_memcpy((char*)&v + 32, (const char*)&c + 16 * k, 16);
  __builtin_memcpy((char*)&v + 48, (const char*)&d + 16 * l, 16);
  return v;
}
template <int kOrder, class V>
INLINE V emulated_shuffle_quarters(V a, V b) {
  return emulated_quarters(a, kOrder & 3, a, kOrder >> 2 & 3, b, kOrder >> 4 & 3, b,
                           kOrder >> 6 & 3);
}
INLINE __m512 _mm512_mask_broadcast_f32x4(__m512 otherwise, __mmask16 k, __m128 x) {
  const __m512 v = _mm512_zextps128_ps512(x);
  return emulated_select(k, emulated_quarters(v, 0, v, 0, v, 0, v, 0), otherwise);
}
INLINE __m512d _mm512_mask_broadcast_f64x2(__m512d otherwise, __mmask8 k, __m128d x) {
  const __m512d v = _mm512_zextpd128_pd512(x);
  return emulated_select(k, emulated_quarters(v, 0, v, 0, v, 0, v, 0), otherwise);
}
template <int kOrder>
INLINE __m512 emulated_shuffle_ps(__m512 a, __m512 b) {
  return emulated_halves<__m256>(
      [](__m256 x, __m256 y)
          __attribute__((always_inline)) { return _mm256_shuffle_ps(x, y, kOrder); },
      a, b);
}
template <int kOrder>
INLINE __m512 emulated_permute_ps(__m512 v) {
  return emulated_shuffle_ps<kOrder>(v, v);
}
template <int kOrder>
INLINE __m512d emulated_permute_pd(__m512d v) {
  return emulated_join<__m512d>(_mm256_permute_pd(emulated_half<__m256d, 0>(v), kOrder & 15),
                                _mm256_permute_pd(emulated_half<__m256d, 1>(v), kOrder >> 4 & 15));
}
INLINE __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
  return emulated_halves<__m256>(
      [](__m256 x, __m256 y) __attribute__((always_inline)) { return _mm256_unpacklo_ps(x, y); }, a,
      b);
}
INLINE __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
  return emulated_halves<__m256>(
      [](__m256 x, __m256 y) __attribute__((always_inline)) { return _mm256_unpackhi_ps(x, y); }, a,
      b);
}
INLINE __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
  return emulated_halves<__m256i>(
      [](__m256i x, __m256i y)
          __attribute__((always_inline)) { return _mm256_unpacklo_epi16(x, y); },
      a, b);
}
INLINE __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
  return emulated_halves<__m256i>(
      [](__m256i x, __m256i y)
          __attribute__((always_inline)) { return _mm256_unpackhi_epi16(x, y); },
      a, b);
}
INLINE __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) {
  return emulated_halves<__m256d>(
      [](__m256d x, __m256d y) __attribute__((always_inline)) { return _mm256_unpacklo_pd(x, y); },
      a, b);
}
INLINE __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) {
  return emulated_halves<__m256d>(
      [](__m256d x, __m256d y) __attribute__((always_inline)) { return _mm256_unpackhi_pd(x, y); },
      a, b);
}
INLINE __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  return (__m512i)_mm512_unpacklo_pd((__m512d)a, (__m512d)b);
}
INLINE __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  return (__m512i)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
}
// Lane i is lane order[i] of both, one after the other.
INLINE __m512i _mm512_permutex2var_epi32(__m512i a, __m512i order, __m512i b) {
  const EmulatedU32 first = (EmulatedU32)a, second = (EmulatedU32)b, at = (EmulatedU32)order;
  EmulatedU32 v = {};
  for (int i = 0; i < 16; i++) v[i] = at[i] & 16 ? second[at[i] & 15] : first[at[i] & 15];
  return (__m512i)v;
}
INLINE __m512i _mm512_permutex2var_epi64(__m512i a, __m512i order, __m512i b) {
  const EmulatedU64 first = (EmulatedU64)a, second = (EmulatedU64)b, at = (EmulatedU64)order;
  EmulatedU64 v = {};
  for (int i = 0; i < 8; i++) v[i] = at[i] & 8 ? second[at[i] & 7] : first[at[i] & 7];
  return (__m512i)v;
}
INLINE __m512i _mm512_permutexvar_epi16(__m512i order, __m512i a) {
  const EmulatedU16 from = (EmulatedU16)a, at = (EmulatedU16)order;
  EmulatedU16 v = {};
  for (int i = 0; i < 32; i++) v[i] = from[at[i] & 31];
  return (__m512i)v;
}
INLINE __m512d _mm512_permutex2var_pd(__m512d a, __m512i order, __m512d b) {
  return (__m512d)_mm512_permutex2var_epi64((__m512i)a, order, (__m512i)b);
}
INLINE __m512i _mm512_shuffle_epi8(__m512i v, __m512i order) {
  return emulated_join<__m512i>(
      _mm256_shuffle_epi8(emulated_half<__m256i, 0>(v), emulated_half<__m256i, 0>(order)),
      _mm256_shuffle_epi8(emulated_half<__m256i, 1>(v), emulated_half<__m256i, 1>(order)));
}

// NaN of either kind (0x01 and 0x80) and subnormal numbers (0x20).
template <int kClasses>
INLINE __mmask16 emulated_classes(__m512 x) {
  static_assert(kClasses == (0x01 | 0x20 | 0x80));
  __mmask16 is = 0;
  for (int i = 0; i < 16; i++)
    is |= (__mmask16)((x[i] != x[i] || (x[i] != 0 && fabsf(x[i]) < 0x1p-126f)) << i);
  return is;
}
// x - floor(x), 0 for an infinite x; and x 2^floor(y).
template <int kRounding>
INLINE __m512 emulated_reduce_ps(__m512 x) {
  static_assert(kRounding == _MM_FROUND_TO_NEG_INF);
  for (int i = 0; i < 16; i++) x[i] = __builtin_isinf(x[i]) ? 0 : x[i] - floorf(x[i]);
  return x;
}
template <class T>
INLINE T emulated_scale(T x, T y) {
  const T most = 4096;  // either way out of reach
  return y != y ? y : (T)ldexp(x, (int)floor(y < -most ? -most : y > most ? most : y));
}
INLINE __m512 _mm512_maskz_scalef_ps(__mmask16 k, __m512 x, __m512 y) {
  for (int i = 0; i < 16; i++) x[i] = k >> i & 1 ? emulated_scale<float>(x[i], y[i]) : 0;
  return x;
}
INLINE __m512d _mm512_maskz_scalef_pd(__mmask8 k, __m512d x, __m512d y) {
  for (int i = 0; i < 8; i++) x[i] = k >> i & 1 ? emulated_scale<double>(x[i], y[i]) : 0;
  return x;
}

// From type to type.
INLINE __m512i _mm512_cvtepu16_epi32(__m256i v) {
  return emulated_join<__m512i>(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)),
                                _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)));
}
INLINE __m256i _mm512_cvtepi32_epi16(__m512i v) {  // the low halves
  const EmulatedU32 from = (EmulatedU32)v;
  uint16_t to[16];
  for (int i = 0; i < 16; i++) to[i] = (uint16_t)from[i];
  return emulated_load<__m256i>(to);
}
INLINE __m512 _mm512_cvtph_ps(__m256i v) {
  return emulated_join<__m512>(_mm256_cvtph_ps(_mm256_castsi256_si128(v)),
                               _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}
template <int kRounding>
INLINE __m256i emulated_cvtps_ph(__m512 v) {
  return emulated_join<__m256i>(_mm256_cvtps_ph(emulated_half<__m256, 0>(v), kRounding),
                                _mm256_cvtps_ph(emulated_half<__m256, 1>(v), kRounding));
}
INLINE __m512d _mm512_cvtps_pd(__m256 v) {
  return emulated_join<__m512d>(_mm256_cvtps_pd(_mm256_castps256_ps128(v)),
                                _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
}
INLINE __m256 _mm512_cvtpd_ps(__m512d v) {
  return emulated_join<__m256>(_mm256_cvtpd_ps(emulated_half<__m256d, 0>(v)),
                               _mm256_cvtpd_ps(emulated_half<__m256d, 1>(v)));
}

// bfloat16: to nearest even, NaN stays NaN, subnormal numbers become zero.
INLINE uint16_t emulated_bf16(float x) {
  const uint32_t u = emulated_bits<uint32_t>(x), magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
  if (magnitude < 0x00800000) return (uint16_t)(u >> 16 & 0x8000);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
INLINE __m256bh _mm512_cvtneps_pbh(__m512 v) {
  uint16_t to[16];
  for (int i = 0; i < 16; i++) to[i] = emulated_bf16(v[i]);
  return emulated_load<__m256bh>(to);
}
INLINE __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  return emulated_join<__m512bh>(_mm512_cvtneps_pbh(low), _mm512_cvtneps_pbh(high));
}
// sum + the products of the high and of the low halves of each 32 bits.
INLINE __m256 _mm256_dpbf16_ps(__m256 sum, __m256bh x, __m256bh y) {
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000), normal = _mm256_set1_epi32(0x7f800000);
  const auto number = [&](__m256i v) __attribute__((always_inline)) {
    const __m256i zero = _mm256_cmpeq_epi32(_mm256_and_si256(v, normal), _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_andnot_si256(zero, v));
  };
  const __m256i a = (__m256i)x, b = (__m256i)y;
  sum = _mm256_fmadd_ps(number(_mm256_and_si256(a, mask)), number(_mm256_and_si256(b, mask)), sum);
  return _mm256_fmadd_ps(number(_mm256_slli_epi32(a, 16)), number(_mm256_slli_epi32(b, 16)), sum);
}
INLINE __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh x, __m512bh y) {
  return emulated_join<__m512>(
      _mm256_dpbf16_ps(emulated_half<__m256, 0>(sum), emulated_half<__m256bh, 0>(x),
                       emulated_half<__m256bh, 0>(y)),
      _mm256_dpbf16_ps(emulated_half<__m256, 1>(sum), emulated_half<__m256bh, 1>(x),
                       emulated_half<__m256bh, 1>(y)));
}
#undef INLINE

}  // namespace
}  // namespace mha_ext::cpu

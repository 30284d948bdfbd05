// What is faster on Intel's processors (measured on Golden Cove): there an instruction that
// multiplies by a power of two takes one turn, as a multiply-add does, rows of K and V that stand
// apart come from the second cache as fast as products want them, hardware foresees less of a long
// row, and few queries wait for instructions where lines are asked for in the order of memory.
namespace mha_ext::cpu {
namespace {

struct F32x16Intel : F32x16 {
  static constexpr int64_t kInPlaceBlocks = 4;
  static constexpr bool kHalfQueries = false;
  static constexpr int64_t kLongestAsked = 2048;
  static constexpr int64_t kAskedBeside = 8, kAskedInOrder = 0, kRowsInOrder = 1;
  static int64_t in_place_tiles() { return kInPlaceBlocks; }
  static constexpr Exponential kExponential = Exponential::kScale;
  static V fraction(V y) { return _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF); }  // y - floor(y)
  // p 2^floor(y), or 0 where x < least (NaN is not).
  static V scale_from(T least, V x, V p, V y) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, set(least), _CMP_NLT_UQ), p, y);
  }
};

struct F64x8Intel : F64x8 {
  static constexpr int64_t kInPlaceBlocks = F32x16Intel::kInPlaceBlocks;
  static constexpr bool kHalfQueries = F32x16Intel::kHalfQueries;
  static constexpr int64_t kLongestAsked = F32x16Intel::kLongestAsked;
  static constexpr int64_t kAskedBeside = F32x16Intel::kAskedBeside;
  static constexpr int64_t kAskedInOrder = F32x16Intel::kAskedInOrder;
  static constexpr int64_t kRowsInOrder = F32x16Intel::kRowsInOrder;
  static int64_t in_place_tiles() { return F32x16Intel::in_place_tiles(); }
  // 2^(k / 16), k modulo 16, for the k in the low bits of u; a 2^floor(n), or 0 where x < least.
  static V power(V u) {
    return _mm512_permutex2var_pd(_mm512_loadu_pd(Exp<T>::root), _mm512_castpd_si512(u),
                                  _mm512_loadu_pd(Exp<T>::root + kLanes));
  }
  static V from(T least, V x, V a, V n) {
    return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x, set(least), _CMP_NLT_UQ), a, n);
  }
};

}  // namespace
}  // namespace mha_ext::cpu

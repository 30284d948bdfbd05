// AVX-512: words of masks, and 16 random ones of dropout.
namespace mha_ext::cpu {
namespace {

struct Bytes64 {  // for tile_visibility
  static constexpr bool kWhole = true;
  static uint64_t nonzero(const char* p) {
    const __m512i x = _mm512_loadu_si512(p);
    return _mm512_test_epi8_mask(x, x);
  }
  static void transpose(uint64_t* words);
};

// 16 numbers: those at even places in the low halves of eight lanes, those at odd places likewise.
// The high halves may be anything, as multiplications do not read them.
struct U32x16 {
  using Bytes = Bytes64;
  __m512i even, odd;
  static constexpr int kLanes = 16;
  static U32x16 set(uint32_t x) {
    const __m512i all = _mm512_set1_epi32((int)x);
    return {all, all};
  }
  static U32x16 from(uint32_t first) {
    const __m512i all = _mm512_set1_epi32((int)first);
    return {
        _mm512_add_epi32(all, _mm512_setr_epi32(0, 0, 2, 0, 4, 0, 6, 0, 8, 0, 10, 0, 12, 0, 14, 0)),
        _mm512_add_epi32(all,
                         _mm512_setr_epi32(1, 0, 3, 0, 5, 0, 7, 0, 9, 0, 11, 0, 13, 0, 15, 0))};
  }
  // For the eight groups from `first` on of each of two rows, of which group and of which row each
  // number is: so that rows_at_least finds those of a row side by side.
  static U32x16 groups_of_rows(uint32_t first) {
    const __m512i even =
        _mm512_add_epi32(_mm512_set1_epi32((int)first),
                         _mm512_setr_epi32(0, 0, 0, 0, 1, 0, 1, 0, 2, 0, 2, 0, 3, 0, 3, 0));
    return {even, _mm512_add_epi32(even, _mm512_set1_epi32(4))};
  }
  static U32x16 rows_of_groups(uint32_t first) {
    const __m512i both =
        _mm512_add_epi32(_mm512_set1_epi32((int)first),
                         _mm512_setr_epi32(0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0));
    return {both, both};
  }
};
inline U32x16 exclusive_or(U32x16 a, U32x16 b, U32x16 c) {
  return {_mm512_ternarylogic_epi32(a.even, b.even, c.even, 0x96),
          _mm512_ternarylogic_epi32(a.odd, b.odd, c.odd, 0x96)};
}
inline void multiply(uint32_t factor, U32x16 x, U32x16* high, U32x16* low) {
  const __m512i f = _mm512_set1_epi32((int)factor);
  *low = {_mm512_mul_epu32(x.even, f), _mm512_mul_epu32(x.odd, f)};
  *high = {_mm512_srli_epi64(low->even, 32), _mm512_srli_epi64(low->odd, 32)};
}
// The low halves of x, and each of y after that of x.
inline __m512i low_halves(__m512i x, __m512i y) {
  return _mm512_mask_shuffle_epi32(x, 0xaaaa, y, _MM_PERM_CCAA);
}
// Bit i: the low (or high) 16 bits of number i are at least t.
inline void at_least(U32x16 x, uint32_t t, uint64_t* low, uint64_t* high) {
  const __m512i all = low_halves(x.even, x.odd);
  const uint32_t both = _mm512_cmpge_epu16_mask(all, _mm512_set1_epi16((short)t));
  *low = _pext_u32(both, 0x55555555);
  *high = _pext_u32(both, 0xaaaaaaaa);
}
// The same of all eight halves of four words, for the groups of two rows: bits of one row after the
// other.
inline void rows_at_least(const U32x16 (&word)[4], uint32_t t, uint64_t* rows) {
  const __m512i even = low_halves(word[0].even, word[1].even),
                even2 = low_halves(word[2].even, word[3].even),
                odd = low_halves(word[0].odd, word[1].odd),
                odd2 = low_halves(word[2].odd, word[3].odd), least = _mm512_set1_epi16((short)t);
  rows[0] = _mm512_cmpge_epu16_mask(_mm512_unpacklo_epi64(even, even2), least) |
            (uint64_t)_mm512_cmpge_epu16_mask(_mm512_unpacklo_epi64(odd, odd2), least) << 32;
  rows[1] = _mm512_cmpge_epu16_mask(_mm512_unpackhi_epi64(even, even2), least) |
            (uint64_t)_mm512_cmpge_epu16_mask(_mm512_unpackhi_epi64(odd, odd2), least) << 32;
}

}  // namespace
}  // namespace mha_ext::cpu

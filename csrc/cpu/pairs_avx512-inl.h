// bfloat16 operands as units of two neighbours along t, the first in the low half of 32 bits.
namespace mha_ext::cpu {
namespace {

// Units along t are padded with zeros to a multiple of kBlock.
template <int kBlock>
struct PairUnits {
  using Unit = uint32_t;
  static constexpr int kStep = 2, kUnitBlock = kBlock;
  static constexpr int kOther = 0x01 | 0x20 | 0x80;  // classes: quiet NaN, subnormal, NaN

  static int64_t units(int64_t n) { return round_up(n, 2 * kBlock) / 2; }
  static __m512i pair(__m256i first, __m256i second) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
  }
  static __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
  static __mmask16 lanes(int64_t left) {
    return left >= 16 ? (__mmask16)0xffff : left > 0 ? F32x16::first(left) : (__mmask16)0;
  }
  // 32 numbers of a row, of which there are `left`, or fewer: as pairs of neighbours.
  static __m512 load_row(const BFloat16* p, int64_t left) {
    if (left >= 32) return _mm512_loadu_ps((const float*)p);
    if (left <= 0) return _mm512_setzero_ps();
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((1u << left) - 1, p));
  }
  // The first numbers of pairs, and the second ones.
  static __m512 first(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16));
  }
  static __m512 second(__m512 x) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0xffff0000)));
  }
  // Lane i gets the products of pair i.
  static __m512 add_products(__m512 sum, __m512 x, __m512 y) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
  }
  static __m512 set(Unit x) { return _mm512_castsi512_ps(_mm512_set1_epi32((int)x)); }
  // (x[c], y[c]) for half of the 32 columns of two rows: c = 0 .. 3, 8 .. 11, 16 .. 19, 24 .. 27,
  // or (part 1) the others.
  static __m512 pair_columns_of(__m512 x, __m512 y, int part) {
    const __m512i a = _mm512_castps_si512(x), b = _mm512_castps_si512(y);
    return _mm512_castsi512_ps(part == 0 ? _mm512_unpacklo_epi16(a, b)
                                         : _mm512_unpackhi_epi16(a, b));
  }
  // Those columns back in their order.
  static void join(__m512 (&v)[2]) {
    F32x16::place(v, _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
  }
  // (x[c], y[c]) of two rows, `stride` apart, or of one and zeros, for 16 columns, or for 32 as
  // pair_columns_of has them, of which there are `left`.
  template <bool kBoth>
  static void load_two(const BFloat16* p, int64_t stride, int64_t left, __m512 (&v)[2]) {
    const __m512 x = load_row(p, left), y = kBoth ? load_row(p + stride, left) : F32x16::zero();
    for (int i = 0; i < 2; i++) v[i] = pair_columns_of(x, y, i);
  }
  template <bool kBoth>
  static void load_two(const BFloat16* p, int64_t stride, int64_t left, __m512 (&v)[1]) {
    const __mmask16 in = lanes(left);
    const __m256i y = kBoth ? _mm256_maskz_loadu_epi16(in, p + stride) : _mm256_setzero_si256();
    v[0] = _mm512_castsi512_ps(pair(_mm256_maskz_loadu_epi16(in, p), y));
  }
  // Sums of those columns, rounded. The instruction would take a subnormal number for zero, but
  // add_products gives none.
  static void store_sums(BFloat16* p, const __m512 (&sum)[2], int64_t left) {
    const __m512i all = both(sum[0], sum[1]);
    const __m512i order = _mm512_setr_epi32(0, 0, 4, 0, 1, 0, 5, 0, 2, 0, 6, 0, 3, 0, 7, 0);
    store_rounded(p, _mm512_permutex2var_epi64(all, order, all), left);
  }
  static void store_rounded(BFloat16* p, __m512i x, int64_t left) {
    if (left >= 32) return _mm512_storeu_si512(p, x);
    store_half(p, _mm512_castsi512_si256(x), left);
    if (left > 16) store_half(p + 16, _mm512_extracti64x4_epi64(x, 1), left - 16);
  }
  static void store_sums(BFloat16* p, const __m512 (&sum)[1], int64_t left) {
    store_half(p, rounded(sum[0]), left);
  }
  static void store_half(BFloat16* p, __m256i x, int64_t left) {
    if (left >= 16)
      _mm256_storeu_si256((__m256i*)p, x);
    else
      _mm256_mask_storeu_epi16(p, lanes(left), x);
  }
  // (from[r][c], from[r + 1][c]) for 16 columns; zero past the last row and column.
  static __m512i pair_at(const BFloat16* from, int64_t stride, int64_t r, int64_t rows,
                         __mmask16 in) {
    const BFloat16* p = r < rows ? from + r * stride : from;
    const __mmask16 in0 = r < rows ? in : (__mmask16)0, in1 = r + 1 < rows ? in : (__mmask16)0;
    return pair(_mm256_maskz_loadu_epi16(in0, p),
                _mm256_maskz_loadu_epi16(in1, r + 1 < rows ? p + stride : p));
  }

  // to[r / 2][c] = (from[r][c], from[r + 1][c])
  static void interleave(const BFloat16* from, int64_t stride, int64_t rows, int64_t columns,
                         Unit* to, int64_t ld) {
    for (int64_t u = 0; u < units(rows); u++)
      for (int64_t c = 0; c < columns; c += 16)
        _mm512_storeu_si512(to + u * ld + c,
                            pair_at(from + c, stride, 2 * u, rows, lanes(columns - c)));
  }
  // Rounded: `first` in the low half, `second` in the high one.
  static __m512i both(__m512 first, __m512 second) {
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
  }
  // (first[i], second[i]) from both of them.
  static __m512i pairs(__m512i both) {
    // 16-bit lanes 0, 16, 1, 17, …
    const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i order = _mm512_or_si512(
        count, _mm512_slli_epi32(_mm512_add_epi32(count, _mm512_set1_epi32(16)), 16));
    return _mm512_permutexvar_epi16(order, both);
  }
  static void store_pairs(__m512 first, __m512 second, Unit* to) {
    _mm512_storeu_si512(to, pairs(both(first, second)));
  }
  // to[r][c] = factor[r] * from[c][64 r], as transpose_out, for 32 columns at a time, which are
  // pairs before they find their places: half as much to move. How many columns are done.
  template <bool kPast>
  static int64_t transpose_rows(const float* from, const float* factor, int64_t rows,
                                int64_t columns, BFloat16* to, int64_t stride) {
    int64_t c = 0;
    for (; c + 32 <= columns; c += 32)
      for (int64_t r = 0; r < rows; r += 16) {
        const float* const at = from + c * kRow + r;
        BFloat16* const p = to + r * stride + c;
        const __m512 f = _mm512_loadu_ps(factor + r);
        __m512 block[16];
        __mmask16 other = 0;  // what the instruction rounds otherwise: NaN, subnormal numbers
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
          const __m512 x = _mm512_mul_ps(f, _mm512_loadu_ps(at + 2 * i * kRow));
          const __m512 y = _mm512_mul_ps(f, _mm512_loadu_ps(at + (2 * i + 1) * kRow));
          other |= _mm512_fpclass_ps_mask(x, kOther) | _mm512_fpclass_ps_mask(y, kOther);
          block[i] = _mm512_castsi512_ps(pairs(both(x, y)));
        }
        const int64_t height = min_of(16, rows - r);
        if (other & lanes(height)) [[unlikely]] {
          transpose_out<F32x16>(at, factor + r, height, 32, p, stride);
          continue;
        }
        F32x16::transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
          if (i < height) {
            if constexpr (kPast)
              F32x16::stream((float*)(p + i * stride), block[i]);
            else
              F32x16::store((float*)(p + i * stride), block[i]);
          }
      }
    return c;
  }
  // to[c] = factor from[c], as scale_out, 32 columns at a time.
  static void scale_row(const float* from, float factor, int64_t columns, BFloat16* to) {
    const __m512 f = _mm512_set1_ps(factor);
    for (int64_t c = 0; c < columns; c += 32) {
      const int64_t left = columns - c;
      const __m512 x = _mm512_mul_ps(f, _mm512_maskz_loadu_ps(lanes(left), from + c));
      const __m512 y = _mm512_mul_ps(f, _mm512_maskz_loadu_ps(lanes(left - 16), from + c + 16));
      if (_mm512_fpclass_ps_mask(x, kOther) | _mm512_fpclass_ps_mask(y, kOther)) [[unlikely]]
        scale_out<F32x16>(from + c, 0, factor, 1, min_of(32, left), to + c, 0);
      else
        store_rounded(to + c, both(x, y), left);
    }
  }
  // Each for itself: pairs of neighbouring lanes.
  static void store_each(__m512 first, __m512 second, Unit* to_first, Unit* to_second) {
    const __m512i v = both(first, second);
    _mm256_storeu_si256((__m256i*)to_first, _mm512_castsi512_si256(v));
    _mm256_storeu_si256((__m256i*)to_second, _mm512_extracti64x4_epi64(v, 1));
  }

  // to[n / 2][64 lanes] = (tile[n], tile[n + 1])
  static void pair_rows(const float* tile, int64_t keys, int64_t vectors, Unit* to) {
    for (int64_t n = 0; n < 2 * units(keys); n += 2)
      for (int64_t i = 0; i < vectors; i++) {
        const float* p = tile + n * kRow + i * 16;
        const __m512 first = n < keys ? _mm512_loadu_ps(p) : _mm512_setzero_ps();
        const __m512 second = n + 1 < keys ? _mm512_loadu_ps(p + kRow) : _mm512_setzero_ps();
        store_pairs(first, second, to + n / 2 * kRow + i * 16);
      }
  }
  // to[n][32 pairs of lanes], zero in the lanes past `rows`
  static void pair_columns(const float* tile, int64_t keys, int64_t rows, Unit* to) {
    for (int64_t n = 0; n < keys; n++)
      for (int64_t r = 0; r < 2 * units(rows); r += 16)
        _mm256_storeu_si256((__m256i*)(to + n * kRow / 2 + r / 2),
                            rounded(_mm512_maskz_loadu_ps(lanes(rows - r), tile + n * kRow + r)));
  }
};

}  // namespace
}  // namespace mha_ext::cpu

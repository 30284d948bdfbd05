// 16-bit storage types and what differs between float and double.
namespace mha_ext::cpu {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float bits_to_float(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}

inline float widen(BFloat16 x) { return bits_to_float((uint32_t)x.bits << 16); }
inline float widen(Float16 x) {
  const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // A subnormal half has no implicit bit: scale through a float product, which is exact either way.
  const float value = bits_to_float(magnitude << 13) * 0x1p112f;
  return bits_to_float(sign | float_to_bits(value));
}
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

// Round to nearest even, NaN stays NaN.
inline void narrow(float x, BFloat16* out) {
  const uint32_t u = float_to_bits(x);
  out->bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline void narrow(float x, Float16* out) {
  const uint32_t u = float_to_bits(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // rounds past 65504
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal half: let the float adder round at 2^-24
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  out->bits = (uint16_t)(sign | half);
}
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(double x, double* out) { *out = x; }

// a + b = sum + rest exactly (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B).
inline void exact_sum(float a, float b, float* sum, float* rest) {
  const float s = a + b, b_part = s - a, a_part = s - b_part;
  *sum = s;
  *rest = (a - a_part) + (b - b_part);
}

// lse = m + log l as high + low, to 2e-8. l is normal or 0. No branches: a
// loop over it becomes vectors. l = 2^n (1 + r) with 1 + r from sqrt(1/2) to sqrt(2), and
// log(1 + r) = r - r^2 / 2 + r^3 p(r), whose first term is exact, as is n times the first of the
// two parts of log 2.
inline void add_log_parts(float m, float l, float* high, float* low) {
  constexpr float kLog2High = 0.693359375f, kLog2Low = -2.12194440e-4f;
  const int32_t above = (int32_t)float_to_bits(l) - 0x3f3504f3, n = above >> 23;
  const float r = bits_to_float((uint32_t)((above & 0x7fffff) + 0x3f3504f3)) - 1, z = r * r;
  float p = -0.0763120726f;
  p = p * r + 0.128549218f;
  p = p * r - 0.132078886f;
  p = p * r + 0.141900063f;
  p = p * r - 0.166165233f;
  p = p * r + 0.200016156f;
  p = p * r - 0.25001061f;
  p = p * r + 0.333333284f;
  const float count = (float)n;
  const float tail = (r * z * p - 0.5f * z) + count * kLog2Low + (l - l);  // NaN stays NaN
  float sum, rest[3];
  exact_sum(m, count * kLog2High, &sum, &rest[0]);
  exact_sum(sum, r, &sum, &rest[1]);
  exact_sum(sum, tail, &sum, &rest[2]);
  const float small = rest[0] + rest[1] + rest[2];
  *high = sum + small;
  *low = small - (*high - sum);
}
inline void add_log_parts(double m, double l, double* high, double* low) {
  const double rest = log(l);
  const bool ordered = fabs(m) >= fabs(rest);
  const double large = ordered ? m : rest, small = ordered ? rest : m;
  *high = m + rest;
  *low = (large - *high) + small;
}

// The same for some rows; `none` where l = 0.
template <class T>
void add_logs(int64_t count, const T* m, const T* l, T none, T* high, T* low) {
  for (int64_t r = 0; r < count; r++) add_log_parts(m[r], l[r], high + r, low + r);
  for (int64_t r = 0; r < count; r++)
    if (l[r] == 0) {
      high[r] = none;
      low[r] = 0;
    }
}

template <class T>
void add_log(T m, T l, T* high, T* low) {
  add_logs<T>(1, &m, &l, -(T)INFINITY, high, low);
}

// e^x = 2^n e^r with n = round(x log2 e), |r| <= ln(2) / 2. The polynomials minimise the largest
// relative error of e^r (9.5e-8 for float with e^0 = 1 exactly, 4e-18 for double). `magic` rounds n
// to an integer whose low bits are n + the exponent bias, so that a shift makes 2^n; from `lowest`
// down that is exactly 0.
// Where a permutation of two registers can look up one of 32 numbers (double: of 16), e^x = 2^(k /
// 32) 2^r, k = round(32 x log2 e). power[j] is 2^(j / 32) less what j, the low bits of k, adds to
// the exponent when k is shifted to its place; power_magic makes k the low bits of a sum.
// power_coefficient is for (2^r - 1) / r and minimises the relative error of 2^r (5.4e-8 for float,
// 9e-18 for double). Below power_lowest, where the result would be subnormal, it is 0.
// Where one register is looked up, the same with 8 numbers (double: with 2, for each half of a
// register): short_coefficient, 2.7e-8 and 2.5e-17. From short_lowest down it is exactly 0, and
// where the result would be subnormal, between 0 and e^x.
// Where an instruction multiplies by 2^floor(y), e^x = 2^floor(y) 2^f, y = x log2 e, f from 0 to 1.
// scale_coefficient is for (2^f - 1) / f and minimises the relative error of 2^f (8.3e-8); y is
// rounded, which adds |x| 2^-24 at most.
enum class Exponential { kPolynomial, kShortTable, kTable, kScale };
template <class T>
struct Exp;
template <>
struct Exp<float> {
  static constexpr float magic = 12582912.0f + 127.0f, lowest = -88.2f;
  static constexpr float lowest_finite = -3.40282347e38f;
  static constexpr float log2e = 1.44269504f, ln2_high = 0.693147182f, ln2_low = -1.90465421e-9f;
  static constexpr int degree = 5;
  static constexpr float coefficient[] = {1.0f,         0.999999707f,  0.499991492f,
                                          0.166676366f, 0.0418979754f, 0.00829030616f};
  static constexpr float power_magic = 393216.0f, power_lowest = -87.33f;
  static constexpr int power_degree = 2;
  static constexpr float power_coefficient[] = {0.693157399f, 0.240231819f};
  static constexpr int scale_degree = 5;
  static constexpr float scale_coefficient[] = {0.693151295f, 0.240164459f, 0.0557999127f,
                                                0.00901702978f, 0.00186713017f};
  static constexpr uint32_t power[] = {
      0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3,
      0x3f78f4f0, 0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b,
      0x3f75583f, 0x3f7523f6, 0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a,
      0x3f75b9be, 0x3f76248c, 0x3f76a81e, 0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907,
      0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3};
  static constexpr float short_magic = 1572864.0f, short_lowest = -88.0297f;
  static constexpr int short_degree = 3;
  static constexpr float short_coefficient[] = {0.69314724f, 0.24025764f, 0.055496223f};
  alignas(32) static constexpr uint32_t short_power[] = {0x3f800000, 0x3f7b95c2, 0x3f7837f0,
                                                         0x3f75fed7, 0x3f7504f3, 0x3f75672a,
                                                         0x3f7744fd, 0x3f7ac0c7};
};
template <>
struct Exp<double> {
  static constexpr double magic = 6755399441055744.0 + 1023.0, lowest = -709.2;
  static constexpr double lowest_finite = -1.7976931348623157e308;
  static constexpr double log2e = 1.4426950408889634, ln2_high = 0.69314718055994529,
                          ln2_low = 2.3190468138462996e-17;
  static constexpr int degree = 11;
  static constexpr double coefficient[] = {1.0,
                                           1.00000000000000003,
                                           0.50000000000000177032,
                                           0.16666666666666168167,
                                           0.041666666666492628989,
                                           0.0083333333335594517973,
                                           0.001388888895126120425,
                                           0.00019841269432434438281,
                                           0.000024801486481283498188,
                                           2.7557622652024488477e-6,
                                           2.7632308224452544435e-7,
                                           2.4994293345730463606e-8};
  static constexpr double power_magic = 422212465065984.0, power_lowest = -708.39;
  static constexpr int power_degree = 6;
  static constexpr double power_coefficient[] = {
      0.69314718055994688866,   0.24022650695910167031,   0.055504108651954580178,
      0.0096181291020534451435, 0.0013333820232909133894, 0.0001540421172845514689};
  static constexpr uint64_t power[] = {
      0x3ff0000000000000, 0x3fefb5586cf9890f, 0x3fef72b83c7d517b, 0x3fef387a6e756238,
      0x3fef06fe0a31b715, 0x3feedea64c123422, 0x3feebfdad5362a27, 0x3feeab07dd485429,
      0x3feea09e667f3bcd, 0x3feea11473eb0187, 0x3feeace5422aa0db, 0x3feec49182a3f090,
      0x3feee89f995ad3ad, 0x3fef199bdd85529c, 0x3fef5818dcfba487, 0x3fefa4afa2a490da};
  static constexpr double root[] = {// 2^(j / 16)
                                    1.0,
                                    1.0442737824274138,
                                    1.0905077326652577,
                                    1.1387886347566916,
                                    1.189207115002721,
                                    1.241857812073484,
                                    1.2968395546510096,
                                    1.3542555469368927,
                                    1.4142135623730951,
                                    1.4768261459394993,
                                    1.5422108254079407,
                                    1.6104903319492543,
                                    1.681792830507429,
                                    1.7562521603732995,
                                    1.8340080864093424,
                                    1.9152065613971474};
  static constexpr double short_magic = 3377699720527872.0, short_lowest = -709.0895657128241;
  static constexpr int short_degree = 9;
  static constexpr double short_coefficient[] = {
      0.693147180559945250353,     0.240226506959093249385,      0.055504108664835692799,
      0.00961812910879161970401,   0.00133335581382557969702,    0.000154035247623844917819,
      0.0000152527498668248289784, 0.00000132262248707732996703, 1.01706252472715911399e-7};
  alignas(32) static constexpr uint64_t short_power[] = {0x3ff0000000000000, 0x3feea09e667f3bcd,
                                                         0x3ff0000000000000, 0x3feea09e667f3bcd};
};

}  // namespace
}  // namespace mha_ext::cpu

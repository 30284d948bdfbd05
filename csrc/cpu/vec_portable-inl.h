// 128-bit vectors in the language extension of g++ and clang: SSE2, NEON, or whatever the machine
// has.
namespace mha_ext::cpu {
namespace {

struct U32x4 {
  using Bytes = PlainBytes;
  typedef uint32_t Vector __attribute__((vector_size(16)));
  Vector v;
  static constexpr int kLanes = 4;
  static U32x4 set(uint32_t x) { return {Vector{x, x, x, x}}; }
  static U32x4 from(uint32_t first) { return {Vector{first, first + 1, first + 2, first + 3}}; }
};
inline U32x4 exclusive_or(U32x4 a, U32x4 b, U32x4 c) { return {a.v ^ b.v ^ c.v}; }
inline void multiply(uint32_t factor, U32x4 x, U32x4* high, U32x4* low) {
  for (int i = 0; i < 4; i++) {
    const uint64_t product = (uint64_t)factor * x.v[i];
    high->v[i] = (uint32_t)(product >> 32);
    low->v[i] = (uint32_t)product;
  }
}

// Bit i: the low (or high) 16 bits of number i are at least t.
inline void at_least(U32x4 x, uint32_t t, uint64_t* low, uint64_t* high) {
  *low = *high = 0;
  for (int i = 0; i < 4; i++) {
    *low |= (uint64_t)((x.v[i] & 0xffff) >= t) << i;
    *high |= (uint64_t)(x.v[i] >> 16 >= t) << i;
  }
}

template <class Scalar, class Integer, int N>
struct Portable {
  using T = Scalar;
  typedef Scalar V __attribute__((vector_size(16)));
  typedef Integer M __attribute__((vector_size(16)));
  using U = U32x4;
  using Half = Portable;
  static constexpr int kLanes = N, kRegisters = 16;
  static constexpr int64_t kAskedBeside = 0, kAskedInOrder = 0, kRowsInOrder = 1;
  static constexpr int kAskedInto = 3;

  static V zero() { return V{}; }
  static V set(T x) { return x - V{}; }
  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V fma(V a, V b, V c) { return a * b + c; }
  static V max(V a, V b) { return a > b ? a : b; }  // b where either is NaN
  static V min(V a, V b) { return a < b ? a : b; }
  static M gt(V a, V b) { return a > b; }
  static M eq(V a, V b) { return a == b; }
  static M mask(uint64_t bits) {
    M m{};
    for (int i = 0; i < N; i++) m[i] = -(Integer)(bits >> i & 1);
    return m;
  }
  static uint64_t bits(M m) {
    uint64_t bits = 0;
    for (int i = 0; i < N; i++) bits |= (uint64_t)(m[i] & 1) << i;
    return bits;
  }
  static V select(M m, V a, V b) { return m ? a : b; }
  static constexpr Exponential kExponential = Exponential::kPolynomial;
  static V power_of_two(V magic) {
    M u;
    __builtin_memcpy(&u, &magic, 16);
    u = u << (sizeof(T) == 4 ? 23 : 52);
    V v;
    __builtin_memcpy(&v, &u, 16);
    return v;
  }
  static V load(const T* p) {
    V v;
    __builtin_memcpy(&v, p, 16);
    return v;
  }
  static void store(T* p, V v) { __builtin_memcpy(p, &v, 16); }
  template <class S>
  static V load(const S* p) {
    return load(p, N);
  }
  template <class S>
  static void store(S* p, V v) {
    store(p, v, N);
  }
  template <class S>
  static V load(const S* p, int64_t n) {
    V v{};
    for (int64_t i = 0; i < n; i++) v[i] = (T)widen(p[i]);
    return v;
  }
  template <class S>
  static void store(S* p, V v, int64_t n) {
    for (int64_t i = 0; i < n; i++) put(v[i], p + i);
  }
  static constexpr int kPiece = N;
  template <int kPieces, int kGroups, class Row>
  static void load_columns(const Row& row, V* r) {
    static_assert(kPieces == 1 && kGroups == 1);
    V block[N];
    for (int i = 0; i < N; i++) block[i] = load(row(i));
    transpose(block);
    for (int i = 0; i < N; i++) r[i] = block[i];
  }
  static void transpose(V (&r)[N]) {
    for (int i = 0; i < N; i++)
      for (int j = 0; j < i; j++) {
        const T t = r[i][j];
        r[i][j] = r[j][i];
        r[j][i] = t;
      }
  }

  // Lane i is the sum of the lanes of r[i].
  static V sum_each(V (&r)[N]) {
    V sums{};
    for (int i = 0; i < N; i++) sums[i] = sum(r[i]);
    return sums;
  }
  static T sum(V v) {
    if constexpr (N == 4) return (v[0] + v[2]) + (v[1] + v[3]);
    return v[0] + v[1];
  }
  static T largest(V v) {  // no lane is NaN
    T top = v[0];
    for (int i = 1; i < N; i++) top = v[i] > top ? v[i] : top;
    return top;
  }

 private:
  template <class S>
  static void put(T x, S* p) {
    narrow(x, p);
  }
  static void put(double x, float* p) { *p = (float)x; }
};

using F32x4 = Portable<float, int32_t, 4>;
using F64x2 = Portable<double, int64_t, 2>;

}  // namespace
}  // namespace mha_ext::cpu

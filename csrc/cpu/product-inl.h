// One matrix product serves every kernel:  C[m, lane] (+)= sum_t A(m, t) X[t, lane].
// X holds vectors (query rows, or the width of Q, dO), A is broadcast element by element straight
// from memory. A unit is what one broadcast brings: a number, or a pair of bfloat16 neighbours
// along t.
namespace mha_ext::cpu {
namespace {

// A(m, t) at data + m * m_stride + t * t_stride, strides in bytes. Functions take it by reference:
// a copy reads at once what has just been written in parts, for which a processor waits.
struct Operand {
  const char* data;
  int64_t m_stride, t_stride;
};

constexpr int64_t kLine = 64;  // bytes that memory hands over together

// Memory that will be wanted soon. Asked for at once it would fill the few buffers that wait for
// lines and hold up everything else; so products ask for a line with each step.
class Ahead {
 public:
  // Hardware foresees most of a row that is longer than this, on some processors.
  static constexpr int64_t kLongest = 512, kAnyLength = INT64_MAX;
  // `longest`: rows of up to so many bytes are asked for all the same, but, unless all are, not
  // where they lie whole pairs of pages apart: such lines share few sets of a cache.
  explicit Ahead(int64_t longest = kLongest) : longest_(longest) {}
  // `rows` rows of `bytes` bytes, `stride` bytes apart; forgotten where many are waiting, and where
  // rows are too long, unless `any_length` is wanted.
  void add(const void* first, int64_t stride, int64_t bytes, int64_t rows,
           bool any_length = false) {
    const bool apart = stride % kTwoPages == 0 && longest_ != kAnyLength;
    if (rows <= 0 || bytes <= 0 || end_ - begin_ == kMost) return;
    if (bytes > (apart ? kLongest : longest_) && !any_length) return;
    const bool joined = stride == bytes;  // the rows follow one another
    pieces_[end_++ % kMost] = {(const char*)first, stride, joined ? bytes * rows : bytes,
                               joined ? 1 : rows};
  }
  bool waiting() const { return begin_ != end_ || rows_.rows != 0 || at_.line != at_.end; }
  // What is left of it, at once.
  void ask_rest() {
    while (waiting()) ask(at_);
  }

  // Lines of a row. A loop keeps them in registers: it begins where the last one has stopped, asks
  // for one with each step, and says in the end where it stopped.
  struct Lines {
    const char *line, *end;
  };
  Lines lines() const { return at_; }
  void stopped(Lines at) { at_ = at; }
  [[gnu::always_inline]] void ask(Lines& at) {
    if (at.line == at.end) {
      if (rows_.rows == 0) [[unlikely]]
        next_piece(at.line);
      at.line = rows_.row - (uintptr_t)rows_.row % kLine;
      at.end = rows_.row + rows_.bytes + (-(uintptr_t)(rows_.row + rows_.bytes)) % kLine;
      rows_.row += rows_.stride;
      rows_.rows--;
    }
    __builtin_prefetch(at.line, 0, 2);
    at.line += kLine;
  }

 private:
  [[gnu::noinline]] void next_piece(const char* line) {
    rows_ = begin_ == end_ ? Piece{line - kLine, 0, kLine, 1} : pieces_[begin_++ % kMost];
  }

  static constexpr int64_t kTwoPages = 8192;
  static constexpr unsigned kMost = 16;
  struct Piece {
    const char* row;
    int64_t stride, bytes, rows;
  };
  Piece pieces_[kMost];
  unsigned begin_ = 0, end_ = 0;
  Piece rows_{nullptr, 0, 0, 0};
  Lines at_{nullptr, nullptr};
  int64_t longest_;
};

// Whether half a vector is less work than a whole one.
template <class X>
constexpr bool has_half = X::Half::kLanes < X::kLanes;
// Whether so many lanes leave so few for their last vector that half of one is enough.
template <class X>
bool ends_in_half(int64_t lanes) {
  return has_half<X> && lanes % X::kLanes > 0 && lanes % X::kLanes <= X::Half::kLanes;
}

template <class X>
struct Multiply {
  using Half = Multiply<typename X::Half>;
  using Unit = typename X::T;
  using Vector = typename X::V;
  static constexpr int kStep = 1;                      // numbers a unit
  static constexpr int kUnitBlock = 1, kRowBlock = 1;  // counts of t and of m are padded to these
  struct Session {};  // what a thread sets up before its first product
  static Vector load(const Unit* p) { return X::load(p); }
  static Vector broadcast(const char* p) {
    Unit u;
    __builtin_memcpy(&u, p, sizeof u);
    return X::set(u);
  }
  static typename X::V accumulate(typename X::V sum, Vector x, Vector a) {
    return X::fma(x, a, sum);
  }
};

// Along t: A walks through contiguous units (rows of K, of a score tile). Along m: A(m, t), A(m +
// 1, t) are neighbours (columns of V). One of the two strides is then known, which keeps the
// addresses in few registers.
enum class Contiguous { kAlongT, kAlongM };
// C = sum; C = sum and top[lane] = the largest of a lane; C += sum; C = factor sum; C += factor
// sum. Adding a sum rounds less than adding its terms to C one by one, as a matrix unit does.
enum class Update { kStore, kStoreTop, kAddSum, kStoreScaled, kAddScaled };

template <class X, class Dot, int MR, int NV, Contiguous kA, Update kC, bool kAsk>
[[gnu::always_inline]] inline void micro(Operand a, int64_t count, const typename Dot::Unit* x,
                                         int64_t ldx, typename X::T* c, int64_t ldc,
                                         typename X::T factor, typename X::T* top, Ahead* ahead) {
  typename X::V sum[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) sum[m][i] = X::zero();
  const int64_t m_stride = kA == Contiguous::kAlongM ? (int64_t)sizeof(*x) : a.m_stride;
  const int64_t t_stride = kA == Contiguous::kAlongT ? (int64_t)sizeof(*x) : a.t_stride;
  const auto add = [&](int m, int i, typename Dot::Vector v,
                       const char* from) __attribute__((always_inline)) {
    sum[m][i] = Dot::accumulate(sum[m][i], v, Dot::broadcast(from + m * m_stride));
  };
  [[maybe_unused]] typename X::V largest[NV];
  [[maybe_unused]] const typename X::V f = X::set(factor);
  const auto finish = [&](int m, int i) __attribute__((always_inline)) {
    typename X::T* to = c + m * ldc + i * X::kLanes;
    typename X::V v = sum[m][i];
    if constexpr (kC == Update::kStoreTop) largest[i] = X::max(v, largest[i]);
    if constexpr (kC == Update::kStoreScaled) v = X::mul(f, v);
    if constexpr (kC == Update::kAddScaled) v = X::fma(f, v, X::load(to));
    if constexpr (kC == Update::kAddSum) v = X::add(X::load(to), v);
    X::store(to, v);
  };
  // As measured on Zen 3, with AVX2: a store whose sum has waited takes a turn of the
  // multiply-adds, since it reads a register; one whose sum has just come out takes none. A store
  // goes out in a cycle, and two sums come out: so the last step of the first vector runs beside
  // the last but one of the second.
  [[maybe_unused]] Ahead::Lines lines{};
  if constexpr (kAsk) lines = ahead->lines();
  constexpr bool kBeside = X::kRegisters == 16 && NV == 2 && MR > 1;
  const bool beside = kBeside && count >= 2;
  const auto step = [&]() __attribute__((always_inline)) {
    typename Dot::Vector v[NV];
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) v[i] = Dot::load(x + i * X::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      const typename Dot::Vector u = Dot::broadcast(a.data + m * m_stride);
#pragma GCC unroll 4
      for (int i = 0; i < NV; i++) sum[m][i] = Dot::accumulate(sum[m][i], v[i], u);
    }
    if constexpr (kAsk) ahead->ask(lines);
    x += ldx;
    a.data += t_stride;
  };
  // By the compiler: where two steps stand in a loop it moves sums from register to register.
  if constexpr (X::kRegisters == 16) {
#pragma GCC unroll 2
    for (int64_t t = beside ? 2 : 0; t < count; t++) step();
  } else {
    for (int64_t t = 0; t < count; t++) step();
  }
  if constexpr (kAsk && !kBeside) ahead->stopped(lines);
  if constexpr (kC == Update::kStoreTop)
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) largest[i] = X::load(top + i * X::kLanes);
  if constexpr (kBeside) {
    if (beside) {
      const char* const last = a.data + t_stride;
      const typename Dot::Vector v0 = Dot::load(x), v1 = Dot::load(x + X::kLanes);
      const typename Dot::Vector last0 = Dot::load(x + ldx);
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) add(m, 0, v0, a.data);
      if constexpr (kAsk) ahead->ask(lines);
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        add(m, 0, last0, last);
        finish(m, 0);
        add(m, 1, v1, a.data);
      }
      if constexpr (kAsk) ahead->ask(lines);
      const typename Dot::Vector last1 = Dot::load(x + ldx + X::kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        add(m, 1, last1, last);
        finish(m, 1);
      }
    }
  }
  if constexpr (kAsk && kBeside) ahead->stopped(lines);
  if (!beside)
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int i = 0; i < NV; i++) finish(m, i);
  if constexpr (kC == Update::kStoreTop)
#pragma GCC unroll 4
    for (int i = 0; i < NV; i++) X::store(top + i * X::kLanes, largest[i]);
}

// All m for NV vectors of lanes. 24 (with 16 registers: 12) sums in flight hide the latency of the
// multiply-add. The largest pieces ask ahead.
template <class X, class Dot, int NV, Contiguous kA, Update kC>
__attribute__((noinline)) void panel(const Operand& from, int64_t rows, int64_t count,
                                     const typename Dot::Unit* x, int64_t ldx, typename X::T* c,
                                     int64_t ldc, Ahead* ahead, typename X::T factor,
                                     typename X::T* top) {
  constexpr int kMost = X::kRegisters == 32 ? (NV == 4 ? 6 : NV == 3 ? 8 : 12) : (NV == 2 ? 6 : 12);
  Operand a = from;
  const int64_t m_stride = kA == Contiguous::kAlongM ? (int64_t)sizeof(*x) : a.m_stride;
  const auto at_a_time = [&]<int kRows>() __attribute__((always_inline)) {
    while (rows >= kRows) {
      constexpr bool kAsk = 2 * kRows >= kMost;
      if (kAsk && ahead && ahead->waiting())
        micro<X, Dot, kRows, NV, kA, kC, kAsk>(a, count, x, ldx, c, ldc, factor, top, ahead);
      else
        micro<X, Dot, kRows, NV, kA, kC, false>(a, count, x, ldx, c, ldc, factor, top, nullptr);
      a.data += kRows * m_stride;
      c += kRows * ldc;
      rows -= kRows;
    }
  };
  if constexpr (NV == 1 && kA == Contiguous::kAlongT) {
    // In equal parts: a last part of few sums would wait for the latency of each.
    const int64_t parts = (rows + kMost - 1) / kMost,
                  part = (rows + parts - 1) / (parts ? parts : 1);
    if (part > 11) at_a_time.template operator()<12>();
    if (part > 10) at_a_time.template operator()<11>();
    if (part > 9) at_a_time.template operator()<10>();
    if (part > 8) at_a_time.template operator()<9>();
    if (part > 7) at_a_time.template operator()<8>();
    if (part > 6) at_a_time.template operator()<7>();
    if (part > 5) at_a_time.template operator()<6>();
    if (part > 4) at_a_time.template operator()<5>();
    if (part > 3) at_a_time.template operator()<4>();
    if (part > 2) at_a_time.template operator()<3>();
  }
  at_a_time.template operator()<kMost>();
  if constexpr (kMost > 8) at_a_time.template operator()<8>();
  if constexpr (kMost > 4) at_a_time.template operator()<4>();
  at_a_time.template operator()<2>();
  at_a_time.template operator()<1>();
}

template <class X, class Dot, Contiguous kA, Update kC>
void product_vectors(const Operand& a, int64_t rows, int64_t count, const typename Dot::Unit* x,
                     int64_t ldx, int64_t vectors, typename X::T* c, int64_t ldc, Ahead* ahead,
                     typename X::T factor, typename X::T* top) {
  const auto panels = [&]<int NV>() {
    for (; vectors >= NV; vectors -= NV, x += NV * X::kLanes, c += NV * X::kLanes) {
      panel<X, Dot, NV, kA, kC>(a, rows, count, x, ldx, c, ldc, ahead, factor, top);
      if constexpr (kC == Update::kStoreTop) top += NV * X::kLanes;
    }
  };
  if constexpr (X::kRegisters == 32) {
    panels.template operator()<4>();
    panels.template operator()<3>();
  }
  panels.template operator()<2>();
  panels.template operator()<1>();
}

// C[0:rows, 0:vectors * lanes], `count` units along t.
template <class X, class Dot, Contiguous kA, Update kC>
void product(const Operand& a, int64_t rows, int64_t count, const typename Dot::Unit* x,
             int64_t ldx, int64_t vectors, typename X::T* c, int64_t ldc, Ahead* ahead = nullptr,
             typename X::T factor = 1, typename X::T* top = nullptr) {
  if constexpr (Dot::kRowBlock > 1)  // a matrix unit does whole tiles
    Dot::template product<kC>(a, rows, count, x, ldx, vectors, c, ldc);
  else
    product_vectors<X, Dot, kA, kC>(a, rows, count, x, ldx, vectors, c, ldc, ahead, factor, top);
}

// The same for `columns` lanes, of vectors or of halves.
template <class X, class Dot, Contiguous kA, Update kC>
void product_columns(const Operand& a, int64_t rows, int64_t count, const typename Dot::Unit* x,
                     int64_t ldx, int64_t columns, typename X::T* c, int64_t ldc,
                     Ahead* ahead = nullptr, typename X::T factor = 1,
                     typename X::T* top = nullptr) {
  if constexpr (has_half<X> && Dot::kRowBlock == 1) {
    if (ends_in_half<X>(columns)) {
      const int64_t whole = columns / X::kLanes, at = whole * X::kLanes;
      product_vectors<X, Dot, kA, kC>(a, rows, count, x, ldx, whole, c, ldc, ahead, factor, top);
      return panel<typename X::Half, typename Dot::Half, 1, kA, kC>(
          a, rows, count, x + at, ldx, c + at, ldc, nullptr, factor, top ? top + at : nullptr);
    }
  }
  product<X, Dot, kA, kC>(a, rows, count, x, ldx, (columns + X::kLanes - 1) / X::kLanes, c, ldc,
                          ahead, factor, top);
}

// `count` rounds of independent multiply-adds on registers only: the ceiling of this instruction.
// As many as a product has sums: on Zen 5 a dozen products of pairs would wait for one another.
template <class X, class Dot>
double multiply_add_vectors(int64_t count) {
  constexpr int kSums = X::kRegisters == 32 ? 24 : 12;
  volatile typename X::T one = 1, sink;
  typename X::T buffer[X::kLanes];
  char units[sizeof(typename Dot::Unit)] = {};
  typename X::V sum[kSums];
  for (int i = 0; i < kSums; i++) sum[i] = X::set(one + i);
  const typename Dot::Vector x = Dot::broadcast(units), a = Dot::broadcast(units);
  for (int64_t n = 0; n < count; n++)
#pragma GCC unroll 24
    for (int i = 0; i < kSums; i++) sum[i] = Dot::accumulate(sum[i], x, a);
  for (int i = 1; i < kSums; i++) sum[0] = X::add(sum[0], sum[i]);
  X::store(buffer, sum[0]);
  sink = buffer[0];
  (void)sink;
  return 2.0 * (double)count * kSums * X::kLanes * Dot::kStep;
}
template <class X, class Dot>
double multiply_add(int64_t count) {
  if constexpr (Dot::kRowBlock > 1)
    return Dot::multiply_add(count);
  else
    return multiply_add_vectors<X, Dot>(count);
}

}  // namespace
}  // namespace mha_ext::cpu

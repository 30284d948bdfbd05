// float32 and float16 products on a matrix unit of bfloat16. A float32 is the sum of three numbers
// of 8 bits each, its limbs; of the nine products of two the six that float32 can see are added up.
// So sums are as exact as those of multiply-adds, and six products of the unit take less time. A
// float16 is the sum of two; of what is a float32 there two keep 16 bits, and three products of
// four are added up.
namespace mha_ext::cpu {
namespace {

constexpr int64_t kLimbsStep = 32;  // numbers along t are padded to these, rows of A to half of it

// What of an operand is multiplied before it is cut, so that subnormal numbers keep all bits.
constexpr float kLimbsScale = 16777216;  // 2^24

// In limbs numbers are smaller than this, and dS than that: then no sum of theirs grows beyond
// what float32 holds. What is not *usual* is 0 in them.
constexpr float kUnusual = 65536, kUnusualGradient = 18014398509481984;  // 2^16, 2^54
inline bool usual(float x, float limit = kUnusual) { return -limit < x && x < limit; }
struct TakenIfUsual {
  template <class S>
  static bool takes(S x) {
    return usual(widen(x));
  }
};
template <class X>
typename X::M usual_lanes(typename X::V x, float limit = kUnusual) {
  return X::gt(X::set(limit), X::max(x, X::sub(X::zero(), x)));
}
template <class X, class S>
typename X::V load_or_zero(const S* p, int64_t left) {
  return left >= X::kLanes ? X::load(p) : left > 0 ? X::load(p, left) : X::zero();
}

template <class K>
int64_t limbs_size(int64_t along, int64_t across) {
  return K::kLimbs * round_up(along, kLimbsStep) / 2 * round_up(across, kLimbsStep / 2);
}

// x times factor, and 0 in place of what is not usual; `all_usual` says where all were.
template <class X>
[[gnu::always_inline]] inline typename X::V usual_or_zero(typename X::V x, typename X::V factor,
                                                          uint64_t& all_usual) {
  const typename X::M in = usual_lanes<X>(x);
  all_usual &= X::bits(in);
  return X::select(in, X::mul(factor, x), X::zero());
}

// The limbs of 32 numbers: in their order, or each of the first with one of the second. Of two
// operands that meet one is rounded.
template <class K, bool kInOrder, bool kRounded = true>
[[gnu::always_inline]] inline void store_limbs(typename K::X::V first, typename K::X::V second,
                                               int64_t plane, uint32_t* to) {
  typename K::X::V x[K::kLimbs], y[K::kLimbs];
  K::Dot::template cut<kRounded>(first, x);
  K::Dot::template cut<kRounded>(second, y);
  kInOrder ? K::Dot::store_row(x, y, plane, to) : K::Dot::store_pair(x, y, plane, to);
}

// Tiles along t one after the other, for each 16 rows of A or lanes of X; `count` numbers along t.
template <class K>
void lay_out(int64_t count, Limbs& to) {
  to.along = ceil_div(count, kLimbsStep);
  to.step = K::kLimbs * to.plane;
  to.across = max_of(to.along, to.room) * to.step;
}
// A(m, t) = factor scale rows[m][t], `usual` or not after the scale. Numbers along t are in pairs
// with those 16 later: no number has to move to another lane.
template <class K, class S>
void rows_in_limbs(const S* from, int64_t stride, int64_t rows, int64_t columns, float factor,
                   Limbs& to, float scale = 1) {
  using X = typename K::X;
  const typename X::V f = X::set(factor), first_factor = X::set(scale);
  uint64_t all_usual = first_bits(X::kLanes);
  lay_out<K>(columns, to);
  for (int64_t r = 0; r < round_up(rows, X::kLanes); r++)
    for (int64_t c = 0; c < columns; c += kLimbsStep) {
      const S* const p = from + r * stride + c;
      const auto part = [&](int64_t at) __attribute__((always_inline)) {
        const int64_t left = r < rows ? columns - c - at : 0;
        return usual_or_zero<X>(X::mul(first_factor, load_or_zero<X>(p + at, left)), f, all_usual);
      };
      store_limbs<K, false>(part(0), part(X::kLanes), to.plane,
                            to.at(c / kLimbsStep, r / X::kLanes) + r % X::kLanes * to.row);
    }
  to.unusual = all_usual != first_bits(X::kLanes);
}
// block[c] = factor times column c of 16 rows, of which `height` are there, and as many columns,
// of which there are `width`.
template <class X, class S>
[[gnu::always_inline]] inline void load_turned(const S* from, int64_t stride, int64_t height,
                                               int64_t width, typename X::V factor,
                                               uint64_t& all_usual,
                                               typename X::V (&block)[X::kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < X::kLanes; i++)
    block[i] = usual_or_zero<X>(load_or_zero<X>(from + i * stride, i < height ? width : 0), factor,
                                all_usual);
  X::transpose(block);
}
// Blocks of rows that are turned. kRowsAlongT: A(m, t) = factor rows[t][m], in pairs of neighbours
// along t; else X[t][lane] = factor rows[lane][t], in pairs as rows_in_limbs has them.
template <class K, bool kRowsAlongT, class S>
void turned_in_limbs(const S* from, int64_t stride, int64_t rows, int64_t columns, float factor,
                     Limbs& to) {
  using X = typename K::X;
  const typename X::V f = X::set(factor);
  const int64_t along = kRowsAlongT ? rows : columns, across = kRowsAlongT ? columns : rows;
  uint64_t all_usual = first_bits(X::kLanes);
  lay_out<K>(along, to);
  for (int64_t m = 0; m < across; m += X::kLanes)
    for (int64_t t = 0; t < along; t += kLimbsStep) {
      typename X::V block[2][X::kLanes];
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const int64_t first = t + half * X::kLanes;
        const int64_t r = kRowsAlongT ? first : m, c = kRowsAlongT ? m : first;
        load_turned<X>(from + r * stride + c, stride, rows - r, columns - c, f, all_usual,
                       block[half]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < X::kLanes; i++)
        store_limbs<K, kRowsAlongT>(block[0][i], block[1][i], to.plane,
                                    to.at(t / kLimbsStep, m / X::kLanes) + i * to.row);
    }
  to.unusual = all_usual != first_bits(X::kLanes);
}
// X[t][lane] = factor rows[t][lane], in pairs as rows_in_limbs has them.
template <class K, class S>
void lanes_in_limbs(const S* from, int64_t stride, int64_t rows, int64_t columns, float factor,
                    Limbs& to) {
  using X = typename K::X;
  const typename X::V f = X::set(factor);
  uint64_t all_usual = first_bits(X::kLanes);
  lay_out<K>(rows, to);
  for (int64_t first = 0; first < rows; first += kLimbsStep)
    for (int64_t r = first; r < first + kLimbsStep / 2; r++)
      for (int64_t c = 0; c < columns; c += X::kLanes) {
        const auto part = [&](int64_t row) __attribute__((always_inline)) {
          const int64_t left = row < rows ? columns - c : 0;
          return usual_or_zero<X>(load_or_zero<X>(from + row * stride + c, left), f, all_usual);
        };
        store_limbs<K, false>(part(r), part(r + kLimbsStep / 2), to.plane,
                              to.at(first / kLimbsStep, c / X::kLanes) + (r - first) * to.row);
      }
  to.unusual = all_usual != first_bits(X::kLanes);
}

// Whole halves of queries: those that are not there become `value`.
template <class K>
void fill_lanes(int64_t queries, int64_t rows, float value, float* to) {
  for (int64_t d = 0; d < rows; d++)
    for (int64_t r = padded<K>(queries); r < round_up(queries, kHalfRow); r++)
      to[d * kRow + r] = value;
}

// c[key * kKey + query * kQuery] += the terms of rows[key][d] lanes[d][query] of which a factor is
// not usual.
template <class K, int64_t kKey, int64_t kQuery = 1, class S>
void add_unusual_scores(const S* rows, int64_t stride, int64_t columns, const float* lanes,
                        int64_t queries, float* c) {
  for (int64_t n = 0; n < kTile; n++)
    for (int64_t d = 0; d < columns; d++) {
      const float x = widen(rows[n * stride + d]);
      const bool all = !usual(x);
      for (int64_t r = 0; r < queries; r++)
        if (all || !usual(lanes[d * kRow + r])) c[n * kKey + r * kQuery] += lanes[d * kRow + r] * x;
    }
}
// s[key][64 queries] = rows[key][d] lanes[d][query], of all keys of a tile: the bits of
// limbs_tile, piece by piece.
template <class K>
void limbs_scores(const Operand& from, int64_t columns, const float* lanes, int64_t queries,
                  float* s) {
  const float* const rows = (const float*)from.data;
  const int64_t stride = from.m_stride / (int64_t)sizeof(float), vectors = vectors_of<K>(queries);
  alignas(64) uint32_t room[2][K::kLimbs * kTile / 2 * kTile];
  bool unusual = false;
  for (int64_t d = 0; d < columns; d += kTile) {
    const int64_t width = min_of(kTile, columns - d);
    Limbs a{room[0]}, x{room[1]};
    rows_in_limbs<K>(rows + d, stride, kTile, width, 1, a);
    lanes_in_limbs<K>(lanes + d * kRow, kRow, width, vectors * K::kLanes, 1, x);
    if (d == 0)
      K::Dot::product(a, kTile, x, 0, vectors, s, kRow);
    else
      K::Dot::template product<true>(a, kTile, x, 0, vectors, s, kRow);
    unusual |= a.unusual || x.unusual;
  }
  if (unusual) add_unusual_scores<K, kRow>(rows, stride, columns, lanes, queries, s);
}
// A product that still has to be added to `out`, times a factor, or, at first, stored there: row by
// row beside the next product, since what the unit has just stored cannot be read for a while.
template <class K>
struct PendingSum {
  const float* sum = nullptr;
  float* out = nullptr;
  int64_t rows = 0, vectors = 0, sum_row = 0, out_row = 0;
  float factor = 1;
  bool fresh = false;
  int64_t share = 1;  // rows of a step

  void beside(int64_t steps) { share = ceil_div(rows, max_of(1, steps)); }
  [[gnu::always_inline]] void step() {
    for (int64_t i = 0; i < share && rows > 0; i++) add_row();
  }
  void finish() {
    while (rows > 0) add_row();
  }

 private:
  [[gnu::always_inline]] void add_row() {
    using X = typename K::X;
    const typename X::V f = X::set(factor);
    for (int64_t at = 0; at < vectors * K::kLanes; at += K::kLanes)
      X::store(out + at, X::fma(f, X::load(sum + at), fresh ? X::zero() : X::load(out + at)));
    out += out_row;
    sum += sum_row;
    rows--;
  }
};

// What is done piece by piece, of.piece(i), beside a product that takes so many steps: of a few,
// some are left for the end, since what is done between two instructions of the unit should not
// take longer than they do.
template <class Of>
struct PiecesBeside {
  Of of;
  int64_t pieces, share, next = 0;
  PiecesBeside(const Of& all, int64_t steps)
      : of(all), pieces(all.pieces()), share(max_of(1, all.pieces() / max_of(1, steps))) {}
  [[gnu::always_inline]] void step() {
    for (int64_t i = 0; i < share && next < pieces; i++) of.piece(next++);
  }
  void finish() {
    while (next < pieces) of.piece(next++);
  }
};
// A product, and beside it what is left of a sum.
template <class K, bool kMirrored = false>
void product_beside_sum(const Limbs& a, int64_t rows, const Limbs& x, int64_t lane, int64_t vectors,
                        float* c, int64_t ldc, PendingSum<K>& pending) {
  if (pending.rows == 0)
    return K::Dot::template product<false, kMirrored>(a, rows, x, lane, vectors, c, ldc);
  PendingSum<K> sum = pending;  // in registers
  sum.beside(K::Dot::steps(a, rows, vectors));
  K::Dot::template product_beside<kMirrored>(a, rows, x, lane, vectors, c, ldc, sum);
  sum.finish();
  pending.rows = 0;
}

}  // namespace
}  // namespace mha_ext::cpu

// The product of a linear layer in limbs (limbs-inl.h): one block of the result. A and panels of X
// are cut beside the products before them. As in linear-inl.h the sum over t is cut every so many
// terms, whatever the sizes of the problem and of the block: the bits of an element depend on its
// row of A and its column of X only.
namespace mha_ext::cpu {
namespace {

// A panel is that of linear-inl.h; a product is of 32 rows and 32 columns.
constexpr int64_t kLimbsDepth = 256, kLimbsBlock = 32;
// Both operands carry this factor, so that subnormal numbers keep all bits. Numbers up to that are
// multiplied in limbs: then the sum of kLimbsDepth products is finite.
constexpr float kLinearScale = 8388608, kLinearUnusual = 68719476736;  // 2^23, 2^36

// to[c][r] = from[r][c], a block of lanes at a time.
template <class X>
struct TurnedRows {
  const float* from = nullptr;
  int64_t stride = 0, rows = 0, columns = 0;
  float* to = nullptr;
  int64_t ld = 0;
  int64_t row = 0, column = 0;  // of the next block

  int64_t pieces() const {
    return from ? ceil_div(rows, X::kLanes) * ceil_div(columns, X::kLanes) : 0;
  }
  [[gnu::noinline]] void piece() {
    typename X::V block[X::kLanes];
    const float* const p = from + row * stride + column;
#pragma GCC unroll 16
    for (int i = 0; i < X::kLanes; i++)
      block[i] = load_or_zero<X>(p + i * stride, row + i < rows ? columns - column : 0);
    X::transpose(block);
    float* const q = to + column * ld + row;
#pragma GCC unroll 16
    for (int i = 0; i < X::kLanes; i++) X::store(q + i * ld, block[i]);
    column += X::kLanes;
    if (column >= columns) column = 0, row += X::kLanes;
  }
};

// An operand that is cut 32 numbers at a time: X[t][lane] where kOfLanes, else A(m, t). Of `rows`
// rows of `columns` neighbours, which may have to be turned first.
template <class K, bool kOfLanes>
struct Cutting {
  using X = typename K::X;
  using V = typename X::V;
  static constexpr int64_t kHalf = kLimbsStep / 2, kNumbers = kOfLanes ? kHalf : kLimbsStep;

  const float* from = nullptr;
  int64_t stride = 0, rows = 0, columns = 0;
  Limbs to;
  TurnedRows<X> turned;

  Cutting() = default;
  Cutting(const float* data, int64_t stride_, int64_t rows_, int64_t columns_, const Limbs& limbs,
          const TurnedRows<X>& turned_ = {})
      : from(data), stride(stride_), rows(rows_), columns(columns_), to(limbs), turned(turned_) {}

  void start(int64_t steps) {
    turns_ = turned.pieces();
    const int64_t lines = kOfLanes ? ceil_div(rows, kLimbsStep) * kHalf : round_up(rows, kHalf);
    left_ = lines * ceil_div(columns, kNumbers);
    share_ = ceil_div(turns_ + left_, max_of(1, steps));
    worst_ = X::zero();
    line_ = 0;
    next_line();
  }
  [[gnu::always_inline]] void step() {
    for (int64_t i = 0; i < share_; i++)
      if (turns_ > 0)
        turns_--, turned.piece();
      else if (left_ > 0)
        piece<false>();
  }
  // Numbers that are not usual become 0: all is cut again, with an eye on each.
  [[gnu::noinline]] void finish() {
    for (; turns_ > 0; turns_--) turned.piece();
    while (left_ > 0) piece<false>();
    to.unusual = !K::Dot::all_below(kLinearUnusual * kLinearScale, worst_);
    if (to.unusual) {
      turned.from = nullptr;
      start(1);
      while (left_ > 0) piece<true>();
    }
    share_ = 0;  // no step of what follows looks for more
  }

 private:
  const float* first_ = nullptr;
  const float* second_ = nullptr;
  int64_t numbers_ = 0, second_numbers_ = 0;  // that are left from there
  uint32_t* to_ = nullptr;
  int64_t turns_ = 0, left_ = 0, share_ = 0;  // pieces
  int64_t line_ = 0, line_left_ = 0;
  V worst_;

  // A row of A, or two of X of which each number makes a pair.
  void next_line() {
    const int64_t apart = kOfLanes ? kHalf * stride : kHalf;
    const int64_t row = kOfLanes ? line_ / kHalf * kLimbsStep + line_ % kHalf : line_;
    first_ = from + row * stride;
    second_ = first_ + apart;
    numbers_ = row < rows ? columns : 0;
    second_numbers_ = kOfLanes ? (row + kHalf < rows ? columns : 0) : numbers_ - kHalf;
    to_ = (kOfLanes ? to.at(line_ / kHalf, 0) : to.at(0, line_ / kHalf)) + line_ % kHalf * to.row;
    line_left_ = columns;
    line_++;
  }
  template <bool kZeros>
  [[gnu::always_inline]] void piece() {
    V x[2] = {load_or_zero<X>(first_, numbers_), load_or_zero<X>(second_, second_numbers_)};
#pragma GCC unroll 2
    for (V& some : x) {
      some = X::mul(X::set(kLinearScale), some);
      if constexpr (kZeros)
        some = X::select(usual_lanes<X>(some, kLinearUnusual * kLinearScale), some, X::zero());
      else
        worst_ = K::Dot::larger(worst_, some);
    }
    // A store that waits for its line keeps loads of tiles waiting whose low address bits are its.
#pragma GCC unroll 3
    for (int i = 0; i < K::kLimbs; i++) __builtin_prefetch(to_ + i * to.plane + to.row, 1, 3);
    store_limbs<K, false>(x[0], x[1], to.plane, to_);
    first_ += kNumbers, second_ += kNumbers;
    numbers_ -= kNumbers, second_numbers_ -= kNumbers;
    to_ += kOfLanes ? to.across : to.step;
    left_--;
    line_left_ -= kNumbers;
    if (line_left_ <= 0) next_line();
  }
};

// `rows` by `columns` numbers of a matrix. Where those of a row are no neighbours, they are turned
// into `room`, whose rows are `ld` apart.
template <class K, bool kOfLanes>
Cutting<K, kOfLanes> cut(const Matrix& from, int64_t row, int64_t column, int64_t rows,
                         int64_t columns, float* room, int64_t ld, const Limbs& to) {
  const float* const first = from.data + row * from.row + column * from.column;
  if (from.column == 1) return {first, from.row, rows, columns, to};
  return {room, ld, rows, columns, to, {first, from.column, columns, rows, room, ld}};
}

// Sums of kLimbsBlock columns, added to those before them, or to the bias, row by row.
template <class X>
struct LinearSums {
  const float* sum = nullptr;
  const float* base = nullptr;
  float* out = nullptr;
  int64_t rows = 0, columns = 0, base_row = 0, out_row = 0;
  int64_t share = 1;

  void start(int64_t steps) { share = ceil_div(rows, max_of(1, steps)); }
  [[gnu::always_inline]] void step() {
    for (int64_t i = 0; i < share && rows > 0; i++) row();
  }
  void finish() {
    while (rows > 0) row();
  }

 private:
  [[gnu::always_inline]] void row() {
    const typename X::V f = X::set(1 / kLinearScale / kLinearScale);
#pragma GCC unroll 2
    for (int64_t at = 0; at < kLimbsBlock; at += X::kLanes) {
      const int64_t there = max_of(0, min_of(X::kLanes, columns - at));
      X::store(out + at, X::fma(f, X::load(sum + at), X::load(base + at, there)), there);
    }
    sum += kLimbsBlock, base += base_row, out += out_row, rows--;
  }
};

// What is done beside the products: sums of the one before, rows of A for the next one, and the
// next panel of X.
template <class K>
struct LinearBeside {
  LinearSums<typename K::X> sums;
  Cutting<K, false> rows;
  Cutting<K, true> lanes;
  [[gnu::always_inline]] void step() {
    sums.step();
    rows.step();
    lanes.step();
  }
};

template <class K>
struct LinearScratch {
  Limbs a, panel[2];
  float *turned_rows, *turned_lanes, *sums[2], *zeros;

  LinearScratch(int64_t rows, int64_t depth, Arena& arena) {
    const int64_t along = round_up(min_of(depth, kLimbsDepth), kLimbsStep);
    a.data = arena.take<uint32_t>(limbs_size<K>(along, rows));
    for (Limbs& some : panel) some.data = arena.take<uint32_t>(limbs_size<K>(along, kTile));
    turned_rows = arena.take<float>(kLimbsBlock * kLimbsDepth);
    turned_lanes = arena.take<float>(along * kTile);
    for (float*& some : sums) some = arena.take<float>(kLimbsBlock * kLimbsBlock);
    zeros = arena.take<float>(kLimbsBlock);
  }
};
template <class K>
int64_t linear_in_limbs_bytes(int64_t rows, int64_t depth) {
  Arena arena{nullptr};
  LinearScratch<K> scratch(rows, depth, arena);
  return arena.used;
}

// out += the terms of A X of which a factor is not usual.
template <class K>
void add_unusual_terms(const Linear& p, int64_t m0, int64_t rows, int64_t t0, int64_t count,
                       int64_t n0, int64_t columns) {
  const auto usual_number = [](float x) { return usual(x, kLinearUnusual); };
  for (int64_t t = t0; t < t0 + count; t++) {
    const float* const x = p.x.data + t * p.x.row;
    bool all_usual = true;
    for (int64_t n = n0; n < n0 + columns; n++) all_usual &= usual_number(x[n * p.x.column]);
    for (int64_t m = m0; m < m0 + rows; m++) {
      const float a = p.a.data[m * p.a.row + t * p.a.column];
      const bool all = !usual_number(a);
      if (!all && all_usual) continue;
      for (int64_t n = n0; n < n0 + columns; n++) {
        float& out = p.out[m * p.columns + n];
        const float other = x[n * p.x.column];
        if (all || !usual_number(other)) out = __builtin_fmaf(a, other, out);
      }
    }
  }
}

// out[m0 : m0 + rows, n0 : n0 + columns].
template <class K>
void linear_in_limbs(const Linear& p, int64_t m0, int64_t rows, int64_t n0, int64_t columns,
                     void* scratch) {
  const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  LinearScratch<K> w(rows, p.depth, arena);
  __builtin_memset(w.zeros, 0, kLimbsBlock * sizeof *w.zeros);
  LinearBeside<K> beside;
  int64_t side = 0, sum = 0;  // which panel, which sums
  const auto start_panel = [&](int64_t t, int64_t n, int64_t steps) {
    Limbs to = w.panel[side];
    const int64_t count = min_of(kLimbsDepth, p.depth - t);
    lay_out<K>(count, to);
    beside.lanes =
        cut<K, true>(p.x, t, n0 + n, count, min_of(kTile, columns - n), w.turned_lanes, kTile, to);
    beside.lanes.start(steps);
  };
  const auto finish_panel = [&] {
    beside.lanes.finish();
    w.panel[side] = beside.lanes.to;
  };
  start_panel(0, 0, 1);
  finish_panel();
  for (int64_t t0 = 0; t0 < p.depth; t0 += kLimbsDepth) {
    const int64_t count = min_of(kLimbsDepth, p.depth - t0);
    lay_out<K>(count, w.a);
    const int64_t steps = w.a.along * K::Dot::kSteps;  // of a product
    const auto start_rows = [&](int64_t m, int64_t products) {
      beside.rows = cut<K, false>(p.a, m0 + m, t0, min_of(kLimbsBlock, rows - m), count,
                                  w.turned_rows, kLimbsDepth, w.a.from(m / K::kLanes));
      beside.rows.start(products * steps);
    };
    const auto finish_rows = [&] {
      beside.rows.finish();
      w.a.unusual |= beside.rows.to.unusual;
    };
    w.a.unusual = false;
    start_rows(0, 0);
    finish_rows();
    for (int64_t n = 0; n < columns; n += kTile) {
      const int64_t width = min_of(kTile, columns - n), vectors = vectors_of<K>(width);
      const Limbs x = w.panel[side];
      side = 1 - side;
      const bool more = n + kTile < columns, deeper = t0 + count < p.depth;
      if (more || deeper)
        start_panel(more ? t0 : t0 + count, more ? n + kTile : 0,
                    rows / kLimbsBlock * (vectors / 2) * steps);
      for (int64_t m = 0; m < rows; m += kLimbsBlock) {
        const int64_t height = min_of(kLimbsBlock, rows - m);
        const bool cut = n == 0 && m + kLimbsBlock < rows;
        if (cut) start_rows(m + kLimbsBlock, vectors / 2);
        for (int64_t v = 0; v < vectors; v += 2) {
          float* const to = w.sums[sum];
          sum = 1 - sum;
          beside.sums.start(steps);
          K::Dot::product_beside(w.a.from(m / K::kLanes), height, x, v * K::kLanes,
                                 min_of(2, vectors - v), to, kLimbsBlock, beside);
          beside.sums.finish();
          const int64_t column = n0 + n + v * K::kLanes;
          float* const out = p.out + (m0 + m) * p.columns + column;
          beside.sums = {to, out, out, height, width - v * K::kLanes, p.columns, p.columns};
          if (t0 == 0) {
            beside.sums.base = p.bias ? p.bias + column : w.zeros;
            beside.sums.base_row = 0;
          }
        }
        if (cut) finish_rows();
      }
      if (w.a.unusual || x.unusual) {
        beside.sums.finish();
        add_unusual_terms<K>(p, m0, rows, t0, count, n0 + n, width);
      }
      if (more || deeper) finish_panel();
    }
  }
  beside.sums.finish();
}

}  // namespace
}  // namespace mha_ext::cpu

// The bias of a tile whose lanes are queries: added to its scores in memory, or turned strip by
// strip for who adds it when they are read; and what is asked for of the next tile's mask and bias.
namespace mha_ext::cpu {
namespace {

// visit(key, r, bias) for each vector of a tile of the bias, of queries r and up. Inline: what a
// visit keeps would else be in memory, and each would wait for the one before it.
template <class K, class E, class Visit>
[[gnu::always_inline]] inline void each_bias(const Attention& a, int64_t b, int64_t h, int64_t q0,
                                             int64_t rows, int64_t k0, int64_t keys,
                                             typename K::T* scratch, const Visit& visit) {
  using X = typename K::X;
  const Pairs& bias = a.bias;
  const E* const from =
      (const E*)bias.data + b * bias.batch + h * bias.head + q0 * bias.query + k0 * bias.key;
  if (bias.query == 0) {
    for (int64_t n = 0; n < keys; n++) {
      const typename X::V v = X::set(widen(from[n * bias.key]));
      for (int64_t r = 0; r < rows; r += K::kLanes) visit(n, r, v);
    }
    return;
  }
  if (bias.key != 1 || keys % K::kLanes) {
    load_pairs<K, E>(bias, b, h, q0, rows, k0, keys, scratch);
    for (int64_t n = 0; n < keys; n++)
      for (int64_t r = 0; r < rows; r += K::kLanes) visit(n, r, X::load(scratch + n * kRow + r));
    return;
  }
  constexpr bool kInPairs = K::kPairs && sizeof(E) == 2;  // two keys at once: half as much to move
  for (int64_t r = 0; r < rows; r += K::kLanes) {
    const E* const row = from + r * bias.query;
    int64_t c = 0;
    typename X::V block[K::kLanes];  // visited as they are transposed
    if constexpr (kInPairs)
      for (; c + 2 * K::kLanes <= keys; c += 2 * K::kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < K::kLanes; i++)
          block[i] =
              r + i < rows ? K::Dot::load_row(row + i * bias.query + c, 2 * K::kLanes) : X::zero();
        X::transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < K::kLanes; i++) {
          visit(c + 2 * i, r, K::Dot::first(block[i]));
          visit(c + 2 * i + 1, r, K::Dot::second(block[i]));
        }
      }
    for (; c < keys; c += K::kLanes) {
      load_block<X>(row + c, bias.query, rows - r, keys, block);
#pragma GCC unroll 16
      for (int i = 0; i < K::kLanes; i++) visit(c + i, r, block[i]);
    }
  }
}
// A finite bias stays finite when a score is added; NaN stays NaN.
template <class X>
[[gnu::always_inline]] inline typename X::V add_to_score(typename X::V score, typename X::V bias) {
  return X::max(X::set(Exp<typename X::T>::lowest_finite), X::add(score, bias));
}
// run<E>() for the type of the numbers of the bias.
template <class K, class Run>
[[gnu::always_inline]] inline auto by_bias_type(const Attention& a, const Run& run) {
  return a.bias_is_float32 ? run.template operator()<float>()
                           : run.template operator()<typename K::S>();
}
// A bias of -inf hides the pair: `visible` and `bits` without these.
template <class K, class E>
Visibility hide_infinite(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows,
                         int64_t k0, int64_t keys, Visibility visible, uint64_t* bits,
                         typename K::T* scratch) {
  using X = typename K::X;
  const typename X::V hidden = X::set(-(typename K::T)INFINITY);
  if (visible == Visibility::kFull)
    for (int64_t n = 0; n < keys; n++) bits[n] = first_bits(rows);
  const auto hide = [&](int64_t key, int64_t r, typename X::V bias) __attribute__((always_inline)) {
    bits[key] &= ~(X::bits(X::eq(bias, hidden)) << r);
  };
  each_bias<K, E>(a, b, h, q0, rows, k0, keys, scratch, hide);
  return Visibility::kPartial;
}
// s += bias; what that hides.
template <class K>
Visibility add_bias(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0,
                    int64_t keys, Visibility visible, uint64_t* bits, typename K::T* s,
                    typename K::T* scratch) {
  using X = typename K::X;
  using V = typename X::V;
  return by_bias_type<K>(a, [&]<class E>() {
    V lowest = X::zero();
    const auto add = [&](int64_t key, int64_t r, V bias) __attribute__((always_inline)) {
      lowest = X::min(bias, lowest);
      typename K::T* const to = s + key * kRow + r;
      X::store(to, add_to_score<X>(X::load(to), bias));
    };
    each_bias<K, E>(a, b, h, q0, rows, k0, keys, scratch, add);
    if (!X::bits(X::eq(lowest, X::set(-(typename K::T)INFINITY)))) return visible;
    return hide_infinite<K, E>(a, b, h, q0, rows, k0, keys, visible, bits, scratch);
  });
}

// The bias of a whole tile of keys for half a block of queries after the other, in strips of kStrip
// keys that stay near: [key][kHalfRow]; or, where all queries have the same, a vector of each key.
template <class K>
class BiasStrips {
  using T = typename K::T;
  using X = typename K::X;
  using V = typename X::V;

 public:
  // Beside a matrix unit little at a time.
  static constexpr int64_t kStrip = K::kCut ? 4 : 32;

  BiasStrips() = default;
  BiasStrips(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0,
             T* scratch)
      : a_(&a), b_(b), h_(h), q0_(q0), rows_(rows), k0_(k0), strip_(scratch) {
    if (a.bias.query == 0) kept_ = kTile - 1, ld_ = X::kLanes, moves_ = 0;
  }
  explicit operator bool() const { return strip_; }

  // What is left of what is visible, and of its bits. Before strips, or before they begin again.
  Visibility hide(Visibility visible, uint64_t* bits) {
    known_ = true;
    return by_bias_type<K>(*a_, [&]<class E>() {
      if (!has_infinite(lowest<E>())) return visible;
      return hide_infinite<K, E>(*a_, b_, h_, q0_, rows_, k0_, kTile, visible, bits, strip_);
    });
  }
  // Keys n and up, for queries from `lane` on.
  [[gnu::noinline]] void turn(int64_t lane, int64_t n) {
    if (moves_ == 0 && lane > 0) return;
    V least = X::load(least_);
    by_bias_type<K>(*a_, [&]<class E>() {
      if (moves_ == 0)
        turn_one<E>(n, least);
      else if (kStrip == X::kPiece && a_->bias.key == 1 && rows_ - lane >= kHalfRow)
        turn_columns<E>(lane, n, least);
      else
        turn_rows<E>(lane, n, least);
    });
    X::store(least_, least);
  }
  // Whether what was turned hides a pair of which nobody knows.
  bool hides() const { return !known_ && has_infinite(X::load(least_)); }
  // Where a strip lies, for registers.
  struct View {
    const T* strip;
    int64_t kept, ld, moves;
    // Of key n, queries from `at` of the half on.
    [[gnu::always_inline]] V load(int64_t n, int64_t at) const {
      return X::load(strip + (n & kept) * ld + at * moves);
    }
  };
  View view() const { return {strip_, kept_, ld_, moves_}; }

 private:
  static bool has_infinite(V least) { return X::bits(X::eq(least, X::set(-(T)INFINITY))); }

  template <class E>
  const E* first(int64_t r, int64_t n) const {
    const Pairs& bias = a_->bias;
    return (const E*)bias.data + b_ * bias.batch + h_ * bias.head + (q0_ + r) * bias.query +
           (k0_ + n) * bias.key;
  }
  template <class E>
  void turn_one(int64_t n, V& least) const {
    for (int64_t key = n; key < n + kStrip; key++) {
      const V bias = X::set(widen(*first<E>(0, key)));
      least = X::min(bias, least);
      X::store(strip_ + key * ld_, bias);
    }
  }
  template <class E>
  void turn_columns(int64_t lane, int64_t n, V& least) const {
    const E* from = first<E>(lane, n);
    for (int64_t r = 0; r < kHalfRow; r += X::kLanes, from += X::kLanes * a_->bias.query) {
      V block[X::kPiece];
      X::template load_columns<1, X::kLanes / X::kPiece>(
          [&](int i) { return from + i * a_->bias.query; }, block);
#pragma GCC unroll 4
      for (int key = 0; key < X::kPiece; key++) {
        least = X::min(block[key], least);
        X::store(strip_ + key * kHalfRow + r, block[key]);
      }
    }
  }
  template <class E>
  void turn_rows(int64_t lane, int64_t n, V& least) const {
    const int64_t queries = min_of(kHalfRow, rows_ - lane);
    const auto keep = [&](int64_t key, int64_t r, V bias) __attribute__((always_inline)) {
      least = X::min(bias, least);
      X::store(strip_ + key * kHalfRow + r, bias);
    };
    each_bias<K, E>(*a_, b_, h_, q0_ + lane, queries, k0_ + n, kStrip, strip_ + kStrip * kHalfRow,
                    keep);
    for (int64_t r = round_up(queries, X::kLanes); r < kHalfRow; r += X::kLanes)
      for (int64_t key = 0; key < kStrip; key++) keep(key, r, X::zero());
  }
  template <class E>
  V lowest() const {
    const Pairs& bias = a_->bias;
    V least = X::zero();
    const auto scan = [&](int64_t rows, int64_t stride, int64_t numbers) {
      const E* from = first<E>(0, 0);
      for (int64_t r = 0; r < rows; r++, from += stride)
        for (int64_t n = 0; n < numbers; n += X::kLanes)
          least = X::min(load_up_to<X>(from + n, numbers - n), least);
    };
    if (bias.key == 1)
      scan(bias.query ? rows_ : 1, bias.query, kTile);
    else if (bias.query == 1)
      scan(bias.key ? kTile : 1, bias.key, rows_);
    else
      each_bias<K, E>(*a_, b_, h_, q0_, rows_, k0_, kTile, strip_,
                      [&](int64_t, int64_t, V x) { least = X::min(x, least); });
    return least;
  }

  const Attention* a_ = nullptr;
  int64_t b_ = 0, h_ = 0, q0_ = 0, rows_ = 0, k0_ = 0;
  T* strip_ = nullptr;
  int64_t kept_ = kStrip - 1, ld_ = kHalfRow, moves_ = 1;
  T least_[X::kLanes] = {};
  bool known_ = false;
};

// Asks for a tile of mask and bias, and of `sums` (of their type), where their keys are neighbours.
template <class K>
void ask_pairs(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t k0, Ahead& ahead,
               const Pairs& sums = {}) {
  const int64_t rows = min_of(kTile, a.queries - q0), keys = min_of(kTile, a.keys - k0);
  const auto ask = [&](const Pairs& pairs, int64_t size) {
    if (!pairs.data || pairs.key != 1 || pairs.query == 0) return;
    const int64_t first = b * pairs.batch + h * pairs.head + q0 * pairs.query + k0;
    ahead.add((const char*)pairs.data + first * size, pairs.query * size, keys * size, rows);
  };
  ask(a.mask, a.mask.item_size);
  ask(a.bias, a.bias_is_float32 ? 4 : (int64_t)sizeof(typename K::S));
  ask(sums, (int64_t)sizeof(typename K::T));
}

// Rows that will be read soon. They are asked for one by one beside something else: all at once,
// they would hold up everything that waits for a line.
struct RowsAhead {
  const char* first = nullptr;
  int64_t stride = 0;
  [[gnu::always_inline]] void ask(int64_t r, int64_t at = 0) const {
    __builtin_prefetch(first + r * stride + at, 0, 2);
  }
  // Where there is nothing that this could be beside.
  void ask_all(int64_t r, int64_t end) const {
    for (; first && r < end; r++) ask(r);
  }
};
// Those of a tile of mask and bias, where their keys are neighbours: a line of the mask, and two of
// the bias, so many bytes apart. Else lines that are near anyway, so that no row asks whether.
struct PairsAhead {
  RowsAhead mask, bias;
  int64_t apart = 0;

  PairsAhead() = default;
  explicit PairsAhead(const void* near) : mask{(const char*)near}, bias(mask) {}
};
template <class K>
PairsAhead pairs_ahead(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t k0,
                       const void* near) {
  PairsAhead next(near);
  const auto rows = [&](const Pairs& pairs, int64_t size, RowsAhead& to) {
    if (!pairs.data || pairs.key != 1 || pairs.query == 0) return;
    const int64_t first = b * pairs.batch + h * pairs.head + q0 * pairs.query + k0;
    to = {(const char*)pairs.data + first * size, pairs.query * size};
  };
  const int64_t size = a.bias_is_float32 ? 4 : (int64_t)sizeof(typename K::S);
  rows(a.mask, a.mask.item_size, next.mask);
  rows(a.bias, size, next.bias);
  next.apart = kTile / 2 * size;
  return next;
}

}  // namespace
}  // namespace mha_ext::cpu

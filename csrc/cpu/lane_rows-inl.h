// Rows of queries that become the lanes of a product: packed before it, or, where rows and keys are
// few, turned into vectors beside it.
namespace mha_ext::cpu {
namespace {

// The vectors of a product with K or V: packed; or the rows that they would be packed from, times
// the factor, where takes_rows says so.
template <class K>
struct LaneRows {
  const typename K::Unit* packed = nullptr;
  const typename K::S* rows = nullptr;
  int64_t stride = 0;
  typename K::T factor = 1;
  int64_t next = 0;  // how many bytes further the rows are that are asked for beside them; 0: none

  LaneRows() = default;
  LaneRows(const typename K::Unit* lanes) : packed(lanes) {}
  LaneRows(const typename K::S* from, int64_t step, typename K::T times)
      : rows(from), stride(step), factor(times) {}
  // From row r on, of rows that are not packed; whether others are asked for.
  LaneRows from(int64_t r, bool ask) const {
    LaneRows some(rows + r * stride, stride, factor);
    some.next = ask ? next : 0;
    return some;
  }
  LaneRows at(int64_t lane) const {
    LaneRows some = *this;
    if (rows)
      some.rows += lane * stride;
    else
      some.packed += lane;
    return some;
  }
};

// Rows that are `further` bytes on (0: there are none), asked for beside others, kLines lines with
// each piece of work: those of a row, or of two short ones, or of rows that follow one another, as
// if these were one.
template <int kLines>
class LaterRows {
 public:
  LaterRows(const void* rows, int64_t further, int64_t stride, int64_t bytes, int64_t count) {
    if (further == 0) return;
    const bool joined = stride == bytes, two = !joined && bytes <= kHalf * kLine;
    first_ = at_ = (const char*)((uintptr_t)rows + further);
    step_ = joined ? kLines * kLine : two ? 2 * stride : stride;
    second_ = two ? stride : kHalf * kLine;
    left_ = steps_ = two ? (count + 1) / 2 : count;
    end_ = joined ? at_ : at_ + bytes;
    if (joined) left_ = ceil_div(count * bytes, kLines * kLine);
  }
  [[gnu::always_inline]] void ask() {
    if (left_ == 0) return;
#pragma GCC unroll 8
    for (int i = 0; i < kLines; i++)
      __builtin_prefetch(at_ + (i < kHalf ? 0 : second_) + (i < kHalf ? i : i - kHalf) * kLine, 0,
                         2);
    at_ += step_;
    if (--left_ == 0 && first_ + kLines * kLine < end_) {  // what rows have beyond those lines
      at_ = first_ += kLines * kLine;
      left_ = steps_;
    }
  }

 private:
  static constexpr int kHalf = kLines / 2;
  const char *at_, *first_, *end_;
  int64_t step_, second_, steps_, left_ = 0;
};

// A long sum is cut in pieces that are added at the end: rounding errors grow with the length of a
// chain.
constexpr int64_t kScorePiece = 128;

// Whether rows meet so few keys that they are best turned into vectors beside the product, some
// columns at a time: that takes other units of a processor than multiply-adds do. All sums of
// kKeysTogether keys and a vector of rows are in registers meanwhile; for more keys it is done
// again. Several vectors of rows would share what is read of a key if they were packed, which
// matters where registers are few, and for pairs, which meet half as many units of it.
template <class K>
constexpr bool kTakesRows =
    (K::kPairs ? K::Dot::kRowBlock == 1 : K::kInPlace) && (K::kLanes > K::X::kPiece);
template <class K>
constexpr int kKeysTogether = K::X::kRegisters == 32 ? 12 : 10;
template <class K>
bool takes_rows(int64_t rows, int64_t keys, int64_t columns) {
  constexpr bool kVectors = !K::kPairs && (K::X::kRegisters == 32 || sizeof(typename K::T) == 8);
  const bool vectors = kVectors && rows <= kTile && !ends_in_half<typename K::X>(rows);
  return kTakesRows<K> && 0 < rows && (rows <= K::kLanes || vectors) && 0 < keys &&
         keys <= 2 * kKeysTogether<K> && K::X::kPiece * K::Dot::kStep <= columns &&
         columns <= kScorePiece && columns % K::Dot::kStep == 0;
}

// tile[key][lane] = sum_d keys[key][d] factor rows[lane][d], zero in the lanes past `height`: to
// the bit what pack_lanes and a product give. `count` keys, kKeys or one less, for which the last
// one stands in. `top`, where it is set, rises to the largest of each lane. Pairs move as if they
// were floats, and their sums get the factor.
template <class K, int kKeys, int kGroups, bool kRagged, bool kScale>
[[gnu::noinline]] void rows_product(const LaneRows<K>& x, int64_t height, int64_t columns,
                                    const char* keys, int64_t key_stride, int64_t count,
                                    typename K::T* tile, typename K::T* top) {
  using T = typename K::T;
  using X = typename K::X;
  using V = typename X::V;
  constexpr int kPiece = X::kPiece, kRows = kGroups * kPiece, kStep = K::Dot::kStep;
  constexpr int64_t kUnit = sizeof(typename K::Unit), kItem = sizeof(typename K::S);
  // Four rows share a pointer: that leaves the addresses in registers. Past the last row, that row
  // stands in.
  const typename K::S* row[kRagged ? kRows : kGroups];
  const char *key[(kKeys + 3) / 4], *last_key = keys + (count - 1) * key_stride;
#pragma GCC unroll 16
  for (int i = 0; i < (kRagged ? kRows : kGroups); i++)
    row[i] = x.rows + (kRagged ? min_of(i, height - 1) : i * kPiece) * x.stride;
#pragma GCC unroll 4
  for (int i = 0; i < (kKeys + 3) / 4; i++) key[i] = keys + i * 4 * key_stride;
  const int64_t stride = x.stride;
  const V factor = X::set(x.factor);
  V sum[kKeys], block[kPiece];
#pragma GCC unroll 16
  for (int n = 0; n < kKeys; n++) sum[n] = X::zero();
  const auto load = [&]() __attribute__((always_inline)) {
    X::template load_columns<1, kGroups>(
        [&](int i) { return (const T*)(kRagged ? row[i] : row[i / kPiece] + i % kPiece * stride); },
        block);
  };
  const auto meet = [&](V v, int64_t column) __attribute__((always_inline)) {
    if constexpr (kScale && !K::kPairs) v = X::mul(factor, v);
#pragma GCC unroll 16
    for (int n = 0; n < kKeys; n++) {
      typename K::Unit unit;
      __builtin_memcpy(
          &unit, (n + 1 < kKeys ? key[n / 4] + n % 4 * key_stride : last_key) + column * kUnit,
          kUnit);
      if constexpr (K::kPairs)
        sum[n] = K::Dot::add_products(sum[n], v, K::Dot::set(unit));
      else
        sum[n] = X::fma(v, X::set(unit), sum[n]);
    }
  };
  const auto advance = [&](int64_t some) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < (kRagged ? kRows : kGroups); i++) row[i] += some * kStep;
#pragma GCC unroll 4
    for (int i = 0; i < (kKeys + 3) / 4; i++) key[i] += some * kUnit;
    last_key += some * kUnit;
  };
  // A piece is 16 bytes of each row, a fourth of a line; a line more, since rows end within lines.
  LaterRows<kRows / 4 + 1> later(x.rows, x.next, stride * kItem, columns * kItem, height);
  int64_t left = columns / kStep;
  for (; left >= kPiece; left -= kPiece, advance(kPiece)) {
    load();
#pragma GCC unroll 4
    for (int c = 0; c < kPiece; c++) meet(block[c], c);
    later.ask();
  }
  if (left > 0) {
    advance(left - kPiece);
    load();
    alignas(64) T room[kPiece * K::kLanes];
    for (int c = 0; c < kPiece; c++) X::store(room + c * K::kLanes, block[c]);
    for (int64_t c = kPiece - left; c < kPiece; c++) meet(X::load(room + c * K::kLanes), c);
  }
  const typename X::M in = X::mask(first_bits(height));
  V largest = sum[0];
#pragma GCC unroll 16
  for (int n = 0; n < kKeys; n++) {
    if constexpr (kScale && K::kPairs) sum[n] = X::mul(factor, sum[n]);
    if constexpr (kRagged) sum[n] = X::select(in, sum[n], X::zero());
    if (n > 0) largest = X::max(sum[n], largest);
    X::store(tile + n * kRow, sum[n]);
  }
  if (top) X::store(top, X::max(largest, X::load(top)));
}

template <class K, bool kScale>
[[gnu::noinline]] void product_of_rows(const LaneRows<K>& x, int64_t rows, int64_t columns,
                                       const Operand& keys, int64_t count, typename K::T* tile,
                                       typename K::T* top) {
  constexpr int kPiece = K::X::kPiece, kAll = K::kLanes / kPiece, kMost = kKeysTogether<K>;
  if (rows > K::kLanes || count > kMost) {
    const int64_t part = count > kMost ? (count + 1) / 2 : count;
    for (int64_t n = 0; n < count; n += part)
      for (int64_t r = 0; r < rows; r += K::kLanes)
        product_of_rows<K, kScale>(x.from(r, n == 0), min_of(K::kLanes, rows - r), columns,
                                   {keys.data + n * keys.m_stride, keys.m_stride, keys.t_stride},
                                   min_of(part, count - n), tile + n * kRow + r,
                                   top ? top + r : nullptr);
    return;
  }
  const auto some = [&]<int kKeys>() {
    if (count != kKeys && count != kKeys - 1) return;
    const auto run = rows == K::kLanes            ? rows_product<K, kKeys, kAll, false, kScale>
                     : rows == K::kLanes - kPiece ? rows_product<K, kKeys, kAll - 1, false, kScale>
                     : 2 * rows == K::kLanes      ? rows_product<K, kKeys, kAll / 2, false, kScale>
                                                  : rows_product<K, kKeys, kAll, true, kScale>;
    run(x, rows, columns, keys.data, keys.m_stride, count, tile, top);
  };
  some.template operator()<2>();
  some.template operator()<4>();
  some.template operator()<6>();
  some.template operator()<8>();
  some.template operator()<10>();
  if constexpr (kMost > 10) some.template operator()<12>();
}

}  // namespace
}  // namespace mha_ext::cpu

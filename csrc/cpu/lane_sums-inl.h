// Scores of few queries whose rows are the lanes of a product, as those of a tile are. Each sum is
// the one that few_scores makes, whose terms lie in the lanes of a vector: for each lane its terms,
// one after the other; then these sums two by two, as X::sum_each adds them up.
namespace mha_ext::cpu {
namespace {

// What a lane of few_scores reads in a step: so many units.
template <class K>
constexpr int64_t kLaneUnits = K::kSplit ? 2 : 1;

// to[unit][whole vectors of rows] = from[unit][64 rows]: the lanes in the order in which
// sums_over_lanes adds them up, which is 0, 8, 4, 12, 2 ... of 16, the terms of each together.
template <class K>
void order_lanes(const typename K::Unit* from, int64_t columns, typename K::Unit* to,
                 int64_t rows) {
  constexpr int64_t kStep = kLaneUnits<K>;
  const int64_t units = ceil_div(columns, K::Dot::kStep), ld = padded<K>(rows);
  for (int64_t turn = 0; turn < K::kLanes; turn++) {
    int64_t lane = 0;
    for (int64_t bit = 1; bit < K::kLanes; bit *= 2)
      if (turn & bit) lane += K::kLanes / 2 / bit;
    for (int64_t first = lane * kStep; first < units; first += K::kLanes * kStep)
      for (int64_t unit = first; unit < min_of(units, first + kStep); unit++, to += ld)
        __builtin_memcpy(to, from + unit * kRow, (size_t)ld * sizeof(typename K::Unit));
  }
}

// Rows as the lanes of a product of scores; of few queries by way of `room`, in the order in which
// sums_over_lanes takes them.
template <class K, bool kScale = false>
void pack_score_lanes(const typename K::S* from, int64_t stride, int64_t rows, int64_t columns,
                      typename K::Unit* room, typename K::Unit* to, typename K::T factor = 1) {
  pack_lanes<K, kScale>(from, stride, rows, columns, room ? room : to, factor);
  if (room) order_lanes<K>(room, columns, to, rows);
}

// The sums of MR keys and NV vectors of rows, `ld` units from one unit of the rows to the next.
template <class K, int MR, int NV>
class LaneSums {
  using X = typename K::X;
  using Dot = typename K::Dot;
  using Unit = typename K::Unit;

 public:
  struct Sums {
    typename X::V v[MR][NV];
  };

  LaneSums(const Operand& keys, int64_t units, const Unit* rows, int64_t ld, Ahead& ahead)
      : keys_(keys), units_(units), rows_(rows), ld_(ld), ahead_(ahead), asks_(ahead.waiting()) {}
  [[gnu::always_inline]] inline Sums all() {
    lines_ = ahead_.lines();
    const Sums sums = over_lanes<1>(0);
    ahead_.stopped(lines_);
    return sums;
  }

 private:
  // The sum over every kStride-th lane from `lane` on.
  template <int kStride>
  [[gnu::always_inline]] inline Sums over_lanes(int64_t lane) {
    if constexpr (kStride == K::kLanes) {
      return of_lane(lane);
    } else {
      Sums sums = over_lanes<2 * kStride>(lane);
      const Sums others = over_lanes<2 * kStride>(lane + kStride);
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int i = 0; i < NV; i++) sums.v[m][i] = X::add(sums.v[m][i], others.v[m][i]);
      return sums;
    }
  }
  [[gnu::always_inline]] inline Sums of_lane(int64_t lane) {
    constexpr int64_t kUnit = sizeof(Unit), kStep = kLaneUnits<K>;
    Sums sums;
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int i = 0; i < NV; i++) sums.v[m][i] = X::zero();
    const char* key = keys_.data + lane * kStep * kUnit;
    const auto add = [&](const char* from) __attribute__((always_inline)) {
      typename Dot::Vector v[NV];
#pragma GCC unroll 4
      for (int i = 0; i < NV; i++) v[i] = Dot::load(rows_ + i * K::kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < MR; m++) {
        const typename Dot::Vector u = Dot::broadcast(from + m * keys_.m_stride);
#pragma GCC unroll 4
        for (int i = 0; i < NV; i++) sums.v[m][i] = Dot::accumulate(sums.v[m][i], v[i], u);
      }
      rows_ += ld_;
    };
    int64_t left = units_ - lane * kStep;
    for (; left >= kStep; left -= K::kLanes * kStep, key += K::kLanes * kStep * kUnit)
#pragma GCC unroll 2
      for (int64_t u = 0; u < kStep; u++) add(key + u * kUnit);
    if (kStep > 1 && left > 0) add(key);
    constexpr int64_t kAsked = 4;  // terms with which a line is asked for
    for (int64_t i = 0; asks_ && i < units_; i += K::kLanes * kAsked) ahead_.ask(lines_);
    return sums;
  }

  const Operand keys_;
  const int64_t units_;
  const Unit* rows_;
  const int64_t ld_;
  Ahead& ahead_;
  const bool asks_;
  Ahead::Lines lines_;
};

// tile[key][64 rows] of NV vectors of rows.
template <class K, int NV>
__attribute__((noinline)) void lane_sums_panel(const Operand& from, int64_t keys, int64_t units,
                                               const typename K::Unit* rows, int64_t ld,
                                               typename K::T scale, typename K::T* tile,
                                               Ahead& ahead) {
  using X = typename K::X;
  constexpr int kMost = K::X::kRegisters == 32 ? (NV == 1 ? 6 : 4) : NV == 1 ? 8 : 6;
  Operand key = from;
  const typename X::V factor = X::set(scale);
  const auto some = [&]<int MR>() __attribute__((always_inline)) {
    const auto sums = LaneSums<K, MR, NV>(key, units, rows, ld, ahead).all();
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
      for (int i = 0; i < NV; i++)
        X::store(tile + m * kRow + i * K::kLanes,
                 K::kPairs ? X::mul(factor, sums.v[m][i]) : sums.v[m][i]);
    key.data += MR * key.m_stride;
    tile += MR * kRow;
    keys -= MR;
  };
  while (keys >= kMost) some.template operator()<kMost>();
  while (keys > 0) some.template operator()<1>();
}

// tile[key][64 rows] = scale times the sums over lanes of keys and rows, the latter from
// order_lanes; where these carry the scale (all but pairs) without it. Up to whole vectors.
template <class K>
void sums_over_lanes(const Operand& from, int64_t keys, int64_t columns,
                     const typename K::Unit* rows, int64_t count, typename K::T scale,
                     typename K::T* tile, Ahead& ahead) {
  if constexpr (K::kGroupedQueries > 0) {  // else nobody asks
    const int64_t units = ceil_div(columns, K::Dot::kStep), ld = padded<K>(count);
    int64_t vectors = vectors_of<K>(count);
    const auto panel = [&]<int NV>() {
      lane_sums_panel<K, NV>(from, keys, units, rows, ld, scale, tile, ahead);
      rows += NV * K::kLanes;
      tile += NV * K::kLanes;
      vectors -= NV;
    };
    while (vectors > 3 || vectors == 2) panel.template operator()<2>();
    if (vectors == 3) panel.template operator()<3>();
    if (vectors == 1) panel.template operator()<1>();
  }
}

}  // namespace
}  // namespace mha_ext::cpu

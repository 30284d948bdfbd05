// Scores of one tile: scale Q K^T + bias.
namespace mha_ext::cpu {
namespace {

// tile *= factor
template <class K>
void scale_tile(typename K::T factor, int64_t keys, int64_t vectors, typename K::T* tile) {
  using X = typename K::X;
  if (factor == 1) return;
  const typename X::V f = X::set(factor);
  for (int64_t n = 0; n < keys; n++)
    for (int64_t i = 0; i < vectors; i++) {
      typename K::T* p = tile + n * kRow + i * K::kLanes;
      X::store(p, X::mul(f, X::load(p)));
    }
}

// Q as lanes for the scores. Where a number is wide enough it carries the scale of the scores;
// bfloat16 does not.
template <class K>
void pack_query(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows,
                typename K::Unit* to) {
  pack_lanes<K, !K::kPairs>(row_of<K>(a.query, b, h, q0), a.query.row, rows, a.head_dim, to,
                            (typename K::T)a.scale);
}

// The lanes that so many queries take of a product: whole vectors, or half of one in the end where
// that is half the work.
template <class K>
int64_t taken_lanes(int64_t queries) {
  if constexpr (requires { K::X::kHalfQueries; })
    if (K::X::kHalfQueries && K::Dot::kRowBlock == 1 && ends_in_half<typename K::X>(queries))
      return round_up(queries, K::X::Half::kLanes);
  return padded<K>(queries);
}

// tile[key][64 queries] = sum_d rows[key][d] lanes[d][query], kScaled: times factor; up to whole
// vectors, beyond the queries it is zero; in pieces of kScorePiece. `top`, where it is set (one
// piece, unscaled), rises to the largest of each lane.
template <class K, bool kScaled = false>
void score_product(const Operand& rows, int64_t keys, int64_t columns, const LaneRows<K>& x,
                   int64_t queries, typename K::T* tile, Ahead* ahead = nullptr,
                   typename K::T factor = 1, typename K::T* top = nullptr) {
  if constexpr (kTakesRows<K>) {
    if (x.rows) [[unlikely]]
      return x.factor == 1 ? product_of_rows<K, false>(x, queries, columns, rows, keys, tile, top)
                           : product_of_rows<K, true>(x, queries, columns, rows, keys, tile, top);
  }
  const typename K::Unit* const lanes = x.packed;
  constexpr Update kFirst = kScaled ? Update::kStoreScaled : Update::kStore;
  constexpr Update kRest = kScaled ? Update::kAddScaled : Update::kAddSum;
  using X = typename K::X;
  using Dot = typename K::Dot;
  constexpr int64_t kPiece = kScorePiece / Dot::kStep;
  const int64_t units = units_of<K>(columns), taken = taken_lanes<K>(queries);
  if constexpr (has_half<X>)
    for (int64_t n = 0; taken < padded<K>(queries) && n < keys; n++)
      X::Half::store(tile + n * kRow + taken, X::Half::zero());
  if constexpr (!K::kPairs)
    if (top)
      return product_columns<X, Dot, Contiguous::kAlongT, Update::kStoreTop>(
          rows, keys, units, lanes, kRow, taken, tile, kRow, ahead, factor, top);
  product_columns<X, Dot, Contiguous::kAlongT, kFirst>(rows, keys, min_of(units, kPiece), lanes,
                                                       kRow, taken, tile, kRow, ahead, factor);
  for (int64_t t = kPiece; t < units; t += kPiece) {
    const Operand piece{rows.data + t * rows.t_stride, rows.m_stride, rows.t_stride};
    product_columns<X, Dot, Contiguous::kAlongT, kRest>(piece, keys, min_of(units - t, kPiece),
                                                        lanes + t * kRow, kRow, taken, tile, kRow,
                                                        ahead, factor);
  }
}

// Rows that will be wanted next: asked for in their order, a share with each of `units` pieces of
// work; from Zen 5 on into the nearest cache, unless they lie so far apart that they share few of
// its sets.
class NextRows {
 public:
  NextRows() = default;
  NextRows(const char* data, int64_t stride, int64_t bytes, int64_t rows, int64_t units)
      : row_(data), stride_(stride), bytes_(bytes), rows_(rows) {
    share_ = ceil_div(rows * ceil_div(bytes, kLine), max_of(1, units));
    constexpr int64_t kSets = 64;
    nearest_ = whole_vectors() && (2 * bytes >= stride || bytes >= kSets * kLine);
  }
  [[gnu::always_inline]] void ask() {
    if (rows_ <= 0) return;
    nearest_ ? ask_into<3>() : ask_into<2>();
  }

 private:
  template <int kCache>  // as __builtin_prefetch numbers them
  [[gnu::always_inline]] void ask_into() {
    const char* row = row_;  // in registers: this stands beside every few multiply-adds
    int64_t at = at_, rows = rows_;
    for (int64_t i = share_; i > 0; i--) {
      __builtin_prefetch(row + at, 0, kCache);
      if ((at += kLine) < bytes_) continue;
      at = 0;
      row += stride_;
      if (--rows == 0) break;
    }
    row_ = row;
    at_ = at;
    rows_ = rows;
  }

  const char* row_ = nullptr;
  int64_t stride_ = 0, bytes_ = 0, rows_ = 0, share_ = 0, at_ = 0;
  bool nearest_ = false;
};

// Beside each row of few queries' K or V, the one X::kAskedBeside rows on is asked for, into the
// cache X::kAskedInto (as __builtin_prefetch numbers them); 0: NextRows asks. And what is
// X::kAskedInOrder bytes on, where a head is read in the order of memory; 0: nobody does.
// Of `rows` rows: on some processors NextRows is better for a row that is little work for each of
// its lines (X::kLightRows: one of four bytes a number), where the order of memory matters more,
// and for rows that are widened, from three on, where the arithmetic takes longer than the memory.
template <class K>
constexpr bool asks_beside(int64_t rows) {
  constexpr int64_t kItem = sizeof(typename K::S);
  if constexpr (requires { K::X::kLightRows; })
    return rows > kItem / 4 * K::X::kLightRows && (K::kInPlace || rows < 3);
  else
    return K::X::kAskedBeside > 0;
}
template <class K, int kRows, bool kInOrder>
constexpr bool kAsksBeside = kInOrder ? K::X::kAskedInOrder > 0 : asks_beside<K>(kRows);
// What few_scores and few_values ask for while they read rows: nothing, or what NextRows has, or
// the rows `on` further; `then` are those that follow the last one.
template <class K>
struct FewAsk {
  NextRows* next = nullptr;
  const typename K::S* then = nullptr;
  int64_t on = 0;

  // Of row n of `rows`.
  [[gnu::always_inline]] const typename K::S* beside(const typename K::S* rows, int64_t stride,
                                                     int64_t count, int64_t n) const {
    return n + on < count ? rows + (n + on) * stride : then + (n + on - count) * stride;
  }
};
// All of by_rows ask NextRows; for what lies beside, only the first.
template <class K>
FewAsk<K> few_ask(bool beside, int64_t r, NextRows& next, const typename K::S* then) {
  if (!beside) return {&next};
  if (r) return {};
  return {nullptr, then, K::X::kAskedBeside};
}
// The same for rows of `width` numbers in the order of memory, no more than a tile on.
template <class K>
FewAsk<K> few_ask_in_order(int64_t r, const typename K::S* then, int64_t width) {
  constexpr int64_t kBytes = K::X::kAskedInOrder;
  if (r || kBytes == 0 || !whole_vectors()) return {};
  const int64_t row = max_of(1, width) * (int64_t)sizeof(typename K::S);
  return {nullptr, then, max_of(1, min_of(kTile, kBytes / row))};
}
template <class K>
constexpr int64_t kLineItems = kLine / (int64_t)sizeof(typename K::S);

// Columns of a row of few queries, in whole steps of a product.
template <class K>
int64_t few_width(int64_t columns) {
  return round_up(columns, K::kApart ? 2 * K::kLanes : K::kLanes);
}

// s[r][n] = sum_d key[n][d] query[r][d] for kRows rows of queries and kLanes / kRows keys: a vector
// of partial sums for each pair, and all of these are added at once. What a pair's sum is depends
// on neither count. Past the last key the last one stands in. The queries are those of few_query,
// and the sums of pairs are multiplied by the scale afterwards. kInOrder: one key after the other,
// as they lie in memory; else a piece of each in turn, which loads the query less often. kBeside:
// asks for what lies `beside` numbers further.
template <class K, int kRows, bool kWhole, bool kInOrder, bool kBeside = false>
void few_scores_block(const typename K::S* key, int64_t stride, int64_t keys, int64_t columns,
                      const typename K::T* query, int64_t ld, typename K::T scale, typename K::T* s,
                      int64_t beside = 0) {
  using X = typename K::X;
  using V = typename X::V;
  constexpr int kLanes = K::kLanes, kKeys = kLanes / kRows;
  constexpr int kColumns = K::kPairs || K::kSplit ? 2 * kLanes : kLanes;  // of a step
  // Four rows share a pointer: that leaves the addresses in registers.
  const typename K::S* p[kKeys];
#pragma GCC unroll 16
  for (int i = 0; i < kKeys; i++) p[i] = key + (kWhole ? i / 4 * 4 : min_of(i, keys - 1)) * stride;
  V sum[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) sum[i] = X::zero();
  const auto step = [&]<bool kFull>(int first, int last, int64_t d,
                                    int64_t at) __attribute__((always_inline)) {
    constexpr int kParts = K::kSplit ? 2 : 1;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; part++) {
      V q[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++)
        q[r] = X::load(query + r * ld + (K::kPairs ? d / 2 : d) + part * kLanes);
      if constexpr (kRows == 4 && requires(V v) { X::keep(v); })
#pragma GCC unroll 4
        for (int r = 0; r < kRows; r++) X::keep(q[r]);
#pragma GCC unroll 16
      for (int i = first; i < last; i++) {
        const typename K::S* from = (kWhole ? p[i / 4 * 4] + i % 4 * stride : p[i]) + at;
        if (kBeside && part == 0 && (kColumns >= kLineItems<K> || d % kLineItems<K> == 0))
          __builtin_prefetch(from + beside, 0, X::kAskedInto);
        if constexpr (K::kPairs) {
          const auto v = K::Dot::load_row(from, kFull ? kColumns : columns - d);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; r++)
            sum[r * kKeys + i] = K::Dot::add_products(sum[r * kKeys + i], v, q[r]);
        } else {
          V v;
          if constexpr (K::kSplit)
            v = X::split(X::load_pairs(from, kFull ? kColumns : columns - d), part);
          else
            v = kFull ? X::load(from) : X::load(from, columns - d);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; r++) sum[r * kKeys + i] = X::fma(v, q[r], sum[r * kKeys + i]);
        }
      }
    }
  };
  if constexpr (kInOrder) {
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; i++) {
      int64_t d = 0;
      for (; d + kColumns <= columns; d += kColumns) step.template operator()<true>(i, i + 1, d, d);
      if (d < columns) step.template operator()<false>(i, i + 1, d, d);
    }
  } else {
    int64_t d = 0;
    for (; d + kColumns <= columns; d += kColumns) {
      step.template operator()<true>(0, kKeys, d, 0);
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; i++) p[i] += kColumns;
    }
    if (d < columns) step.template operator()<false>(0, kKeys, d, 0);
  }
  typename K::T lanes[kLanes];
  const V sums = X::sum_each(sum);
  X::store(lanes, K::kPairs ? X::mul(X::set(scale), sums) : sums);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
    __builtin_memcpy(s + r * kTile, lanes + r * kKeys, kKeys * sizeof(typename K::T));
}

template <class K, int kRows, bool kInOrder = false>
void few_scores(const typename K::S* key, int64_t stride, int64_t keys, int64_t columns,
                const typename K::T* query, int64_t ld, typename K::T scale, typename K::T* s,
                const FewAsk<K>& ask = {}) {
  constexpr int kKeys = K::kLanes / kRows;
  constexpr bool kBeside = kAsksBeside<K, kRows, kInOrder>, kOneByOne = kInOrder && kRows == 1;
  int64_t n = 0;
  for (; n + kKeys <= keys; n += kKeys) {
    const typename K::S* const from = key + n * stride;
    if (ask.next) ask.next->ask();
    if (kBeside && ask.then)
      few_scores_block<K, kRows, true, kOneByOne, kBeside>(from, stride, kKeys, columns, query, ld,
                                                           scale, s + n,
                                                           ask.beside(key, stride, keys, n) - from);
    else
      few_scores_block<K, kRows, true, kOneByOne>(from, stride, kKeys, columns, query, ld, scale,
                                                  s + n);
  }
  if (n == keys) return;
  if (ask.next) ask.next->ask();
  few_scores_block<K, kRows, false, kOneByOne>(key + n * stride, stride, keys - n, columns, query,
                                               ld, scale, s + n);
}

// run<n>(r) for rows r .. r + n - 1. Three rows are done as four: the padding holds zeros.
template <class K, class Run>
void by_rows(int64_t rows, const Run& run) {
  int64_t r = 0;
  if constexpr (K::kLanes >= 4)
    for (; rows - r > 2; r += 4) run.template operator()<4>(r);
  for (; rows - r > 1; r += 2) run.template operator()<2>(r);
  if (r < rows) run.template operator()<1>(r);
}

// A row of queries as few_scores takes its columns: times the scale, in the type of the sums; or as
// it is, in pairs. Zero past its end.
template <class K>
void few_operand(const typename K::S* row, int64_t columns, typename K::T factor,
                 typename K::T* to) {
  using X = typename K::X;
  const typename X::V scale = X::set(factor);
  for (int64_t d = 0; d < columns; d += K::kSplit ? 2 * K::kLanes : K::kLanes) {
    if constexpr (K::kPairs) {
      X::store(to + d, K::Dot::load_row(row + 2 * d, columns - 2 * d));
    } else if constexpr (K::kSplit) {
      const auto pairs = X::load_pairs(row + d, columns - d);
      for (int part = 0; part < 2; part++)
        X::store(to + d + part * K::kLanes, X::mul(scale, X::split(pairs, part)));
    } else {
      X::store(to + d, X::mul(scale, load_up_to<X>(row + d, columns - d)));
    }
  }
}
template <class K>
void few_query(const Attention& a, int64_t b, int64_t h, int64_t i, typename K::T* to) {
  few_operand<K>(row_of<K>(a.query, b, h, i), a.head_dim, (typename K::T)a.scale, to);
}

// Where forward takes a few queries, every other kernel must sum their scores in the same order: P
// = exp(S - lse) is right only for the S that lse was made of.
template <class K>
void few_scores_tile(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0,
                     int64_t keys, typename K::T* tile) {
  constexpr int64_t kSome = 4, kWidth = kMaxHeadDim + K::kLanes;
  typename K::T query[kSome * kWidth], s[kSome * kTile];
  const typename K::S* key = row_of<K>(a.key, b, kv_head(a, h), k0);
  for (int64_t first = 0; first < padded<K>(rows); first += kSome) {
    const int64_t some = max_of(0, min_of(kSome, rows - first));
    for (int64_t r = 0; r < some; r++) few_query<K>(a, b, h, q0 + first + r, query + r * kWidth);
    for (int64_t d = 0; some == 3 && d < few_width<K>(a.head_dim); d++) query[3 * kWidth + d] = 0;
    by_rows<K>(some, [&]<int kRows>(int64_t r) __attribute__((always_inline)) {
      few_scores<K, kRows>(key, a.key.row, keys, a.head_dim, query + r * kWidth, kWidth,
                           (typename K::T)a.scale, s + r * kTile);
    });
    const int64_t lanes = min_of(kSome, padded<K>(rows) - first);
    for (int64_t n = 0; n < keys; n++)
      for (int64_t r = 0; r < lanes; r++)
        tile[n * kRow + first + r] = r < some ? s[r * kTile + n] : 0;
  }
}

// score_product of each band; what no band needs is left as it is.
template <class K, bool kScaled = false>
void score_product_bands(const Range* bands, const Operand& rows, int64_t keys, int64_t columns,
                         const LaneRows<K>& lanes, int64_t queries, typename K::T* tile,
                         Ahead* ahead = nullptr, typename K::T factor = 1,
                         typename K::T* top = nullptr) {
  if (!bands)
    return score_product<K, kScaled>(rows, keys, columns, lanes, queries, tile, ahead, factor, top);
  const int64_t vectors = vectors_of<K>(queries);
  for_bands<K>(bands, keys, vectors, [&](Range seen, int64_t first, int64_t count) {
    const Operand from{rows.data + seen.begin * rows.m_stride, rows.m_stride, rows.t_stride};
    const int64_t lane = first * K::kLanes;
    score_product<K, kScaled>(from, seen.end - seen.begin, columns, lanes.at(lane),
                              min_of(count * K::kLanes, queries - lane),
                              tile + seen.begin * kRow + lane, ahead, factor, top);
  });
}

// Whether the product of Q and K is all that there is to the scores, in one piece: then it can say
// how large they become.
template <class K>
bool scores_are_product(const Attention& a, const Range* bands) {
  return !K::kPairs && !bands && !a.bias.data && a.head_dim <= kScorePiece &&
         !has_few_queries(a, K::kLimits);
}

// S[key][64 queries] = scale Q K^T, of the bands. top[64]: where scores_are_product, the largest of
// each query, hidden pairs too.
template <class K>
void product_scores(const Attention& a, int64_t rows, int64_t keys, const LaneRows<K>& query_lanes,
                    const Operand& key_rows, typename K::T* s, Ahead* ahead, const Range* bands,
                    typename K::T* top) {
  const int64_t vectors = vectors_of<K>(rows);
  if (top)
    for (int64_t r = 0; r < vectors * K::kLanes; r++) top[r] = -(typename K::T)INFINITY;
  constexpr bool kScaled = K::kPairs && K::Dot::kRowBlock == 1;
  const typename K::T scale = (typename K::T)a.scale;
  score_product_bands<K, kScaled>(bands, key_rows, keys, a.head_dim, query_lanes, rows, s, ahead,
                                  scale, top);
  if constexpr (K::kPairs && !kScaled) scale_tile<K>(scale, keys, vectors, s);
}

// S of queries of one head, with the bias. A bias of -inf hides the pair: `visible` and `bits` say
// so.
template <class K>
Visibility scores(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0,
                  int64_t keys, const LaneRows<K>& query_lanes, const Operand& key_rows,
                  Visibility visible, uint64_t* bits, typename K::T* s, typename K::T* scratch,
                  Ahead* ahead = nullptr, const Range* bands = nullptr,
                  typename K::T* top = nullptr) {
  if (has_few_queries(a, K::kLimits)) {
    few_scores_tile<K>(a, b, h, q0, rows, k0, keys, s);
  } else {
    if constexpr (K::kCut)
      if (in_limbs<K>(a, b, q0, k0, keys)) {
        limbs_scores<K>(key_rows, a.head_dim, query_lanes.packed, rows, s);
        return a.bias.data ? add_bias<K>(a, b, h, q0, rows, k0, keys, visible, bits, s, scratch)
                           : visible;
      }
    product_scores<K>(a, rows, keys, query_lanes, key_rows, s, ahead, bands, top);
  }
  if (!a.bias.data) return visible;
  return add_bias<K>(a, b, h, q0, rows, k0, keys, visible, bits, s, scratch);
}

}  // namespace
}  // namespace mha_ext::cpu

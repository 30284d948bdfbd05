// What the lanes of a block of forward are: the queries of one head; or, where these are less than
// a tile, those of all heads that share K and V, head after head (Ainslie et al. 2023 call such
// heads a group).
namespace mha_ext::cpu {
namespace {

// Rows where they are written: `stride` numbers from one to the next.
template <class K>
struct WrittenRows {
  typename K::S* data;
  int64_t stride;
};

// Asks for rows [first, first + 64) of a head, to be there when their turn comes; for none where
// there is no tensor.
template <class K>
void ask_rows(const Rows& t, int64_t b, int64_t h, int64_t first, int64_t last, int64_t width,
              Ahead& ahead) {
  constexpr int64_t kItem = sizeof(typename K::S);
  if (!t.data) return;
  ahead.add(row_of<K>(t, b, h, first), t.row * kItem, width * kItem, min_of(kTile, last - first));
}
// What this thread will most likely work on next.
struct NextHead {
  int64_t batch, head;
  bool other_keys;  // than this one's
};
inline NextHead head_after(const Attention& a, int64_t b, int64_t h) {
  const bool last = h + 1 == a.heads;
  return {last ? b + 1 : b, last ? 0 : h + 1, last || (h + 1) % (a.heads / a.kv_heads) == 0};
}

// Row r is query r of head h.
template <class K>
struct HeadRows {
  using T = typename K::T;
  static constexpr bool kGroup = false;
  const Attention& a;
  int64_t b, h;

  int64_t kv() const { return kv_head(a, h); }
  // Where the levels (lse) of row 0 stand.
  int64_t first_level() const { return (b * a.heads + h) * a.queries; }
  Range seen(int64_t q0, int64_t rows) const { return seen_by_any(a, b, q0, q0 + rows - 1); }
  Visibility visibility(int64_t q0, int64_t rows, int64_t k0, int64_t keys, uint64_t* bits) const {
    return visibility_of<K>(a, b, h, q0, rows, k0, keys, bits);
  }
  const Range* bands(int64_t q0, int64_t rows, int64_t k0, int64_t keys, Range* room) const {
    return find_bands<K>(a, b, q0, rows, k0, keys, room) ? room : nullptr;
  }
  void pack(int64_t q0, int64_t rows, typename K::Unit* to) const {
    pack_query<K>(a, b, h, q0, rows, to);
  }
  Visibility scores(int64_t q0, int64_t rows, int64_t k0, int64_t keys,
                    const LaneRows<K>& query_lanes, const Operand& key_rows, Visibility visible,
                    uint64_t* bits, T* s, T* scratch, Ahead* ahead, const Range* bands,
                    T* top) const {
    return mha_ext::cpu::scores<K>(a, b, h, q0, rows, k0, keys, query_lanes, key_rows, visible,
                                   bits, s, scratch, ahead, bands, top);
  }
  void dropout(int64_t q0, int64_t rows, int64_t k0, int64_t keys, uint64_t* keep) const {
    dropout_tile<K>(a, b, h, q0, rows, k0, keys, keep);
  }
  void ask_pairs(int64_t q0, int64_t k0, Ahead& ahead) const {
    mha_ext::cpu::ask_pairs<K>(a, b, h, q0, k0, ahead);
  }
  void ask_rows(const Rows& t, int64_t first, int64_t last, int64_t width, Ahead& ahead) const {
    mha_ext::cpu::ask_rows<K>(t, b, h, first, last, width, ahead);
  }
  NextHead next() const { return head_after(a, b, h); }
  // Where a block writes its output, and what is left to do then.
  WrittenRows<K> out(int64_t q0) const { return {row_of<K>(a.out, b, h, q0), a.out.row}; }
  void wrote(int64_t, int64_t) const {}
};

// What the rows of a group need beside a block's scratch.
template <class K>
struct GroupScratch {
  typename K::S* rows;      // of one block, of Q or of the output
  typename K::T* bias;      // of a tile, in whatever type it has
  typename K::Unit* lanes;  // Q before it is in the order of sums over lanes

  GroupScratch(const Attention& a, Arena& arena) {
    rows = arena.take<typename K::S>(kTile * max_of(round_up(a.head_dim, 2), a.value_dim));
    bias = arena.take<typename K::T>(a.bias.data ? kTile * kTile : 0);
    lanes = arena.take<typename K::Unit>(
        has_few_queries(a, K::kLimits) ? units_of<K>(a.head_dim) * kRow : 0);
  }
};

// Row r is query r % queries of head r / queries of the group that shares key/value head `kv_`.
// A row gets the bits that it gets among those of its head.
template <class K>
class GroupRows {
  using T = typename K::T;
  using S = typename K::S;

 public:
  static constexpr bool kGroup = true;
  const Attention& a;
  const int64_t b;

  GroupRows(const Attention& problem, int64_t batch, int64_t kv, const GroupScratch<K>& w)
      : a(problem), b(batch), kv_(kv), w_(w), heads_(problem), gathered_(problem) {
    heads_.heads = heads_.kv_heads = 1;
    heads_.queries = a.heads * a.queries;
    heads_.mask = over_heads(a.mask);
    heads_.bias = over_heads(a.bias);
    gathered_.bias.data = w.bias;
    gathered_.bias.batch = gathered_.bias.head = 0;
    gathered_.bias.query = kTile;
    gathered_.bias.key = 1;
    for (int64_t at = 0; at < kTile; at += a.queries) repeat_ |= 1ull << at;
  }

  int64_t kv() const { return kv_; }
  int64_t first_level() const { return (b * a.heads + first_head()) * a.queries; }
  Range seen(int64_t, int64_t) const { return seen_by_any(a, b, 0, a.queries - 1); }
  Visibility visibility(int64_t q0, int64_t rows, int64_t k0, int64_t keys, uint64_t* bits) const {
    if (!a.mask.data || a.mask.head == 0) {  // to all heads the same is visible
      const Visibility one = visibility_of<K>(a, b, first_head(), 0, a.queries, k0, keys, bits);
      if (one == Visibility::kPartial) {
        const int64_t begin = q0 % a.queries;
        for (int64_t n = 0; n < keys; n++) {
          const uint64_t turned = bits[n] >> begin | bits[n] << (a.queries - begin);
          bits[n] = (turned & first_bits(a.queries)) * repeat_ & first_bits(rows);
        }
      }
      return one;
    }
    uint64_t any = 0, all = ~0ull;
    for (int64_t r = 0; r < rows; r++) {
      const FewRow row = row_at(q0 + r);
      bits[r] = row_visibility(a, b, row.head, row.query, k0, keys);
      any |= bits[r];
      all &= bits[r];
    }
    if (!any) return Visibility::kEmpty;
    if (all == first_bits(keys)) return Visibility::kFull;
    turn(bits, rows);
    return Visibility::kPartial;
  }
  const Range* bands(int64_t, int64_t, int64_t, int64_t, Range*) const { return nullptr; }
  void pack(int64_t q0, int64_t rows, typename K::Unit* to) const {
    const int64_t ld = round_up(a.head_dim, 2);
    for (int64_t r = 0; r < rows; r++) {
      const FewRow row = row_at(q0 + r);
      __builtin_memcpy(w_.rows + r * ld, row_of<K>(a.query, b, row.head, row.query),
                       (size_t)a.head_dim * sizeof(S));
    }
    pack_score_lanes<K, !K::kPairs>(w_.rows, ld, rows, a.head_dim, over_lanes_ ? w_.lanes : nullptr,
                                    to, (T)a.scale);
  }
  Visibility scores(int64_t q0, int64_t rows, int64_t k0, int64_t keys,
                    const LaneRows<K>& query_lanes, const Operand& key_rows, Visibility visible,
                    uint64_t* bits, T* s, T* scratch, Ahead* ahead, const Range*, T* top) const {
    if (over_lanes_)
      sums_over_lanes<K>(key_rows, keys, a.head_dim, query_lanes.packed, rows, (T)a.scale, s,
                         *ahead);
    else
      product_scores<K>(a, rows, keys, query_lanes, key_rows, s, ahead, nullptr, top);
    if (!a.bias.data) return visible;
    if (heads_.bias.data)
      return add_bias<K>(heads_, b, 0, first_head() * a.queries + q0, rows, k0, keys, visible, bits,
                         s, scratch);
    by_bias_type<K>(a, [&]<class E>() { gather_bias<E>(q0, rows, k0, keys); });
    return add_bias<K>(gathered_, 0, 0, 0, rows, 0, keys, visible, bits, s, scratch);
  }
  void dropout(int64_t q0, int64_t rows, int64_t k0, int64_t keys, uint64_t* keep) const {
    for (int64_t r = 0; r < rows; r++) {
      const FewRow row = row_at(q0 + r);
      keep[r] = dropout_row<K>(a, b, row.head, row.query, k0, keys);
    }
    turn(keep, rows);
  }
  // A few rows of many heads: these are as soon there as asked for.
  void ask_rows(const Rows&, int64_t, int64_t, int64_t, Ahead&) const {}
  NextHead next() const { return head_after(a, b, first_head() + a.heads / a.kv_heads - 1); }
  // Where the heads' masks and biases follow one another.
  void ask_pairs(int64_t q0, int64_t k0, Ahead& ahead) const {
    mha_ext::cpu::ask_pairs<K>(heads_, b, 0, first_head() * a.queries + q0, k0, ahead);
  }
  WrittenRows<K> out(int64_t) const { return {w_.rows, a.value_dim}; }
  void wrote(int64_t q0, int64_t rows) const {
    for (int64_t r = 0; r < rows; r++) {
      const FewRow row = row_at(q0 + r);
      __builtin_memcpy(row_of<K>(a.out, b, row.head, row.query), w_.rows + r * a.value_dim,
                       (size_t)a.value_dim * sizeof(S));
    }
  }

 private:
  int64_t first_head() const { return kv_ * (a.heads / a.kv_heads); }
  FewRow row_at(int64_t r) const { return few_row(a, kv_, r); }
  // The same for all rows of all heads, as if they were queries of one; nothing where that takes
  // more than one stride.
  Pairs over_heads(Pairs pairs) const {
    const int64_t step = a.queries == 1 ? pairs.head : pairs.query;
    if (a.queries > 1 && pairs.head != a.queries * pairs.query) pairs.data = nullptr;
    pairs.head = 0;
    pairs.query = step;
    return pairs;
  }
  // Bits of rows to bits of keys.
  static void turn(uint64_t* words, int64_t rows) {
    using Bytes = typename K::X::U::Bytes;
    for (int64_t r = rows; r < kTile; r++) words[r] = 0;
    if constexpr (Bytes::kWhole)
      Bytes::transpose(words);
    else
      transpose_bits(words);
  }
  template <class E>
  void gather_bias(int64_t q0, int64_t rows, int64_t k0, int64_t keys) const {
    for (int64_t r = 0; r < rows; r++) {
      const FewRow row = row_at(q0 + r);
      const E* const from = (const E*)a.bias.data + b * a.bias.batch + row.head * a.bias.head +
                            row.query * a.bias.query + k0 * a.bias.key;
      E* const to = (E*)w_.bias + r * kTile;
      if (a.bias.key == 1)
        __builtin_memcpy(to, from, (size_t)keys * sizeof(E));
      else
        for (int64_t n = 0; n < keys; n++) to[n] = from[n * a.bias.key];
    }
  }

  const int64_t kv_;
  const GroupScratch<K>& w_;
  Attention heads_, gathered_;  // with masks and biases of all rows, or with one gathered
  uint64_t repeat_ = 0;         // a bit for each head in a block
  const bool over_lanes_ = has_few_queries(a, K::kLimits);
};

}  // namespace
}  // namespace mha_ext::cpu

// Short heads whose keys are one tile, several at a time: their queries lie side by side in the
// lanes of a tile, and what happens to the pairs happens to all of them at once.
namespace mha_ext::cpu {
namespace {

// Heads of one group, numbered b * heads + h; the lanes of each begin with a whole vector.
struct Heads {
  int64_t first, count;
};
// run(i, b, h, lane) for each of them.
template <class K, class Run>
[[gnu::always_inline]] inline void for_heads(const Attention& a, Heads heads, int64_t rows,
                                             const Run& run) {
  const int64_t lanes = padded<K>(rows);
  int64_t b = heads.first / a.heads, h = heads.first - b * a.heads;
  for (int64_t i = 0; i < heads.count; i++) {
    run(i, b, h, i * lanes);
    if (++h == a.heads) {
      h = 0;
      b++;
    }
  }
}
// The head that follows one so many places later.
struct LaterHead {
  int64_t batch, head;
  LaterHead(const Attention& a, int64_t b, int64_t h, int64_t count) : batch(b), head(h + count) {
    for (; head >= a.heads; head -= a.heads) batch++;
  }
};

// The keys that they meet: those that lengths hide from all of them are as if they were not there,
// unless rows that see nothing are uniform. `all`: each meets all of these.
struct MetKeys {
  int64_t count = 0;
  bool all = true;
  MetKeys(const Attention& a, Heads heads) {
    const int64_t first = heads.first / a.heads, last = (heads.first + heads.count - 1) / a.heads;
    int64_t least = a.keys;
    for (int64_t b = first; b <= last; b++) {
      const int64_t keys = key_count(a, b);
      count = max_of(count, keys);
      least = min_of(least, keys);
    }
    if (count == 0 || a.uniform_empty_rows) count = a.keys;
    all = least == count;
  }
};
// Whether no pair of a head with these keys is hidden, and scores are what products of Q and K
// give, and nothing else.
template <class K>
bool all_are_products(const Attention& a, const MetKeys& keys) {
  return keys.all && !a.band.left_bounded && !a.band.right_bounded && !a.mask.data &&
         !a.bias.data && !has_few_queries(a, K::kLimits);
}
// Whether the products of queries and keys take so long that they ask for all that they will read
// of a later head, a line with each step. (Those that take rows ask for rows alone: asking takes
// the place of a load, of which they have as many as fit. A matrix unit's ask for nothing. Numbers
// that are widened before are half as many bytes, and their products lose more than that is worth.)
template <class K>
bool asks_for_all(const Attention& a, int64_t keys) {
  constexpr int64_t kEnough = 16;
  return (K::kInPlace || K::kPairs) && !K::kCut && K::Dot::kRowBlock == 1 && keys >= kEnough &&
         !takes_rows<K>(a.queries, keys, max_of(a.head_dim, a.value_dim));
}
template <class K>
void ask_head(const Rows& t, int64_t b, int64_t h, int64_t rows, int64_t columns, Ahead& ahead) {
  constexpr int64_t kItem = sizeof(typename K::S);
  ahead.add(row_of<K>(t, b, h, 0), t.row * kItem, columns * kItem, rows, true);
}
// Has the product of `lanes` ask for the same rows of a later head: beside those, where it takes
// rows, or with what is ahead.
template <class K>
[[gnu::always_inline]] inline void ask_with_product(const Rows& t, int64_t b, int64_t h,
                                                    int64_t rows, int64_t columns,
                                                    LaneRows<K>& lanes, Ahead& ahead) {
  if (lanes.rows)
    lanes.next = bytes_to<K>(t, b, h, 0, lanes.rows);
  else
    ask_head<K>(t, b, h, rows, columns, ahead);
}
// Asks for `count` numbers from `first` on of lse, or what else is a number for each query, into
// the nearest cache: a thread would wait for them with nothing else to do.
template <class K>
[[gnu::always_inline]] inline void ask_levels(const void* levels, int64_t first, int64_t count) {
  if (!levels) return;
  constexpr int64_t kItem = sizeof(typename K::T);
  const uintptr_t begin = (uintptr_t)levels + first * kItem;
  for (uintptr_t at = begin; at < begin + count * kItem + kLine; at += kLine)
    __builtin_prefetch((const void*)at, 0, 3);
}

// to[key] |= the bits of some rows, from `lane` on.
inline void add_bits(const uint64_t* bits, int64_t keys, int64_t rows, int64_t lane, uint64_t* to) {
  for (int64_t n = 0; n < keys; n++) to[n] |= (bits[n] & first_bits(rows)) << lane;
}
inline void fill_bits(uint64_t bits, int64_t keys, uint64_t* to) {
  for (int64_t n = 0; n < keys; n++) to[n] = bits;
}

// What the heads see, one after the other. Unless all see everything, which `partial` says, bit
// lane + r of bits[key] says whether query r of a head does.
class SeenByHeads {
 public:
  SeenByHeads(int64_t keys, uint64_t* bits) : keys_(keys), bits_(bits) {}
  bool partial() const { return partial_; }
  bool any() const { return any_; }
  // `bits` as tile_visibility leaves them.
  void add(Visibility visible, const uint64_t* bits, int64_t rows, int64_t lane) {
    if (visible != Visibility::kFull && !partial_) fill_bits(full_, keys_, bits_);
    partial_ |= visible != Visibility::kFull;
    any_ |= visible != Visibility::kEmpty;
    const uint64_t all = first_bits(rows) << lane;
    full_ |= all;
    if (visible == Visibility::kPartial)
      add_bits(bits, keys_, rows, lane, bits_);
    else if (visible == Visibility::kFull && partial_)
      for (int64_t n = 0; n < keys_; n++) bits_[n] |= all;
  }

 private:
  int64_t keys_;
  uint64_t* bits_;
  uint64_t full_ = 0;  // the rows of those before, while these see everything
  bool partial_ = false, any_ = false;
};

// What dropout keeps of the heads: `one` has room for a head.
template <class K>
void drop_heads(const Attention& a, Heads heads, int64_t q0, int64_t rows, int64_t keys,
                uint64_t* one, uint64_t* keep) {
  fill_bits(0, keys, keep);
  for_heads<K>(a, heads, rows, [&](int64_t, int64_t b, int64_t h, int64_t lane) {
    dropout_tile<K>(a, b, h, q0, rows, 0, keys, one);
    add_bits(one, keys, rows, lane, keep);
  });
}

}  // namespace
}  // namespace mha_ext::cpu

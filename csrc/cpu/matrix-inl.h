// A whole tile of forward where a matrix unit does the products.
namespace mha_ext::cpu {
namespace {

// m, l and `out` of a block over 64 more keys, all of which its queries see, without a bias. Half
// of the queries at a time: so the unit does not rest for so long that it falls asleep, and the
// scores of one half lie in the cache sets of the other's sums.
template <class K>
void matrix_tile(const Attention& a, const Operand& key_rows, const Operand& value_columns,
                 const QueryBlock<K>& q, ForwardScratch<K>& w) {
  constexpr int kVectors = 2;
  constexpr int64_t kHalf = kVectors * K::kLanes;
  static_assert(2 * kHalf == kRow);
  for (int64_t lane = 0; lane < q.vectors * K::kLanes; lane += kHalf) {
    const int64_t vectors = min_of(kVectors, q.vectors - lane / K::kLanes);
    typename K::T *const s = w.s + kHalf - lane, *const out = q.out + lane;
    typename K::Unit* const pairs = w.pairs + kHalf - lane;
    score_product<K>(key_rows, kTile, a.head_dim, q.query + lane, vectors * K::kLanes, s);
    softmax_pairs<K, kVectors>(vectors, q.started, s, (typename K::T)a.scale, q.m + lane,
                               q.l + lane, out, q.started ? a.value_dim : 0, pairs, w.ahead);
    const auto add = [&]<Update kC>() {
      K::Dot::template product<kC>(value_columns, height_of<K>(a.value_dim), units_of<K>(kTile),
                                   pairs, kRow, vectors, out, kRow);
    };
    q.started ? add.template operator()<Update::kAddSum>()
              : add.template operator()<Update::kStore>();
  }
}

}  // namespace
}  // namespace mha_ext::cpu

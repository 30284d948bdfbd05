// A whole tile of forward where a matrix unit does the products.
namespace mha_ext::cpu {
namespace {

// m, l and `out` of a block over 64 more keys, all of which its queries see, without a bias. Half
// of the queries at a time: so the unit does not rest for so long that it falls asleep, and what a
// half needs lies in the nearest cache.
template <class K>
void matrix_tile(const Attention& a, const Operand& key_rows, const Operand& value_columns,
                 const QueryBlock<K>& q, ForwardScratch<K>& w) {
  for (int64_t lane = 0; lane < q.vectors * K::kLanes; lane += kHalfRow) {
    const int64_t vectors = min_of(kHalfRow / K::kLanes, q.vectors - lane / K::kLanes);
    typename K::T* const out = q.out + lane;
    K::Dot::template product<Update::kStore>(key_rows, kTile, units_of<K>(a.head_dim),
                                             q.query + lane, kRow, vectors, w.s, kHalfRow);
    softmax_pairs<K, kHalfRow>(vectors, q.started, w.s, (typename K::T)a.scale, q.m + lane,
                               q.l + lane, out, q.started ? a.value_dim : 0, w.pairs, w.ahead);
    const auto add = [&]<Update kC>() {
      K::Dot::template product<kC>(value_columns, height_of<K>(a.value_dim), units_of<K>(kTile),
                                   w.pairs, kHalfRow, vectors, out, kRow);
    };
    q.started ? add.template operator()<Update::kAddSum>()
              : add.template operator()<Update::kStore>();
  }
}

}  // namespace
}  // namespace mha_ext::cpu

// A whole tile of forward where a matrix unit does the products.
namespace mha_ext::cpu {
namespace {

// m, l and `out` of a block over 64 more keys. Where hidden pairs are met, V is finite. Half of the
// queries at a time: so the unit does not rest for so long that it falls asleep, and what a half
// needs lies in the nearest cache.
template <class K>
void matrix_tile(const Attention& a, int64_t b, int64_t h, int64_t k0, const Operand& key_rows,
                 const Operand& value_columns, const QueryBlock<K>& q, Visibility visible,
                 ForwardScratch<K>& w) {
  const bool biased = a.bias.data != nullptr;
  if (a.dropout.seed) dropout_tile<K>(a, b, h, q.q0, q.rows, k0, kTile, w.keep);
  const Seen kept{a.dropout.seed ? w.keep : nullptr};
  for (int64_t lane = 0; lane < q.vectors * K::kLanes; lane += kHalfRow) {
    const int64_t vectors = min_of(kHalfRow / K::kLanes, q.vectors - lane / K::kLanes);
    typename K::T* const out = q.out + lane;
    typename K::T factor = (typename K::T)a.scale;
    K::Dot::template product<Update::kStore>(key_rows, kTile, units_of<K>(a.head_dim),
                                             q.query + lane, kRow, vectors, w.s, kHalfRow);
    if (biased) {
      visible = add_biases<K, kHalfRow, false>(a, b, h, q.q0, q.rows, lane,
                                               min_of(kHalfRow, q.rows - lane), k0, kTile, visible,
                                               w.bits, w.s, w.extra, factor);
      factor = 1;
    }
    const Seen seen{visible == Visibility::kPartial ? w.bits : nullptr};
    softmax_pairs<K, kHalfRow>(vectors, q.started, w.s, factor, seen.from(0, lane),
                               kept.from(0, lane), q.m + lane, q.l + lane, out,
                               q.started ? a.value_dim : 0, w.pairs, w.ahead, AskSums<K>{});
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

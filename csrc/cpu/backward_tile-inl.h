// What backward carries through its tiles, and the gradients of one of them, from its P and dS.
namespace mha_ext::cpu {
namespace {

enum class Finite : char { kUnknown, kNo, kYes };

// Whether each tile of keys may be met once: by one block of queries, of one head. Then grad_key
// and grad_value are products that are written where they belong, without sums in scratch, and what
// the products read of K and V need not be kept.
template <class K>
bool may_meet_once(const Attention& a) {
  return a.queries <= min_of(kTile, K::kLimits.one_tile_queries) && a.heads == a.kv_heads;
}

template <class K, bool = K::kCut>
struct BackwardLimbs {
  BackwardLimbs() = default;
  BackwardLimbs(const Attention&, int64_t, bool, Arena&) {}
};

template <class K>
struct BackwardScratch : GradScratch<K> {
  using T = typename K::T;
  using Unit = typename K::Unit;
  Unit *query_rows, *grad_out_rows;  // vectors along the width, for dK and dV
  Unit *keys_in, *keys_across, *values_in, *pairs, *pair_rows, *p_rows, *clean_keys;
  Operand* key_columns;  // of each tile
  bool once = false;     // whether each is met once
  bool* touched;         // whether the tile's grad_key and grad_value hold something
  Finite* finite;        // whether the tile's keys are
  typename K::S* clean;
  T *total, *grad_query, *grad_key, *grad_value, *one;
  // What each block of queries but the first of those taken together has for itself; [0] is not
  // used.
  struct Own {
    Unit *query, *grad_out;
    T *high, *low, *shift, *total, *grad_query;
  } own[kTogether<K>] = {};
  BackwardLimbs<K> limbs;

  BackwardScratch() = default;
  BackwardScratch(const Attention& a, Arena& arena) : GradScratch<K>(a, arena) {
    const int64_t d = padded<K>(a.head_dim), dv = padded<K>(a.value_dim);
    const int64_t keys = min_of(a.keys, ranges_together(a) * grad_ranges(a).size);
    const int64_t tiles = ceil_div(keys, kTile);
    const bool all_once = may_meet_once<K>(a) && !a.uniform_empty_rows;
    const int64_t length = (all_once ? 1 : tiles) * kTile, sums = all_once ? 0 : length;
    const int64_t rows = all_once ? 0 : kTogether<K> * units_of<K>(kTile);
    query_rows = arena.take<Unit>(rows * vectors_width<K>(a.head_dim));
    grad_out_rows = arena.take<Unit>(rows * vectors_width<K>(a.value_dim));
    keys_in = arena.take<Unit>(length * operand_width<K>(a.head_dim));
    keys_across = arena.take<Unit>(K::kPairs ? length / 2 * d : 0);
    values_in = arena.take<Unit>(length * operand_width<K>(a.value_dim));
    key_columns = arena.take<Operand>(tiles);
    touched = arena.take<bool>(tiles);
    finite = arena.take<Finite>(tiles);
    pairs = arena.take<Unit>(K::kPairs ? kTile * kRow / 2 : 0);
    pair_rows = arena.take<Unit>(K::kPairs ? kTile * kPairRow<K> : 0);
    p_rows = arena.take<Unit>(K::kPairs ? kTile * kPairRow<K> : 0);
    total = arena.take<T>(query_sum_size(a));
    grad_query = arena.take<T>(query_sum_size(a));
    grad_key = arena.take<T>(sums * d);
    grad_value = arena.take<T>(sums * dv);
    one = arena.take<T>(kRow);
    clean = arena.take<typename K::S>(kTile * max_of(a.head_dim, a.value_dim));
    clean_keys = arena.take<Unit>(kTile * operand_width<K>(a.head_dim));
    limbs = BackwardLimbs<K>(a, tiles, all_once, arena);
    for (int64_t i = 1; i < kTogether<K> && !all_once; i++)
      own[i] = {arena.take<Unit>(units_of<K>(a.head_dim) * kRow),
                arena.take<Unit>(units_of<K>(a.value_dim) * kRow),
                arena.take<T>(kRow),
                arena.take<T>(kRow),
                arena.take<T>(kRow),
                arena.take<T>(query_sum_size(a)),
                arena.take<T>(query_sum_size(a))};
  }
  // That of the ith block: its rows and pairs of queries stand beside those of the one before.
  BackwardScratch of_block(const Attention& a, int64_t i) const {
    BackwardScratch w = *this;
    const Own& o = own[i];
    w.query_lanes = w.query = o.query;
    w.grad_out_lanes = w.grad_out = o.grad_out;
    w.high = o.high;
    w.low = o.low;
    w.shift = o.shift;
    w.total = o.total;
    w.grad_query = o.grad_query;
    w.query_rows += i * units_of<K>(kTile) * vectors_width<K>(a.head_dim);
    w.grad_out_rows += i * units_of<K>(kTile) * vectors_width<K>(a.value_dim);
    w.p_queries += i * kRow / 2;
    w.ds_queries += i * kRow / 2;
    return w;
  }
};

template <class K>
void zero_rows(const Rows& t, int64_t b, int64_t h, int64_t first, int64_t rows, int64_t columns) {
  if (!t.data) return;
  for (int64_t r = 0; r < rows; r++)
    __builtin_memset(row_of<K>(t, b, h, first + r), 0, (size_t)columns * sizeof(typename K::S));
}

// Of the keys [begin, last) of a call those [begin, end) exist, or all, where `all` are wanted.
template <class K>
int64_t end_of_existing(const Attention& a, int64_t b, int64_t begin, int64_t last, bool all) {
  return all ? last : min_of(last, max_of(begin, keys_in_tiles<K>(a, b)));
}
// The gradients of those that do not: sums of nothing, times their factors.
template <class K>
void write_unseen_keys(const Attention& a, const AttentionGrad& g, int64_t b, int64_t kv,
                       int64_t end, int64_t last) {
  zero_rows<K>(g.grad_value, b, kv, end, last - end, a.value_dim);
  if (!(a.scale < 0)) return zero_rows<K>(g.grad_key, b, kv, end, last - end, a.head_dim);
  if (!g.grad_key.data || end == last) return;
  const typename K::T zeros[kMaxHeadDim] = {};
  scale_out<typename K::X>(zeros, 0, (typename K::T)a.scale, last - end, a.head_dim,
                           row_of<K>(g.grad_key, b, kv, end), g.grad_key.row);
}

// Whether some row sees no key at all.
template <class K>
bool any_empty_row(const Attention& a, int64_t b, int64_t h) {
  const typename K::T* lse = (const typename K::T*)a.lse + (b * a.heads + h) * a.queries;
  bool any = false;
  for (int64_t r = 0; r < a.queries; r++) any |= lse[r] == -(typename K::T)INFINITY;
  return any;
}

// P of empty rows is 1/Lk over all keys: dV += Z^T dO of those rows only.
template <class K>
void add_uniform_values(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h,
                        int64_t q0, int64_t rows, int64_t begin, int64_t end,
                        BackwardScratch<K>& w) {
  using X = typename K::X;
  uint64_t empty = 0;
  const typename K::T* lse = (const typename K::T*)a.lse + (b * a.heads + h) * a.queries + q0;
  for (int64_t r = 0; r < rows; r++) empty |= (uint64_t)(lse[r] == -(typename K::T)INFINITY) << r;
  if (!empty) return;
  const int64_t ld = padded<K>(a.value_dim);
  for (int64_t k0 = begin; k0 < end; k0 += kTile) {
    const int64_t keys = min_of(kTile, end - k0);
    uniform_tile<K>(HeadRows<K>{a, b, h}, q0, rows, k0, keys, empty, w.keep, w.p);
    for (uint64_t left = empty; left; left &= left - 1) {
      const int64_t r = __builtin_ctzll(left);
      const typename K::S* grad_out = row_of<K>(g.grad_out, b, h, q0 + r);
      for (int64_t d = 0; d < a.value_dim; d += K::kLanes) {
        const typename X::V v = d + K::kLanes <= a.value_dim
                                    ? X::load(grad_out + d)
                                    : X::load(grad_out + d, a.value_dim - d);
        for (int64_t n = 0; n < keys; n++) {
          typename K::T* to = w.grad_value + (k0 - begin + n) * ld + d;
          X::store(to, X::fma(v, X::set(w.p[n * kRow + r]), X::load(to)));
        }
      }
    }
  }
}

// Where one tile stands: its queries and keys in memory, its place among the keys of the call, and
// what its gradients are added to.
template <class K>
struct TilePlace {
  const typename K::S *query, *grad_out;
  VectorRows<K> query_rows, grad_out_rows;  // the same as vectors; nothing where keys are met once
  const typename K::S* key;
  typename K::S *to_key, *to_value;  // where its gradients belong
  int64_t rows, keys, at;
  bool fresh;  // grad_key and grad_value hold nothing yet
  typename K::T* grad_query;
  Update query_update;
};

// One block of queries of a head on its way through the tiles.
template <class K>
struct GradBlock {
  using T = typename K::T;
  BackwardScratch<K>* w;  // its own operands, and what the blocks share
  int64_t block, q0, rows;
  Range seen;
  const typename K::S *query, *grad_out;
  VectorRows<K> query_in, grad_out_in;
  bool loaded, checked, finite, skipped;
  T* total;
  // Of a range of keys: its sum, whether that is added by the product, whether it is new.
  T* sum;
  bool add_sum, first;
};

// C = sum or C += sum, whichever is meant.
template <class K, Contiguous kA>
void update_product(Update update, const Operand& a, int64_t rows, int64_t count,
                    const typename K::Unit* x, int64_t ldx, int64_t columns, typename K::T* c,
                    int64_t ldc, Ahead& ahead) {
  using X = typename K::X;
  using Dot = typename K::Dot;
  if (update == Update::kStore)
    return product_columns<X, Dot, kA, Update::kStore>(a, rows, count, x, ldx, columns, c, ldc,
                                                       &ahead);
  product_columns<X, Dot, kA, Update::kAddSum>(a, rows, count, x, ldx, columns, c, ldc, &ahead);
}

// grad_query of one tile, from w.ds, or these in pairs.
template <class K>
void add_query_gradient(const Attention& a, const AttentionGrad& g, const TilePlace<K>& tile,
                        const Operand& key_columns, BackwardScratch<K>& w) {
  if (!g.grad_query.data) return;
  constexpr int64_t kStep = K::Dot::kStep;
  const int64_t vectors = vectors_of<K>(tile.rows);
  const typename K::Unit* ds =
      w.paired ? w.ds_keys : tile_vectors<K>(w.ds, tile.keys, vectors, w.pairs);
  for_bands<K>(w.bands, tile.keys, vectors, [&](Range seen, int64_t first, int64_t count) {
    const int64_t unit = seen.begin / kStep, lane = first * K::kLanes;
    const Operand from{key_columns.data + unit * key_columns.t_stride, key_columns.m_stride,
                       key_columns.t_stride};
    update_product<K, Contiguous::kAlongM>(
        tile.query_update, from, a.head_dim, units_of<K>(seen.end - seen.begin),
        ds + unit * kRow + lane, kRow, taken_lanes<K>(min_of(count * K::kLanes, tile.rows - lane)),
        tile.grad_query + lane, kRow, w.ahead);
  });
}

// grad_value and grad_key of one tile, from w.p and w.ds, or these in pairs: then of one block of
// queries, or of several that stand side by side.
template <class K>
void add_key_gradients(const Attention& a, const AttentionGrad& g, const TilePlace<K>& tile,
                       BackwardScratch<K>& w) {
  constexpr int64_t kStep = K::Dot::kStep;
  const Update update = tile.fresh ? Update::kStore : Update::kAddSum;
  // to[key][width] += weights^T rows, over the queries that need the key
  const auto add_keys = [&](const typename K::T* weights, const typename K::Unit* paired,
                            VectorRows<K> rows, int64_t width, typename K::T* to) {
    const int64_t ld = padded<K>(width);
    const Operand all = w.paired ? pairs_operand<K>(paired, kPairRow<K>)
                                 : tile_operand<K>(weights, tile.keys, tile.rows, w.pair_rows);
    for_band_keys<K>(w.bands, tile.keys, tile.rows, [&](Range keys, Range queries) {
      const int64_t unit = queries.begin / kStep;
      const Operand from{all.data + keys.begin * all.m_stride + unit * all.t_stride, all.m_stride,
                         all.t_stride};
      update_product<K, Contiguous::kAlongT>(update, from, keys.end - keys.begin,
                                             units_of<K>(queries.end - queries.begin),
                                             rows.data + unit * rows.ld, rows.ld, width,
                                             to + (tile.at + keys.begin) * ld, ld, w.ahead);
    });
  };
  if (g.grad_value.data) add_keys(w.p, w.p_queries, tile.grad_out_rows, a.value_dim, w.grad_value);
  if (g.grad_key.data) add_keys(w.ds, w.ds_queries, tile.query_rows, a.head_dim, w.grad_key);
}

// The same of a tile that is met once, to where they belong. `dirty`: the operands are not finite,
// and the tile is partial.
template <class K>
void write_key_gradients(const Attention& a, const AttentionGrad& g, const TilePlace<K>& tile,
                         bool dirty, BackwardScratch<K>& w) {
  const auto write = [&](typename K::T factor, typename K::T* weights, const typename K::S* rows,
                         const Rows& t, int64_t width, const Rows& grad, typename K::S* to) {
    scale_tile<K>(factor, tile.keys, vectors_of<K>(tile.rows), weights);
    if (dirty)
      return width_selected<K, Contiguous::kAlongT>({rows, t.row, tile.rows, width}, tile.keys,
                                                    weights, w.bits, to, grad.row, w.extra);
    for_band_keys<K>(w.bands, tile.keys, tile.rows, [&](Range keys, Range queries) {
      const WidthRows<K> from{rows + queries.begin * t.row, t.row, queries.end - queries.begin,
                              width};
      width_rows<K, Contiguous::kAlongT>(from, keys.end - keys.begin,
                                         weights + keys.begin * kRow + queries.begin,
                                         to + keys.begin * grad.row, grad.row, 0);
    });
  };
  if (g.grad_value.data)
    write((typename K::T)a.dropout.keep_scale, w.p, tile.grad_out, g.grad_out, a.value_dim,
          g.grad_value, tile.to_value);
  if (g.grad_key.data)
    write((typename K::T)a.scale, w.ds, tile.query, a.query, a.head_dim, g.grad_key, tile.to_key);
}

// All of a partial tile whose operands are not finite.
template <class K>
void add_dirty_gradients(const Attention& a, const AttentionGrad& g, const TilePlace<K>& tile,
                         BackwardScratch<K>& w) {
  const int64_t ld = padded<K>(a.head_dim), ldv = padded<K>(a.value_dim);
  const int64_t d = a.head_dim, dv = a.value_dim, rows = tile.rows, keys = tile.keys;
  clean_copy<K>(tile.key, a.key.row, keys, d, w.clean);
  add_query_gradient<K>(a, g, tile, columns_operand<K>(w.clean, d, keys, d, w.clean_keys), w);
  if (g.grad_query.data)
    add_nonfinite_lanes<K>(w.ds, w.bits, tile.key, a.key.row, keys, d, tile.grad_query);
  if (w.once) return write_key_gradients<K>(a, g, tile, true, w);
  TilePlace<K> clean = tile;
  if (g.grad_out.data) {
    clean_copy<K>(tile.grad_out, g.grad_out.row, rows, dv, w.clean);
    clean.grad_out_rows = packed_vectors<K>(w.clean, dv, rows, dv, w.grad_out_rows);
  }
  clean_copy<K>(tile.query, a.query.row, rows, d, w.clean);
  clean.query_rows = packed_vectors<K>(w.clean, d, rows, d, w.query_rows);
  add_key_gradients<K>(a, g, clean, w);
  if (g.grad_value.data)
    add_nonfinite_rows<K>(w.p, w.bits, tile.grad_out, g.grad_out.row, rows, keys, dv,
                          w.grad_value + tile.at * ldv, ldv);
  if (g.grad_key.data)
    add_nonfinite_rows<K>(w.ds, w.bits, tile.query, a.query.row, rows, keys, d,
                          w.grad_key + tile.at * ld, ld);
  // The next tile wants them as they were.
  if (g.grad_out.data) packed_vectors<K>(tile.grad_out, g.grad_out.row, rows, dv, w.grad_out_rows);
  packed_vectors<K>(tile.query, a.query.row, rows, d, w.query_rows);
}

}  // namespace
}  // namespace mha_ext::cpu

// Forward where all keys fit into one tile. The output is never rescaled, so its lanes can lie
// along the width: it needs no transpose, and few queries leave no lanes empty.
namespace mha_ext::cpu {
namespace {

// tile[key][64 r] *= factor[r]
template <class K>
void scale_lanes(const typename K::T* factor, int64_t keys, int64_t vectors, typename K::T* tile) {
  using X = typename K::X;
  for (int64_t i = 0; i < vectors * K::kLanes; i += K::kLanes) {
    const typename X::V f = X::load(factor + i);
    for (int64_t n = 0; n < keys; n++) {
      typename K::T* p = tile + n * kRow + i;
      X::store(p, X::mul(f, X::load(p)));
    }
  }
}

// P of a block of queries, dropped, in w.s, and lse. Whether some pairs are hidden; then w.bits
// says which.
template <class K>
bool one_tile_weights(const Attention& a, int64_t b, int64_t h, const Operand& key_rows,
                      QueryBlock<K>& q, ForwardScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  Visibility visible = visibility_of<K>(a, b, h, q.q0, q.rows, 0, a.keys, w.bits);
  if (visible == Visibility::kEmpty) {
    for (int64_t n = 0; n < a.keys; n++) w.bits[n] = 0;
    for (int64_t i = 0; i < a.keys * kRow; i++) w.s[i] = 0;
    for (int64_t r = 0; r < q.vectors * K::kLanes; r++) {
      q.m[r] = -(T)INFINITY;
      q.l[r] = 0;
    }
  } else {
    pack_query<K>(a, b, h, q.q0, q.rows, q.query);
    T* const top = scores_are_product<K>(a, nullptr) ? w.top : nullptr;
    visible = scores<K>(a, b, h, q.q0, q.rows, 0, a.keys, q.query, key_rows, visible, w.bits, w.s,
                        w.extra, nullptr, nullptr, top);
    const Seen seen{visible == Visibility::kPartial ? w.bits : nullptr};
    softmax_one_tile<K>(a.keys, q.vectors, w.s, top, seen, q.m, q.l);
  }
  const int64_t at = (b * a.heads + h) * a.queries + q.q0;
  T high[kRow], low[kRow];
  // Logarithms are taken in doubles: in whole turns of the compiler's loop, of lanes that are set.
  constexpr int64_t kTurn = X::kRegisters == 32 ? 16 : 4;
  add_logs(min_of(round_up(q.rows, kTurn), q.vectors * K::kLanes), q.m, q.l, -(T)INFINITY, high,
           low);
  for (int64_t r = 0; r < q.rows; r += K::kLanes) {
    store_up_to<X>((T*)a.lse + at + r, X::load(high + r), q.rows - r);
    store_up_to<X>((T*)a.lse_low + at + r, X::load(low + r), q.rows - r);
  }
  uint64_t empty = 0;
  for (int64_t i = 0; i < q.vectors * K::kLanes; i += K::kLanes)
    empty |= X::bits(X::eq(X::load(q.l + i), X::zero())) << i;
  empty &= first_bits(q.rows);
  if (empty && a.uniform_empty_rows) {  // P = 1 / Lk over all keys
    for (int64_t n = 0; n < a.keys; n++) {
      w.bits[n] = visible == Visibility::kFull ? first_bits(q.rows) : w.bits[n] | empty;
      for (int64_t i = 0; i < q.vectors; i++) {
        T* p = w.s + n * kRow + i * K::kLanes;
        X::store(
            p, X::select(X::mask(empty >> (i * K::kLanes)), X::set((T)1 / (T)a.keys), X::load(p)));
      }
    }
  }
  for (uint64_t left = empty; left; left &= left - 1) q.l[__builtin_ctzll(left)] = 1;
  if (a.dropout.seed) {
    dropout_tile<K>(a, b, h, q.q0, q.rows, 0, a.keys, w.keep);
    select_tile<K>(w.keep, a.keys, q.vectors, 0, w.s);
  }
  const T kept = (T)a.dropout.keep_scale;
  for (int64_t r = 0; r < q.vectors * K::kLanes; r++) q.l[r] = kept / q.l[r];
  scale_lanes<K>(q.l, a.keys, q.vectors, w.s);
  return visible != Visibility::kFull;
}

template <class K>
void forward_one_tile(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows,
                      ForwardScratch<K>& w) {
  const int64_t kv = kv_head(a, h), keys = a.keys, columns = a.value_dim;
  const typename K::S *key = row_of<K>(a.key, b, kv, 0), *value = row_of<K>(a.value, b, kv, 0);
  Operand key_rows{(const char*)key, a.key.row * (int64_t)sizeof(*key), sizeof(*key)};
  if (!K::kInPlace || rows > kTile)
    key_rows = rows_operand<K>(key, a.key.row, keys, a.head_dim, w.key);
  QueryBlock<K>& q = w.blocks[0];
  const bool last = h + 1 == a.heads;
  const int64_t next_h = last ? 0 : h + 1, next_b = last ? b + 1 : b;
  const int64_t next_kv = kv_head(a, next_h);
  const bool ahead = a.queries <= kTile && next_b < a.batch;
  for (q.q0 = q0; q.q0 < q0 + rows; q.q0 += kTile) {
    q.rows = min_of(kTile, q0 + rows - q.q0);
    q.vectors = vectors_of<K>(q.rows);
    if (ahead) ask_for<K>(a.query, next_b, next_h, q.rows, a.head_dim);
    const bool partial = one_tile_weights<K>(a, b, h, key_rows, q, w);
    typename K::S* to = row_of<K>(a.out, b, h, q.q0);
    WidthRows<K> values{value, a.value.row, keys, columns};
    int64_t to_next = 0;
    if (ahead) {
      to_next = bytes_to<K>(a.out, next_b, next_h, 0, to);
      values.next = bytes_to<K>(a.value, next_b, next_kv, 0, value);
      if (q.rows > kWidthGroup && a.key.row == a.value.row)
        values.then = bytes_to<K>(a.key, next_b, next_kv, 0, value);
      else
        ask_for<K>(a.key, next_b, next_kv, keys, a.head_dim);
    }
    if (partial && !all_finite<K>(value, a.value.row, keys, columns))
      width_selected<K, Contiguous::kAlongM>(values, q.rows, w.s, w.bits, to, a.out.row, q.out);
    else
      width_rows<K, Contiguous::kAlongM, false, typename K::S, Cache::kFirst>(
          values, q.rows, w.s, to, a.out.row, to_next);
  }
}

template <class K>
void forward_any(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t range,
                 void* states, void* scratch) {
  if (!fits_one_tile(a, K::kLimits)) return forward<K>(a, b, h, q0, rows, range, states, scratch);
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  forward_one_tile<K>(a, b, h, q0, rows, w);
}

}  // namespace
}  // namespace mha_ext::cpu

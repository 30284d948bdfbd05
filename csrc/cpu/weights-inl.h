// The weights P = exp(S - lse), for who looks at them; what exp subtracts serves backward too.
namespace mha_ext::cpu {
namespace {

// What exp subtracts from S to give P: lse = high + low, and +inf in rows that see nothing.
template <class K>
void row_levels(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows,
                typename K::T* high, typename K::T* low) {
  using T = typename K::T;
  using X = typename K::X;
  const int64_t at = (b * a.heads + h) * a.queries + q0;
  const typename X::V none = X::set((T)INFINITY);
  for (int64_t r = 0; r < rows; r += K::kLanes) {
    const int64_t height = min_of(K::kLanes, rows - r);
    typename X::V level = load_up_to<X>((const T*)a.lse + at + r, height), rest = X::zero();
    const typename X::M empty = X::eq(level, X::set(-(T)INFINITY));
    level = X::select(X::mask(first_bits(height)), X::select(empty, none, level), none);
    if (a.lse_low)
      rest = X::select(empty, rest, load_up_to<X>((const T*)a.lse_low + at + r, height));
    X::store(high + r, level);
    X::store(low + r, rest);
  }
}

template <class K>
void weights(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, void* out_pointer,
             int64_t bytes, void* scratch) {
  using T = typename K::T;
  using X = typename K::X;
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  T* high = arena.take<T>(kRow);
  T* low = arena.take<T>(kRow);
  T* one = arena.take<T>(kRow);
  const int64_t vectors = vectors_of<K>(rows), kv = kv_head(a, h);
  const QueryBlock<K>& q = w.blocks[0];
  typename K::S* out = (typename K::S*)out_pointer;
  const PastCaches<X> past(out, bytes, a.keys, a.keys);
  for (int64_t r = 0; r < kRow; r++) one[r] = 1;
  if (a.lse) {
    row_levels<K>(a, b, h, q0, rows, high, low);
  } else {
    scan_keys<K>(HeadRows<K>{a, b, h}, q0, rows, {0, a.keys}, false, w);
    add_logs(kRow, q.m, q.l, (T)INFINITY, high, low);
  }
  uint64_t empty = 0;
  for (int64_t r = 0; r < rows; r++) empty |= (uint64_t)(high[r] == (T)INFINITY) << r;
  if (!a.uniform_empty_rows) empty = 0;

  pack_query<K>(a, b, h, q0, rows, q.query);
  for (int64_t k0 = 0; k0 < a.keys; k0 += kTile) {
    const int64_t keys = min_of(kTile, a.keys - k0);
    Visibility visible = visibility_of<K>(a, b, h, q0, rows, k0, keys, w.bits);
    if (visible == Visibility::kEmpty) {
      for (int64_t i = 0; i < keys * kRow; i++) w.s[i] = 0;
    } else {
      const Operand key_rows =
          rows_operand<K>(row_of<K>(a.key, b, kv, k0), a.key.row, keys, a.head_dim, w.key);
      visible =
          scores<K>(a, b, h, q0, rows, k0, keys, q.query, key_rows, visible, w.bits, w.s, w.extra);
      for (int64_t n = 0; n < keys; n++)
        for (int64_t i = 0; i < vectors; i++) {
          const int64_t lane = i * K::kLanes;
          T* p = w.s + n * kRow + lane;
          X::store(
              p, exp_of<X>(X::sub(X::sub(X::load(p), X::load(high + lane)), X::load(low + lane))));
        }
      if (visible == Visibility::kPartial) select_tile<K>(w.bits, keys, vectors, 0, w.s);
    }
    if (empty)
      for (int64_t n = 0; n < keys; n++)
        for (int64_t r = 0; r < rows; r++)
          if (empty >> r & 1) w.s[n * kRow + r] = (T)1 / (T)a.keys;
    past.on ? write_rows<K, true>(w.s, one, rows, keys, out + k0, a.keys)
            : write_rows<K>(w.s, one, rows, keys, out + k0, a.keys);
  }
}

}  // namespace
}  // namespace mha_ext::cpu

// Forward where all keys fit into one tile. The output is never rescaled, so its lanes can lie
// along the width: it needs no transpose, and few queries leave no lanes empty.
namespace mha_ext::cpu {
namespace {

// What the next head wants, and the last tile has not brought: heads are short, and no machine
// foresees where the next one starts.
template <class K>
void ask_for(const Rows& t, int64_t b, int64_t h, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++) {
    const char* row = (const char*)row_of<K>(t, b, h, r);
    for (int64_t at = 0; at < columns * (int64_t)sizeof(typename K::S); at += 64)
      __builtin_prefetch(row + at);
  }
}

// As pack_query, block by block in registers for any number of rows and columns.
template <class K>
void pack_queries(const Attention& a, const typename K::S* from, int64_t rows,
                  typename K::Unit* to) {
  if constexpr (K::kPairs) {
    pack_lanes<K>(from, a.query.row, rows, a.head_dim, to);
  } else {
    using X = typename K::X;
    constexpr int kLanes = K::kLanes;
    const typename X::V scale = X::set((typename K::T)a.scale);
    for (int64_t r = 0; r < rows; r += kLanes)
      for (int64_t c = 0; c < a.head_dim; c += kLanes) {
        const int64_t height = rows - r, width = a.head_dim - c;
        const typename K::S* p = from + r * a.query.row + c;
        typename X::V block[kLanes];
        if (width >= kLanes) {
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; i++)
            block[i] = i < height ? X::load(p + i * a.query.row) : X::zero();
        } else {
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; i++)
            block[i] = i < height ? X::load(p + i * a.query.row, width) : X::zero();
        }
        X::transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++)
          if (i < width) X::store(to + (c + i) * kRow + r, X::mul(scale, block[i]));
      }
  }
}

// P of a block of queries, unnormalised and dropped, in w.s, its sums in q.l, and lse. `partial`:
// some pairs are hidden; then w.bits says which.
template <class K>
bool one_tile_weights(const Attention& a, int64_t b, int64_t h, Operand key_rows, QueryBlock<K>& q,
                      ForwardScratch<K>& w) {
  using T = typename K::T;
  using X = typename K::X;
  for (int64_t r = 0; r < q.vectors * K::kLanes; r++) {
    q.m[r] = -(T)INFINITY;
    q.l[r] = 0;
  }
  Visibility visible = visibility_of<K>(a, b, h, q.q0, q.rows, 0, a.keys, w.bits);
  if (visible == Visibility::kEmpty) {
    for (int64_t n = 0; n < a.keys; n++) w.bits[n] = 0;
    for (int64_t i = 0; i < a.keys * kRow; i++) w.s[i] = 0;
  } else {
    pack_queries<K>(a, row_of<K>(a.query, b, h, q.q0), q.rows, q.query);
    visible = scores<K>(a, b, h, q.q0, q.rows, 0, a.keys, q.query, key_rows, visible, w.bits, w.s,
                        w.extra);
    if (visible == Visibility::kPartial)
      select_tile<K>(w.bits, a.keys, q.vectors, -(T)INFINITY, w.s);
    softmax_tile<K>(a.keys, q.vectors, w.s, q.m, q.l, q.out, 0);
  }
  const int64_t at = (b * a.heads + h) * a.queries + q.q0;
  T high[kRow], low[kRow];
  add_logs(q.vectors * K::kLanes, q.m, q.l, -(T)INFINITY, high, low);
  __builtin_memcpy((T*)a.lse + at, high, (size_t)q.rows * sizeof(T));
  __builtin_memcpy((T*)a.lse_low + at, low, (size_t)q.rows * sizeof(T));
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
  return visible != Visibility::kFull;
}

// to[r][d] = factor[r] sum_n p[n][64 r] value[n][d] for kRows rows and kVectors vectors of d.
template <class K, int kRows, int kVectors>
void width_product(const typename K::S* value, int64_t stride, int64_t keys, int64_t left,
                   const typename K::T* p, const typename K::T* factor, typename K::S* to,
                   int64_t to_stride) {
  using X = typename K::X;
  typename X::V sum[kRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) sum[r][i] = X::zero();
  left -= (kVectors - 1) * K::kLanes;  // of the last vector
  const auto add = [&]<bool kWhole>() __attribute__((always_inline)) {
    for (int64_t n = 0; n < keys; n++) {
      typename X::V v[kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; i++)
        v[i] = kWhole || i + 1 < kVectors ? X::load(value + n * stride + i * K::kLanes)
                                          : X::load(value + n * stride + i * K::kLanes, left);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; r++) {
        const typename X::V weight = X::set(p[n * kRow + r]);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; i++) sum[r][i] = X::fma(v[i], weight, sum[r][i]);
      }
    }
  };
  const bool whole = left >= K::kLanes;
  if (whole)
    add.template operator()<true>();
  else
    add.template operator()<false>();
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i++) {
      const typename X::V v = X::mul(X::set(factor[r]), sum[r][i]);
      if (whole || i + 1 < kVectors)
        X::store(to + r * to_stride + i * K::kLanes, v);
      else
        X::store(to + r * to_stride + i * K::kLanes, v, left);
    }
}

// All columns for kRows rows.
template <class K, int kRows>
void width_columns(const typename K::S* value, int64_t stride, int64_t keys, int64_t columns,
                   const typename K::T* p, const typename K::T* factor, typename K::S* to,
                   int64_t to_stride) {
  constexpr int64_t kLanes = K::kLanes;
  int64_t d = 0;
  const auto some = [&]<int kVectors>() __attribute__((always_inline)) {
    for (; columns - d > (kVectors - 1) * kLanes; d += kVectors * kLanes)
      width_product<K, kRows, kVectors>(value + d, stride, keys, columns - d, p, factor, to + d,
                                        to_stride);
  };
  if constexpr (K::X::kRegisters == 32) {
    some.template operator()<4>();
    some.template operator()<3>();
  }
  some.template operator()<2>();
  some.template operator()<1>();
}

// All rows, in equal parts of at most 6.
template <class K>
void width_rows(const typename K::S* value, int64_t stride, int64_t keys, int64_t columns,
                int64_t rows, const typename K::T* p, const typename K::T* factor,
                typename K::S* to, int64_t to_stride) {
  const int64_t part = ceil_div(rows, ceil_div(rows, 6));
  const auto some = [&]<int kRows>() __attribute__((always_inline)) {
    for (; part >= kRows && rows >= kRows; rows -= kRows) {
      width_columns<K, kRows>(value, stride, keys, columns, p, factor, to, to_stride);
      p += kRows;
      factor += kRows;
      to += kRows * to_stride;
    }
  };
  some.template operator()<6>();
  some.template operator()<5>();
  some.template operator()<4>();
  some.template operator()<3>();
  some.template operator()<2>();
  some.template operator()<1>();
}

// The same for a partial tile whose values are not finite: the visible pairs alone, in that order.
template <class K>
void width_selected(const typename K::S* value, int64_t stride, int64_t keys, int64_t columns,
                    int64_t rows, const typename K::T* factor, typename K::S* to, int64_t to_stride,
                    ForwardScratch<K>& w, typename K::T* sums) {
  typename K::T weight[kTile];
  for (int64_t r = 0; r < rows; r++) {
    uint64_t bits = 0;
    for (int64_t n = 0; n < keys; n++) {
      weight[n] = w.s[n * kRow + r];
      bits |= (w.bits[n] >> r & 1) << n;
    }
    for (int64_t d = 0; d < padded<K>(columns); d++) sums[d] = 0;
    few_selected<K>(value, stride, bits, columns, weight, sums);
    scale_out<typename K::X>(sums, 0, factor[r], 1, columns, to + r * to_stride, to_stride);
  }
}

template <class K>
void forward_one_tile(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows,
                      ForwardScratch<K>& w) {
  using T = typename K::T;
  const int64_t kv = kv_head(a, h), keys = a.keys, columns = a.value_dim;
  const typename K::S *key = row_of<K>(a.key, b, kv, 0), *value = row_of<K>(a.value, b, kv, 0);
  Operand key_rows{(const char*)key, a.key.row * (int64_t)sizeof(*key), sizeof(*key)};
  if (!K::kInPlace || rows > kTile)
    key_rows = rows_operand<K>(key, a.key.row, keys, a.head_dim, w.key);
  const T kept = (T)a.dropout.keep_scale;
  QueryBlock<K>& q = w.blocks[0];
  const bool last = h + 1 == a.heads;
  const int64_t next_h = last ? 0 : h + 1, next_b = last ? b + 1 : b;
  const bool ahead = a.queries <= kTile && next_b < a.batch;
  for (q.q0 = q0; q.q0 < q0 + rows; q.q0 += kTile) {
    q.rows = min_of(kTile, q0 + rows - q.q0);
    q.vectors = vectors_of<K>(q.rows);
    if (ahead) ask_for<K>(a.query, next_b, next_h, q.rows, a.head_dim);
    const bool partial = one_tile_weights<K>(a, b, h, key_rows, q, w);
    if (ahead) ask_for<K>(a.key, next_b, kv_head(a, next_h), keys, a.head_dim);
    for (int64_t r = 0; r < q.rows; r++) q.l[r] = kept / q.l[r];
    typename K::S* to = row_of<K>(a.out, b, h, q.q0);
    if (partial && !all_finite<K>(value, a.value.row, keys, columns))
      width_selected<K>(value, a.value.row, keys, columns, q.rows, q.l, to, a.out.row, w, q.out);
    else
      width_rows<K>(value, a.value.row, keys, columns, q.rows, w.s, q.l, to, a.out.row);
    if (ahead) ask_for<K>(a.value, next_b, kv_head(a, next_h), keys, columns);
  }
}

template <class K>
constexpr int64_t kOneTileQueries = K::kPairs ? K::kLanes : INT64_MAX;

template <class K>
void forward_any(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t range,
                 void* states, void* scratch) {
  if (!fits_one_tile(a, kOneTileQueries<K>))
    return forward<K>(a, b, h, q0, rows, range, states, scratch);
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  ForwardScratch<K> w(a, arena);
  forward_one_tile<K>(a, b, h, q0, rows, w);
}

}  // namespace
}  // namespace mha_ext::cpu

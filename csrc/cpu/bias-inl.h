// The gradient of the bias, dB = dS, summed where the bias broadcasts.
namespace mha_ext::cpu {
namespace {

// Whether the gradient of a bias that broadcasts nowhere, if it is `written`, goes past the caches.
template <class K>
PastCaches<typename K::X> bias_past_caches(const Attention& a, const Pairs& grad_bias,
                                           bool written) {
  const int64_t count = a.batch * a.heads * a.queries * a.keys;
  const int64_t strides = grad_bias.batch | grad_bias.head | grad_bias.query;
  const auto of = [&](auto* data) {
    const int64_t bytes = written ? count * (int64_t)sizeof *data : 0;
    return PastCaches<typename K::X>(data, bytes, a.keys, strides);
  };
  return a.bias_is_float32 ? of((float*)grad_bias.data) : of((typename K::S*)grad_bias.data);
}

template <class K>
void store_bias_tile(const Attention& a, const AttentionGrad& g, int64_t b, int64_t h, int64_t q0,
                     int64_t rows, int64_t k0, int64_t keys, const typename K::T* one,
                     const typename K::T* tile, bool past_caches) {
  const Pairs& grad = g.grad_bias;
  const int64_t at = b * grad.batch + h * grad.head + q0 * grad.query + k0 * grad.key;
  const auto store = [&]<bool kPast>() {
    if (a.bias_is_float32)
      transpose_out<typename K::X, kPast>(tile, one, rows, keys, (float*)grad.data + at,
                                          grad.query);
    else
      write_rows<K, kPast>(tile, one, rows, keys, (typename K::S*)grad.data + at, grad.query);
  };
  past_caches ? store.template operator()<true>() : store.template operator()<false>();
}

// to[r][c] += tile[c][64 r]
template <class X>
void add_transposed(const typename X::T* tile, int64_t rows, int64_t columns, typename X::T* to,
                    int64_t stride) {
  constexpr int kLanes = X::kLanes;
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int64_t height = min_of(kLanes, rows - r), width = min_of(kLanes, columns - c);
      typename X::V block[kLanes];
      for (int i = 0; i < kLanes; i++)
        block[i] = i < width ? X::load(tile + (c + i) * kRow + r) : X::zero();
      X::transpose(block);
      typename X::T* p = to + r * stride + c;
      for (int i = 0; i < height; i++, p += stride) {
        if (width == kLanes)
          X::store(p, X::add(X::load(p), block[i]));
        else
          X::store(p, X::add(X::load(p, width), block[i]), width);
      }
    }
}

// Where heads share a bias and take turns: grad_bias is in the type of the sums.
template <class K>
void add_bias_tile(const AttentionGrad& g, int64_t b, int64_t h, int64_t q0, int64_t rows,
                   int64_t k0, int64_t keys, const typename K::T* one, const typename K::T* tile,
                   bool begins) {
  using X = typename K::X;
  const Pairs& sums = g.grad_bias;
  typename K::T* const to =
      (typename K::T*)sums.data + b * sums.batch + h * sums.head + q0 * sums.query + k0 * sums.key;
  if (begins)
    transpose_out<X>(tile, one, rows, keys, to, sums.query);
  else
    add_transposed<X>(tile, rows, keys, to, sums.query);
}

// The gradient of a bias that broadcasts over (b, h) or the queries: each of its tiles has one
// owner, who computes dS again for every (b, h), and every block of queries it broadcasts over, in
// order; a share is a piece of that list. gradient(b, h, q0, rows, k0, keys) gives the tile dS, or
// nullptr where it is empty.
template <class K, class Gradient>
void add_bias_share(const Attention& a, const BiasPlan& plan, int64_t owner, int64_t chunk,
                    typename K::T* sums, const Gradient& gradient) {
  using X = typename K::X;
  for (int64_t i = 0; i < kTile * kRow; i++) sums[i] = 0;

  const int64_t key_tile = owner % plan.key_tiles,
                query_tile = owner / plan.key_tiles % plan.query_tiles;
  const int64_t head = owner / (plan.key_tiles * plan.query_tiles) % plan.heads;
  const int64_t batch = owner / (plan.key_tiles * plan.query_tiles * plan.heads);
  // How many terms each dimension adds: all of it where the bias broadcasts, else one.
  const int64_t batches = a.batch / plan.batches, heads = a.heads / plan.heads;
  const int64_t query_tiles = ceil_div(a.queries, kTile) / plan.query_tiles;
  const int64_t terms = batches * heads * query_tiles;
  const int64_t k0 = key_tile * kTile, keys = min_of(kTile, a.keys - k0);

  for (int64_t i = terms * chunk / plan.chunks; i < terms * (chunk + 1) / plan.chunks; i++) {
    const int64_t q0 = (query_tile + i % query_tiles) * kTile;
    const int64_t rows = min_of(kTile, a.queries - q0);
    const int64_t h = head + i / query_tiles % heads, b = batch + i / (query_tiles * heads);
    const Range seen = seen_by_any(a, b, q0, q0 + rows - 1);
    if (k0 >= seen.end || k0 + keys <= seen.begin) continue;
    const typename K::T* const tile = gradient(b, h, q0, rows, k0, keys);
    if (!tile) continue;
    const uint64_t exist = first_bits(rows);  // lanes past the last query hold anything
    for (int64_t n = 0; n < keys; n++)
      for (int64_t lane = 0; lane < rows; lane += K::kLanes) {
        const typename X::V ds = X::load(tile + n * kRow + lane);
        typename K::T* sum = sums + n * kRow + lane;
        X::store(sum, X::add(X::load(sum), X::select(X::mask(exist >> lane), ds, X::zero())));
      }
  }
}

template <class K>
void bias_share(const Attention& a, const AttentionGrad& g, const BiasPlan& plan, int64_t owner,
                int64_t chunk, void* sums, void* scratch) {
  [[maybe_unused]] const typename K::Dot::Session session;
  Arena arena{(char*)scratch};
  GradScratch<K> w(a, arena);
  auto* keys_in = arena.take<typename K::Unit>(kTile * operand_width<K>(a.head_dim));
  auto* values_in = arena.take<typename K::Unit>(kTile * operand_width<K>(a.value_dim));
  add_bias_share<K>(a, plan, owner, chunk, (typename K::T*)sums,
                    [&](int64_t b, int64_t h, int64_t q0, int64_t rows, int64_t k0, int64_t keys) {
                      const int64_t kv = kv_head(a, h);
                      load_queries<K>(a, g, b, h, q0, rows, w);
                      const Operand key_rows = rows_operand<K>(
                          row_of<K>(a.key, b, kv, k0), a.key.row, keys, a.head_dim, keys_in);
                      const Operand value_rows = rows_operand<K>(
                          row_of<K>(a.value, b, kv, k0), a.value.row, keys, a.value_dim, values_in);
                      const Visibility visible =
                          gradient_tile<K>(a, g, b, h, q0, rows, k0, keys, key_rows, value_rows, w);
                      return visible == Visibility::kEmpty ? nullptr : w.ds;
                    });
}

template <class K>
void bias_finish(const Attention& a, const AttentionGrad& g, const BiasPlan& plan, int64_t owner,
                 void* sums_pointer, void* scratch) {
  using T = typename K::T;
  T* sums = (T*)sums_pointer;  // [chunks][64 keys][64 queries], added into the first
  T* one = (T*)scratch;
  for (int64_t r = 0; r < kRow; r++) one[r] = 1;
  for (int64_t c = 1; c < plan.chunks; c++)
    for (int64_t i = 0; i < kTile * kRow; i++) sums[i] += sums[c * kTile * kRow + i];
  int64_t rows = kTile;
  if (g.grad_bias.query == 0) {  // sum over the queries, into row 0
    for (int64_t n = 0; n < kTile; n++)
      for (int64_t r = 1; r < kRow; r++) sums[n * kRow] += sums[n * kRow + r];
    rows = 1;
  }
  const int64_t q0 = owner / plan.key_tiles % plan.query_tiles * kTile,
                k0 = owner % plan.key_tiles * kTile;
  const int64_t head = owner / (plan.key_tiles * plan.query_tiles) % plan.heads;
  const int64_t batch = owner / (plan.key_tiles * plan.query_tiles * plan.heads);
  store_bias_tile<K>(a, g, batch, head, q0, min_of(rows, a.queries - q0), k0,
                     min_of(kTile, a.keys - k0), one, sums, false);
}

}  // namespace
}  // namespace mha_ext::cpu

// The product of a linear layer: one block of the result, X packed as panels of 64 lanes, A read in
// place where it is contiguous along t. The sum over t is cut every kLinearDepth terms, whatever
// the sizes of the problem and of the block: the bits of an element depend on its row of A and its
// column of X only.
namespace mha_ext::cpu {
namespace {

// to[t][64 lanes] = X(t, n), zero past `columns`.
template <class V>
void pack_panel(const Matrix& x, int64_t t0, int64_t count, int64_t n0, int64_t columns,
                float* to) {
  if (x.column != 1) {  // contiguous along t
    if (columns < kTile) __builtin_memset(to, 0, (size_t)(count * kTile) * sizeof *to);
    return transpose_in<V>(x.data + n0 * x.column + t0, x.column, columns, count, to);
  }
  const float* from = x.data + t0 * x.row + n0;
  const int64_t whole = columns / V::kLanes * V::kLanes;
  for (int64_t t = 0; t < count; t++, from += x.row, to += kTile) {
    for (int64_t n = 0; n < whole; n += V::kLanes) V::store(to + n, V::load(from + n));
    if (whole < columns) V::store(to + whole, V::load(from + whole, columns - whole));
    for (int64_t n = round_up(columns, V::kLanes); n < kTile; n += V::kLanes)
      V::store(to + n, V::zero());
  }
}

// to[t][m] = A(m, t), for A that is contiguous along m.
template <class V>
void pack_columns(const Matrix& a, int64_t m0, int64_t rows, int64_t t0, int64_t count, float* to) {
  const float* from = a.data + t0 * a.column + m0;
  const int64_t whole = rows / V::kLanes * V::kLanes;
  for (int64_t t = 0; t < count; t++, from += a.column, to += kLinearRows) {
    for (int64_t m = 0; m < whole; m += V::kLanes) V::store(to + m, V::load(from + m));
    if (whole < rows) V::store(to + whole, V::load(from + whole, rows - whole), rows - whole);
  }
}

inline int64_t linear_scratch_bytes(int64_t, int64_t) {
  return (kLinearDepth * (kTile + kLinearRows) + kLinearRows * kTile) * (int64_t)sizeof(float);
}

// out[m0 : m0 + rows, n0 : n0 + columns].
template <class V>
void linear(const Linear& p, int64_t m0, int64_t rows, int64_t n0, int64_t columns, void* scratch) {
  using Dot = Multiply<V>;
  Arena arena{(char*)scratch};
  float* panel = arena.take<float>(kLinearDepth * kTile);
  float* packed = arena.take<float>(kLinearDepth * kLinearRows);
  float* edge = arena.take<float>(kLinearRows * kTile);
  const bool in_place = p.a.column == 1;
  float* out = p.out + m0 * p.columns + n0;
  for (int64_t m = 0; m < rows; m++) {
    float* c = out + m * p.columns;
    if (p.bias)
      __builtin_memcpy(c, p.bias + n0, (size_t)columns * sizeof *c);
    else
      __builtin_memset(c, 0, (size_t)columns * sizeof *c);
  }
  for (int64_t t0 = 0; t0 < p.depth; t0 += kLinearDepth) {
    const int64_t count = min_of(kLinearDepth, p.depth - t0), size = sizeof(float);
    if (!in_place) pack_columns<V>(p.a, m0, rows, t0, count, packed);
    const Operand a =
        in_place ? Operand{(const char*)(p.a.data + m0 * p.a.row + t0), p.a.row * size, size}
                 : Operand{(const char*)packed, size, kLinearRows * size};
    const auto add = in_place ? product<V, Dot, Contiguous::kAlongT, Update::kAddSum>
                              : product<V, Dot, Contiguous::kAlongM, Update::kAddSum>;
    for (int64_t n = 0; n < columns; n += kTile) {
      const int64_t width = min_of(kTile, columns - n);
      const int64_t vectors = (width + V::kLanes - 1) / V::kLanes;
      pack_panel<V>(p.x, t0, count, n0 + n, width, panel);
      if (width % V::kLanes == 0) {
        add(a, rows, count, panel, kTile, vectors, out + n, p.columns, nullptr, 1, nullptr);
        continue;
      }
      // A row of the result that ends within a vector is summed beside it.
      for (int64_t m = 0; m < rows; m++)
        __builtin_memcpy(edge + m * kTile, out + m * p.columns + n, (size_t)width * sizeof *out);
      add(a, rows, count, panel, kTile, vectors, edge, kTile, nullptr, 1, nullptr);
      for (int64_t m = 0; m < rows; m++)
        __builtin_memcpy(out + m * p.columns + n, edge + m * kTile, (size_t)width * sizeof *out);
    }
  }
}

}  // namespace
}  // namespace mha_ext::cpu

// Copies of rows.
#include "aligned.cuh"

namespace mha_ext::cuda {

constexpr int kCopyThreads = 256, kElements = 8;  // of one piece

// A piece a thread. `heads`: those of `to`.
static __global__ void LAUNCH_BOUNDS(kCopyThreads, 4)
    align_rows_kernel(const GRID_CONSTANT Rows from, const GRID_CONSTANT Rows to,
                      const int64_t heads, const int64_t length, const int64_t width) {
  const int64_t place = grid_row(), b = place / heads, h = place % heads;
  const int64_t pieces = to.row / kElements, n = (int64_t)blockIdx.x * kCopyThreads + thread_id();
  const int64_t i = n / pieces, first = n % pieces * kElements;
  if (i >= length) return;
  const uint16_t* source =
      (const uint16_t*)from.data + b * from.batch + h * from.head + i * from.row + first;
  Bytes16 piece = {};
#pragma unroll
  for (int e = 0; e < kElements; e++)
    if (first + e < width) piece.word[e / 2] |= (uint32_t)source[e] << 16 * (e % 2);
  *(Bytes16*)((uint16_t*)to.data + b * to.batch + h * to.head + i * to.row + first) = piece;
}

// Where rows broadcast over batch or heads, one copy is enough.
struct AlignedRows {
  Rows rows;
  int64_t places, heads, bytes;
};
static AlignedRows aligned_rows(const Rows& of, int64_t batch, int64_t heads, int64_t length,
                                int64_t width, void* scratch) {
  const int64_t row = ceil_div(width, kElements) * kElements, head = length * row;
  AlignedRows to{{scratch, 0, 0, row}, 1, of.head ? heads : 1, 0};
  if (of.head) to.rows.head = head;
  if (of.batch) to.rows.batch = to.heads * head;
  to.places = (of.batch ? batch : 1) * to.heads;
  to.bytes = ceil_div(to.places * head * (int64_t)sizeof(uint16_t), 256) * 256;
  return to;
}

int64_t aligned_bytes(const Attention& a, const AttentionGrad* g) {
  int64_t bytes = 0;
  for_each_rows(a, g, [&](const Rows& of, int64_t heads, int64_t length, int64_t width) {
    if (!in_pieces(of)) bytes += aligned_rows(of, a.batch, heads, length, width, nullptr).bytes;
  });
  return bytes;
}

const char* align_rows(Attention& a, AttentionGrad* g, void*& scratch, Stream stream) {
  const char* error = nullptr;
  for_each_rows(a, g, [&](Rows& of, int64_t heads, int64_t length, int64_t width) {
    if (error || in_pieces(of)) return;
    const AlignedRows to = aligned_rows(of, a.batch, heads, length, width, scratch);
    const int64_t pieces = length * (to.rows.row / kElements);
    error = launch(align_rows_kernel, {ceil_div(pieces, kCopyThreads), to.places}, kCopyThreads, 0,
                   stream, of, to.rows, to.heads, length, width);
    of = to.rows;
    scratch = (char*)scratch + to.bytes;
  });
  return error;
}

}  // namespace mha_ext::cuda

// Rows of 16-bit elements, from memory into a swizzled tile of shared memory.
#pragma once
#include "tile.cuh"

namespace mha_ext::cuda {

// Rows of one head: where the first is, how many bytes are between them, and how many bytes a copy
// may take at once (16, 4, or 2 where only elements are aligned).
struct HeadRows {
  char* first;
  int64_t stride;
  int piece;
};
template <class S>
DEVICE HeadRows head_rows(const Rows& rows, int64_t b, int64_t h) {
  char* first = (char*)rows.data + (b * rows.batch + h * rows.head) * (int64_t)sizeof(S);
  const int64_t stride = rows.row * (int64_t)sizeof(S);
  const int low = (int)((uintptr_t)first | (uintptr_t)stride) & 15;
  return {first, stride, low == 0 ? 16 : low % 4 == 0 ? 4 : 2};
}

// 16 bytes, of which `valid` exist (`from` is an address in any case) and the others become zero,
// in pieces of the given size.
DEVICE void copy_piece(Address to, const char* from, int valid, int piece) {
  if (piece == 16) {
    copy_async<16>(to, from, valid);
    return;
  }
  if (piece == 4) {
#pragma unroll 1
    for (int at = 0; at < 16; at += 4)
      copy_async<4>(to + at, at < valid ? from + at : from, (int)max_of(0, min_of(4, valid - at)));
    return;
  }
#pragma unroll 1
  for (int at = 0; at < 16; at += 4) {
    uint32_t pair = 0;
    if (at < valid) pair = *(const uint16_t*)(from + at);
    if (at + 2 < valid) pair |= (uint32_t)*(const uint16_t*)(from + at + 2) << 16;
    store_shared(to + at, pair);
  }
}

// kRows rows of `bytes` bytes (up to kRowBytes), zero beyond `rows` and from `bytes` to the next
// multiple of 16 elements; what lies beyond that is not touched. By kThreads threads: this one's
// number is `thread`.
template <int kRows, int kRowBytes, int kThreads>
DEVICE void copy_rows(Address to, const HeadRows& from, int64_t begin, int rows, int bytes,
                      int thread = thread_id()) {
  constexpr int kPieces = kRowBytes / 16, kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kRows % kStep == 0);
  const int p = thread % kPieces, r0 = thread / kPieces;
  if (p * 16 >= (bytes + 31) / 32 * 32) return;
  const int valid = p * 16 >= bytes ? 0 : (int)min_of(16, bytes - p * 16);
  const char* source = from.first + (begin + r0) * from.stride + (valid ? p * 16 : 0);
  const int64_t step = kStep * from.stride;
  if (from.piece == 16) {
#pragma unroll
    for (int i = 0; i < kRows / kStep; i++) {
      const int r = r0 + i * kStep;
      // A row that does not exist is not read, but its address must be one.
      copy_async<16>(to + swizzled<kRowBytes>(r, p), r < rows ? source + i * step : from.first,
                     r < rows ? valid : 0);
    }
    return;
  }
#pragma unroll 1
  for (int r = r0; r < kRows; r += kStep, source += step) {
    const int n = r < rows ? valid : 0;
    copy_piece(to + swizzled<kRowBytes>(r, p), n ? source : from.first, n, from.piece);
  }
}

}  // namespace mha_ext::cuda

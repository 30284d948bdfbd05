// The tile instructions that isa_amx.cpp uses, in plain C++ under their own names, so that its
// kernels can be tested on machines without AMX. Slow; compiled only with MHA_EXT_EMULATE_AMX.
// Semantics: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2. As there, an
// instruction on tiles that are not configured is a fault; the sums are rounded one by one, and the
// chip's order within an instruction may be another.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release

namespace mha_ext::cpu {
namespace {

struct EmulatedTiles {
  static constexpr int kRows = 16, kBytes = 64;
  alignas(64) char tile[8][kRows][kBytes];
  bool configured = false;
};
inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}
inline char* emulated_row(int tile, int row) {
  EmulatedTiles& all = emulated_tiles();
  if (!all.configured) __builtin_trap();
  return all.tile[tile][row];
}

inline void load_tile_config(const void*) { emulated_tiles().configured = true; }
inline void _tile_release() { emulated_tiles().configured = false; }
inline void _tile_loadd(int to, const void* from, int64_t stride) {
  for (int row = 0; row < EmulatedTiles::kRows; row++)
    memcpy(emulated_row(to, row), (const char*)from + row * stride, EmulatedTiles::kBytes);
}
inline void _tile_stored(int from, void* to, int64_t stride) {
  for (int row = 0; row < EmulatedTiles::kRows; row++)
    memcpy((char*)to + row * stride, emulated_row(from, row), EmulatedTiles::kBytes);
}
inline void _tile_zero(int tile) {
  for (int row = 0; row < EmulatedTiles::kRows; row++)
    memset(emulated_row(tile, row), 0, EmulatedTiles::kBytes);
}
// c[m][n] += a[m][2 k] b[k][2 n] + a[m][2 k + 1] b[k][2 n + 1]
inline void _tile_dpbf16ps(int c, int a, int b) {
  const auto number = [](const char* row, int at) {
    uint16_t high;
    memcpy(&high, row + at * 2, 2);
    const uint32_t bits = (uint32_t)high << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  };
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float sum;
      memcpy(&sum, emulated_row(c, m) + n * 4, 4);
      for (int k = 0; k < 16; k++)
        for (int i = 0; i < 2; i++)
          sum += number(emulated_row(a, m), 2 * k + i) * number(emulated_row(b, k), 2 * n + i);
      memcpy(emulated_row(c, m) + n * 4, &sum, 4);
    }
}

}  // namespace
}  // namespace mha_ext::cpu

// The host definitions of the wrappers of csrc/cuda/tile.cuh, over the emulator.
#pragma once
#include <math.h>
#include <string.h>

#include <type_traits>

#include "emulator.h"

namespace mha_ext::cuda {

template <class T>
T load_shared(Address at) {
  return emulator::read_shared<T>(at);
}
template <class T>
void store_shared(Address at, T value) {
  emulator::write_shared(at, value);
}

inline void sync_block() { emulator::sync_block(false); }
inline bool sync_block_or(bool value) { return emulator::sync_block(value); }
inline void sync_warp() { emulator::sync_warp(); }

inline int lowest_bit(uint64_t bits) { return __builtin_ctzll(bits); }
inline uint32_t ballot(bool value) {
  struct Vote {
    bool value;
    uint32_t result;
  } vote{value, 0};
  emulator::together(emulator::Kind::kBallot, &vote, [](void* const* lanes) {
    uint32_t result = 0;
    for (int i = 0; i < 32; i++) result |= (uint32_t)((Vote*)lanes[i])->value << i;
    for (int i = 0; i < 32; i++) ((Vote*)lanes[i])->result = result;
  });
  return vote.result;
}

template <class T>
struct Exchange {
  T value, result;
  int from;
};
template <class T>
T exchange(T value, int from) {
  Exchange<T> mine{value, value, from};
  emulator::together(emulator::Kind::kShuffle, &mine, [](void* const* lanes) {
    for (int i = 0; i < 32; i++) {
      Exchange<T>* lane = (Exchange<T>*)lanes[i];
      lane->result = ((Exchange<T>*)lanes[lane->from & 31])->value;
    }
  });
  return mine.result;
}
template <class T>
T shuffle(T value, int lane) {
  return exchange(value, lane);
}
template <class T>
T shuffle_xor(T value, int lanes) {
  return exchange(value, ((int)threadIdx.x % kWarp) ^ lanes);
}

template <int kBytes>
void copy_async(Address to, const void* from, int bytes) {
  static_assert(kBytes == 4 || kBytes == 16);
  emulator::check_address<kBytes>(to);
  emulator::copy_async(to, from, kBytes, bytes);
}
inline void copy_commit() { emulator::copy_commit(); }
template <int kLatest>
void copy_wait() {
  emulator::copy_wait(kLatest);
}

inline void prefetch(const void*) {}

struct MatrixLoad {
  uint32_t* to;
  Address row;
  bool transposed;
};
inline void load_matrices(MatrixLoad mine) {
  emulator::together(emulator::Kind::kLoadMatrices, &mine, [](void* const* lanes) {
    uint32_t rows[32];
    uint16_t element[4][8][8];  // matrix, row, column
    for (int i = 0; i < 32; i++) rows[i] = ((MatrixLoad*)lanes[i])->row;
    emulator::read_matrix_rows(rows, (char (*)[16])element);
    for (int i = 0; i < 32; i++) {
      const MatrixLoad& lane = *(MatrixLoad*)lanes[i];
      const int line = i / 4, pair = 2 * (i % 4);
      for (int m = 0; m < 4; m++) {
        const uint16_t low = lane.transposed ? element[m][pair][line] : element[m][line][pair];
        const uint16_t high =
            lane.transposed ? element[m][pair + 1][line] : element[m][line][pair + 1];
        lane.to[m] = low | (uint32_t)high << 16;
      }
    }
  });
}
inline void load_matrices(uint32_t (&to)[4], Address row) {
  load_matrices(MatrixLoad{to, row, false});
}
inline void load_matrices_transposed(uint32_t (&to)[4], Address row) {
  load_matrices(MatrixLoad{to, row, true});
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t multiply_high(uint32_t x, uint32_t y) { return (uint32_t)((uint64_t)x * y >> 32); }
inline float saturate(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline uint32_t upper_halves(uint32_t low, uint32_t high) {
  return low >> 16 | (high & 0xffff0000u);
}

inline float widen(BFloat16 x) { return float_of((uint32_t)x.bits << 16); }
inline float widen(Float16 x) {
  _Float16 half;
  memcpy(&half, &x.bits, 2);
  return (float)half;
}
inline uint32_t round_to(BFloat16, float x) {
  const uint32_t u = bits_of(x);
  return x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline uint32_t round_to(Float16, float x) {
  const _Float16 half = (_Float16)x;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return x != x ? 0x7fff : bits;
}
template <class S>
uint32_t pack(S, float low, float high) {
  return round_to(S{}, low) | round_to(S{}, high) << 16;
}

inline float max_or_nan(float x, float y) { return x != x || y != y ? NAN : x > y ? x : y; }
template <class S>
uint32_t min_pair(S, uint32_t x, uint32_t y) {
  const auto lesser = [](float a, float b) { return a != a || b < a ? b : a; };
  return pack(S{}, lesser(widen(S{(uint16_t)x}), widen(S{(uint16_t)y})),
              lesser(widen(S{(uint16_t)(x >> 16)}), widen(S{(uint16_t)(y >> 16)})));
}

template <class S>
struct Product {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};
// Products of 16-bit numbers are exact in float, and added in order.
template <class S>
void multiply_add(S, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Product<S> mine{c, a, {b0, b1}};
  emulator::together(emulator::Kind::kProduct, &mine, [](void* const* lanes) {
    emulator::count_product();
    const auto element = [](uint32_t pair, int i) {
      return widen(S{(uint16_t)(pair >> 16 * (i & 1))});
    };
    float a[16][16], b[16][8], c[16][8];
    for (int i = 0; i < 32; i++) {
      const Product<S>& lane = *(Product<S>*)lanes[i];
      const int g = i / 4, t = i % 4;
      for (int e = 0; e < 2; e++) {
        a[g][2 * t + e] = element(lane.a[0], e);
        a[g + 8][2 * t + e] = element(lane.a[1], e);
        a[g][2 * t + 8 + e] = element(lane.a[2], e);
        a[g + 8][2 * t + 8 + e] = element(lane.a[3], e);
        b[2 * t + e][g] = element(lane.b[0], e);
        b[2 * t + 8 + e][g] = element(lane.b[1], e);
      }
    }
    const auto each_sum = [&](auto what) {
      for (int i = 0; i < 32; i++)
        for (int e = 0; e < 4; e++)
          what(((Product<S>*)lanes[i])->c[e], c[i / 4 + e / 2 * 8][2 * (i % 4) + e % 2]);
    };
    each_sum([](float lane, float& sum) { sum = lane; });
    for (int row = 0; row < 16; row++)
      for (int k = 0; k < 16; k++)
        for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
    each_sum([](float& lane, float sum) { lane = sum; });
  });
}

inline float exp2_approximate(float x) { return exp2f(x); }

}  // namespace mha_ext::cuda

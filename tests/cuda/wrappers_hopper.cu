// The wrappers of csrc/cuda/tile_hopper.cuh: each form of product alone, and all of them together
// in a pipeline. nvcc compiles this for compute capability 9.0, and g++ over the emulator.
#include "launch.cuh"
#include "tile_hopper.cuh"

namespace mha_ext::cuda {
namespace {

constexpr int kDeep = 128;  // of the products' sums

// Numbers of `columns` a row into a tile of kRows rows.
template <int kRows>
DEVICE void fill(Address to, const uint16_t* from, int columns) {
  for (int i = thread_id(); i < kRows * columns / 8; i += kGroup) {
    const int row = i / (columns / 8), piece = i % (columns / 8);
    store_shared(to + paneled<kRows>(row, piece), *(const Bytes16*)(from + 8 * i));
  }
}
template <int kColumns, class Visit>
DEVICE void each_sum(const Visit& visit) {
  const int row = thread_id() % kGroup / kWarp * 16 + lane_id() / 4, pair = lane_id() % 4 * 2;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) visit(j, e, row + e / 2 * 8, 8 * j + pair + e % 2);
}

// c += 2 a b, of rows 64 to 127 of a [128, kDeep], or of the transpose of a, and b [kColumns,
// kDeep] or kAcross its transpose; of that, 32 columns are the second half of 64.
enum class Left { kShared, kRegisters, kAcross };
template <class S, int kColumns, bool kAcross, Left kLeft>
__global__ void LAUNCH_BOUNDS(kGroup, 1)
    product_kernel(const uint16_t* a, const uint16_t* b, float* c) {
  constexpr int kRight = kAcross ? kDeep : kColumns;  // rows of b
  constexpr Address kAt = 128 * kDeep * 2;
  fill<128>(0, a, kDeep);
  fill<kRight>(kAt, b, !kAcross ? kDeep : kColumns < 64 ? 64 : kColumns);
  fence_products();
  sync_block();
  float sum[kColumns / 8][4];
  each_sum<kColumns>(
      [&](int j, int e, int row, int column) { sum[j][e] = c[row * kColumns + column]; });
  uint32_t x[kDeep / 16][4];
#pragma unroll
  for (int k = 0; k < kDeep / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 64 + warp_id() * 16 + lane_id() / 4 + i % 2 * 8;
      x[k][i] = *(const uint32_t*)(a + row * kDeep + 16 * k + lane_id() % 4 * 2 + i / 2 * 8);
    }
  const Operand x0 = operand((kLeft == Left::kAcross ? 128 : 64) * kPanelBytes, 128 * kPanelBytes);
  const Operand y = operand(kAt + (kColumns < 64 ? 64 : 0), kRight * kPanelBytes);
  for (int twice = 0; twice < 2; twice++) {
    pin(sum);
    pin(x);
    begin_products();
#pragma unroll
    for (int k = 0; k < kDeep / 16; k++) {
      const Operand right = kAcross ? across(y, k) : along<kRight>(y, k);
      if constexpr (kLeft == Left::kRegisters)
        multiply_group<kAcross>(S{}, sum, x[k], right, true);
      else if constexpr (kLeft == Left::kAcross)
        multiply_group<kAcross, true>(S{}, sum, across(x0, k), right, true);
      else
        multiply_group<kAcross>(S{}, sum, along<128>(x0, k), right, true);
    }
    commit_products();
    wait_products<0>();
    pin(sum);
    pin(x);
  }
  each_sum<kColumns>(
      [&](int j, int e, int row, int column) { c[row * kColumns + column] = sum[j][e]; });
}

// c [2, 64, 64] = a [2, 64, kDeep] times the sum of b [tiles, kDeep, 64]: a warpgroup brings the
// tiles of b into a ring, two others, with an a each, use them; then they exchange their results
// and subtract: c[0] - c[1], c[1] - c[0].
constexpr int kStages = 2, kTileBytes = kDeep * kPanelBytes;
constexpr Address kA = 0, kRing = 2 * 64 * kDeep * 2, kBarriers = kRing + kStages * kTileBytes;
constexpr int kPipelineBytes = (int)kBarriers + 16 * kStages;
DEVICE Address filled(int stage) { return kBarriers + (Address)(16 * stage); }
DEVICE Address freed(int stage) { return filled(stage) + 8; }

DEVICE void bring(const uint16_t* b, int tiles) {
  give_registers<40>();
#pragma unroll 1
  for (int n = 0; n < tiles; n++) {
    const int stage = n % kStages;
    barrier_wait(freed(stage), (n / kStages & 1) ^ 1);
    for (int i = thread_id(); i < kDeep * 8; i += kGroup)
      copy_async<16>(kRing + (Address)(stage * kTileBytes) + paneled<kDeep>(i / 8, i % 8),
                     b + n * kDeep * 64 + 8 * i, 16);
    copy_commit();
    copy_wait<0>();
    fence_products();
    barrier_arrive(filled(stage));
  }
}
DEVICE void use(int tiles, float* c) {
  take_registers<232>();
  const int which = thread_id() / kGroup - 1;
  const Operand left = operand((Address)(64 * which * kPanelBytes), 128 * kPanelBytes);
  float sum[8][4];
#pragma unroll 1
  for (int n = 0; n < tiles; n++) {
    const int stage = n % kStages;
    const Operand right = operand(kRing + (Address)(stage * kTileBytes), kTileBytes);
    barrier_wait(filled(stage), n / kStages & 1);
    pin(sum);
    begin_products();
#pragma unroll
    for (int k = 0; k < kDeep / 16; k++)
      multiply_group<true>(BFloat16{}, sum, along<128>(left, k), across(right, k), n || k);
    commit_products();
    wait_products<0>();
    pin(sum);
    barrier_arrive(freed(stage));
  }
  // Each gives its sums to the other through the place of a, which neither reads any more.
  sync_some(1, 2 * kGroup);
  each_sum<64>([&](int j, int e, int row, int column) {
    store_shared((Address)(((64 * which + row) * 64 + column) * 4), sum[j][e]);
  });
  if (which == 0) {
    arrive_some(2, 2 * kGroup);
    sync_some(3, 2 * kGroup);
  } else {
    sync_some(2, 2 * kGroup);
    arrive_some(3, 2 * kGroup);
  }
  each_sum<64>([&](int j, int e, int row, int column) {
    const float other = load_shared<float>((Address)(((64 * (1 - which) + row) * 64 + column) * 4));
    c[(64 * which + row) * 64 + column] = sum[j][e] - other;
  });
}
__global__ void LAUNCH_BOUNDS(3 * kGroup, 1)
    pipeline_kernel(const uint16_t* a, const uint16_t* b, float* c, int tiles) {
  if (thread_id() < kGroup) fill<128>(kA, a, kDeep);
  if (thread_id() == 0)
    for (int stage = 0; stage < kStages; stage++) {
      barrier_init(filled(stage), kGroup);
      barrier_init(freed(stage), 2 * kGroup);
    }
  fence_products();
  sync_block();
  if (thread_id() < kGroup)
    bring(b, tiles);
  else
    use(tiles, c);
}

// c [8, kChained] in order of the blocks' numbers: the sum of b [blocks, 8, kChained]. words: the
// next number, and a signal for each block. Numbers go through registers, as matrices, where they
// are pairs of halves.
constexpr int kChained = 64, kChainBytes = 8 * kChained * 4;
__global__ void LAUNCH_BOUNDS(kWarp, 1) chain_kernel(uint32_t* words, const uint16_t* b, float* c) {
  constexpr Address kNumber = kChainBytes, kMatrices = 0;
  if (thread_id() == 0) store_shared(kNumber, take_number(words));
  sync_block();
  const uint32_t n = load_shared<uint32_t>(kNumber);
  const int lane = lane_id();
#pragma unroll 1
  for (int group = 0; group < kChainBytes / 512; group++) {
    uint32_t four[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      four[i] = ((const uint32_t*)b)[n * (kChainBytes / 4) + group * 128 + 32 * i + lane];
    store_matrices(kMatrices + (Address)(512 * group + 16 * lane), four);
  }
  fence_products();
  sync_block();
  if (thread_id() == 0) {
    if (n > 0) wait_signal(words + n, [&](uint32_t value) { return value == n; });
    if (n > 0)
      add_numbers<kChainBytes>(c, 0);
    else
      store_numbers<kChainBytes>(c, 0);
    wait_numbers_read();
    store_shared(0, 0.0f);
    wait_numbers();
    give_signal(words + n + 1, n + 1);
  }
}

template <class S, int kColumns, bool kAcross, Left kLeft>
const char* product(const uint16_t* a, const uint16_t* b, float* c) {
  return launch(product_kernel<S, kColumns, kAcross, kLeft>, Grid{1, 1}, kGroup,
                (128 + (kColumns < 64 ? 64 : kColumns)) * kDeep * 2, nullptr, a, b, c);
}
template <class S>
const char* product(int form, const uint16_t* a, const uint16_t* b, float* c) {
  switch (form) {
    case 0:
      return product<S, 64, false, Left::kShared>(a, b, c);
    case 1:
      return product<S, 64, false, Left::kRegisters>(a, b, c);
    case 2:
      return product<S, 64, true, Left::kShared>(a, b, c);
    case 3:
      return product<S, 64, true, Left::kRegisters>(a, b, c);
    case 4:
      return product<S, 128, false, Left::kShared>(a, b, c);
    case 5:
      return product<S, 128, false, Left::kRegisters>(a, b, c);
    case 6:
      return product<S, 128, true, Left::kShared>(a, b, c);
    case 7:
      return product<S, 128, true, Left::kRegisters>(a, b, c);
    case 8:
      return product<S, 64, false, Left::kAcross>(a, b, c);
    case 10:
      return product<S, 64, true, Left::kAcross>(a, b, c);
    case 12:
      return product<S, 128, false, Left::kAcross>(a, b, c);
    case 14:
      return product<S, 128, true, Left::kAcross>(a, b, c);
    case 26:
      return product<S, 32, true, Left::kAcross>(a, b, c);
  }
  return "no such product";
}
// Forms below 32 are products (1: a in registers, 2: b across, 4: 128 columns, 8: a across, 16: 32
// columns), from there on 32 + the blocks of a chain, others -tiles.
const char* run(int form, int half, uint16_t* a, const uint16_t* b, float* c) {
  if (form >= 32)
    return launch(chain_kernel, Grid{form - 32, 1}, kWarp, kChainBytes + 4, nullptr, (uint32_t*)a,
                  b, c);
  if (form < 0)
    return launch(pipeline_kernel, Grid{1, 1}, 3 * kGroup, kPipelineBytes, nullptr,
                  (const uint16_t*)a, b, c, -form);
  const uint16_t* left = a;
  return half ? product<Float16>(form, left, b, c) : product<BFloat16>(form, left, b, c);
}

}  // namespace
}  // namespace mha_ext::cuda

extern "C" {

// Operands in memory of the host, with their sizes in bytes. nullptr, or what is wrong.
#ifdef __CUDACC__
const char* run_hopper(int form, int half, const void* a, const void* b, void* c, int64_t a_bytes,
                       int64_t b_bytes, int64_t c_bytes) {
  char* there = nullptr;
  cudaError_t error = cudaMalloc(&there, (size_t)(a_bytes + b_bytes + c_bytes));
  char *there_b = there + a_bytes, *there_c = there_b + b_bytes;
  const auto move = [&](void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
    if (error == cudaSuccess) error = cudaMemcpy(to, from, (size_t)bytes, kind);
  };
  move(there, a, a_bytes, cudaMemcpyHostToDevice);
  move(there_b, b, b_bytes, cudaMemcpyHostToDevice);
  move(there_c, c, c_bytes, cudaMemcpyHostToDevice);
  if (error == cudaSuccess) {
    const char* refused =
        mha_ext::cuda::run(form, half, (uint16_t*)there, (const uint16_t*)there_b, (float*)there_c);
    if (refused) return refused;
  }
  move(c, there_c, c_bytes, cudaMemcpyDeviceToHost);
  cudaFree(there);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
#else
const char* run_hopper(int form, int half, void* a, const void* b, void* c, int64_t, int64_t,
                       int64_t) {
  return mha_ext::cuda::run(form, half, (uint16_t*)a, (const uint16_t*)b, (float*)c);
}
void start_hopper(uint64_t seed) {
  emulator::Options options;
  options.seed = seed;
  emulator::start(options);
}
#endif
}

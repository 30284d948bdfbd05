// Each wrapper of csrc/cuda/tile.cuh alone, on one warp. nvcc compiles this for a GPU, and g++ over
// the emulator: test_wrappers.py gives both the same words and compares what comes back.
#include "launch.cuh"

namespace mha_ext::cuda {
namespace {

constexpr int kWords = 32;  // that each lane gets, and gives
constexpr int kShared = kWarp * 16;

enum Which {
  kVotes,
  kShuffles,
  kShared16,
  kCopies16,
  kCopies4,
  kMatrices,
  kTransposed,
  kProductBFloat16,
  kProductFloat16,
  kNumbers,
};

template <class T>
DEVICE T at(const uint32_t* words) {
  return *(const T*)words;
}

template <class S>
DEVICE void product(const uint32_t* in, uint32_t* out) {
  float c[4];
  uint32_t a[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    c[i] = at<float>(in + i);
    a[i] = in[4 + i];
  }
  multiply_add(S{}, c, a, in[8], in[9]);
#pragma unroll
  for (int i = 0; i < 4; i++) *(float*)(out + i) = c[i];
}

// What a thread holds of the 16-byte rows that the warp has put into shared memory.
DEVICE void store_row(const uint32_t* in) {
  store_shared((Address)lane_id() * 16, at<Bytes16>(in));
  sync_warp();
}

__global__ void wrappers_kernel(int which, const uint32_t* in, uint32_t* out) {
  const int lane = lane_id();
  in += lane * kWords;
  out += lane * kWords;
  switch (which) {
    case kVotes:
      out[0] = ballot(in[0] & 1);
      out[1] = sync_block_or(in[1] & 1);
      out[2] = sync_block_or(in[2] == 0x80000000u);
      out[3] = (uint32_t)lowest_bit(at<uint64_t>(in + 4) << lane * 2 | 1ull << 63);
      break;
    case kShuffles:
      out[0] = shuffle(in[0], (int)(in[1] % kWarp));
      *(uint64_t*)(out + 2) = shuffle(at<uint64_t>(in + 2), (int)(in[1] % kWarp));
      for (int i = 0; i < 5; i++) {
        out[4 + i] = shuffle_xor(in[0], 1 << i);
        *(uint64_t*)(out + 10 + 2 * i) = shuffle_xor(at<uint64_t>(in + 2), 1 << i);
        *(float*)(out + 20 + i) = shuffle_xor(at<float>(in + 4), 1 << i);
      }
      break;
    case kShared16: {
      store_row(in);
      const Address from = (Address)(in[4] % kWarp) * 16;
      out[0] = load_shared<uint16_t>(from + 2);
      out[1] = load_shared<uint32_t>(from + 4);
      *(double*)(out + 2) = load_shared<double>(from + 8);
      *(Bytes16*)(out + 4) = load_shared<Bytes16>(from);
      break;
    }
    case kCopies16:
      copy_async<16>((Address)lane * 16, in, (int)(in[4] % 17));
      copy_commit();
      copy_wait<0>();
      sync_block();
      *(Bytes16*)out = load_shared<Bytes16>((Address)(lane ^ 5) * 16);
      break;
    case kCopies4:
      for (int i = 0; i < 4; i++) {
        copy_async<4>((Address)lane * 16 + (Address)i * 4, in + 3 - i, (int)(in[4 + i] % 5));
        copy_commit();
      }
      copy_wait<1>();
      for (int i = 0; i < 3; i++) out[i] = load_shared<uint32_t>((Address)(lane * 16 + i * 4));
      copy_wait<0>();
      sync_block();
      *(Bytes16*)(out + 4) = load_shared<Bytes16>((Address)(lane ^ 9) * 16);
      break;
    case kMatrices:
    case kTransposed: {
      store_row(in);
      uint32_t to[4];
      const Address row = (Address)((lane * 5 + 3) % kWarp) * 16;
      if (which == kMatrices)
        load_matrices(to, row);
      else
        load_matrices_transposed(to, row);
      for (int i = 0; i < 4; i++) out[i] = to[i];
      break;
    }
    case kProductBFloat16:
      product<BFloat16>(in, out);
      break;
    case kProductFloat16:
      product<Float16>(in, out);
      break;
    case kNumbers: {
      const float x = at<float>(in), y = at<float>(in + 1);
      const uint16_t low = (uint16_t)in[2], high = (uint16_t)(in[2] >> 16);
      out[0] = pack(BFloat16{}, x, y);
      out[1] = pack(Float16{}, x, y);
      *(float*)(out + 2) = widen(BFloat16{low});
      *(float*)(out + 3) = widen(Float16{high});
      BFloat16 b;
      Float16 h;
      narrow(x, &b);
      narrow(y, &h);
      out[4] = b.bits;
      out[5] = h.bits;
      *(float*)(out + 6) = exp2_approximate(at<float>(in + 3));
      *(float*)(out + 7) = max_or_nan(x, widen(BFloat16{low}));
      out[8] = min_pair(BFloat16{}, in[2], in[0]);
      out[9] = min_pair(Float16{}, in[2], in[0]);
      out[10] = bits_of(x);
      *(float*)(out + 11) = float_of(in[1]);
      out[12] = upper_halves(in[2], in[0]);
      out[13] = multiply_high(in[2], in[0]);
      *(float*)(out + 14) = saturate(y);
      prefetch(in);
      break;
    }
  }
}

const char* run(int which, const uint32_t* in, uint32_t* out) {
  return launch(wrappers_kernel, Grid{1, 1}, kWarp, kShared, nullptr, which, in, out);
}

}  // namespace
}  // namespace mha_ext::cuda

extern "C" {

// in and out: 32 lanes of 32 words each, in memory of the host. nullptr, or what is wrong.
#ifdef __CUDACC__
const char* run_wrapper(int which, const uint32_t* in, uint32_t* out) {
  constexpr size_t kBytes = (size_t)mha_ext::cuda::kWarp * mha_ext::cuda::kWords * 4;
  uint32_t* there = nullptr;  // first what goes in, then what comes out
  cudaError_t error = cudaMalloc(&there, 2 * kBytes);
  if (error == cudaSuccess) error = cudaMemcpy(there, in, kBytes, cudaMemcpyHostToDevice);
  if (error == cudaSuccess)
    error = cudaMemcpy((char*)there + kBytes, out, kBytes, cudaMemcpyHostToDevice);
  if (error == cudaSuccess) {
    uint32_t* results = (uint32_t*)((char*)there + kBytes);
    const char* refused = mha_ext::cuda::run(which, there, results);
    if (refused) return refused;
    error = cudaMemcpy(out, results, kBytes, cudaMemcpyDeviceToHost);
  }
  cudaFree(there);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
#else
const char* run_wrapper(int which, const uint32_t* in, uint32_t* out) {
  return mha_ext::cuda::run(which, in, out);
}
#endif
}

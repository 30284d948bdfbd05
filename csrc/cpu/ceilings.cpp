// What bounds the kernels, measured: multiply-adds, and the bandwidth of memory.
#include <string.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "kernels.h"

namespace mha_ext::cpu {
namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The best of several short runs: a shared machine only ever slows a run down.
template <class Run>  // () -> amount of work
double best_rate(double seconds, Run run) {
  double best = 0;
  const double end = now() + seconds;
  do {
    const double start = now(), work = run(), rate = work / (now() - start);
    best = rate > best ? rate : best;
  } while (now() < end);
  return best;
}

// Bytes a second of threads that work at the same time, since they share the memory: each goes
// round in its part of `buffers` buffers, piece by piece, until the time is up. The sum of their
// medians.
template <class Piece>  // (piece of the first buffer, offset to the next buffer, bytes) -> moved
double bandwidth(int64_t bytes, double seconds, int threads, int buffers, Piece piece) {
  constexpr int64_t kPiece = 1 << 25, kLine = 64;
  const int64_t part = std::max(bytes / threads / kLine, (int64_t)1) * kLine;
  std::atomic<int> starting{threads};
  std::vector<double> medians((size_t)threads);
  const auto work = [&](int thread) {
    const size_t size = (size_t)(buffers * part);
    const std::unique_ptr<char[]> data(new char[size]);
    memset(data.get(), 1, size);
    std::vector<double> rates;
    starting--;
    while (starting > 0) std::this_thread::yield();
    const double end = now() + seconds;
    int64_t at = 0;
    double start = now();
    do {
      double moved = 0;
      while (moved < (double)kPiece) {
        const int64_t some = std::min(kPiece, part - at);
        moved += piece(data.get() + at, part, some);
        at = at + some < part ? at + some : 0;
      }
      const double stop = now();
      rates.push_back(moved / (stop - start));
      start = stop;
    } while (start < end);
    const auto middle = rates.begin() + (int64_t)rates.size() / 2;
    std::nth_element(rates.begin(), middle, rates.end());
    medians[(size_t)thread] = *middle;
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
  return std::accumulate(medians.begin(), medians.end(), 0.0);
}

}  // namespace

double fma_peak(DType type, double seconds) {
  const auto run = active_kernels().types[(int)type].multiply_add;
  return best_rate(seconds, [&] { return run(200000); });
}

double copy_bandwidth(int64_t bytes, double seconds, int threads) {
  return bandwidth(bytes, seconds, threads, 2, [](char* from, int64_t to, int64_t count) {
    memcpy(from + to, from, (size_t)count);
    asm volatile("" : : "r"(from) : "memory");
    return 2.0 * (double)count;
  });
}

double read_bandwidth(int64_t bytes, double seconds, int threads) {
  return bandwidth(bytes, seconds, threads, 1, [](const char* from, int64_t, int64_t count) {
    typedef uint64_t Vector __attribute__((vector_size(64), aligned(8)));
    Vector sums[4] = {};
    for (int64_t at = 0; at + 256 <= count; at += 256)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) sums[i] += ((const Vector*)(from + at))[i];
    volatile uint64_t sink = (sums[0] + sums[1] + sums[2] + sums[3])[0];
    (void)sink;
    return (double)count;
  });
}

}  // namespace mha_ext::cpu

// A small implementation of the CUDA execution model: see README.md. What a kernel may ask of its
// machine, for tile_host.h; launches; the report of a run.
#pragma once
#include <stdint.h>
#include <string.h>

#include <functional>

#define __global__
#define __device__
#define __host__

namespace emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// How to run: the same seed gives the same schedule.
struct Options {
  uint64_t seed = 0;
  int64_t shared_limit = 99 * 1024;  // of a block: that of compute capability 8.6 and 8.9
  int64_t grid_limit = 65535;        // of y and z; a smaller one makes small problems pass it
  int64_t traffic = 1;               // whether to count bank conflicts, which takes time
  int64_t watched = 1;               // races are looked for in one of so many blocks: that too
  int64_t hopper = 0;                // whether the GPU is of compute capability 9.0
  int64_t processors = 3;            // its multiprocessors
};

// What one kind of access to shared memory cost, in passes over the 32 banks.
struct Traffic {
  int64_t accesses = 0;   // of warps
  int64_t passes = 0;     // that were needed
  int64_t conflicts = 0;  // passes beyond those without a bank conflict
};

struct Report {
  int64_t launches = 0, blocks = 0, threads = 0, shared_bytes = 0;
  int64_t barriers = 0, products = 0;
  Traffic matrices, copies, plain;
};

void start(const Options& options);
const Report& report();
int64_t grid_limit();
bool is_hopper();
int64_t processors();
const char* error();  // of the first launch that failed since start, or nullptr

struct Extent {
  int64_t x, y, z;
};
// Runs body once for each thread of the grid; nullptr, or what went wrong.
const char* run(Extent grid, int threads, int shared_bytes, const std::function<void()>& body);

// For the running thread, which never becomes another: a compiler may ask once.
__attribute__((const)) Index thread_index();
__attribute__((const)) Index block_index();
__attribute__((const)) Index grid_extent();
__attribute__((const)) Index block_extent();
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
bool sync_block(bool value);  // the same for all: whether any gave true
void sync_warp();

// Every lane of a warp comes here with the same kind of work; the last one runs it for all 32.
enum class Kind { kShuffle, kBallot, kLoadMatrices, kProduct, kSync };
void together(Kind kind, void* mine, void (*work)(void* const* lanes));

// Accesses to shared memory, checked: bounds, alignment, races, bytes that are still in flight.
struct Shared {
  char* bytes;
  int64_t size;
  bool noted;  // whether accesses are of interest beyond their bounds
};
extern Shared shared;  // of the running block
[[noreturn]] void bad_address(uint32_t at, int bytes);
void note_shared(bool write, uint32_t at, int bytes);
template <int kBytes>
void check_address(uint32_t at) {
  if (at % kBytes || at + (int64_t)kBytes > shared.size) bad_address(at, kBytes);
}
template <class T>
T read_shared(uint32_t at) {
  T value;
  check_address<sizeof(T)>(at);
  if (shared.noted) note_shared(false, at, sizeof(T));
  memcpy(&value, shared.bytes + at, sizeof(T));
  return value;
}
template <class T>
void write_shared(uint32_t at, const T& value) {
  check_address<sizeof(T)>(at);
  if (shared.noted) note_shared(true, at, sizeof(T));
  memcpy(shared.bytes + at, &value, sizeof(T));
}
void read_matrix_rows(const uint32_t* rows, char (*to)[16]);
void copy_async(uint32_t to, const void* from, int bytes, int valid);
void copy_commit();
void copy_wait(int latest);
void count_product();

// Compute capability 9.0: barriers by their address, by number, and products of a warpgroup, which
// are computed when a thread first waits for them. c holds NaN until then.
constexpr int kGroupThreads = 128;
void barrier_init(uint32_t at, int count);
void barrier_arrive(uint32_t at);
void barrier_wait(uint32_t at, int parity);
void numbered_barrier(int number, int threads, bool waits);
void fence_products();
void set_registers(int count, bool more);
struct GroupProduct {
  uint64_t a, b;  // operands
  int columns;
  bool in_registers, across, left_across, add;
  float (*widen)(uint16_t);
  bool operator==(const GroupProduct&) const = default;
};
void begin_products();
void commit_products();
void issue_product(const GroupProduct& what, float* c, const uint32_t* a);
void wait_products(int latest);
// Numbers of shared memory on their way to the device: read when a thread waits for that, there
// when it waits for all.
void send_numbers(float* to, uint32_t from, int bytes, bool add);
void wait_numbers(bool all);
void check_numbers_sent();

}  // namespace emulator

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define gridDim (emulator::grid_extent())
#define blockDim (emulator::block_extent())

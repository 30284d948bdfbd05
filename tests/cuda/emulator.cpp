// Blocks, one after the other; the threads of a block are fibers that take turns at random.
#include "emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fibers.h"

namespace emulator {
namespace {

// --- The state of a run --------------------------------------------------------------------------

struct Copy {
  uint32_t to;
  const char* from;
  int bytes, valid, group;
};
struct Access {
  uint32_t at;
  int bytes;
};

struct Thread {
  Fiber fiber;
  Index index;
  void* argument;
  std::vector<Copy> copies;      // those not yet waited for, from `delivered` on
  size_t delivered;              // how many of them have arrived
  int committed;                 // groups
  std::vector<Access> accesses;  // since its warp last met
};
struct Warp {
  uint32_t ready;  // the lanes that can run
  int arrived, left;
  uint32_t epoch;  // counts the points that order the memory accesses of its lanes
  Kind kind;
};
// What is known about two bytes of shared memory.
struct Cell {
  uint32_t written = 0, read = 0;                         // in which epoch of the machine
  uint32_t written_warp = 0, read_warp = 0, readers = 0;  // epochs of the warp; warps that read
  int16_t writer = -1, reader = -1;                       // reader: -2 = several
  int16_t in_flight = -1;                                 // whose copy
  uint32_t clock = 0;                                     // of the writer: see hopper.h
  uint32_t fenced = 0, fence_epoch = 0;                   // for products: its clock, 0 = not
};

struct Machine {
  Options options;
  Report report;
  std::string error;
  uint64_t random = 1;

  const std::function<void()>* body = nullptr;
  Fiber home;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::unique_ptr<char[]> shared;  // exactly as many bytes as asked for
  std::vector<Cell> cells;
  int count = 0, running = 0, at_barrier = 0, left = 0, stickiness = 0;
  uint32_t ready = 0;  // the warps with lanes that can run
  bool votes = false, result = false, failed = false;
  bool watched = true;                  // whether races are looked for in this block
  uint32_t epoch = 1, first_epoch = 1;  // of this block
  Index block, grid, extent;
};
Machine m;

uint64_t draw() {
  m.random ^= m.random << 13;
  m.random ^= m.random >> 7;
  m.random ^= m.random << 17;
  return m.random >> 11;
}

Thread& self() { return m.threads[m.running]; }
Warp& my_warp() { return m.warps[m.running / 32]; }

// One of the bits that are set: the first from a place on that luck chooses.
int any_bit(uint32_t bits, uint64_t luck) {
  const int start = (int)(luck & 31);
  return (start + std::countr_zero(std::rotr(bits, start))) & 31;
}

int asleep();
// Hands over to another thread that can run: often of the same warp, so that warps run apart.
void give_way(bool ready) {
  Thread& old = self();
  int warp = m.running / 32;
  const uint32_t lane = 1u << m.running % 32;
  m.warps[warp].ready = ready ? m.warps[warp].ready | lane : m.warps[warp].ready & ~lane;
  m.ready = m.warps[warp].ready ? m.ready | 1u << warp : m.ready & ~(1u << warp);
  if (!m.ready) {
    if (m.left == m.count) {
      jump(old.fiber, m.home);
      return;
    }
    fail(
        "deadlock: %d threads at a barrier, %d have left, %d wait for others or for products, the "
        "others wait for their warp",
        m.at_barrier, m.left, asleep());
  }
  const uint64_t luck = draw();
  if ((int)(luck & 63) >= m.stickiness || !m.warps[warp].ready) warp = any_bit(m.ready, luck >> 6);
  const int next = warp * 32 + any_bit(m.warps[warp].ready, luck >> 11);
  if (next == m.running) return;
  m.running = next;
  jump(old.fiber, m.threads[next].fiber);
}

}  // namespace
}  // namespace emulator

#include "hopper.h"

namespace emulator {
namespace {

int asleep() { return (int)hopper.sleepers.size(); }

// Passes over the banks that the accesses of up to 32 lanes take, and those that they must take.
void count_passes(const Access* lanes, int count, Traffic& traffic) {
  int bytes = 0;
  for (int i = 0; i < count; i++) bytes = std::max(bytes, lanes[i].bytes);
  if (bytes == 0) return;
  const int phase = bytes > 8 ? 8 : bytes > 4 ? 16 : 32;  // lanes served at once
  traffic.accesses++;
  for (int first = 0; first < count; first += phase) {
    std::vector<uint32_t> words;
    for (int i = first; i < std::min(count, first + phase); i++)
      for (int b = 0; b < lanes[i].bytes; b += 4) words.push_back((lanes[i].at + b) / 4);
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    if (words.empty()) continue;
    int used[32] = {}, most = 0;
    for (const uint32_t word : words) most = std::max(most, ++used[word % 32]);
    traffic.passes += most;
    traffic.conflicts += most - 1;
  }
}

// The n-th accesses of the lanes since they last met are taken for one instruction.
void count_accesses(int warp) {
  if (!m.options.traffic) return;
  const int first = warp * 32, size = std::min(32, m.count - first);
  for (size_t n = 0;; n++) {
    Access lanes[32] = {};
    bool any = false;
    for (int i = 0; i < size; i++)
      if (n < m.threads[first + i].accesses.size()) {
        lanes[i] = m.threads[first + i].accesses[n];
        any = true;
      }
    if (!any) break;
    const bool copies = lanes[0].bytes < 0 || lanes[size - 1].bytes < 0;
    for (Access& lane : lanes) lane.bytes = abs(lane.bytes);
    count_passes(lanes, size, copies ? m.report.copies : m.report.plain);
  }
  for (int i = 0; i < size; i++) m.threads[first + i].accesses.clear();
}

// Two accesses of which one writes must be ordered: by a barrier, or by sync_warp in one warp.
void note_read(int thread, uint32_t at, int bytes) {
  if (hopper.clocked) return clocked_read(thread, at, bytes);
  const Warp& warp = m.warps[thread / 32];
  for (uint32_t i = at / 2; i < (at + bytes + 1) / 2; i++) {
    Cell& c = m.cells[i];
    if (c.in_flight >= 0)
      fail(
          "thread %d reads shared byte %u, which the copy of thread %d has not reached yet: a "
          "wait is missing",
          thread, i * 2, c.in_flight);
    if (c.writer >= 0 && c.writer != thread && c.written == m.epoch &&
        !(c.writer / 32 == thread / 32 && c.written_warp < warp.epoch))
      fail("thread %d reads shared byte %u, which thread %d wrote: no barrier is between them",
           thread, i * 2, c.writer);
    if (c.read != m.epoch) c.readers = 0;
    const bool same = c.read == m.epoch && c.readers >> (thread / 32) & 1 &&
                      c.read_warp == warp.epoch && c.reader != thread;
    c.read = m.epoch;
    c.readers |= 1u << (thread / 32);
    c.reader = same ? (int16_t)-2 : (int16_t)thread;
    c.read_warp = warp.epoch;
  }
}
void note_write(int thread, uint32_t at, int bytes, int in_flight) {
  if (hopper.clocked) return clocked_write(thread, at, bytes, in_flight);
  const Warp& warp = m.warps[thread / 32];
  for (uint32_t i = at / 2; i < (at + bytes + 1) / 2; i++) {
    Cell& c = m.cells[i];
    if (c.in_flight >= 0 && c.in_flight != thread)
      fail("thread %d writes shared byte %u, where a copy of thread %d is under way", thread, i * 2,
           c.in_flight);
    if (c.writer >= 0 && c.writer != thread && c.written == m.epoch &&
        !(c.writer / 32 == thread / 32 && c.written_warp < warp.epoch))
      fail("threads %d and %d write shared byte %u: no barrier is between them", c.writer, thread,
           i * 2);
    if (c.read == m.epoch && (c.readers & ~(1u << (thread / 32)) ||
                              (c.readers && c.read_warp == warp.epoch && c.reader != thread)))
      fail(
          "thread %d writes shared byte %u, which another thread has read: no barrier is between "
          "them",
          thread, i * 2);
    c.written = m.epoch;
    c.written_warp = warp.epoch;
    c.writer = (int16_t)thread;
    c.in_flight = (int16_t)in_flight;
  }
}

void all_are_ready() {
  for (Warp& warp : m.warps) warp.ready = ~0u;
  m.ready = ~0u >> (32 - m.warps.size());
}

void thread_main() {
  arrived();
  (*m.body)();
  Thread& thread = self();
  if (thread.delivered < thread.copies.size()) fail("a thread left with copies under way");
  hopper_exit();
  if (m.at_barrier) fail("a thread left while others wait at a barrier");
  Warp& warp = my_warp();
  if (warp.arrived) fail("a lane left while its warp waits for it");
  m.left++;
  warp.left++;
  give_way(false);
}

void run_block(int threads) {
  m.count = threads;
  m.at_barrier = m.left = 0;
  m.votes = false;
  m.first_epoch = ++m.epoch;
  m.stickiness = (int[]){0, 32, 62}[draw() % 3];
  m.watched = draw() % (uint64_t)m.options.watched == 0;
  shared.noted = m.watched || m.options.traffic;
  all_are_ready();
  for (Warp& warp : m.warps) warp.arrived = warp.left = 0;
  memset(shared.bytes, 0xff, (size_t)shared.size);  // NaN, in every floating-point type
  for (int i = 0; i < threads; i++) {
    Thread& t = m.threads[i];
    t.index = {(unsigned)i, 0, 0};
    t.copies.clear();
    t.delivered = 0;
    t.committed = 0;
    t.accesses.clear();
    t.fiber.prepare(thread_main, i);
  }
  if (hopper.clocked) begin_hopper_block();
  m.running = (int)(draw() % threads);
  jump(m.home, m.threads[m.running].fiber);
  if (m.failed) return;
  for (size_t w = 0; w < m.warps.size(); w++) count_accesses((int)w);
  m.report.blocks++;
  m.report.threads += threads;
}

}  // namespace

Shared shared;

const char* refuse(const char* what, int64_t number) {
  if (m.error.empty())
    m.error = "a launch is over the limits: " + std::to_string(number) + " " + what;
  return error();
}

void start(const Options& options) {
  m.options = options;
  m.report = {};
  m.error.clear();
  m.random = options.seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull;
}
const Report& report() { return m.report; }
int64_t grid_limit() { return m.options.grid_limit; }
bool is_hopper() { return m.options.hopper; }
int64_t processors() { return m.options.processors; }
const char* error() { return m.error.empty() ? nullptr : m.error.c_str(); }

const char* run(Extent grid, int threads, int shared_bytes, const std::function<void()>& body) {
  m.body = &body;
  if (threads < 1 || threads > 1024 || threads % 32) return refuse("threads of a block", threads);
  if (shared_bytes > m.options.shared_limit) return refuse("bytes of shared memory", shared_bytes);
  if (grid.x > 0x7fffffff) return refuse("blocks along x", grid.x);
  if (std::max(grid.y, grid.z) > m.options.grid_limit) return refuse("blocks along y or z", grid.y);
  m.report.launches++;
  m.report.shared_bytes = std::max<int64_t>(m.report.shared_bytes, shared_bytes);
  m.shared.reset(new char[shared_bytes]);
  shared = {m.shared.get(), shared_bytes, false};
  const size_t cells = (size_t)(shared_bytes + 1) / 2;
  if (m.failed || m.cells.size() < cells) m.cells.assign(cells, Cell{});  // others are of the past
  m.failed = false;
  hopper.clocked = false;
  if ((int)m.threads.size() < threads) m.threads.resize(threads);
  m.warps.assign((size_t)threads / 32, Warp{});
  m.grid = {(unsigned)grid.x, (unsigned)grid.y, (unsigned)grid.z};
  m.extent = {(unsigned)threads, 1, 1};
  // Blocks come in no order: from anywhere, in either direction.
  const int64_t blocks = grid.x * grid.y * grid.z, first = (int64_t)(draw() % (uint64_t)blocks);
  const bool down = draw() & 1;
  for (int64_t i = 0; i < blocks && !m.failed; i++) {
    const int64_t block = (first + (down ? blocks - i : i)) % blocks;
    m.block = {(unsigned)(block % grid.x), (unsigned)(block / grid.x % grid.y),
               (unsigned)(block / (grid.x * grid.y))};
    run_block(threads);
  }
  m.count = 0;
  return m.failed ? error() : nullptr;
}

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (m.error.empty())
    m.error = std::string(text) + " (block " + std::to_string(m.block.x) + ", " +
              std::to_string(m.block.y) + ", " + std::to_string(m.block.z) + ")";
  m.failed = true;
  jump(self().fiber, m.home);  // for good: the fibers of the block are given up
  __builtin_unreachable();
}

Index thread_index() { return self().index; }
Index block_index() { return m.block; }
Index grid_extent() { return m.grid; }
Index block_extent() { return m.extent; }

bool sync_block(bool value) {
  m.votes |= value;
  if (m.left) fail("a barrier after a thread has left");
  if (my_warp().arrived) fail("a lane is at a barrier while its warp waits for it");
  if (++m.at_barrier < m.count) {
    give_way(false);
    return m.result;
  }
  m.at_barrier = 0;
  m.result = m.votes;
  m.votes = false;
  m.epoch++;
  m.report.barriers++;
  hopper_sync_block();
  all_are_ready();
  const bool result = m.result;
  for (size_t w = 0; w < m.warps.size(); w++) count_accesses((int)w);
  give_way(true);
  return result;
}

void together(Kind kind, void* mine, void (*work)(void* const* lanes)) {
  Warp& warp = my_warp();
  if (warp.left) fail("a lane waits for its warp after another has left");
  if (warp.arrived && warp.kind != kind)
    fail("the lanes of a warp do different things: %d and %d", (int)warp.kind, (int)kind);
  warp.kind = kind;
  self().argument = mine;
  if (++warp.arrived < 32) return give_way(false);
  void* lanes[32];
  const int first = m.running / 32 * 32;
  for (int i = 0; i < 32; i++) {
    lanes[i] = m.threads[first + i].argument;
  }
  warp.arrived = 0;
  warp.ready = ~0u;
  count_accesses(m.running / 32);
  work(lanes);
  give_way(true);
}

void sync_warp() {
  together(Kind::kSync, nullptr, [](void* const*) {
    my_warp().epoch++;
    hopper_sync_warp();
  });
}

void bad_address(uint32_t at, int bytes) {
  if ((int64_t)at + bytes > shared.size)
    fail("shared memory: %d bytes at %u, of %lld", bytes, at, (long long)shared.size);
  fail("shared memory: %d bytes at %u are not aligned", bytes, at);
}
void note_shared(bool write, uint32_t at, int bytes) {
  if (m.watched) write ? note_write(m.running, at, bytes, -1) : note_read(m.running, at, bytes);
  if (m.options.traffic) self().accesses.push_back({at, bytes});
}
void read_matrix_rows(const uint32_t* rows, char (*to)[16]) {
  Access lanes[32];
  for (int i = 0; i < 32; i++) {
    check_address<16>(rows[i]);
    if (m.watched) note_read(m.running / 32 * 32 + i, rows[i], 16);
    memcpy(to[i], shared.bytes + rows[i], 16);
    lanes[i] = {rows[i], 16};
  }
  if (m.options.traffic) count_passes(lanes, 32, m.report.matrices);
}

void copy_async(uint32_t to, const void* from, int bytes, int valid) {
  if ((uintptr_t)from % (uintptr_t)bytes)
    fail("a copy of %d bytes from %p is not aligned", bytes, from);
  if (valid < 0 || valid > bytes) fail("a copy of %d bytes, of which %d are there", bytes, valid);
  Thread& t = self();
  if (m.watched) note_write(m.running, to, bytes, m.running);
  memset(shared.bytes + to, 0xff, (size_t)bytes);
  if (m.options.traffic) t.accesses.push_back({to, -bytes});
  t.copies.push_back({to, (const char*)from, bytes, valid, t.committed});
}
void copy_commit() { self().committed++; }
void copy_wait(int latest) {
  Thread& t = self();
  for (; t.delivered < t.copies.size(); t.delivered++) {
    const Copy& copy = t.copies[t.delivered];
    if (copy.group >= t.committed - latest) return;
    if (m.watched) note_write(m.running, copy.to, copy.bytes, -1);
    memcpy(shared.bytes + copy.to, copy.from, (size_t)copy.valid);
    memset(shared.bytes + copy.to + copy.valid, 0, (size_t)(copy.bytes - copy.valid));
  }
  t.copies.clear();
  t.delivered = 0;
}
void count_product() { m.report.products++; }

}  // namespace emulator

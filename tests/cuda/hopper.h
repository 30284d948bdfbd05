// What compute capability 9.0 adds to the machine: barriers that some threads arrive at and others
// wait for, and products of a warpgroup that read shared memory while its threads go on. With them
// it takes clocks to know which accesses are ordered. A part of emulator.cpp.
#pragma once

namespace emulator {
namespace {

// How much of each thread's past is known: [thread], then [threads + warpgroup] for its products.
using Clock = std::vector<uint32_t>;
void merge(Clock& to, const Clock& from) {
  for (size_t i = 0; i < to.size(); i++) to[i] = std::max(to[i], from[i]);
}

struct Barrier {
  int count, missing;
  uint32_t phase;
  Clock arrived, done;  // of this phase, of those before
};
struct NumberedBarrier {
  int threads = 0, come = 0;
  uint32_t generation = 0;
  std::vector<int> waiting, all;
  Clock arrived;
};
// Registers that products add to: they hold kPoison until they are waited for.
struct Sum {
  float* to;
  std::vector<float> value;
  uint64_t last;  // product
};
constexpr uint32_t kPoison = 0x7fffdead;
struct GroupIssue {
  GroupProduct what;
  uint64_t number;
  int come = 0, left = kGroupThreads;
  uint32_t epoch;
  bool done = false;
  Clock least;  // what all threads knew when they came
  const uint32_t* a[kGroupThreads];
  uint32_t a_then[kGroupThreads][4];
  Sum* sum[kGroupThreads];
};
struct Warpgroup {
  uint64_t first = 0;  // product in `issues`
  std::deque<GroupIssue> issues;
};
struct GroupThread {
  uint64_t issued, waited;
  std::vector<uint64_t> commits;  // products up to them
  std::list<Sum> sums;
  bool begun;
  std::vector<uint32_t> unfenced;  // cells written since the last fence
  uint32_t registers;
  struct Sent {
    float* to;
    uint32_t from;
    int bytes;
    bool add;
    std::vector<float> read;  // once it is
  };
  std::vector<Sent> sent;
};
struct Hopper {
  bool clocked = false;  // since the first use of what is here, in any block of a launch
  std::vector<Clock> known;
  std::map<uint32_t, Barrier> barriers;
  NumberedBarrier numbered[16];
  std::vector<Warpgroup> groups;
  std::vector<GroupThread> threads;
  std::vector<int> sleepers;
  std::vector<uint32_t> product_reads;  // [cell][warpgroup]: the last product that reads it
  struct Reader {
    int thread;
    uint32_t clock;
  };
  std::vector<std::vector<Reader>> readers;  // [cell], since its epoch
};
Hopper hopper;

void begin_hopper_block() {
  const int count = m.count;
  hopper.barriers.clear();
  for (NumberedBarrier& barrier : hopper.numbered) barrier = {};
  hopper.sleepers.clear();
  for (int t = 0; t < count; t++) {
    GroupThread& thread = hopper.threads[t];
    const uint64_t issued = hopper.groups[t / kGroupThreads].first;
    thread = {};
    thread.issued = thread.waited = issued;
    thread.registers = std::min(65536u / (uint32_t)count / 8 * 8, 256u);
    for (size_t g = 0; g < hopper.groups.size(); g++)
      hopper.known[t][count + g] = (uint32_t)hopper.groups[g].first;
  }
}
void use_hopper() {
  if (hopper.clocked) return;
  hopper = {};
  hopper.clocked = true;
  const size_t groups = ((size_t)m.count + kGroupThreads - 1) / kGroupThreads;
  hopper.groups.resize(groups);
  hopper.threads.resize(m.count);
  hopper.known.assign(m.count, Clock(m.count + groups, 0));
  for (int t = 0; t < m.count; t++) hopper.known[t][t] = 1;
  hopper.product_reads.assign(m.cells.size() * groups, 0);
  hopper.readers.assign(m.cells.size(), {});
  begin_hopper_block();
  // What the block has done before.
  for (size_t i = 0; i < (size_t)(shared.size + 1) / 2; i++) {
    Cell& c = m.cells[i];
    if (c.written >= m.first_epoch && c.writer >= 0) {
      c.clock = 1;
      c.fenced = 0;
      hopper.threads[c.writer].unfenced.push_back((uint32_t)i);
    }
    if (c.read == m.epoch)
      for (int t = 0; t < m.count; t++)
        if (c.readers >> t / 32 & 1) hopper.readers[i].push_back({t, 1});
  }
}
// At a barrier of the block. Cells know its epoch; products do not.
void hopper_sync_block() {
  if (!hopper.clocked) return;
  for (size_t g = 0; g < hopper.groups.size(); g++) {
    uint32_t most = 0;
    for (int t = 0; t < m.count; t++) most = std::max(most, hopper.known[t][m.count + g]);
    for (int t = 0; t < m.count; t++) hopper.known[t][m.count + g] = most;
  }
}
void hopper_sync_warp() {
  if (!hopper.clocked) return;
  const int first = m.running / 32 * 32;
  Clock all = hopper.known[first];
  for (int t = first + 1; t < first + 32; t++) merge(all, hopper.known[t]);
  for (int t = first; t < first + 32; t++) {
    hopper.known[t] = all;
    hopper.known[t][t]++;
  }
}
void hopper_exit() {
  if (!hopper.clocked) return;
  const GroupThread& t = hopper.threads[m.running];
  if (t.issued != t.waited) fail("a thread left with products under way");
  if (!t.sent.empty()) fail("a thread left with numbers on their way");
}

void make_ready(int thread) {
  m.warps[thread / 32].ready |= 1u << thread % 32;
  m.ready |= 1u << thread / 32;
}
void wake_all() {
  for (const int t : hopper.sleepers) make_ready(t);
  hopper.sleepers.clear();
}
template <class Condition>
void sleep_until(const Condition& condition) {
  while (!condition()) {
    hopper.sleepers.push_back(m.running);
    give_way(false);
  }
}
// What the thread has done so far goes to `to`.
void release(Clock& to) {
  Clock& mine = hopper.known[m.running];
  if (m.watched) merge(to, mine);
  mine[m.running]++;
}

// --- Accesses ------------------------------------------------------------------------------------

bool knows(const Clock& clock, int thread, const Cell& c) {
  return c.writer < 0 || c.writer == thread || c.written != m.epoch || clock[c.writer] >= c.clock;
}
void clocked_read(int thread, uint32_t at, int bytes) {
  const Clock& clock = hopper.known[thread];
  for (uint32_t i = at / 2; i < (at + bytes + 1) / 2; i++) {
    Cell& c = m.cells[i];
    if (c.in_flight >= 0)
      fail(
          "thread %d reads shared byte %u, which the copy of thread %d has not reached yet: a "
          "wait is missing",
          thread, i * 2, c.in_flight);
    if (!knows(clock, thread, c))
      fail("thread %d reads shared byte %u, which thread %d wrote: no barrier is between them",
           thread, i * 2, c.writer);
    auto& readers = hopper.readers[i];
    if (c.read != m.epoch) readers.clear();
    c.read = m.epoch;
    const auto mine = std::find_if(readers.begin(), readers.end(),
                                   [&](const auto& r) { return r.thread == thread; });
    if (mine != readers.end())
      mine->clock = clock[thread];
    else
      readers.push_back({thread, clock[thread]});
  }
}
void clocked_write(int thread, uint32_t at, int bytes, int in_flight) {
  const Clock& clock = hopper.known[thread];
  const size_t groups = hopper.groups.size();
  for (uint32_t i = at / 2; i < (at + bytes + 1) / 2; i++) {
    Cell& c = m.cells[i];
    if (c.in_flight >= 0 && c.in_flight != thread)
      fail("thread %d writes shared byte %u, where a copy of thread %d is under way", thread, i * 2,
           c.in_flight);
    if (!knows(clock, thread, c))
      fail("threads %d and %d write shared byte %u: no barrier is between them", c.writer, thread,
           i * 2);
    if (c.read == m.epoch)
      for (const auto& reader : hopper.readers[i])
        if (reader.thread != thread && clock[reader.thread] < reader.clock)
          fail(
              "thread %d writes shared byte %u, which another thread has read: no barrier is "
              "between them",
              thread, i * 2);
    for (size_t g = 0; g < groups; g++)
      if (clock[m.count + g] < hopper.product_reads[i * groups + g])
        fail(
            "thread %d writes shared byte %u, which a product of warpgroup %zu reads: nothing says "
            "that it is done",
            thread, i * 2, g);
    hopper.readers[i].clear();
    c.written = m.epoch;
    c.clock = clock[thread];
    c.fenced = 0;
    c.writer = (int16_t)thread;
    c.in_flight = (int16_t)in_flight;
    hopper.threads[thread].unfenced.push_back(i);
  }
}

// --- Products ------------------------------------------------------------------------------------

constexpr uint32_t kWindow = 1024;  // where shared memory begins

// Of an element of an operand: along its rows (kAcross: down its columns) go the 16 of the sum. The
// swizzle is of the address: bits 7 to 9 go into bits 4 to 6.
uint32_t element_address(uint64_t operand, bool across, int line, int k) {
  const uint32_t start = (uint32_t)(operand & 0x3fff) << 4;
  const uint32_t panels = (uint32_t)(operand >> 16 & 0x3fff) << 4;
  const uint32_t groups = (uint32_t)(operand >> 32 & 0x3fff) << 4;
  const uint32_t linear =
      across ? start + line / 64 * panels + k / 8 * groups + k % 8 * 128 + line % 64 * 2
             : start + line / 8 * groups + line % 8 * 128 + k * 2;
  return (linear ^ (linear >> 7 & 7) << 4) - kWindow;
}
void check_operand(uint64_t operand, bool across, int columns) {
  const uint32_t start = (uint32_t)(operand & 0x3fff) << 4;
  if (operand >> 62 != 1) fail("an operand is not in pieces of 128 bytes");
  if (start >> 7 & 7 || (across && (start & 127) + std::min(2 * columns, 128) > 128) ||
      (start & 127) % 32)
    fail("an operand begins at %u: its panel is not at a multiple of 1024", start - kWindow);
}
void read_element(int group, GroupIssue& issue, uint32_t at) {
  if (at + 2 > shared.size || at % 2)
    fail("shared memory: a product reads at %u, of %lld", at, (long long)shared.size);
  if (!m.watched) return;
  Cell& c = m.cells[at / 2];
  if (c.in_flight >= 0)
    fail("a product reads shared byte %u, which the copy of thread %d has not reached yet", at,
         c.in_flight);
  if (!knows(issue.least, -1, c))
    fail("a product reads shared byte %u, which thread %d wrote: no barrier is between them", at,
         c.writer);
  if (c.written >= m.first_epoch && c.writer >= 0 &&
      (c.fenced == 0 || (c.fence_epoch == m.epoch && issue.least[c.writer] < c.fenced)))
    fail("a product reads shared byte %u, which thread %d wrote: no fence_products follows", at,
         c.writer);
  uint32_t& read = hopper.product_reads[at / 2 * hopper.groups.size() + group];
  read = std::max(read, (uint32_t)issue.number + 1);
}
template <class Visit>
void each_element(const GroupProduct& p, const Visit& visit) {
  for (int k = 0; k < 16; k++) {
    for (int n = 0; n < p.columns; n++) visit(true, n, k, element_address(p.b, p.across, n, k));
    if (!p.in_registers)
      for (int row = 0; row < 64; row++)
        visit(false, row, k, element_address(p.a, p.left_across, row, k));
  }
}

__attribute__((optimize("O3"))) void compute(GroupIssue& issue) {
  const GroupProduct& p = issue.what;
  const int columns = p.columns;
  static float a[64][16], b[16][128], c[64][128];
  each_element(p, [&](bool right, int line, int k, uint32_t at) {
    uint16_t bits;
    memcpy(&bits, shared.bytes + at, 2);
    (right ? b[k][line] : a[line][k]) = p.widen(bits);
  });
  for (int t = 0; t < kGroupThreads; t++) {
    const int row = t / 32 * 16 + t % 32 / 4, pair = 2 * (t % 4);
    if (p.in_registers) {
      if (memcmp(issue.a[t], issue.a_then[t], 16))
        fail("registers that a product reads are written before its wait");
      for (int i = 0; i < 8; i++)
        a[row + (i >> 1 & 1) * 8][pair + i % 2 + i / 4 * 8] =
            p.widen((uint16_t)(issue.a[t][i / 2] >> i % 2 * 16));
    }
    for (int i = 0; i < columns / 2; i++)
      c[row + i / 2 % 2 * 8][i / 4 * 8 + pair + i % 2] = issue.sum[t]->value[i];
  }
  for (int row = 0; row < 64; row++) {
    if (!p.add) memset(c[row], 0, sizeof c[row]);
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < columns; n++) c[row][n] += a[row][k] * b[k][n];
  }
  for (int t = 0; t < kGroupThreads; t++) {
    const int row = t / 32 * 16 + t % 32 / 4, pair = 2 * (t % 4);
    for (int i = 0; i < columns / 2; i++)
      issue.sum[t]->value[i] = c[row + i / 2 % 2 * 8][i / 4 * 8 + pair + i % 2];
  }
  issue.done = true;
  m.report.products += columns / 2;  // of 16 x 8 x 16
}

}  // namespace

void barrier_init(uint32_t at, int count) {
  use_hopper();
  check_address<8>(at);
  if (count < 1) fail("a barrier of %d arrivals", count);
  if (m.watched) clocked_write(m.running, at, 8, -1);
  const Clock none(hopper.known[0].size(), 0);
  hopper.barriers[at] = {count, count, 0, none, none};
}
Barrier& barrier_at(uint32_t at) {
  const auto found = hopper.barriers.find(at);
  if (found == hopper.barriers.end()) fail("no barrier is at %u", at);
  if (m.watched && !knows(hopper.known[m.running], m.running, m.cells[at / 2]))
    fail("thread %d uses a barrier that another made: no barrier is between them", m.running);
  return found->second;
}
void barrier_arrive(uint32_t at) {
  Barrier& barrier = barrier_at(at);
  release(barrier.arrived);
  if (--barrier.missing) return;
  barrier.missing = barrier.count;
  barrier.phase++;
  merge(barrier.done, barrier.arrived);
  m.report.barriers++;
  wake_all();
}
void barrier_wait(uint32_t at, int parity) {
  if (parity & ~1) fail("a phase of parity %d", parity);
  Barrier& barrier = barrier_at(at);
  sleep_until([&] { return (int)(barrier.phase & 1) != parity; });
  if (m.watched) merge(hopper.known[m.running], barrier.done);
}

void numbered_barrier(int number, int threads, bool waits) {
  use_hopper();
  if (number < 1 || number > 15) fail("a barrier with number %d", number);
  if (threads < 32 || threads % 32 || threads > m.count) fail("a barrier of %d threads", threads);
  NumberedBarrier& barrier = hopper.numbered[number];
  if (!barrier.come) {
    barrier.threads = threads;
    barrier.arrived.assign(hopper.known[0].size(), 0);
  }
  if (barrier.threads != threads)
    fail("barrier %d is of %d and of %d threads", number, barrier.threads, threads);
  if (std::count(barrier.all.begin(), barrier.all.end(), m.running))
    fail("thread %d comes twice to barrier %d", m.running, number);
  release(barrier.arrived);
  barrier.all.push_back(m.running);
  if (waits) barrier.waiting.push_back(m.running);
  if (++barrier.come < threads) {
    if (waits) {
      const uint32_t generation = barrier.generation;
      sleep_until([&] { return barrier.generation != generation; });
    }
    return;
  }
  for (const int t : barrier.all) {
    const int warp = t / 32;
    if (std::count_if(barrier.all.begin(), barrier.all.end(),
                      [&](int other) { return other / 32 == warp; }) != 32)
      fail("barrier %d gets some lanes of a warp", number);
  }
  for (const int t : barrier.waiting) merge(hopper.known[t], barrier.arrived);
  barrier.waiting.clear();
  barrier.all.clear();
  barrier.come = 0;
  barrier.generation++;
  m.report.barriers++;
  wake_all();
}

void fence_products() {
  use_hopper();
  if (!m.watched) return;
  GroupThread& thread = hopper.threads[m.running];
  for (const uint32_t i : thread.unfenced) {
    Cell& c = m.cells[i];
    if (c.writer != m.running || c.in_flight >= 0) continue;
    c.fenced = hopper.known[m.running][m.running];
    c.fence_epoch = m.epoch;
  }
  thread.unfenced.clear();
}

void set_registers(int count, bool more) {
  use_hopper();
  if (count < 24 || count > 256 || count % 8) fail("%d registers", count);
  GroupThread& thread = hopper.threads[m.running];
  if (more ? (uint32_t)count < thread.registers : (uint32_t)count > thread.registers)
    fail("%d registers, from %u", count, thread.registers);
  // No more than the block had when it was launched.
  const uint32_t most = std::min(65536u / (uint32_t)m.count / 8 * 8, 256u) * (uint32_t)m.count;
  sleep_until([&] {
    uint32_t all = (uint32_t)count - thread.registers;
    for (const GroupThread& other : hopper.threads) all += other.registers;
    return all <= most;
  });
  thread.registers = (uint32_t)count;
  wake_all();
}

void begin_products() {
  use_hopper();
  hopper.threads[m.running].begun = true;
}
void commit_products() {
  use_hopper();
  GroupThread& thread = hopper.threads[m.running];
  thread.commits.push_back(thread.issued);
  thread.begun = false;
}
void issue_product(const GroupProduct& what, float* c, const uint32_t* a) {
  use_hopper();
  const int index = m.running % kGroupThreads, number = m.running / kGroupThreads;
  GroupThread& thread = hopper.threads[m.running];
  Warpgroup& group = hopper.groups[number];
  if (!thread.begun) fail("a product without begin_products");
  const size_t at = thread.issued - group.first;
  if (at == group.issues.size()) {
    check_operand(what.b, what.across, what.columns);
    if (!what.in_registers) check_operand(what.a, what.left_across, 64);
    group.issues.emplace_back();
    group.issues[at].what = what;
    group.issues[at].number = thread.issued;
    group.issues[at].epoch = m.epoch;
    group.issues[at].least = hopper.known[m.running];
  }
  GroupIssue& issue = group.issues[at];
  if (!(issue.what == what)) fail("the threads of a warpgroup have different products");
  if (issue.epoch != m.epoch) fail("a barrier of the block is between the threads of a product");
  if (m.watched)
    for (size_t i = 0; i < issue.least.size(); i++)
      issue.least[i] = std::min(issue.least[i], hopper.known[m.running][i]);
  issue.a[index] = a;
  if (a) memcpy(issue.a_then[index], a, 16);
  auto sum =
      std::find_if(thread.sums.begin(), thread.sums.end(), [&](const Sum& s) { return s.to == c; });
  if (sum == thread.sums.end()) {
    sum = thread.sums.insert(sum, {c, std::vector<float>(c, c + what.columns / 2), 0});
    for (int i = 0; i < what.columns / 2; i++) memcpy(c + i, &kPoison, 4);
  }
  if ((int)sum->value.size() != what.columns / 2) fail("sums of two sizes in one place");
  sum->last = thread.issued++;
  issue.sum[index] = &*sum;
  if (++issue.come < kGroupThreads) return;
  each_element(what, [&](bool, int, int, uint32_t from) { read_element(number, issue, from); });
  wake_all();
}
void wait_products(int latest) {
  use_hopper();
  const int number = m.running / kGroupThreads;
  GroupThread& thread = hopper.threads[m.running];
  Warpgroup& group = hopper.groups[number];
  if ((int)thread.commits.size() <= latest) return;
  const size_t groups = thread.commits.size() - (size_t)latest;
  const uint64_t end = thread.commits[groups - 1];
  thread.commits.erase(thread.commits.begin(), thread.commits.begin() + (int64_t)groups);
  for (; thread.waited < end; thread.waited++) {
    sleep_until([&] { return group.issues[thread.waited - group.first].come == kGroupThreads; });
    GroupIssue& issue = group.issues[thread.waited - group.first];
    if (!issue.done) compute(issue);
    issue.left--;
  }
  for (auto sum = thread.sums.begin(); sum != thread.sums.end();) {
    if (sum->last >= end) {
      sum++;
      continue;
    }
    for (size_t i = 0; i < sum->value.size(); i++) {
      if (memcmp(sum->to + i, &kPoison, 4))
        fail("the sums of a product are written before its wait");
      sum->to[i] = sum->value[i];
    }
    sum = thread.sums.erase(sum);
  }
  uint32_t& known = hopper.known[m.running][m.count + number];
  known = std::max(known, (uint32_t)end);
  for (; !group.issues.empty() && !group.issues[0].left; group.first++) group.issues.pop_front();
}

void send_numbers(float* to, uint32_t from, int bytes, bool add) {
  use_hopper();
  if (from % 16 || bytes % 16 || (uintptr_t)to % 16 || from + (int64_t)bytes > shared.size)
    fail("%d bytes of numbers from %u", bytes, from);
  GroupThread& thread = hopper.threads[m.running];
  if (m.watched)
    for (uint32_t i = from / 2; i < (from + bytes) / 2; i++) {
      const Cell& c = m.cells[i];
      if (c.written >= m.first_epoch && c.writer >= 0 &&
          (c.fenced == 0 ||
           (c.fence_epoch == m.epoch && hopper.known[m.running][c.writer] < c.fenced)))
        fail(
            "numbers are sent from shared byte %u, which thread %d wrote: no fence_products "
            "follows",
            i * 2, c.writer);
    }
  thread.sent.push_back({to, from, bytes, add, {}});
}
void wait_numbers(bool all) {
  use_hopper();
  GroupThread& thread = hopper.threads[m.running];
  for (auto& sent : thread.sent) {
    if (sent.read.empty())
      for (int i = 0; i < sent.bytes / 4; i++)
        sent.read.push_back(read_shared<float>(sent.from + 4 * (uint32_t)i));
    if (!all) continue;
    for (size_t i = 0; i < sent.read.size(); i++)
      sent.to[i] = sent.add ? sent.to[i] + sent.read[i] : sent.read[i];
  }
  if (all) thread.sent.clear();
}
void check_numbers_sent() {
  if (hopper.clocked && !hopper.threads[m.running].sent.empty())
    fail("a signal is given before numbers have arrived");
}

}  // namespace emulator

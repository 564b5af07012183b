#include "runtime.h"

#include <algorithm>
#include <sstream>

#include "launch.h"

namespace emulator {

namespace {

constexpr uint32_t kGranule = 16;  // bytes of shared memory that share one mark
constexpr uint16_t kClean = 0, kAnyThread = 0xffff;
constexpr size_t kStackBytes = 512 << 10;
constexpr uint64_t kMapMagic = 0x70616d726f736e74;
constexpr uint64_t kIdleLimit = 20'000'000;  // polls without any event before a launch counts as stuck

struct Failure {
  std::string message;
};

// ---- fibers ----------------------------------------------------------------------------------------------------------

#if !defined(__x86_64__)
#error "the emulator switches stacks by x86-64 instructions"
#endif

extern "C" void emulator_switch(void** save, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

enum class State { ready, running, blocked, done };

struct Fiber {
  Thread thread;
  void* stack_pointer;
  char* stack;
  State state;
  std::string waits_for;
};

using Waiters = std::vector<Fiber*>;

}  // namespace

// ---- what a block holds ------------------------------------------------------------------------------------------------

struct Collective {
  int kind, at;
  uint32_t mask, arrived = 0;
  void* payload[32] = {};
  Fiber* fiber[32] = {};
  bool finished = false;
};

struct Warp {
  std::vector<std::shared_ptr<Collective>> open;
  std::vector<Fiber*> ready;
  uint64_t priority = 0;
};

namespace {

struct NamedBarrier {
  uint32_t arrived = 0, expected = 0, value = 0, generation = 0;
  bool implicit = false;
  uint32_t result[4] = {};
  Waiters waiters;
};

struct MBarrier {
  uint32_t arrivals, pending;
  int64_t bytes = 0;
  uint32_t phase = 0;
  Waiters waiters;
};

struct Row {
  Block* block;
  uint32_t offset, bytes;
  uint64_t source;         // 0: zeros
  std::vector<char> data;  // bytes at issue, where the source is shared memory
};

struct AsyncOperation {
  std::vector<Row> rows;
  Place barrier{nullptr, 0};
  uint32_t bytes = 0;
  Place source{nullptr, 0};  // shared memory that must not change before it has been read
};

struct Product {
  int n = 0, transposed_b = 0;
  bool is_half = false, accumulate = false, in_registers = false;
  uint64_t a = 0, b = 0;
  uint32_t fragment[128][4];
  std::shared_ptr<std::vector<float>> value[128];
  int arrived = 0, retired = 0, line = 0;
  uint64_t hash = 0;
};

struct Warpgroup {
  std::map<uint64_t, Product> products;
  uint64_t executed = 0;
  Waiters waiters;
};

struct TensorMap {
  uint64_t address;
  std::vector<uint64_t> sizes, strides;  // elements, bytes (of dimensions 1 ..)
  std::vector<uint32_t> box;
  uint32_t element_bytes, swizzle_bytes;
};

}  // namespace

struct Block {
  std::vector<char> storage;
  char* shared = nullptr;
  uint32_t bytes = 0, live = 0, rank = 0;
  std::vector<uint16_t> marks;  // per granule: who wrote it and has not fenced it for the async proxy
  std::map<uint32_t, MBarrier> mbarriers;
  NamedBarrier named[16];
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Warpgroup> warpgroups;
  int registers = 0;
};

namespace {

struct Machine {
  std::vector<std::unique_ptr<Block>> blocks;  // of the cluster that runs
  std::vector<Fiber> fibers;
  std::vector<Warp*> warps;
  std::deque<AsyncOperation> in_flight;
  void* scheduler = nullptr;
  Fiber* current = nullptr;
  std::string failure;
  std::string kernel;
  uint64_t random = 1, idle = 0, ticks = 0;
  int policy = 0;
  size_t next_warp = 0;
  NamedBarrier cluster;
  std::vector<char*> stacks;

  uint64_t draw() {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    return random;
  }
} machine;

Options options;
std::map<uint64_t, uint64_t> allocations;  // start -> bytes; empty: global accesses are not checked
std::map<std::string, Registration const*>& registry() {
  static std::map<std::string, Registration const*> kernels;
  return kernels;
}
uint64_t launches = 0;

Fiber& fiber_of(Thread& thread) { return *reinterpret_cast<Fiber*>(&thread); }

void make_ready(Fiber* fiber) {
  fiber->state = State::ready;
  fiber->thread.warp_state->ready.push_back(fiber);
}

void wake(Waiters& waiters) {
  for (Fiber* fiber : waiters) {
    make_ready(fiber);
  }
  waiters.clear();
  machine.idle = 0;
}

void to_scheduler(Fiber& fiber) { emulator_switch(&fiber.stack_pointer, machine.scheduler); }

void block_on(Fiber& fiber, Waiters& waiters, std::string what) {
  waiters.push_back(&fiber);
  fiber.state = State::blocked;
  fiber.waits_for = std::move(what);
  to_scheduler(fiber);
}

Kernel current_kernel;
char* current_params;

void fiber_main() {
  Fiber& fiber = *machine.current;
  current_kernel(fiber.thread, current_params);
  fiber.thread.exit();
}

// ---- barriers ----------------------------------------------------------------------------------------------------------

std::string text(Place place) {
  std::ostringstream out;
  out << "mbarrier at " << place.offset;
  if (machine.blocks.size() > 1) {
    out << " of rank " << place.block->rank;
  }
  return out.str();
}

MBarrier& find(Thread* thread, Place place) {
  auto const found = place.block->mbarriers.find(place.offset);
  if (found == place.block->mbarriers.end()) {
    std::string const message = text(place) + " was not initialised";
    if (thread != nullptr) {
      thread->fail(message);
    }
    throw Failure{message};
  }
  return found->second;
}

void complete_if_due(MBarrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    wake(barrier.waiters);
  }
}

void arrive(Thread* thread, Place place, uint32_t count) {
  MBarrier& barrier = find(thread, place);
  if (count > barrier.pending) {
    std::string const message = text(place) + ": more arrivals than it was initialised with";
    if (thread != nullptr) {
      thread->fail(message);
    }
    throw Failure{message};
  }
  barrier.pending -= count;
  complete_if_due(barrier);
}

void land_operation(size_t index) {
  AsyncOperation operation = std::move(machine.in_flight[index]);
  machine.in_flight.erase(machine.in_flight.begin() + static_cast<long>(index));
  if (operation.source.block != nullptr) {
    char const* const now = operation.source.block->shared + operation.source.offset;
    if (std::memcmp(now, operation.rows[0].data.data(), operation.rows[0].data.size()) != 0) {
      throw Failure{"shared memory at " + std::to_string(operation.source.offset) +
                    " was rewritten while a bulk copy was reading it"};
    }
  }
  for (Row const& row : operation.rows) {
    char* const to = row.block->shared + row.offset;
    if (!row.data.empty()) {
      std::memcpy(to, row.data.data(), row.bytes);
    } else if (row.source != 0) {
      std::memcpy(to, reinterpret_cast<void*>(row.source), row.bytes);
    } else {
      std::memset(to, 0, row.bytes);
    }
  }
  if (operation.barrier.block != nullptr) {
    MBarrier& barrier = find(nullptr, operation.barrier);
    barrier.bytes -= operation.bytes;
    complete_if_due(barrier);
  }
  machine.idle = 0;
}

// ---- the scheduler -----------------------------------------------------------------------------------------------------

Fiber* choose() {
  Warp* chosen = nullptr;
  size_t const count = machine.warps.size();
  if (machine.policy == 0) {  // one warp after the other
    for (size_t i = 0; i < count && chosen == nullptr; ++i) {
      Warp* const warp = machine.warps[(machine.next_warp + i) % count];
      if (!warp->ready.empty()) {
        chosen = warp;
        machine.next_warp = (machine.next_warp + i + 1) % count;
      }
    }
  } else if (machine.policy == 1) {  // any
    size_t const first = machine.draw() % count;
    for (size_t i = 0; i < count && chosen == nullptr; ++i) {
      Warp* const warp = machine.warps[(first + i) % count];
      chosen = warp->ready.empty() ? nullptr : warp;
    }
  } else {  // the one of highest priority, which now and then becomes the lowest
    for (Warp* const warp : machine.warps) {
      if (!warp->ready.empty() && (chosen == nullptr || warp->priority > chosen->priority)) {
        chosen = warp;
      }
    }
    if (chosen != nullptr && machine.draw() % 256 == 0) {
      chosen->priority = machine.draw() % 2 ? machine.draw() >> 8 : 0;
    }
  }
  if (chosen == nullptr) {
    return nullptr;
  }
  size_t const at = machine.policy == 1 ? machine.draw() % chosen->ready.size() : 0;
  Fiber* const fiber = chosen->ready[at];
  chosen->ready.erase(chosen->ready.begin() + static_cast<long>(at));
  return fiber;
}

std::string stuck() {
  std::map<std::string, std::vector<uint32_t>> waiting;
  for (Fiber const& fiber : machine.fibers) {
    if (fiber.state != State::done) {
      std::ostringstream line;
      line << "warp " << fiber.thread.warp << " (block " << fiber.thread.ctaid[0] << ") at PTX line " << fiber.thread.at
           << ": " << (fiber.state == State::blocked ? fiber.waits_for : "ready");
      waiting[line.str()].push_back(fiber.thread.lane);
    }
  }
  std::string out = "deadlock";
  for (auto const& [line, lanes] : waiting) {
    out += "\n  " + line + " [" + std::to_string(lanes.size()) + " lanes]";
  }
  return out;
}

void run_fibers() {
  size_t alive = machine.fibers.size();
  while (alive > 0) {
    if (!machine.in_flight.empty() && machine.draw() % 8 == 0) {
      land_operation(machine.draw() % machine.in_flight.size());
    }
    Fiber* fiber = choose();
    if (fiber == nullptr) {
      if (machine.in_flight.empty()) {
        throw Failure{stuck()};
      }
      land_operation(machine.draw() % machine.in_flight.size());
      continue;
    }
    if (++machine.idle > kIdleLimit) {
      throw Failure{"no event in " + std::to_string(kIdleLimit) + " polls; " + stuck()};
    }
    fiber->state = State::running;
    machine.current = fiber;
    emulator_switch(&machine.scheduler, fiber->stack_pointer);
    if (!machine.failure.empty()) {
      throw Failure{machine.failure};
    }
    alive -= fiber->state == State::done;
  }
  if (!machine.in_flight.empty()) {
    throw Failure{"the block ended with bulk copies in flight"};
  }
}

}  // namespace

void Thread::fail(std::string const& message) {
  std::ostringstream out;
  out << machine.kernel << ", block (" << ctaid[0] << ", " << ctaid[1] << ", " << ctaid[2] << "), thread " << index
      << ", PTX line " << at << ": " << message;
  machine.failure = out.str();
  to_scheduler(fiber_of(*this));
  __builtin_unreachable();
}

void Thread::exit() {
  if (!in_flight.empty()) {
    fail("exit with warpgroup products in flight");
  }
  for (auto const& group : store_groups) {
    if (!group.offsets.empty()) {
      fail("exit while a bulk store may still read shared memory");
    }
  }
  land_all_due();
  --block->live;
  for (NamedBarrier& barrier : block->named) {
    if (barrier.implicit && barrier.arrived != 0 && barrier.arrived == block->live) {
      barrier.result[barrier.generation++ % 4] = barrier.value;
      barrier.arrived = barrier.value = barrier.expected = 0;
      wake(barrier.waiters);
    }
  }
  fiber_of(*this).state = State::done;
  machine.idle = 0;
  to_scheduler(fiber_of(*this));
  __builtin_unreachable();
}

void Thread::yield() {
  Fiber& fiber = fiber_of(*this);
  make_ready(&fiber);
  to_scheduler(fiber);
}

void Thread::maybe_yield() {
  if (!copy_groups.empty() && machine.draw() % 16 == 0) {
    auto& group = copy_groups[machine.draw() % copy_groups.size()];
    if (!group.empty()) {
      land(group[machine.draw() % group.size()]);
    }
  }
  if (machine.draw() % 16 == 0) {
    yield();
  }
}

uint64_t Thread::clock() { return machine.ticks += 100; }

void Thread::set_registers(char, uint32_t) {}

// ---- memory ------------------------------------------------------------------------------------------------------------

void Thread::check_global(uint64_t address, uint32_t bytes, bool write) {
  if (address % bytes != 0) {
    misaligned(address, bytes);
  }
  if (allocations.empty()) {
    return;
  }
  auto found = allocations.upper_bound(address);
  if (found != allocations.begin()) {
    --found;
    if (address + bytes <= found->first + found->second) {
      return;
    }
  }
  std::ostringstream out;
  out << (write ? "write of " : "read of ") << bytes << " bytes of global memory outside every allocation";
  if (found != allocations.end() && address >= found->first) {
    out << ": " << address - found->first << " bytes into one of " << found->second;
  }
  fail(out.str());
}

void Thread::bad_shared(uint64_t address, uint32_t bytes) {
  fail("shared memory access of " + std::to_string(bytes) + " bytes at " + std::to_string(address) + " of " +
       std::to_string(shared_bytes));
}

void Thread::misaligned(uint64_t address, uint32_t bytes) {
  fail("access of " + std::to_string(bytes) + " bytes at the misaligned address " + std::to_string(address));
}

void Thread::mark_written(uint32_t offset, uint32_t bytes) {
  uint16_t const mine = static_cast<uint16_t>(index + 1);
  for (uint32_t granule = offset / kGranule; granule <= (offset + bytes - 1) / kGranule; ++granule) {
    if (block->marks[granule] != mine) {
      block->marks[granule] = mine;
      dirty.push_back(granule);
    }
  }
}

void Thread::shared_access(uint32_t offset, uint32_t bytes, bool write) {
  if (machine.draw() % 128 == 0) {
    yield();
  }
  if (write) {
    mark_written(offset, bytes);
  }
}

Place Thread::resolve(uint64_t address) {
  uint32_t const rank = static_cast<uint32_t>(address) >> 24;
  if (rank == 0) {
    return own(address);
  }
  if (rank > machine.blocks.size()) {
    fail("shared::cluster address of rank " + std::to_string(rank - 1));
  }
  return {machine.blocks[rank - 1].get(), static_cast<uint32_t>(address) & 0xffffffu};
}

char* Thread::remote(Place place, uint32_t bytes) {
  if (uint64_t{place.offset} + bytes > place.block->bytes) {
    bad_shared(place.offset, bytes);
  }
  return place.block->shared + place.offset;
}

uint32_t Thread::map_to_rank(uint32_t address, uint32_t rank) {
  if (rank >= cluster_size) {
    fail("mapa to rank " + std::to_string(rank));
  }
  return (rank + 1) << 24 | (address & 0xffffffu);
}

void Thread::fence_proxy_async() {
  uint16_t const mine = static_cast<uint16_t>(index + 1);
  for (uint32_t granule : dirty) {
    if (block->marks[granule] == mine) {
      block->marks[granule] = kClean;
    }
  }
  dirty.clear();
  for (uint16_t& mark : block->marks) {
    mark = mark == kAnyThread ? kClean : mark;
  }
}

namespace {

void require_fenced(Thread& thread, Block& block, uint32_t offset, uint32_t bytes, char const* reader) {
  for (uint32_t granule = offset / kGranule; granule <= (offset + bytes - 1) / kGranule; ++granule) {
    if (block.marks[granule] != kClean) {
      thread.fail(std::string(reader) + " reads shared memory at " + std::to_string(granule * kGranule) +
                  ", which thread " + std::to_string(block.marks[granule] - 1) +
                  " wrote without fence.proxy.async afterwards");
    }
  }
}

}  // namespace

// ---- the warp ----------------------------------------------------------------------------------------------------------

namespace {

enum Kind { kShuffle, kVote, kReduce, kSync, kLoadMatrix, kStoreMatrix, kMma, kElect };

// All lanes of `mask` meet; the last to come runs `body(collective)` for all.
template <class Body>
void meet(Thread& thread, Kind kind, uint32_t mask, void* payload, Body&& body) {
  thread.maybe_yield();
  if (!(mask >> thread.lane & 1u)) {
    thread.fail("a lane takes part in a warp operation whose mask leaves it out");
  }
  Warp& warp = *thread.warp_state;
  std::shared_ptr<Collective> mine;
  for (auto& open : warp.open) {
    if (open->kind == kind && open->mask == mask && !(open->arrived >> thread.lane & 1u)) {
      mine = open;
      break;
    }
  }
  if (!mine) {
    mine = std::make_shared<Collective>();
    mine->kind = kind;
    mine->at = thread.at;
    mine->mask = mask;
    warp.open.push_back(mine);
  }
  if (mine->at != thread.at && kind != kSync) {
    thread.fail("lanes of a warp meet at different instructions, the other at PTX line " + std::to_string(mine->at));
  }
  mine->arrived |= 1u << thread.lane;
  mine->payload[thread.lane] = payload;
  mine->fiber[thread.lane] = &fiber_of(thread);
  if (mine->arrived == mask) {
    warp.open.erase(std::find(warp.open.begin(), warp.open.end(), mine));
    body(*mine);
    for (int lane = 0; lane < 32; ++lane) {
      if (mine->fiber[lane] != nullptr && mine->fiber[lane] != &fiber_of(thread)) {
        make_ready(mine->fiber[lane]);
      }
    }
    machine.idle = 0;
  } else {
    Fiber& fiber = fiber_of(thread);
    fiber.state = State::blocked;
    static char const* const names[] = {"shfl", "vote", "redux", "bar.warp.sync", "ldmatrix", "stmatrix", "mma", "elect"};
    fiber.waits_for = std::string(names[kind]) + ", the other lanes";
    to_scheduler(fiber);
  }
}

template <class Payload>
Payload& payload(Collective& c, int lane) {
  return *static_cast<Payload*>(c.payload[lane]);
}

}  // namespace

uint32_t Thread::shuffle(Shuffle mode, uint32_t value, uint32_t b, uint32_t c, uint32_t mask, bool* valid) {
  struct Item {
    Shuffle mode;
    uint32_t value, b, c, result;
    bool valid;
  } item{mode, value, b, c, 0, false};
  meet(*this, kShuffle, mask, &item, [](Collective& all) {
    for (int lane = 0; lane < 32; ++lane) {
      if (all.payload[lane] == nullptr) {
        continue;
      }
      Item& x = payload<Item>(all, lane);
      int const segment = static_cast<int>(x.c >> 8 & 31), clamp = static_cast<int>(x.c & 31), by = static_cast<int>(x.b & 31);
      int const last = (lane & segment) | (clamp & ~segment), first = lane & segment;
      int from = 0;
      switch (x.mode) {
        case Shuffle::up: from = lane - by, x.valid = from >= last; break;
        case Shuffle::down: from = lane + by, x.valid = from <= last; break;
        case Shuffle::bfly: from = lane ^ by, x.valid = from <= last; break;
        case Shuffle::idx: from = first | (by & ~segment), x.valid = from <= last; break;
      }
      from = x.valid ? from : lane;
      x.result = all.payload[from] != nullptr ? payload<Item>(all, from).value : 0xdeadbeefu;
    }
  });
  if (valid != nullptr) {
    *valid = item.valid;
  }
  return item.result;
}

uint32_t Thread::vote_ballot(bool value, uint32_t mask) {
  struct Item {
    bool value;
    uint32_t result;
  } item{value, 0};
  meet(*this, kVote, mask, &item, [](Collective& all) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
      votes |= all.payload[lane] != nullptr && payload<Item>(all, lane).value ? 1u << lane : 0u;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (all.payload[lane] != nullptr) {
        payload<Item>(all, lane).result = votes;
      }
    }
  });
  return item.result;
}

uint32_t Thread::reduce_add(uint32_t value, uint32_t mask) {
  struct Item {
    uint32_t value, result;
  } item{value, 0};
  meet(*this, kReduce, mask, &item, [](Collective& all) {
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; ++lane) {
      sum += all.payload[lane] != nullptr ? payload<Item>(all, lane).value : 0;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (all.payload[lane] != nullptr) {
        payload<Item>(all, lane).result = sum;
      }
    }
  });
  return item.result;
}

bool Thread::elect(uint32_t mask) {
  int item = 0;
  meet(*this, kElect, mask, &item, [](Collective&) {});
  return lane == static_cast<uint32_t>(__builtin_ctz(mask));
}

void Thread::warp_sync(uint32_t mask) {
  int item = 0;
  meet(*this, kSync, mask, &item, [](Collective&) {});
}

namespace {

struct MatrixItem {
  uint32_t address;
  bool transposed;
  uint32_t value[4];
};

}  // namespace

void Thread::load_matrix(uint64_t address, bool transposed, std::initializer_list<uint32_t*> out) {
  at_shared(static_cast<uint32_t>(address), 16);
  MatrixItem item{static_cast<uint32_t>(address), transposed, {}};
  meet(*this, kLoadMatrix, 0xffffffffu, &item, [this](Collective& all) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t rows[8][8];
      for (int row = 0; row < 8; ++row) {
        std::memcpy(rows[row], shared + payload<MatrixItem>(all, 8 * matrix + row).address, 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        MatrixItem& x = payload<MatrixItem>(all, lane);
        int const i = lane / 4, j = lane % 4 * 2;
        uint32_t const low = x.transposed ? rows[j][i] : rows[i][j], high = x.transposed ? rows[j + 1][i] : rows[i][j + 1];
        x.value[matrix] = high << 16 | low;
      }
    }
  });
  for (int i = 0; i < 4; ++i) {
    *out.begin()[i] = item.value[i];
  }
}

void Thread::store_matrix(uint64_t address, bool transposed, std::initializer_list<uint32_t> in) {
  at_shared(static_cast<uint32_t>(address), 16);
  mark_written(static_cast<uint32_t>(address), 16);
  MatrixItem item{static_cast<uint32_t>(address), transposed, {}};
  std::copy(in.begin(), in.end(), item.value);
  meet(*this, kStoreMatrix, 0xffffffffu, &item, [this](Collective& all) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t rows[8][8];
      for (int lane = 0; lane < 32; ++lane) {
        MatrixItem const& x = payload<MatrixItem>(all, lane);
        int const i = lane / 4, j = lane % 4 * 2;
        (x.transposed ? rows[j][i] : rows[i][j]) = static_cast<uint16_t>(x.value[matrix]);
        (x.transposed ? rows[j + 1][i] : rows[i][j + 1]) = static_cast<uint16_t>(x.value[matrix] >> 16);
      }
      for (int row = 0; row < 8; ++row) {
        std::memcpy(shared + payload<MatrixItem>(all, 8 * matrix + row).address, rows[row], 16);
      }
    }
  });
}

namespace {

float element(uint16_t bits, bool is_half) { return is_half ? half_value(bits) : bfloat_value(bits); }

// Rows of a 16 x 16 operand from the fragments of a warp's lanes.
void unpack_a(uint32_t const* const fragment[32], bool is_half, float (*a)[16]) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      int const row = lane / 4 + i % 2 * 8, k = lane % 4 * 2 + i / 2 * 8;
      a[row][k] = element(static_cast<uint16_t>(fragment[lane][i]), is_half);
      a[row][k + 1] = element(static_cast<uint16_t>(fragment[lane][i] >> 16), is_half);
    }
  }
}

}  // namespace

void Thread::multiply(float* const* d, uint32_t const* a, uint32_t const* b, float const* c, bool is_half) {
  struct Item {
    uint32_t a[4], b[2];
    float c[4];
    bool is_half;
  } item;
  std::copy(a, a + 4, item.a);
  std::copy(b, b + 2, item.b);
  std::copy(c, c + 4, item.c);
  item.is_half = is_half;
  meet(*this, kMma, 0xffffffffu, &item, [](Collective& all) {
    bool const is_half = payload<Item>(all, 0).is_half;
    float a[16][16], b[16][8];
    uint32_t const* fragments[32];
    for (int lane = 0; lane < 32; ++lane) {
      fragments[lane] = payload<Item>(all, lane).a;
    }
    unpack_a(fragments, is_half, a);
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 2; ++i) {
        uint32_t const bits = payload<Item>(all, lane).b[i];
        int const k = lane % 4 * 2 + 8 * i, n = lane / 4;
        b[k][n] = element(static_cast<uint16_t>(bits), is_half);
        b[k + 1][n] = element(static_cast<uint16_t>(bits >> 16), is_half);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      Item& x = payload<Item>(all, lane);
      for (int i = 0; i < 4; ++i) {
        int const row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) {
          sum = std::fma(a[row][k], b[k][column], sum);
        }
        x.c[i] += sum;
      }
    }
  });
  for (int i = 0; i < 4; ++i) {
    *d[i] = item.c[i];
  }
}

// ---- barriers of a block -------------------------------------------------------------------------------------------------

uint32_t Thread::named(uint32_t id, uint32_t count, bool wait, bool value) {
  maybe_yield();
  if (id >= 16) {
    fail("named barrier " + std::to_string(id));
  }
  NamedBarrier& barrier = block->named[id];
  bool const implicit = count == 0;
  uint32_t const expected = implicit ? block->live : count;
  if (expected % 32 != 0 && !implicit) {
    fail("a named barrier of " + std::to_string(expected) + " threads");
  }
  if (barrier.arrived != 0 && barrier.expected != expected && !implicit) {
    fail("named barrier " + std::to_string(id) + " is used with " + std::to_string(expected) + " and with " +
         std::to_string(barrier.expected) + " threads at once");
  }
  barrier.expected = expected;
  barrier.implicit = implicit;
  barrier.value += value;
  uint32_t const generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.result[generation % 4] = barrier.value;
    barrier.arrived = barrier.value = barrier.expected = 0;
    ++barrier.generation;
    wake(barrier.waiters);
  } else if (wait) {
    block_on(fiber_of(*this), barrier.waiters, "named barrier " + std::to_string(id));
  }
  return barrier.result[generation % 4];
}

void Thread::cluster_arrive() {
  uint32_t const threads = static_cast<uint32_t>(machine.fibers.size());
  cluster_phase = machine.cluster.generation;
  if (++machine.cluster.arrived == threads) {
    machine.cluster.arrived = 0;
    ++machine.cluster.generation;
    wake(machine.cluster.waiters);
  }
}

void Thread::cluster_wait() {
  if (machine.cluster.generation == cluster_phase) {
    block_on(fiber_of(*this), machine.cluster.waiters, "the cluster barrier");
  }
}

void Thread::mbarrier_init(Place place, uint32_t arrivals) {
  remote(place, 8);
  if (place.offset % 8 != 0 || arrivals == 0) {
    fail("mbarrier.init at " + std::to_string(place.offset) + " with " + std::to_string(arrivals) + " arrivals");
  }
  place.block->mbarriers[place.offset] = {arrivals, arrivals, 0, 0, {}};
}

void Thread::mbarrier_invalidate(Place place) { place.block->mbarriers.erase(place.offset); }

void Thread::mbarrier_expect(Place place, uint32_t bytes) { find(this, place).bytes += bytes; }

void Thread::mbarrier_arrive(Place place, uint32_t count) {
  maybe_yield();
  arrive(this, place, count);
}

bool Thread::mbarrier_test_wait(Place place, uint32_t parity) {
  maybe_yield();
  bool const done = (find(this, place).phase & 1u) != (parity & 1u);
  if (!done) {
    yield();
  }
  return done;
}

bool Thread::mbarrier_try_wait(Place place, uint32_t parity) {
  maybe_yield();
  if ((find(this, place).phase & 1u) == (parity & 1u)) {
    if (machine.draw() % 8 == 0) {
      yield();
      return false;
    }
    block_on(fiber_of(*this), find(this, place).waiters, text(place) + ", parity " + std::to_string(parity & 1u));
  }
  return (find(this, place).phase & 1u) != (parity & 1u);
}

// ---- asynchronous copies ---------------------------------------------------------------------------------------------------

void Thread::land(CopyAsync& copy) {
  if (copy.landed) {
    return;
  }
  copy.landed = true;
  char* const to = shared + copy.offset;
  std::memset(to, 0, copy.bytes);
  if (copy.kept != 0) {
    std::memcpy(to, reinterpret_cast<void*>(copy.source), copy.kept);
  }
  mark_written(copy.offset, copy.bytes);
}

void Thread::land_all_due() {
  for (auto& group : copy_groups) {
    for (CopyAsync& copy : group) {
      land(copy);
    }
  }
  copy_groups.clear();
  for (CopyAsync& copy : copies) {
    land(copy);
  }
  copies.clear();
}

void Thread::copy_async(Place to, uint64_t from, uint32_t bytes, uint32_t kept) {
  char* const target = at_shared(to.offset, bytes);
  if (from % bytes != 0) {
    misaligned(from, bytes);
  }
  if (kept != 0) {
    check_global(from, kept, false);
  }
  std::memset(target, 0xff, bytes);
  copies.push_back({to.offset, from, bytes, kept, false});
  if (machine.draw() % 64 == 0) {
    yield();
  }
}

void Thread::copy_commit() {
  copy_groups.push_back(std::move(copies));
  copies.clear();
}

void Thread::copy_wait(uint32_t pending) {
  maybe_yield();
  while (copy_groups.size() > pending) {
    for (CopyAsync& copy : copy_groups.front()) {
      land(copy);
    }
    copy_groups.pop_front();
  }
}

void Thread::copy_wait_all() { land_all_due(); }

void Thread::copy_arrive_noinc(Place barrier) {
  for (auto& group : copy_groups) {
    for (CopyAsync& copy : group) {
      land(copy);
    }
  }
  for (CopyAsync& copy : copies) {
    land(copy);
  }
  for (uint32_t granule : dirty) {
    block->marks[granule] = block->marks[granule] == index + 1 ? kAnyThread : block->marks[granule];
  }
  mbarrier_arrive(barrier, 1);
}

namespace {

// Until they land, the bytes that an asynchronous copy will write are NaN in every dtype.
void start(AsyncOperation operation) {
  for (Row const& row : operation.rows) {
    std::memset(row.block->shared + row.offset, 0xff, row.bytes);
    std::fill_n(row.block->marks.begin() + row.offset / kGranule, (row.bytes + kGranule - 1) / kGranule, kClean);
  }
  machine.in_flight.push_back(std::move(operation));
}

}  // namespace

void Thread::bulk_load(Place to, uint64_t from, uint32_t bytes, Place barrier) {
  maybe_yield();
  if (to.offset % 16 != 0 || from % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    fail("cp.async.bulk of " + std::to_string(bytes) + " bytes, not all multiples of 16");
  }
  remote(to, bytes);
  for (uint32_t i = 0; i < bytes; i += 16) {
    check_global(from + i, 16, false);
  }
  find(this, barrier);
  AsyncOperation operation;
  operation.rows.push_back({to.block, to.offset, bytes, from, {}});
  operation.barrier = barrier;
  operation.bytes = bytes;
  start(std::move(operation));
}

void Thread::bulk_share(Place to, Place from, uint32_t bytes, Place barrier) {
  maybe_yield();
  if (to.offset % 16 != 0 || from.offset % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    fail("cp.async.bulk of " + std::to_string(bytes) + " bytes, not all multiples of 16");
  }
  remote(to, bytes);
  char const* const source = remote(from, bytes);
  require_fenced(*this, *from.block, from.offset, bytes, "cp.async.bulk");
  find(this, barrier);
  AsyncOperation operation;
  operation.rows.push_back({to.block, to.offset, bytes, 0, std::vector<char>(source, source + bytes)});
  operation.barrier = barrier;
  operation.bytes = bytes;
  operation.source = from;
  start(std::move(operation));
}

void Thread::bulk_store(uint64_t to, Place from, uint32_t bytes) {
  maybe_yield();
  if (to % 16 != 0 || from.offset % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    fail("cp.async.bulk of " + std::to_string(bytes) + " bytes, not all multiples of 16");
  }
  char const* const source = remote(from, bytes);
  for (uint32_t i = 0; i < bytes; i += 16) {
    check_global(to + i, 16, true);
  }
  require_fenced(*this, *from.block, from.offset, bytes, "cp.async.bulk");
  stores.rows.emplace_back(to, std::vector<char>(source, source + bytes));
  stores.offsets.push_back(from.offset);
}

void Thread::bulk_commit() {
  store_groups.push_back(std::move(stores));
  stores = {};
}

void Thread::bulk_wait(uint32_t pending, bool only_read) {
  maybe_yield();
  for (size_t i = 0; i + pending < store_groups.size(); ++i) {
    BulkStore& group = store_groups[i];
    for (size_t j = 0; j < group.offsets.size(); ++j) {
      if (std::memcmp(shared + group.offsets[j], group.rows[j].second.data(), group.rows[j].second.size()) != 0) {
        fail("shared memory at " + std::to_string(group.offsets[j]) + " was rewritten while a bulk store was reading it");
      }
    }
    group.offsets.clear();
    for (auto const& [to, data] : group.rows) {
      std::memcpy(reinterpret_cast<void*>(to), data.data(), data.size());
    }
    group.rows.clear();
  }
  while (!only_read && store_groups.size() > pending) {
    store_groups.pop_front();
  }
  while (!store_groups.empty() && store_groups.front().rows.empty() && store_groups.size() > pending) {
    store_groups.pop_front();
  }
}

namespace {

TensorMap const& tensor_map(Thread& thread, uint64_t address) {
  uint64_t words[2];
  std::memcpy(words, reinterpret_cast<void*>(address), sizeof(words));
  if (words[0] != kMapMagic) {
    thread.fail("a tensor copy by something that is not a tensor map");
  }
  return *reinterpret_cast<TensorMap const*>(words[1]);
}

// Calls visit(offset in the box, global address or 0, bytes) for the 16-byte pieces of a box.
template <class Visit>
void walk_box(TensorMap const& map, std::vector<int64_t> const& at, Visit&& visit) {
  size_t const rank = map.box.size();
  uint32_t const row_bytes = map.box[0] * map.element_bytes;
  std::vector<uint32_t> index(rank, 0);
  for (uint32_t row = 0;; ++row) {
    bool inside = true;
    uint64_t address = map.address;
    for (size_t d = 1; d < rank; ++d) {
      int64_t const x = at[d] + index[d];
      inside = inside && x >= 0 && static_cast<uint64_t>(x) < map.sizes[d];
      address += static_cast<uint64_t>(x) * map.strides[d - 1];
    }
    for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
      int64_t const x = at[0] + byte / map.element_bytes;
      bool const within = inside && x >= 0 && static_cast<uint64_t>(x) + 16 / map.element_bytes <= map.sizes[0];
      visit(row * row_bytes + byte, within ? address + static_cast<uint64_t>(x) * map.element_bytes : 0, 16u);
    }
    size_t d = 1;
    while (d < rank && ++index[d] == map.box[d]) {
      index[d++] = 0;
    }
    if (d >= rank) {
      return;
    }
  }
}

uint32_t swizzled(TensorMap const& map, uint32_t offset) {
  return map.swizzle_bytes == 128 ? offset ^ (offset >> 3 & 0x70u)
         : map.swizzle_bytes == 64 ? offset ^ (offset >> 3 & 0x30u)
         : map.swizzle_bytes == 32 ? offset ^ (offset >> 3 & 0x10u)
                                   : offset;
}

}  // namespace

void Thread::tensor_load(Place to, uint64_t address, std::initializer_list<int32_t> at, Place barrier) {
  maybe_yield();
  TensorMap const& map = tensor_map(*this, address);
  if (to.offset % 128 != 0 || at.size() != map.box.size()) {
    fail("a tensor copy to " + std::to_string(to.offset) + " with " + std::to_string(at.size()) + " coordinates");
  }
  AsyncOperation operation;
  uint32_t bytes = 0;
  walk_box(map, {at.begin(), at.end()}, [&](uint32_t offset, uint64_t source, uint32_t size) {
    uint32_t const place = swizzled(map, to.offset + offset);
    remote({to.block, place}, size);
    if (source != 0) {
      check_global(source, size, false);
    }
    operation.rows.push_back({to.block, place, size, source, {}});
    bytes += size;
  });
  find(this, barrier);
  operation.barrier = barrier;
  operation.bytes = bytes;
  start(std::move(operation));
}

void Thread::tensor_store(uint64_t address, std::initializer_list<int32_t> at, Place from) {
  maybe_yield();
  TensorMap const& map = tensor_map(*this, address);
  walk_box(map, {at.begin(), at.end()}, [&](uint32_t offset, uint64_t target, uint32_t size) {
    uint32_t const place = swizzled(map, from.offset + offset);
    char const* const source = remote({from.block, place}, size);
    require_fenced(*this, *from.block, place, size, "cp.async.bulk.tensor");
    if (target != 0) {
      check_global(target, size, true);
      stores.rows.emplace_back(target, std::vector<char>(source, source + size));
      stores.offsets.push_back(place);
    }
  });
}

// ---- warpgroup products --------------------------------------------------------------------------------------------------

namespace {

// Reads rows x 16 of an operand in shared memory, in the canonical layouts with the 128-byte swizzle, as out[row][k].
uint64_t read_operand(Thread& thread, uint64_t descriptor, int rows, bool transposed, bool is_half, float (*out)[16],
                      bool check) {
  uint32_t const start = static_cast<uint32_t>(descriptor & 0x3fffu) << 4;
  uint32_t const leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fffu) << 4;
  uint32_t const stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fffu) << 4;
  if (descriptor >> 62 != 1) {
    thread.fail("a matrix descriptor without the 128-byte swizzle");
  }
  uint64_t hash = 14695981039346656037ull;
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < 16; ++k) {
      uint32_t const linear = transposed ? start + static_cast<uint32_t>(row / 64) * leading + static_cast<uint32_t>(k / 8) * stride +
                                               static_cast<uint32_t>(k % 8 * 128 + row % 64 * 2)
                                         : start + static_cast<uint32_t>(row / 8) * stride + static_cast<uint32_t>(row % 8 * 128 + k * 2);
      uint32_t const offset = linear ^ (linear >> 3 & 0x70u);
      if (offset + 2 > thread.shared_bytes) {
        thread.bad_shared(offset, 2);
      }
      if (check && thread.block->marks[offset / kGranule] != kClean) {
        require_fenced(thread, *thread.block, offset, 2, "wgmma");
      }
      uint16_t bits;
      std::memcpy(&bits, thread.shared + offset, 2);
      hash = (hash ^ bits) * 1099511628211ull;
      out[row][k] = element(bits, is_half);
    }
  }
  return hash;
}

uint64_t operands(Thread& thread, Product const& product, float (*a)[16], float (*b)[16], bool check) {
  uint64_t hash = read_operand(thread, product.b, product.n, product.transposed_b != 0, product.is_half, b, check);
  if (product.in_registers) {
    for (int warp = 0; warp < 4; ++warp) {
      uint32_t const* fragments[32];
      for (int lane = 0; lane < 32; ++lane) {
        fragments[lane] = product.fragment[32 * warp + lane];
      }
      unpack_a(fragments, product.is_half, a + 16 * warp);
    }
  } else {
    hash ^= 31 * read_operand(thread, product.a, 64, false, product.is_half, a, check);
  }
  return hash;
}

void execute(Thread& thread, Product& product) {
  static float a[64][16], b[256][16];
  static float columns[16][256];
  product.hash = operands(thread, product, a, b, true);
  for (int n = 0; n < product.n; ++n) {
    for (int k = 0; k < 16; ++k) {
      columns[k][n] = b[n][k];
    }
  }
  for (int row = 0; row < 64; ++row) {
    float sums[256] = {};
    for (int k = 0; k < 16; ++k) {
      float const x = a[row][k];
      float const* const y = columns[k];
      for (int n = 0; n < product.n; ++n) {
        sums[n] = std::fma(x, y[n], sums[n]);
      }
    }
    for (int n = 0; n < product.n; ++n) {
      int const lane = row % 8 * 4 + n % 8 / 2, index = n / 8 * 4 + row % 16 / 8 * 2 + n % 2;
      float& to = (*product.value[row / 16 * 32 + lane])[static_cast<size_t>(index)];
      to = product.accumulate ? to + sums[n] : sums[n];
    }
  }
}

}  // namespace

void Thread::submit(int n, float* const* acc, Operand const& a, uint64_t b, bool accumulate, int transposed_b,
                    bool is_half) {
  maybe_yield();
  Warpgroup& group = block->warpgroups[warp / 4];
  Product& product = group.products[products];
  if (product.arrived == 0) {
    product.n = n, product.b = b, product.accumulate = accumulate, product.transposed_b = transposed_b;
    product.is_half = is_half, product.in_registers = a.in_registers, product.a = a.descriptor, product.line = at;
  } else if (product.n != n || product.b != b || product.accumulate != accumulate || product.a != a.descriptor ||
             product.in_registers != a.in_registers) {
    fail("the threads of a warpgroup disagree about a product");
  }
  int const me = static_cast<int>(warp % 4 * 32 + lane);
  std::copy(a.fragment, a.fragment + 4, product.fragment[me]);
  auto mine = std::find_if(in_flight.begin(), in_flight.end(), [&](InFlight const& x) { return x.key == acc[0]; });
  if (mine == in_flight.end()) {
    size_t const count = static_cast<size_t>(n / 2);
    in_flight.push_back({acc[0], {acc, acc + count}, std::make_shared<std::vector<float>>(count), 0});
    mine = in_flight.end() - 1;
    for (size_t i = 0; i < count; ++i) {
      (*mine->value)[i] = *acc[i];
      *acc[i] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  mine->last = products;
  product.value[me] = mine->value;
  if (++product.arrived == 128) {
    execute(*this, product);
    group.executed = products + 1;
    wake(group.waiters);
  }
  ++products;
}

void Thread::wgmma_commit() { product_groups.push_back(products); }

void Thread::wgmma_wait(uint32_t pending) {
  maybe_yield();
  Warpgroup& group = block->warpgroups[warp / 4];
  uint64_t done = 0;
  while (product_groups.size() > pending) {
    done = product_groups.front();
    product_groups.pop_front();
  }
  while (group.executed < done) {
    block_on(fiber_of(*this), group.waiters, "the other warps of a warpgroup product");
  }
  static float a[64][16], b[256][16];
  for (auto item = group.products.begin(); item != group.products.end() && item->first < done;) {
    Product& product = item->second;
    if (product.retired == 0 && operands(*this, product, a, b, false) != product.hash) {
      fail("an operand of the warpgroup product at PTX line " + std::to_string(product.line) +
           " was rewritten in shared memory while it was in flight");
    }
    // Every thread retires each product once, in order.
    ++item;
  }
  for (auto item = group.products.begin(); item != group.products.end() && item->first < done;) {
    item = item->first >= retired_products && ++item->second.retired == 128 ? group.products.erase(item) : std::next(item);
  }
  retired_products = std::max(retired_products, done);
  for (auto mine = in_flight.begin(); mine != in_flight.end();) {
    if (mine->last < retired_products) {
      for (size_t i = 0; i < mine->registers.size(); ++i) {
        *mine->registers[i] = (*mine->value)[i];
      }
      mine = in_flight.erase(mine);
    } else {
      ++mine;
    }
  }
}

half half_of_double(double x) {
  if (std::isnan(x)) {
    return {0x7fff};
  }
  float const nearest = static_cast<float>(x);
  half const rounded_once = rounded<half>(nearest);
  if (static_cast<double>(nearest) == x) {
    return rounded_once;
  }
  // The conversion to float was inexact: force its last bit to "inexact" (round to odd), then round once.
  uint32_t bits = from_bits<uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(x)) {
    --bits;
  }
  return rounded<half>(from_bits<float>(bits | 1u));
}

// ---- launches --------------------------------------------------------------------------------------------------------------

Registration::Registration(char const* name, Kernel kernel_, std::vector<Parameter> parameters_, uint32_t static_shared_)
    : kernel(kernel_), parameters(std::move(parameters_)), static_shared(static_shared_) {
  registry()[name] = this;
}

void configure(Options const& value) { options = value; }
Options const& configuration() { return options; }
void allow(uint64_t address, uint64_t bytes) { allocations[address] = bytes; }
void forget_allocations() { allocations.clear(); }
uint64_t launch_count() { return launches; }

void encode_tensor_map(void* map, uint64_t address, std::vector<uint64_t> sizes, std::vector<uint64_t> strides,
                       std::vector<uint32_t> box, uint32_t element_bytes, uint32_t swizzle_bytes) {
  // Maps are a few hundred bytes and live as long as the process: a captured launch may use one at any time.
  auto* const stored = new TensorMap{address, std::move(sizes), std::move(strides), std::move(box), element_bytes, swizzle_bytes};
  uint64_t const words[2] = {kMapMagic, reinterpret_cast<uint64_t>(stored)};
  std::memset(map, 0, 128);
  std::memcpy(map, words, sizeof(words));
}

std::string launch(std::string const& name, Dimensions grid, Dimensions block_size, Dimensions cluster, void** arguments,
                   uint32_t dynamic_shared) {
  auto const found = registry().find(name);
  if (found == registry().end()) {
    return "the kernel " + name + " was not translated";
  }
  Registration const& kernel = *found->second;
  if (kernel.static_shared != 0 && dynamic_shared != 0) {
    return name + " has static and dynamic shared memory; the emulator places only one";
  }
  ++launches;
  std::vector<char> params(4096 + 128);
  char* const base = reinterpret_cast<char*>((reinterpret_cast<uint64_t>(params.data()) + 127) & ~uint64_t{127});
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    std::memcpy(base + kernel.parameters[i].offset, arguments[i], kernel.parameters[i].bytes);
  }
  current_kernel = kernel.kernel;
  current_params = base;
  machine.kernel = name.size() > 60 ? name.substr(0, 60) + "..." : name;
  machine.random = options.seed * 0x9e3779b97f4a7c15ull + launches * 0xbf58476d1ce4e5b9ull + 1;
  machine.policy = static_cast<int>(options.seed % 3);
  uint32_t const threads = block_size.x * block_size.y * block_size.z;
  uint32_t const bytes = kernel.static_shared + dynamic_shared;
  uint32_t const ranks = cluster.x * cluster.y * cluster.z;
  if (bytes > 232448 || threads == 0 || threads > 1024 || cluster.y != 1 || cluster.z != 1 || grid.x % cluster.x != 0) {
    return name + ": launch of " + std::to_string(threads) + " threads with " + std::to_string(bytes) + " bytes";
  }
  while (machine.stacks.size() < static_cast<size_t>(threads) * ranks) {
    machine.stacks.push_back(static_cast<char*>(std::aligned_alloc(4096, kStackBytes)));
  }
  try {
    for (uint32_t z = 0; z < grid.z; ++z) {
      for (uint32_t y = 0; y < grid.y; ++y) {
        for (uint32_t first = 0; first < grid.x; first += ranks) {
          machine.blocks.clear();
          machine.warps.clear();
          machine.in_flight.clear();
          machine.failure.clear();
          machine.cluster = {};
          machine.idle = 0;
          machine.next_warp = 0;
          machine.fibers = std::vector<Fiber>(static_cast<size_t>(threads) * ranks);
          for (uint32_t rank = 0; rank < ranks; ++rank) {
            auto block = std::make_unique<Block>();
            block->storage.assign(bytes + 2048, static_cast<char>(0xff));
            block->shared = reinterpret_cast<char*>((reinterpret_cast<uint64_t>(block->storage.data()) + 1023) & ~uint64_t{1023});
            block->bytes = bytes;
            block->live = threads;
            block->rank = rank;
            block->marks.assign(bytes / kGranule + 1, kClean);
            block->warpgroups.resize((threads + 127) / 128);
            for (uint32_t warp = 0; warp < (threads + 31) / 32; ++warp) {
              block->warps.push_back(std::make_unique<Warp>());
              block->warps.back()->priority = machine.draw() >> 1;
              machine.warps.push_back(block->warps.back().get());
            }
            for (uint32_t i = 0; i < threads; ++i) {
              Fiber& fiber = machine.fibers[static_cast<size_t>(rank) * threads + i];
              Thread& t = fiber.thread;
              t.tid[0] = i % block_size.x, t.tid[1] = i / block_size.x % block_size.y, t.tid[2] = i / block_size.x / block_size.y;
              t.ntid[0] = block_size.x, t.ntid[1] = block_size.y, t.ntid[2] = block_size.z;
              t.ctaid[0] = first + rank, t.ctaid[1] = y, t.ctaid[2] = z;
              t.nctaid[0] = grid.x, t.nctaid[1] = grid.y, t.nctaid[2] = grid.z;
              t.lane = i % 32, t.warp = i / 32, t.index = i;
              t.cluster_rank = rank, t.cluster_size = ranks;
              t.block = block.get();
              t.warp_state = block->warps[i / 32].get();
              t.shared = block->shared;
              t.shared_bytes = bytes;
              fiber.stack = machine.stacks[static_cast<size_t>(rank) * threads + i];
              auto* top = reinterpret_cast<void**>(fiber.stack + kStackBytes - 64);
              *--top = nullptr;  // where fiber_main would return to
              *--top = reinterpret_cast<void*>(&fiber_main);
              top -= 6;
              fiber.stack_pointer = top;
              make_ready(&fiber);
            }
            machine.blocks.push_back(std::move(block));
          }
          run_fibers();
        }
      }
    }
  } catch (Failure const& failure) {
    return failure.message;
  }
  return "";
}

}  // namespace emulator

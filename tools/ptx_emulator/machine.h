// The state behind runtime.h: fibers, blocks, what is in flight. Shared by the runtime's own files.
#pragma once

#include <algorithm>
#include <array>
#include <sstream>

#include "launch.h"
#include "runtime.h"

namespace emulator {

inline constexpr uint32_t kGranule = 16;  // bytes of shared memory that share one mark
inline constexpr uint16_t kClean = 0, kAnyThread = 0xffff;
inline constexpr uint32_t kMBarriers = 256;  // a block's, where races are looked for
inline constexpr size_t kStackBytes = 512 << 10;
inline constexpr uint64_t kMapMagic = 0x70616d726f736e74;
inline constexpr uint64_t kIdleLimit = 20'000'000;  // polls without any event before a launch counts as stuck
inline constexpr uint64_t kPatience = 100'000;  // and before a late copy lands, though something asks again and again

struct Failure {
  std::string message;
};

// ---- fibers ----------------------------------------------------------------------------------------------------------

extern "C" void emulator_switch(void** save, void* to);

enum class State { ready, running, blocked, done };

// Vector time (Mattern 1989): what of every entity happened before. Entities are threads, warps (their products) and
// mbarriers (the bulk copies that complete there). Empty where races are not looked for.
using Clock = std::vector<uint32_t>;

// An access to some bytes of a granule of shared memory, which later ones must come after.
struct Mark {
  uint32_t time;
  int line;
  uint16_t entity, bytes;  // a bit for each
  Access kind;
};

struct Fiber {
  Thread thread;
  void* stack_pointer;
  char* stack;
  State state;
  std::string waits_for;
  Clock clock;
  uint64_t events = 0, fenced = 0;           // wgmma.fence and wgmma.wait_group, counted
  std::map<float const*, uint64_t> touched;  // accumulators whose values a wait has delivered: when
};

using Waiters = std::vector<Fiber*>;

// ---- what a block holds ------------------------------------------------------------------------------------------------

struct Collective {
  int kind, at;
  uint32_t mask, arrived = 0;
  void* payload[32] = {};
  Fiber* fiber[32] = {};
};

// A warp's part of a warpgroup product, from its issue to the wait that completes it.
struct Product {
  uint64_t index, hash;  // of the operands in shared memory, at issue
  int n, line;
  bool transposed_a, transposed_b, is_half, in_registers;
  uint64_t a, b;
};

struct Warp {
  std::vector<std::shared_ptr<Collective>> open;
  std::vector<Fiber*> ready;
  uint64_t priority = 0;
  uint32_t index = 0;            // in machine.warps
  std::deque<Product> products;  // in flight
  uint64_t steps = 0;            // of the warpgroup's log
  uint32_t registers = 0;        // a thread
};

struct NamedBarrier {
  uint32_t arrived = 0, expected = 0, value = 0, generation = 0;
  bool implicit = false;
  uint32_t result[4] = {};
  Clock clock, seen[4];  // of those who have arrived; what the waiters of a generation see
  Waiters waiters;
};

struct MBarrier {
  uint32_t arrivals = 1, pending = 1;
  int64_t bytes = 0;
  uint32_t phase = 0;
  Waiters waiters;
  uint32_t entity = 0, copies = 1;  // whose accesses the copies are that complete here, and the time of the next ones
  Clock clock, seen;                // of those who have arrived; what those see who find a phase complete
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
  bool late = false;         // lands when nothing else happens
  bool fenced = true;        // what it writes over was fenced before: a bulk copy, not st.async
};

// The warps of a warpgroup execute the same instructions on it, each at its own time: what one of them has executed and
// another not yet.
struct Warpgroup {
  struct Step {
    char const* name;
    int line;
    uint64_t operands[3];
    uint32_t warps = 0;  // that have taken it
  };
  std::deque<Step> log;
  uint64_t first = 0;  // number of the log's first step
};

struct TensorMap {
  uint64_t address;
  std::vector<uint64_t> sizes, strides;  // elements, bytes (of dimensions 1 ..)
  std::vector<uint32_t> box;
  uint32_t element_bytes, swizzle_bytes;
};

struct Block {
  std::vector<char> storage;
  char* shared = nullptr;
  uint32_t bytes = 0, live = 0, rank = 0;
  std::vector<uint16_t> marks;  // per granule: who wrote it and has not fenced it for the async proxy
  bool unowned_marks = false;   // some are kAnyThread
  std::map<uint32_t, MBarrier> mbarriers;
  NamedBarrier named[16];
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Warpgroup> warpgroups;
  uint32_t free_registers = 0;  // given back by setmaxnreg, in registers of a warp's thread
  Waiters register_waiters;
  std::vector<std::vector<Mark>> history;  // of each granule of shared memory, where races are looked for
};

struct Machine {
  std::vector<std::unique_ptr<Block>> blocks;  // of the cluster that runs
  std::vector<Fiber> fibers;
  std::vector<Warp*> warps;
  std::deque<AsyncOperation> in_flight;
  void* scheduler = nullptr;
  Fiber* current = nullptr;
  std::string failure;
  std::string kernel, full_name;
  uint64_t random = 1, idle = 0, ticks = 0;
  int policy = 0;
  size_t next_warp = 0;
  NamedBarrier cluster;
  std::vector<char*> stacks;
  bool watches_races = false;
  bool overlaps = false;  // the grid may begin before the one before it has ended
  uint32_t entities = 0, barrier_entities = 0;
  uint32_t cluster_number = 0;  // of the blocks that run, from 1
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> barrier_entity;  // (rank, offset) -> entity

  uint64_t draw() {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    return random;
  }
};

inline Machine machine;

inline Options options;
inline std::map<uint64_t, uint64_t> allocations;  // start -> bytes; empty: global accesses are not checked
inline std::map<std::string, Registration const*>& registry() {
  static std::map<std::string, Registration const*> kernels;
  return kernels;
}
inline uint64_t launches = 0;

inline Fiber& fiber_of(Thread& thread) { return *reinterpret_cast<Fiber*>(&thread); }

inline void make_ready(Fiber* fiber) {
  fiber->state = State::ready;
  fiber->thread.warp_state->ready.push_back(fiber);
}

inline void wake(Waiters& waiters) {
  for (Fiber* fiber : waiters) {
    make_ready(fiber);
  }
  waiters.clear();
  machine.idle = 0;
}

inline void to_scheduler(Fiber& fiber) { emulator_switch(&fiber.stack_pointer, machine.scheduler); }

inline void block_on(Fiber& fiber, Waiters& waiters, std::string what) {
  waiters.push_back(&fiber);
  fiber.state = State::blocked;
  fiber.waits_for = std::move(what);
  to_scheduler(fiber);
}

// What the lanes of a warp meet at.
inline char const* const kMeetings[] = {"shfl", "vote", "redux", "bar.warp.sync", "ldmatrix", "stmatrix", "movmatrix", "mma",
                                        "elect", "wgmma.mma_async", "wgmma.wait_group", "setmaxnreg"};
enum Meeting { kShuffle, kVote, kReduce, kSync, kLoadMatrix, kStoreMatrix, kMoveMatrix, kMma, kElect, kProduct, kWait, kRegisters };

// All lanes of `mask` meet; the last to come runs `body(collective)` for all.
template <class Body>
void meet(Thread& thread, Meeting kind, uint32_t mask, void* payload, Body&& body) {
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
    fiber.waits_for = std::string(kMeetings[kind]) + ", the other lanes";
    to_scheduler(fiber);
  }
}

template <class Payload>
Payload& payload(Collective& c, int lane) {
  return *static_cast<Payload*>(c.payload[lane]);
}

// Races (races.cpp). Whoever releases is followed by those who acquire the same clock.
void release(Thread& thread, Clock& clock);
void acquire(Thread& thread, Clock const& clock);
void join(Clock& to, Clock const& from);
uint32_t entity_of_barrier(Place place);
// An access by `entity` at `time`, after what `before` holds. `keep`: later accesses must come after it. A write that
// changes nothing may meet others, as where several threads write the same.
void watch(Thread& thread, Block& block, uint32_t offset, uint32_t bytes, Access kind, uint32_t entity, uint32_t time,
           Clock const& before, bool keep = true, bool changes = true);
// An ordinary access by the thread.
void watch(Thread& thread, Block& block, uint32_t offset, uint32_t bytes, Access kind, bool keep = true,
           bool changes = true);

// The same between the blocks of a launch, in global memory.
void watch_global(Thread& thread, uint64_t address, uint32_t bytes, bool write);
void forget_global();

// The warpgroup (products.cpp): the thread's warp executes this step.
void take_step(Thread& thread, Warpgroup::Step step);

// Barriers (barriers.cpp). `thread` is who to blame, or null in the scheduler.
MBarrier& find(Thread* thread, Place place);
void arrive(Thread* thread, Place place, uint32_t count);
void complete_if_due(MBarrier& barrier);
void complete(NamedBarrier& barrier);

// Memory (memory.cpp): an asynchronous copy arrives; what the async proxy is about to read must have been fenced.
void land_operation(size_t index);
void require_fenced(Thread& thread, Block& block, uint32_t offset, uint32_t bytes, char const* reader);

// The warp (warp.cpp): a 16-bit element, and the rows of a 16 x 16 operand from the fragments of a warp's lanes.
float element(uint16_t bits, bool is_half);
void unpack_a(uint32_t const* const fragment[32], bool is_half, float (*a)[16]);

}  // namespace emulator

// The state behind runtime.h: fibers, blocks, what is in flight. Shared by the runtime's own files.
#pragma once

#include <algorithm>
#include <sstream>

#include "launch.h"
#include "runtime.h"

namespace emulator {

inline constexpr uint32_t kGranule = 16;  // bytes of shared memory that share one mark
inline constexpr uint16_t kClean = 0, kAnyThread = 0xffff;
inline constexpr size_t kStackBytes = 512 << 10;
inline constexpr uint64_t kMapMagic = 0x70616d726f736e74;
inline constexpr uint64_t kIdleLimit = 20'000'000;  // polls without any event before a launch counts as stuck

struct Failure {
  std::string message;
};

// ---- fibers ----------------------------------------------------------------------------------------------------------

extern "C" void emulator_switch(void** save, void* to);

enum class State { ready, running, blocked, done };

struct Fiber {
  Thread thread;
  void* stack_pointer;
  char* stack;
  State state;
  std::string waits_for;
};

using Waiters = std::vector<Fiber*>;

// ---- what a block holds ------------------------------------------------------------------------------------------------

struct Collective {
  int kind, at;
  uint32_t mask, arrived = 0;
  void* payload[32] = {};
  Fiber* fiber[32] = {};
};

struct Warp {
  std::vector<std::shared_ptr<Collective>> open;
  std::vector<Fiber*> ready;
  uint64_t priority = 0;
};

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
  bool late = false;         // lands when nothing else can run
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

struct Block {
  std::vector<char> storage;
  char* shared = nullptr;
  uint32_t bytes = 0, live = 0, rank = 0;
  std::vector<uint16_t> marks;  // per granule: who wrote it and has not fenced it for the async proxy
  std::map<uint32_t, MBarrier> mbarriers;
  NamedBarrier named[16];
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Warpgroup> warpgroups;
};

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

// Barriers (barriers.cpp). `thread` is who to blame, or null in the scheduler.
MBarrier& find(Thread* thread, Place place);
void arrive(Thread* thread, Place place, uint32_t count);
void complete_if_due(MBarrier& barrier);

// Memory (memory.cpp): an asynchronous copy arrives; what the async proxy is about to read must have been fenced.
void land_operation(size_t index);
void require_fenced(Thread& thread, Block& block, uint32_t offset, uint32_t bytes, char const* reader);

// The warp (warp.cpp): a 16-bit element, and the rows of a 16 x 16 operand from the fragments of a warp's lanes.
float element(uint16_t bits, bool is_half);
void unpack_a(uint32_t const* const fragment[32], bool is_half, float (*a)[16]);

}  // namespace emulator

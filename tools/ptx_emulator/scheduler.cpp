// Fibers, the order in which they run, and launches.
#include "machine.h"

namespace emulator {

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

namespace {

Kernel current_kernel;
char* current_params;

void fiber_main() {
  Fiber& fiber = *machine.current;
  current_kernel(fiber.thread, current_params);
  fiber.thread.exit();
}

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
      size_t const index = machine.draw() % machine.in_flight.size();
      if (!machine.in_flight[index].late) {
        land_operation(index);
      }
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
    if (machine.idle % kPatience == 0 && !machine.in_flight.empty()) {
      land_operation(machine.draw() % machine.in_flight.size());
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
  for (auto const& block : machine.blocks) {
    for (Warpgroup const& group : block->warpgroups) {
      if (!group.log.empty()) {
        throw Failure{std::string("some warps of a warpgroup ended without the ") + group.log.front().name +
                      " that others executed at PTX line " + std::to_string(group.log.front().line)};
      }
    }
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
      complete(barrier);
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

void Thread::set_registers(bool increase, uint32_t count) {
  auto const found = registry().find(machine.full_name);
  if (count < 24 || count > 256 || count % 8 != 0 || found->second->registers == 0) {
    fail("setmaxnreg to " + std::to_string(count) + " in a kernel that begins with " +
         std::to_string(found->second->registers));
  }
  Warp& mine = *warp_state;
  int item = 0;
  meet(*this, kRegisters, 0xffffffffu, &item, [&](Collective&) {
    take_step(*this, {"setmaxnreg", at, {increase, count, 0}});
    if (increase ? count < mine.registers : count > mine.registers) {
      fail("setmaxnreg in the wrong direction: from " + std::to_string(mine.registers) + " to " + std::to_string(count));
    }
    if (!increase) {
      block->free_registers += mine.registers - count;
      mine.registers = count;
      wake(block->register_waiters);
    }
  });
  while (mine.registers < count) {  // the first lane to find enough takes them for its warp
    if (block->free_registers >= count - mine.registers) {
      block->free_registers -= count - mine.registers;
      mine.registers = count;
      wake(block->register_waiters);
    } else {
      block_on(fiber_of(*this), block->register_waiters,
               "registers: " + std::to_string(count) + " a thread, " + std::to_string(mine.registers) + " held, " +
                   std::to_string(block->free_registers) + " free");
    }
  }
}

// ---- launches --------------------------------------------------------------------------------------------------------------

Registration::Registration(char const* name, Kernel kernel_, std::vector<Parameter> parameters_, uint32_t static_shared_,
                           uint32_t cluster_, uint32_t registers_)
    : kernel(kernel_), parameters(std::move(parameters_)), static_shared(static_shared_), cluster(cluster_), registers(registers_) {
  registry()[name] = this;
}

void configure(Options const& value) { options = value; }
Options const& configuration() { return options; }
void allow(uint64_t address, uint64_t bytes) { allocations[address] = bytes; }
void forbid(uint64_t address) { allocations.erase(address); }
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

std::string launch(std::string const& name, Dimensions grid, Dimensions block_size, Dimensions cluster, bool overlaps,
                   void** arguments, uint32_t dynamic_shared) {
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
  machine.full_name = name;
  machine.kernel = name.size() > 60 ? name.substr(0, 60) + "..." : name;
  machine.random = options.seed * 0x9e3779b97f4a7c15ull + launches * 0xbf58476d1ce4e5b9ull + 1;
  machine.policy = static_cast<int>(options.seed % 3);
  machine.watches_races = options.races;
  machine.overlaps = overlaps;
  uint32_t const threads = block_size.x * block_size.y * block_size.z;
  uint32_t const bytes = kernel.static_shared + dynamic_shared;
  cluster.x = std::max(cluster.x, kernel.cluster);
  uint32_t const ranks = cluster.x * cluster.y * cluster.z;
  if (bytes > 232448 || threads == 0 || threads > 1024 || cluster.y != 1 || cluster.z != 1 || grid.x % cluster.x != 0) {
    return name + ": launch of " + std::to_string(threads) + " threads with " + std::to_string(bytes) + " bytes";
  }
  while (machine.stacks.size() < static_cast<size_t>(threads) * ranks) {
    machine.stacks.push_back(static_cast<char*>(std::aligned_alloc(4096, kStackBytes)));
  }
  forget_global();
  machine.cluster_number = 0;
  try {
    for (uint32_t z = 0; z < grid.z; ++z) {
      for (uint32_t y = 0; y < grid.y; ++y) {
        for (uint32_t first = 0; first < grid.x; first += ranks) {
          ++machine.cluster_number;
          machine.blocks.clear();
          machine.warps.clear();
          machine.in_flight.clear();
          machine.failure.clear();
          machine.cluster = {};
          machine.idle = 0;
          machine.next_warp = 0;
          machine.fibers = std::vector<Fiber>(static_cast<size_t>(threads) * ranks);
          uint32_t const warps = (threads + 31) / 32 * ranks;
          machine.barrier_entity.clear();
          machine.barrier_entities = threads * ranks + warps;
          machine.entities = (machine.barrier_entities + kMBarriers * ranks + 7) / 8 * 8;
          for (uint32_t rank = 0; rank < ranks; ++rank) {
            auto block = std::make_unique<Block>();
            block->storage.assign(bytes + 2048, static_cast<char>(0xff));
            block->shared = reinterpret_cast<char*>((reinterpret_cast<uint64_t>(block->storage.data()) + 1023) & ~uint64_t{1023});
            block->bytes = bytes;
            block->live = threads;
            block->rank = rank;
            block->marks.assign(bytes / kGranule + 1, kClean);
            block->warpgroups.resize((threads + 127) / 128);
            block->history.resize(machine.watches_races ? bytes / kGranule + 1 : 0);
            for (uint32_t warp = 0; warp < (threads + 31) / 32; ++warp) {
              block->warps.push_back(std::make_unique<Warp>());
              block->warps.back()->priority = machine.draw() >> 1;
              block->warps.back()->index = static_cast<uint32_t>(machine.warps.size());
              block->warps.back()->registers = kernel.registers;
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
              if (machine.watches_races) {
                fiber.clock.resize(machine.entities);
                fiber.clock[static_cast<size_t>(rank) * threads + i] = 1;
              }
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

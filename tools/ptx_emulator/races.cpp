// Races: accesses to the same bytes of shared memory, one of them a write, that nothing orders. Unlike what a schedule
// happens to show, a race is found whichever of the two comes first.
//
// Every entity has a vector clock (Mattern 1989; per word the accesses that later ones must follow, as in FastTrack,
// Flanagan and Freund, PLDI 2009). Time passes from one thread to another through barriers, mbarriers (arrivals to those who
// find the phase complete), bar.warp.sync and the cluster's barrier; not through shuffles and votes, which order no
// memory. A warp's products read from issue until its wait; bulk copies write from issue until their mbarrier completes.
#include <immintrin.h>

#include <unordered_map>
#include <utility>

#include "machine.h"

namespace emulator {

namespace {

std::string who(Mark const& mark) {
  std::ostringstream out;
  uint32_t const fibers = static_cast<uint32_t>(machine.fibers.size()), warps = static_cast<uint32_t>(machine.warps.size());
  if (mark.entity < fibers) {
    static char const* const names[] = {"a read", "a write", "an atomic access"};
    out << names[static_cast<int>(mark.kind)] << " by thread " << machine.fibers[mark.entity].thread.index;
  } else if (mark.entity < fibers + warps) {
    out << "a product of warp " << mark.entity - fibers;
  } else {
    out << (mark.kind == Access::read ? "a bulk copy's reading" : "a bulk copy's writing");
  }
  out << " (PTX line " << mark.line << ")";
  return out.str();
}

bool conflict(Access a, Access b) {
  return (a != Access::read || b != Access::read) && (a != Access::atomic || b != Access::atomic);
}

// Global memory: which block of the launch that runs has written two bytes, and which have read them. Blocks of a launch
// run in any order or at once, so none may read what another writes.
constexpr uint64_t kPage = 4096;
constexpr uint32_t kSeveral = 0xffffffffu, kAtomic = 0x80000000u;
struct Page {
  uint32_t writer[kPage / 2] = {}, reader[kPage / 2] = {};  // number of the block, from 1; 0: none
};
std::unordered_map<uint64_t, std::unique_ptr<Page>> pages;
struct {
  Thread* thread;
  uint64_t address;
  uint32_t bytes;
  int line;
} pending_read;

void watch_global(Thread& thread, uint64_t address, uint32_t bytes, int line, Access kind) {
  uint32_t const me = machine.cluster_number;
  auto const other = [&](uint32_t who) { return who != 0 && (who & ~kAtomic) != me; };
  for (uint64_t at = address & ~uint64_t{1}; at < address + bytes; at += 2) {
    auto& page = pages[at / kPage];
    if (!page) {
      page = std::make_unique<Page>();
    }
    uint32_t& writer = page->writer[at % kPage / 2];
    uint32_t& reader = page->reader[at % kPage / 2];
    bool const both_atomic = kind == Access::atomic && (writer & kAtomic);
    if ((other(writer) && !both_atomic) || (kind != Access::read && other(reader))) {
      thread.at = line;
      thread.fail("a race on global memory: " + std::string(kind == Access::read ? "a read" : "a write") + " of what block " +
                  std::to_string(((other(writer) ? writer : reader) & ~kAtomic) - 1) + " of the same launch has " +
                  (other(writer) ? "written" : "read"));
    }
    if (kind == Access::read) {
      reader = reader == 0 || reader == me ? me : kSeveral;
    } else {
      writer = kind == Access::atomic ? me | kAtomic : me;
    }
  }
}

void settle_read() {
  if (pending_read.thread != nullptr) {
    auto const read = std::exchange(pending_read, {});
    watch_global(*read.thread, read.address, read.bytes, read.line, Access::read);
  }
}

}  // namespace

void forget_global() {
  pages.clear();
  pending_read = {};
}

// An atomic operation comes as a read and a write of one instruction, with nothing between.
void watch_global(Thread& thread, uint64_t address, uint32_t bytes, bool write) {
  if (!machine.watches_races) {
    return;
  }
  if (write && pending_read.thread == &thread && pending_read.address == address && pending_read.line == thread.at) {
    pending_read = {};
    watch_global(thread, address, bytes, thread.at, Access::atomic);
    return;
  }
  settle_read();
  if (write) {
    watch_global(thread, address, bytes, thread.at, Access::write);
  } else {
    pending_read = {&thread, address, bytes, thread.at};
  }
}

void join(Clock& to, Clock const& from) {
  if (from.empty()) {
    return;
  }
  if (to.empty()) {
    to = from;
    return;
  }
  for (size_t i = 0; i < to.size(); i += 8) {
    auto* const at = reinterpret_cast<__m256i*>(to.data() + i);
    _mm256_storeu_si256(at, _mm256_max_epu32(_mm256_loadu_si256(at),
                                             _mm256_loadu_si256(reinterpret_cast<__m256i const*>(from.data() + i))));
  }
}

void release(Thread& thread, Clock& clock) {
  if (machine.watches_races) {
    Fiber& fiber = fiber_of(thread);
    join(clock, fiber.clock);
    ++fiber.clock[static_cast<size_t>(&fiber - machine.fibers.data())];
  }
}

void acquire(Thread& thread, Clock const& clock) { join(fiber_of(thread).clock, clock); }

uint32_t entity_of_barrier(Place place) {
  auto const [found, fresh] = machine.barrier_entity.try_emplace({place.block->rank, place.offset}, 0);
  if (fresh) {
    found->second = machine.barrier_entities++;
    if (machine.barrier_entities > machine.entities) {
      throw Failure{"more mbarriers than the emulator has room for"};
    }
  }
  return found->second;
}

void watch(Thread& thread, Block& block, uint32_t offset, uint32_t bytes, Access kind, uint32_t entity, uint32_t time,
           Clock const& before, bool keep, bool changes) {
  uint32_t const end = offset + bytes;
  for (uint32_t granule = offset / kGranule; granule * kGranule < end; ++granule) {
    uint32_t const first = std::max(offset, kGranule * granule) % kGranule;
    uint32_t const last = std::min(end - 1, kGranule * granule + kGranule - 1) % kGranule;
    Mark const now{time, thread.at, static_cast<uint16_t>(entity), static_cast<uint16_t>((2u << last) - (1u << first)), kind};
    auto& marks = block.history[granule];
    if (marks.capacity() == 0) {
      marks.reserve(6);
    }
    size_t kept = 0;
    for (size_t i = 0; i < marks.size(); ++i) {
      Mark mark = marks[i];
      if (mark.bytes & now.bytes) {
        bool const ordered = before[mark.entity] >= mark.time;
        if (!ordered && conflict(mark.kind, kind) && (changes || mark.kind != Access::write)) {
          uint32_t const byte = granule * kGranule + static_cast<uint32_t>(__builtin_ctz(mark.bytes & now.bytes));
          thread.fail("a race on shared memory at " + std::to_string(byte) + ": " + who(now) + " and, before it, " + who(mark) +
                      ", which nothing orders");
        }
        // Whatever conflicts with the mark conflicts with this access as well, which comes after it.
        if (ordered && keep && (kind == Access::write || kind == mark.kind)) {
          mark.bytes &= static_cast<uint16_t>(~now.bytes);
        }
      }
      if (mark.bytes != 0) {
        marks[kept++] = mark;
      }
    }
    marks.resize(kept);
    if (keep) {
      marks.push_back(now);
    }
  }
}

void watch(Thread& thread, Block& block, uint32_t offset, uint32_t bytes, Access kind, bool keep, bool changes) {
  if (machine.watches_races) {
    Fiber& fiber = fiber_of(thread);
    uint32_t const me = static_cast<uint32_t>(&fiber - machine.fibers.data());
    watch(thread, block, offset, bytes, kind, me, fiber.clock[me], fiber.clock, keep, changes);
  }
}

}  // namespace emulator

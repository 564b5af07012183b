// Named barriers, the cluster barrier and mbarriers.
#include "machine.h"

namespace emulator {

namespace {

std::string text(Place place) {
  std::ostringstream out;
  out << "mbarrier at " << place.offset;
  if (machine.blocks.size() > 1) {
    out << " of rank " << place.block->rank;
  }
  return out.str();
}

}  // namespace

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
    if (machine.watches_races) {
      join(barrier.seen, barrier.clock);
      barrier.seen.resize(machine.entities);
      barrier.seen[barrier.entity] = barrier.copies++;
    }
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
  if (thread != nullptr) {
    release(*thread, barrier.clock);
  }
  barrier.pending -= count;
  complete_if_due(barrier);
}

void complete(NamedBarrier& barrier) {
  barrier.result[barrier.generation % 4] = barrier.value;
  barrier.seen[barrier.generation % 4] = std::move(barrier.clock);
  barrier.clock.clear();
  barrier.arrived = barrier.value = barrier.expected = 0;
  ++barrier.generation;
  wake(barrier.waiters);
}

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
  release(*this, barrier.clock);
  if (++barrier.arrived == expected) {
    complete(barrier);
  } else if (wait) {
    block_on(fiber_of(*this), barrier.waiters, "named barrier " + std::to_string(id));
  }
  if (wait) {
    acquire(*this, barrier.seen[generation % 4]);
  }
  return barrier.result[generation % 4];
}

void Thread::cluster_arrive() {
  uint32_t const threads = static_cast<uint32_t>(machine.fibers.size());
  cluster_phase = machine.cluster.generation;
  release(*this, machine.cluster.clock);
  if (++machine.cluster.arrived == threads) {
    complete(machine.cluster);
  }
}

void Thread::cluster_wait() {
  if (machine.cluster.generation == cluster_phase) {
    block_on(fiber_of(*this), machine.cluster.waiters, "the cluster barrier");
  }
  acquire(*this, machine.cluster.seen[cluster_phase % 4]);
}

void Thread::mbarrier_init(Place place, uint32_t arrivals) {
  remote(place, 8);
  if (place.offset % 8 != 0 || arrivals == 0) {
    fail("mbarrier.init at " + std::to_string(place.offset) + " with " + std::to_string(arrivals) + " arrivals");
  }
  watch(*this, *place.block, place.offset, 8, Access::write);
  MBarrier barrier{arrivals, arrivals};
  barrier.entity = entity_of_barrier(place);
  place.block->mbarriers[place.offset] = std::move(barrier);
}

void Thread::mbarrier_invalidate(Place place) {
  watch(*this, *place.block, place.offset, 8, Access::write);
  place.block->mbarriers.erase(place.offset);
}

void Thread::mbarrier_expect(Place place, uint32_t bytes) {
  find(this, place).bytes += bytes;
  watch(*this, *place.block, place.offset, 8, Access::atomic);
}

void Thread::mbarrier_arrive(Place place, uint32_t count) {
  maybe_yield();
  find(this, place);
  watch(*this, *place.block, place.offset, 8, Access::atomic);
  arrive(this, place, count);
}

bool Thread::mbarrier_test_wait(Place place, uint32_t parity) {
  maybe_yield();
  MBarrier& barrier = find(this, place);
  watch(*this, *place.block, place.offset, 8, Access::atomic);
  if ((barrier.phase & 1u) == (parity & 1u)) {
    yield();
    return false;
  }
  acquire(*this, barrier.seen);
  return true;
}

bool Thread::mbarrier_try_wait(Place place, uint32_t parity) {
  maybe_yield();
  find(this, place);
  watch(*this, *place.block, place.offset, 8, Access::atomic);
  if ((find(this, place).phase & 1u) == (parity & 1u)) {
    if (machine.draw() % 8 == 0) {
      yield();
      return false;
    }
    block_on(fiber_of(*this), find(this, place).waiters, text(place) + ", parity " + std::to_string(parity & 1u));
  }
  MBarrier& barrier = find(this, place);
  if ((barrier.phase & 1u) == (parity & 1u)) {
    return false;
  }
  acquire(*this, barrier.seen);
  return true;
}

}  // namespace emulator

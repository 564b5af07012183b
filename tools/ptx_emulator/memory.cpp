// Global and shared memory: bounds, proxies, and copies that land when they like.
#include "machine.h"

namespace emulator {

void Thread::check_global(uint64_t address, uint32_t bytes, bool write) {
  if (address % bytes != 0) {
    misaligned(address, bytes);
  }
  if (machine.overlaps && !waited_for_grids) {
    fail("global memory before griddepcontrol.wait, in a grid that may begin before the one before it has ended");
  }
  watch_global(*this, address, bytes, write);
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

void Thread::let_next_grid_begin() {
  if (machine.overlaps && !waited_for_grids) {
    fail("griddepcontrol.launch_dependents before griddepcontrol.wait: more than two grids may be under way");
  }
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

void Thread::shared_access(uint32_t offset, uint32_t bytes, Access kind, void const* value) {
  if (machine.draw() % 128 == 0) {
    yield();
  }
  bool const changes = value == nullptr || std::memcmp(shared + offset, value, bytes) != 0;
  watch(*this, *block, offset, bytes, kind, true, changes);
  if (kind != Access::read) {
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
  if (place.block->live == 0) {
    fail("access to the shared memory of a block whose threads have all ended");
  }
  if (uint64_t{place.offset} + bytes > place.block->bytes) {
    bad_shared(place.offset, bytes);
  }
  return place.block->shared + place.offset;
}

char* Thread::cluster_access(Place place, uint32_t bytes, Access kind) {
  char* const at = remote(place, bytes);
  watch(*this, *place.block, place.offset, bytes, kind);
  return at;
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
  if (block->unowned_marks) {
    std::replace(block->marks.begin(), block->marks.end(), kAnyThread, kClean);
    block->unowned_marks = false;
  }
}

void require_fenced(Thread& thread, Block& block, uint32_t offset, uint32_t bytes, char const* reader) {
  for (uint32_t granule = offset / kGranule; granule <= (offset + bytes - 1) / kGranule; ++granule) {
    if (block.marks[granule] != kClean) {
      thread.fail(std::string(reader) + " shared memory at " + std::to_string(granule * kGranule) +
                  ", which thread " + std::to_string(block.marks[granule] - 1) +
                  " wrote without fence.proxy.async afterwards");
    }
  }
}

void land_operation(size_t index) {
  std::swap(machine.in_flight[index], machine.in_flight.back());
  AsyncOperation operation = std::move(machine.in_flight.back());
  machine.in_flight.pop_back();
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

namespace {

// What the thread does next comes after the copy.
void landed(Thread& thread, CopyAsync const& copy) {
  watch(thread, *thread.block, copy.offset, copy.bytes, Access::write);
}

}  // namespace

void Thread::land_all_due() {
  for (auto& group : copy_groups) {
    for (CopyAsync& copy : group) {
      land(copy);
      landed(*this, copy);
    }
  }
  copy_groups.clear();
  for (CopyAsync& copy : copies) {
    land(copy);
    landed(*this, copy);
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
  watch(*this, *block, to.offset, bytes, Access::write, false);
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
      landed(*this, copy);
    }
    copy_groups.pop_front();
  }
}

void Thread::copy_wait_all() { land_all_due(); }

void Thread::copy_arrive_noinc(Place barrier) {
  for (auto& group : copy_groups) {
    for (CopyAsync& copy : group) {
      land(copy);
      landed(*this, copy);
    }
  }
  for (CopyAsync& copy : copies) {
    land(copy);
    landed(*this, copy);
  }
  for (uint32_t granule : dirty) {
    block->marks[granule] = block->marks[granule] == index + 1 ? kAnyThread : block->marks[granule];
  }
  block->unowned_marks = true;
  mbarrier_arrive(barrier, 1);
}

namespace {

// Until they land, the bytes that an asynchronous copy will write are NaN in every dtype.
void start(Thread& thread, AsyncOperation operation) {
  MBarrier const& barrier = find(&thread, operation.barrier);
  watch(thread, *operation.barrier.block, operation.barrier.offset, 8, Access::atomic);
  auto const watch_copy = [&](Block& block, uint32_t offset, uint32_t bytes, Access kind) {
    if (machine.watches_races) {
      watch(thread, block, offset, bytes, kind, barrier.entity, barrier.copies, fiber_of(thread).clock);
    }
  };
  if (operation.source.block != nullptr) {
    watch_copy(*operation.source.block, operation.source.offset, operation.bytes, Access::read);
  }
  for (Row const& row : operation.rows) {
    watch_copy(*row.block, row.offset, row.bytes, Access::write);
    if (operation.fenced) {
      require_fenced(thread, *row.block, row.offset, row.bytes, "cp.async.bulk writes");
    }
    std::memset(row.block->shared + row.offset, 0xff, row.bytes);
    std::fill_n(row.block->marks.begin() + row.offset / kGranule, (row.bytes + kGranule - 1) / kGranule, kClean);
  }
  operation.late = machine.draw() % 4 == 0;
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
  AsyncOperation operation;
  operation.rows.push_back({to.block, to.offset, bytes, from, {}});
  operation.barrier = barrier;
  operation.bytes = bytes;
  start(*this, std::move(operation));
}

void Thread::bulk_share(Place to, Place from, uint32_t bytes, Place barrier) {
  maybe_yield();
  if (to.offset % 16 != 0 || from.offset % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    fail("cp.async.bulk of " + std::to_string(bytes) + " bytes, not all multiples of 16");
  }
  remote(to, bytes);
  char const* const source = remote(from, bytes);
  require_fenced(*this, *from.block, from.offset, bytes, "cp.async.bulk reads");
  AsyncOperation operation;
  operation.rows.push_back({to.block, to.offset, bytes, 0, std::vector<char>(source, source + bytes)});
  operation.barrier = barrier;
  operation.bytes = bytes;
  operation.source = from;
  start(*this, std::move(operation));
}

void Thread::store_async(Place to, void const* value, uint32_t bytes, Place barrier) {
  maybe_yield();
  if (to.offset % bytes != 0 || to.block != barrier.block) {
    fail("st.async of " + std::to_string(bytes) + " bytes to " + std::to_string(to.offset) + ", signalled to rank " +
         std::to_string(barrier.block->rank) + " of rank " + std::to_string(to.block->rank));
  }
  remote(to, bytes);
  char const* const data = static_cast<char const*>(value);
  AsyncOperation operation;
  operation.rows.push_back({to.block, to.offset, bytes, 0, std::vector<char>(data, data + bytes)});
  operation.barrier = barrier;
  operation.bytes = bytes;
  operation.fenced = false;
  release(*this, find(this, barrier).clock);  // complete-tx of a store releases; its phase cannot end before it has landed
  start(*this, std::move(operation));
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
  require_fenced(*this, *from.block, from.offset, bytes, "cp.async.bulk reads");
  watch(*this, *from.block, from.offset, bytes, Access::read, false);
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
      watch(*this, *block, group.offsets[j], static_cast<uint32_t>(group.rows[j].second.size()), Access::read);
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
  operation.barrier = barrier;
  operation.bytes = bytes;
  start(*this, std::move(operation));
}

void Thread::tensor_store(uint64_t address, std::initializer_list<int32_t> at, Place from) {
  maybe_yield();
  TensorMap const& map = tensor_map(*this, address);
  walk_box(map, {at.begin(), at.end()}, [&](uint32_t offset, uint64_t target, uint32_t size) {
    uint32_t const place = swizzled(map, from.offset + offset);
    char const* const source = remote({from.block, place}, size);
    require_fenced(*this, *from.block, place, size, "cp.async.bulk.tensor reads");
    watch(*this, *from.block, place, size, Access::read, false);
    if (target != 0) {
      check_global(target, size, true);
      stores.rows.emplace_back(target, std::vector<char>(source, source + size));
      stores.offsets.push_back(place);
    }
  });
}

}  // namespace emulator

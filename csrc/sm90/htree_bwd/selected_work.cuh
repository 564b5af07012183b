// What the warps of dkdv_selected work on, and what lies in shared memory for them: work items, lists of visits, slots.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "args.h"
#include "device/ptx.cuh"
#include "device/sm90.cuh"

namespace htree_cuda::sm90::htree_bwd {

// What a warp works on: one KV block and one segment of its visits.
struct WorkItem {
  int layer;
  int head;
  int block;  // among those of all sequences
  SegmentOrder order;
};

// The visits of a work item, in whole packs: where they begin among those of the layer, in units, and how many packs.
struct VisitList {
  uint32_t first;
  int packs;
};

// A warp's own part of shared memory: slots, the values that registers do not hold, the next visits, the work item, an
// mbarrier a slot of q, and the inverse row scales of the keys. One query is copied in bulk: the warp arrives once at the
// barrier of a slot, with the bytes of the copies. Two or four are copied by the lanes, 16 bytes at a time, because
// bulk copies of several lanes are issued one after the other, 12 a pack of four queries; a group of copies is a pack.
template <class Cfg>
struct WarpStorage {
  uint32_t begin;

  __device__ uint32_t query_slot(uint32_t i) const {
    return begin + i * (Cfg::kQuerySlotBytes + (Cfg::kOneRing ? Cfg::kDoutSlotBytes : 0));
  }
  __device__ uint32_t dout_slot(uint32_t i) const {
    if constexpr (Cfg::kOneRing) return query_slot(i) + Cfg::kQuerySlotBytes;
    return begin + Cfg::kQuerySlots * Cfg::kQuerySlotBytes + i * Cfg::kDoutSlotBytes;
  }
  __device__ uint32_t values() const {
    return begin + Cfg::kQuerySlots * Cfg::kQuerySlotBytes + Cfg::kSlots * Cfg::kDoutSlotBytes;
  }
  __device__ uint32_t list() const { return values() + Cfg::kValuesBytes; }
  __device__ uint32_t full(uint32_t i) const { return item() + Cfg::kItemBytes + 8 * i; }
  __device__ uint32_t item() const { return list() + Cfg::kListBytes; }
  __device__ uint32_t inverse() const { return full(Cfg::kQuerySlots); }
};

// Where a warp is in its two rings: of q, whose slots have the barriers, and of dO. Two numbers, for want of registers.
template <class Cfg>
struct PackPosition {
  uint32_t packs = 0;  // done so far; rounds where there is one ring
  uint32_t dout = 0;   // slot of dO

  __device__ __forceinline__ uint32_t query_slot(uint32_t ahead = 0) const {
    return Cfg::kOneRing ? dout_slot(ahead) : (packs + ahead) % Cfg::kQuerySlots;
  }
  __device__ __forceinline__ uint32_t parity() const { return (Cfg::kOneRing ? packs : packs / Cfg::kQuerySlots) & 1u; }
  __device__ __forceinline__ uint32_t dout_slot(uint32_t ahead = 0) const {
    uint32_t const slot = dout + ahead;
    return slot >= Cfg::kSlots ? slot - Cfg::kSlots : slot;
  }
  __device__ __forceinline__ void advance() {
    dout = dout_slot(1);
    if (!Cfg::kOneRing || dout == 0) ++packs;
  }
};

// A work item and its list. They wait in shared memory, because the products need the registers.
struct StoredItem {
  WorkItem item;
  VisitList list;

  // The item of a number, for the whole warp; fewer than no packs say that there are not so many items.
  static __device__ StoredItem listed(Args const& args, int number, int lane) {
#pragma unroll 1
    for (int layer = 0; layer < args.max_entry; ++layer) {
      int const own = __ldg(args.listed_items + layer * kItemGroups + lane);
      int up_to = own;
#pragma unroll
      for (int d = 1; d < kItemGroups; d *= 2) {
        int const before = __shfl_up_sync(kFullWarp, up_to, d);
        if (lane >= d) up_to += before;
      }
      unsigned const later = __ballot_sync(kFullWarp, number < up_to);
      if (later != 0) {
        int const group = __ffs(later) - 1;
        int const place = number - __shfl_sync(kFullWarp, up_to - own, group);
        std::int64_t const room = static_cast<std::int64_t>(args.chunk.heads) * args.tree.kv_blocks[layer];
        uint4 const x = __ldg(args.items[layer] + (group * room + place));
        return {{layer, static_cast<int>(x.w), static_cast<int>(x.z), SegmentOrder::of(x.y)}, {x.x, SegmentOrder::packs_of(x.y)}};
      }
      number -= __shfl_sync(kFullWarp, up_to, 31);
    }
    return {{}, {0, -1}};
  }
  __device__ __forceinline__ static StoredItem loaded(uint32_t shared) {
    uint4 const x = ptx::load_shared_16B(shared);
    uint4 const y = ptx::load_shared_16B(shared + 16);
    SegmentOrder const order{static_cast<int>(x.w), static_cast<int>(y.z)};
    return {WorkItem{static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z), order},
            VisitList{y.x, static_cast<int>(y.y)}};
  }
  __device__ __forceinline__ void store(uint32_t shared) const {
    ptx::store_shared_16B(shared, {static_cast<uint32_t>(item.layer), static_cast<uint32_t>(item.head),
                                   static_cast<uint32_t>(item.block), static_cast<uint32_t>(item.order.before)});
    ptx::store_shared_16B(shared + 16, {list.first, static_cast<uint32_t>(list.packs),
                                        static_cast<uint32_t>(item.order.counts), 0u});
  }
};

__device__ __forceinline__ int* segments_added_of(Args const& args, WorkItem const& item) {
  return args.segments_added + (item.head * args.node_rows + args.begin[item.layer]) / kSiblings + item.block;
}

// The first item that nobody has begun, for the whole warp.
__device__ __forceinline__ int take_item(Args const& args, int lane) {
  int next = 0;
  if (lane == 0) next = atomicAdd(args.next_item, 1);
  return __shfl_sync(kFullWarp, next, 0);
}

}  // namespace htree_cuda::sm90::htree_bwd

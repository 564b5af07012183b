// The stream of KV blocks in dq_selected: one producer warp, eight consumer warps with a query each, a ring of stages.
//
//   barrier        who arrives                    who waits      what becomes visible, or free
//   full[stage]    producer, once, and the bytes  8 consumers    up to four KV blocks of one layer, and the note on them
//   empty[stage]   each consumer warp, once       producer       the stage may be overwritten
//
// The stream ends with a stage that holds no block and says so; both sides pass the same phases whatever the producer
// found. A consumer releases stages that hold no block of its query. What a consumer computes, and in which order,
// depends on its own query alone: the queries of its neighbours decide only when a block passes by.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "args.h"
#include "device/barriers.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "device/sm90.cuh"
#include "traits.cuh"

namespace htree_cuda::sm90::htree_bwd {

// What the producer found: a KV block that some query of the CTA visits.
struct Entry {
  uint32_t query_mask;  // bit i: query i of the CTA visits the block
  int block;
};

__device__ __forceinline__ Entry load_entry(uint32_t shared) {
  uint4 const x = ptx::load_shared_16B(shared);
  return {x.x, static_cast<int>(x.y)};
}

__device__ __forceinline__ void store_entry(uint32_t shared, Entry const& entry) {
  ptx::store_shared_16B(shared, {entry.query_mask, static_cast<uint32_t>(entry.block), 0u, 0u});
}

// The note of a stage, by its shared address: the query masks of the slots, a byte each in one word, so that a consumer
// finds its own slots at once; the layer of all slots; then, from byte 16 on, the blocks. A note of layer kEnd ends the
// stream, and its query masks name every query.
struct Note {
  static constexpr int kEnd = -1;
  uint32_t shared;

  __device__ uint32_t block_of(uint32_t slot) const { return shared + 16 + 4 * slot; }
};

template <class Cfg>
struct KvRing {
  uint32_t stages;
  uint32_t rotations;
  uint32_t list;
  RingBarriers<Cfg::kStages> barriers;
  uint32_t notes;

  __device__ explicit KvRing(uint32_t shared)
      : stages(shared),
        rotations(stages + Cfg::kStages * Cfg::kStageBytes),
        list(rotations + Cfg::kConsumers * Cfg::kRotationsBytes),
        barriers{list + Cfg::kListBytes, list + Cfg::kListBytes + 8 * Cfg::kStages},
        notes(barriers.empty + 8 * Cfg::kStages) {}

  __device__ uint32_t stage(uint32_t stage) const { return stages + stage * Cfg::kStageBytes; }
  __device__ uint32_t rotations_of(int warp) const { return rotations + warp * Cfg::kRotationsBytes; }
  __device__ Note note(uint32_t stage) const { return {notes + stage * Cfg::kNoteBytes}; }
};

// The producer's side: a list in shared memory, sent four entries at a time.
template <class Cfg>
class KvSender {
public:
  __device__ explicit KvSender(KvRing<Cfg> const& ring) : ring_(ring), lane_(threadIdx.x % 32) {}

  // Every lane appends `count` entries, which get(i) returns one after the other. The entries of a lane follow those of
  // the lanes before it.
  template <class Get>
  __device__ __forceinline__ void append(int count, Get&& get) {
    int end = count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int const before = __shfl_up_sync(kFullWarp, end, d);
      if (lane_ >= d) end += before;
    }
    int const total = __shfl_sync(kFullWarp, end, 31);
    for (int i = 0; i < count; ++i) store_entry(at(found_ + end - count + i), get(i));
    found_ += total;
    __syncwarp();
  }

  // Sends all whole stages and moves the rest to the front of the list. source(entry) is where the operand of the
  // entry's block lies.
  template <class Find>
  __device__ __forceinline__ void send(int layer, Find&& source) {
    int sent = 0;
    for (; found_ - sent >= Cfg::kStageSlots; sent += Cfg::kStageSlots) stage(sent, Cfg::kStageSlots, layer, source);
    if (sent == 0) return;
    found_ -= sent;
    Entry rest{};
    if (lane_ < found_) rest = load_entry(at(sent + lane_));
    __syncwarp();
    if (lane_ < found_) store_entry(at(lane_), rest);
    __syncwarp();
  }

  // Sends what is left of a layer, because a stage holds blocks of one layer only.
  template <class Find>
  __device__ __forceinline__ void send_rest(int layer, Find&& source) {
    if (found_ > 0) stage(0, found_, layer, source);
    found_ = 0;
  }

  __device__ __forceinline__ void finish() {
    ring_.barriers.wait_empty(at_, "dq_selected producer: empty");
    if (lane_ != 0) return;
    ptx::store_shared_16B(ring_.note(at_.slot).shared, {~0u, static_cast<uint32_t>(Note::kEnd), 0u, 0u});
    barriers::mbarrier_arrive(ring_.barriers.full_at(at_.slot));
  }

private:
  __device__ uint32_t at(int i) const { return ring_.list + i * Cfg::kEntryBytes; }

  template <class Find>
  __device__ __forceinline__ void stage(int first, int count, int layer, Find&& source) {
    ring_.barriers.wait_empty(at_, "dq_selected producer: empty");
    Entry entry{};
    if (lane_ < count) entry = load_entry(at(first + lane_));
    Note const note = ring_.note(at_.slot);
    uint32_t const query_masks = __reduce_add_sync(kFullWarp, entry.query_mask << (lane_ % Cfg::kStageSlots * 8));
    if (lane_ == 0) ptx::store_shared_16B(note.shared, {query_masks, static_cast<uint32_t>(layer), 0u, 0u});
    if (lane_ < count) ptx::store_shared_4B(note.block_of(lane_), entry.block);
    __syncwarp();
    uint32_t const full = ring_.barriers.full_at(at_.slot);
    if (lane_ == 0) barriers::mbarrier_arrive_expect_bytes(full, count * Cfg::Slot::kBlockBytes);
    __syncwarp();
    if (lane_ < count) {
      ptx::bulk_load(ring_.stage(at_.slot) + lane_ * Cfg::Slot::kBytes + Cfg::Slot::kBlockOffset, source(entry),
                     Cfg::Slot::kBlockBytes, full);
    }
    at_ = at_.ahead(1);
  }

  KvRing<Cfg> const& ring_;
  int const lane_;
  int found_ = 0;  // entries of the list
  RingPosition<Cfg::kStages> at_;
};

// The consumers' side. Calls begin(layer) before the first block of a layer that the query of `warp` visits, and
// use(stage, note, layer, own) for every stage that holds such blocks: bit 8 i of `own` stands for slot i.
template <class Cfg, class Begin, class Use>
__device__ __forceinline__ void receive(KvRing<Cfg> const& ring, int warp, Begin&& begin, Use&& use) {
  RingPosition<Cfg::kStages> at;
  int current = kMaxLayers;
  while (true) {
    ring.barriers.wait_full(at, "dq_selected consumer: full");
    Note const note = ring.note(at.slot);
    uint4 const words = ptx::load_shared_16B(note.shared);
    if (uint32_t const own = words.x >> warp & 0x01010101u; own != 0) {
      int const layer = static_cast<int>(words.y);
      if (layer != current) {
        if (layer == Note::kEnd) return;
        begin(layer);
        current = layer;
      }
      use(ring.stage(at.slot), note, layer, own);
    }
    barriers::release(ring.barriers.empty_at(at.slot));
    at = at.ahead(1);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

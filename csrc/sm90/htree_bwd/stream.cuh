// What the matrix kernels ask of the reverse index; the ring between the producer and the consumers of the queries
// kernel, and how the producer finds what to send.
//
//   barrier        arrives                        waits          makes visible / frees
//   full[stage]    producer, once, and the bytes  8 consumers    up to four operands of one layer and the note on them
//   empty[stage]   each consumer warp, once       producer       the stage may be overwritten
//
// The producer ends the stream with an empty stage that says so: both sides pass the same phases whatever it found.
// Consumers release stages that hold nothing of theirs. What a consumer computes, and in which order, depends on its own
// operand alone; what its neighbours take decides only when something passes by.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/barriers.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "device/sm90.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::htree_bwd {

// What a slot holds.
struct Entry {
  uint32_t takers;  // bit i: query i of the CTA visits the parent
  int which;        // the parent
};

__device__ __forceinline__ Entry load_entry(uint32_t shared) {
  uint4 const x = ptx::load_shared_16B(shared);
  return {x.x, static_cast<int>(x.y)};
}

__device__ __forceinline__ void store_entry(uint32_t shared, Entry const& entry) {
  ptx::store_shared_16B(shared, {entry.takers, static_cast<uint32_t>(entry.which), 0u, 0u});
}

// What a stage says of its slots: the takers of each, a byte a slot, so that a consumer finds its own at once, and the
// layer of all; then the parents. At the end of the stream all seem to take what is of layer kOver.
struct Note {
  static constexpr int kOver = -1;
  uint32_t shared;

  __device__ uint32_t which(uint32_t slot) const { return shared + 16 + 4 * slot; }
};

template <class Cfg>
struct Ring {
  uint32_t stages;
  uint32_t rotations;
  uint32_t list;
  RingBarriers<Cfg::kStages> barriers;
  uint32_t notes;

  __device__ explicit Ring(uint32_t shared)
      : stages(shared),
        rotations(stages + Cfg::kStages * Cfg::kStageBytes),
        list(rotations + Cfg::kConsumers * Cfg::kRotationsBytes),
        barriers{list + Cfg::kListBytes, list + Cfg::kListBytes + 8 * Cfg::kStages},
        notes(barriers.empty + 8 * Cfg::kStages) {}

  __device__ uint32_t stage(uint32_t stage) const { return stages + stage * Cfg::kStageBytes; }
  __device__ uint32_t rotations_of(int warp) const { return rotations + warp * Cfg::kRotationsBytes; }
  __device__ Note note(uint32_t stage) const { return {notes + stage * Cfg::kNoteBytes}; }
};

// Where the table of visits holds a row's entry for a group.
__device__ __forceinline__ std::uint32_t const* entry_of(Args const& args, int layer, int head, int group, int row) {
  return args.visits.layer[layer] +
         (static_cast<std::int64_t>(head) * args.tree.groups[layer] + group) * args.chunk.rows + row;
}

// Which children of a parent a row expanded, a bit each: those it visits as parents of the layer below. Bits from 16 on
// mean nothing, nor do those of children that do not exist: they lie beyond every row.
struct Below {
  std::uint32_t const* entries = nullptr;  // of the layer below; null at the bottom
  int last = 0;                            // group there

  Below() = default;
  __device__ __forceinline__ Below(Args const& args, int layer, int head) {
    if (layer == 0) return;
    entries = entry_of(args, layer - 1, head, 0, 0);
    last = args.tree.groups[layer - 1] - 1;
  }

  __device__ __forceinline__ uint32_t expanded(Args const& args, int parent, int row) const {
    if (entries == nullptr) return 0;
    int const group = 2 * parent;  // 16 children, eight a group; a head's table has fewer than 2^32 entries
    uint32_t const rows = args.chunk.rows;
    uint32_t const first = __ldg(entries + (group * rows + row));
    uint32_t const second = __ldg(entries + (min(group + 1, last) * rows + row));
    return __byte_perm(first, second, 0x5540);
  }

  // The same of children 8 group .. 8 group + 7, counted over all parents; bits from 8 on mean nothing.
  __device__ __forceinline__ uint32_t of_group(Args const& args, int group, int row) const {
    if (entries == nullptr) return 0;
    return __ldg(entries + (min(group, last) * static_cast<uint32_t>(args.chunk.rows) + row));
  }
};

// Children at places beyond the query's own, likewise: some where position < 16, in the last parent of a row.
__device__ __forceinline__ uint32_t causal_mask(int position) { return ~1u << min(position, 31); }

// The producer's side: a list in shared memory, sent four entries at a time.
template <class Cfg>
class Sender {
public:
  __device__ explicit Sender(Ring<Cfg> const& ring) : ring_(ring), lane_(threadIdx.x % 32) {}

  // Every lane appends `count` entries; lanes ascend.
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

  // Sends all whole stages; `source` tells where an entry's operand lies.
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

  // Sends what is left of a layer: a stage holds parents of one.
  template <class Find>
  __device__ __forceinline__ void send_rest(int layer, Find&& source) {
    if (found_ > 0) stage(0, found_, layer, source);
    found_ = 0;
  }

  __device__ __forceinline__ void finish() {
    ring_.barriers.wait_empty(at_, "htree_bwd producer: empty");
    if (lane_ != 0) return;
    ptx::store_shared_16B(ring_.note(at_.slot).shared, {~0u, static_cast<uint32_t>(Note::kOver), 0u, 0u});
    barriers::mbarrier_arrive(ring_.barriers.full_at(at_.slot));
  }

private:
  __device__ uint32_t at(int i) const { return ring_.list + i * Cfg::kEntryBytes; }

  template <class Find>
  __device__ __forceinline__ void stage(int first, int count, int layer, Find&& source) {
    ring_.barriers.wait_empty(at_, "htree_bwd producer: empty");
    Entry entry{};
    if (lane_ < count) entry = load_entry(at(first + lane_));
    Note const note = ring_.note(at_.slot);
    uint32_t const takers = __reduce_add_sync(kFullWarp, entry.takers << (lane_ % Cfg::kStageSlots * 8));
    if (lane_ == 0) ptx::store_shared_16B(note.shared, {takers, static_cast<uint32_t>(layer), 0u, 0u});
    if (lane_ < count) ptx::store_shared_4B(note.which(lane_), entry.which);
    __syncwarp();
    uint32_t const full = ring_.barriers.full_at(at_.slot);
    if (lane_ == 0) barriers::mbarrier_arrive_expect_bytes(full, count * Cfg::kNodeBytes);
    __syncwarp();
    if (lane_ < count) {
      ptx::bulk_load(ring_.stage(at_.slot) + lane_ * Cfg::kSlotBytes + Cfg::kNodeOffset, source(entry), Cfg::kNodeBytes,
                     full);
    }
    at_ = at_.ahead(1);
  }

  Ring<Cfg> const& ring_;
  int const lane_;
  int found_ = 0;
  RingPosition<Cfg::kStages> at_;
};

// The consumers' side: calls take(stage, note, layer, own) where warp `warp` takes something of a stage, bit 8 i of `own`
// being slot i, and begin(layer) before the first of a layer.
template <class Cfg, class Begin, class Take>
__device__ __forceinline__ void receive(Ring<Cfg> const& ring, int warp, Begin&& begin, Take&& take) {
  RingPosition<Cfg::kStages> at;
  int current = kMaxLayers;
  while (true) {
    ring.barriers.wait_full(at, "htree_bwd consumer: full");
    Note const note = ring.note(at.slot);
    uint4 const words = ptx::load_shared_16B(note.shared);
    if (uint32_t const own = words.x >> warp & 0x01010101u; own != 0) {
      int const layer = static_cast<int>(words.y);
      if (layer != current) {
        if (layer == Note::kOver) return;
        begin(layer);
        current = layer;
      }
      take(ring.stage(at.slot), note, layer, own);
    }
    barriers::release(ring.barriers.empty_at(at.slot));
    at = at.ahead(1);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

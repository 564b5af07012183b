// Both ends of the ring of the layer kernel.
//
//   barrier        arrives                        waits           makes visible / frees
//   full[stage]    producer, once, and the bytes   12 consumers    four parents; kBelow, and where a query is split: their
//                                                                  masks; values, kBelow: and those of the stage behind
//   empty[stage]   each consumer warp, once;       producer        the stage may be overwritten
//                  values: after a later stage
//                  has begun, see below.cuh and
//                  first.cuh
//   kQueryBarrier  the warps of a warpgroup        the same        kFirst: its queries, before the first product
//                  (named barriers)
//   kMergeBarrier  12 consumers (named barrier)    the same        a split query, after the last stage of a walk: what they
//                                                                  are merged through is free; maxima and sums; O
//
// Both sides walk the same number of groups, ceil(count / 4), and do so twice where the pass is a choice: consumers release
// groups that hold nothing of theirs, so every phase is passed whatever the masks say, and the four warps of a warpgroup
// multiply together (first.cuh). What a consumer computes depends on its own query alone: its own rank, its own running
// maximum; the union decides only when a parent passes by.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../device/barriers.cuh"
#include "../device/pipeline.cuh"
#include "../device/ptx.cuh"
#include "config.cuh"

namespace htree_cuda::layer {

inline constexpr unsigned kFullWarp = 0xffffffffu;

// Which block of queries of the launch this CTA has: the last ones, which walk the most in a first layer, begin first, so
// that short ones end the launch.
__device__ __forceinline__ uint32_t block_index() { return gridDim.x - 1 - ptx::block_index(); }

template <class Cfg>
struct Ring {
  uint32_t stages;
  RingBarriers<Cfg::kStages, Cfg::kStageBytes> barriers;

  __device__ explicit Ring(uint32_t shared)
      : stages(shared), barriers{shared + Cfg::kFullOffset, shared + Cfg::kEmptyOffset} {}

  __device__ __forceinline__ uint32_t stage(uint32_t slot) const { return stages + slot * Cfg::kStageBytes; }
  // What query `i` of the block takes of the stage.
  static __device__ __forceinline__ uint32_t mask(uint32_t stage, int i) { return stage + Cfg::kMaskOffset + 4 * i; }
  // And of the one behind it.
  static __device__ __forceinline__ uint32_t next_mask(uint32_t stage, int i) {
    return stage + Cfg::kNextMaskOffset + 4 * i;
  }
};

// Whether the query at position t walks this layer in this way. Above its first layer it has nothing to do.
template <class Cfg>
__device__ __forceinline__ bool works(Args const& args, std::int64_t t) {
  return Cfg::kWalk == Walk::kFirst ? is_first_layer(t, args.layer, args.top_k)
                                    : is_below_first_layer(t, args.layer, args.top_k);
}

// And how many candidates it has there.
template <class Cfg>
__device__ __forceinline__ int candidates_of(Args const& args, std::int64_t t) {
  return Cfg::kWalk == Walk::kFirst ? candidates_in_first(t, args.layer)
                                    : candidates_below_first(t, args.layer, args.top_k);
}

// Walk::kFirst: how many parents query `i` of the block takes.
template <class Cfg>
__device__ __forceinline__ int parents_of(Args const& args, QueryBlock const& block, int i) {
  std::int64_t const t = args.blocks.q_start + block.first + i;
  if (i >= kBlockQueries || block.first + i >= args.blocks.T_q || !works<Cfg>(args, t)) return 0;
  return (candidates_of<Cfg>(args, t) + kSiblings - 1) / kSiblings;
}

// Parents that the block streams: the last of its queries that walk has the most.
template <class Cfg>
__device__ __forceinline__ int stream_count(Args const& args, QueryBlock const& block) {
  if constexpr (Cfg::kWalk == Walk::kBelow) {
    return args.union_count[block_index()];
  } else {
    int count = 0;
#pragma unroll 1
    for (int i = kBlockQueries - 1; i >= 0 && count == 0; --i) count = parents_of<Cfg>(args, block, i);
    return count;
  }
}

// Who takes a parent of a split query: its turns begin and end with one consumer.
__device__ __forceinline__ int consumer_of(Args const& args, int rank) {
  return rank / args.turn_period % kBlockQueries;
}

template <class Cfg>
__device__ void produce(Args const& args, Ring<Cfg> const& ring) {
  QueryBlock const block(args.blocks, block_index());
  int const lane = threadIdx.x % 32;
  int const count = stream_count<Cfg>(args, block);
  std::int64_t const list = static_cast<std::int64_t>(block_index()) * kBlockQueries * args.top_k;
  char const* const packed = args.packed + block.bh * args.parents_per_head * args.block_bytes;

  // Lane i holds entry i of the next 32.
  int next_node = 0;
  unsigned next_mask = 0;
  auto const fetch = [&](int entry) {
    next_mask = 0;  // kFirst: a query knows by itself how many parents it takes
    next_node = entry;
    if (Cfg::kWalk == Walk::kBelow && entry < count) {
      next_node = args.union_nodes[list + entry];
      next_mask = args.union_masks[list + entry];
    }
    if (args.split) next_mask = entry < count ? 1u << consumer_of(args, entry) : 0u;
  };

  // Of the slots of a stage, those that query `lane` takes.
  auto const taken = [&](unsigned mask, int group) {
    uint32_t slots = 0;
#pragma unroll
    for (int i = 0; i < Cfg::kStageSlots; ++i) {
      slots |= (__shfl_sync(kFullWarp, mask, group * Cfg::kStageSlots + i) >> lane & 1u) << i;
    }
    return slots;
  };

  RingPosition<Cfg::kStages> at;
#pragma unroll 1
  for (int walk = 0; walk < Cfg::kWalks; ++walk) {
    fetch(lane);
    for (int base = 0; base < count; base += 32) {
      int const node = next_node;
      unsigned const mask = next_mask;
      bool const exists = base + lane < count;
      fetch(base + 32 + lane);
#pragma unroll 1
      for (int group = 0; group < 32 / Cfg::kStageSlots && base + group * Cfg::kStageSlots < count; ++group) {
        ring.barriers.wait_empty(at, "htree_layer producer: empty");
        bool const mine = lane / Cfg::kStageSlots == group;
        int const slot = lane % Cfg::kStageSlots;
        uint32_t const own = taken(mask, group);
        if (lane < Cfg::kConsumers) ptx::store_shared_4B(ring.mask(ring.stage(at.slot), lane), own);
        if constexpr (Cfg::kNamesNext) {
          bool const last = group == 32 / Cfg::kStageSlots - 1;
          uint32_t const next = taken(last ? next_mask : mask, last ? 0 : group + 1);
          if (lane < Cfg::kConsumers) ptx::store_shared_4B(ring.next_mask(ring.stage(at.slot), lane), next);
        }
        int const slots = min(count - base - group * Cfg::kStageSlots, Cfg::kStageSlots);
        int const copies = (slots + Cfg::kCopySlots - 1) / Cfg::kCopySlots;  // a tile is whole in global memory
        __syncwarp();
        if (lane == 0) barriers::mbarrier_arrive_expect_bytes(ring.barriers.full_at(at.slot), copies * Cfg::kCopyBytes);
        __syncwarp();
        if (mine && exists && slot % Cfg::kCopySlots == 0) {
          int const copy = slot / Cfg::kCopySlots;
          ptx::bulk_load(ring.stage(at.slot) + copy * Cfg::kSlotBytes + Cfg::kScaleOffset,
                         packed + node * args.block_bytes, Cfg::kCopyBytes, ring.barriers.full_at(at.slot));
        }
        at = at.ahead(1);
      }
    }
  }
}

}  // namespace htree_cuda::layer

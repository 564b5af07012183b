// Both ends of the ring of the layer kernel.
//
//   barrier        arrives                        waits           makes visible / frees
//   full[stage]    producer, once, and the bytes   12 consumers    its parents; kBelow, and where a query is split: their
//                                                                  masks; values, kBelow: and those of the stage behind;
//                                                                  kDense: bytes a slot instead, of both stages
//   empty[stage]   each consumer warp, once;       producer        the stage may be overwritten
//                  values: after a later stage
//                  has begun, see below.cuh and
//                  first.cuh
//   kQueryBarrier  the warps of a warpgroup        the same        kFirst: its queries, before the first product
//                  (named barriers)
//   kMergeBarrier  12 consumers (named barrier)    the same        a split query, after the last stage of a walk: what they
//                                                                  are merged through is free; maxima and sums; O
//
// Both sides walk the same number of groups, a stage each, and do so twice where the pass is a choice: consumers release
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

template <class Cfg>
__device__ __forceinline__ WalkArgs const& own(Args const& args) {
  return args.walks[static_cast<int>(Cfg::kWalk)];
}

// Which block of queries of the launch this CTA has: the last ones, which walk the most in a first layer, begin first, so
// that short ones end the launch.
template <class Cfg>
__device__ __forceinline__ uint32_t block_index(Args const& args) {
  return own<Cfg>(args).end_block - ptx::block_index();
}

template <class Cfg>
struct Ring {
  uint32_t stages;
  RingBarriers<Cfg::kStages, Cfg::kStageBytes> barriers;

  __device__ explicit Ring(uint32_t shared)
      : stages(shared), barriers{shared + Cfg::kFullOffset, shared + Cfg::kEmptyOffset} {}

  __device__ __forceinline__ uint32_t stage(uint32_t slot) const { return stages + slot * Cfg::kStageBytes; }
  // What query `i` of the block takes of the stage, see Config.
  static __device__ __forceinline__ uint32_t mask(uint32_t stage, int i) { return stage + Cfg::kMaskOffset + 4 * i; }
  // And of the one behind it.
  static __device__ __forceinline__ uint32_t next_mask(uint32_t stage, int i) {
    return stage + Cfg::kNextMaskOffset + 4 * i;
  }
  // kDense: the parent in slot `i`.
  static __device__ __forceinline__ uint32_t parent(uint32_t stage, int i) {
    return stage + Cfg::kParentOffset + 4 * i;
  }
};

// Whether the query at position t walks this layer in this way. Above its first layer it has nothing to do.
template <class Cfg>
__device__ __forceinline__ bool works(Args const& args, std::int64_t t) {
  if constexpr (!Cfg::kIsBelow) {
    return is_first_layer(t, args.layer, args.top_k);
  } else {
    return is_below_first_layer(t, args.layer, args.top_k) &&
           is_dense(t, args.layer, args.dense_parents) == (Cfg::kWalk == Walk::kDense);
  }
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
  if constexpr (Cfg::kIsBelow) {
    // Queries of a way are neighbours, more than a block of them. One that has none may be here where a launch is of several
    // heads.
    std::int64_t const t = args.blocks.q_start + block.first;
    std::int64_t const last = args.blocks.q_start + min(block.first + kBlockQueries, args.blocks.T_q) - 1;
    return works<Cfg>(args, t) || works<Cfg>(args, last) ? args.union_count[block_index<Cfg>(args)] : 0;
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
  QueryBlock const block(args.blocks, block_index<Cfg>(args));
  int const lane = threadIdx.x % 32;
  int const count = stream_count<Cfg>(args, block);
  uint32_t const list = block_index<Cfg>(args) * static_cast<uint32_t>(kBlockQueries * args.top_k);
  char const* const packed = own<Cfg>(args).packed + block.bh * own<Cfg>(args).parents_per_head * args.block_bytes;

  // Lane i holds entry i of the next 32.
  int next_node = 0;
  unsigned next_mask = 0;
  auto const fetch = [&](int entry) {
    next_mask = 0;  // kFirst: a query knows by itself how many parents it takes
    next_node = entry;
    if (Cfg::kIsBelow && entry < count) {
      uint32_t const at = ptx::opaque(list + static_cast<uint32_t>(entry));  // two addresses that move on are too many
      next_node = own<Cfg>(args).union_nodes[at];
      next_mask = args.union_masks[at];
    }
    if (args.split) next_mask = entry < count ? 1u << consumer_of(args, entry) : 0u;
  };

  // The word of query `lane` for a stage, the first slot of which has entry `first`.
  int expected = 0;  // kDense: the parent without a gap
  auto const taken = [&](unsigned mask, int node, int group, int first) {
    uint32_t word = 0;
    int shift = 0;
#pragma unroll
    for (int i = 0; i < Cfg::kStageSlots; ++i) {
      uint32_t const own = __shfl_sync(kFullWarp, mask, group * Cfg::kStageSlots + i) >> lane & 1u;
      if constexpr (Cfg::kWalk == Walk::kDense) {
        int const parent = __shfl_sync(kFullWarp, node, group * Cfg::kStageSlots + i);
        uint32_t const gap = args.split ? Cfg::kMostGap : min(static_cast<uint32_t>(parent - expected), Cfg::kMostGap);
        word |= own * (Cfg::kTaken | gap << Cfg::kSlotBits | i) << shift;
        shift += 8 * own;
        expected = own != 0 ? parent + 1 : expected;
      } else {
        word |= own << i;
      }
    }
    return word;
  };

  RingPosition<Cfg::kStages> at;
#pragma unroll 1
  for (int walk = 0; walk < Cfg::kWalks; ++walk) {
    expected = 0;
    uint32_t next = 0;
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
        int const first = base + group * Cfg::kStageSlots;
        uint32_t const own = Cfg::kNamesNext && first > 0 ? next : taken(mask, node, group, first);
        if (lane < Cfg::kConsumers) ptx::store_shared_4B(ring.mask(ring.stage(at.slot), lane), own);
        if constexpr (Cfg::kNamesNext) {
          bool const last = group == 32 / Cfg::kStageSlots - 1;
          next = taken(last ? next_mask : mask, last ? next_node : node, last ? 0 : group + 1, first + Cfg::kStageSlots);
          if (lane < Cfg::kConsumers) ptx::store_shared_4B(ring.next_mask(ring.stage(at.slot), lane), next);
        }
        if (Cfg::kWalk == Walk::kDense && mine) ptx::store_shared_4B(ring.parent(ring.stage(at.slot), slot), node);
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

// Both ends of the ring of the layer kernel.
//
//   barrier        arrives                        waits           makes visible / frees
//   full[stage]    producer, once, and the bytes;  12 consumers    its parents; kSelected, and where a query is split: their
//                  who names query_masks, once                          masks; values, kSelected: and those of the stage behind;
//                                                                  kHalfSelected: bytes a slot instead, of both stages
//   empty[stage]   each consumer warp, once;       both            the stage may be overwritten
//                  values: after a later stage
//                  has begun, see below.cuh and
//                  first.cuh
//   kQueryBarrier  the warps of a warpgroup        the same        kEntry: its queries, before the first product
//                  (named barriers)
//   kMergeBarrier  12 consumers (named barrier)    the same        a split query, after the last stage of a walk: what they
//                                                                  are merged through is free; maxima and sums; O
//
// Both sides walk the same number of groups, a stage each, and do so twice where the pass is a score pass: consumers release
// groups that hold nothing of theirs, so every phase is passed whatever the masks say, and the four warps of a warpgroup
// multiply together (first.cuh). What is computed for a query depends on that query alone: its own rank, its own running
// maximum; the union decides only when a parent passes by.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device/barriers.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "traits.cuh"

namespace htree_cuda::sm90::htree_fwd {


template <class Cfg>
__device__ __forceinline__ KindArgs const& own(Args const& args) {
  return args.kinds[static_cast<int>(Cfg::kKind)];
}

// Which block of queries of the launch this CTA has: the last ones, which walk the most in a entry layer, begin first, so
// that short ones end the launch.
template <class Cfg>
__device__ __forceinline__ uint32_t block_index(Args const& args) {
  return own<Cfg>(args).end_block - ptx::block_index();
}

// The block of the launch that a consumer warp has a query of, if any: where a CTA has several they are of one head, the first
// exists, and others are -1 where they do not.
template <class Cfg>
__device__ __forceinline__ int block_of_warp(Args const& args, int warp) {
  if constexpr (Cfg::kSharesWarp) {
    BlockGroups const groups = own<Cfg>(args).groups.of_size(Cfg::kQueriesPerWarp);
    return groups.block(args.blocks, static_cast<int>(block_index<Cfg>(args)), warp / (Cfg::kConsumers / Cfg::kQueriesPerWarp));
  } else {
    return static_cast<int>(block_index<Cfg>(args));
  }
}

// The first: what is said of it but for its queries holds for all of the CTA.
template <class Cfg>
__device__ __forceinline__ QueryBlock some_block(Args const& args) {
  return QueryBlock(args.blocks, block_of_warp<Cfg>(args, 0));
}

template <class Cfg>
struct Ring {
  uint32_t stages;
  RingBarriers<Cfg::kStages, Cfg::kStageBytes> barriers;

  __device__ explicit Ring(uint32_t shared)
      : stages(shared), barriers{shared + Cfg::kFullOffset, shared + Cfg::kEmptyOffset} {}

  __device__ __forceinline__ uint32_t stage(uint32_t slot) const { return stages + slot * Cfg::kStageBytes; }
  // What the queries of consumer `i` take of the stage, see Config.
  static __device__ __forceinline__ uint32_t mask(uint32_t stage, int i) { return stage + Cfg::kMaskOffset + 4 * i; }
  // And of the one behind it.
  static __device__ __forceinline__ uint32_t next_mask(uint32_t stage, int i) {
    return stage + Cfg::kNextMaskOffset + 4 * i;
  }
  // kHalfSelected: the parent in slot `i`.
  static __device__ __forceinline__ uint32_t parent(uint32_t stage, int i) {
    return stage + Cfg::kParentOffset + 4 * i;
  }
};

// Whether the query at position t walks this layer in this way. Above its entry layer it has nothing to do.
template <class Cfg>
__device__ __forceinline__ bool works(Args const& args, std::int64_t t) {
  if constexpr (!Cfg::kIsSelected) {
    return is_entry_layer(t, args.layer, args.top_k);
  } else {
    return is_selected_layer(t, args.layer, args.top_k) &&
           is_half_selected(t, args.layer, args.half_selected_parents) == (Cfg::kKind == LayerKind::kHalfSelected);
  }
}

// And how many candidates it has there.
template <class Cfg>
__device__ __forceinline__ int candidates_of(Args const& args, std::int64_t t) {
  return Cfg::kKind == LayerKind::kEntry ? candidates_in_entry(t, args.layer)
                                    : candidates_in_selected(t, args.layer, args.top_k);
}

// LayerKind::kEntry: how many parents query `i` of the block takes.
template <class Cfg>
__device__ __forceinline__ int parents_of(Args const& args, QueryBlock const& block, int i) {
  std::int64_t const t = args.blocks.q_start + block.first + i;
  if (i >= kBlockQueries || block.first + i >= args.blocks.T_q || !works<Cfg>(args, t)) return 0;
  return (candidates_of<Cfg>(args, t) + kSiblings - 1) / kSiblings;
}

// Parents that the block streams: the last of its queries that walk has the most.
template <class Cfg>
__device__ __forceinline__ int stream_count(Args const& args) {
  if constexpr (Cfg::kSwapAB) {
    return args.union_count[block_of_warp<Cfg>(args, 0)];  // at the bottom there is no other way to walk below a entry layer
  } else if constexpr (Cfg::kIsSelected) {
    QueryBlock const block(args.blocks, block_index<Cfg>(args));
    // Queries of a way are neighbours, more than a block of them. One that has none may be here where a launch is of several
    // heads.
    std::int64_t const t = args.blocks.q_start + block.first;
    std::int64_t const last = args.blocks.q_start + min(block.first + kBlockQueries, args.blocks.T_q) - 1;
    return works<Cfg>(args, t) || works<Cfg>(args, last) ? args.union_count[block_index<Cfg>(args)] : 0;
  } else {
    int count = 0;
#pragma unroll 1
    for (int which = Cfg::kQueriesPerWarp - 1; which >= 0; --which) {
      int const index = block_of_warp<Cfg>(args, which * (Cfg::kConsumers / Cfg::kQueriesPerWarp));
      if (Cfg::kSharesWarp && index < 0) continue;
      QueryBlock const block(args.blocks, index);
#pragma unroll 1
      for (int i = kBlockQueries - 1; i >= 0 && count == 0; --i) count = parents_of<Cfg>(args, block, i);
    }
    return count;
  }
}

// Who takes a parent of a split query: its rotations begin and end with one consumer.
__device__ __forceinline__ int consumer_of(Args const& args, int rank) {
  return rank / args.restart_period % kBlockQueries;
}

// Which queries of the block, or of all of a CTA's, selected an entry of a list.
template <class Cfg>
__device__ __forceinline__ typename Cfg::Mask mask_of_entry(Args const& args, uint32_t entry) {
  using Stored = std::conditional_t<Cfg::kSwapAB, typename Cfg::Mask, std::uint16_t>;
  return static_cast<Stored const*>(args.union_masks)[entry];
}

// Entries of a block's list, 32 at a time: lane i holds entry i of them, and of the next ones, which are on their way.
template <class Cfg>
struct Listed {
  int node = 0;
  typename Cfg::Mask mask = 0;  // kEntry: 0, a query knows by itself how many parents it takes
  uint32_t list = 0;

  __device__ explicit Listed(Args const& args) {
    if constexpr (Cfg::kSwapAB) list = block_of_warp<Cfg>(args, 0) * static_cast<uint32_t>(kBlockQueries * args.top_k);
  }

  __device__ __forceinline__ void fetch(Args const& args, int count, int entry) {
    mask = 0;
    node = entry;
    if (Cfg::kIsSelected && entry < count) {
      if constexpr (!Cfg::kSwapAB) list = block_index<Cfg>(args) * static_cast<uint32_t>(kBlockQueries * args.top_k);
      uint32_t const at = ptx::opaque(list + static_cast<uint32_t>(entry));  // two addresses that move on are too many
      node = own<Cfg>(args).union_nodes[at];
      mask = mask_of_entry<Cfg>(args, at);
    }
    if (args.split) mask = entry < count ? 1u << consumer_of(args, entry) : 0u;
  }
};

// A warp that copies parents to their stages.
template <class Cfg>
__device__ void produce(Args const& args, Ring<Cfg> const& ring) {
  int const lane = threadIdx.x % 32;
  int const count = stream_count<Cfg>(args);
  char const* const packed = own<Cfg>(args).packed + some_block<Cfg>(args).bh * own<Cfg>(args).parents_per_head * args.block_bytes;
  RingPosition<Cfg::kStages> at;
#pragma unroll 1
  for (int kind = 0; kind < Cfg::kSweeps; ++kind) {
    Listed<Cfg> next(args);
    next.fetch(args, count, lane);
    for (int base = 0; base < count; base += 32) {
      char const* const from = packed + next.node * args.block_bytes;
      bool const exists = base + lane < count;
      next.fetch(args, count, base + 32 + lane);
#pragma unroll 1
      for (int group = 0; group < 32 / Cfg::kStageSlots && base + group * Cfg::kStageSlots < count; ++group) {
        int const slots = min(count - base - group * Cfg::kStageSlots, Cfg::kStageSlots);
        int const copies = (slots + Cfg::kCopySlots - 1) / Cfg::kCopySlots;  // a tile is whole in global memory
        int const slot = lane % Cfg::kStageSlots;
        ring.barriers.wait_empty(at, "htree_fwd producer: empty");
        uint32_t const full = ring.barriers.full_at(at.slot);
        __syncwarp();
        if (lane == 0) barriers::mbarrier_arrive_expect_bytes(full, copies * Cfg::kCopyBytes);
        __syncwarp();
        if (lane / Cfg::kStageSlots == group && exists && slot % Cfg::kCopySlots == 0) {
          ptx::bulk_load(ring.stage(at.slot) + slot / Cfg::kCopySlots * Cfg::kSlotBytes + Cfg::kScaleOffset, from,
                         Cfg::kCopyBytes, full);
        }
        at = at.ahead(1);
      }
    }
  }
}

// Another one that says who takes them, so that copies need not wait until that is known.
template <class Cfg>
__device__ void write_query_masks(Args const& args, Ring<Cfg> const& ring) {
  int const lane = threadIdx.x % 32;
  int const count = stream_count<Cfg>(args);

  // What rotates queries to the next rank is there with the first stage.
  if constexpr (Cfg::kSwapAB) {
    constexpr int kRow = Cfg::kK / 16;
    if (lane < 4 * kRow) {
      uint2 const rotate = __ldg(reinterpret_cast<uint2 const*>(own<Cfg>(args).packed_step_rotation) + lane);
      ptx::store_shared_8B(
          ring.stages - Cfg::kRingOffset + Cfg::kStepOffset + lane / kRow * Cfg::kStepBytes + lane % kRow * 8, rotate);
    }
  }

  // The word of consumer `lane` for a stage, `group` of the 32 entries at hand.
  int expected = 0;  // kHalfSelected: the parent without a gap
  auto const taken = [&](typename Cfg::Mask mask, int node, int group) {
    uint32_t word = 0;
    int shift = 0;
#pragma unroll
    for (int i = 0; i < Cfg::kStageSlots; ++i) {
      typename Cfg::Mask const query_masks = __shfl_sync(kFullWarp, mask, group * Cfg::kStageSlots + i);
      uint32_t const own = static_cast<uint32_t>(query_masks >> lane) & 1u;
      if constexpr (Cfg::kSwapAB) {
#pragma unroll
        for (int query = 0; query < Cfg::kQueriesPerWarp; ++query) {
          word |= (static_cast<uint32_t>(query_masks >> (Cfg::kQueriesPerWarp * lane % (8 * sizeof(query_masks)) + query)) & 1u)
                  << (Cfg::kQueryBits * query + i);
        }
      } else if constexpr (Cfg::kKind == LayerKind::kHalfSelected) {
        int const parent = __shfl_sync(kFullWarp, node, group * Cfg::kStageSlots + i);
        uint32_t const gap = args.split ? Cfg::kMaxGap : min(static_cast<uint32_t>(parent - expected), Cfg::kMaxGap);
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
  for (int kind = 0; kind < Cfg::kSweeps; ++kind) {
    expected = 0;
    uint32_t next_word = 0;
    Listed<Cfg> next(args);
    next.fetch(args, count, lane);
    for (int base = 0; base < count; base += 32) {
      int const node = next.node;
      typename Cfg::Mask const mask = next.mask;
      next.fetch(args, count, base + 32 + lane);
#pragma unroll 1
      for (int group = 0; group < 32 / Cfg::kStageSlots && base + group * Cfg::kStageSlots < count; ++group) {
        uint32_t const word = Cfg::kWritesNextMask && base + group > 0 ? next_word : taken(mask, node, group);
        if constexpr (Cfg::kWritesNextMask) {
          bool const last = group == 32 / Cfg::kStageSlots - 1;
          next_word = taken(last ? next.mask : mask, last ? next.node : node, last ? 0 : group + 1);
        }
        ring.barriers.wait_empty(at, "htree_fwd producer: empty");
        uint32_t const stage = ring.stage(at.slot);
        if (lane < Cfg::kConsumers) {
          ptx::store_shared_4B(ring.mask(stage, lane), word);
          if constexpr (Cfg::kWritesNextMask) ptx::store_shared_4B(ring.next_mask(stage, lane), next_word);
        }
        if (Cfg::kKind == LayerKind::kHalfSelected && lane / Cfg::kStageSlots == group) {
          ptx::store_shared_4B(ring.parent(stage, lane % Cfg::kStageSlots), node);
        }
        __syncwarp();
        if (lane == 0) barriers::mbarrier_arrive(ring.barriers.full_at(at.slot));
        at = at.ahead(1);
      }
    }
  }
}

}  // namespace htree_cuda::sm90::htree_fwd

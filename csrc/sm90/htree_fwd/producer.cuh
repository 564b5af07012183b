// Both ends of the ring: a warp that copies KV blocks, and a warp that writes query masks.
//
//   barrier        arrives                       waits           makes visible or frees
//   full[stage]    the copying warp, once, and   12 consumers    the stage's blocks; the query masks of selected layers and
//                  the bytes; the mask-writing                   of a split query; in attend passes of selected layers and
//                  warp, once                                    in half-selected ones also those of the stage behind it
//   empty[stage]   each consumer warp, once      both producers  the stage may be overwritten. Attend passes give a stage back
//                                                                after a later one has started (attend_{entry,selected}.cuh)
//   kQueryBarrier  the warps of a warpgroup      the same        entry layer: its queries, before the first product
//   kMergeBarrier  12 consumers                  the same        a split query, after the last stage of a sweep: the memory
//                                                                that it is merged in is free; maxima and sums; O
//
// Producers and consumers go through the same stages, in score passes twice. Consumers give back stages that hold
// nothing for them, so every phase is passed whatever the masks say, and the four warps of a warpgroup multiply
// together. What is computed for a query depends on that query alone, on its own ranks and its own maximum; the union
// decides only when a block passes by.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device/barriers.cuh"
#include "device/ptx.cuh"
#include "smem.cuh"
#include "tiles.cuh"

namespace htree_cuda::sm90::htree_fwd {

// Entries of a tile's union, 32 at a time: lane i holds entry i. The next 32 are on their way meanwhile.
template <class Cfg>
struct Listed {
  int node = 0;
  typename Cfg::Mask mask = 0;  // 0 in an entry layer, where a query knows by itself how many blocks it takes
  uint32_t list = 0;

  __device__ explicit Listed(Args const& args) {
    if constexpr (Cfg::kSwapAB) list = tile_of_warp<Cfg>(args, 0) * static_cast<uint32_t>(kQueryTile * args.top_k);
  }

  __device__ __forceinline__ void fetch(Args const& args, int count, int entry) {
    mask = 0;
    node = entry;
    if (Cfg::kIsSelected && entry < count) {
      if constexpr (!Cfg::kSwapAB) list = tile_index<Cfg>(args) * static_cast<uint32_t>(kQueryTile * args.top_k);
      uint32_t const at = ptx::opaque(list + static_cast<uint32_t>(entry));  // one address for both loads: registers
      node = own<Cfg>(args).union_nodes[at];
      mask = mask_of_entry<Cfg>(args, at);
    }
    if (args.split) mask = entry < count ? 1u << consumer_of(args, entry) : 0u;
  }
};

// Whether the last tile of a stream is copied without the blocks that the stream does not have. At the bottom of a packed
// call these may not have been packed (tree/pack): each sequence has tiles of its own, and of 4,096 sequences of 16
// tokens three blocks of four would be zeros.
template <class Cfg>
__device__ __forceinline__ bool copies_parts(Args const& args) {
  return Cfg::kKind == LayerKind::kEntry && Cfg::kReadsValues && args.tiles.entries != nullptr && args.layer == 0;
}

// Copies the first `slots` blocks of a tile, panel by panel. The others get values of zero, because their probabilities
// of zero multiply them; their keys may be anything, since their scores are masked.
template <class Cfg>
__device__ __forceinline__ void copy_part(uint32_t stage, char const* tile, int slots, uint32_t full) {
  constexpr int kPanelBlockBytes = Cfg::kPanelBytes / Cfg::kStageSlots;
  constexpr int kKeyPanels = Cfg::kK / 64;
  constexpr int kPanels = kKeyPanels + Cfg::kV / 64;
  static_assert(kPanels < 32 && Cfg::kValueOffset == Cfg::kKeyOffset + kKeyPanels * Cfg::kPanelBytes);
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int panel = kKeyPanels; panel < kPanels; ++panel) {
    uint32_t const end = stage + Cfg::kKeyOffset + (panel + 1) * Cfg::kPanelBytes;
    for (uint32_t at = end - (Cfg::kStageSlots - slots) * kPanelBlockBytes + lane * 16; at < end; at += 32 * 16) {
      ptx::store_shared_16B(at, {0u, 0u, 0u, 0u});
    }
  }
  ptx::fence_proxy_async_shared();
  __syncwarp();
  if (lane == 0) {
    barriers::mbarrier_arrive_expect_bytes(full, slots * (Cfg::kScaleBytes + kPanels * kPanelBlockBytes));
  }
  __syncwarp();
  if (lane < kPanels) {
    ptx::bulk_load(stage + Cfg::kKeyOffset + lane * Cfg::kPanelBytes,
                   tile + Cfg::kStageSlots * Cfg::kScaleBytes + lane * Cfg::kPanelBytes, slots * kPanelBlockBytes, full);
  } else if (lane == kPanels) {
    ptx::bulk_load(stage + Cfg::kScaleOffset, tile, slots * Cfg::kScaleBytes, full);
  }
}

// The warp that copies KV blocks to their stages.
template <class Cfg>
__device__ void produce(Args const& args, Ring<Cfg> const& ring) {
  int const lane = threadIdx.x % 32;
  int const count = stream_count<Cfg>(args);
  char const* const packed = packed_blocks<Cfg>(args);
  RingPosition<Cfg::kStages> at;
#pragma unroll 1
  for (int sweep = 0; sweep < Cfg::kSweeps; ++sweep) {
    Listed<Cfg> next(args);
    next.fetch(args, count, lane);
    for (int base = 0; base < count; base += 32) {
      char const* const from = packed + next.node * args.block_bytes;
      bool const exists = base + lane < count;
      next.fetch(args, count, base + 32 + lane);
#pragma unroll 1
      for (int part = 0; part < 32 / Cfg::kStageSlots && base + part * Cfg::kStageSlots < count; ++part) {
        int const slots = min(count - base - part * Cfg::kStageSlots, Cfg::kStageSlots);
        int const copies =
            (slots + Cfg::kCopySlots - 1) / Cfg::kCopySlots;  // global memory holds whole tiles of blocks
        int const slot = lane % Cfg::kStageSlots;
        ring.barriers.wait_empty(at, "htree_fwd producer: empty");
        uint32_t const full = ring.barriers.full_at(at.slot);
        if constexpr (Cfg::kKind == LayerKind::kEntry) {
          if (slots < Cfg::kStageSlots && copies_parts<Cfg>(args)) {
            copy_part<Cfg>(ring.stage(at.slot), packed + (base + part * Cfg::kStageSlots) * args.block_bytes, slots, full);
            return;  // nothing comes behind it
          }
        }
        __syncwarp();
        if (lane == 0) barriers::mbarrier_arrive_expect_bytes(full, copies * Cfg::kCopyBytes);
        __syncwarp();
        if (lane / Cfg::kStageSlots == part && exists && slot % Cfg::kCopySlots == 0) {
          ptx::bulk_load(ring.stage(at.slot) + slot / Cfg::kCopySlots * Cfg::kSlotBytes + Cfg::kScaleOffset, from,
                         Cfg::kCopyBytes, full);
        }
        at = at.ahead(1);
      }
    }
  }
}

// The warp that writes query masks. Copies do not wait for it.
template <class Cfg>
__device__ void write_query_masks(Args const& args, Ring<Cfg> const& ring) {
  int const lane = threadIdx.x % 32;
  int const count = stream_count<Cfg>(args);

  // The rotation to the next rank is visible with the first stage.
  if constexpr (Cfg::kSwapAB) {
    constexpr int kRow = Cfg::kK / 16;
    if (lane < 4 * kRow) {
      uint2 const rotation = __ldg(reinterpret_cast<uint2 const*>(own<Cfg>(args).packed_step_rotation) + lane);
      ptx::store_shared_8B(
          ring.stages - Cfg::kRingOffset + Cfg::kStepOffset + lane / kRow * Cfg::kStepBytes + lane % kRow * 8,
          rotation);
    }
  }

  // The query mask of consumer `lane` for a stage, which is `part` of the 32 entries at hand.
  int expected = 0;  // half-selected: the block that would leave no gap
  auto const taken = [&](typename Cfg::Mask mask, int node, int part) {
    uint32_t word = 0;
    int shift = 0;
#pragma unroll
    for (int i = 0; i < Cfg::kStageSlots; ++i) {
      typename Cfg::Mask const query_masks = __shfl_sync(kFullWarp, mask, part * Cfg::kStageSlots + i);
      uint32_t const own = static_cast<uint32_t>(query_masks >> lane) & 1u;
      if constexpr (Cfg::kSwapAB) {
#pragma unroll
        for (int query = 0; query < Cfg::kQueriesPerWarp; ++query) {
          word |=
              (static_cast<uint32_t>(query_masks >> (Cfg::kQueriesPerWarp * lane % (8 * sizeof(query_masks)) + query)) &
               1u)
              << (Cfg::kQueryBits * query + i);
        }
      } else if constexpr (Cfg::kKind == LayerKind::kHalfSelected) {
        int const block = __shfl_sync(kFullWarp, node, part * Cfg::kStageSlots + i);
        uint32_t const gap = args.split ? Cfg::kMaxGap : min(static_cast<uint32_t>(block - expected), Cfg::kMaxGap);
        word |= own * (Cfg::kTaken | gap << Cfg::kSlotBits | i) << shift;
        shift += 8 * own;
        expected = own != 0 ? block + 1 : expected;
      } else {
        word |= own << i;
      }
    }
    return word;
  };

  RingPosition<Cfg::kStages> at;
#pragma unroll 1
  for (int sweep = 0; sweep < Cfg::kSweeps; ++sweep) {
    expected = 0;
    uint32_t next_word = 0;
    Listed<Cfg> next(args);
    next.fetch(args, count, lane);
    for (int base = 0; base < count; base += 32) {
      int const node = next.node;
      typename Cfg::Mask const mask = next.mask;
      next.fetch(args, count, base + 32 + lane);
#pragma unroll 1
      for (int part = 0; part < 32 / Cfg::kStageSlots && base + part * Cfg::kStageSlots < count; ++part) {
        uint32_t const word = Cfg::kWritesNextMask && base + part > 0 ? next_word : taken(mask, node, part);
        if constexpr (Cfg::kWritesNextMask) {
          bool const last = part == 32 / Cfg::kStageSlots - 1;
          next_word = taken(last ? next.mask : mask, last ? next.node : node, last ? 0 : part + 1);
        }
        ring.barriers.wait_empty(at, "htree_fwd producer: empty");
        uint32_t const stage = ring.stage(at.slot);
        if (lane < Cfg::kConsumers) {
          ptx::store_shared_4B(ring.mask(stage, lane), word);
          if constexpr (Cfg::kWritesNextMask) ptx::store_shared_4B(ring.next_mask(stage, lane), next_word);
        }
        if (Cfg::kKind == LayerKind::kHalfSelected && lane / Cfg::kStageSlots == part) {
          ptx::store_shared_4B(ring.node(stage, lane % Cfg::kStageSlots), node);
        }
        __syncwarp();
        if (lane == 0) barriers::mbarrier_arrive(ring.barriers.full_at(at.slot));
        at = at.ahead(1);
      }
    }
  }
}

}  // namespace htree_cuda::sm90::htree_fwd

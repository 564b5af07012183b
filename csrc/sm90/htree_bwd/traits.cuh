// Data sheet of the five matrix kernels of the backward. A CTA has eight warps that multiply, of dq_gather 14 or 15.
//
//   kernel          multiplies with        a warp holds                 passes by, through shared memory
//   dq_entry        WGMMA, 64 x 64 tiles   a query, its 16 heads        tiles of four KV blocks, one ring
//   dkdv_entry      WGMMA, 64 x 64 tiles   a KV block, its 16 children  tiles of four queries, one ring
//   dq_selected     m16n8k16               a query, its 16 heads        KV blocks that any of eight neighbouring queries
//                                                                       visits, layer by layer, ascending, one ring
//   dq_gather       m16n8k16               2 or 4 queries, 16 heads     keys of KV blocks that any of 28 or 60 neighbouring
//                                                                       queries visits; for groups of at most 8, bf16
//   dkdv_selected   m16n8k16               a KV block, its 16 children  queries that visit the block, ascending, slots of
//                                                                       the warp's own
//
// In the entry layer all queries visit the same KV blocks, so that products are dense tiles. In selected layers every
// query visits blocks of its own, and one operand (16 rows of K and 16 of V) is one bulk copy.
//
//   kernel          in registers                       threads   registers                     at K = V = 128 of 227 KB
//   dq_entry        q, dq, scores, dP                  384       240 consumer, 24 producer     5 stages
//   dkdv_entry      dk, dv, scores, dP                 384       240 consumer, 24 producer     4 stages
//   dq_selected     q, dout, dq                        384       232 consumer, 40 producer     6 stages of 4 slots
//   dq_gather       dq                                 512 (480) 128                           8 stages of 4 slots
//   dkdv_selected   keys, dk, dv, half of the values   256       255                           2 slots of q, 3 of dO a warp;
//                                                                                            groups above 8: 3 of both
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/ptx.cuh"
#include "device/sm90.cuh"
#include "layout.h"
#include "sequences/layout.h"

namespace htree_cuda::sm90::htree_bwd {

// Shared address of a kernel's dynamic shared memory, rounded up to its alignment.
template <class Traits>
__device__ __forceinline__ uint32_t align_shared(char const* shared_memory) {
  uint32_t const base = ptx::shared_address(shared_memory);
  return (base + Traits::kAlignment - 1) / Traits::kAlignment * Traits::kAlignment;
}

// Registers of a thread that a launch of 384 threads grants: 65536 / 384, rounded down to a multiple of 8.
inline constexpr int kLaunchRegisters = 168;

// A slot of shared memory for one operand: an area that ends with the operand's header, then the rows. Rows begin at
// multiples of 256 bytes, so that one exclusive or makes a swizzled address.
template <int kK, int kV, int kRowsOffset_>
struct OperandSlot {
  static constexpr int kRowsOffset = kRowsOffset_;
  static constexpr int kKeyRowBytes = 2 * kK;
  static constexpr int kValueRowBytes = 2 * kV;
  static constexpr int kValueOffset = kRowsOffset + 16 * kKeyRowBytes;
  static constexpr int kBytes = kRowsOffset + static_cast<int>(operand_bytes(kK, kV));
  // Size of a KV block's copy and where it begins in a slot.
  static constexpr int kBlockBytes = kBlockHeader + static_cast<int>(operand_bytes(kK, kV));
  static constexpr int kBlockOffset = kRowsOffset - kBlockHeader;
  static_assert(kBlockBytes % 16 == 0 && kBytes % 256 == 0 && kBlockOffset >= 0);
};

template <class Element_, int kK_, int kV_>
struct DqSelectedTraits {
  using Element = Element_;  // __nv_bfloat16 or __half
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  using Slot = OperandSlot<kK, kV, 256>;

  // ---- threads and registers ----
  static constexpr int kConsumers = 8;  // warps; another warpgroup has one warp that produces
  static constexpr int kThreads = 384;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kProducerRegisters = 40;
  static_assert(kConsumers == kCtaQueries);
  static_assert(kConsumers % 4 == 0 && kConsumers * 32 + 128 == kThreads);
  static_assert(kConsumers * 32 * kConsumerRegisters + 128 * kProducerRegisters <= kThreads * kLaunchRegisters);

  // ---- shared memory ----
  // A stage is four slots, a note of what they hold, a full and an empty mbarrier.
  static constexpr int kStageSlots = 4;
  static constexpr int kStageBytes = kStageSlots * Slot::kBytes;
  static constexpr int kNoteBytes = 16 + 4 * kStageSlots;
  static constexpr int kControlBytes = 16 + kNoteBytes;
  static_assert(kConsumers == 8 && kStageSlots == 4, "a note has a byte of query mask for each slot, in one word");

  // The producer's list: entries that were found and not sent yet.
  static constexpr int kEntryBytes = 16;
  static constexpr int kFoundAtOnce = 32 * (kWordBlocks / 2);
  static constexpr int kListBytes = (kFoundAtOnce + kStageSlots) * kEntryBytes;
  // The rotation of a consumer's query at the KV block at hand.
  static constexpr int kRotationsBytes = 2 * kK;

  static constexpr int kAlignment = 1024;
  static constexpr int kFixedBytes = kAlignment + kListBytes + kConsumers * kRotationsBytes;
  static constexpr int kFit = (kMaxSharedBytes - kFixedBytes) / (kStageBytes + kControlBytes);
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kFixedBytes + kStages * (kStageBytes + kControlBytes);
  static_assert(kStages >= 3 && kSharedBytes <= kMaxSharedBytes);
};

// A warp multiplies with as many queries at a time as fill 16 rows: one, or two or four where groups are small.
template <class Element_, int kK_, int kV_, int kHeads_>
struct DkDvSelectedTraits {
  using Element = Element_;
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr int kHeads = kHeads_;  // rows of a query
  static constexpr int kQueries = kMaxGroupHeads / kHeads;
  static constexpr int kKeyRowBytes = 2 * kK;
  static constexpr int kValueRowBytes = 2 * kV;
  static constexpr int kBlockBytes = kBlockHeader + static_cast<int>(operand_bytes(kK, kV));
  // Whether dS is handed over to dq_gather. In fp16 its range would need scales.
  static constexpr bool kStoresDs = kQueries > 1 && std::is_same_v<Element, __nv_bfloat16>;

  // ---- threads and registers ----
  static constexpr int kConsumers = 8;  // warps, each with slots of its own; nobody else
  static constexpr int kThreads = kConsumers * 32;
  // Registers hold the first kHeldValues steps of 16 columns of the values: all of them, or as many as fit.
  static constexpr int kHeldValues = kK + kV < 256 ? kV / 16 : kQueries == 1 ? kV / 32 : kV / 128;

  // ---- shared memory ----
  // Rotations and rows of q, which a slot holds while its queries are at work, and rows of dO, which wait one visit
  // longer. The rows of a query of four heads begin 64 bytes further than those before end: the swizzle of four rows
  // takes half of the banks, and ldmatrix reads eight.
  static constexpr int kRotationsBytes = 2 * kK;
  static constexpr int kHeaderBytes = query_header(kHeads);
  static constexpr int kHeaderRoom = kHeads == 4 ? 64 : kHeads == 8 ? 128 : 256;
  static constexpr int kKeyStride = kHeaderRoom + kHeads * kKeyRowBytes;  // of a query
  static constexpr int kValueStride = kHeads * kValueRowBytes + (kHeads == 4 ? 64 : 0);
  static constexpr int kKeysBegin = kQueries * kRotationsBytes;
  static constexpr int kQuerySlotBytes = kKeysBegin + kQueries * kKeyStride;
  static constexpr int kDoutSlotBytes = kQueries * kValueStride;
  static_assert(kHeaderBytes <= kHeaderRoom && kHeaderBytes % 16 == 0);
  static_assert(kKeysBegin % 128 == 0 && kQuerySlotBytes % 128 == 0 && kDoutSlotBytes % 128 == 0);
  // Shared memory holds the last 128 bytes of the rows of values, or whole rows, in the swizzle of global memory.
  static constexpr int kSharedValues = kHeldValues == kV / 16 ? 0 : kHeldValues == kV / 32 ? 128 : kValueRowBytes;
  static constexpr int kValuesBytes = 16 * kSharedValues;

  // The next visits of the list, a ring of two halves.
  static constexpr int kListEntries = 64;
  static constexpr int kListBytes = 8 * kListEntries;
  static constexpr int kSlots = kK + kV == 256 ? 3 : 4;
  // One query has q and dO side by side, in one ring. More of them fit with slots of q that are free a visit earlier: a
  // power of two, at least kSlots - 1.
  static constexpr bool kOneRing = kQueries == 1;
  static constexpr bool kCopiesInBulk = kQueries == 1;  // or by lanes, 16 bytes at a time
  static constexpr int kQuerySlots = kOneRing ? kSlots : kSlots == 3 ? 2 : 4;
  static constexpr int kItemBytes = 32;
  static constexpr int kAlignment = 256;
  static constexpr int kControlBytes = kListBytes + kItemBytes + 8 * kQuerySlots + kBlockHeader;
  static constexpr int kWarpBytes =
      (kQuerySlots * kQuerySlotBytes + kSlots * kDoutSlotBytes + kValuesBytes + kControlBytes + 255) / 256 * 256;
  static constexpr int kSharedBytes = kAlignment + kConsumers * kWarpBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// A warp holds two or four queries, whose heads are 16 columns; keys pass by.
template <int kK_, int kV_, int kHeads_>
struct DqGatherTraits {
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kQueries = kMaxGroupHeads / kHeads;  // of a warp

  // ---- threads and registers ----
  static constexpr int kConsumers = gather_warps(kHeads);  // and one that produces
  static constexpr int kThreads = (kConsumers + 1) * 32;
  static constexpr int kRows = kConsumers * kQueries;  // of a CTA
  static_assert(kRows % 4 == 0 && kRows <= 64, "a query mask has 64 bits, filled by fours");

  // ---- shared memory ----
  static constexpr int kStageSlots = 4;
  static constexpr int kBlockBytes = kSiblings * 2 * kK;
  static constexpr int kStageBytes = kStageSlots * kBlockBytes;
  static constexpr int kNoteBytes = 48;  // query masks, and the layer
  static constexpr int kListBytes = (32 * (kWordBlocks / 2) + kStageSlots) * 16;
  // dS of two places a thread and tile of eight columns, in a ring of so many that threads fill for themselves.
  static constexpr int kDsSlots = 4;
  static constexpr int kDsBytes = kConsumers * 2 * kDsSlots * 32 * 16;
  static constexpr int kAlignment = 1024;
  static constexpr int kStages = 8;
  static constexpr int kSharedBytes =
      kAlignment + kStages * (kStageBytes + kNoteBytes + 16) + kListBytes + kDsBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// Roles of both kernels of entry layers: two warpgroups multiply, one warp of a third one copies.
struct EntryRoles {
  static constexpr int kConsumers = 8;  // warps
  static constexpr int kThreads = 384;
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kAlignment = 1024;  // of panels
  static_assert(kConsumers * 32 + 128 == kThreads);
  static_assert(kConsumers * 32 * kConsumerRegisters + 128 * kProducerRegisters <= kThreads * kLaunchRegisters);
};

// A warpgroup holds a tile of queries, a warp 16 rows of it, which are one query, or two or four: q, dq and what lies between the products in registers,
// dout in shared memory. A stage is the panels of a tile of KV blocks; headers have a place of their own, so that
// panels lie at multiples of 1024 bytes without gaps.
template <class Element_, int kK_, int kV_, int kHeads_>
struct DqEntryTraits {
  using Element = Element_;
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr int kHeads = kHeads_;  // rows of a query
  static constexpr int kQueries = kMaxGroupHeads / kHeads;  // of a warp
  using Roles = EntryRoles;
  static constexpr int kThreads = Roles::kThreads;
  static constexpr int kAlignment = Roles::kAlignment;

  static constexpr int kTiles = Roles::kConsumers / 4;  // a warpgroup a tile
  static constexpr int kRows = Roles::kConsumers * kQueries;
  static_assert(kTiles * tile_queries(kHeads) == kRows && kRowStep % kRows == 0);
  static constexpr int kPanelsBytes = static_cast<int>(panels_bytes(kK, kV));
  static constexpr int kKvTileBytes = static_cast<int>(kv_tile_bytes(kK, kV));
  static constexpr std::int64_t kQueryTileBytes = query_tile_bytes(kK, kV);
  static_assert(kPanelsBytes % 1024 == 0 && kQueryTileBytes % 16 == 0);

  static constexpr int kFixedBytes = kAlignment + kTiles * kPanelsBytes + 8;
  static constexpr int kStageBytes = kKvTileBytes + 16;  // with its full and empty mbarriers
  static constexpr int kFit = (kMaxSharedBytes - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kStages >= 3 && kSharedBytes <= kMaxSharedBytes);
};

// A warpgroup holds a tile of four KV blocks, a warp one of them. The area of a tile ends its first kilobyte with the
// header, so that one bulk copy brings header and panels.
template <class Element_, int kK_, int kV_, int kHeads_>
struct DkDvEntryTraits {
  using Element = Element_;
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr int kHeads = kHeads_;  // rows of a query
  static constexpr int kTileQueries = tile_queries(kHeads);
  using Roles = EntryRoles;
  static constexpr int kThreads = Roles::kThreads;
  static constexpr int kAlignment = Roles::kAlignment;

  static_assert(kItemTiles * kTileBlocks == Roles::kConsumers, "a warpgroup a tile, a warp a KV block");
  static constexpr int kKeyOffset = 1024;
  static constexpr int kValueOffset = kKeyOffset + kK / 64 * kPanelBytes;
  static constexpr int kAreaBytes = kValueOffset + kV / 64 * kPanelBytes;
  // Size of a KV tile's copy and where it begins in an area; the same of a query tile's.
  static constexpr int kBlockOffset = kKeyOffset - kKvTileHeader;
  static constexpr int kBlockBytes = kAreaBytes - kBlockOffset;
  static constexpr int kQueryOffset = kKeyOffset - kQueryTileHeader;
  static constexpr int kQueryBytes = kAreaBytes - kQueryOffset;
  static_assert(kBlockBytes == kv_tile_bytes(kK, kV) && kBlockBytes % 16 == 0 && kQueryBytes % 16 == 0);

  // Full and empty mbarriers of the work item; its head and number; the item.
  static constexpr int kItemBytes = 8 + 8 + 16 + static_cast<int>(sizeof(sequences::EntryWork));
  static constexpr int kFixedBytes = kAlignment + kItemTiles * kAreaBytes + kItemBytes;
  static constexpr int kFit = (kMaxSharedBytes - kFixedBytes) / (kAreaBytes + 16);
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kFixedBytes + kStages * (kAreaBytes + 16);
  static_assert(kStages >= 3 && kSharedBytes <= kMaxSharedBytes);
};

}  // namespace htree_cuda::sm90::htree_bwd

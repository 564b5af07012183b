// Data sheet of the four matrix kernels of the backward. A CTA has eight warps that multiply.
//
//   kernel          multiplies with        a warp holds                 passes by, through shared memory
//   dq_entry        WGMMA, 64 x 64 tiles   a query, its 16 heads        tiles of four KV blocks, one ring
//   dkdv_entry      WGMMA, 64 x 64 tiles   a KV block, its 16 children  tiles of four queries, one ring
//   dq_selected     m16n8k16               a query, its 16 heads        KV blocks that any of eight neighbouring queries
//                                                                       visits, layer by layer, ascending, one ring
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
//   dkdv_selected   keys, dk, dv, half of the values   256       255                           3 slots a warp
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/ptx.cuh"
#include "device/sm90.cuh"
#include "layout.h"

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
  // Size of a KV block's copy and where it begins in a slot; the same of a query's.
  static constexpr int kBlockBytes = kBlockHeader + static_cast<int>(operand_bytes(kK, kV));
  static constexpr int kBlockOffset = kRowsOffset - kBlockHeader;
  static constexpr int kQueryBytes = kQueryHeader + static_cast<int>(operand_bytes(kK, kV));
  static constexpr int kQueryOffset = kRowsOffset - kQueryHeader;
  static_assert(kBlockBytes % 16 == 0 && kQueryBytes % 16 == 0 && kBytes % 256 == 0 && kQueryOffset >= 0);
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
  static constexpr int kFoundAtOnce = 32 * kWordBlocks;
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

template <class Element_, int kK_, int kV_>
struct DkDvSelectedTraits {
  using Element = Element_;
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  using Slot = OperandSlot<kK, kV, 512>;  // a slot begins with the rotation of its query at the KV block

  // ---- threads and registers ----
  static constexpr int kConsumers = 8;  // warps, each with slots of its own; nobody else
  static constexpr int kThreads = kConsumers * 32;
  // Registers hold the first kHeldValues steps of 16 columns of the values: all of them, or the half that fits.
  static constexpr int kHeldValues = kK + kV == 256 ? kV / 32 : kV / 16;

  // ---- shared memory ----
  static constexpr int kRotationsBytes = 2 * kK;
  static_assert(kRotationsBytes <= Slot::kQueryOffset);
  static constexpr int kValuesBytes = 16 * (Slot::kValueRowBytes - 32 * kHeldValues);
  static_assert(kValuesBytes == 0 || kValuesBytes == 16 * 128);

  // The list of visits, two words each: the row; the position in the upper half and the masked children in the lower.
  static constexpr int kListEntries = 64;
  static constexpr int kListBytes = 8 * kListEntries;
  static constexpr int kSlots = kK + kV == 256 ? 3 : 4;
  static constexpr int kProgressBytes = 32;
  static constexpr int kAlignment = 256;
  static constexpr int kControlBytes = kListBytes + kProgressBytes + 8 * kSlots + kBlockHeader;
  static constexpr int kWarpBytes = (kSlots * Slot::kBytes + kValuesBytes + kControlBytes + 255) / 256 * 256;
  static constexpr int kSharedBytes = kAlignment + kConsumers * kWarpBytes;
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

// A warpgroup holds a tile of four queries, a warp one of them: q, dq and what lies between the products in registers,
// dout in shared memory. A stage is the panels of a tile of KV blocks; headers have a place of their own, so that
// panels lie at multiples of 1024 bytes without gaps.
template <class Element_, int kK_, int kV_>
struct DqEntryTraits {
  using Element = Element_;
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  using Roles = EntryRoles;
  static constexpr int kThreads = Roles::kThreads;
  static constexpr int kAlignment = Roles::kAlignment;

  static constexpr int kTiles = Roles::kConsumers / kTileQueries;
  static_assert(Roles::kConsumers == kCtaQueries && kTileQueries == 4, "a warpgroup a tile, a warp a query");
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
template <class Element_, int kK_, int kV_>
struct DkDvEntryTraits {
  using Element = Element_;
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
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

  static constexpr int kItemBytes = 8 + 8 + 16;  // full and empty mbarriers of the work item, its number
  static constexpr int kFixedBytes = kAlignment + kItemTiles * kAreaBytes + kItemBytes;
  static constexpr int kFit = (kMaxSharedBytes - kFixedBytes) / (kAreaBytes + 16);
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kFixedBytes + kStages * (kAreaBytes + 16);
  static_assert(kStages >= 3 && kSharedBytes <= kMaxSharedBytes);
};

}  // namespace htree_cuda::sm90::htree_bwd

// Data sheet of the forward kernels: one layer of htree attention and one pass, for queries of one layer kind (args.h).
//
//   CTA            12 consumer warps (3 warpgroups) and a warpgroup with two producer warps, of which one copies KV
//                  blocks and one writes query masks. A consumer warp serves one query, or two or four neighbours of
//                  the same (b, h_kv)
//   products       Entry layer: WGMMA, the queries of a warpgroup against the four KV blocks of a stage. Selected
//                  layer: mma.sync, one block at a time, heads are rows and children columns; where queries share a
//                  warp (kSwapAB) children are rows. P of a block that a query does not take is zero
//   slot           one KV block: 16 keys (fp16, rotated by node index or place), their scales, 16 values, as tree/pack
//                  laid them out
//   stage          four slots, or eight in score passes of selected layers, with query masks, a full and an empty
//                  mbarrier. Entry layer: one tile of tree/pack, whose keys and values are panels of 64 rows for WGMMA,
//                  by one bulk copy. Selected layer: one bulk copy for each slot
//   order          The producer streams the union of a tile's blocks, ascending. A consumer takes the blocks that its
//                  query selected and counts their rank j; the rank gives the RoPE position n - 1 - 16 j of a selected
//                  layer
//   one query      A call with one query has one tile a head, which the consumers of a CTA split: each takes
//                  `restart_period` ranks at a time, with a running state of its own; the states are merged at the end
//                  of a sweep
//   registers      160 for a consumer thread, 32 for a producer thread: 3 * 128 * 160 + 128 * 32 = 65536
//   shared memory  227 KB. Attend passes keep the queries there, as WGMMA reads them or, in selected layers, unrotated
//                  together with the rotations from which they restart; the rest are stages. At K = V = 128 the ring
//                  holds 20 blocks in attend passes and 48 in score passes
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/sm90.cuh"
#include "args.h"

namespace htree_cuda::sm90::htree_fwd {

template <class Element_, int kK_, int kV_, Pass kPass_, LayerKind kKind_, int kQueriesPerWarp_ = 1>
struct Traits {
  using Element = Element_;  // the dtype of values: __nv_bfloat16 or __half; void where none are read
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr Pass kPass = kPass_;
  static constexpr LayerKind kKind = kKind_;
  // One, or two or four neighbours. A CTA then has as many tiles of 12 queries, and each tile a part of the warps.
  static constexpr int kQueriesPerWarp = kQueriesPerWarp_;
  static constexpr bool kSharesWarp = kQueriesPerWarp > 1;
  static constexpr bool kIsSelected = kKind != LayerKind::kEntry;
  static constexpr bool kReadsValues = kPass == Pass::kAttend;
  // Children are the rows of products and heads their columns, so that queries share what a warp reads of a block
  // (swapab.cuh).
  static constexpr bool kSwapAB = kSharesWarp && kIsSelected;
  static_assert(kQueriesPerWarp == 1 || kKind != LayerKind::kHalfSelected);
  static_assert(kQueriesPerWarp == 1 || kQueriesPerWarp == 2 || kQueriesPerWarp == 4);
  using Mask =
      std::conditional_t<kQueriesPerWarp == 4, std::uint64_t, std::uint32_t>;  // a bit for each query of the CTA
  static constexpr int kSweeps = kPass == Pass::kScore ? 2 : 1;

  static constexpr int kConsumers = kQueryTile;
  static constexpr int kThreads = 512;
  static constexpr int kConsumerRegisters = 160;
  static constexpr int kProducerRegisters = 32;
  static_assert(kConsumers % 4 == 0 && kConsumers * 32 + 128 == kThreads);
  static_assert(kConsumers * 32 * kConsumerRegisters + 128 * kProducerRegisters <= 65536);

  // In score passes of selected layers a query takes few of a stage's blocks where neighbours differ: larger stages
  // mean fewer waits.
  static constexpr int kStageSlots = kKind == LayerKind::kSelected && kPass == Pass::kScore ? 8 : 4;
  static constexpr int kScaleBytes = kSiblings * 4;
  static constexpr int kKeyRowBytes = 2 * kK;
  static constexpr int kKeyBytes = kSiblings * kKeyRowBytes;
  static constexpr int kValueRowBytes = 2 * kV;
  static constexpr int kValueBytes = kReadsValues ? kSiblings * kValueRowBytes : 0;
  // Slots that one bulk copy fills. WGMMA wants panels at multiples of 1024 bytes.
  static constexpr int kCopySlots = kKind == LayerKind::kEntry ? kTileBlocks : 1;
  static constexpr int kCopyBytes = kCopySlots * (kScaleBytes + kKeyBytes + kValueBytes);
  static constexpr int kKeyOffset = kKind == LayerKind::kEntry ? 1024 : 256;
  static constexpr int kPanelBytes = kCopySlots * kSiblings * 128;  // used in entry layers
  static constexpr int kScaleOffset = kKeyOffset - kCopySlots * kScaleBytes;
  static constexpr int kValueOffset = kKeyOffset + kCopySlots * kKeyBytes;
  static constexpr int kSlotBytes = kKeyOffset + kCopySlots * (kKeyBytes + kValueBytes);  // of the slots of one copy
  static constexpr int kStageBytes = kStageSlots / kCopySlots * kSlotBytes;
  static_assert(kStageSlots % kCopySlots == 0 && kKeyOffset >= kCopySlots * kScaleBytes);
  static_assert(kK % 64 == 0 && kV % 64 == 0, "rows are panels of eight 16-byte chunks");
  static_assert(kKeyOffset % 128 == 0, "lines are those of global memory");
  static_assert(kCopyBytes % 16 == 0 && kSlotBytes % (kKind == LayerKind::kEntry ? 1024 : 256) == 0);

  // A stage starts with its barriers, full and empty, and a query mask for each consumer. Bit i of a query mask says
  // that the query takes slot i; with kSwapAB bit 8 query + i. The room before the scales holds them, so one address
  // serves the whole stage.
  static constexpr int kFullOffset = 0;
  static constexpr int kEmptyOffset = 8;
  static constexpr int kMaskOffset = 16;
  static constexpr int kQueryBits = 8;  // bits of a query in a mask of kSwapAB
  static_assert(!kSwapAB || kStageSlots <= kQueryBits);
  // A stage also holds the masks of the stage behind it, so that a consumer knows them before it waits for that stage.
  static constexpr bool kWritesNextMask = kIsSelected && (kReadsValues || kKind == LayerKind::kHalfSelected);
  static constexpr int kNextMaskOffset = kMaskOffset + 4 * kConsumers;
  // In half-selected layers a mask has a byte for each slot that the query takes, from the lowest up: the slot, above
  // it how many blocks the query left out since the one before, and kTaken. Where the gap is kMaxGap or more the
  // block's index tells it.
  static constexpr int kSlotBits = 2;
  static constexpr uint32_t kSlotMask = (1u << kSlotBits) - 1;
  static constexpr uint32_t kMaxGap = 31;
  static constexpr uint32_t kGapMask = kMaxGap << kSlotBits;
  static constexpr uint32_t kTaken = 128;
  static constexpr uint32_t kWholeStage =
      0x03020100u + 0x01010101u * kTaken;  // every slot, with no gap between two of them
  static_assert(kKind != LayerKind::kHalfSelected || (kStageSlots == 4 && kSlotMask + kGapMask < kTaken));
  static constexpr int kNodeOffset = kNextMaskOffset + 4 * kConsumers;
  static_assert(kNodeOffset + 4 * kStageSlots <= kScaleOffset);
  // Attend passes and kSwapAB keep their queries in shared memory. Entry layer: the rotated queries, for each warpgroup panels of
  // 64 rows. Selected layer: the unrotated queries in fragments, behind them for each query the rotations from which it
  // restarts, and zeros, which three quarters of the lanes have of such a rotation matrix.
  static constexpr int kQueryPanelBytes = 64 * 128;
  static constexpr int kQueryBytes = kReadsValues || kSwapAB ? kK / 64 * kQueryPanelBytes : 0;
  static constexpr int kColumnBytes = 2 * kK / 4;
  static constexpr int kColumnsBytes = 8 * kColumnBytes;
  static constexpr int kZerosOffset = kColumnsBytes + 16;  // in other banks than the columns that are read with them
  // kSwapAB keeps PackedRotations for each query, and behind those of all consumers the rotation to the next rank.
  static constexpr int kPackedBytes = 2 * kK;
  static constexpr int kStepBytes = kPackedBytes / 4 + 16;  // for lanes that share a row; each row in other banks
  // With four queries a warp in an entry layer's attend pass, expanded candidates, cursors and maxima have no
  // registers: shared memory keeps them.
  static constexpr bool kKeeps = kKind == LayerKind::kEntry && kReadsValues && kQueriesPerWarp == 4;
  static constexpr int kKeptBytes = kKeeps ? 512 : 0;
  static_assert(kKeptBytes % 64 == 0);  // the address tells the two halves of a warp apart
  static constexpr int kRotationBytes =
      kKind == LayerKind::kEntry ? kKeptBytes : (kSwapAB ? kQueriesPerWarp * kPackedBytes : kColumnsBytes + 128);
  static_assert(kColumnBytes <= 64 && kColumnsBytes % 16 == 0 && kColumnsBytes / 16 <= 32, "a copy of 16 bytes a lane");
  static_assert(kPackedBytes / 16 <= 32, "a copy of 16 bytes a lane");
  static constexpr int kRotationOffset = kConsumers / 4 * kQueryBytes;
  static constexpr int kStepOffset = kRotationOffset + kConsumers * kRotationBytes;  // kSwapAB
  // A split query is merged by 16 bytes for every consumer and head. Between two sweeps the ring is in use, so they
  // have room of their own.
  static constexpr int kMergeHeadBytes = kConsumers * 16 * 16;
  static constexpr int kRingOffset = kStepOffset + (kSwapAB ? 512 : 0) + (kSweeps - 1) * kMergeHeadBytes;
  static_assert(4 * kStepBytes <= 512);
  static constexpr int kAlignment = 1024;
  static constexpr int kFit = (kMaxSharedBytes - kAlignment - kRingOffset) / kStageBytes;
  static constexpr int kStages = kFit < 12 ? kFit : 12;
  static constexpr int kSharedBytes = kAlignment + kRingOffset + kStages * kStageBytes;
  static_assert(kStages >= 3 && kSharedBytes <= kMaxSharedBytes);
  static_assert(kRingOffset % (kKind == LayerKind::kEntry ? 1024 : 256) == 0);

  // At the end of an attend pass a split query is merged in the ring, around the barriers: heads in the first stage,
  // and O as fragments, the same number of consumers in each stage.
  static constexpr int kMergeHeadOffset = kSweeps > 1 ? -kMergeHeadBytes : 1024;
  static constexpr int kMergeOutOffset = 1024 + kMergeHeadBytes;
  static constexpr int kMergeOutBytes = (kV / 8) * 32 * 16;
  static constexpr int kMergePerStage = (kStageBytes - kMergeOutOffset) / kMergeOutBytes;
  static_assert(kNextMaskOffset + 4 * kConsumers <= 1024 && kMergeOutOffset <= kStageBytes);
  static_assert(!kReadsValues || kStages * kMergePerStage >= kConsumers);
  static constexpr int kMergeBarrier = 1;
  static constexpr int kQueryBarrier = 2;  // of the first warpgroup; the next ones follow

  // The 16 rows of a warp are two units of 8 rows, each of one query or two.
  static constexpr bool kHalfSelected = kKind == LayerKind::kHalfSelected;
  static constexpr int kSteps = kK / 16;      // k-steps of QK
  static constexpr int kHalfSteps = kK / 32;  // k-steps that hold first elements of RoPE pairs, in the order of memory
  static constexpr int kValueTiles = kReadsValues ? kV / 8 : 1;
  static constexpr int kPerUnit = kSharesWarp ? kQueriesPerWarp / 2 : 1;  // queries in 8 rows
  // Heads of a query in a unit, and in the state between layers where queries share a warp.
  static constexpr int kUnitHeads = 8 / kPerUnit;
  static constexpr int kOwnLanes = 32 / kPerUnit;    // lanes that have rows of the same queries
  static constexpr int kRows = kSharesWarp ? 2 : 1;  // rows of a thread that may belong to different queries
  // In an entry layer blocks pass by all queries alike, and rows differ in their first position alone: two numbers of
  // 16 bits.
  static constexpr bool kPacksPositions = kSharesWarp && !kIsSelected;
  // Entry layer: 32-bit words of a stage of four blocks, and how many stages' expanded candidates a warp reads at once.
  static constexpr int kMaskWords = kTileBlocks / 2;
  static constexpr int kStagesFetched = kOwnLanes / kMaskWords;
  // kSwapAB: the bits of one slot in a query mask, those of a unit side by side.
  static constexpr uint32_t kOfSlot = kQueriesPerWarp == 4 ? 0x01010101u : 0x0101u;
  // fp16 queries restart at every rank (dispatch.h). The score passes serve both dtypes.
  static constexpr bool kRestartsAlways = std::is_same_v<Element, __half>;
  static constexpr int kUnitBits = kQueryBits * kPerUnit;
  static constexpr uint32_t kOfUnit = (1u << kUnitBits) - 1;
  static constexpr int kValueTileRows = kV / 16;
  // The attend pass of a selected layer reads values a round late and keeps the stage of the block that waits while
  // others pass by. After kPatience stages without a block of its query it finishes the block that waits alone: the
  // producer cannot fill a kept stage, and no consumer may wait for a stage that it keeps itself.
  static constexpr int kPatience = kStages / 2;
  static_assert(kPatience >= 1 && kPatience + 2 <= kStages);
};

}  // namespace htree_cuda::sm90::htree_fwd

// Data sheet of the layer kernel: one layer of htree attention and one pass, which walks its candidates once for the values
// and twice for the score pass, for the queries whose entry layer it is (`LayerKind::kEntry`) or for those which chose its parents in
// the layer above (`LayerKind::kSelected`, and where at least half of the parents are chosen `LayerKind::kHalfSelected`, of which all holds that
// is said of kSelected but for rotates).
//
//   CTA           12 consumer warps (3 warpgroups), one query each, in kEntry and at the bottom (bf16) two with 8 heads and fewer,
//                 four with 4 and fewer: consecutive queries of one (b, h_kv);
//                 in a fourth warpgroup a producer warp and one that names who takes what it sends; the others idle
//   products      kSelected: mma.sync, a parent at a time, a query's heads are rows and the children columns; where several queries
//                 share a warp there (kSwapAB) the other way round. kEntry: WGMMA, a warpgroup its four queries, or eight or
//                 sixteen, against the four parents of a stage. P of parents that a query does not take is zero
//   slot          one parent: 16 keys (fp16, rotated by their node or place), their scales, 16 values, as tree/pack
//                 laid them out in global memory; kSelected: one bulk copy
//   stage         four slots, in score passes of kSelected eight, and their query masks, one full and one empty mbarrier; kEntry: one
//                 tile of tree_pack, whose keys and values are panels of 64 rows for WGMMA; one bulk copy
//   order         the producer streams the union of the block's parents, ascending; a consumer takes those it selected
//                 and counts its own rank j; in a selected layer that gives the RoPE position n - 1 - 16 j
//   one query     a call with a single query has one block of it a head, and splits it: the consumers take turns, a
//                 `restart_period` of ranks each, with running states of their own, which are merged at the end of a walk
//   registers     160 a consumer thread, 32 a producer thread: 3 * 128 * 160 + 128 * 32 = 65536
//   shared memory 227 KB: in attend passes the queries, kEntry: as WGMMA reads them; kSelected: also the rotations from which
//                 queries restart; else as many stages as fit. At K = V = 128 these have 20 parents in attend passes and
//                 48 in others
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/sm90.cuh"
#include "namespaces.h"
#include "tree/geometry.cuh"
#include "tree/pack.h"
#include "tree/rope.cuh"
#include "tree/row_scale.cuh"

namespace htree_cuda::sm90::htree_fwd {

using namespace host;
using namespace device;
using namespace tree;

// The two passes over a layer. A selecting layer takes both, the bottom one the second alone.
enum class Pass {
  kScore,  // what the selection needs: a block walks its parents twice, see Sweep
  kAttend,  // softmax over the leaves, onto the running state
};

// Of the two walks of Pass::kScore.
enum class Sweep {
  kLse,  // lse_g over the candidates
  kImportance,  // imp[p] = sum_g exp(s - lse_g)
};

enum class LayerKind {
  kEntry,  // every parent up to the query's own; keys rotated by their node, the query by n - 1
  kSelected,  // selected parents; keys rotated by their place, the query by n - 1 - 16 j
  // Selected parents where they are half of all that there are or more: keys rotated by their node, the query by n - 1 and 16
  // for each parent that it left out.
  kHalfSelected,
};

inline constexpr int kTwoQueryHeads = 8;  // at most, where two queries share the 16 rows of a warp

template <class Element_, int kK_, int kV_, Pass kPass_, LayerKind kKind_, int kQueriesPerWarp_ = 1>
struct Config {
  using Element = Element_;  // of values: __nv_bfloat16 or __half; void where none are read
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr Pass kPass = kPass_;
  static constexpr LayerKind kKind = kKind_;
  // Of a warp: one, or two or four neighbours. A CTA has as many blocks of queries, a part of the warps each. kEntry: the 16 rows
  // of a warp hold the heads of all.
  static constexpr int kQueriesPerWarp = kQueriesPerWarp_;
  static constexpr bool kSharesWarp = kQueriesPerWarp > 1;
  using TwoQueries = Config<Element_, kK_, kV_, kPass_, kKind_, 2>;
  using FourQueries = Config<Element_, kK_, kV_, kPass_, kKind_, 4>;
  static constexpr bool kIsSelected = kKind != LayerKind::kEntry;
  static constexpr bool kReadsValues = kPass == Pass::kAttend;
  // Children are the rows of products and the heads of queries their columns, so that queries share what is read of a parent. See
  // below_shared.cuh.
  static constexpr bool kSwapAB = kSharesWarp && kIsSelected;
  static_assert(kQueriesPerWarp == 1 || kKind == LayerKind::kEntry || (kKind == LayerKind::kSelected && kReadsValues));
  static_assert(kQueriesPerWarp == 1 || kQueriesPerWarp == 2 || kQueriesPerWarp == 4);
  using Mask = std::conditional_t<kQueriesPerWarp == 4, std::uint64_t, std::uint32_t>;  // a bit for each query of a CTA
  static constexpr int kSweeps = kPass == Pass::kScore ? 2 : 1;

  static constexpr int kConsumers = kBlockQueries;
  static constexpr int kThreads = 512;
  static constexpr int kConsumerRegisters = 160;
  static constexpr int kProducerRegisters = 32;
  static_assert(kConsumers % 4 == 0 && kConsumers * 32 + 128 == kThreads);
  static_assert(kConsumers * 32 * kConsumerRegisters + 128 * kProducerRegisters <= 65536);

  // Score passes below take few of a stage's parents each, where neighbours differ.
  static constexpr int kStageSlots = kKind == LayerKind::kSelected && kPass == Pass::kScore ? 8 : 4;
  static constexpr int kScaleBytes = kSiblings * 4;
  static constexpr int kKeyRowBytes = 2 * kK;
  static constexpr int kKeyBytes = kSiblings * kKeyRowBytes;
  static constexpr int kValueRowBytes = 2 * kV;
  static constexpr int kValueBytes = kReadsValues ? kSiblings * kValueRowBytes : 0;
  // Slots that are copied at once. Panels begin at multiples of 1024 bytes.
  static constexpr int kCopySlots = kKind == LayerKind::kEntry ? kTileParents : 1;
  static constexpr int kCopyBytes = kCopySlots * (kScaleBytes + kKeyBytes + kValueBytes);
  static constexpr int kKeyOffset = kKind == LayerKind::kEntry ? 1024 : 256;
  static constexpr int kPanelBytes = kCopySlots * kSiblings * 128;  // kEntry
  static constexpr int kScaleOffset = kKeyOffset - kCopySlots * kScaleBytes;
  static constexpr int kValueOffset = kKeyOffset + kCopySlots * kKeyBytes;
  static constexpr int kSlotBytes = kKeyOffset + kCopySlots * (kKeyBytes + kValueBytes);  // of slots copied at once
  static constexpr int kStageBytes = kStageSlots / kCopySlots * kSlotBytes;
  static_assert(kStageSlots % kCopySlots == 0 && kKeyOffset >= kCopySlots * kScaleBytes);
  static_assert(kK % 64 == 0 && kV % 64 == 0, "rows are panels of eight 16-byte chunks");
  static_assert(kKeyOffset % 128 == 0, "lines are those of global memory");
  static_assert(kCopyBytes % 16 == 0 && kSlotBytes % (kKind == LayerKind::kEntry ? 1024 : 256) == 0);

  // A stage begins with its barriers, full and empty, and a word a consumer, bit i: its query takes slot i, kSwapAB: bit
  // 8 query + i. There is room before the scales, and one address serves all.
  static constexpr int kFullOffset = 0;
  static constexpr int kEmptyOffset = 8;
  static constexpr int kMaskOffset = 16;
  static constexpr int kQueryBits = 8;  // kSwapAB
  static_assert(!kSwapAB || kStageSlots <= kQueryBits);
  // Values, kSelected, and kHalfSelected: such words of the stage behind it too, so that nobody waits for them there.
  static constexpr bool kWritesNextMask = kIsSelected && (kReadsValues || kKind == LayerKind::kHalfSelected);
  static constexpr int kNextMaskOffset = kMaskOffset + 4 * kConsumers;
  // kHalfSelected: instead of bits such a word has a byte for each slot that the query takes, from the lowest: kTaken, the slot, and
  // above it how many parents more it has left out there; kMaxGap: the parents say how many.
  static constexpr int kSlotBits = 2;
  static constexpr uint32_t kSlotMask = (1u << kSlotBits) - 1;
  static constexpr uint32_t kMaxGap = 31;
  static constexpr uint32_t kGapMask = kMaxGap << kSlotBits;
  static constexpr uint32_t kTaken = 128;
  static_assert(kKind != LayerKind::kHalfSelected || (kStageSlots == 4 && kSlotMask + kGapMask < kTaken));
  static constexpr int kParentOffset = kNextMaskOffset + 4 * kConsumers;
  static_assert(kParentOffset + 4 * kStageSlots <= kScaleOffset);
  // Values: kEntry: the rotated queries, for each warpgroup panels of 64 rows, the heads of all its queries; kSelected: each
  // query as it is, in fragments. kSelected: then the rotations from which it restarts, for each, and zeros: what three
  // quarters of the lanes have of such a matrix.
  static constexpr int kQueryPanelBytes = 64 * 128;
  static constexpr int kQueryBytes = kReadsValues ? kK / 64 * kQueryPanelBytes : 0;
  static constexpr int kColumnBytes = 2 * kK / 4;
  static constexpr int kColumnsBytes = 8 * kColumnBytes;
  static constexpr int kZerosOffset = kColumnsBytes + 16;  // in other banks than the columns that are read at once
  // kSwapAB: PackedRotations instead, of each query; behind those of all consumers what rotates to the next rank.
  static constexpr int kPackedBytes = 2 * kK;
  static constexpr int kStepBytes = kPackedBytes / 4 + 16;  // of lanes that share a row; in other banks than those of others
  // kEntry, values, four queries a warp: what has no registers there, candidates that are no leaves, cursors and maxima.
  static constexpr bool kKeeps = kKind == LayerKind::kEntry && kReadsValues && kQueriesPerWarp == 4;
  static constexpr int kKeptBytes = kKeeps ? 512 : 0;
  static_assert(kKeptBytes % 64 == 0);  // the expanded ones of two halves of a warp are told apart by address
  static constexpr int kRotationBytes =
      kKind == LayerKind::kEntry ? kKeptBytes : (kSwapAB ? kQueriesPerWarp * kPackedBytes : kColumnsBytes + 128);
  static_assert(kColumnBytes <= 64 && kColumnsBytes % 16 == 0 && kColumnsBytes / 16 <= 32, "a copy of 16 bytes a lane");
  static_assert(kPackedBytes / 16 <= 32, "a copy of 16 bytes a lane");
  static constexpr int kRotationOffset = kConsumers / 4 * kQueryBytes;
  static constexpr int kStepOffset = kRotationOffset + kConsumers * kRotationBytes;  // kSwapAB
  // Where a query is split: 16 bytes for every consumer and head. Between two walks the ring is not free for them.
  static constexpr int kMergeHeadBytes = kConsumers * 16 * 16;
  static constexpr int kRingOffset = kStepOffset + (kSwapAB ? 512 : 0) + (kSweeps - 1) * kMergeHeadBytes;
  static_assert(4 * kStepBytes <= 512);
  static constexpr int kAlignment = 1024;
  static constexpr int kFit = (kMaxSharedBytes - kAlignment - kRingOffset) / kStageBytes;
  static constexpr int kStages = kFit < 12 ? kFit : 12;
  static constexpr int kSharedBytes = kAlignment + kRingOffset + kStages * kStageBytes;
  static_assert(kStages >= 3 && kSharedBytes <= kMaxSharedBytes);
  static_assert(kRingOffset % (kKind == LayerKind::kEntry ? 1024 : 256) == 0);

  // Where a query is split, the ring is reused in the end, but for the barriers in it: the heads are in the first stage, and O
  // as fragments, the same number of consumers a stage.
  static constexpr int kMergeHeadOffset = kSweeps > 1 ? -kMergeHeadBytes : 1024;
  static constexpr int kMergeOutOffset = 1024 + kMergeHeadBytes;
  static constexpr int kMergeOutBytes = (kV / 8) * 32 * 16;
  static constexpr int kMergePerStage = (kStageBytes - kMergeOutOffset) / kMergeOutBytes;
  static_assert(kNextMaskOffset + 4 * kConsumers <= 1024 && kMergeOutOffset <= kStageBytes);
  static_assert(!kReadsValues || kStages * kMergePerStage >= kConsumers);
  static constexpr int kMergeBarrier = 1;
  static constexpr int kQueryBarrier = 2;  // and one more for each further warpgroup
};

// What is another for queries that walk in another way.
struct KindArgs {
  std::uint32_t end_block;               // CTA i works on block end_block - i; kSharesWarp: on that group of them
  BlockGroups groups;                    // kSharesWarp
  char const* packed;                    // the layer: [B, H_kv, parents] blocks of block_bytes, as the walk wants them
  std::int64_t parents_per_head;
  rope::RotationColumns const* restart_rotations;  // [begins, 8, K / 32], with which a query restarts; kSelected
  std::int64_t restarts;
  std::int32_t const* union_nodes;       // [blocks, 12 * top_k], as they lie in `packed`; kSelected
  rope::PackedRotations const* packed_restart_rotations;  // [begins, 4, K / 16]; kSwapAB
  rope::PackedRotations const* packed_step_rotation;    // [4, K / 16]; kSwapAB
};

// Everything a launch reads and writes. Rows are queries of the launch: row = block * 12 + warp. Where a query is split,
// the state has a row for every consumer.
struct Args {
  QueryBlocks blocks;
  KindArgs kinds[3];              // by LayerKind
  std::int64_t block_bytes;
  tree::pack::Source values;         // of the layer, unpacked; kAttend
  int const* has_nonfinite_v;              // whether any layer has values that are not finite
  float2 const* rotations;                 // [positions, K / 2]; kEntry
  rope::RotationColumns const* step_rotation;     // [8, K / 32], with which it rotates on, kSelected: the other way round

  void const* q;                  // [B, T_q, H, K]
  std::int64_t q_stride_b;
  std::int64_t q_stride_t;
  std::int64_t q_stride_h;
  bool q_half;                    // fp16, else bf16
  bool q_pairs;                   // two neighbouring elements may be read at once
  int H_kv;
  int G;
  row_scale::ScoreScale scale;
  bool strict_causal;
  int restart_period;                // ranks until a query rotates anew from itself, kHalfSelected: parents left out; kSelected
  bool split;                     // one query, over all consumers of its block

  int layer;
  int layers;
  int top_k;
  int half_selected_parents;              // kHalfSelected where there are fewer

  std::int32_t const* parents;       // [rows, top_k] selected in the layer above, ascending; kSelected
  // The union of the parents of each block; kSelected. kSwapAB: of a group of blocks in the place of the first.
  void const* union_masks;           // [blocks, 12 * top_k], bit i: selected by query i; 16 bits, kSwapAB: Mask
  std::int32_t const* union_count;   // [blocks]

  std::uint16_t const* expanded;    // [rows, width / 16], bit c: candidate 16 j + c is no leaf; unused at the bottom
  std::int64_t width;             // of a row of importance
  float* importance;              // [rows, width]

  // Running softmax between layers: O as float32 fragments, and two numbers for every head.
  float4* state_out;              // [rows, V / 8, 32]
  float2* state_sum;              // [rows, 16] running maximum (raw) and sum

  void* out;                      // [B, T_q, H, V] contiguous, written at the bottom
  float* lse;                     // [B, T_q, H]
};

}  // namespace htree_cuda::sm90::htree_fwd

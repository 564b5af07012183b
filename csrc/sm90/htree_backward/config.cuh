// Data sheet of the two matrix kernels of the backward. Both stream operands (16 rows of K and 16 of V, see
// device/backward_steps.h) through a ring of shared memory past eight consumer warps:
//
//                    queries (dq)                              nodes (dk, dv)
//   a consumer       one query, its 16 heads                   one parent, its 16 children
//   the CTA          eight neighbouring queries                eight neighbouring parents, one segment of the rows
//   streamed         the parents that any of them visits,      the queries that visit any of them, ascending
//                    layer by layer from the top, ascending
//   in registers     q, dout, dq                               keys, dk, dv, some of the values
//   resident         nothing                                   the eight parents
//
//   CTA              8 consumer warps (2 warpgroups); a producer warp in a third warpgroup, whose other warps idle
//   slot             one operand and its header; one bulk copy
//   stage            four slots and a note of their entries, one full and one empty mbarrier
//   registers        a consumer and a producer thread: 232 and 40 (queries), 240 and 24 (nodes), 384 * 168 in all
//   shared memory    as many stages as fit in 227 KB: 6 (queries) and 4 (nodes) at K = V = 128
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../device/backward_steps.h"

namespace htree_cuda::gradient {

enum class Pass { kQueries, kNodes };

template <class Element_, int kK_, int kV_, Pass kPass_>
struct Config {
  using Element = Element_;  // __nv_bfloat16 or __half
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr Pass kPass = kPass_;

  static constexpr int kConsumers = 8;
  static constexpr int kThreads = 384;
  static constexpr int kConsumerRegisters = kPass == Pass::kQueries ? 232 : 240;
  static constexpr int kProducerRegisters = kPass == Pass::kQueries ? 40 : 24;
  static_assert(kConsumers == kGroupParents && kConsumers == kGroupQueries);
  static_assert(kConsumers % 4 == 0 && kConsumers * 32 + 128 == kThreads);
  static_assert(kConsumers * 32 * kConsumerRegisters + 128 * kProducerRegisters <= kThreads * 168);

  // A slot: 256 bytes that end with the header, then the rows. Rows begin at multiples of 256 bytes, so that swizzled
  // addresses come from one exclusive or.
  static constexpr int kRowsOffset = 256;
  static constexpr int kKeyRowBytes = 2 * kK;
  static constexpr int kValueRowBytes = 2 * kV;
  static constexpr int kValueOffset = kRowsOffset + 16 * kKeyRowBytes;
  static constexpr int kOperandBytes = static_cast<int>(operand_bytes(kK, kV));
  static constexpr int kSlotBytes = kRowsOffset + kOperandBytes;
  static constexpr int kNodeBytes = kNodeHeader + kOperandBytes;
  static constexpr int kQueryBytes = kQueryHeader + kOperandBytes;
  static constexpr int kNodeOffset = kRowsOffset - kNodeHeader;    // of a node's copy in a slot
  static constexpr int kQueryOffset = kRowsOffset - kQueryHeader;
  static constexpr int kCopyBytes = kPass == Pass::kQueries ? kNodeBytes : kQueryBytes;
  static constexpr int kCopyOffset = kPass == Pass::kQueries ? kNodeOffset : kQueryOffset;
  static_assert(kNodeBytes % 16 == 0 && kQueryBytes % 16 == 0 && kSlotBytes % 256 == 0 && kQueryOffset >= 0);

  static constexpr int kStageSlots = 4;
  static constexpr int kStageBytes = kStageSlots * kSlotBytes;
  static constexpr int kNoteBytes = 8 + 8 * kStageSlots;
  static constexpr int kControlBytes = 16 + kNoteBytes;  // of a stage: full, empty, note
  static_assert(kConsumers == 8 && kStageSlots == 4, "a byte of takers a slot, a word a stage");

  // The producer's list: what it found and has not sent.
  static constexpr int kEntryBytes = 16;
  static constexpr int kFoundAtOnce = kPass == Pass::kQueries ? 32 * kGroupParents : 32;
  static constexpr int kListBytes = (kFoundAtOnce + kStageSlots) * kEntryBytes;
  // Nodes: the parents of the CTA.
  static constexpr int kResidentBytes = kPass == Pass::kNodes ? kConsumers * kSlotBytes : 0;

  static constexpr int kAlignment = 1024;
  static constexpr int kFixedBytes = kAlignment + kListBytes + kResidentBytes + 16;
  static constexpr int kFit = (232448 - kFixedBytes) / (kStageBytes + kControlBytes);
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kFixedBytes + kStages * (kStageBytes + kControlBytes);
  static_assert(kStages >= 3 && kSharedBytes <= 232448);
};

// Everything a launch reads and writes.
struct Args {
  Tree tree;
  Chunk chunk;
  Visits visits;

  char const* nodes[kMaxLayers];     // [heads, parents[l], kNodeBytes]
  char const* queries;               // [heads, rows, kQueryBytes]
  rope::Turns const* fragment_turns;  // [positions, K / 32, 4]
  float2 const* turns;               // [positions, K / 2]
  float scale;

  // Queries.
  void* dq;                          // [B, T_q, H, K] contiguous
  std::int64_t T_q;
  int H_kv;
  int G;

  // Nodes: CTAs of layer l are first_block[l] .. first_block[l + 1] - 1, ordered (head, segment, group), the last group
  // first: it belongs to the most recent tokens, which are visited most.
  int first_block[kMaxLayers + 1];
  int segments[kMaxLayers];
  int segment_rows[kMaxLayers];      // a multiple of 32
  std::int64_t begin[kMaxLayers];    // first node row of each layer
  std::int64_t node_rows;            // of a head
  int* done;                         // [heads, node_rows / 16] segments that were added to a parent's children
  float* dk;                         // [heads, node_rows, K], added to
  float* dv;                         // [heads, node_rows, V]
};

}  // namespace htree_cuda::gradient

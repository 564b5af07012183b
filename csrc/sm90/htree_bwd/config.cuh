// Data sheet of the matrix kernels of the backward. In their first layer queries visit the same parents: WGMMA multiplies
// tiles, see Pass::kFirstQueries and kFirstNodes. In the two kernels for the layers below eight warps multiply operands (16
// rows of K and 16 of V, see steps.h) that pass through shared memory:
//
//                    queries (dq)                              nodes (dk, dv)
//   a warp           one query, its 16 heads                   one parent, its 16 children, one segment of the rows
//   streamed         the parents that any of eight             the queries that visit the parent, ascending, through
//                    neighbours visits, layer by layer,        slots of the warp's own
//                    ascending, through one ring
//   in registers     q, dout, dq                               keys, dk, dv, values or half of them
//
//   CTA              queries: and a producer warp in a third warpgroup, whose other warps idle
//   slot             one operand and its header; one bulk copy (nodes: another one for the rotations)
//   stage            queries: four slots and a note of their entries, one full and one empty mbarrier
//   registers        queries: 232 a consumer and 40 a producer thread, 384 * 168 in all; nodes: 255
//   shared memory    of 227 KB at K = V = 128: queries 6 stages, nodes 3 slots a warp
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/sm90.cuh"
#include "steps.h"

namespace htree_cuda::sm90::htree_bwd {

enum class Pass { kQueries, kNodes, kFirstQueries, kFirstNodes };

// A slot of shared memory: an area that ends with the header, then the rows. Rows begin at multiples of 256 bytes, so
// that swizzled addresses come from one exclusive or.
template <class Element_, int kK_, int kV_, int kRowsOffset_>
struct Operands {
  using Element = Element_;  // __nv_bfloat16 or __half
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr int kConsumers = 8;

  static constexpr int kRowsOffset = kRowsOffset_;
  static constexpr int kKeyRowBytes = 2 * kK;
  static constexpr int kValueRowBytes = 2 * kV;
  static constexpr int kValueOffset = kRowsOffset + 16 * kKeyRowBytes;
  static constexpr int kOperandBytes = static_cast<int>(operand_bytes(kK, kV));
  static constexpr int kSlotBytes = kRowsOffset + kOperandBytes;
  static constexpr int kNodeBytes = kNodeHeader + kOperandBytes;
  static constexpr int kQueryBytes = kQueryHeader + kOperandBytes;
  static constexpr int kNodeOffset = kRowsOffset - kNodeHeader;  // of a node's copy in a slot
  static constexpr int kQueryOffset = kRowsOffset - kQueryHeader;
  static_assert(kNodeBytes % 16 == 0 && kQueryBytes % 16 == 0 && kSlotBytes % 256 == 0 && kQueryOffset >= 0);

};

template <class Element, int kK, int kV, Pass kPass>
struct Config;

template <class Element, int kK, int kV>
struct Config<Element, kK, kV, Pass::kQueries> : Operands<Element, kK, kV, 256> {
  using Base = Operands<Element, kK, kV, 256>;
  static constexpr Pass kPass = Pass::kQueries;
  static constexpr int kThreads = 384;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kProducerRegisters = 40;
  static_assert(Base::kConsumers == kGroupQueries);
  static_assert(Base::kConsumers % 4 == 0 && Base::kConsumers * 32 + 128 == kThreads);
  static_assert(Base::kConsumers * 32 * kConsumerRegisters + 128 * kProducerRegisters <= kThreads * 168);

  static constexpr int kStageSlots = 4;
  static constexpr int kStageBytes = kStageSlots * Base::kSlotBytes;
  static constexpr int kNoteBytes = 16 + 4 * kStageSlots;
  static constexpr int kControlBytes = 16 + kNoteBytes;  // of a stage: full, empty, note
  static_assert(Base::kConsumers == 8 && kStageSlots == 4, "a byte of takers a slot, a word a stage");

  // The producer's list: what it found and has not sent.
  static constexpr int kEntryBytes = 16;
  static constexpr int kFoundAtOnce = 32 * kGroupParents;
  static constexpr int kListBytes = (kFoundAtOnce + kStageSlots) * kEntryBytes;
  static constexpr int kRotationsBytes = 2 * kK;  // of a consumer's pair at hand

  static constexpr int kAlignment = 1024;
  static constexpr int kFixedBytes = kAlignment + kListBytes + Base::kConsumers * kRotationsBytes;
  static constexpr int kFit = (kMaxSharedBytes - kFixedBytes) / (kStageBytes + kControlBytes);
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kFixedBytes + kStages * (kStageBytes + kControlBytes);
  static_assert(kStages >= 3 && kSharedBytes <= kMaxSharedBytes);
};

// A slot begins with the rotations of the pair. Of the values' steps of 16 columns registers hold as many as fit: all, or
// the first half.
template <class Element, int kK, int kV>
struct Config<Element, kK, kV, Pass::kNodes> : Operands<Element, kK, kV, 512> {
  using Base = Operands<Element, kK, kV, 512>;
  static constexpr Pass kPass = Pass::kNodes;
  static constexpr int kThreads = Base::kConsumers * 32;

  static constexpr int kRotationsBytes = 2 * kK;
  static_assert(kRotationsBytes <= Base::kQueryOffset);
  static constexpr int kHeldValues = kK + kV == 256 ? kV / 32 : kV / 16;
  static constexpr int kValuesBytes = 16 * (Base::kValueRowBytes - 32 * kHeldValues);
  static_assert(kValuesBytes == 0 || kValuesBytes == 16 * 128);

  static constexpr int kListEntries = 64;  // visits: row; position in the upper and closed children in the lower half
  static constexpr int kListBytes = 8 * kListEntries;
  static constexpr int kSlots = kK + kV == 256 ? 3 : 4;
  static constexpr int kProgressBytes = 32;
  static constexpr int kAlignment = 256;
  static constexpr int kControlBytes = kListBytes + kProgressBytes + 8 * kSlots + kNodeHeader;
  static constexpr int kWarpBytes = (kSlots * Base::kSlotBytes + kValuesBytes + kControlBytes + 255) / 256 * 256;
  static constexpr int kSharedBytes = kAlignment + Base::kConsumers * kWarpBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// Tiles of nodes that a CTA of kFirstNodes works on.
inline constexpr int kUnitTiles = 2;

// Of both kernels of first layers: two warpgroups multiply, a warp of a third one copies.
template <class Element_, int kK_, int kV_>
struct FirstTiles {
  using Element = Element_;
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr int kConsumers = 8;
  static constexpr int kThreads = 384;
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kProducerRegisters = 24;
  static_assert(kConsumers * 32 + 128 == kThreads);
  static_assert(kConsumers * 32 * kConsumerRegisters + 128 * kProducerRegisters <= kThreads * 168);

  static constexpr int kAlignment = 1024;  // of panels
};

// Two warpgroups hold a tile of queries each, their warps a query each: q, dq and what lies between the products in
// registers, dout in shared memory. A producer warp streams tiles of nodes to both. A stage is the panels of a tile;
// headers have a place of their own, so that panels lie at multiples of 1024 bytes without gaps.
template <class Element, int kK, int kV>
struct Config<Element, kK, kV, Pass::kFirstQueries> : FirstTiles<Element, kK, kV> {
  using Base = FirstTiles<Element, kK, kV>;
  static constexpr Pass kPass = Pass::kFirstQueries;

  static constexpr int kTiles = Base::kConsumers / kTileQueries;
  static_assert(Base::kConsumers == kGroupQueries && kTileQueries == 4, "a warpgroup a tile, a warp a query");
  static constexpr int kPanelsBytes = static_cast<int>(panels_bytes(kK, kV));
  static constexpr int kNodeTileBytes = static_cast<int>(node_tile_bytes(kK, kV));
  static constexpr std::int64_t kQueryTileBytes = query_tile_bytes(kK, kV);
  static_assert(kPanelsBytes % 1024 == 0 && kQueryTileBytes % 16 == 0);

  static constexpr int kFixedBytes = Base::kAlignment + kTiles * kPanelsBytes + 8;
  static constexpr int kStageBytes = kNodeTileBytes + 16;  // and full, empty
  static constexpr int kFit = (kMaxSharedBytes - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kStages >= 3 && kSharedBytes <= kMaxSharedBytes);
};

// Two warpgroups hold a tile of nodes each, their warps a parent each; a producer warp streams tiles of queries to both.
// An area of a tile ends its first kilobyte with the header, so that one bulk copy brings all.
template <class Element, int kK, int kV>
struct Config<Element, kK, kV, Pass::kFirstNodes> : FirstTiles<Element, kK, kV> {
  using Base = FirstTiles<Element, kK, kV>;
  static constexpr Pass kPass = Pass::kFirstNodes;

  static constexpr int kUnitTiles = htree_bwd::kUnitTiles;
  static_assert(kUnitTiles * kTileParents == Base::kConsumers, "a warpgroup a tile, a warp a parent");
  static constexpr int kKeyOffset = 1024;
  static constexpr int kValueOffset = kKeyOffset + kK / 64 * kPanelBytes;
  static constexpr int kAreaBytes = kValueOffset + kV / 64 * kPanelBytes;
  static constexpr int kNodeOffset = kKeyOffset - kNodeTileHeader;  // of a tile's copy in its area
  static constexpr int kQueryOffset = kKeyOffset - kQueryTileHeader;
  static constexpr int kNodeBytes = kAreaBytes - kNodeOffset;
  static constexpr int kQueryBytes = kAreaBytes - kQueryOffset;
  static_assert(kNodeBytes == node_tile_bytes(kK, kV) && kNodeBytes % 16 == 0 && kQueryBytes % 16 == 0);

  static constexpr int kUnitBytes = 8 + 8 + 16;  // full, empty, the unit's number
  static constexpr int kFixedBytes = Base::kAlignment + kUnitTiles * kAreaBytes + kUnitBytes;
  static constexpr int kFit = (kMaxSharedBytes - kFixedBytes) / (kAreaBytes + 16);
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static constexpr int kSharedBytes = kFixedBytes + kStages * (kAreaBytes + 16);
  static_assert(kStages >= 3 && kSharedBytes <= kMaxSharedBytes);
};

// Everything a launch reads and writes.
struct Args {
  Tree tree;
  Chunk chunk;
  Visits visits;

  char const* nodes[kMaxLayers];     // [heads, parents[l], kNodeBytes]
  char const* queries;               // [heads, rows, kQueryBytes]
  rope::FragmentRotations const* fragment_rotations;  // [positions, K / 32, 4]
  float2 const* rotations;               // [positions, K / 2]
  float scale;

  // First layers, by tiles (steps.h). A unit is kUnitTiles tiles of nodes and a segment of the rows.
  int lowest;                        // first layers of the chunk's first and of its last query
  int highest;
  char* query_tiles;                 // [heads, rows / 4, query_tile_bytes]; their part of dq takes the place of the panels
  char const* node_tiles[kMaxLayers];  // [heads, tiles[l], node_tile_bytes]
  int tiles[kMaxLayers];             // of a head, an even number
  int tile_segments[kMaxLayers];
  int tile_segment_rows[kMaxLayers];  // a multiple of 32
  int first_tile_unit[kMaxLayers];
  int tile_units;
  int* next_tile_unit;               // the first that nobody has begun
  int* tile_done;                    // [heads, node_rows / 16] segments that were added to a parent's children

  // Queries.
  void* dq;                          // [B, T_q, H, K] contiguous
  std::int64_t T_q;
  int H_kv;
  int G;

  // Nodes below first layers: a unit is a parent and a segment of the rows. They are ordered (layer, the highest first;
  // head; segment; parent, the last first: it belongs to the most recent tokens, which are visited most).
  int first_unit[kMaxLayers];
  int units;
  int segments[kMaxLayers];
  int segment_rows[kMaxLayers];      // a multiple of 32
  int* next_unit;                    // the first that nobody has begun
  std::int64_t begin[kMaxLayers];    // first node row of each layer
  std::int64_t node_rows;            // of a head
  int* done;                         // [heads, node_rows / 16] segments that were added to a parent's children
  float* dk;                         // [heads, node_rows, K], added to
  float* dv;                         // [heads, node_rows, V]
};

}  // namespace htree_cuda::sm90::htree_bwd

// What the forward kernels are given: one struct, the same for every kernel. Plain data without device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "namespaces.h"
#include "tree/geometry.cuh"
#include "tree/pack.h"
#include "tree/rope.cuh"
#include "tree/row_scale.cuh"

namespace htree_cuda::sm90::htree_fwd {

using namespace host;
using namespace device;
using namespace tree;

// The two passes over a layer. A layer that selects takes both, the bottom layer takes the second alone.
enum class Pass {
  kScore,   // importance of the candidates, for the selection: two sweeps over them
  kAttend,  // softmax over the leaves, onto the running state of the layers above
};

// The two sweeps of a score pass.
enum class Sweep {
  kLse,         // lse_g over the candidates, for each head g
  kImportance,  // imp[c] = sum_g exp(s_g[c] - lse_g)
};

// How a query goes through a layer. Its position and top_k alone decide that.
enum class LayerKind {
  kEntry,  // its first sparse layer: every KV block up to its own; keys rotated by node index, the query by n - 1
  // A layer below: the blocks that it selected; keys rotated by their place in the block, the query by n - 1 - 16 rank.
  kSelected,
  // A selected layer in which it takes half of the blocks or more: keys rotated by node index, the query by n - 1 and
  // by 16 for each block that it leaves out.
  kHalfSelected,
};
inline constexpr int kLayerKinds = 3;

// What differs between layer kinds.
struct KindArgs {
  std::uint32_t end_tile;   // CTA i of those of this kind serves tile end_tile - i, or that set of tiles
  TileSets sets;            // where queries share a warp: which tiles of queries a CTA serves
  char const* packed;       // the layer's KV blocks, [B, H_kv, blocks] of block_bytes, in the layout of this kind
  std::int64_t blocks_per_head;
  rope::RotationColumns const* restart_rotations;  // [restarts, 8, K / 32]: from the unrotated query; selected kinds
  std::int64_t restarts;
  std::int32_t const* union_nodes;                 // [tiles, 12 * top_k]: places in `packed`; selected kinds
  rope::PackedRotations const* packed_restart_rotations;  // [restarts, 4, K / 16]; swap A/B
  rope::PackedRotations const* packed_step_rotation;      // [4, K / 16]; swap A/B
};

// Everything that a launch reads and writes. A row is a query of the launch: row = 12 * tile + query of the tile. Where
// one query is split over a CTA, the state has a row for each consumer warp.
struct Args {
  QueryTiles tiles;                           // the tiles of 12 queries of the launch
  KindArgs kinds[kLayerKinds];                 // by LayerKind
  std::int64_t block_bytes;
  tree::pack::Source values;                   // of the layer, not packed: read again where some are not finite
  Sequence const* sequences;                   // of different lengths, or null
  int const* has_nonfinite_v;                  // whether any layer holds values that are not finite
  float2 const* rotations;                     // [positions, K / 2], cos and sin; kEntry
  rope::RotationColumns const* step_rotation;  // [8, K / 32]: by 16 positions

  void const* q;                               // [B, T_q, H, K]
  std::int64_t q_stride_b;
  std::int64_t q_stride_t;
  std::int64_t q_stride_h;
  bool q_half;                                 // fp16, else bf16
  bool q_pairs;                                // two neighbouring elements may be read at once
  int H_kv;
  int G;
  row_scale::ScoreScale scale;
  bool strict_causal;
  int restart_period;                          // ranks (kHalfSelected: blocks left out) until a query restarts
  bool split;                                  // one query in the call: the consumer warps of a CTA share it

  int layer;
  int layers;
  int top_k;
  int half_selected_parents;                   // with fewer blocks up to its own, a query's layer is kHalfSelected

  std::int32_t const* parents;                 // [rows, top_k]: selected in the layer above, ascending
  // The union of the blocks that the queries of a tile selected; of a set of tiles in the place of its first one.
  void const* union_masks;  // [tiles, 12 * top_k], bit i: query i selected it; 16 bits a tile of the set
  std::int32_t const* union_count;             // [tiles]

  std::uint16_t const* expanded;  // [rows, width / 16], bit c: candidate 16 j + c is no leaf; not at the bottom
  std::int64_t width;                          // of a row of importance
  float* importance;                           // [rows, width]

  // Running softmax between layers: O as float32 fragments, and two numbers for each head.
  float4* state_out;                           // [rows, V / 8, 32]; swap A/B: [rows, V / 8, heads, 8] floats (traits.cuh)
  float2* state_sum;                           // [rows, 16]: running maximum (raw) and sum

  void* out;                                   // [B, T_q, H, V] contiguous, written at the bottom
  float* lse;                                  // [B, T_q, H]
  float const* attn_sink;                      // [H] natural, or null
};

// The CTAs of a launch: first those of tiles in a selected layer, then half-selected, then entry. Later queries come
// first, for they have the most to do.
struct Grid {
  std::uint32_t half_selected_cta;  // the first CTA of each kind; equal to the next where a kind has none
  std::uint32_t entry_cta;
  std::uint32_t ctas;
};

}  // namespace htree_cuda::sm90::htree_fwd

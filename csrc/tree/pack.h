// What the forward needs of tree/pack: KV blocks, with keys rotated and scaled and the values beside them, and the
// tables by which queries are rotated.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"
#include "geometry.cuh"
#include "rope.cuh"

namespace htree_cuda::tree::pack {

// One tensor of a layer: [B, N, H_kv, dim] by strides in elements.
struct Source {
  void const* in;
  std::int64_t stride_b;
  std::int64_t stride_n;
  std::int64_t stride_h;
  int dim;
  bool vectors;  // 16 bytes may be read at once
  // Sequences of different lengths: a sequence begins at row 0 of its own row of the batch (kOwnRows), at its first token
  // of a pack (kTokens), or at sequence_nodes of a layer.
  static constexpr int kOwnRows = -1;
  static constexpr int kTokens = 0;
  int begins = kOwnRows;
  int log2_from = 0;  // sequence_nodes

  __device__ std::int64_t first_row(Sequence const& of, std::int32_t sequence) const {
    return begins == kOwnRows ? 0 : begins == kTokens ? of.key : sequence_nodes(of.before, sequence, begins, log2_from);
  }
};

// Packs the parents of the unions of a launch's query tiles, instead of all parents of the layer. Every union has room
// for per_block parents, one union after the other, and `places` says where each parent was packed, so that the layer
// kernel finds it as it finds a node.
struct Lists {
  std::int32_t const* nodes;   // [query tiles, stride]; null: all parents of the layer are packed
  std::int32_t* places;        // likewise
  std::int32_t const* counts;  // [query tiles]
  std::int64_t stride;
  std::int64_t per_block;
  QueryTiles tiles;           // tile i of the launch is tile begin + i of the call
  TileSets sets;            // sets of tiles that share one union: the first tile's, in the room of all
};

struct Args {
  Source k;
  Source v;
  char* packed;                   // [B, H_kv, blocks_per_head, block_bytes]; with `tiles`: of kTileBlocks blocks
  std::int64_t block_bytes;
  std::int64_t blocks_per_head;  // with `tiles`: a multiple of kTileBlocks
  std::int64_t blocks;            // B * H_kv * blocks_per_head; with lists: query tiles * per_block
  std::int64_t N;                 // nodes of the layer to pack, from its first
  int H_kv;
  float2 const* rotations;        // [positions, K / 2] cos and sin
  bool by_node;                   // keys are rotated by the index of their node, else by their place among the siblings
  bool tiles;                     // only with by_node: keys and values are panels, else fragments
  bool operands_a;                // fragments, bf16: of operands A, else of operands B
  bool as_inputs;                 // keys are rounded to the dtype, else to fp16
  int* has_nonfinite_v;           // becomes 1 where a value is not finite
  Lists lists;                    // not with by_node
  // Sequences of different lengths: blocks_per_head and blocks are those of all sequences, N bounds the nodes that are
  // packed of each.
  Sequence const* sequences;      // [sequence_count], or null
  std::int32_t sequence_count;
  int layer;
  int log2_from;                  // sequences have room from 2^log2_from tokens on
};

void tree_pack(Args const& args, DType dtype, cudaStream_t stream);

// The tables that rotate a query in selected layers, as matrices.
struct QueryRotations {
  rope::RotationColumns* begin;           // [restarts, 8, K / 32], compensated for a period of ranks
  std::int64_t restarts;                  // 0: none
  rope::RotationColumns* forward;         // [forwards, 8, K / 32], compensated for a period of steps to later positions
  std::int64_t forwards;
  rope::RotationColumns* step;            // [8, K / 32]: by kSiblings positions, from a rank to the one before it; null: none
  rope::PackedRotations* packed_restart;  // like `begin`: [restarts, 4, K / 16]; null: none
  rope::PackedRotations* packed_step;     // like `step`: [4, K / 16]
  int period;
};

// Writes cos and sin of every position to `rotations` [positions, K / 2] and, where they are not null, to
// `fragment_rotations` [positions, K / 32, 4] and the tables of queries. `zero`, if not null, becomes 0.
void make_rotations(float2* rotations, rope::FragmentRotations* fragment_rotations,
                    QueryRotations const& query_rotations, std::int64_t positions, int K, rope::Frequencies frequencies,
                    int* zero, cudaStream_t stream);

}  // namespace htree_cuda::tree::pack

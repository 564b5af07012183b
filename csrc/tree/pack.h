// What the forward asks of tree/pack: blocks of 16 siblings, keys rotated and scaled, values beside them, and the tables by which queries
// rotate.
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
};

// The parents of the union lists of a launch's query blocks instead of all. Every list has room for per_block of them, one
// after the other, and `places` says where they are: the layer kernel finds them as it finds a node.
struct Lists {
  std::int32_t const* nodes;   // [query blocks, stride]; null: all parents
  std::int32_t* places;        // likewise
  std::int32_t const* counts;  // [query blocks]
  std::int64_t stride;
  std::int64_t per_block;
  QueryBlocks blocks;          // block i of the launch is block begin + i of the call
  BlockGroups groups;          // whose blocks have one list, the first one's, and the room of all
};

struct Args {
  Source k;
  Source v;
  char* packed;                   // [B, H_kv, parents, block_bytes]; tiles: of kTileParents blocks
  std::int64_t block_bytes;
  std::int64_t parents_per_head;  // tiles: a multiple of kTileParents
  std::int64_t blocks;            // B * H_kv * parents_per_head; lists: query blocks * per_block
  std::int64_t N;                 // nodes of the layer to pack, from its first
  int H_kv;
  float2 const* rotations;            // [positions, K / 2] cos and sin
  bool by_node;                   // keys rotate by the node's index, else by the place among its siblings
  bool tiles;                     // by_node: keys and values as panels, else as fragments
  bool operands_a;                // fragments, bf16: of operands A, else B
  bool as_inputs;                 // keys are rounded to the dtype, else to fp16
  int* has_nonfinite_v;                    // becomes 1 where a value is not finite
  Lists lists;                    // not by_node
};

void tree_pack(Args const& args, DType dtype, cudaStream_t stream);

// What rotates a query below its first layer, as matrices.
struct QueryRotations {
  rope::RotationColumns* begin;    // [begins, 8, K / 32], compensated for a period of ranks
  std::int64_t restarts;         // 0: none
  rope::RotationColumns* forward;  // [forwards, 8, K / 32], compensated for a period of steps to later positions
  std::int64_t forwards;
  rope::RotationColumns* step;     // [8, K / 32]: by kSiblings positions, from a rank to the one before it; null: none of these
  rope::PackedRotations* packed_restart;  // as `begin` and `step`, [begins, 4, K / 16] and [4, K / 16]; null: none
  rope::PackedRotations* packed_step;
  int period;
};

// cos and sin of every position: [positions, K / 2], and, where they are not null, [positions, K / 32, 4] in the order of
// fragments and those of queries. `zero`, if any, becomes 0.
void make_rotations(float2* rotations, rope::FragmentRotations* fragment_rotations, QueryRotations const& query_rotations, std::int64_t positions, int K,
                double base, int* zero, cudaStream_t stream);

}  // namespace htree_cuda::tree::pack

// What the forward of htree attention asks of its memory-bound helpers (smxx/tree_pack, smxx/select, smxx/unite): one
// struct and one function each. Rows are queries of a launch: row = 12 * block + query of the block.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../params.h"
#include "candidates.cuh"
#include "rope.cuh"

namespace htree_cuda {

namespace packing {

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
  float2 const* turns;            // [positions, K / 2] cos and sin
  bool by_node;                   // keys turn by the node's index, else by the place among its siblings
  bool tiles;                     // by_node: keys and values as panels, else as fragments
  bool operands_a;                // fragments, bf16: of operands A, else B
  bool as_inputs;                 // keys are rounded to the dtype, else to fp16
  int* spoilt;                    // becomes 1 where a value is not finite
  Lists lists;                    // not by_node
};

void tree_pack(Args const& args, DType dtype, cudaStream_t stream);

// What turns a query below its first layer, as matrices.
struct QueryTurns {
  rope::TurnColumns* begin;    // [begins, 8, K / 32], compensated for a period of ranks
  std::int64_t begins;         // 0: none
  rope::TurnColumns* forward;  // [forwards, 8, K / 32], compensated for a period of steps to later positions
  std::int64_t forwards;
  rope::TurnColumns* step;     // [8, K / 32]: by kSiblings positions, from a rank to the one before it; null: none of these
  rope::PackedTurns* packed_begin;  // as `begin` and `step`, [begins, 4, K / 16] and [4, K / 16]; null: none
  rope::PackedTurns* packed_step;
  int period;
};

// cos and sin of every position: [positions, K / 2], and, where they are not null, [positions, K / 32, 4] in the order of
// fragments and those of queries. `zero`, if any, becomes 0.
void make_turns(float2* turns, rope::Turns* fragment_turns, QueryTurns const& query_turns, std::int64_t positions, int K,
                double base, int* zero, cudaStream_t stream);

}  // namespace packing

namespace selecting {

struct Args {
  QueryBlocks blocks;
  int H_kv;
  int layer;
  int layers;
  int top_k;
  float const* importance;         // [rows, width]
  std::int64_t width;              // a multiple of 32
  std::int64_t most;               // candidates of a row
  std::int32_t const* parents_in;  // [rows, top_k] selected in the layer above, ascending; read below the first layer
  std::int32_t* nodes;             // [rows, top_k] selected here, ascending, padded with -1
  std::uint16_t* closed;           // [rows, width / 16] bit c: candidate 16 j + c is selected or does not exist
  std::int32_t* selection;         // [B, T_q, H_kv, top_k] of the whole call, or null
};

void select(Args const& args, int rows, cudaStream_t stream);

}  // namespace selecting

namespace uniting {

struct Args {
  QueryBlocks blocks;
  int layer;  // whose candidates the parents hold; `nodes` were selected in the layer above
  int layers;
  int top_k;
  std::int32_t const* nodes;  // [rows, top_k]
  // Of each block, of a group of them for all where the first one's would be.
  std::int32_t* union_nodes;  // [blocks, 12 * top_k]
  void* union_masks;          // likewise, 16 bits for each block of a group
  std::int32_t* union_count;  // [blocks]
  BlockGroups groups;         // of 1, 2 or 4 blocks
};

void unite(Args const& args, cudaStream_t stream);

}  // namespace uniting

}  // namespace htree_cuda

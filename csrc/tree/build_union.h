// What the forward asks of tree/build_union: the union of the parents that the queries of a block selected. Rows are queries of a
// launch: row = 12 * block + query of the block.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "geometry.cuh"

namespace htree_cuda::tree::build_union {

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

void build_union(Args const& args, cudaStream_t stream);

}  // namespace htree_cuda::tree::build_union

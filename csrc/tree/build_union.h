// What the forward needs of tree/build_union: the union of the parents that the queries of a tile selected. Rows are
// queries of a launch: row = 12 * tile + query of the tile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "geometry.cuh"
#include "host/launch_lane.h"

namespace htree_cuda::tree::build_union {

struct Args {
  QueryTiles tiles; 
  int layer;  // the layer whose candidates are children of the union; `nodes` were selected in the layer above
  int layers;
  int top_k;
  std::int64_t parents;       // nodes of the layer above, in the longest sequence
  std::int32_t const* nodes;  // [rows, top_k]
  // The union of each query tile, or of a set of tiles in the place of the first one.
  std::int32_t* union_nodes;  // [tiles, 12 * top_k]
  void* union_masks;          // likewise, 16 bits for each tile of a set
  std::int32_t* union_count;  // [tiles]
  TileSets sets;           // sets of 1, 2 or 4 tiles
};

void build_union(Args const& args, host::LaneStream stream);

}  // namespace htree_cuda::tree::build_union

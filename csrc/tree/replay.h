// What the forward needs of tree/replay: a selection that the caller gave, in place of tree/select. Rows are queries of
// a launch: row = 12 * tile + query of the tile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "geometry.cuh"
#include "host/launch_lane.h"

namespace htree_cuda::tree::replay {

struct Args {
  QueryTiles tiles; 
  int H_kv;
  int layer;
  int layers;
  int top_k;
  std::int32_t const* given;       // [B, T_q, H_kv, top_k] of the layer: any content
  std::int32_t const* parents_in;  // [rows, top_k] selected in the layer above, ascending; read in selected layers
  std::int32_t* nodes;             // [rows, top_k] selected here, ascending
  std::uint16_t* expanded;         // [rows, width / 16] bit c: candidate 16 j + c is selected or does not exist
  std::int64_t width;
};

// Writes what tree/select would have written had it selected the given nodes, for the queries that do not select
// everything. Whatever the lists hold, the nodes are top_k distinct candidates of the query, its rightmost among them:
// what is no candidate is left out, and the lowest candidates stand in.
void replay(Args const& args, int rows, host::LaneStream stream);

}  // namespace htree_cuda::tree::replay

// What the forward needs of tree/select: the top_k candidates of every query of a launch. Rows are queries of a launch:
// row = 12 * tile + query of the tile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "geometry.cuh"
#include "host/launch_lane.h"

namespace htree_cuda::tree::select {

struct Args {
  QueryTiles tiles; 
  int H_kv;
  int layer;
  int layers;
  int top_k;
  float const* importance;         // [rows, width]
  std::int64_t width;              // a multiple of 32
  std::int64_t max_candidates;               // candidates of a row
  std::int32_t const* parents_in;  // [rows, top_k] selected in the layer above, ascending; read in selected layers
  std::int32_t* nodes;             // [rows, top_k] selected here, ascending, padded with -1
  std::uint16_t* expanded;           // [rows, width / 16] bit c: candidate 16 j + c is selected or does not exist
  std::int32_t* selection;         // [B, T_q, H_kv, top_k] of the whole call, or null; of a pack [total_q, H_kv, top_k]
};

void select(Args const& args, int rows, host::LaneStream stream);

}  // namespace htree_cuda::tree::select

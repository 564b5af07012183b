// From sequences to the tables of layout.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layout.h"

namespace htree_cuda::sm90::htree_bwd::sequences {

inline constexpr int kStreams = 2 * kMaxLayers;  // counts of a sequence: CTAs of dq_gather, work by kind and layer

__host__ __device__ constexpr int streams_of(int max_entry) { return 2 * max_entry + 2; }
static_assert(streams_of(kMaxLayers - 1) <= kStreams);

// Row tiles of the call.
struct TilesArgs {
  Sequence const* sequences;  // [count]; their tiles are row tiles
  std::int32_t count;
  int row_tile;               // rows
  Rows* tiles;                // [tile_count]
  std::int64_t tile_count;
};

void fill_row_tiles(TilesArgs const& args, cudaStream_t stream);

// The work of a chunk.
struct ChunkArgs {
  Sequence const* sequences;
  std::int32_t count;
  int row_tile;
  int tile_queries;                // queries of a tile of dkdv_entry
  int gather_rows;                 // of a CTA of dq_gather
  int top_k;
  int max_entry;                   // the highest entry layer of any query
  std::int64_t first_row;          // of the call
  int rows;
  int tile_segment_rows[kMaxLayers];
  int range_rows[kMaxLayers];      // of lists of visits
  std::int32_t* begins;            // [streams, count]: of a sequence, by stream
  std::int32_t* ends;              // [kStreams + 2]: of each stream, then the sequences of the chunk
  Rows* gather;                    // [gather_ctas]
  int gather_ctas;
  EntryWork* entry;                // [entry_room]
  std::int64_t entry_room;
  ListWork* lists;                 // [list_room]
  std::int64_t list_room;
  Counts* counts;

  __host__ __device__ int streams() const { return streams_of(max_entry); }
};

// Two launches.
void describe_chunk(ChunkArgs const& args, cudaStream_t stream);

}  // namespace htree_cuda::sm90::htree_bwd::sequences

// Sequences of different lengths: from lengths on the device to what kernels look up (tree/geometry.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "geometry.cuh"
#include "params.h"

namespace htree_cuda::tree::sequences {

// The tiles of a sequence whose queries all stand before a position, whole sets of tiles. Sequence::tile is the first of
// the others.
struct EarlyTiles {
  std::int32_t count;
  std::int32_t first;   // counted behind the other tiles of all sequences
  std::int32_t bottom;  // where those with any query before the position begin in `bottom_entries`
};

struct Args {
  SequencesParams lengths;
  std::int64_t max_q;        // of a sequence
  std::int64_t max_k;
  // KV tiles of the bottom that the memory of a pack has room for, as sequence_blocks counts them.
  std::int64_t tile_room;
  PackPart* part;            // of the part before on entry, unless this one is the first; filled with this one
  int tile_queries;          // queries of a tile: kQueryTile where `tiles` are written
  int round;                 // query tiles of a sequence come in multiples of it
  // Tiles whose queries all stand before this position lie behind the other tiles of all sequences. 0: none, and the two
  // pointers may be null.
  std::int64_t early_end;
  EarlyTiles* early;         // [N]
  std::int32_t* late_tiles;  // how many tiles come before them
  Sequence* sequences;       // [N]; those that a part has no room for are empty and lie behind the others
  TileEntry* tiles;          // [tile_count], those of one KV head; null where tile_count is 0
  std::int64_t tile_count;
  // [bottom_count] sets of tiles with any query before that position, alone, those of one KV head; null where there are
  // none.
  TileEntry* bottom_entries;
  std::int64_t bottom_count;

  // Rows of q between those of the part that are no query of a sequence, or none where they are null: 0, minus infinity
  // and -1.
  void* out;                 // [total_q, out_row_bytes], multiples of 16 bytes
  std::int64_t out_row_bytes;
  float* lse;                // [total_q, H], or null
  int H;
  std::int32_t* selection;   // [selection_layers, total_q, selection_row], or null
  std::int64_t selection_layers;
  std::int64_t selection_row;
};

// Two launches. Lengths may hold anything: rows lie within the tensors, and no row belongs to two sequences.
void describe(Args const& args, cudaStream_t stream);

}  // namespace htree_cuda::tree::sequences

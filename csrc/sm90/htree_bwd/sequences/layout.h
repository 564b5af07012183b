// What the kernels of the backward look up where sequences have lengths that only the device knows (tree/geometry.cuh).
//
// The queries of a sequence are rows of the call, padded to whole row tiles, so that no tile, CTA or work item has rows
// of two sequences. A chunk is a range of these rows and may begin and end within a sequence. In all layers the KV
// blocks of all sequences are one list a KV head: those of sequence i begin at first_block, and its KV tiles at
// first_tile. The reverse index has a column for each row, and counts blocks within the row's sequence.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/htree_bwd/layout.h"

namespace htree_cuda::sm90::htree_bwd::sequences {

// Consecutive rows of one sequence: a row tile, or the rows of a CTA of dq_gather.
struct alignas(16) Rows {
  std::int32_t t;         // position of the first
  std::int32_t query;     // its row of q; in a batch within the row of the batch
  std::int32_t count;     // rows that are queries; all other members are 0 where there are none
  std::int32_t sequence;
  std::int32_t before;    // of the sequence, as Sequence::before
  std::int32_t first;     // the first row, of the call (row tiles) or of the chunk
  std::int32_t unused[2];
};

inline constexpr int kMaxItemRows = 0xffff;

// Two KV tiles of a sequence and a segment of its rows: what a CTA of dkdv_entry works on. Rows are of the chunk; nodes,
// blocks and tiles are counted within the sequence, but for those that `begin`.
struct alignas(16) EntryWork {
  std::int32_t layer;
  std::int32_t tile;             // the first of the two
  std::int32_t first;            // the first row
  std::int32_t end;
  std::int32_t segments_before;  // as EntryItem's
  std::int32_t origin;           // row r stands at position origin + r
  std::int32_t rows_begin;       // rows of the sequence whose entry layer this is
  std::int32_t rows_end;
  std::int32_t nodes;            // of the layer
  std::int32_t block_begin;      // the sequence's first KV block and KV tile, of a head
  std::int32_t tile_begin;
  std::int32_t count;            // rows from first to end
};

// A word of the reverse index and a range of the rows of its sequence: what a CTA of visit_lists lists. Blocks and words are
// counted within the sequence.
struct alignas(16) ListWork {
  std::int32_t layer;
  std::int32_t word;
  std::int32_t first;   // the first row that may visit the first block of the word
  std::int32_t end;          // past the last row
  std::int32_t origin;       // row r stands at position origin + r
  std::int32_t blocks;       // of the layer that rows of the chunk visit
  std::int32_t block_begin;  // the sequence's first KV block, of a head
  std::int32_t ranges;       // ranges before of which rows may visit the word, times two; odd where this is the last one
};

// How many work items of each kind a head of the chunk has.
struct Counts {
  std::int32_t entry;
  std::int32_t lists;
};

// What the matrix kernels of a chunk are given of it.
struct Tables {
  Rows const* row_tiles;  // [rows of the chunk / row tile]; null: sequences of one length, and nothing else is looked at
  int log2_row_tile;
  Rows const* gather;     // [gather_ctas] the CTAs of a head of dq_gather
  int gather_ctas;
  EntryWork const* entry;
  ListWork const* lists;
  Counts const* counts;

  __host__ __device__ bool any() const { return row_tiles != nullptr; }

  // The rows of a row tile from `row` of the chunk on, at most `most` of them.
  __device__ __forceinline__ Rows rows_from(int row, int most) const {
    Rows rows = load(row_tiles + (row >> log2_row_tile));
    int const before = row & ((1 << log2_row_tile) - 1);
    rows.t += before;
    rows.query += before;
    rows.count = min(rows.count - before, most);
    return rows;
  }

  static __device__ __forceinline__ Rows load(Rows const* at) {
    int4 const x = __ldg(reinterpret_cast<int4 const*>(at));
    int4 const y = __ldg(reinterpret_cast<int4 const*>(at) + 1);
    return {x.x, x.y, x.z, x.w, y.x, y.y, {}};
  }
};

// The sequence's first KV block in a layer, and its first KV tile; of a layer all blocks and tiles, with the total of
// tokens and the number of sequences.
__host__ __device__ inline std::int64_t first_block(std::int64_t before, std::int64_t sequence, int layer, int top_k) {
  return sequence_blocks(before, sequence, layer, 1, log2_room_from(layer, top_k));
}
__host__ __device__ inline std::int64_t first_tile(std::int64_t before, std::int64_t sequence, int layer, int top_k) {
  return sequence_blocks(before, sequence, layer, kTileBlocks, log2_room_from(layer, top_k)) / kTileBlocks;
}
static_assert(kTileBlocks == tree::kTileBlocks);

}  // namespace htree_cuda::sm90::htree_bwd::sequences

// Everything that the matrix kernels of one chunk read and write.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "layout.h"
#include "sequences/layout.h"
#include "tree/rope.cuh"

namespace htree_cuda::sm90::htree_bwd {

// How dkdv_entry cuts the work of an entry layer: an item is kItemTiles KV tiles and a segment of the rows.
struct EntrySegments {
  int first_item;   // the number of the layer's first item
  int pairs;        // kItemTiles KV tiles each: those that rows of the chunk visit
  int first_row;    // a multiple of kRowStep, like `rows`
  int segments;
  int rows;         // of a segment
  bool sums_apart;  // items leave their sums in entry_sums, and add_segments adds them; else items add them in order
  int first_sums;   // then: the place of the first item's sums there

  __host__ __device__ std::int64_t place_of_sums(int item) const { return first_sums + (item - first_item); }

  __host__ __device__ int of_row(int row) const { return (row - first_row) / rows; }
};

struct Args {
  Tree tree;
  Chunk chunk;
  ReverseIndex index;

  char const* kv_blocks[kMaxLayers];                  // [heads, kv_blocks[l], kBlockBytes]
  char const* queries;                                // [heads, rows, query_bytes]
  char const* keys[kMaxLayers];                       // [heads, kv_blocks[l], 16, K]: keys for dq_gather, bf16
  char* ds[kMaxLayers];                               // [heads, rows, top_k, ds_bytes], or null: see layout.h
  rope::FragmentRotations const* fragment_rotations;  // [positions, K / 32, 4]
  float2 const* rotations;                            // [positions, K / 2]
  float scale;

  // ---- entry layers, by tiles ----
  int min_entry;                      // entry layer of the chunk's first query
  int max_entry;                      // entry layer of its last one
  int gather_rows;                    // of a CTA of dq_gather, at most
  char* query_tiles;                  // [heads, rows / tile_queries, query_tile_bytes]; later dq of the entry layer
  char const* kv_tiles[kMaxLayers];   // [heads, tiles[l], kv_tile_bytes]
  int tiles[kMaxLayers];              // KV tiles of a head, an even number
  EntrySegments entry[kMaxLayers];
  int tile_items;
  float* entry_sums;                  // [places][kItemNodes (K + V)]: dk of an item's nodes, then dv; see EntrySegments
  int* next_tile_item;                // the first item that nobody has begun
  int* tile_segments_added;           // [heads, node_rows / 16]: segments that were added to a KV block's sums

  // ---- dq ----
  void* dq;                           // [B, T_q, H, K] contiguous
  std::int64_t T_q;
  int H_kv;
  int G;

  // ---- dk and dv of selected layers ----
  // A work item is a KV block and a segment of its list of visits from a range of the rows. Items are ordered by layer, the
  // lowest first, whose blocks differ most in their visits, then by range and by segment, so that the segments before have
  // been added long before; within such a group by what visit_lists comes to first.
  int range_rows[kMaxLayers];         // a multiple of 32
  int item_visits;                    // of an item, about
  uint2* visits[kMaxLayers];          // lists of visits, see layout.h; a list begins at a multiple of kListUnit
  uint4* items[kMaxLayers];           // [ranges * kMaxSegments, heads * kv_blocks[l]]: see StoredItem::listed
  int* listed_items;                  // [kMaxLayers, kItemGroups]: how many items a group has
  int* listed_units;                  // [kMaxLayers]: units of a layer that lists have taken so far
  int first_list_cta[kMaxLayers];     // of visit_lists, a CTA for each word of the index and range, the highest layer,
                                      // whose lists are the longest, first
  int list_ctas;
  int* next_item;                     // the first item that nobody has begun
  std::int64_t begin[kMaxLayers];     // first node row of each layer
  std::int64_t node_rows;             // of a head
  int* segments_added;                // [heads, node_rows / 16]: segments that were added to a KV block's sums
  float* dk;                          // [heads, node_rows, K], sums
  float* dv;                          // [heads, node_rows, V], sums

  // ---- sequences of different lengths ----
  // Then `chunk` has rows of the call and no position, `tree` and the tables of a head are those of all sequences, words
  // and N those of the longest, and what cuts rows of entry layers above is not looked at.
  sequences::Tables sequences;

  // ---- two runs of queries in a chunk ----
  void* dq_before;                    // dq of the rows before dq_begin, which are of the first run
  int dq_begin;

  __device__ __forceinline__ void* dq_of(int row) const { return row < dq_begin ? dq_before : dq; }
};

}  // namespace htree_cuda::sm90::htree_bwd

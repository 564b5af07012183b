// What the backward needs of the reverse index: its construction from the forward's selection.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90/htree_bwd/args.h"

namespace htree_cuda::sm90::htree_bwd::reverse_index {

inline constexpr int kListWarps = 8;
inline constexpr int kListCtasOfSm = 8;

struct BuildArgs {
  Chunk chunk;
  int begin;                      // the rows of this launch
  int end;
  Tree tree;
  int layers;                     // layers that have a table
  ReverseIndex index;             // zeros when the kernel begins
  std::int32_t const* selection;  // [layers of the tree - 1, B, T_q, H_kv, top_k]
  std::int64_t T_q;               // 0 in a pack
  int H_kv;
  std::int64_t rows_of_q;         // of all batches
  sequences::Tables sequences;    // row tiles alone
};

// Writes which row visits which KV block, as which rank. Whatever the lists hold, only blocks that exist are written,
// in ascending order.
void build(BuildArgs const& args, cudaStream_t stream);

// Lists the visits of every KV block of the chunk, from the index, and the work items that the lists are cut into. The
// counters `listed_units` and `listed_items` of the arguments are zeros before.
void list_visits(Args const& args, cudaStream_t stream);

}  // namespace htree_cuda::sm90::htree_bwd::reverse_index

// What the matrix kernels read of the reverse index.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/htree_bwd/args.h"

namespace htree_cuda::sm90::htree_bwd::reverse_index {

// Where the word of a row lies for the KV blocks 16 word .. 16 word + 15 of a layer.
__device__ __forceinline__ std::uint32_t const* word_at(Args const& args, int layer, int head, int word, int row) {
  return args.index.layer[layer] +
         (static_cast<std::int64_t>(head) * args.tree.words[layer] + word) * args.chunk.rows + row;
}

// Bit i of the last four bits goes to the lowest bit of byte i: the product puts bit b at 8 b.
__device__ __forceinline__ uint32_t spread_four(uint32_t bits) { return (bits & 0xfu) * 0x204081u & 0x01010101u; }

// The first row that visits a KV block of a layer, or a later block: no row visits a block of tokens after its own, nor
// is this a selected layer of rows before top_k parents exist. The number of rows where there is none.
__device__ __forceinline__ int first_row_that_visits(Args const& args, int layer, int block) {
  std::int64_t const late =
      (static_cast<std::int64_t>(max(block, args.tree.top_k)) << (kLog2Siblings * (layer + 1))) -
      args.chunk.position(0);
  return static_cast<int>(min(max(late, std::int64_t(0)), static_cast<std::int64_t>(args.chunk.queries)));
}

// The children of a KV block that a row expanded, a bit each: children that the row visits as blocks of the layer
// below. Bits from 16 on mean nothing, nor do bits of children that do not exist, which the causal mask of every row
// hides.
struct Expanded {
  std::uint32_t const* words = nullptr;  // of the layer below; null at the bottom, where nothing is expanded
  int last = 0;                          // the last word of a row there

  Expanded() = default;
  __device__ __forceinline__ Expanded(Args const& args, int layer, int head) {
    if (layer == 0) return;
    words = word_at(args, layer - 1, head, 0, 0);
    last = args.tree.words[layer - 1] - 1;
  }

  // The 16 children of a block have one word; the table of a head has fewer than 2^32 words. A tile may have blocks that
  // do not exist.
  __device__ __forceinline__ uint32_t of_block(Args const& args, int block, int row) const {
    if (words == nullptr) return 0;
    return __ldg(words + (min(block, last) * static_cast<uint32_t>(args.chunk.rows) + row));
  }
};

// The children of a KV block that lie past the query, a bit each. `position` is n - 1 - 16 rank: the query's own
// position as the block sees it. Only in the last block of a row is it below 16, so that some bits of 0 .. 15 are set.
__device__ __forceinline__ uint32_t causal_mask(int position) { return ~1u << min(position, 31); }

}  // namespace htree_cuda::sm90::htree_bwd::reverse_index

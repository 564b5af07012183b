// The reverse index of the backward: for every word of 16 KV blocks and every row, which of the blocks the row
// visits and as which rank. A warp reads one list of selected nodes. Lists ascend, so the blocks of a word are
// neighbours in a list, and the lane of the first one writes the word. No atomics are needed, because a word has one
// writer.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/sm90.cuh"
#include "host/launch_overlapped.cuh"
#include "reverse_index.h"

namespace htree_cuda::sm90::htree_bwd::reverse_index {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;

static __global__ void __launch_bounds__(kThreads) reverse_index_kernel(const __grid_constant__ BuildArgs args) {
  wait_for_previous_grid();
  int const lane = threadIdx.x % 32;
  std::int64_t const item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  int const row = static_cast<int>(item % args.chunk.rows);
  std::int64_t const list = item / args.chunk.rows;
  int const head = static_cast<int>(list % args.chunk.heads);
  int const layer = static_cast<int>(list / args.chunk.heads);  // the layer of the blocks that the list names
  if (layer >= args.layers || row >= args.chunk.queries || row < args.begin || row >= args.end) return;
  std::int64_t const bh = args.chunk.first_head + head;
  std::int64_t const h = bh % args.H_kv;
  std::int64_t t = args.chunk.position(row);
  std::int64_t query = bh / args.H_kv * args.T_q + args.chunk.first_query + row;
  if (args.sequences.row_tiles != nullptr) {
    sequences::Rows const own = args.sequences.rows_from(row, 1);
    if (own.count <= 0) return;
    t = own.t;
    query = own.sequence * args.T_q + own.query;
  }
  if (layer >= entry_layer(t, args.tree.top_k)) return;
  int const count = candidates(t, layer, args.tree.layers, args.tree.top_k).parents;
  int const rightmost = static_cast<int>(t >> (kLog2Siblings * (layer + 1)));
  std::int32_t const* const nodes =
      args.selection + ((layer * args.rows_of_q + query) * args.H_kv + h) * args.tree.top_k;
  std::uint32_t* const words =
      args.index.layer[layer] + static_cast<std::int64_t>(head) * args.tree.words[layer] * args.chunk.rows + row;

  int largest = 0;        // block so far: a list that does not ascend is made to
  int block_before = -1;  // the last block of the 32 before
  int found = 0;          // different blocks so far, which a repeated one is not
  int word_before = -1;   // word of the last block of the 32 before
  for (int base = 0; base < count; base += 32) {
    bool const exists = base + lane < count;
    int block = exists ? min(max(nodes[base + lane], 0), rightmost) : 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int const before = __shfl_up_sync(kFullWarp, block, d);
      if (lane >= d) block = max(block, before);
    }
    block = max(block, largest);
    int previous = __shfl_up_sync(kFullWarp, block, 1);
    if (lane == 0) previous = block_before;
    unsigned const different = __ballot_sync(kFullWarp, exists && block != previous);
    int const rank = found + __popc(different & ((1u << lane) - 1u));
    found += __popc(different);
    int const word = exists ? block / kWordBlocks : -1;
    // The lanes of one word are neighbours: each lane gathers the bits of the lanes behind it.
    std::uint32_t mask = 1u << (block % kWordBlocks);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      std::uint32_t const further = __shfl_down_sync(kFullWarp, mask, d);
      int const its_word = __shfl_down_sync(kFullWarp, word, d);
      if (lane + d < 32 && its_word == word) mask |= further;
    }
    int before = __shfl_up_sync(kFullWarp, word, 1);
    if (lane == 0) before = word_before;
    std::uint32_t* const entry = words + static_cast<std::int64_t>(word) * args.chunk.rows;
    if (exists && word != before) {
      *entry = mask | static_cast<std::uint32_t>(rank) << kWordBlocks;
    } else if (exists && lane == 0) {
      *entry |= mask;  // the word began among the 32 blocks before
    }
    __syncwarp();
    largest = block_before = __shfl_sync(kFullWarp, block, 31);
    word_before = __shfl_sync(kFullWarp, word, 31);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd::reverse_index

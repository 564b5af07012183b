// The sorted union of the parents that the 12 queries of a block selected, each with a mask of those queries. A query
// whose first layer this is has no part in it: its parents are 0, 1, 2, ...
//
// One CTA a block. A window of 8192 nodes at a time: every query's warp ORs its bit into a table of 16-bit masks in
// shared memory, then the table is compacted. A window starts at the smallest node that is left, so at most as many
// windows are needed as there are nodes, however wide the layer. A launch has about two CTAs an SM, so what counts is how
// often one waits: lists come from global memory once, all loads under way together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/overlap.cuh"
#include "../../device/forward_steps.h"

namespace htree_cuda::uniting {

inline constexpr int kWarps = 16;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kWindow = 8192;
inline constexpr int kWords = kWindow / 2;            // two masks a word
inline constexpr int kWordsPerWarp = kWords / kWarps;
static_assert(kBlockQueries <= kWarps && kWordsPerWarp % 32 == 0);

static __global__ void __launch_bounds__(kThreads) unite_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kNone = 0x7fffffff;
  __shared__ uint32_t table[kWords];
  __shared__ std::int32_t lists[kBlockQueries * kMaxTopK];
  __shared__ int next[kWarps];
  __shared__ int counts[kWarps];
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  QueryBlock const block(args.blocks, blockIdx.x);
  std::int64_t const list = static_cast<std::int64_t>(blockIdx.x) * kBlockQueries * args.top_k;
  int parents = 0;
  if (warp < kBlockQueries && block.first + warp < args.blocks.T_q) {
    std::int64_t const t = args.blocks.q_start + block.first + warp;
    if (args.layer < first_layer(t, args.top_k)) parents = candidates(t, args.layer, args.layers, args.top_k).parents;
  }
  std::int32_t* const mine = lists + warp * kMaxTopK;
  if (parents > 0) {
    std::int32_t const* const from = args.nodes + list + warp * args.top_k;
    std::int32_t loaded[kMaxTopK / 32];
#pragma unroll
    for (int i = 0; i < kMaxTopK / 32; ++i) loaded[i] = 32 * i + lane < parents ? from[32 * i + lane] : kNone;
#pragma unroll
    for (int i = 0; i < kMaxTopK / 32; ++i) mine[32 * i + lane] = loaded[i];
    __syncwarp();
  }

  int cursor = 0;   // of my list
  int written = 0;  // of the union
  while (true) {
    if (lane == 0) next[warp] = cursor < parents ? mine[cursor] : kNone;
    for (int i = threadIdx.x; i < kWords; i += kThreads) table[i] = 0;
    __syncthreads();
    int base = kNone;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) base = min(base, next[i]);
    if (base == kNone) break;
    while (cursor < parents) {
      int const node = cursor + lane < parents ? mine[cursor + lane] : kNone;
      bool const inside = node - base < kWindow && node != kNone;
      if (inside) atomicOr(&table[(node - base) / 2], (1u << warp) << ((node - base) % 2 * 16));
      int const taken = __popc(__ballot_sync(kAll, inside));
      cursor += taken;
      if (taken < 32) break;
    }
    __syncthreads();
    int count = 0;
#pragma unroll
    for (int i = 0; i < kWordsPerWarp / 32; ++i) {
      uint32_t const word = table[warp * kWordsPerWarp + i * 32 + lane];
      count += __popc(__ballot_sync(kAll, (word & 0xffffu) != 0)) + __popc(__ballot_sync(kAll, (word >> 16) != 0));
    }
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    int place = written;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) place += counts[i];
      written += counts[i];
    }
#pragma unroll
    for (int i = 0; i < kWordsPerWarp / 32; ++i) {
      int const at = warp * kWordsPerWarp + i * 32 + lane;
      uint32_t const word = table[at];
      unsigned const even = __ballot_sync(kAll, (word & 0xffffu) != 0);
      unsigned const odd = __ballot_sync(kAll, (word >> 16) != 0);
      unsigned const below = (1u << lane) - 1u;
      int put = place + __popc(even & below) + __popc(odd & below);
      if (word & 0xffffu) {
        args.union_nodes[list + put] = base + 2 * at;
        args.union_masks[list + put] = static_cast<std::uint16_t>(word & 0xffffu);
        ++put;
      }
      if (word >> 16) {
        args.union_nodes[list + put] = base + 2 * at + 1;
        args.union_masks[list + put] = static_cast<std::uint16_t>(word >> 16);
      }
      place += __popc(even) + __popc(odd);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) args.union_count[blockIdx.x] = written;
}

}  // namespace htree_cuda::uniting

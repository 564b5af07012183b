// The sorted union of the parents that the 12 queries of a block selected, or the 24 of a pair of blocks, each with a mask of
// those queries. A query whose first layer this is has no part in it: its parents are 0, 1, 2, ...
//
// One CTA a block or pair. A window of 8192 nodes at a time: every query's warp ORs its bit into a table of 16-bit masks, of
// pairs 32-bit ones, in shared memory, then the table is compacted. A window starts at the smallest node that is left, so at
// most as many windows are needed as there are nodes, however wide the layer. A launch has about two CTAs an SM, so what counts
// is how often one waits: lists come from global memory once, all loads under way together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../common/overlap.cuh"
#include "../../device/forward_steps.h"

namespace htree_cuda::uniting {

template <bool kPairs>
struct Config {
  using Mask = std::conditional_t<kPairs, std::uint32_t, std::uint16_t>;
  static constexpr int kQueries = kPairs ? 2 * kBlockQueries : kBlockQueries;
  static constexpr int kWarps = kPairs ? 32 : 16;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWindow = 8192;
  static constexpr int kMasksPerWord = kPairs ? 1 : 2;
  static constexpr int kMaskBits = 32 / kMasksPerWord;
  static constexpr int kWords = kWindow / kMasksPerWord;
  static constexpr int kWordsPerWarp = kWords / kWarps;
  static constexpr int kSharedBytes = 4 * (kWords + kQueries * kMaxTopK + 2 * kWarps);  // see unite_kernel
  static_assert(kQueries <= kWarps && kQueries <= kMaskBits && kWordsPerWarp % 32 == 0);
};

template <class Cfg>
__device__ __forceinline__ typename Cfg::Mask mask_of(uint32_t word, int i) {
  return static_cast<typename Cfg::Mask>(word >> (i * Cfg::kMaskBits % 32));
}

template <bool kPairs>
__global__ void __launch_bounds__(Config<kPairs>::kThreads) unite_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  using Cfg = Config<kPairs>;
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kNone = 0x7fffffff;
  extern __shared__ uint32_t table[];  // [kWords]
  std::int32_t* const lists = reinterpret_cast<std::int32_t*>(table + Cfg::kWords);  // [kQueries, kMaxTopK]
  std::int32_t* const next = lists + Cfg::kQueries * kMaxTopK;                       // [kWarps]
  std::int32_t* const counts = next + Cfg::kWarps;                                   // [kWarps]
  auto* const masks = static_cast<typename Cfg::Mask*>(args.union_masks);
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  int const first = kPairs ? args.pairs.block(args.blocks, blockIdx.x, 0) : blockIdx.x;
  int const own = kPairs ? args.pairs.block(args.blocks, blockIdx.x, warp / kBlockQueries % 2) : first;
  int const query = warp % kBlockQueries;
  std::int64_t const list = static_cast<std::int64_t>(first) * kBlockQueries * args.top_k;
  int parents = 0;
  if (warp < Cfg::kQueries && own >= 0) {
    QueryBlock const block(args.blocks, own);
    std::int64_t const t = args.blocks.q_start + block.first + query;
    if (block.first + query < args.blocks.T_q && args.layer < first_layer(t, args.top_k)) {
      parents = candidates(t, args.layer, args.layers, args.top_k).parents;
    }
  }
  std::int32_t* const mine = lists + warp * kMaxTopK;
  if (parents > 0) {
    std::int32_t const* const from = args.nodes + (static_cast<std::int64_t>(own) * kBlockQueries + query) * args.top_k;
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
    for (int i = threadIdx.x; i < Cfg::kWords; i += Cfg::kThreads) table[i] = 0;
    __syncthreads();
    int base = kNone;
#pragma unroll
    for (int i = 0; i < Cfg::kQueries; ++i) base = min(base, next[i]);
    if (base == kNone) break;
    while (cursor < parents) {
      int const node = cursor + lane < parents ? mine[cursor + lane] : kNone;
      bool const inside = node - base < Cfg::kWindow && node != kNone;
      if (inside) {
        int const place = node - base;
        atomicOr(&table[place / Cfg::kMasksPerWord], (1u << warp) << (place % Cfg::kMasksPerWord * Cfg::kMaskBits % 32));
      }
      int const taken = __popc(__ballot_sync(kAll, inside));
      cursor += taken;
      if (taken < 32) break;
    }
    __syncthreads();
    int count = 0;
#pragma unroll
    for (int i = 0; i < Cfg::kWordsPerWarp / 32; ++i) {
      uint32_t const word = table[warp * Cfg::kWordsPerWarp + i * 32 + lane];
#pragma unroll
      for (int m = 0; m < Cfg::kMasksPerWord; ++m) count += __popc(__ballot_sync(kAll, mask_of<Cfg>(word, m) != 0));
    }
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    int place = written;
#pragma unroll
    for (int i = 0; i < Cfg::kWarps; ++i) {
      if (i < warp) place += counts[i];
      written += counts[i];
    }
#pragma unroll
    for (int i = 0; i < Cfg::kWordsPerWarp / 32; ++i) {
      int const at = warp * Cfg::kWordsPerWarp + i * 32 + lane;
      uint32_t const word = table[at];
      int put = place;
#pragma unroll
      for (int m = 0; m < Cfg::kMasksPerWord; ++m) {
        unsigned const taken = __ballot_sync(kAll, mask_of<Cfg>(word, m) != 0);
        put += __popc(taken & ((1u << lane) - 1u));
        place += __popc(taken);
      }
#pragma unroll
      for (int m = 0; m < Cfg::kMasksPerWord; ++m) {
        if (mask_of<Cfg>(word, m) == 0) continue;
        args.union_nodes[list + put] = base + Cfg::kMasksPerWord * at + m;
        masks[list + put] = mask_of<Cfg>(word, m);
        ++put;
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) args.union_count[first] = written;
}

}  // namespace htree_cuda::uniting

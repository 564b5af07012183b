// Which blocks of rows agree on the parents that they visit, and the table by which their queries turn.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "pack.cuh"

namespace htree_cuda::gradient {

// A warp a layer, head and block: lanes look at a group of parents each.
static __global__ void __launch_bounds__(kThreads) agreement_kernel(const __grid_constant__ Agreement args) {
  wait_for_previous_grid();
  int const lane = threadIdx.x % 32;
  int const blocks = (args.chunk.rows + kBlockRows - 1) / kBlockRows;
  std::int64_t const item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= static_cast<std::int64_t>(args.layers) * args.chunk.heads * blocks) return;
  int const block = static_cast<int>(item % blocks);
  int const head = static_cast<int>(item / blocks % args.chunk.heads);
  int const layer = static_cast<int>(item / blocks / args.chunk.heads);
  int const first = block * kBlockRows;
  int const fours = min(args.chunk.rows - first, kBlockRows) / 4;
  int const groups = static_cast<int>(args.tree.groups[layer]);
  std::uint32_t* const entries =
      args.visits.layer[layer] + static_cast<std::int64_t>(head) * groups * args.chunk.rows + first;
  auto const words_of = [&](int group) {
    return reinterpret_cast<uint4*>(entries + static_cast<std::int64_t>(group) * args.chunk.rows);
  };
  int visits = 0;
  int visited = 0;
  for (int group = lane; group < groups; group += 32) {
    uint4 const* const words = words_of(group);
    std::uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kBlockRows / 4; ++i) {
      if (i >= fours) break;
      uint4 const x = words[i];
      for (std::uint32_t const word : {x.x, x.y, x.z, x.w}) {
        any |= word & 0xffu;
        visits += __popc(word & 0xffu);
      }
    }
    visited += __popc(any);
  }
  visits = __reduce_add_sync(kFullWarp, visits);
  visited = __reduce_add_sync(kFullWarp, visited);
  bool const agree = visits > 0 && visits >= kBlockVisits * visited;
  if (lane == 0) args.agree[item] = agree;
  if (!agree) return;
  for (int group = lane; group < groups; group += 32) {
    uint4* const words = words_of(group);
#pragma unroll
    for (int i = 0; i < kBlockRows / 4; ++i) {
      if (i >= fours) break;
      uint4 const x = words[i];
      if ((x.x | x.y | x.z | x.w) == 0) continue;
      words[i] = {x.x | kAgrees, x.y | kAgrees, x.z | kAgrees, x.w | kAgrees};
    }
  }
}

static __global__ void __launch_bounds__(kThreads)
    column_turns_kernel(half2* columns, float2 const* turns, std::int64_t pairs, int K) {
  wait_for_previous_grid();
  std::int64_t const item = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= pairs) return;
  int const pair = static_cast<int>(item % (K / 2));
  float2 const turn = turns[item];
  columns[item - pair + pair % 8 * (K / 16) + pair / 8] = __floats2half2_rn(turn.x, turn.y);
}

}  // namespace htree_cuda::gradient

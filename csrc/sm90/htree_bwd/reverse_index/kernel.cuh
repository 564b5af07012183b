// The reverse index of the backward: for every group of eight parents and every row, which of them the row visits and
// as which rank. A warp a list; lists ascend, so the parents of a group are neighbours in it, and the lane of the first
// one writes the entry. No atomics: an entry has one writer.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/htree_bwd/pack/kernel.cuh"

namespace htree_cuda::sm90::htree_bwd {

static __global__ void __launch_bounds__(kThreads) index_kernel(const __grid_constant__ Index args) {
  wait_for_previous_grid();
  int const lane = threadIdx.x % 32;
  std::int64_t const item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  int const row = static_cast<int>(item % args.chunk.rows);
  std::int64_t const list = item / args.chunk.rows;
  int const head = static_cast<int>(list % args.chunk.heads);
  int const layer = static_cast<int>(list / args.chunk.heads);  // whose parents the list holds
  if (layer >= args.layers || row >= args.chunk.queries) return;
  std::int64_t const t = args.chunk.position(row);
  if (layer >= entry_layer(t, args.tree.top_k)) return;
  int const count = candidates(t, layer, args.tree.layers, args.tree.top_k).parents;
  int const rightmost = static_cast<int>(t >> (kLog2Siblings * (layer + 1)));
  std::int64_t const bh = args.chunk.first_head + head;
  std::int64_t const b = bh / args.H_kv;
  std::int64_t const h = bh % args.H_kv;
  std::int64_t const query = args.chunk.first_query + row;
  std::int32_t const* const nodes =
      args.selection + (((layer * args.B + b) * args.T_q + query) * args.H_kv + h) * args.tree.top_k;
  std::uint32_t* const entries =
      args.visits.layer[layer] + static_cast<std::int64_t>(head) * args.tree.groups[layer] * args.chunk.rows + row;

  int largest = 0;       // so far: lists that do not ascend are made to
  int group_before = -1;  // of the entry before these 32
  for (int base = 0; base < count; base += 32) {
    bool const exists = base + lane < count;
    int node = exists ? min(max(nodes[base + lane], 0), rightmost) : 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int const before = __shfl_up_sync(kFullWarp, node, d);
      if (lane >= d) node = max(node, before);
    }
    node = max(node, largest);
    int const group = exists ? node / kGroupParents : -1;
    // A suffix union over the lanes of the same group, which are neighbours.
    std::uint32_t mask = 1u << (node % kGroupParents);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      std::uint32_t const further = __shfl_down_sync(kFullWarp, mask, d);
      int const its_group = __shfl_down_sync(kFullWarp, group, d);
      if (lane + d < 32 && its_group == group) mask |= further;
    }
    int before = __shfl_up_sync(kFullWarp, group, 1);
    if (lane == 0) before = group_before;
    std::uint32_t* const entry = entries + static_cast<std::int64_t>(group) * args.chunk.rows;
    if (exists && group != before) {
      *entry = mask | static_cast<std::uint32_t>(base + lane) << kGroupParents;
    } else if (exists && lane == 0) {
      *entry |= mask;  // the group began among the 32 before
    }
    __syncwarp();
    largest = __shfl_sync(kFullWarp, node, 31);
    group_before = __shfl_sync(kFullWarp, group, 31);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

// Sums of entry layers that work items of dkdv_entry have left apart are added to dk and dv: for each number one thread,
// segments of the rows in ascending order, so that the sums repeat bitwise. Memory bound; a thread has four columns of a
// node.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernel.cuh"
#include "pack.h"

namespace htree_cuda::sm90::htree_bwd::pack {

static __global__ void __launch_bounds__(kThreads) add_segments_kernel(const __grid_constant__ Args args, int K, int V) {
  wait_for_previous_grid();
  int const item_numbers = kItemNodes * (K + V);
  int const per_pair = item_numbers / 4 / kThreads;  // thread blocks
  int index = static_cast<int>(blockIdx.x) / per_pair;
  int layer = args.min_entry;
  while (index >= args.chunk.heads * args.entry[layer].pairs) index -= args.chunk.heads * args.entry[layer++].pairs;
  EntrySegments const split = args.entry[layer];
  if (!split.sums_apart) return;
  int const head = index / split.pairs;
  int const pair = index % split.pairs;
  int i = static_cast<int>(blockIdx.x) % per_pair * kThreads + static_cast<int>(threadIdx.x);
  float const* item = args.entry_sums + 4 * i;
  bool const of_keys = i < kItemNodes * K / 4;
  if (!of_keys) i -= kItemNodes * K / 4;
  int const dim = of_keys ? K : V;
  std::int64_t const node = pair * kItemNodes + i / (dim / 4);
  if (node >= args.tree.N[layer]) return;
  EntryRows const rows(args.chunk, layer, args.tree.top_k);
  int const reached = first_visiting_row(args.chunk.position(0), layer, rows, pair * kItemNodes);
  if (reached >= rows.end) return;

  float4* const to = reinterpret_cast<float4*>((of_keys ? args.dk : args.dv) +
                                               (head * args.node_rows + args.begin[layer] + node) * dim +
                                               i % (dim / 4) * 4);
  float4 sum = *to;
  int const first = split.of_row(reached);
  item += (split.first_sums + static_cast<std::int64_t>(head * split.segments + first) * split.pairs + pair) * item_numbers;
#pragma unroll 4
  for (int segment = first; segment <= split.of_row(rows.end - 1); ++segment) {
    float4 const x = *reinterpret_cast<float4 const*>(item);
    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    item += static_cast<std::int64_t>(split.pairs) * item_numbers;
  }
  *to = sum;
}

}  // namespace htree_cuda::sm90::htree_bwd::pack

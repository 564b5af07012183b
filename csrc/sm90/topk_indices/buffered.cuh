// The kernel for topk of at most 4096: a CTA takes a row.
#pragma once

#include "buffer.cuh"

namespace htree_cuda::sm90::topk_indices {

__global__ void __launch_bounds__(Config::kThreads, Config::kCtas)
    topk_indices_buffered(__grid_constant__ KernelParams const params) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Config::Buffered*>(shared_bytes);
  shared.search.histogram[threadIdx.x] = uint4{};

  // Causal windows grow with the query: the longest rows first.
  int const number = params.rows - 1 - static_cast<int>(blockIdx.x);
  Row const row(params, number);
  __syncthreads();
  uint32_t const start = row.first_tile();
  Buffer buffer{shared, row, static_cast<uint32_t>(params.topk), -INFINITY};
  // The first two tiles give a first limit. The second one stays in registers, if it is the last.
  float x[Config::kThreadElements];
  float next[Config::kThreadElements];
  row.load(x, start);
  row.load(next, start + Config::kTile);
  if (row.end > start + Config::kTile) {
    count_groups(shared.search, x);
    count_groups(shared.search, next);
    __syncthreads();
    buffer.limit = limit_of_groups(shared.search, find_bin(shared.search, params.topk), params.topk);
  }
  buffer.take_all(x, next, start);
  __syncthreads();
  buffer.write(List(params, number));
}

}  // namespace htree_cuda::sm90::topk_indices

// What both kernels share: where a row's list goes, and the order of warps. A CTA takes a row; slots are handed out by
// ordered scans, so the list ascends and never depends on timing.
#pragma once

#include "threshold.cuh"

namespace htree_cuda::sm90::topk_indices {

// The place that the list of a row is written to.
struct List {
  int* indices;
  float* values;
  int topk;

  __device__ __forceinline__ List(KernelParams const& p, int row)
      : indices(p.indices + static_cast<int64_t>(row) * p.topk),
        values(p.values == nullptr ? nullptr : p.values + static_cast<int64_t>(row) * p.topk),
        topk(p.topk) {}

  __device__ __forceinline__ void store(uint32_t slot, int row, float value) const {
    indices[slot] = row;
    if (values != nullptr) values[slot] = value;
  }
  __device__ __forceinline__ void fill(uint32_t from) const {
#pragma unroll 1
    for (uint32_t slot = from + threadIdx.x; slot < static_cast<uint32_t>(topk); slot += Config::kThreads) {
      store(slot, -1, -INFINITY);
    }
  }
};

// Exclusive prefix of a warp's number over the CTA's warps, and the total. `sums` may be used again after the barrier
// that follows the next one.
__device__ __forceinline__ uint32_t warps_prefix(uint32_t (&sums)[Config::kWarps], uint32_t own, uint32_t& total) {
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (lane == 0) sums[warp] = own;
  __syncthreads();
  uint32_t const x = lane < Config::kWarps ? sums[lane] : 0;
  total = __reduce_add_sync(kFullWarp, x);
  return __reduce_add_sync(kFullWarp, lane < warp ? x : 0);
}

}  // namespace htree_cuda::sm90::topk_indices

// Sums over segments of rows that repeat bitwise: segments are added in ascending order.
#pragma once

#include <cuda_runtime.h>

namespace htree_cuda::sm90::htree_bwd {

// A warp waits until `segments_before` segments were added to the sums of a KV block. The wait ends, because work items
// are handed out in the order in which their segments are added: the segments before this one were begun before it.
__device__ __forceinline__ void wait_for_segments(int* segments_added, int segments_before, int lane) {
  if (lane == 0) {
    while (atomicAdd(segments_added, 0) != segments_before) __nanosleep(200);
  }
  __syncwarp();
}

// Counts the warp's own segment, whose sums every lane has added.
__device__ __forceinline__ void count_segment(int* segments_added, int lane) {
  __threadfence();
  __syncwarp();
  if (lane == 0) atomicAdd(segments_added, 1);
}

}  // namespace htree_cuda::sm90::htree_bwd

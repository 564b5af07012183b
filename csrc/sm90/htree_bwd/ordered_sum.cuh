// Sums over segments of rows that repeat bitwise: segments are added in ascending order.
#pragma once

#include <cuda_runtime.h>

#include "device/ptx.cuh"
#include "device/sm90.cuh"

namespace htree_cuda::sm90::htree_bwd {

// A warp waits until `segments_before` segments were added to the sums of a KV block. The wait ends, because work items
// are handed out in the order in which their segments are added: the segments before this one were begun before it.
__device__ __forceinline__ void wait_for_segments(int* segments_added, int segments_before, int lane) {
  if (lane == 0) {
    while (atomicAdd(segments_added, 0) != segments_before) __nanosleep(200);
  }
  __syncwarp();
}

// Sums of a product's results are added 16 bytes at a time. Threads tq and tq ^ 1 have two neighbouring columns each, in
// two places: one thread gets all four of the first place, the other those of the second. `first` and `second` are
// where the first of this thread's own columns belongs.
struct FourColumns {
  float* to;
  float4 values;
};

__device__ __forceinline__ FourColumns four_columns(float* first, float* second, float2 of_first, float2 of_second,
                                                    int tq) {
  bool const odd = tq % 2 != 0;
  float const x = __shfl_xor_sync(kFullWarp, odd ? of_first.x : of_second.x, 1);
  float const y = __shfl_xor_sync(kFullWarp, odd ? of_first.y : of_second.y, 1);
  if (odd) return {second - 2, {x, y, of_second.x, of_second.y}};
  return {first, {of_first.x, of_first.y, x, y}};
}

// Four threads g, g ^ 1, g ^ 2 and g ^ 3, g being lane / 4, have a column each of four rows. Transposed, a thread has the
// four columns of row g % 4.
__device__ __forceinline__ float4 transpose_four(float4 x, int g) {
  bool const odd = g % 2 != 0;
  float const a = __shfl_xor_sync(kFullWarp, odd ? x.x : x.y, 4);
  float const b = __shfl_xor_sync(kFullWarp, odd ? x.z : x.w, 4);
  x = odd ? float4{a, x.y, b, x.w} : float4{x.x, a, x.z, b};
  bool const high = g / 2 % 2 != 0;
  float const c = __shfl_xor_sync(kFullWarp, high ? x.x : x.z, 8);
  float const d = __shfl_xor_sync(kFullWarp, high ? x.y : x.w, 8);
  return high ? float4{c, d, x.z, x.w} : float4{x.x, x.y, c, d};
}

// Counts the warp's own segment, whose sums every lane has added; `counts`: and what it counts for.
__device__ __forceinline__ void count_segment(int* segments_added, int lane, int counts = 1) {
  __threadfence();
  __syncwarp();
  if (lane == 0) atomicAdd(segments_added, counts);
}

}  // namespace htree_cuda::sm90::htree_bwd

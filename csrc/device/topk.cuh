// Exact stable top-k by radix select over float bits: three histograms instead of a sort.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace htree_cuda::topk {

// Importance as an unsigned key: larger is more important, NaN counts as infinity, 0 is kept for what is no candidate.
__device__ __forceinline__ uint32_t key(float importance) {
  uint32_t const bits = isnan(importance) ? 0x7f800000u : __float_as_uint(importance);
  return bits + 1;
}

// Exclusive prefix sum over the CTA, and its total. `warp_sums` has a word for each warp.
template <int kThreads>
__device__ __forceinline__ uint32_t block_prefix(uint32_t x, uint32_t* warp_sums, uint32_t& total) {
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  uint32_t inclusive = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    uint32_t const y = __shfl_up_sync(0xffffffffu, inclusive, d);
    if (lane >= d) inclusive += y;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    uint32_t const y = warp_sums[w];
    if (w < warp) before += y;
    total += y;
  }
  __syncthreads();
  return before + inclusive - x;
}

struct Threshold {
  uint32_t key;    // of the k-th largest
  uint32_t room;   // how many of equal key are among the k
  uint32_t equal;  // how many there are
};

struct alignas(16) Scratch {
  uint32_t histogram[2048];
  uint32_t warp_sums[32];
  uint32_t digit, room, equal;
};

// The k-th largest of the CTA's keys (kPerThread a thread, zeros ignored; at least k >= 1 others exist).
template <int kThreads, int kPerThread>
__device__ __forceinline__ Threshold threshold(uint32_t const (&keys)[kPerThread], uint32_t k, Scratch& scratch) {
  static_assert(kThreads == 256);
  uint32_t prefix = 0;
  uint32_t equal = 0;
  // Exponent and three bits first: importance spreads over few exponents, and counters shared by many cost time.
#pragma unroll
  for (int pass = 0; pass < 3; ++pass) {
    int const shift = pass == 0 ? 20 : pass == 1 ? 10 : 0;
    int const bits = pass == 0 ? 11 : 10;
    int const per_thread = (1 << bits) / kThreads;
    for (int i = threadIdx.x; i < (1 << bits); i += kThreads) scratch.histogram[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (keys[i] != 0 && (pass == 0 || (keys[i] >> (shift + bits)) == prefix)) {
        atomicAdd(&scratch.histogram[keys[i] >> shift & ((1 << bits) - 1)], 1u);
      }
    }
    __syncthreads();
    // Thread 0 has the largest digits.
    int const first = (1 << bits) - per_thread * (threadIdx.x + 1);
    uint32_t counts[8];
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < per_thread / 4; ++i) {
      uint4 const x = *reinterpret_cast<uint4 const*>(&scratch.histogram[first + 4 * i]);
      counts[4 * i] = x.x, counts[4 * i + 1] = x.y, counts[4 * i + 2] = x.z, counts[4 * i + 3] = x.w;
      sum += x.x + x.y + x.z + x.w;
    }
    uint32_t total;
    uint32_t above = block_prefix<kThreads>(sum, scratch.warp_sums, total);
    if (above < k && k <= above + sum) {
      for (int i = per_thread - 1; i >= 0; --i) {
        uint32_t count = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (j == i) count = counts[j];  // no run-time index into registers
        }
        if (k <= above + count) {
          scratch.digit = first + i;
          scratch.room = k - above;
          scratch.equal = count;
          break;
        }
        above += count;
      }
    }
    __syncthreads();
    prefix = prefix << bits | scratch.digit;
    k = scratch.room;
    equal = scratch.equal;
  }
  return {prefix, k, equal};
}

}  // namespace htree_cuda::topk

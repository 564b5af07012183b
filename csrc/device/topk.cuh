// Exact stable top-k of one row by one CTA of any number of warps. Importances are bit patterns: those of floats that are not
// negative compare as the floats do, and everything beyond counts as infinity (NaN does).
//
// Most of a row is told from the k largest by a bound, and never looked at again:
//   bound      maxima of groups of few importances; the k-th largest maximum is no larger than the k-th largest
//              importance, for k groups have one as large. Each warp takes its share of k among its own groups, roughly and
//              from below, and the least of the warps' bounds holds for the row.
//   list       importances no smaller than the bound, each thread's own in shared memory: k and a few where importance
//              spreads, the whole row where all are equal
//   threshold  the k-th largest of the list: histograms over 256 parts of what range is left, until a part holds few,
//              which are compared with each other
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90.cuh"

namespace htree_cuda::device::topk {

inline constexpr int kGroups = 8;  // of a thread
inline constexpr int kBins = 256;
inline constexpr int kFew = 32;
inline constexpr uint32_t kInfinity = 0x7f800000u;

struct Threshold {
  uint32_t value;  // the k-th largest
  uint32_t room;   // how many equal ones are among the k
  uint32_t equal;  // how many there are
};

template <int kThreads_, int kPerThread>
struct alignas(16) Scratch {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  uint32_t list[kPerThread * kThreads];  // entry i of thread t at i * kThreads + t
  uint32_t histogram[kBins];
  uint32_t few[kFew];
  uint32_t few_count;
  uint32_t lowest[kWarps], highest[kWarps];
  uint32_t warp_sums[kWarps];
  uint32_t digit, room, equal;

  __device__ __forceinline__ void clear_histogram() {
#pragma unroll
    for (int i = threadIdx.x; i < kBins; i += kThreads) histogram[i] = 0;
  }
};

// Exclusive prefix sum over the CTA, and its total. `warp_sums` has a word for each warp.
template <int kWarps>
__device__ __forceinline__ uint32_t block_prefix(uint32_t x, uint32_t (&warp_sums)[kWarps], uint32_t& total) {
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  uint32_t inclusive = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    uint32_t const y = __shfl_up_sync(kFullWarp, inclusive, d);
    if (lane >= d) inclusive += y;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    uint32_t const y = warp_sums[w];
    if (w < warp) before += y;
    total += y;
  }
  __syncthreads();
  return before + inclusive - x;
}

// A bound that at least `want` of the warp's groups reach, and the largest group. It need not be tight: an eighth more
// than wanted ends the search. Zero where more are wanted than there are.
__device__ __forceinline__ uint32_t warp_bound(uint32_t const (&groups)[kGroups], uint32_t want, uint32_t& highest) {
  uint32_t low = groups[0];
  uint32_t high = groups[0];
#pragma unroll
  for (int i = 1; i < kGroups; ++i) {
    low = min(low, groups[i]);
    high = max(high, groups[i]);
  }
  low = __reduce_min_sync(kFullWarp, low);
  highest = high = __reduce_max_sync(kFullWarp, high);
  if (want > 32 * kGroups) return 0;
  while (low < high) {
    uint32_t const middle = high - (high - low) / 2;
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) count += (middle - 1 - groups[i]) >> 31;  // whether it is as large
    count = __reduce_add_sync(kFullWarp, count);
    if (count < want) {
      high = middle - 1;
    } else {
      low = middle;
      if (count <= want + want / 8) break;
    }
  }
  return low;
}

// The k-th largest of the lists, of which this thread's ends before `end`; all entries are in low .. high but for those
// that count as infinity, which is `high` then. The histogram and few_count are zero, and every thread has been through a
// barrier since. At least k >= 1 entries exist.
template <class Scratch>
__device__ __forceinline__ Threshold threshold(Scratch& scratch, int end, uint32_t low, uint32_t high, uint32_t k) {
  constexpr int kThreads = Scratch::kThreads;
  int const lane = threadIdx.x % 32;
  uint32_t const whole = high - low;
  // Entries relative to `low`; of them those in begin .. begin + range are left.
  auto const entry = [&](int at) { return min(scratch.list[at] - low, whole); };
  uint32_t begin = 0;
  uint32_t range = whole;
  uint32_t equal;
  int shift = max(24 - __clz(range), 0);
#pragma unroll 1
  for (int at = threadIdx.x; at < end; at += kThreads) atomicAdd(&scratch.histogram[entry(at) >> shift], 1u);
  while (true) {
    __syncthreads();
    if (threadIdx.x < 32) {
      // Lane 0 has the largest digits.
      int const first = kBins - 8 * (lane + 1);
      uint4 const lower = *reinterpret_cast<uint4 const*>(&scratch.histogram[first]);
      uint4 const upper = *reinterpret_cast<uint4 const*>(&scratch.histogram[first + 4]);
      uint32_t const counts[8] = {upper.w, upper.z, upper.y, upper.x, lower.w, lower.z, lower.y, lower.x};
      uint32_t sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += counts[i];
      uint32_t inclusive = sum;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        uint32_t const y = __shfl_up_sync(kFullWarp, inclusive, d);
        if (lane >= d) inclusive += y;
      }
      uint32_t passed = inclusive - sum;
      if (passed < k && k <= inclusive) {
        uint32_t above = 0;
        uint32_t digit = 0;
        uint32_t here = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (passed < k) above = passed, digit = first + 7 - i, here = counts[i];
          passed += counts[i];
        }
        scratch.digit = digit;
        scratch.room = k - above;
        scratch.equal = here;
      }
    }
    __syncthreads();
    begin += scratch.digit << shift;
    range = (1u << shift) - 1;
    k = scratch.room;
    equal = scratch.equal;
    if (range == 0) return {low + begin, k, equal};
    if (equal <= kFew) break;
    scratch.clear_histogram();
    __syncthreads();
    shift = max(24 - __clz(range), 0);
#pragma unroll 1
    for (int at = threadIdx.x; at < end; at += kThreads) {
      uint32_t const x = entry(at) - begin;
      if (x <= range) atomicAdd(&scratch.histogram[x >> shift], 1u);
    }
  }

#pragma unroll 1
  for (int at = threadIdx.x; at < end; at += kThreads) {
    uint32_t const x = entry(at);
    if (x - begin <= range) scratch.few[atomicAdd(&scratch.few_count, 1u)] = x;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    // Lane i has one of them. The smallest that fewer than k exceed is the k-th largest.
    bool const exists = lane < equal;
    uint32_t const own = exists ? scratch.few[lane] : 0;
    uint32_t larger = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < equal; ++i) larger += (own - __shfl_sync(kFullWarp, own, i)) >> 31;  // whether that one is larger
    uint32_t const found = __reduce_min_sync(kFullWarp, exists && larger < k ? own : ~0u);
    uint32_t const above = __popc(__ballot_sync(kFullWarp, exists && own > found));
    uint32_t const same = __popc(__ballot_sync(kFullWarp, exists && own == found));
    if (lane == 0) scratch.digit = found, scratch.room = k - above, scratch.equal = same;
  }
  __syncthreads();
  return {low + scratch.digit, scratch.room, scratch.equal};
}

}  // namespace htree_cuda::device::topk

// Exact stable top-k of one row by one CTA of any number of warps. Importances are compared as bit patterns, because
// the bits of floats that are not negative compare as the floats do; every larger pattern counts as infinity, NaN among
// them.
//
// A bound tells most of a row from the k largest, and that part is not read again:
//   bound      A row is cut into bins of few importances. The k-th largest of the bins' maxima is no larger than the
//              k-th largest importance, since k bins have one as large. Each warp takes its share of k among its own
//              bins, roughly and from below, and the least of the warps' bounds holds for the row.
//   list       Importances no smaller than the bound go to shared memory, to a list for each thread: k and a few where
//              importances spread, the whole row where all are equal.
//   threshold  The k-th largest of the lists is found by histograms over 256 parts of the range that is left, until a
//              part holds few entries, which are compared with each other.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90.cuh"

namespace htree_cuda::device::topk {

inline constexpr int kRowBins = 8;  // bins of a row that a thread has
inline constexpr int kHistogramBins = 256;
inline constexpr int kFew = 32;
inline constexpr uint32_t kInfinity = 0x7f800000u;

struct Threshold {
  uint32_t value;  // the k-th largest
  uint32_t room;   // how many importances equal to it are among the k
  uint32_t equal;  // how many importances equal to it there are
};

template <int kThreads_, int kPerThread>
struct alignas(16) Scratch {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  uint32_t list[kPerThread * kThreads];  // entry i of thread t at i * kThreads + t
  uint32_t histogram[kHistogramBins];
  uint32_t few[kFew];
  uint32_t few_count;
  uint32_t lowest[kWarps], highest[kWarps];
  uint32_t warp_sums[kWarps];
  uint32_t digit, room, equal;

  __device__ __forceinline__ void clear_histogram() {
#pragma unroll
    for (int i = threadIdx.x; i < kHistogramBins; i += kThreads) histogram[i] = 0;
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

// A bound that at least `want` of the warp's bins reach, and the largest bin. It need not be tight: an eighth more
// than wanted ends the search. The bound is zero where more bins are wanted than there are.
__device__ __forceinline__ uint32_t warp_bound(uint32_t const (&bins)[kRowBins], uint32_t want, uint32_t& highest) {
  uint32_t low = bins[0];
  uint32_t high = bins[0];
#pragma unroll
  for (int i = 1; i < kRowBins; ++i) {
    low = min(low, bins[i]);
    high = max(high, bins[i]);
  }
  low = __reduce_min_sync(kFullWarp, low);
  highest = high = __reduce_max_sync(kFullWarp, high);
  if (want > 32 * kRowBins) return 0;
  while (low < high) {
    uint32_t const middle = high - (high - low) / 2;
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kRowBins; ++i) count += (middle - 1 - bins[i]) >> 31;  // 1 where the bin reaches `middle`
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

// The k-th largest entry of the lists; this thread's list ends before `end`. All entries lie in low .. high, but for
// those that count as infinity, in which case `high` is infinity. On entry the histogram and few_count are zero, every
// thread has been through a barrier since they were cleared, and there are at least k >= 1 entries.
template <class Scratch>
__device__ __forceinline__ Threshold threshold(Scratch& scratch, int end, uint32_t low, uint32_t high, uint32_t k) {
  constexpr int kThreads = Scratch::kThreads;
  int const lane = threadIdx.x % 32;
  uint32_t const whole = high - low;
  // Entries are taken relative to `low`; those in begin .. begin + range are left.
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
      // Lane 0 has the eight largest digits.
      int const first = kHistogramBins - 8 * (lane + 1);
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
    // Lane i has one of the entries. The smallest entry that fewer than k entries exceed is the k-th largest.
    bool const exists = lane < equal;
    uint32_t const own = exists ? scratch.few[lane] : 0;
    uint32_t larger = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < equal; ++i) larger += (own - __shfl_sync(kFullWarp, own, i)) >> 31;  // entry i is larger: 1
    uint32_t const found = __reduce_min_sync(kFullWarp, exists && larger < k ? own : ~0u);
    uint32_t const above = __popc(__ballot_sync(kFullWarp, exists && own > found));
    uint32_t const same = __popc(__ballot_sync(kFullWarp, exists && own == found));
    if (lane == 0) scratch.digit = found, scratch.room = k - above, scratch.equal = same;
  }
  __syncthreads();
  return {low + scratch.digit, scratch.room, scratch.equal};
}

}  // namespace htree_cuda::device::topk

// The k-th largest key of what a CTA visits, by histograms over the range of keys that is left. No list of candidates
// is kept on the way, so that no number of equal keys is too many.
#pragma once

#include "row.cuh"

namespace htree_cuda::sm90::topk_indices {

// Selected are the keys larger than `key`, and the first `room` of those equal to it.
struct Threshold {
  uint32_t key;
  uint32_t room;

  __device__ __forceinline__ bool above(uint32_t x) const { return x > key; }
  __device__ __forceinline__ bool ties(uint32_t x) const { return x == key; }
};

// Least and greatest of what the threads of a CTA have. The words may be used again after the next barrier.
__device__ __forceinline__ void reduce_range(Config::Search& search, uint32_t& low, uint32_t& high) {
  low = __reduce_min_sync(kFullWarp, low);
  high = __reduce_max_sync(kFullWarp, high);
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (lane == 0) search.lowest[warp] = low, search.highest[warp] = high;
  __syncthreads();
  low = __reduce_min_sync(kFullWarp, search.lowest[lane % Config::kWarps]);
  high = __reduce_max_sync(kFullWarp, search.highest[lane % Config::kWarps]);
}

// The four bins of this thread; the first thread has the highest.
__device__ __forceinline__ uint4& own_bins(Config::Search& search) {
  return search.histogram[Config::kThreads - 1 - threadIdx.x];
}

// Finds the bin that holds the k-th largest of what was counted, for all threads: search.digit, how many of it are among
// the k (room) and how many it holds (equal). A thread brings the counts of its bins. Returns how many were counted; with
// fewer than k nothing is found.
__device__ __forceinline__ uint32_t find_bin_of(Config::Search& search, uint4 const& counts, uint32_t k) {
  uint32_t total;
  uint32_t passed = topk::block_prefix(counts.x + counts.y + counts.z + counts.w, search.warp_sums, total);
  uint32_t const descending[4] = {counts.w, counts.z, counts.y, counts.x};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (passed < k && k <= passed + descending[i]) {
      search.digit = Config::kBins - 1 - 4 * threadIdx.x - i;
      search.room = k - passed;
      search.equal = descending[i];
    }
    passed += descending[i];
  }
  __syncthreads();
  return total;
}

// The same of the histogram, which it clears. A barrier lies behind the counting.
__device__ __forceinline__ uint32_t find_bin(Config::Search& search, uint32_t k) {
  uint4 const counts = own_bins(search);
  own_bins(search) = uint4{};
  return find_bin_of(search, counts, k);
}

// The k-th largest of the few keys that are left, by every warp for itself.
__device__ __forceinline__ Threshold compare_few(Config::Search const& search, uint32_t k) {
  int const lane = threadIdx.x % 32;
  uint32_t const count = search.few_count;
  bool const exists = lane < count;
  uint32_t const own = exists ? search.few[lane] : 0;
  uint32_t larger = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < count; ++i) larger += __shfl_sync(kFullWarp, own, i) > own;
  uint32_t const found = __reduce_min_sync(kFullWarp, exists && larger < k ? own : ~0u);
  return {found, k - __popc(__ballot_sync(kFullWarp, exists && own > found))};
}

// visit(f) calls f(key) for every key that this thread has, the same ones each time. The CTA has more than k >= 1 keys,
// all in low .. high.
template <class Visit>
__device__ __forceinline__ Threshold find_threshold(Config::Search& search, Visit&& visit, uint32_t low, uint32_t high, uint32_t k) {
  auto* const bins = reinterpret_cast<uint32_t*>(search.histogram);
  uint32_t begin = low;
  uint32_t range = high - low;
  if (threadIdx.x == 0) search.few_count = 0;
#pragma unroll 1
  while (true) {
    int const shift = max(32 - Config::kBinBits - __clz(range), 0);
    visit([&](uint32_t key) {
      uint32_t const past = key - begin;
      if (past <= range) atomicAdd(&bins[past >> shift], 1u);
    });
    __syncthreads();
    find_bin(search, k);
    begin += search.digit << shift;
    range = (1u << shift) - 1;
    k = search.room;
    uint32_t const equal = search.equal;
    // A bin that is selected whole: its keys, and no others, are larger than begin - 1. No key is 0.
    if (k == equal) return {begin - 1, 0};
    if (range == 0) return {begin, k};
    if (equal <= 32) break;
  }
  visit([&](uint32_t key) {
    if (key - begin <= range) search.few[atomicAdd(&search.few_count, 1u)] = key;
  });
  __syncthreads();
  return compare_few(search, k);
}

}  // namespace htree_cuda::sm90::topk_indices

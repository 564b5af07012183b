// The kernel for few rows, for topk of at most 4096: a cluster of CTAs divides a row. Each puts what passes of its part to
// its buffer, by a limit that all of them count together, and the first gathers the buffers, in the order of the row, and
// selects.
#pragma once

#include "buffer.cuh"
#include "device/barriers.cuh"

namespace htree_cuda::sm90::topk_indices {

// What the CTAs of a row did before is visible to all of them.
__device__ __forceinline__ void sync_row() {
  barriers::cluster_arrive();
  barriers::cluster_wait();
}

// The address of what lies at `own` in the CTA of rank `rank`, whose shared memory is laid out as this one's.
template <class T>
__device__ __forceinline__ uint32_t address_of(T const* own, uint32_t rank) {
  return ptx::map_to_rank(ptx::shared_address(own), rank);
}

// This CTA's part of a row: whole parts of a warp, so that loads are whole lines.
__device__ __forceinline__ Row part_of(Row row) {
  uint32_t const start = row.first_tile();
  uint32_t const all = row.end > start ? row.end - start : 0;
  uint32_t const part =
      (all / ptx::cluster_size() + Config::kWarpElements) / Config::kWarpElements * Config::kWarpElements;
  uint32_t const from = start + ptx::cluster_rank() * part;
  row.first = max(row.first, from);
  row.end = min(row.end, from + part);
  return row;
}

// How many groups all CTAs have counted, and what find_bin says of them. Clears the histogram.
__device__ __forceinline__ uint32_t find_bin_of_all(Config::Search& search, uint32_t k) {
  sync_row();
  uint4 sum{};
#pragma unroll 4
  for (uint32_t i = 0; i < Config::kRowCtas; ++i) {
    if (i >= ptx::cluster_size()) break;
    uint4 const counts = ptx::load_cluster_16B(address_of(&own_bins(search), i));
    sum.x += counts.x, sum.y += counts.y, sum.z += counts.z, sum.w += counts.w;
  }
  sync_row();
  own_bins(search) = uint4{};
  return find_bin_of(search, sum, k);
}

// Appends the entries of the other CTAs, in the order of the row: as many CTAs at a time as the buffer has room for.
__device__ __forceinline__ void gather(Buffer& buffer) {
  Config::Buffered& shared = buffer.shared;
  constexpr int kThreadsEach = Config::kThreads / Config::kRowCtas;  // copy from each CTA
#pragma unroll 1
  for (uint32_t i = 1; i < ptx::cluster_size(); ++i) {
    int const more = shared.counts[i];
    if (buffer.count + more > Config::kCapacity) {
      __syncthreads();
      buffer.cut();
    }
    if (threadIdx.x / kThreadsEach == i) {
      uint32_t const values = address_of(shared.value, i);
      uint32_t const rows = address_of(shared.row, i);
#pragma unroll 1
      for (int at = 4 * (threadIdx.x % kThreadsEach); at < more; at += 4 * kThreadsEach) {
        uint4 const value = ptx::load_cluster_16B(values + 4 * at);
        uint4 const row = ptx::load_cluster_16B(rows + 4 * at);
        uint32_t const value_of[4] = {value.x, value.y, value.z, value.w};
        uint32_t const row_of[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (at + c >= more) break;
          shared.value[buffer.count + at + c] = __uint_as_float(value_of[c]);
          shared.row[buffer.count + at + c] = static_cast<int>(row_of[c]);
        }
      }
    }
    buffer.count += more;
  }
}

__global__ void __launch_bounds__(Config::kThreads, Config::kCtas)
    topk_indices_divided(__grid_constant__ KernelParams const params) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Config::Buffered*>(shared_bytes);
  shared.search.histogram[threadIdx.x] = uint4{};

  auto const number = [] { return static_cast<int>(blockIdx.x / ptx::cluster_size()); };
  Row const row = part_of(Row(params, number()));
  __syncthreads();
  uint32_t const start = row.first_tile();
  Buffer buffer{shared, row, static_cast<uint32_t>(params.topk), -INFINITY};
  float x[Config::kThreadElements];
  float next[Config::kThreadElements];
  row.load(x, start);
  row.load(next, start + Config::kTile);
  count_groups(shared.search, x);
  count_groups(shared.search, next);
  buffer.limit = limit_of_groups(shared.search, find_bin_of_all(shared.search, params.topk), params.topk);
  row.load(next, start + Config::kTile);  // again: it has no registers while the histograms are added
  buffer.take_all(x, next, start);
  __syncthreads();
  // With more entries than that, a buffer that was cut could not take those of another CTA.
  if (buffer.count > Config::kMaxBuffered) buffer.cut();
  if (threadIdx.x == 0) ptx::store_cluster_4B(address_of(&shared.counts[ptx::cluster_rank()], 0), buffer.count);
  sync_row();
  if (ptx::cluster_rank() == 0) gather(buffer);
  sync_row();  // the others' memory has been read
  if (ptx::cluster_rank() == 0) buffer.write(List(params, number()));
}

}  // namespace htree_cuda::sm90::topk_indices

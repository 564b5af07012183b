// The kernel for any topk. The row is read again for each histogram, and once more to hand out slots.
#pragma once

#include "list.cuh"

namespace htree_cuda::sm90::topk_indices {

__global__ void __launch_bounds__(Config::kThreads, Config::kCtas)
    topk_indices_rescan(__grid_constant__ KernelParams const params) {
  __shared__ Config::Search search;
  search.histogram[threadIdx.x] = uint4{};

  int const number = params.rows - 1 - static_cast<int>(blockIdx.x);
  Row const row(params, number);
  List const list(params, number);
  auto const visit = [&](auto&& f) {
#pragma unroll 1
    for (uint32_t tile = row.first_tile(); tile < row.end; tile += Config::kTile) {
      float x[Config::kThreadElements];
      row.load(x, tile);
#pragma unroll
      for (int i = 0; i < Config::kThreadElements; ++i) {
        if (passes(x[i], -INFINITY)) f(order_key(x[i]));
      }
    }
  };

  uint32_t low = kNaNKey;
  uint32_t high = 0;
  uint32_t candidates = 0;
  visit([&](uint32_t key) { low = min(low, key), high = max(high, key), ++candidates; });
  reduce_range(search, low, high);
  uint32_t total;
  topk::block_prefix(candidates, search.warp_sums, total);
  uint32_t const k = list.topk;
  Threshold const threshold = total <= k ? Threshold{0, 0} : find_threshold(search, visit, low, high, k);

  uint32_t slots = 0;
  uint32_t ties = 0;
  int parity = 0;
#pragma unroll 1
  for (uint32_t tile = row.first_tile(); tile < row.end; tile += Config::kTile) {
    float x[Config::kThreadElements];
    row.load(x, tile);
    uint32_t above = 0;
    uint32_t equal = 0;
#pragma unroll
    for (int i = 0; i < Config::kThreadElements; ++i) {
      uint32_t const key = order_key(x[i]);
      bool const candidate = passes(x[i], -INFINITY);
      above |= candidate && threshold.above(key) ? 1u << i : 0u;
      equal |= candidate && threshold.ties(key) ? 1u << i : 0u;
    }
    WarpPlaces const above_places(above);
    WarpPlaces const equal_places(equal);
    uint32_t both;
    uint32_t const before = warps_prefix(search.tile_sums[parity], above_places.total() | equal_places.total() << 16, both);
    parity ^= 1;
#pragma unroll
    for (int j = 0; j < Config::kVectors; ++j) {
      uint32_t tie = ties + (before >> 16) + equal_places.before_vector(j);
      uint32_t slot = slots + (before & 0xffffu) + above_places.before_vector(j) + min(tie, threshold.room) - min(ties, threshold.room);
      int const first = row.row_of(Row::position(tile, j));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        bool const ties_here = equal >> (4 * j + c) & 1u;
        if ((above >> (4 * j + c) & 1u) || (ties_here && tie < threshold.room)) {
          list.store(slot, first + c, x[4 * j + c]);
          ++slot;
        }
        tie += ties_here;
      }
    }
    slots += (both & 0xffffu) + min(ties + (both >> 16), threshold.room) - min(ties, threshold.room);
    ties += both >> 16;
  }
  list.fill(slots);
}

}  // namespace htree_cuda::sm90::topk_indices

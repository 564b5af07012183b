// The kernel for topk of at most 4096. The row is read once, its start twice. What is larger than `limit` goes to a buffer in
// shared memory, in row order; a buffer that would overflow is cut to the best topk, whose least becomes the limit: later
// rows equal to it lose their tie. A row that ascends cuts often, and no row needs more room.
#pragma once

#include "list.cuh"

namespace htree_cuda::sm90::topk_indices {

// Calls store(slot, row, value) for the selected entries of the buffer, slots ascending, and returns their number.
// `least` is the least key of those. A store to the buffer itself writes at or before the entries that have been read.
template <class Store>
__device__ __forceinline__ uint32_t select_entries(Config::Buffered& shared, int count, Threshold threshold, uint32_t& least,
                                                   Store&& store) {
  uint32_t slots = 0;
  uint32_t ties = 0;
  least = kNaNKey;
#pragma unroll 1
  for (int tile = 0; tile < count; tile += 4 * Config::kThreads) {
    int const at = tile + 4 * static_cast<int>(threadIdx.x);
    float value[4];
    int row[4];
    uint32_t key[4];
    uint32_t own = 0;
    if (at < count) {
      float4 const values = *reinterpret_cast<float4 const*>(&shared.value[at]);
      int4 const rows = *reinterpret_cast<int4 const*>(&shared.row[at]);
      value[0] = values.x, value[1] = values.y, value[2] = values.z, value[3] = values.w;
      row[0] = rows.x, row[1] = rows.y, row[2] = rows.z, row[3] = rows.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      key[i] = at + i < count ? order_key(value[i]) : 0;
      own += threshold.above(key[i]) ? 1u : at + i < count && threshold.ties(key[i]) ? 0x10000u : 0u;
    }
    uint32_t total;
    uint32_t const before = topk::block_prefix(own, shared.search.warp_sums, total);
    uint32_t tie = ties + (before >> 16);
    uint32_t slot = slots + (before & 0xffffu) + min(tie, threshold.room) - min(ties, threshold.room);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bool const equal = at + i < count && threshold.ties(key[i]);
      if (threshold.above(key[i]) || (equal && tie < threshold.room)) {
        least = min(least, key[i]);
        store(slot, row[i], value[i]);
        ++slot;
      }
      tie += equal;
    }
    slots += (total & 0xffffu) + min(ties + (total >> 16), threshold.room) - min(ties, threshold.room);
    ties += total >> 16;
  }
  return slots;
}

// The best k of the buffer's entries; all where there are no more.
__device__ __forceinline__ Threshold buffer_threshold(Config::Buffered& shared, int count, int k) {
  if (count <= k) return {0, 0};
  auto const visit = [&](auto&& f) {
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += Config::kThreads) f(order_key(shared.value[i]));
  };
  uint32_t low = kNaNKey;
  uint32_t high = 0;
  visit([&](uint32_t key) { low = min(low, key), high = max(high, key); });
  reduce_range(shared.search, low, high);
  return find_threshold(shared.search, visit, low, high, k);
}

__device__ __forceinline__ uint32_t passing(float const (&x)[Config::kThreadElements], float limit) {
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < Config::kThreadElements; ++i) mask |= passes(x[i], limit) ? 1u << i : 0u;
  return mask;
}

// A limit that at least k rows pass, from the start of a row that is longer than a tile: as many groups of four as that
// have a maximum no smaller. Where logits spread, an eighth more than k of the rows so far pass.
__device__ __forceinline__ float first_limit(Config::Search& search, Row const& row, uint32_t k) {
  constexpr int kShift = 32 - Config::kBinBits;
  auto* const bins = reinterpret_cast<uint32_t*>(search.histogram);
  uint32_t tile = row.first_tile();
  if (row.end <= tile + Config::kTile) return -INFINITY;
#pragma unroll 1
  for (int i = 0; i < Config::kSampleTiles; ++i, tile += Config::kTile) {
    float x[Config::kThreadElements];
    row.load(x, tile);
#pragma unroll
    for (int j = 0; j < Config::kVectors; ++j) {
      float const most = ptx::max_or_nan(ptx::max_or_nan(x[4 * j], x[4 * j + 1]), ptx::max_or_nan(x[4 * j + 2], x[4 * j + 3]));
      if (passes(most, -INFINITY)) atomicAdd(&bins[order_key(most) >> kShift], 1u);
    }
  }
  __syncthreads();
  if (find_bin(search, k) < k) return -INFINITY;
  uint32_t const edge = search.digit << kShift;
  // The largest number below the bin: beside zero that is below -0, and below NaN it is infinity.
  if (edge > order_key(INFINITY)) return INFINITY;
  return from_key(edge - (edge == order_key(0.0f) ? 2 : 1));
}

__global__ void __launch_bounds__(Config::kThreads, Config::kCtas)
    topk_indices_buffered(__grid_constant__ KernelParams const params) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Config::Buffered*>(shared_bytes);
  shared.search.histogram[threadIdx.x] = uint4{};

  // Causal windows grow with the query: the longest rows first.
  int const number = params.rows - 1 - static_cast<int>(blockIdx.x);
  Row const row(params, number);
  int count = 0;
  __syncthreads();
  float limit = first_limit(shared.search, row, params.topk);
  int parity = 0;
  uint32_t tile = row.first_tile();
#pragma unroll 1
  while (tile < row.end) {
    float x[Config::kThreadElements];
    row.load(x, tile);
    uint32_t const mask = passing(x, limit);
    WarpPlaces const places(mask);
    uint32_t total;
    uint32_t const slot = count + warps_prefix(shared.search.tile_sums[parity], places.total(), total);
    parity ^= 1;
    if (count + total <= Config::kCapacity) {
      if (places.totals != 0) {
#pragma unroll
        for (int j = 0; j < Config::kVectors; ++j) {
          uint32_t at = slot + places.before_vector(j);
          int const first = row.row_of(Row::position(tile, j));
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (mask >> (4 * j + c) & 1u) {
              shared.value[at] = x[4 * j + c];
              shared.row[at] = first + c;
              ++at;
            }
          }
        }
      }
      count += total;
      tile += Config::kTile;
    } else {
      // The tile is loaded again after the cut, from L2: its registers are scarcer than the time of a cut. The barrier of
      // warps_prefix is behind what the last tile wrote to the buffer.
      Threshold const threshold = buffer_threshold(shared, count, params.topk);
      uint32_t least;
      count = select_entries(shared, count, threshold, least, [&](uint32_t to, int r, float value) {
        shared.value[to] = value;
        shared.row[to] = r;
      });
      __syncthreads();
      // More than kMaxBuffered entries were there, so topk are left.
      uint32_t highest = 0;
      reduce_range(shared.search, least, highest);
      limit = from_key(least);
      if (least == kNaNKey) tile = row.end;  // topk NaNs: no later row comes before one of them
    }
  }
  __syncthreads();
  Threshold const threshold = buffer_threshold(shared, count, params.topk);
  uint32_t least;
  List const list(params, number);
  list.fill(select_entries(shared, count, threshold, least, [&](uint32_t slot, int r, float value) { list.store(slot, r, value); }));
}

}  // namespace htree_cuda::sm90::topk_indices

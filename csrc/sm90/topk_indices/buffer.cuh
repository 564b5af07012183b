// A row, or a part of it, that is read once, its start twice. What is larger than `limit` goes to a buffer in shared memory,
// in row order; a buffer that would overflow is cut to the best topk, whose least becomes the limit: later rows equal to it
// lose their tie. A row that ascends cuts often, and no row needs more room.
#pragma once

#include "list.cuh"

namespace htree_cuda::sm90::topk_indices {

inline constexpr int kSampleShift = 32 - Config::kBinBits;

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

// The largest of each group of four of a tile, counted by the upper bits of their keys.
__device__ __forceinline__ void count_groups(Config::Search& search, float const (&x)[Config::kThreadElements]) {
  auto* const bins = reinterpret_cast<uint32_t*>(search.histogram);
#pragma unroll
  for (int j = 0; j < Config::kVectors; ++j) {
    float const most = ptx::max_or_nan(ptx::max_or_nan(x[4 * j], x[4 * j + 1]), ptx::max_or_nan(x[4 * j + 2], x[4 * j + 3]));
    if (passes(most, -INFINITY)) atomicAdd(&bins[order_key(most) >> kSampleShift], 1u);
  }
}

// A limit that at least k rows pass, from the bins of the groups' maxima, of which `counted` were counted: as many rows as
// groups have a maximum no smaller. Where logits spread, an eighth more than k of their rows pass.
__device__ __forceinline__ float limit_of_groups(Config::Search const& search, uint32_t counted, uint32_t k) {
  if (counted < k) return -INFINITY;
  uint32_t const edge = search.digit << kSampleShift;
  // The largest number below the bin: beside zero that is below -0, and below NaN it is infinity.
  if (edge > order_key(INFINITY)) return INFINITY;
  return from_key(edge - (edge == order_key(0.0f) ? 2 : 1));
}

// The buffer of a row while its tiles go by.
struct Buffer {
  Config::Buffered& shared;
  Row const& row;
  uint32_t k;
  float limit;
  int count = 0;
  bool full = false;  // of NaNs: no later row comes before one of them

  // Appends what passes of a tile, or nothing where there is no room, and says which.
  __device__ __forceinline__ bool take(float const (&x)[Config::kThreadElements], uint32_t tile) {
    uint32_t const mask = passing(x, limit);
    WarpPlaces const places(mask);
    uint32_t total;
    uint32_t const slot = count + warps_prefix(shared.search.tile_sums[tile / Config::kTile % 2], places.total(), total);
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
      return true;
    }
    return false;
  }

  // Appends what passes of the row from the tile at `tile` on, which `x` holds, as `next` holds the one behind it.
  __device__ __forceinline__ void take_all(float const (&x)[Config::kThreadElements],
                                           float (&next)[Config::kThreadElements], uint32_t tile) {
    take(x, tile);  // an empty buffer has room
    tile += Config::kTile;
#pragma unroll 1
    while (tile < row.end && !full) {
      if (take(next, tile)) {
        tile += Config::kTile;
      } else {
        cut();
      }
      row.load(next, tile);
    }
  }

  // Writes the best k. A barrier lies behind the last entry.
  __device__ __forceinline__ void write(List const& list) {
    Threshold const threshold = buffer_threshold(shared, count, k);
    uint32_t least;
    list.fill(select_entries(shared, count, threshold, least,
                             [&](uint32_t slot, int r, float value) { list.store(slot, r, value); }));
  }

  // Keeps the best k, after a tile that had no room: the barrier of warps_prefix is behind what the last one wrote.
  __device__ __forceinline__ void cut() {
    Threshold const threshold = buffer_threshold(shared, count, k);
    uint32_t least;
    count = select_entries(shared, count, threshold, least, [&](uint32_t to, int r, float value) {
      shared.value[to] = value;
      shared.row[to] = r;
    });
    __syncthreads();
    // More than kMaxBuffered entries were there, so k are left.
    uint32_t highest = 0;
    reduce_range(shared.search, least, highest);
    limit = from_key(least);
    full = least == kNaNKey;
  }
};

}  // namespace htree_cuda::sm90::topk_indices

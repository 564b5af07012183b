// A selection that the caller gave, made into what the attend passes read: the nodes of a row and a bit for each
// candidate that is expanded. A warp serves a row. It looks for each given node among the row's candidates, marks the
// place, and reads nodes and bits from the marks, so that lists of any content become a set that a forward could have
// selected.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/sm90.cuh"
#include "host/launch_overlapped.cuh"
#include "namespaces.h"
#include "tree/replay.h"

namespace htree_cuda::tree::replay {

using namespace host;
using namespace device;

inline constexpr int kWarps = 8;
inline constexpr int kMaxWords = kMaxTopK * kSiblings / 32;  // of marks, a bit a candidate
inline constexpr int kLaneWords = kMaxWords / 32;            // neighbouring words that a lane reads

struct Scratch {
  uint32_t marks[kMaxWords];
  std::int32_t parents[kMaxTopK];
  std::int32_t nodes[kMaxTopK];
};

// The place of a parent in the ascending list; -1 where it is not there.
__device__ __forceinline__ int place_of(std::int32_t const* parents, int count, int parent) {
  int first = 0;
  int last = count;  // The place is first .. last - 1, or nowhere.
  while (last - first > 1) {
    int const middle = (first + last) / 2;
    (parents[middle] <= parent ? first : last) = middle;
  }
  return parents[first] == parent ? first : -1;
}

// Makes `marks` hold exactly `wanted` of the first `last` candidates and candidate `last`, by one lane: surplus marks
// fall from the end, missing ones are made from the start.
__device__ __forceinline__ void repair(uint32_t* marks, int last, int wanted) {
  int missing = wanted;
  for (int w = 0; w <= last / 32; ++w) {
    uint32_t const exist = w < last / 32 ? ~0u : (1u << last % 32) - 1u;
    uint32_t word = marks[w] & exist;
    while (__popc(word) > missing) word &= ~(0x80000000u >> __clz(word));
    missing -= __popc(word);
    marks[w] = word | (w == last / 32 ? 1u << last % 32 : 0u);
  }
  for (int w = 0; missing > 0; ++w) {
    uint32_t free = ~marks[w];
    for (; missing > 0 && free != 0; free &= free - 1, --missing) marks[w] |= free & (0u - free);
  }
}

__global__ void __launch_bounds__(kWarps * 32) replay_kernel(const __grid_constant__ Args args, int rows) {
  wait_for_previous_grid();
  __shared__ Scratch scratches[kWarps];
  Scratch& scratch = scratches[threadIdx.x / 32];
  int const lane = threadIdx.x % 32;
  int const row = static_cast<int>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  QueryTile const tile(args.tiles, row / kQueryTile);
  if (!tile.has(row % kQueryTile)) return;
  std::int64_t const query = tile.first + row % kQueryTile;
  std::int64_t const t = tile.t + row % kQueryTile;
  Candidates const c = candidates(t, args.layer, args.layers, args.top_k);
  if (c.n <= args.top_k) return;  // Above the entry layer nothing is a leaf, and nobody reads what was selected.
  bool const entry = args.layer >= entry_layer(t, args.top_k);
  int const last = c.n - 1;  // the rightmost candidate
  int const words = last / 32 + 1;

  for (int w = lane; w < words; w += 32) scratch.marks[w] = 0;
  if (!entry) {
    std::int32_t const* const parents = args.parents_in + static_cast<std::int64_t>(row) * args.top_k;
    for (int j = lane; j < c.parents; j += 32) scratch.parents[j] = parents[j];
  }
  __syncwarp();
  std::int64_t const b = tile.bh / args.H_kv;
  std::int64_t const h = tile.bh % args.H_kv;
  std::int32_t const* const given = args.given + ((b * args.tiles.T_q + query) * args.H_kv + h) * args.top_k;
  int const rightmost = static_cast<int>(t >> (kLog2Siblings * args.layer));
  for (int i = lane; i < args.top_k; i += 32) {
    int const node = given[i];
    if (node < 0 || node >= rightmost) continue;
    int const parent = node / kSiblings;
    int const j = entry ? parent : place_of(scratch.parents, c.parents, parent);
    if (j < 0) continue;
    int const candidate = j * kSiblings + node % kSiblings;
    atomicOr(&scratch.marks[candidate / 32], 1u << candidate % 32);
  }
  __syncwarp();
  int marked = 0;
  for (int w = lane; w < words; w += 32) marked += __popc(scratch.marks[w]);
  marked = __reduce_add_sync(kFullWarp, marked);
  __syncwarp();  // Every lane has read the marks.
  if (lane == 0) {
    if (marked == args.top_k - 1) {
      scratch.marks[last / 32] |= 1u << last % 32;
    } else {
      repair(scratch.marks, last, args.top_k - 1);
    }
  }
  __syncwarp();

  uint32_t own[kLaneWords];
  int count = 0;
#pragma unroll
  for (int i = 0; i < kLaneWords; ++i) {
    int const w = lane * kLaneWords + i;
    own[i] = w < words ? scratch.marks[w] : 0;
    count += __popc(own[i]);
  }
  int place = count;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int const before = __shfl_up_sync(kFullWarp, place, d);
    if (lane >= d) place += before;
  }
  place -= count;
  std::uint16_t* const expanded = args.expanded + row * (args.width / kSiblings);
#pragma unroll
  for (int i = 0; i < kLaneWords; ++i) {
    int const w = lane * kLaneWords + i;
    int const exist = c.n - 32 * w;
    uint32_t const bits = own[i] | (exist >= 32 ? 0u : exist > 0 ? ~0u << exist : ~0u);
    if (2 * w < c.parents) expanded[2 * w] = static_cast<std::uint16_t>(bits);
    if (2 * w + 1 < c.parents) expanded[2 * w + 1] = static_cast<std::uint16_t>(bits >> 16);
    for (uint32_t rest = own[i]; rest != 0; rest &= rest - 1) {
      int const candidate = 32 * w + __ffs(rest) - 1;
      int const j = candidate / kSiblings;
      scratch.nodes[place++] = (entry ? j : scratch.parents[j]) * kSiblings + candidate % kSiblings;
    }
  }
  __syncwarp();
  std::int32_t* const nodes = args.nodes + static_cast<std::int64_t>(row) * args.top_k;
  for (int i = lane; i < args.top_k; i += 32) nodes[i] = scratch.nodes[i];
}

}  // namespace htree_cuda::tree::replay

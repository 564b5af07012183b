// The sorted union of the parents that the 12 queries of a tile selected, or the queries of a set of tiles, each parent
// with its query mask. A query whose entry layer this is takes no part: its parents are 0, 1, 2, ...
//
// One CTA builds the union of one set, in windows of 8192 nodes, or of as many as there are. For every query a warp ORs the
// query's bit into a table of masks in shared memory, 16 bits for each tile of the set, and then the table is compacted. A
// window starts at the smallest node that is left, so that there are at most as many windows as nodes, however wide the
// layer is. The time is the number of waits: lists come from global memory once, with all copies in flight, and at small
// budgets two CTAs of a set of four tiles share an SM.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "namespaces.h"
#include "device/ptx.cuh"
#include "device/sm90.cuh"
#include "host/launch_overlapped.cuh"
#include "tree/build_union.h"

namespace htree_cuda::tree::build_union {

using namespace host;
using namespace device;

template <int kBlocks>
struct Config {
  static_assert(kBlocks == 1 || kBlocks == 2 || kBlocks == 4);
  using Mask = std::conditional_t<kBlocks == 1, std::uint16_t, std::conditional_t<kBlocks == 2, std::uint32_t, std::uint64_t>>;
  static constexpr int kQueries = kBlocks * kQueryTile;
  static constexpr int kWarps = kBlocks == 1 ? 16 : 24;
  static constexpr int kWarpQueries = (kQueries + kWarps - 1) / kWarps;  // query i belongs to warp i % kWarps
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kMaxWindow = 8192;
  static constexpr int kGroup = 64;  // nodes of a window that a warp compacts at a time, two in a lane

  // Groups of a window.
  static __host__ __device__ constexpr int groups(std::int64_t parents) {
    std::int64_t const all = (parents + kGroup - 1) / kGroup;
    return static_cast<int>(all < kMaxWindow / kGroup ? all : kMaxWindow / kGroup);
  }
  // The table, the lists, and two numbers a warp: the layout is in build_union_kernel.
  static constexpr int shared_bytes(std::int64_t parents, int top_k) {
    return groups(parents) * kGroup * int{sizeof(Mask)} + 4 * (kQueries * top_k + 2 * kWarps);
  }
  static_assert(kQueries <= 8 * sizeof(Mask));
};

// How long the list of a query is, and how far it has been read.
struct Reader {
  int count = 0;
  int cursor = 0;
};

template <int kBlocks>
__global__ void __launch_bounds__(Config<kBlocks>::kThreads, 2) build_union_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  using Cfg = Config<kBlocks>;
  using Mask = typename Cfg::Mask;
  constexpr int kNone = 0x7fffffff;
  int const groups = Cfg::groups(args.parents);
  int const window = groups * Cfg::kGroup;
  extern __shared__ __align__(16) uint32_t words[];  // the table, [window] masks
  std::int32_t* const lists = reinterpret_cast<std::int32_t*>(reinterpret_cast<Mask*>(words) + window);  // [kQueries, top_k]
  std::int32_t* const next = lists + Cfg::kQueries * args.top_k;                                         // [kWarps]
  std::int32_t* const counts = next + Cfg::kWarps;                                                       // [kWarps]
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  TileSets const sets = args.sets.of_size(kBlocks);
  int const first = sets.tile(args.tiles, blockIdx.x, 0);

  auto const list_of = [&](int r) { return lists + (r * Cfg::kWarps + warp) * args.top_k; };
  Reader readers[Cfg::kWarpQueries];
#pragma unroll
  for (int r = 0; r < Cfg::kWarpQueries; ++r) {
    int const query = r * Cfg::kWarps + warp;
    int const own = query < Cfg::kQueries ? sets.tile(args.tiles, blockIdx.x, query / kQueryTile) : -1;
    if (own < 0) continue;
    QueryTile const tile(args.tiles, own);
    std::int64_t const t = tile.t + query % kQueryTile;
    if (!tile.has(query % kQueryTile) || args.layer >= entry_layer(t, args.top_k)) continue;
    readers[r].count = candidates(t, args.layer, args.layers, args.top_k).parents;
    std::int32_t const* const from =
        args.nodes + (static_cast<std::int64_t>(own) * kQueryTile + query % kQueryTile) * args.top_k;
    uint32_t const to = ptx::shared_address(list_of(r));
    for (int i = 4 * lane; i < readers[r].count; i += 4 * 32) ptx::copy_async_16B(to + 4 * i, from + i, 0);
  }
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncwarp();

  int written = 0;  // nodes of the union so far
  while (true) {
    if (lane == 0) {
      next[warp] = kNone;
#pragma unroll
      for (int r = 0; r < Cfg::kWarpQueries; ++r) {
        Reader const& reader = readers[r];
        if (reader.cursor < reader.count) next[warp] = min(next[warp], list_of(r)[reader.cursor]);
      }
    }
    for (int i = threadIdx.x; i < window * int{sizeof(Mask)} / 4; i += Cfg::kThreads) words[i] = 0;
    __syncthreads();
    int const base = __reduce_min_sync(kFullWarp, next[lane % Cfg::kWarps]);
    if (base == kNone) break;
#pragma unroll
    for (int r = 0; r < Cfg::kWarpQueries; ++r) {
      Reader& reader = readers[r];
      int const bit = r * Cfg::kWarps + warp;
      while (reader.cursor < reader.count) {
        int const node = reader.cursor + lane < reader.count ? list_of(r)[reader.cursor + lane] : kNone;
        bool const inside = node - base < window && node != kNone;
        if (inside) {
          int const at = (node - base) * (8 * int{sizeof(Mask)}) + bit;  // the bit's place in the table
          atomicOr(&words[at / 32], 1u << at % 32);
        }
        int const taken = __popc(__ballot_sync(kFullWarp, inside));
        reader.cursor += taken;
        if (taken < 32) break;
      }
    }
    __syncthreads();
    // A lane reads the masks of two neighbouring nodes, a warp those of neighbouring groups.
    int const of_warp = (groups + Cfg::kWarps - 1) / Cfg::kWarps;
    int const first_group = min(warp * of_warp, groups);
    int const end_group = min(first_group + of_warp, groups);
    auto const pair_at = [&](int group, Mask(&pair)[2]) {
      Mask const* const at = reinterpret_cast<Mask const*>(words) + group * Cfg::kGroup + 2 * lane;
      pair[0] = at[0];
      pair[1] = at[1];
    };
    int count = 0;
#pragma unroll 2
    for (int group = first_group; group < end_group; ++group) {
      Mask pair[2];
      pair_at(group, pair);
      count += __popc(__ballot_sync(kFullWarp, pair[0] != 0)) + __popc(__ballot_sync(kFullWarp, pair[1] != 0));
    }
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    std::int64_t const list = static_cast<std::int64_t>(first) * kQueryTile * args.top_k;
    auto* const masks = static_cast<Mask*>(args.union_masks) + list;
    int const of_other = lane < Cfg::kWarps ? counts[lane] : 0;
    int place = written + __reduce_add_sync(kFullWarp, lane < warp ? of_other : 0);
    written += __reduce_add_sync(kFullWarp, of_other);
#pragma unroll 1
    for (int group = first_group; group < end_group; ++group) {
      Mask pair[2];
      pair_at(group, pair);
      unsigned const even = __ballot_sync(kFullWarp, pair[0] != 0);
      unsigned const odd = __ballot_sync(kFullWarp, pair[1] != 0);
      unsigned const below = (1u << lane) - 1u;
      int put = place + __popc(even & below) + __popc(odd & below);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (pair[m] == 0) continue;
        args.union_nodes[list + put] = base + group * Cfg::kGroup + 2 * lane + m;
        masks[put] = pair[m];
        ++put;
      }
      place += __popc(even) + __popc(odd);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) args.union_count[first] = written;
}

}  // namespace htree_cuda::tree::build_union

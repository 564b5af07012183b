// Which queries a CTA and its warps serve, and which KV blocks pass by them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device/ptx.cuh"
#include "traits.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
__device__ __forceinline__ KindArgs const& own(Args const& args) {
  return args.kinds[static_cast<int>(Cfg::kKind)];
}

// The tile of queries, or set of tiles, that this CTA serves. The last queries have the most blocks and come first,
// so that short CTAs end the launch.
template <class Cfg>
__device__ __forceinline__ uint32_t tile_index(Args const& args) {
  return own<Cfg>(args).end_tile - ptx::block_index();
}

// The tile that a consumer warp has queries of. The tiles of a CTA are of one head; the first exists, and -1 stands for
// one that does not.
template <class Cfg>
__device__ __forceinline__ int tile_of_warp(Args const& args, int warp) {
  if constexpr (Cfg::kSharesWarp) {
    TileSets const sets = own<Cfg>(args).sets.of_size(Cfg::kQueriesPerWarp);
    return sets.tile(args.tiles, static_cast<int>(tile_index<Cfg>(args)),
                        warp / (Cfg::kConsumers / Cfg::kQueriesPerWarp));
  } else {
    return static_cast<int>(tile_index<Cfg>(args));
  }
}

// The first tile of the CTA, for what all of its tiles have in common.
template <class Cfg>
__device__ __forceinline__ QueryTile some_tile(Args const& args) {
  return QueryTile(args.tiles, tile_of_warp<Cfg>(args, 0));
}

// The layer's KV blocks that the queries of the CTA may read.
template <class Cfg>
__device__ __forceinline__ char const* packed_blocks(Args const& args) {
  KindArgs const& own = htree_fwd::own<Cfg>(args);
  if (args.tiles.entries == nullptr) {
    return own.packed + some_tile<Cfg>(args).bh * own.blocks_per_head * args.block_bytes;
  }
  int const tile = tile_of_warp<Cfg>(args, 0);
  TileEntry const entry = args.tiles.entry(tile);
  std::int64_t const head = (args.tiles.begin + tile) / args.tiles.per_head;
  constexpr bool kEntry = Cfg::kKind == LayerKind::kEntry;
  int const from = log2_room_from(kEntry ? args.layer : args.layer + 1, args.top_k);
  std::int64_t const first =
      sequence_blocks(entry.before, entry.sequence(), args.layer, kEntry ? kTileBlocks : 1, from);
  return own.packed + (head * own.blocks_per_head + first) * args.block_bytes;
}

// Whether this layer is of this kind for the query at position t. Above its entry layer a query has nothing to do.
template <class Cfg>
__device__ __forceinline__ bool works(Args const& args, std::int64_t t) {
  if constexpr (!Cfg::kIsSelected) {
    return is_entry_layer(t, args.layer, args.top_k);
  } else {
    return is_selected_layer(t, args.layer, args.top_k) &&
           is_half_selected(t, args.layer, args.half_selected_parents) == (Cfg::kKind == LayerKind::kHalfSelected);
  }
}

// Candidates of the query at position t in a layer of this kind.
template <class Cfg>
__device__ __forceinline__ int candidates_of(Args const& args, std::int64_t t) {
  return Cfg::kKind == LayerKind::kEntry ? candidates_in_entry(t, args.layer)
                                    : candidates_in_selected(t, args.layer, args.top_k);
}

// Entry layer: how many blocks query `i` of the tile takes.
template <class Cfg>
__device__ __forceinline__ int blocks_of(Args const& args, QueryTile const& tile, int i) {
  std::int64_t const t = tile.t + i;
  if (i >= kQueryTile || !tile.has(i) || !works<Cfg>(args, t)) return 0;
  return (candidates_of<Cfg>(args, t) + kSiblings - 1) / kSiblings;
}

// Blocks that pass by the CTA. In an entry layer the last query has the most.
template <class Cfg>
__device__ __forceinline__ int stream_count(Args const& args) {
  if constexpr (Cfg::kSwapAB) {
    return args.union_count[tile_of_warp<Cfg>(args, 0)];  // the bottom is never half-selected
  } else if constexpr (Cfg::kIsSelected) {
    QueryTile const tile(args.tiles, tile_index<Cfg>(args));
    // Queries for which the layer is of one kind are neighbours, more than a tile of them. A tile without such a query
    // may be here where a launch has several heads.
    std::int64_t const last = tile.t + min(kQueryTile, tile.count) - 1;
    return works<Cfg>(args, tile.t) || works<Cfg>(args, last) ? args.union_count[tile_index<Cfg>(args)] : 0;
  } else {
    int count = 0;
#pragma unroll 1
    for (int which = Cfg::kQueriesPerWarp - 1; which >= 0; --which) {
      int const index = tile_of_warp<Cfg>(args, which * (Cfg::kConsumers / Cfg::kQueriesPerWarp));
      if (Cfg::kSharesWarp && index < 0) continue;
      QueryTile const tile(args.tiles, index);
#pragma unroll 1
      for (int i = min(kQueryTile, tile.count) - 1; i >= 0 && count == 0; --i) count = blocks_of<Cfg>(args, tile, i);
    }
    return count;
  }
}

// The consumer that takes a rank of a split query: a consumer has whole periods between restarts.
__device__ __forceinline__ int consumer_of(Args const& args, int rank) {
  return rank / args.restart_period % kQueryTile;
}

// The queries of the CTA that selected an entry of the union, a bit each.
template <class Cfg>
__device__ __forceinline__ typename Cfg::Mask mask_of_entry(Args const& args, uint32_t entry) {
  using Stored = std::conditional_t<Cfg::kSwapAB, typename Cfg::Mask, std::uint16_t>;
  return static_cast<Stored const*>(args.union_masks)[entry];
}

}  // namespace htree_cuda::sm90::htree_fwd

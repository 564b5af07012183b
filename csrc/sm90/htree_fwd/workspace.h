// The workspace of a forward call: what lies where, and how many queries a chunk has.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "dispatch.h"
#include "host/math.h"
#include "part.h"
#include "tree/sequences.h"

namespace htree_cuda::sm90::htree_fwd {

// A copy is slower where the lines of global memory are not those of shared memory: a gather takes 3% longer
// (tests/hardware/gathers.cu).
constexpr std::int64_t kLineBytes = 128;

constexpr std::int64_t kMaxTiles = std::numeric_limits<int>::max() / kQueryTile;

// Rows of state, importance and lists, which live between the kernels of a chunk of queries, stay below a third of what
// q and out take, between these two bounds; those of the larger call, where this one is a part of it. The tree (packed,
// and pooled in its own layout) and the tables of rotations come on top.
constexpr std::int64_t kMinChunkBytes = std::int64_t(192) << 20;
constexpr std::int64_t kMaxChunkBytes = std::int64_t(384) << 20;

inline std::int64_t chunk_bytes(Runs<ForwardParams> const& runs, PartParams const& part) {
  ForwardParams const& p = *runs.first;
  std::int64_t rows = 0;
  for (ForwardParams const& run : runs) rows += rows_of_call(run);
  rows = std::max(rows, part.queries);
  std::int64_t const ends = 2 * rows * p.H_kv * p.G * (p.K + p.V);
  return std::clamp(ends / 3, kMinChunkBytes, kMaxChunkBytes);
}

// A layer's KV blocks, packed for one layer kind; without nodes where no query needs them.
struct Packed {
  char* blocks = nullptr;  // [B, H_kv, blocks_per_head, block_bytes]
  std::int64_t nodes = 0;
  std::int64_t blocks_per_head = 0;
};

// Tiles of 12 queries of the call, begin .. begin + count - 1, that are computed together, in a lane of the workspace.
struct Chunk {
  std::int64_t begin;
  int count;
  int lane;
  bool bottom = false;  // counted among the tiles with a query whose entry layer is the bottom
};

constexpr int kMaxLanes = 2;

// What lives between the kernels of a chunk. Chunks of different lanes may be under way at the same time.
struct Lane {
  float* importance = nullptr;
  std::uint16_t* expanded = nullptr;
  std::int32_t* nodes[2] = {};            // selected in this layer and in the one above
  std::int32_t* union_nodes = nullptr;
  std::int32_t* union_places = nullptr;   // in `gathered`
  char* union_masks = nullptr;            // 16 bits for each tile of the largest set that has a union
  std::int32_t* union_count = nullptr;
  float4* state_out = nullptr;
  float2* state_sum = nullptr;
};

// Sizes where `base` is null, addresses otherwise.
struct Workspace {
  int layers = 0;
  std::int64_t N[kMaxLayers] = {};           // nodes of each layer
  std::int64_t tree_begin[kMaxLayers] = {};  // of layer l >= 1 in k_tree and v_tree
  std::int64_t M = 0;                        // nodes above the bottom
  int last_entry_layer = 0;                  // the entry layer of the last query
  std::int64_t positions = 0;                // rows of the table of rotations
  std::int64_t restarts = 0;                 // positions at which a query restarts in a selected layer
  std::int64_t forward_restarts = 0;         // and in a half-selected one, where it rotates to later positions
  std::int64_t block_bytes = 0;
  std::int64_t width = 0;
  std::int64_t tiles_per_head = 0;
  std::int64_t tiles = 0;        // of the call
  std::int64_t chunk_tiles = 0;  // of a chunk
  std::int64_t lead_tiles = 0;   // of the first chunk, where it has fewer
  std::int64_t wave = 0;         // tiles that the GPU has CTAs for at a time
  std::int64_t list_room = 0;    // blocks in the union of a tile, at most
  std::int64_t bytes = 0;

  PackPart* pack_part = nullptr;           // of sequences in a pack; every part of a call has it at the same address
  Sequence* sequences = nullptr;      // of sequences whose lengths only the device knows
  TileEntry* tile_entries = nullptr;
  tree::sequences::EarlyTiles* early_tiles = nullptr;
  std::int32_t* late_tiles = nullptr;
  TileEntry* bottom_entries = nullptr;
  std::int64_t bottom_per_head = 0;    // at most
  // Tiles of a head with a query that has layers to select from, at most; they come before the others. All where
  // lengths are known.
  std::int64_t max_late_tiles = 0;
  int tile_round = 1;                 // their query tiles come in multiples of it
  float2* rotations = nullptr;
  rope::RotationColumns* restart_rotations = nullptr;
  rope::RotationColumns* forward_rotations = nullptr;
  rope::RotationColumns* step_rotation = nullptr;
  rope::PackedRotations* packed_restart_rotations = nullptr;
  rope::PackedRotations* packed_step_rotation = nullptr;
  int* has_nonfinite_v = nullptr;
  char* k_tree = nullptr;
  char* v_tree = nullptr;
  Packed packed[kMaxLayers][kLayerKinds];  // kSelected: all nodes of the layer, or none where `gathered` serves
  // For selected layers that have more blocks than the unions of the call have room for: the blocks that these name
  // alone, packed when they are known. Layers use it one after the other.
  Packed gathered;
  bool has_gathered = false;
  int lane_count = 1;
  Lane lanes[kMaxLanes];

  // processors: SMs of the GPU. Their number decides how many queries a chunk has, and no result.
  Workspace(Runs<ForwardParams> const& runs, PartParams const& part, char* base, std::int64_t processors) {
    ForwardParams const& p = *runs.first;
    int const top_k = static_cast<int>(p.top_k);
    N[0] = p.T;
    layers = 1;
    while (N[layers - 1] > p.top_k * kSiblings) {
      N[layers] = ceil_div(N[layers - 1], kSiblings);
      tree_begin[layers] = M;
      int const from = log2_room_from(layers, top_k);
      M += has_sequences(p) ? sequence_nodes(p.sequences.total_k, sequences_of_room(p, from), layers, from) : N[layers];
      ++layers;
    }
    std::int64_t end = 0;
    for (ForwardParams const& run : runs) end = std::max(end, end_position(run));
    last_entry_layer = entry_layer(end - 1, static_cast<int>(p.top_k));
    block_bytes = ceil_div(kSiblings * (4 + 2 * (p.K + p.V)), kLineBytes) * kLineBytes;
    positions = std::min(p.T, p.top_k * kSiblings);
    for (int l = 0; l < last_entry_layer; ++l) {
      if (has_kind(runs, LayerKind::kHalfSelected, l)) {
        // A tile may end in a layer's next block, with a query for which the layer is of another kind.
        positions = std::min<std::int64_t>(p.T, (max_half_selected_parents(p) + 1) * kSiblings);
        forward_restarts = max_half_selected_parents(p) * kSiblings;
      }
      if (has_kind(runs, LayerKind::kSelected, l)) restarts = p.top_k * kSiblings;
    }
    // Below the top every layer that selects may have top_k * 16 candidates.
    std::int64_t const candidates = layers > 2 ? p.top_k * kSiblings : N[layers - 1];
    width = ceil_div(candidates, 2 * kSiblings) * 2 * kSiblings;  // the marks of two blocks are read at once
    wave = processors * queries_of_entry(p);
    for (ForwardParams const& run : runs) add_tiles(run);

    std::int64_t heads = p.B * p.H_kv;
    if (has_sequences(p)) {
      tile_round = std::max(queries_of_entry(p), queries_of_selected(p));
      std::int64_t const of_rows = p.sequences.total_q / kQueryTile + p.sequences.count * tile_round;
      std::int64_t const of_maxima = p.sequences.count * ceil_div(tiles_per_head, tile_round) * tile_round;
      tiles_per_head = ceil_div(std::min(of_rows, of_maxima), tile_round) * tile_round;
      tiles = p.H_kv * tiles_per_head;
      heads = p.H_kv;
      take(pack_part, base, 1);
      take(sequences, base, p.sequences.count);
      take(tile_entries, base, tiles_per_head);
      take(early_tiles, base, p.sequences.count);
      take(late_tiles, base, 1);
      max_late_tiles = std::min(tiles_per_head, late_tiles_of(p, tile_round));
      if (layers > 1) bottom_per_head = std::min(tiles_per_head, bottom_tiles_of(p, tile_round));
      take(bottom_entries, base, bottom_per_head);
    }
    take(rotations, base, positions * (p.K / 2));
    take(restart_rotations, base, restarts * (p.K / 4));
    take(forward_rotations, base, forward_restarts * (p.K / 4));
    take(step_rotation, base, p.K / 4);
    if (queries_of_selected(p) > 1) {
      take(packed_restart_rotations, base, restarts * (p.K / 4));
      take(packed_step_rotation, base, p.K / 4);
    }
    take(has_nonfinite_v, base, 1);
    take(k_tree, base, heads * M * p.K * 2);
    take(v_tree, base, heads * M * p.V * 2);
    std::int64_t most_rows = 0;
    for (ForwardParams const& run : runs) most_rows = std::max(most_rows, run.T_q);
    list_room = std::min<std::int64_t>(most_rows, kQueryTile) * p.top_k;
    std::int64_t const max_gathered =
        has_sequences(p) ? std::numeric_limits<std::int64_t>::max() : tiles_per_head * list_room;
    for (int l = 0; l <= last_entry_layer; ++l) {
      if (has_kind(runs, LayerKind::kEntry, l)) {
        take_packed(of(l, LayerKind::kEntry), p, l, std::min(N[l], p.top_k * kSiblings), kTileBlocks, heads, base);
      }
      if (has_kind(runs, LayerKind::kHalfSelected, l)) {
        std::int64_t const nodes = std::min<std::int64_t>(N[l], (max_half_selected_parents(p) + 1) * kSiblings);
        take_packed(of(l, LayerKind::kHalfSelected), p, l, nodes, 1, heads, base);
      }
      if (!has_kind(runs, LayerKind::kSelected, l)) continue;
      if (max_gathered < ceil_div(N[l], kSiblings)) {
        has_gathered = true;
      } else {
        take_packed(of(l, LayerKind::kSelected), p, l, N[l], 1, heads, base);
      }
    }
    if (has_gathered) take_packed(gathered, p, 0, max_gathered * kSiblings, 1, heads, base);
    chunk_tiles = std::min(tiles, kMaxTiles / tile_round * tile_round);
    if (layers == 1) return;

    std::int64_t const tree_bytes = bytes;
    chunk_tiles = 1;
    take_lane(lanes[0], p, nullptr);
    std::int64_t const tile_bytes = bytes - tree_bytes;
    // The room of a pack follows from its rows, however many sequences they are. Every sequence has tiles that it does not
    // fill; where these exceed the sixteenth that is added here, the call has a chunk more.
    std::int64_t const lane_tiles =
        is_packed(p) ? p.H_kv * (p.sequences.total_q / kQueryTile * 17 / 16 + 64 * tile_round) : tiles;
    if (has_lanes(p, lane_tiles, wave, tile_bytes)) lane_count = kMaxLanes;
    // A wave of CTAs, or two in each of two lanes, where the bounds allow it: small groups have less of q and out, and up
    // to four queries a warp.
    std::int64_t const wanted = lane_count == 1 ? wave : 2 * lane_count * wave;
    std::int64_t room = std::max(chunk_bytes(runs, part), std::min(wanted * tile_bytes, kMaxChunkBytes)) / tile_bytes;
    if (lane_count > 1) room = std::min(room, ceil_div(lane_tiles, wave) * wave) / lane_count;
    chunk_tiles = std::min(lane_tiles, std::max<std::int64_t>(room, 1));
    if (chunk_tiles < lane_tiles && chunk_tiles > wave) chunk_tiles -= chunk_tiles % wave;  // whole waves
    chunk_tiles = std::max<std::int64_t>(chunk_tiles / tile_round, 1) * tile_round;
    set_lead(p);
    bytes = tree_bytes;
    for (int i = 0; i < lane_count; ++i) take_lane(lanes[i], p, base);
  }

  // The tiles of a run of queries, of the call that the workspace is for.
  void set_run(ForwardParams const& run) {
    tiles_per_head = tiles = 0;
    add_tiles(run);
    if (has_gathered) gathered.blocks_per_head = tiles_per_head * list_room;
    if (layers > 1) {
      set_lead(run);
    } else {
      chunk_tiles = std::min(tiles, kMaxTiles);
    }
  }

  Packed& of(int layer, LayerKind kind) { return packed[layer][static_cast<int>(kind)]; }
  Packed const& of(int layer, LayerKind kind) const { return packed[layer][static_cast<int>(kind)]; }

  // Whether the blocks of a selected layer are gathered chunk by chunk.
  bool gathers(int layer) const { return of(layer, LayerKind::kSelected).nodes == 0; }

private:
  void add_tiles(ForwardParams const& p) {
    tiles_per_head += ceil_div(p.T_q, kQueryTile);
    tiles = p.B * p.H_kv * tiles_per_head;
  }

  // What whole waves leave over comes first where a sequence starts: its first queries have the least to do.
  void set_lead(ForwardParams const& p) {
    lead_tiles = 0;
    if (!has_sequences(p) && tiles > wave && chunk_tiles >= wave && p.q_start < wave * kQueryTile) lead_tiles = tiles % wave;
  }

  // Two chunks at once, where each has a wave of CTAs: the SMs that the end of a launch, a selection or a union of the
  // one leaves idle serve the other. The lanes share the room of a chunk. Groups of more than 8 heads gain nothing.
  bool has_lanes(ForwardParams const& p, std::int64_t lane_tiles, std::int64_t wave, std::int64_t tile_bytes) const {
    return queries_of_selected(p) > 1 && !has_gathered && lane_tiles > wave && kMaxLanes * wave * tile_bytes <= kMaxChunkBytes;
  }

  template <class T>
  void take(T*& pointer, char* base, std::int64_t count) {
    if (base != nullptr) pointer = reinterpret_cast<T*>(base + bytes);
    bytes += ceil_div(count * static_cast<std::int64_t>(sizeof(T)), 256) * 256;
  }

  // A sequence has such queries from position top_k * 16 on. Few sequences can be so long, and what they have before it
  // is no part of it.
  static std::int64_t late_tiles_of(ForwardParams const& p, int round) {
    std::int64_t const early = p.top_k * kSiblings;
    std::int64_t const longest = std::max<std::int64_t>(p.T - early, 0);
    bool const ragged = !is_packed(p);
    std::int64_t const sequences = ragged ? p.sequences.count : std::min(p.sequences.count, p.sequences.total_k / early);
    std::int64_t queries = sequences * std::min(longest, p.T_q);
    if (!ragged && longest > 0) {
      // The most that n sequences hold is the lesser of n * longest and total_k - n * early.
      std::int64_t const n = p.sequences.total_k / p.T;
      queries = std::min(queries, std::max(n * longest, p.sequences.total_k - (n + 1) * early));
    }
    std::int64_t const together = std::int64_t(kQueryTile) * round;
    return (std::min(queries, p.sequences.total_q) / together + 2 * sequences) * round;
  }

  // Tiles of sets with any query before that position, of which a sequence has top_k * 16 at most.
  static std::int64_t bottom_tiles_of(ForwardParams const& p, int round) {
    std::int64_t const queries = std::min(p.sequences.total_q, p.sequences.count * p.top_k * kSiblings);
    return (queries / (std::int64_t(kQueryTile) * round) + p.sequences.count) * round;
  }

  void take_packed(Packed& packed, ForwardParams const& p, int layer, std::int64_t nodes, int together,
                   std::int64_t heads, char* base) {
    packed.nodes = nodes;
    packed.blocks_per_head = ceil_div(nodes, kSiblings * together) * together;
    if (has_sequences(p)) {
      // Where a sequence behind the last one would begin.
      int const from = log2_room_from(together == kTileBlocks ? layer : layer + 1, static_cast<int>(p.top_k));
      packed.blocks_per_head = sequence_blocks(p.sequences.total_k, sequences_of_room(p, from), layer, together, from);
      packed.blocks_per_head = std::max<std::int64_t>(packed.blocks_per_head, together);
    }
    take(packed.blocks, base, heads * packed.blocks_per_head * block_bytes);
    // Where blocks are copied one by one, their keys begin a line, behind the scales.
    if (base != nullptr && together == 1) packed.blocks += kLineBytes - kSiblings * 4;
  }

  void take_lane(Lane& lane, ForwardParams const& p, char* base) {
    std::int64_t const rows = chunk_tiles * kQueryTile;
    take(lane.importance, base, rows * width);
    take(lane.expanded, base, rows * (width / kSiblings));
    take(lane.nodes[0], base, rows * p.top_k);
    take(lane.nodes[1], base, rows * p.top_k);
    take(lane.union_nodes, base, rows * p.top_k);
    if (has_gathered) take(lane.union_places, base, rows * p.top_k);
    take(lane.union_masks, base, rows * p.top_k * 2 * queries_of_selected(p));
    take(lane.union_count, base, chunk_tiles);
    take(lane.state_out, base, rows * (p.V / 8) * 32 / queries_of_selected(p));  // queries that share a warp have 16 rows
    take(lane.state_sum, base, rows * 16);
  }
};

}  // namespace htree_cuda::sm90::htree_fwd

// The steps of a forward call in their order. forward.cu takes them, explain.cu counts them: both see the same
// launches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "workspace.h"

namespace htree_cuda::sm90::htree_fwd {

// Tiles begin .. begin + count - 1 of a chunk with queries for which a layer is of one kind; none where count is 0.
struct Tiles {
  int begin = 0;
  int count = 0;
};

struct TilesByKind {
  Tiles selected;
  Tiles half_selected;
  Tiles entry;

  bool any() const { return selected.count + half_selected.count + entry.count > 0; }
};

// Where a chunk has tiles of several heads, or of sequences whose lengths the host does not know, all of them are named
// if any is.
inline Tiles tiles_of(ForwardParams const& p, Workspace const& w, Pass pass, LayerKind kind, int l,
                      Chunk const& chunk) {
  Positions const positions(p, pass, kind, l);
  if (has_sequences(p)) return {0, positions.meet(first_position(p), end_position(p)) ? chunk.count : 0};
  if (chunk.begin / w.tiles_per_head != (chunk.begin + chunk.count - 1) / w.tiles_per_head) {
    return {0, positions.meet(p.q_start, p.q_start + p.T_q) ? chunk.count : 0};
  }
  std::int64_t const first = p.q_start + chunk.begin % w.tiles_per_head * kQueryTile;
  std::int64_t const end = std::min(first + chunk.count * kQueryTile, p.q_start + p.T_q);
  if (!positions.meet(first, end)) return {};
  int const from = static_cast<int>((std::max(positions.begin, first) - first) / kQueryTile);
  int const to = static_cast<int>(ceil_div(std::min(positions.end, end) - first, std::int64_t(kQueryTile)));
  return {from, to - from};
}

inline QueryTiles query_tiles(ForwardParams const& p, Workspace const& w, Chunk const& chunk) {
  bool const packed = has_sequences(p) && p.sequences.cu_seqlens_k != nullptr;
  std::int64_t const per_head = chunk.bottom ? w.bottom_per_head : w.tiles_per_head;
  return {static_cast<std::uint32_t>(chunk.begin), static_cast<std::uint32_t>(per_head), packed ? 0 : p.T_q, p.q_start,
          static_cast<int>(p.H_kv), chunk.bottom ? w.bottom_entries : w.tile_entries};
}

// The sets of tiles that have one union in layer l.
inline TileSets union_sets(ForwardParams const& p, Workspace const& w, Chunk const& chunk, int l) {
  return TileSets::of(query_tiles(p, w, chunk), 0, chunk.count, queries_of_selected(p));
}

// Deals the tiles of a launch to CTAs. What the kernels are told about it is put into `kinds`.
inline Grid deal(QueryTiles const& tiles, Variant variant, TilesByKind const& of, TileSets const& unions,
                 KindArgs (&kinds)[kLayerKinds]) {
  std::uint32_t ctas = 0;
  auto const one_by_one = [&](LayerKind kind, Tiles const& some) {
    kinds[static_cast<int>(kind)].end_tile = ctas + some.begin + some.count - 1;
    ctas += some.count;
  };
  Grid grid{};
  if (of.selected.count > 0 && variant.selected_queries > 1) {  // the sets of the unions
    KindArgs& own = kinds[static_cast<int>(LayerKind::kSelected)];
    own.sets = unions;
    int const first = unions.set_of(tiles, of.selected.begin);
    int const last = unions.set_of(tiles, of.selected.begin + of.selected.count - 1);
    own.end_tile = last;
    ctas = last - first + 1;
  } else if (of.selected.count > 0) {
    one_by_one(LayerKind::kSelected, of.selected);
  }
  grid.half_selected_cta = ctas;
  if (of.half_selected.count > 0) one_by_one(LayerKind::kHalfSelected, of.half_selected);
  grid.entry_cta = ctas;
  if (of.entry.count > 0 && variant.entry_queries > 1) {
    KindArgs& own = kinds[static_cast<int>(LayerKind::kEntry)];
    own.sets = TileSets::of(tiles, of.entry.begin, of.entry.count, variant.entry_queries);
    int const sets = own.sets.count(tiles);
    own.end_tile = ctas + sets - 1;
    ctas += sets;
  } else if (of.entry.count > 0) {
    one_by_one(LayerKind::kEntry, of.entry);
  }
  grid.ctas = ctas;
  return grid;
}

// Sink: describe_sequences(), make_rotations(), pool(), pack(layer, kind), fork(), build_union(chunk, layer),
// gather(chunk, layer), launch(chunk, layer, pass, variant, tiles), select(chunk, layer), replay(chunk, layer), join().
template <class Sink>
void schedule_pass(ForwardParams const& p, Workspace const& w, Chunk const& chunk, int l, Pass pass, Sink& sink) {
  auto const of = [&](LayerKind kind) { return tiles_of(p, w, pass, kind, l, chunk); };
  TilesByKind tiles{of(LayerKind::kSelected), of(LayerKind::kHalfSelected), of(LayerKind::kEntry)};
  if (has_sequences(p) && w.layers > 1 && l == 0) tiles.entry = {};  // attend_bottom_entries has them
  if (tiles.any()) sink.launch(chunk, l, pass, rule_of(pass, p.dtype, p.G, queries_of_call(p)).variant, tiles);
}

template <class Sink>
void schedule_chunk(ForwardParams const& p, Workspace const& w, Chunk const& chunk, Sink& sink) {
  auto const has = [&](Pass pass, LayerKind kind, int l) { return tiles_of(p, w, pass, kind, l, chunk).count > 0; };
  int top = 0;  // the highest entry layer of the chunk's queries
  for (int l = 1; l <= w.last_entry_layer; ++l) {
    if (has(Pass::kAttend, LayerKind::kEntry, l)) top = l;
  }
  // Above the highest entry layer there is nothing to do but to name all nodes, if the caller wants the selection.
  for (int l = p.selection == nullptr ? top : w.layers - 1; l >= 0; --l) {
    if (l < top) {
      sink.build_union(chunk, l);
      // A layer is selected for as many queries in a score pass as in an attend pass, or more.
      if (w.gathers(l) && has(l > 0 ? Pass::kScore : Pass::kAttend, LayerKind::kSelected, l)) sink.gather(chunk, l);
    }
    if (l > 0 && p.given != nullptr) {
      sink.replay(chunk, l);
    } else if (l > 0) {
      if (l <= top) schedule_pass(p, w, chunk, l, Pass::kScore, sink);
      sink.select(chunk, l);
    }
    if (l <= top) schedule_pass(p, w, chunk, l, Pass::kAttend, sink);
  }
}

// The queries whose entry layer is the bottom, in a call of sequences of different lengths. They keep nothing between
// kernels, so that one launch has those of all chunks. Their tiles are a list of their own: the host does not know where
// they are among the others, only how many they are at most.
template <class Sink>
void attend_bottom_entries(ForwardParams const& p, Workspace const& w, Sink& sink) {
  std::int64_t const tiles = p.H_kv * w.bottom_per_head;
  std::int64_t const most = kMaxTiles / w.tile_round * w.tile_round;
  Variant const variant = rule_of(Pass::kAttend, p.dtype, p.G, queries_of_call(p)).variant;
  for (std::int64_t begin = 0; begin < tiles; begin += most) {
    int const count = static_cast<int>(std::min(most, tiles - begin));
    sink.launch({begin, count, 0, true}, 0, Pass::kAttend, variant, {{}, {}, {0, count}});
  }
}

// Above the bottom a tile of early queries selects everything.
template <class Sink>
void name_selection(Workspace const& w, Chunk const& chunk, Sink& sink) {
  for (int l = w.layers - 1; l > 0; --l) sink.select(chunk, l);
}

// The tree and what is packed of it, for all queries of the call.
template <class Sink>
void prepare(ForwardParams const& p, Workspace const& w, Sink& sink) {
  if (has_sequences(p)) sink.describe_sequences();
  if (p.sequences.part == 0) sink.make_rotations();  // the same for all parts of a pack
  if (w.layers > 1) sink.pool();
  for (int l = 0; l < w.layers; ++l) {
    for (LayerKind kind : {LayerKind::kEntry, LayerKind::kHalfSelected, LayerKind::kSelected}) {
      if (w.of(l, kind).nodes > 0) sink.pack(l, kind);
    }
  }
}

// The chunks of a run; `lane` is that of the next one.
template <class Sink>
void schedule_run(ForwardParams const& p, Workspace const& w, int& lane, Sink& sink) {
  std::int64_t tiles = w.lead_tiles > 0 ? w.lead_tiles : w.chunk_tiles;
  bool const late_first = has_sequences(p) && w.layers > 1;
  if (late_first) attend_bottom_entries(p, w, sink);
  for (std::int64_t begin = 0; begin < w.tiles; begin += tiles, tiles = w.chunk_tiles) {
    tiles = std::min(tiles, w.tiles - begin);
    // A chunk that has tiles of one head begins where the head does, or at a multiple of chunks behind.
    std::int64_t const in_head = begin % w.tiles_per_head;
    if (late_first && w.chunk_tiles < w.tiles_per_head) tiles = std::min(tiles, w.tiles_per_head - in_head);
    Chunk const chunk{begin, static_cast<int>(tiles), lane};
    if (!late_first || in_head < w.max_late_tiles || w.chunk_tiles >= w.tiles_per_head) {
      schedule_chunk(p, w, chunk, sink);
    } else if (p.selection != nullptr) {
      name_selection(w, chunk, sink);
    } else {
      continue;
    }
    lane = (lane + 1) % w.lane_count;
  }
}

template <class Sink>
void schedule(ForwardParams const& p, Workspace const& w, Sink& sink) {
  prepare(p, w, sink);
  int lane = 0;
  if (w.lane_count > 1) sink.fork();
  schedule_run(p, w, lane, sink);
  if (w.lane_count > 1) sink.join();
}

// Several runs of queries.
template <class Sink>
void schedule(Runs<ForwardParams> const& runs, Workspace w, Sink& sink) {
  prepare(*runs.first, w, sink);
  int lane = 0;
  if (w.lane_count > 1) sink.fork();
  for (ForwardParams const& run : runs) {
    w.set_run(run);
    sink.set_run(run, w);
    schedule_run(run, w, lane, sink);
  }
  if (w.lane_count > 1) sink.join();
}

}  // namespace htree_cuda::sm90::htree_fwd

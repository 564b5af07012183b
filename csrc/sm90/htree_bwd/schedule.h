// The steps of a backward call in their order. backward.cu takes them, explain.cu counts them: both see the same
// launches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

#include "dispatch.h"
#include "host/launch_overlapped.cuh"
#include "workspace.h"

namespace htree_cuda::sm90::htree_bwd {

inline sequences::Tables tables(Workspace const& w, Chunk const& chunk) {
  if (!w.sequences_given) return {};
  int log2_row_tile = 0;
  while (1 << log2_row_tile < w.row_tile) ++log2_row_tile;
  sequences::Rows const* const own = w.row_tiles == nullptr ? nullptr : w.row_tiles + chunk.first_query / w.row_tile;
  std::int64_t const at = w.tables_of(chunk);
  return {own,
          log2_row_tile,
          w.gather + at * w.gather_ctas,
          w.gather_ctas,
          w.entry + at * w.entry_room,
          w.list_work + at * w.list_room,
          w.counts + at};
}

// What the matrix kernels of a chunk work on, pointers of the call left out.
inline Args chunk_args(Workspace const& w, Chunk const& chunk) {
  Args args{};
  args.tree = w.tree;
  args.chunk = chunk;
  args.index = w.index;
  args.queries = w.queries;
  args.fragment_rotations = w.fragment_rotations;
  args.rotations = w.rotations;
  args.node_rows = w.node_rows;
  std::copy(std::begin(w.begin), std::end(w.begin), args.begin);
  args.dk = w.dk;
  args.dv = w.dv;
  std::copy(std::begin(w.range_rows), std::end(w.range_rows), args.range_rows);
  args.item_visits = w.item_visits;
  args.listed_items = w.listed_items;
  args.listed_units = w.listed_units;
  args.next_item = w.next_item;
  args.segments_added = w.segments_added;
  args.tile_segments_added = w.tile_segments_added;
  args.query_tiles = w.query_tiles;
  args.gather_rows = w.gather_rows_of(chunk);
  args.next_tile_item = w.next_tile_item;
  args.entry_sums = w.entry_sums;
  bool const several = w.sequences_given;
  std::int64_t sums = 0;  // places of entry_sums
  args.min_entry = several ? w.min_entry : entry_layer(chunk.position(0), w.tree.top_k);
  args.max_entry = several ? w.max_entry : entry_layer(chunk.position(chunk.queries - 1), w.tree.top_k);
  for (int l = args.min_entry; l <= args.max_entry; ++l) {
    args.kv_tiles[l] = w.kv_tiles[l];
    args.tiles[l] = w.tiles[l];
    if (several) continue;
    EntrySegments& split = args.entry[l] = w.entry_segments(chunk, l);
    split.first_item = args.tile_items;
    split.first_sums = static_cast<int>(sums);
    std::int64_t const items = std::int64_t(chunk.heads) * split.pairs * split.segments;
    if (split.sums_apart) sums += items;
    args.tile_items = static_cast<int>(grid_blocks("backward", args.tile_items + items));
  }
  if (sums > w.items_apart) {
    host::tree_args::reject("backward", "the workspace has room for the sums of " + std::to_string(w.items_apart) +
                                            " work items, and a chunk has " + std::to_string(sums));
  }
  for (int l = 0; l < args.max_entry; ++l) {
    args.kv_blocks[l] = w.kv_blocks[l];
    args.keys[l] = w.keys[l];
    args.ds[l] = w.ds[l];
    args.visits[l] = w.visits[l];
    args.items[l] = w.items[l];
  }
  for (int l = args.max_entry - 1; l >= 0 && !several; --l) {
    args.first_list_cta[l] = args.list_ctas;
    std::int64_t const lists = std::int64_t(chunk.heads) * w.tree.words[l] * ceil_div(std::int64_t(chunk.queries), std::int64_t(w.range_rows[l]));
    args.list_ctas = static_cast<int>(grid_blocks("backward", args.list_ctas + lists));
  }
  if (several) {
    args.tile_items = static_cast<int>(grid_blocks("backward_varlen", chunk.heads * w.entry_room));
    args.list_ctas = static_cast<int>(grid_blocks("backward_varlen", chunk.heads * w.list_room));
    args.sequences = tables(w, chunk);
  }
  return args;
}

// Sink: describe_sequences(), describe_chunk(chunk), make_rotations(), pool(), pack_kv(layer, in_tiles, first_head, heads),
// clear_sums(heads), pack_queries(chunk), build_index(chunk), list_visits(args), multiply(rule, args), add_segments(args),
// distribute(first_head, heads), begin(stretch). Between fork() and join() what is beside dkdv_selected, distribute and
// clear_sums run on a second stream, which begins behind the first and which the first waits for.
//
// forked: sums of the heads before are distributed there, and cleared, beside what comes before the first kernel that adds.
template <class Sink>
void schedule_chunk(Workspace const& w, Chunk const& chunk, bool forked, Sink& sink) {
  if (w.sequences_given && !w.has_tables(chunk)) sink.describe_chunk(chunk);
  sink.pack_queries(chunk);
  sink.build_index(chunk);
  Args const args = chunk_args(w, chunk);
  if (args.list_ctas > 0) sink.list_visits(args);
  if (forked) sink.join();
  forked = false;
  for (Rule const& rule : kRules) {
    bool const selected = rule.order == Order::kOnlySelected;
    if (!rule.runs_for(w.hands_over_ds) || (selected && args.list_ctas == 0)) continue;
    if (selected) sink.fork();
    if (forked && rule.order == Order::kSequential) sink.join();
    forked = selected || (forked && rule.order == Order::kBesideSelected);
    sink.multiply(rule, args);
    auto const apart = [](EntrySegments const& segments) { return segments.sums_apart; };
    if (rule.kernel == Kernel::kDkDvEntry && std::any_of(std::begin(args.entry), std::end(args.entry), apart)) {
      sink.add_segments(args);
    }
  }
  if (forked) sink.join();
}

template <class Sink>
void schedule(ForwardParams const& p, Workspace const& w, Sink& sink) {
  if (w.sequences_given) sink.describe_sequences();
  if (p.sequences.part == 0) sink.make_rotations();  // the same for all parts of a pack
  if (w.tree.layers > 1) sink.pool();
  auto const heads_from = [&](std::int64_t head) { return static_cast<int>(std::min(w.heads, w.all_heads - head)); };
  sink.clear_sums(heads_from(0));
  bool forked = false;
  for (std::int64_t head = 0; head < w.all_heads; head += w.heads) {
    int const heads = heads_from(head);
    for (int l = 0; l <= w.max_entry; ++l) {
      if (l < w.max_entry) sink.pack_kv(l, false, head, heads);
      if (l >= w.min_entry) sink.pack_kv(l, true, head, heads);
    }
    for (Stretch const& stretch : w.stretches) {
      sink.begin(stretch);
      w.for_chunks(stretch, head, heads, [&](Chunk const& chunk) { schedule_chunk(w, chunk, std::exchange(forked, false), sink); });
    }
    forked = head + heads < w.all_heads;
    if (forked) sink.fork();
    sink.distribute(head, heads);
    if (forked) sink.clear_sums(heads_from(head + heads));
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

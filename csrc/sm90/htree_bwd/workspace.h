// The workspace of a backward call: what lies where, how many heads and rows a chunk has, and into how many segments
// rows are split.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "host/math.h"
#include "host/tree_args.h"
#include "args.h"
#include "layout.h"
#include "params.h"
#include "part.h"
#include "reverse_index/reverse_index.h"
#include "sequences/sequences.h"

namespace htree_cuda::sm90::htree_bwd {

// Bytes that live at once, besides the pooled tree and the tables of rotations. The rows of a chunk of queries take
// half the bytes of q and out, within the first two bounds, to the nearest round. Where dS is handed over, they take
// three eighths of q and out and the bytes of k and v, up to a quarter of the latter within the last two bounds: dS is most
// of a row there, calls whose queries are a part of the sequence's fill the GPU with their chunks, too, and every chunk of a
// long sequence reads and writes the sums of most of its nodes. A call that is told of the larger one that it is a part of
// counts the inputs of that one. Nodes and their sums take kTreeBytes for as many heads as fit, one head at least.
constexpr std::int64_t kMinChunkBytes = std::int64_t(64) << 20;
constexpr std::int64_t kMaxChunkBytes = std::int64_t(256) << 20;
constexpr std::int64_t kMaxHandOverChunkBytes = std::int64_t(768) << 20;
constexpr std::int64_t kMaxLongChunkBytes = std::int64_t(2) << 30;  // the words of its reverse index are fewer than 2^32
constexpr std::int64_t kTreeBytes = std::int64_t(256) << 20;
// With sequences of different lengths rows of short ones have the room of long ones, and a chunk of few long rows leaves
// SMs idle.
constexpr std::int64_t kMaxSequencesChunkBytes = std::int64_t(512) << 20;
// What the tables of work take. Where those of all chunks have room, they serve every head.
constexpr std::int64_t kTablesBytes = std::int64_t(24) << 20;
// Rows that the dq kernels compute at once on 132 SMs, eight in a CTA: 3.3 rounds of CTAs take the time of four. The
// number is the same on any device, since sums are cut where a chunk ends.
constexpr std::int64_t kRoundRows = 132 * 8;
constexpr std::int64_t kRoundCtas = 132;  // and the CTAs of dq_gather
// In selected layers a work item of dkdv_selected has so many packs of visits, in between about so many items a layer as
// are twelve for each warp of a large GPU. An item adds 16 KB to the sums of its block, which takes as long as some ten packs.
constexpr std::int64_t kMinItemPacks = 32;
constexpr std::int64_t kMaxItemPacks = 128;
constexpr std::int64_t kLayerItems = 12 * 1056;
static_assert(kMinItemPacks % kListUnit == 0);
// Operands of the queries of a range, which stay in the L2 cache while its items run. Where few rows visit a block, an item
// moves more bytes of keys and sums, kItemBytes for 16 nodes, than of queries, and the range is the whole chunk.
constexpr std::int64_t kRangeBytes = std::int64_t(20) << 20;
constexpr std::int64_t kItemBytes = 40 << 10;
constexpr std::int64_t kMinSegmentRows = 256;  // of entry layers
// In entry layers, where a work item is kItemTiles KV tiles and a segment: about eight items for each SM of a large
// GPU, since half of them lie before the first query that visits their nodes.
constexpr std::int64_t kTileItems = 1056;
// Where the rows are too few for that, all items run at the same time, with at least kMinEntryRows rows, and their sums are
// kept apart until a kernel adds them: added in order, they would wait for each other. Of sequences of different lengths
// they are added in order; small groups, whose items need many rows, have fewer and longer items where few pairs of KV
// tiles leave eight segments at least: as many items as run at the same time, less a sixteenth for the rows of layers
// below, which have items of their own.
constexpr std::int64_t kEntryRoundItems = 132;
constexpr std::int64_t kSequencesRoundItems = kEntryRoundItems * 15 / 16;
constexpr std::int64_t kMinRoundSegments = 8;
constexpr std::int64_t kMinEntryRows = 128;
// The rows of an item are counted in 16 bits.
constexpr std::int64_t kMaxSegmentTileRows = 32768;
static_assert(kMaxSegmentTileRows * 3 / 2 + kRowStep < sequences::kMaxItemRows);
inline std::int64_t round_up(std::int64_t x, std::int64_t step) { return ceil_div(x, step) * step; }

// Runs of queries whose rows share chunks: one, or two of which the second goes on where the first ends.
struct Stretch {
  std::int64_t first = 0;    // number of the first run
  int count = 1;
  std::int64_t q_start = 0;
  std::int64_t rows = 0;     // of a head
  std::int64_t before = 0;   // rows of the first run, where there are two
};

// Sizes where `base` is null, addresses otherwise.
struct Workspace {
  Tree tree{};
  std::int64_t tree_begin[kMaxLayers] = {};  // where layer l >= 1 begins in k_tree and v_tree
  std::int64_t M = 0;                        // nodes above the bottom
  std::int64_t begin[kMaxLayers] = {};       // where a layer begins among the node rows of a head
  std::int64_t node_rows = 0;                // of a head
  std::int64_t positions = 0;                // rows of the tables of rotations
  std::int64_t heads = 0;                    // of a chunk, at most
  std::int64_t rows = 0;                     // of a head in a chunk, at most
  std::int64_t row_room = 0;                 // rows that there is memory for
  std::int64_t zeroed_bytes = 0;             // from `next_item` on, set to zero before every chunk
  int range_rows[kMaxLayers] = {};           // of the lists of visits
  int item_visits = 0;                       // of a work item of dkdv_selected, about
  int min_entry = 0;                         // entry layer of the first query
  int max_entry = 0;                         // entry layer of the last query
  int tiles[kMaxLayers] = {};
  int tile_segments[kMaxLayers] = {};
  int tile_segment_rows[kMaxLayers] = {};
  bool hands_over_ds = false;                // from dkdv_selected to dq_gather
  std::int64_t pack = 0;                     // queries that fill 16 rows of a product
  std::int64_t all_heads = 0;
  std::int64_t row_heads = 0;                // from row to row of out, lse and dq
  std::int64_t selection_heads = 0;          // and of the selection
  std::vector<Stretch> stretches;
  std::int64_t all_rows = 0;                 // of a head in the call, or in its longest stretch, at most
  int blocks[kMaxLayers] = {};               // KV blocks of a sequence, at most; likewise pairs of KV tiles
  int pairs[kMaxLayers] = {};
  bool sequences_given = false;              // of different lengths
  int row_tile = 0;                          // rows of a sequence come in multiples of it, where lengths differ
  int gather_rows = 0;                       // of a CTA of dq_gather, at most
  int gather_ctas = 0;                       // of a head of a chunk; of sequences of different lengths, like the next three
  std::int64_t entry_room = 0;
  std::int64_t list_room = 0;
  std::int64_t table_chunks = 0;             // chunks whose tables of work there is room for
  std::int64_t items_apart = 0;              // of a chunk, at most: places of entry_sums
  std::int64_t bytes = 0;

  float2* rotations = nullptr;
  rope::FragmentRotations* fragment_rotations = nullptr;
  char* k_tree = nullptr;
  char* v_tree = nullptr;
  char* kv_blocks[kMaxLayers] = {};
  char* keys[kMaxLayers] = {};               // null where dS is not handed over; ds likewise
  char* ds[kMaxLayers] = {};
  uint2* visits[kMaxLayers] = {};
  uint4* items[kMaxLayers] = {};
  int* listed_units = nullptr;
  int* listed_items = nullptr;
  float* dk = nullptr;
  float* dv = nullptr;
  char* queries = nullptr;
  char* kv_tiles[kMaxLayers] = {};
  char* query_tiles = nullptr;
  ReverseIndex index{};
  int* next_item = nullptr;
  int* next_tile_item = nullptr;
  int* segments_added = nullptr;
  int* tile_segments_added = nullptr;
  float* entry_sums = nullptr;
  PackPart* pack_part = nullptr;                  // every part of a call has it at the same address
  Sequence* sequences = nullptr;
  sequences::Rows* row_tiles = nullptr;      // of the call, whole chunks
  sequences::Rows* gather = nullptr;
  sequences::EntryWork* entry = nullptr;
  sequences::ListWork* list_work = nullptr;
  sequences::Counts* counts = nullptr;
  std::int32_t* stream_begins = nullptr;
  std::int32_t* stream_ends = nullptr;

  Workspace(Runs<ForwardParams> const& runs, PartParams const& part, char* base) {
    ForwardParams const& p = *runs.first;
    shape(runs);
    row_heads = part.H_kv > 0 ? part.H_kv : p.H_kv;
    selection_heads = part.selection_H_kv > 0 ? part.selection_H_kv : row_heads;
    std::int64_t const block_bytes = kBlockHeader + operand_bytes(p.K, p.V);
    std::int64_t const query_bytes = htree_bwd::query_bytes(p.K, p.V, unit_heads(static_cast<int>(p.G)));
    std::int64_t const tile_bytes = query_tile_bytes(p.K, p.V);
    std::int64_t const queries_of_tile = tile_queries(unit_heads(static_cast<int>(p.G)));
    std::int64_t row_bytes = query_bytes + tile_bytes / queries_of_tile;
    int const unit = unit_heads(static_cast<int>(p.G));
    hands_over_ds = unit < kMaxGroupHeads && p.dtype == DType::kBFloat16;
    std::int64_t const row_ds = hands_over_ds ? p.top_k * ds_bytes(unit) : 0;
    for (int l = 0; l < max_entry; ++l) row_bytes += 4 * tree.words[l] + row_ds + p.top_k * sizeof(uint2);
    std::int64_t rows_of_q = has_sequences(p) ? p.sequences.total_q : 0;
    for (ForwardParams const& run : runs) rows_of_q += has_sequences(p) ? 0 : run.T_q;
    rows_of_q = std::max(rows_of_q, part.queries);
    std::int64_t const call_heads = all_heads / p.H_kv * row_heads;
    std::int64_t const input_bytes = 2 * call_heads * rows_of_q * p.G * (p.K + p.V);
    bool const large = hands_over_ds && !sequences_given;
    std::int64_t const kv_bytes = 2 * call_heads * p.T * (p.K + p.V);
    std::int64_t const wanted_bytes = large ? input_bytes * 3 / 8 + kv_bytes : input_bytes / 2;
    std::int64_t const max_bytes = large             ? std::clamp(kv_bytes / 4, kMaxHandOverChunkBytes, kMaxLongChunkBytes)
                                   : sequences_given ? kMaxSequencesChunkBytes
                                                     : kMaxChunkBytes;
    std::int64_t const chunk_bytes = std::clamp(wanted_bytes, kMinChunkBytes, max_bytes);
    std::int64_t const key_bytes = hands_over_ds ? kSiblings * 2 * p.K : 0;
    std::int64_t head_bytes = node_rows / kSiblings * (block_bytes + key_bytes) + node_rows * (p.K + p.V) * 4;
    // Where there are many sequences their tiles are many, too.
    for (int l = 0; l <= max_entry && has_sequences(p); ++l) head_bytes += tiles[l] * kv_tile_bytes(p.K, p.V);

    rows = round_up(all_rows, kRowStep);
    // The room of a pack follows from its rows of q, however many sequences they are, whose padding comes on top.
    row_room = host::is_packed(p) ? round_up(p.sequences.total_q + p.sequences.total_q / 32 + 1024, kRowStep) : rows;
    heads = std::min({all_heads, kTreeBytes / head_bytes, chunk_bytes / (row_room * row_bytes)});
    if (heads < 1) {
      std::int64_t const fit = chunk_bytes / row_bytes;
      row_room = std::min(row_room, large ? round_up(fit + 1, kRowStep) : rows_of_rounds(fit));
    }
    rows = std::min(rows, row_room);
    if (heads < 1 || rows < all_rows) {
      heads = std::max<std::int64_t>(heads, 1);
      if (sequences_given) rows = even_rows(p, rows);
      if (large) rows = rows_by_rounds(rows);
    }
    if (!host::is_packed(p)) row_room = rows;
    if (sequences_given) gather_rows = even_gather_rows(heads, rows);
    pack = kMaxGroupHeads / unit;
    std::int64_t const item_packs = heads * rows * tree.top_k / (pack * kLayerItems);
    item_visits = static_cast<int>(round_up(pack * std::clamp(item_packs, kMinItemPacks, kMaxItemPacks), kListUnit));
    for (int l = 0; l < max_entry; ++l) range_rows[l] = rows_of_range(l, query_bytes);
    for (int l = min_entry; l <= max_entry; ++l) {
      std::int64_t const all = heads * pairs[l];
      bool const in_one_round =
          sequences_given && pack > 1 && few_entry_rows(all) && kSequencesRoundItems / all >= kMinRoundSegments;
      std::int64_t const wanted = (in_one_round ? kSequencesRoundItems : kTileItems) / all;
      split(std::max(wanted, ceil_div(rows, kMaxSegmentTileRows)), min_entry_rows(), tile_segments[l], tile_segment_rows[l]);
    }

    if (has_sequences(p)) place(pack_part, base, 1);
    place(rotations, base, positions * (p.K / 2));
    place(fragment_rotations, base, positions * (p.K / 8));
    place(k_tree, base, all_heads * M * p.K * 2);
    place(v_tree, base, all_heads * M * p.V * 2);
    for (int l = 0; l < max_entry; ++l) place(kv_blocks[l], base, heads * tree.kv_blocks[l] * block_bytes);
    for (int l = min_entry; l <= max_entry; ++l) place(kv_tiles[l], base, heads * tiles[l] * kv_tile_bytes(p.K, p.V));
    for (int l = 0; l < max_entry && hands_over_ds; ++l) {
      place(keys[l], base, heads * tree.kv_blocks[l] * key_bytes);
      place(ds[l], base, heads * row_room * row_ds);
    }
    for (int l = 0; l < max_entry; ++l) {
      std::int64_t const lists = ranges_of(p, l) * heads * tree.kv_blocks[l];
      place(visits[l], base, list_capacity(heads * row_room * p.top_k, lists));
      place(items[l], base, kMaxSegments * lists);
    }
    place(dk, base, heads * node_rows * p.K);
    place(dv, base, heads * node_rows * p.V);
    place(queries, base, heads * row_room * query_bytes);
    place(query_tiles, base, heads * row_room / queries_of_tile * tile_bytes);
    items_apart = std::max(max_items_apart(heads), max_items_apart(all_heads % heads));
    place(entry_sums, base, items_apart * kItemNodes * (p.K + p.V));
    std::int64_t const before = bytes;
    place(next_item, base, 1);
    place(next_tile_item, base, 1);
    place(listed_units, base, kMaxLayers);
    place(listed_items, base, kMaxLayers * kItemGroups);
    place(segments_added, base, heads * node_rows / kSiblings);
    place(tile_segments_added, base, heads * node_rows / kSiblings);
    for (int l = 0; l < max_entry; ++l) place(index.layer[l], base, heads * row_room * tree.words[l]);
    zeroed_bytes = bytes - before;
    if (has_sequences(p)) place_sequences(p, base);
  }

  std::int64_t chunks() const { return ceil_div(all_rows, rows); }

  // Which tables of work a chunk has, and whether they are there already, from heads before.
  std::int64_t tables_of(Chunk const& chunk) const {
    return chunks() <= table_chunks ? chunk.first_query / rows : 0;
  }
  bool has_tables(Chunk const& chunk) const { return chunk.first_head > 0 && chunks() <= table_chunks; }

  // The chunks of a stretch for some heads, in their order. The first one has the rows that whole chunks leave over: where
  // the stretch begins with its sequence, it has the least work.
  template <class Use>
  void for_chunks(Stretch const& stretch, std::int64_t first_head, int of_heads, Use const& use) const {
    std::int64_t queries = sequences_given ? rows : (stretch.rows - 1) % rows + 1;
    for (std::int64_t first = 0; first < stretch.rows; first += queries, queries = rows) {
      use(Chunk{first_head, of_heads, first, static_cast<int>(queries), static_cast<int>(rows), stretch.q_start});
    }
  }

  // Rows of a CTA of dq_gather in a chunk.
  int gather_rows_of(Chunk const& chunk) const {
    return sequences_given ? gather_rows : even_gather_rows(chunk.heads, chunk.queries);
  }

  // Rows of a segment of an entry layer, at least, where items add their sums in order.
  std::int64_t min_entry_rows() const { return pack > 1 ? 2 * kMinSegmentRows : kMinSegmentRows; }

  // How dkdv_entry cuts an entry layer of a chunk; first_item and first_sums are left to the caller.
  EntrySegments entry_segments(Chunk const& chunk, int l) const {
    EntryRows const rows_of_layer(chunk, l, tree.top_k);
    if (rows_of_layer.begin >= rows_of_layer.end) return {};
    std::int64_t const all = std::int64_t(chunk.heads) * pairs[l];
    std::int64_t const reached = (chunk.position(rows_of_layer.end - 1) >> (kLog2Siblings * l)) + 1;
    int const own = static_cast<int>(ceil_div(std::min(reached, tree.N[l]), std::int64_t(kItemNodes)));
    int const first = rows_of_layer.begin / kRowStep * kRowStep;
    std::int64_t const own_rows = rows_of_layer.end - first;
    std::int64_t const most = kEntryRoundItems * own_rows / chunk.queries / (std::int64_t(chunk.heads) * own);
    std::int64_t const count = std::min(most, own_rows / kMinEntryRows);
    if (!few_entry_rows(all) || count < 2) return {0, pairs[l], 0, tile_segments[l], tile_segment_rows[l], false, 0};
    int const segment = static_cast<int>(round_up(ceil_div(own_rows, count), kRowStep));
    return {0, own, first, static_cast<int>(ceil_div(own_rows, std::int64_t(segment))), segment, true, 0};
  }

private:
  // Whether the rows of a chunk are too few for kTileItems items with so many pairs of KV tiles in all heads.
  bool few_entry_rows(std::int64_t all_pairs) const { return rows / min_entry_rows() < kTileItems / all_pairs; }

  // Work items of dkdv_entry in a chunk of so many heads that leave their sums apart, at most. The last chunk of heads may
  // have fewer than the others, and fewer heads are cut into more items.
  std::int64_t max_items_apart(std::int64_t chunk_heads) const {
    std::int64_t most = 0;
    if (sequences_given || chunk_heads == 0) return most;
    for (Stretch const& stretch : stretches) {
      for_chunks(stretch, 0, static_cast<int>(chunk_heads), [&](Chunk const& chunk) {
        std::int64_t items = 0;
        for (int l = min_entry; l <= max_entry; ++l) {
          EntrySegments const split = entry_segments(chunk, l);
          if (split.sums_apart) items += chunk_heads * split.pairs * split.segments;
        }
        most = std::max(most, items);
      });
    }
    return most;
  }

  // Rows of chunks that are about equal. Where all sequences have to be as long as the longest, a chunk has whole ones,
  // or equal parts of one: what a block is visited by then lies in few chunks.
  std::int64_t even_rows(ForwardParams const& p, std::int64_t most) const {
    std::int64_t const longest = round_up(p.T_q, row_tile);
    auto const parts = [](std::int64_t all, std::int64_t part) { return ceil_div(all, ceil_div(all, part)); };
    if (p.sequences.count * longest > all_rows) return round_up(parts(all_rows, most), kRowStep);
    if (most < longest) return round_up(parts(longest, most), kRowStep);
    return round_up(parts(p.sequences.count, most / longest) * longest, kRowStep);
  }

  // As few rows a CTA of dq_gather as its rounds leave, whole fours: the CTAs of a last round that is not full would take
  // as long as those of the others.
  int even_gather_rows(std::int64_t of_heads, std::int64_t of_rows) const {
    std::int64_t const rounds = ceil_div(of_heads * ceil_div(of_rows, std::int64_t(gather_rows)), kRoundCtas);
    std::int64_t const ctas = std::max<std::int64_t>(rounds * kRoundCtas / of_heads, 1);
    return static_cast<int>(std::min<std::int64_t>(round_up(ceil_div(of_rows, ctas), 4), gather_rows));
  }

  // Rows of whole rounds, of which about `fit` rows fit: of as many as all rows need, or to the nearest.
  std::int64_t rows_of_rounds(std::int64_t fit) const {
    std::int64_t const up = round_up(fit + 1, kRoundRows);
    if (row_room <= up) return up;
    return std::max((fit + kRoundRows / 2) / kRoundRows, std::int64_t(1)) * kRoundRows;
  }

  // Rows of chunks of one head, of up to `most`. Two are equal. Of more, a last round of dq_gather that is less than half
  // full takes as long as a full one.
  std::int64_t rows_by_rounds(std::int64_t most) const {
    if (most >= all_rows) return most;
    if (2 * most >= all_rows) return round_up(ceil_div(all_rows, std::int64_t(2)), kRowStep);
    std::int64_t const round = kRoundCtas * gather_rows;
    return most > round && most % round < round / 2 ? (most - most % round) / kRowStep * kRowStep : most;
  }

  // Lists of work have room for what the totals and maxima allow. A sequence has a segment more than its rows fill.
  std::int64_t sequences_in_chunk(ForwardParams const& p) const { return std::min(p.sequences.count, rows / row_tile); }

  // Items of the segments that rows do not fill, where a sequence has `own` items at most and all sequences have `all`. In
  // a pack they do not depend on how many sequences it has.
  std::int64_t last_segments(ForwardParams const& p, std::int64_t all, std::int64_t own) const {
    return host::is_packed(p) ? all : std::min(all, sequences_in_chunk(p) * own);
  }

  // Rows of a range of the lists of a layer: as many as stay in the cache; where blocks have many visits, only as many as
  // fill a segment, so that more CTAs list the visits; all of a chunk, where the items of so few would move more bytes for
  // each visit than those of all and a query that is not in the cache.
  int rows_of_range(int l, std::int64_t query_bytes) const {
    std::int64_t const cached = kRangeBytes / (heads * query_bytes);
    std::int64_t const filled = item_visits * std::int64_t(blocks[l]) / tree.top_k;
    std::int64_t const few = std::max(std::min(cached, filled), ceil_div(rows, std::int64_t(kMaxRanges)));
    std::int64_t const visit_bytes = kItemBytes * blocks[l] / tree.top_k;  // times the rows of a range
    bool const sparse = visit_bytes / few > visit_bytes / rows + query_bytes;
    return static_cast<int>(round_up(sparse ? rows : ceil_div(rows, ceil_div(rows, few)), kRowStep));
  }

  // How many ranges there is room for. In a pack they do not depend on how many sequences it has.
  std::int64_t ranges_of(ForwardParams const& p, int l) const {
    return host::is_packed(p) ? kMaxRanges : ceil_div(rows, std::int64_t(range_rows[l]));
  }

  void place_sequences(ForwardParams const& p, char* base) {
    std::int64_t const count = p.sequences.count;
    std::int64_t const in_chunk = sequences_in_chunk(p);
    for (int l = 0; l <= max_entry; ++l) {
      // At the bottom a part of a pack has up to as many sequences as KV tiles, with a pair for each.
      int const log2_nodes = l == 0 && host::is_packed(p) ? 6 : 7;
      std::int64_t const all_pairs = (p.sequences.total_k >> (kLog2Siblings * l + log2_nodes)) +
                                     sequences_of_room(p, log2_room_from(l, tree.top_k));
      entry_room += rows / tile_segment_rows[l] * pairs[l] + last_segments(p, all_pairs, pairs[l]);
      if (l == max_entry) break;
      std::int64_t const all_words = tree.kv_blocks[l] / kWordBlocks +
                                     sequences_of_room(p, log2_room_from(l + 1, tree.top_k));
      list_room += (ranges_of(p, l) - 1) * tree.words[l] + last_segments(p, all_words, tree.words[l]);
    }
    gather_ctas = hands_over_ds ? static_cast<int>(rows / gather_rows + in_chunk) : 0;
    place(sequences, base, count);
    place(row_tiles, base, chunks() * (rows / row_tile));
    std::int64_t const chunk_bytes = gather_ctas * std::int64_t(sizeof(sequences::Rows)) +
                                     entry_room * std::int64_t(sizeof(sequences::EntryWork)) +
                                     list_room * std::int64_t(sizeof(sequences::ListWork)) +
                                     std::int64_t(sizeof(sequences::Counts));
    table_chunks = std::max(kTablesBytes / chunk_bytes, std::int64_t(1));
    std::int64_t const tables = bytes;
    place(gather, base, table_chunks * gather_ctas);
    place(entry, base, table_chunks * entry_room);
    place(list_work, base, table_chunks * list_room);
    place(counts, base, table_chunks);
    bytes = std::max(bytes, tables + kTablesBytes);
    place(stream_begins, base, sequences::streams_of(max_entry) * count);
    place(stream_ends, base, sequences::kStreams + 2);
  }
  static_assert(kItemTiles * kTileRows == 1 << 7 && kTileRows == 1 << 6);

  void join_runs(Runs<ForwardParams> const& runs) {
    for (std::int64_t i = 0; i < runs.count; ++i) {
      ForwardParams const& run = runs.first[i];
      Stretch* const last = stretches.empty() ? nullptr : &stretches.back();
      if (last != nullptr && last->count == 1 && last->q_start + last->rows == run.q_start) {
        last->count = 2;
        last->before = last->rows;
        last->rows += run.T_q;
      } else {
        stretches.push_back({i, 1, run.q_start, run.T_q, 0});
      }
    }
  }

  void shape(Runs<ForwardParams> const& runs) {
    ForwardParams const& p = *runs.first;
    bool const several = sequences_given = has_sequences(p);
    std::int64_t const total_k = p.sequences.total_k;
    std::int64_t const count = p.sequences.count;
    int const pack = kMaxGroupHeads / unit_heads(static_cast<int>(p.G));  // queries
    row_tile = 8 * pack;
    gather_rows = gather_warps(kMaxGroupHeads / pack) * pack;
    all_heads = (several ? 1 : p.B) * p.H_kv;
    join_runs(runs);
    std::int64_t first_position = p.q_start, end_position = 0;
    for (Stretch const& stretch : stretches) {
      all_rows = std::max(all_rows, stretch.rows);
      first_position = std::min(first_position, stretch.q_start);
      end_position = std::max(end_position, stretch.q_start + stretch.rows);
    }
    if (several) {
      std::int64_t const of_rows = p.sequences.total_q / row_tile + count;
      stretches.front().rows = all_rows = std::min(of_rows, count * ceil_div(p.T_q, std::int64_t(row_tile))) * row_tile;
    }
    tree.top_k = static_cast<int>(p.top_k);
    tree.N[0] = p.T;
    tree.layers = 1;
    while (tree.N[tree.layers - 1] > p.top_k * kSiblings) {
      tree.N[tree.layers] = ceil_div(tree.N[tree.layers - 1], kSiblings);
      tree_begin[tree.layers] = M;
      int const from = log2_room_from(tree.layers, tree.top_k);
      M += several ? sequence_nodes(total_k, sequences_of_room(p, from), tree.layers, from) : tree.N[tree.layers];
      ++tree.layers;
    }
    for (int l = 0; l < tree.layers; ++l) {
      tree.kv_blocks[l] = blocks[l] = static_cast<int>(ceil_div(tree.N[l], kSiblings));
      tree.words[l] = ceil_div(tree.kv_blocks[l], kWordBlocks);
      if (several) {
        std::int64_t const all = sequences::first_block(total_k, sequences_of_room(p, log2_room_from(l, tree.top_k)), l, tree.top_k);
        tree.kv_blocks[l] = static_cast<int>(std::max<std::int64_t>(all, 1));
      }
      begin[l] = node_rows;
      node_rows += std::int64_t(tree.kv_blocks[l]) * kSiblings;
    }
    min_entry = several ? 0 : entry_layer(first_position, tree.top_k);
    max_entry = entry_layer((several ? p.T : end_position) - 1, tree.top_k);
    for (int l = min_entry; l <= max_entry; ++l) {
      pairs[l] = static_cast<int>(ceil_div(std::min(blocks[l], tree.top_k), kItemTiles * kTileBlocks));
      tiles[l] = kItemTiles * pairs[l];
      if (several) {
        std::int64_t const all = sequences::first_tile(total_k, sequences_of_room(p, log2_room_from(l, tree.top_k)), l, tree.top_k);
        tiles[l] = static_cast<int>(std::max<std::int64_t>(all, 1));
      }
    }
    // Positions of a candidate list, and the frame that dq_gather begins a layer in: one block behind the list.
    positions = std::min(p.T, p.top_k * kSiblings) + kSiblings;
  }

  static std::int64_t segments_of(std::int64_t wanted, std::int64_t rows, std::int64_t min_rows) {
    return std::max(std::min(wanted, rows / min_rows), std::int64_t(1));
  }

  // Splits the rows of an entry layer into about `wanted` segments. Splits follow from shapes alone, so that sums do not
  // depend on the device. The callers want as many segments as fill the device.
  void split(std::int64_t wanted, std::int64_t min_rows, int& segments, int& segment_rows) const {
    std::int64_t const count = segments_of(wanted, rows, min_rows);
    segment_rows = static_cast<int>(round_up(ceil_div(rows, count), kRowStep));
    segments = static_cast<int>(ceil_div(rows, segment_rows));
  }

  template <class T>
  void place(T*& pointer, char* base, std::int64_t count) {
    if (base != nullptr) pointer = reinterpret_cast<T*>(base + bytes);
    bytes += round_up(count * static_cast<std::int64_t>(sizeof(T)), 256);
  }
};

}  // namespace htree_cuda::sm90::htree_bwd

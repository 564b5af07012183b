// Lists of work of a chunk, from lengths on the device. One CTA counts what each sequence brings and adds the counts up,
// 1024 sequences at a time; then a thread for each place of the lists finds its sequence by bisection.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/sm90.cuh"
#include "host/launch_overlapped.cuh"
#include "sequences.h"

namespace htree_cuda::sm90::htree_bwd::sequences {

inline constexpr int kScanThreads = 1024;
inline constexpr int kFillThreads = 256;

// What a sequence has in a chunk. Rows are of the chunk.
struct Span {
  std::int32_t begin;
  std::int32_t end;     // past its last query; not above `begin` where the chunk has none
  std::int32_t origin;  // row r stands at position origin + r

  __device__ __forceinline__ Span(ChunkArgs const& args, Sequence const& sequence) {
    std::int64_t const first = static_cast<std::int64_t>(sequence.tile) * args.row_tile - args.first_row;
    std::int64_t const last = first + sequence.count;
    begin = static_cast<std::int32_t>(min(max(first, std::int64_t(0)), static_cast<std::int64_t>(args.rows)));
    end = static_cast<std::int32_t>(max(min(last, static_cast<std::int64_t>(args.rows)), std::int64_t(0)));
    origin = static_cast<std::int32_t>(sequence.t - first);
  }

  __device__ __forceinline__ std::int32_t row_at(std::int64_t position) const {
    return static_cast<std::int32_t>(min(max(position - origin, static_cast<std::int64_t>(begin)), static_cast<std::int64_t>(end)));
  }
  __device__ __forceinline__ std::int64_t last_position() const { return static_cast<std::int64_t>(origin) + end - 1; }
};

// The rows of a span whose entry layer is a layer, in segments, and how many pairs of KV tiles they visit.
struct EntrySpan {
  std::int32_t begin;
  std::int32_t end;
  std::int32_t base;      // where the first segment begins
  std::int32_t width;     // pairs of KV tiles
  std::int32_t segments;
  std::int32_t rows;      // of a segment

  __device__ __forceinline__ static EntrySpan of(ChunkArgs const& args, Span const& span, int layer) {
    auto const first_at = [&](int l) { return span.row_at(static_cast<std::int64_t>(args.top_k) << (kLog2Siblings * l)); };
    EntrySpan work{layer == 0 ? span.begin : first_at(layer), first_at(layer + 1), 0, 0, 0, 0};
    if (work.begin >= work.end) return work;
    int const nodes = candidates_in_entry(static_cast<std::int64_t>(span.origin) + work.end - 1, layer);
    work.base = work.begin / args.tile_queries * args.tile_queries;
    work.width = (nodes + kItemTiles * kTileRows - 1) / (kItemTiles * kTileRows);
    work.split(args.tile_segment_rows[layer]);
    return work;
  }

  __device__ __forceinline__ std::int32_t items() const { return width * segments; }

private:
  // About equal segments of about so many rows: a short one behind a long one would wait for the other's sums.
  __device__ __forceinline__ void split(int wanted) {
    segments = max((end - base + wanted / 2) / wanted, 1);
    rows = ((end - base + segments - 1) / segments + kRowStep - 1) / kRowStep * kRowStep;
    segments = (end - base + rows - 1) / rows;
  }
};

// The rows of a span that visit a selected layer, the ranges of the chunk's rows that these lie in, and their KV blocks.
struct SelectedSpan {
  std::int32_t begin;
  std::int32_t end;
  std::int32_t blocks;
  std::int32_t first_range;
  std::int32_t ranges;

  __device__ __forceinline__ SelectedSpan(ChunkArgs const& args, Span const& span, int layer)
      : begin(span.row_at(static_cast<std::int64_t>(args.top_k) << (kLog2Siblings * (layer + 1)))), end(span.end) {
    bool const any = begin < end;
    blocks = any ? static_cast<std::int32_t>(span.last_position() >> (kLog2Siblings * (layer + 1))) + 1 : 0;
    first_range = begin / args.range_rows[layer];
    ranges = any ? (end - 1) / args.range_rows[layer] - first_range + 1 : 0;
  }

  __device__ __forceinline__ std::int32_t words() const { return (blocks + kWordBlocks - 1) / kWordBlocks; }
};

// Streams: CTAs of dq_gather; then work items of dkdv_entry and lists of visit_lists, the lowest layer first.
enum class Kind { kGather, kEntry, kLists };

struct Stream {
  Kind kind;
  int layer;

  __device__ __forceinline__ static Stream of(ChunkArgs const& args, int stream) {
    int const entry = args.max_entry + 1;  // layers that are the entry layer of some query
    if (stream == 0) return {Kind::kGather, 0};
    if (stream <= entry) return {Kind::kEntry, stream - 1};
    return {Kind::kLists, stream - entry - 1};
  }
};

// The first stream of a kind, in the order above; of a kind past the last, the number of streams.
__device__ __forceinline__ int first_stream(ChunkArgs const& args, Kind kind) {
  if (kind == Kind::kGather) return 0;
  return kind == Kind::kEntry ? 1 : args.max_entry + 2;
}

__device__ __forceinline__ std::int32_t count_of(ChunkArgs const& args, Span const& span, int stream) {
  if (span.begin >= span.end) return 0;
  auto const [kind, layer] = Stream::of(args, stream);
  if (kind == Kind::kGather) return (span.end - span.begin + args.gather_rows - 1) / args.gather_rows;
  if (kind == Kind::kEntry) return EntrySpan::of(args, span, layer).items();
  SelectedSpan const selected(args, span, layer);
  return selected.words() * selected.ranges;
}

static __global__ void __launch_bounds__(kScanThreads) count_kernel(const __grid_constant__ ChunkArgs args) {
  wait_for_previous_grid();
  __shared__ std::int32_t sums[kScanThreads / 32];
  auto const sequence_of = [&](std::int64_t row) {
    return sequence_at(args.count, row / args.row_tile, [&](std::int32_t i) { return args.sequences[i].tile; });
  };
  std::int32_t const from = sequence_of(args.first_row);
  std::int32_t const to = sequence_of(args.first_row + args.rows - 1) + 1;
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  for (int stream = 0; stream < args.streams(); ++stream) {
    std::int32_t carry = 0;
    for (std::int32_t base = from; base < to; base += kScanThreads) {
      std::int32_t const i = base + static_cast<std::int32_t>(threadIdx.x);
      std::int32_t const own = i < to ? count_of(args, Span(args, args.sequences[i]), stream) : 0;
      std::int32_t sum = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        std::int32_t const before = __shfl_up_sync(kFullWarp, sum, d);
        if (lane >= d) sum += before;
      }
      __syncthreads();
      if (lane == 31) sums[warp] = sum;
      __syncthreads();
      std::int32_t before = carry;
      for (int w = 0; w < warp; ++w) before += sums[w];
      if (i < to) args.begins[static_cast<std::int64_t>(stream) * args.count + i] = before + sum - own;
      for (int w = 0; w < kScanThreads / 32; ++w) carry += sums[w];
    }
    if (threadIdx.x == 0) args.ends[stream] = carry;
  }
  if (threadIdx.x != 0) return;
  args.ends[kStreams] = from;
  args.ends[kStreams + 1] = to;
  Counts counts{};  // of this thread's own stores
  for (int stream = 1; stream < args.streams(); ++stream) {
    Kind const kind = Stream::of(args, stream).kind;
    (kind == Kind::kEntry ? counts.entry : counts.lists) += args.ends[stream];
  }
  *args.counts = counts;
}

// The sequence that has place `index` of a stream.
__device__ __forceinline__ std::int32_t owner(ChunkArgs const& args, int stream, std::int32_t index) {
  std::int32_t const from = args.ends[kStreams];
  std::int32_t const* const begins = args.begins + static_cast<std::int64_t>(stream) * args.count + from;
  return from + sequence_at(args.ends[kStreams + 1] - from, index, [&](std::int32_t i) { return begins[i]; });
}

__device__ __forceinline__ std::int32_t place_in_owner(ChunkArgs const& args, int stream, std::int32_t own, std::int32_t index) {
  return index - args.begins[static_cast<std::int64_t>(stream) * args.count + own];
}

__device__ __forceinline__ Rows rows_of(Sequence const& sequence, std::int32_t own, std::int32_t query, std::int32_t most,
                                        std::int32_t first) {
  return {sequence.t + query, sequence.row + query, min(sequence.count - query, most), own, sequence.before, first, {}};
}

__device__ __forceinline__ EntryWork entry_work(ChunkArgs const& args, int layer, std::int32_t own, std::int32_t place) {
  Sequence const sequence = args.sequences[own];
  Span const span(args, sequence);
  EntrySpan const work = EntrySpan::of(args, span, layer);
  std::int32_t const rows = work.rows;
  std::int32_t const segment = place / work.width;
  std::int32_t const tile = place % work.width * kItemTiles;
  std::int32_t const reached =
      min(max(span.row_at(static_cast<std::int64_t>(tile) * kTileRows << (kLog2Siblings * layer)), work.begin), work.end);
  std::int32_t const first = max(work.base + segment * rows, reached / args.tile_queries * args.tile_queries);
  std::int32_t const end = min(work.base + (segment + 1) * rows, work.end);
  // Negative where none of the segment's rows comes to the tiles.
  std::int32_t const segments_before = max(first, reached) < end ? segment - (reached - work.base) / rows : -1;
  std::int64_t const width = std::int64_t(1) << (kLog2Siblings * layer);
  return {layer, tile, first, end, segments_before, span.origin, work.begin,
          work.end, static_cast<std::int32_t>((sequence.keys + width - 1) / width),
          static_cast<std::int32_t>(first_block(sequence.before, own, layer, args.top_k)),
          static_cast<std::int32_t>(first_tile(sequence.before, own, layer, args.top_k)), end - first};
}

__device__ __forceinline__ ListWork list_work(ChunkArgs const& args, int layer, std::int32_t own, std::int32_t place) {
  Sequence const sequence = args.sequences[own];
  Span const span(args, sequence);
  SelectedSpan const selected(args, span, layer);
  std::int32_t const rows = args.range_rows[layer];
  std::int32_t const range = selected.first_range + place / selected.words();
  // The last blocks first, because they belong to the most recent tokens, which are visited most.
  std::int32_t const word = selected.words() - 1 - place % selected.words();
  std::int64_t const position = static_cast<std::int64_t>(word) * kWordBlocks << (kLog2Siblings * (layer + 1));
  // Whole steps of rows, where these are the sequence's: neighbouring lanes then read one line.
  std::int32_t const reached = max(max(span.row_at(position), selected.begin) / kRowStep * kRowStep, span.begin);
  std::int32_t const last = (selected.end - 1) / rows;
  return {layer, word, max(reached, range * rows), min((range + 1) * rows, selected.end), span.origin, selected.blocks,
          static_cast<std::int32_t>(first_block(sequence.before, own, layer, args.top_k)),
          2 * (range - reached / rows) + (range == last)};
}

static __global__ void __launch_bounds__(kFillThreads) fill_kernel(const __grid_constant__ ChunkArgs args) {
  wait_for_previous_grid();
  std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kFillThreads + threadIdx.x;
  if (index < args.gather_ctas) {
    Rows rows{};
    if (index < args.ends[0]) {
      std::int32_t const own = owner(args, 0, static_cast<std::int32_t>(index));
      Sequence const sequence = args.sequences[own];
      Span const span(args, sequence);
      std::int32_t const first = span.begin + place_in_owner(args, 0, own, static_cast<std::int32_t>(index)) * args.gather_rows;
      std::int32_t const query = span.origin + first - sequence.t;
      rows = rows_of(sequence, own, query, min(args.gather_rows, span.end - first), first);
    }
    args.gather[index] = rows;
    return;
  }
  index -= args.gather_ctas;
  Kind kind = Kind::kEntry;
  if (index >= args.entry_room) {
    index -= args.entry_room;
    kind = Kind::kLists;
    if (index >= args.list_room) return;
  }
  int stream = first_stream(args, kind);
  int const end = kind == Kind::kLists ? args.streams() : first_stream(args, Kind::kLists);
  std::int32_t place = static_cast<std::int32_t>(index);
  while (stream < end && place >= args.ends[stream]) place -= args.ends[stream++];
  if (stream == end) return;
  std::int32_t const own = owner(args, stream, place);
  place = place_in_owner(args, stream, own, place);
  int const layer = Stream::of(args, stream).layer;
  if (kind == Kind::kEntry) {
    args.entry[index] = entry_work(args, layer, own, place);
  } else {
    args.lists[index] = list_work(args, layer, own, place);
  }
}

static __global__ void __launch_bounds__(kFillThreads) row_tiles_kernel(const __grid_constant__ TilesArgs args) {
  wait_for_previous_grid();
  std::int64_t const tile = static_cast<std::int64_t>(blockIdx.x) * kFillThreads + threadIdx.x;
  if (tile >= args.tile_count) return;
  std::int32_t const own = sequence_at(args.count, tile, [&](std::int32_t i) { return args.sequences[i].tile; });
  Sequence const sequence = args.sequences[own];
  std::int64_t const query = (tile - sequence.tile) * args.row_tile;
  Rows rows{};
  if (query < sequence.count) {
    rows = rows_of(sequence, own, static_cast<std::int32_t>(query), args.row_tile,
                   static_cast<std::int32_t>(tile * args.row_tile));
  }
  args.tiles[tile] = rows;
}

}  // namespace htree_cuda::sm90::htree_bwd::sequences

// Lists of visits, from the reverse index: for every KV block and range of the rows those that visit it, ascending, and the
// work items of dkdv_selected, segments of these lists. A CTA has the 16 KV blocks of a word and a range, a warp a slice of its
// rows, which it reads twice: to count the visits, then to write them behind those of the warps before it. Where lists
// begin, and the order of items, depend on which CTA comes first; what they hold does not.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/sm90.cuh"
#include "host/launch_overlapped.cuh"
#include "lookup.cuh"
#include "reverse_index.h"

namespace htree_cuda::sm90::htree_bwd::reverse_index {

// The word of the index and the rows that a CTA lists.
struct ListCta {
  int layer;
  int head;
  int word;
  int range;
  int first;         // the first row, from the one on that may visit the first block of the word
  int end;           // past the last row
  int ranges_before;  // of those that have rows which may visit the word
  bool last_range;   // of the sequence
  int blocks;        // of the layer, in the sequence
  int block_begin;   // the sequence's first block among those of all sequences
  std::int64_t origin;  // row r stands at position origin + r

  static __device__ ListCta of_batch(Args const& args, int index) {
    ListCta cta;
    cta.layer = args.max_entry - 1;
    while (cta.layer > 0 && index >= args.first_list_cta[cta.layer - 1]) --cta.layer;
    index -= args.first_list_cta[cta.layer];
    int const rows = args.range_rows[cta.layer];
    int const ranges = (args.chunk.queries + rows - 1) / rows;
    // The last blocks first, because they belong to the most recent tokens, which are visited most.
    cta.word = args.tree.words[cta.layer] - 1 - index % args.tree.words[cta.layer];
    index /= args.tree.words[cta.layer];
    cta.range = index % ranges;
    cta.head = index / ranges;
    int const reached = first_row_that_visits(args, cta.layer, cta.word * kWordBlocks) / kRowStep * kRowStep;
    cta.first = max(reached, cta.range * rows);
    cta.end = min((cta.range + 1) * rows, args.chunk.queries);
    cta.ranges_before = cta.range - reached / rows;
    cta.last_range = cta.range == ranges - 1;
    cta.blocks = args.tree.kv_blocks[cta.layer];
    cta.block_begin = 0;
    cta.origin = args.chunk.position(0);
    return cta;
  }

  // From the chunk's list: the work of the heads alternates.
  static __device__ ListCta of_sequences(Args const& args, unsigned index) {
    int4 const* const words = reinterpret_cast<int4 const*>(args.sequences.lists + index / args.chunk.heads);
    int4 const x = __ldg(words);
    int4 const y = __ldg(words + 1);
    int const head = static_cast<int>(index % args.chunk.heads);
    return {x.x, head, x.y, x.z / args.range_rows[x.x], x.z, x.w, y.w / 2, y.w % 2 != 0, y.y, y.z, y.x};
  }

  __device__ __forceinline__ std::int64_t position(int row) const { return origin + row; }
};

struct ListStorage {
  uint32_t places[kListWarps][kWordBlocks];  // by warp, of each block: how many visits, then where the next one goes
  uint32_t totals[kWordBlocks];
  uint32_t ends[kWordBlocks];
};

// Cuts the list of each lane's block, which has `total` visits from unit `first` on, into work items.
template <int kQueries>
__device__ __forceinline__ void list_items(Args const& args, ListCta const& cta, uint32_t first, uint32_t total, int lane) {
  uint32_t const block = cta.word * kWordBlocks + lane;
  bool const none = lane >= kWordBlocks || block >= static_cast<uint32_t>(cta.blocks) || (total == 0 && cta.last_range);
  ListSegments segments(total, static_cast<uint32_t>(args.item_visits));
  if (none) segments.count = 0;
  int own = 0;  // blocks that have the segment of the lane's number
#pragma unroll
  for (int s = 0; s < kMaxSegments; ++s) {
    unsigned const with = __ballot_sync(kFullWarp, segments.count > s);
    if (lane == s) own = __popc(with);
  }
  int const group = cta.range * kMaxSegments;
  int const base = own > 0 ? atomicAdd(args.listed_items + cta.layer * kItemGroups + group + lane, own) : 0;
  std::int64_t const room = static_cast<std::int64_t>(args.chunk.heads) * args.tree.kv_blocks[cta.layer];
#pragma unroll
  for (int s = 0; s < kMaxSegments; ++s) {
    unsigned const with = __ballot_sync(kFullWarp, segments.count > s);
    int const place = __shfl_sync(kFullWarp, base, s) + __popc(with & ((1u << lane) - 1u));
    if (segments.count <= s) continue;
    uint32_t const begin = s * segments.visits;
    uint32_t const packs = (min(segments.visits, total - begin) + kQueries - 1) / kQueries;
    int const of_list = static_cast<int>(segments.count);
    SegmentOrder const order{cta.ranges_before * kMaxSegments + s, s == of_list - 1 ? kMaxSegments - s : 1};
    args.items[cta.layer][(group + s) * room + place] = {first + begin / kListUnit, order.packed(packs),
                                                         cta.block_begin + block, static_cast<uint32_t>(cta.head)};
  }
}

template <int kQueries>
__device__ __forceinline__ void list_visits_of(Args const& args, ListCta const& cta, ListStorage& store) {
  auto& [places, totals, ends] = store;
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  int const slice = ((cta.end - cta.first + kListWarps - 1) / kListWarps + 31) / 32 * 32;
  int const begin = cta.first + warp * slice;
  int const end = min(begin + slice, cta.end);
  std::uint32_t const* const words = word_at(args, cta.layer, cta.head, cta.word, 0);
  uint2* const visits = args.visits[cta.layer];

  // Byte i of counts[j]: visits of block 4 j + i. A lane counts fewer than 256 rows at a time.
  constexpr int kCountedRows = 255 * 32;
  if (lane < kWordBlocks) places[warp][lane] = 0;
  for (int from = begin; from < end; from += kCountedRows) {
    uint32_t counts[kWordBlocks / 4] = {};
    int const to = min(from + kCountedRows, end);
#pragma unroll 4
    for (int row = from + lane; row < to; row += 32) {
      uint32_t const word = __ldg(words + row);
#pragma unroll
      for (int j = 0; j < kWordBlocks / 4; ++j) counts[j] += spread_four(word >> 4 * j);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kWordBlocks / 4; ++j) {
      // Two bytes of each sum have room for the visits of all lanes.
      uint32_t const even = __reduce_add_sync(kFullWarp, counts[j] & 0x00ff00ffu);
      uint32_t const odd = __reduce_add_sync(kFullWarp, counts[j] >> 8 & 0x00ff00ffu);
      if (lane == 0) {
        places[warp][4 * j] += even & 0xffffu;
        places[warp][4 * j + 1] += odd & 0xffffu;
        places[warp][4 * j + 2] += even >> 16;
        places[warp][4 * j + 3] += odd >> 16;
      }
    }
  }
  __syncthreads();

  if (warp == 0) {  // A lane has a block.
    uint32_t total = 0;
    if (lane < kWordBlocks) {
      for (int w = 0; w < kListWarps; ++w) total += places[w][lane];
    }
    uint32_t const units = (total + kListUnit - 1) / kListUnit;
    uint32_t up_to = units;
#pragma unroll
    for (int d = 1; d < kWordBlocks; d *= 2) {
      uint32_t const before = __shfl_up_sync(kFullWarp, up_to, d);
      if (lane >= d) up_to += before;
    }
    uint32_t base = 0;
    if (lane == kWordBlocks - 1 && up_to > 0) {
      base = static_cast<uint32_t>(atomicAdd(args.listed_units + cta.layer, static_cast<int>(up_to)));
    }
    uint32_t const first = __shfl_sync(kFullWarp, base, kWordBlocks - 1) + up_to - units;
    if (lane < kWordBlocks) {
      totals[lane] = total;
      uint32_t place = first * kListUnit;
      for (int w = 0; w < kListWarps; ++w) {
        uint32_t const count = places[w][lane];
        places[w][lane] = place;
        place += count;
      }
      ends[lane] = place;
    }
    list_items<kQueries>(args, cta, first, total, lane);
  }
  __syncthreads();

  // Blocks that no row of 32 visits take no time, and the words of kAtOnce others are under way together.
  constexpr int kAtOnce = 4;
  Expanded const expanded(args, cta.layer, cta.head);
  uint32_t next_place = lane < kWordBlocks ? places[warp][lane] : 0;  // a lane has a block
#pragma unroll 2
  for (int base = begin; base < end; base += 32) {
    int const row = base + lane;
    uint32_t const word = row < end ? __ldg(words + row) : 0;
    uint32_t blocks = __reduce_or_sync(kFullWarp, word & ((1u << kWordBlocks) - 1u));
    if (blocks == 0) continue;
    int const last = candidates_in_selected(cta.position(row), cta.layer, args.tree.top_k) - 1;
    do {
      int own[kAtOnce];
      uint32_t masked[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        own[i] = blocks != 0 ? __ffs(blocks) - 1 : 31;  // the upper half has no bit 31
        blocks &= blocks - 1;
        if (word >> own[i] & 1u) masked[i] = expanded.of_block(args, cta.word * kWordBlocks + own[i], row);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        bool const visited = word >> own[i] & 1u;
        unsigned const visitors = __ballot_sync(kFullWarp, visited);
        uint32_t const place = __shfl_sync(kFullWarp, next_place, own[i]);
        if (visited) {
          int const rank = static_cast<int>(word >> kWordBlocks) + __popc(word & ((1u << own[i]) - 1u));
          int const position = last - kSiblings * rank;
          visits[place + __popc(visitors & ((1u << lane) - 1u))] = {
              static_cast<uint32_t>(row),
              static_cast<uint32_t>(position) << 16 | ((masked[i] | causal_mask(position)) & 0xffffu)};
        }
        if (lane == own[i]) next_place += __popc(visitors);
      }
    } while (blocks != 0);
  }
  // A thread fills the last pack of a block's list, or the last two visits, which are copied together.
  __syncthreads();
  if (threadIdx.x < kWordBlocks) {
    constexpr int kFilled = kQueries > 1 ? kQueries : 2;
    int const missing = (kFilled - static_cast<int>(totals[threadIdx.x]) % kFilled) % kFilled;
    if (missing == 0) return;
    uint32_t const list_end = ends[threadIdx.x];
    uint2 const last = visits[list_end - 1];
    for (int i = 0; i < missing; ++i) visits[list_end + i] = {last.x, last.y | kRepeated | 0xffffu};
  }
}

template <int kQueries>
__global__ void __launch_bounds__(kListWarps * 32) visit_lists_kernel(const __grid_constant__ Args args) {
  __shared__ ListStorage store;
  wait_for_previous_grid();
  bool const sequences = args.sequences.any();
  unsigned const lists = sequences ? args.sequences.counts->lists * args.chunk.heads : gridDim.x;
  for (unsigned index = blockIdx.x; index < lists; index += gridDim.x) {
    ListCta const cta = sequences ? ListCta::of_sequences(args, index) : ListCta::of_batch(args, static_cast<int>(index));
    if (cta.first >= cta.end) continue;
    __syncthreads();  // The storage of the list before has been read.
    list_visits_of<kQueries>(args, cta, store);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd::reverse_index

// Lists of visits, from the reverse index: for every work item of dkdv_selected, a KV block and a segment of the rows, the
// rows that visit the block, ascending. A CTA has the eight KV blocks of a word and a segment, a warp a slice of its rows,
// which it reads twice: to count the visits, then to write them behind those of the warps before it. Where the lists of a
// CTA begin depends on which CTA comes first; what they hold does not.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/sm90.cuh"
#include "host/launch_overlapped.cuh"
#include "lookup.cuh"

namespace htree_cuda::sm90::htree_bwd::reverse_index {

inline constexpr int kListWarps = 8;

// The word of the index and the rows that a CTA lists.
template <bool kSequences>
struct ListCta {
  int layer;
  int head;
  int word;
  int segment;
  int first;  // the first row that may visit the first block of the word
  int end;    // past the last row of the segment

  __device__ ListCta(Args const& args, int index) {
    layer = 0;
    while (layer < args.max_entry - 1 && index >= args.first_list_cta[layer + 1]) ++layer;
    index -= args.first_list_cta[layer];
    word = index % args.tree.words[layer];
    index /= args.tree.words[layer];
    segment = index % args.segments[layer];
    head = index / args.segments[layer];
    int const begin = segment * args.segment_rows[layer];
    end = min(begin + args.segment_rows[layer], args.chunk.queries);
    first = max(begin, first_row_that_visits(args, layer, word * kWordBlocks) / kRowStep * kRowStep);
  }

  // The number of the work item of a block of the word: dkdv_selected takes the last block first.
  __device__ __forceinline__ int item(Args const& args, int block) const {
    int const blocks = args.tree.kv_blocks[layer];
    return args.first_item[layer] + (head * args.segments[layer] + segment) * blocks + blocks - 1 - block;
  }
  __device__ __forceinline__ int blocks(Args const& args) const { return args.tree.kv_blocks[layer]; }
  __device__ __forceinline__ std::int64_t position(Args const& args, int row) const { return args.chunk.position(row); }
};

// The same of one of several sequences, from the chunk's list: the work of the heads alternates.
template <>
struct ListCta<true> : sequences::ListWork {
  int head;

  __device__ ListCta(Args const& args, unsigned index) {
    int4 const* const words = reinterpret_cast<int4 const*>(args.sequences.lists + index / args.chunk.heads);
    int4 const x = __ldg(words);
    int4 const y = __ldg(words + 1);
    static_cast<sequences::ListWork&>(*this) = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, 0};
    head = static_cast<int>(index % args.chunk.heads);
  }

  __device__ __forceinline__ int item(Args const& args, int block) const {
    return (sequences::ListWork::item - block) * args.chunk.heads + head;
  }
  __device__ __forceinline__ int blocks(Args const&) const { return sequences::ListWork::blocks; }
  __device__ __forceinline__ std::int64_t position(Args const&, int row) const { return origin + row; }
};

struct ListStorage {
  uint32_t places[kListWarps][kWordBlocks];  // by warp, of each block: how many visits, then where the next one goes
  uint32_t totals[kWordBlocks];
  uint32_t ends[kWordBlocks];
};

template <int kQueries, bool kSequences>
__device__ __forceinline__ void list_visits_of(Args const& args, ListCta<kSequences> const& cta, ListStorage& store) {
  auto& [places, totals, ends] = store;
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  int const slice = ((max(cta.end - cta.first, 0) + kListWarps - 1) / kListWarps + 31) / 32 * 32;
  int const begin = cta.first + warp * slice;
  int const end = min(begin + slice, cta.end);
  std::uint32_t const* const words = word_at(args, cta.layer, cta.head, cta.word, 0);
  uint2* const visits = args.visits[cta.layer];

  uint32_t counts[kWordBlocks / 2] = {};  // of block j in the lower half, of block j + 4 in the upper one
#pragma unroll 4
  for (int row = begin + lane; row < end; row += 32) {
    uint32_t const word = __ldg(words + row);
    uint32_t const halves = (word & 0xfu) | (word & 0xf0u) << 12;
#pragma unroll
    for (int j = 0; j < kWordBlocks / 2; ++j) counts[j] += halves >> j & 0x10001u;
  }
#pragma unroll
  for (int j = 0; j < kWordBlocks / 2; ++j) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) counts[j] += __shfl_xor_sync(kFullWarp, counts[j], d);
    if (lane == 0) {
      places[warp][j] = counts[j] & 0xffffu;
      places[warp][j + kWordBlocks / 2] = counts[j] >> 16;
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
      int const block = cta.word * kWordBlocks + lane;
      if (block < cta.blocks(args)) {
        args.lists[cta.item(args, block)] = {first, (total + kQueries - 1) / kQueries};
      }
    }
  }
  __syncthreads();

  Expanded const expanded(args, cta.layer, cta.head);
  uint32_t place[kWordBlocks];
#pragma unroll
  for (int p = 0; p < kWordBlocks; ++p) place[p] = places[warp][p];
#pragma unroll 2
  for (int base = begin; base < end; base += 32) {
    int const row = base + lane;
    uint32_t const word = row < end ? __ldg(words + row) : 0;
    int const last = candidates_in_selected(cta.position(args, row), cta.layer, args.tree.top_k) - 1;
#pragma unroll
    for (int p = 0; p < kWordBlocks; ++p) {
      bool const visited = word >> p & 1u;
      unsigned const visitors = __ballot_sync(kFullWarp, visited);
      if (visitors == 0) continue;
      if (visited) {
        int const rank = static_cast<int>(word >> kWordBlocks) + __popc(word & ((1u << p) - 1u));
        int const position = last - kSiblings * rank;
        uint32_t const masked =
            expanded.of_block(args, cta.word * kWordBlocks + p, row) | causal_mask(position);
        visits[place[p] + __popc(visitors & ((1u << lane) - 1u))] = {
            static_cast<uint32_t>(row), static_cast<uint32_t>(position) << 16 | (masked & 0xffffu)};
      }
      place[p] += __popc(visitors);
    }
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

template <int kQueries, bool kSequences>
__global__ void __launch_bounds__(kListWarps * 32) visit_lists_kernel(const __grid_constant__ Args args) {
  __shared__ ListStorage store;
  wait_for_previous_grid();
  if constexpr (kSequences) {
    unsigned const lists = args.sequences.counts->lists * args.chunk.heads;
    for (unsigned index = blockIdx.x; index < lists; index += gridDim.x) {
      __syncthreads();  // The storage of the list before has been read.
      list_visits_of<kQueries>(args, ListCta<true>(args, index), store);
    }
  } else {
    list_visits_of<kQueries>(args, ListCta<false>(args, static_cast<int>(blockIdx.x)), store);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd::reverse_index

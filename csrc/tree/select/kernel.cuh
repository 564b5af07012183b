// Selection of one layer: the min(top_k, n) most important candidates of each query. The rightmost candidate is always
// among them, and ties go to the lower position. One CTA selects for one query and reads its importance once. Of 128
// threads, thread t has the candidates 512 i + 4 t .. 512 i + 4 t + 3, so that loads are whole lines and a bin of
// topk.cuh is spread over the row. The kernel is bound by instructions, then by memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "namespaces.h"
#include "host/launch_overlapped.cuh"
#include "tree/select.h"
#include "device/topk.cuh"
#include "device/ptx.cuh"
#include "device/sm90.cuh"

namespace htree_cuda::tree::select {

using namespace host;
using namespace device;

// Transposes nibbles among every eight lanes: nibble i of lane j becomes nibble j of lane i.
__device__ __forceinline__ uint32_t transpose_nibbles(uint32_t x) {
  int const lane = threadIdx.x % 32;
  uint32_t y = __shfl_xor_sync(kFullWarp, x, 4);
  x = __byte_perm(x, y, lane & 4 ? 0x3276 : 0x5410);
  y = __shfl_xor_sync(kFullWarp, x, 2);
  x = __byte_perm(x, y, lane & 2 ? 0x3715 : 0x6240);
  y = __shfl_xor_sync(kFullWarp, x, 1);
  uint32_t const keep = lane & 1 ? 0xf0f0f0f0u : 0x0f0f0f0fu;
  return (x & keep) | ((lane & 1 ? y >> 4 : y << 4) & ~keep);
}

// The importances of a row that a thread holds. Chunks before the one of the last candidate are whole. That one is the
// tail, in which zeros stand for places that hold no candidate.
template <int kThreads, int kChunks>
struct Row {
  static constexpr int kChunk = 4 * kThreads;  // candidates that the CTA loads at once
  uint32_t whole[4 * (kChunks - 1)];
  uint32_t tail[4];
  int chunks;  // whole ones

  // Loads `count` candidates.
  __device__ __forceinline__ void load(float const* importance, int count) {
    uint4 const* const own = reinterpret_cast<uint4 const*>(importance) + threadIdx.x;
    chunks = count / kChunk;
#pragma unroll
    for (int i = 0; i < kChunks - 1; ++i) {
      if (i >= chunks) break;
      uint4 const x = __ldcs(own + i * kThreads);
      whole[4 * i] = x.x, whole[4 * i + 1] = x.y, whole[4 * i + 2] = x.z, whole[4 * i + 3] = x.w;
    }
    int const left = count % kChunk - 4 * static_cast<int>(threadIdx.x);
    uint4 const x = left > 0 ? __ldcs(own + chunks * kThreads) : uint4{0, 0, 0, 0};
    tail[0] = x.x, tail[1] = left > 1 ? x.y : 0, tail[2] = left > 2 ? x.z : 0, tail[3] = left > 3 ? x.w : 0;
  }

  // Calls use(x, i, e) for every element: element e of chunk i, or of the tail where i is negative.
  template <class Use>
  __device__ __forceinline__ void each(Use const& use) const {
#pragma unroll
    for (int i = 0; i < kChunks - 1; ++i) {
      if (i >= chunks) break;
#pragma unroll
      for (int e = 0; e < 4; ++e) use(whole[4 * i + e], i, e);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) use(tail[e], -1, e);
  }

  // Marks the candidates, of the first `count`, for which take(x) is true: bit p % 32 of word p / 32, two words or one
  // in a thread. The barrier lies between the writes of `marks` and the reads; the caller needs another one before the
  // next call.
  template <class Take>
  __device__ __forceinline__ void mark(int count, uint32_t* marks, Take const& take,
                                       uint32_t (&words)[kChunks / 8]) const {
    uint32_t tail_nibble = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) tail_nibble |= static_cast<uint32_t>(take(tail[e])) << e;
#pragma unroll
    for (int w = 0; w < kChunks / 8; ++w) {
      uint32_t nibbles = chunks / 8 == w ? tail_nibble << chunks % 8 * 4 : 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (8 * w + i == kChunks - 1 || 8 * w + i >= chunks) break;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (take(whole[4 * (8 * w + i) + e])) nibbles |= 1u << (4 * i + e);
        }
      }
      marks[(w * 8 + threadIdx.x % 8) * (kChunk / 32) + threadIdx.x / 8] = transpose_nibbles(nibbles);
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kChunks / 8; ++w) {
      int const at = kChunks / 8 * threadIdx.x + w;
      int const exist = count - 32 * at;
      words[w] = exist >= 32 ? marks[at] : exist > 0 ? marks[at] & ((1u << exist) - 1u) : 0u;
    }
  }
};

template <int kWords>
__device__ __forceinline__ uint32_t count(uint32_t const (&words)[kWords]) {
  uint32_t sum = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) sum += __popc(words[w]);
  return sum;
}

// The parents of a row: in a selected layer the nodes that were selected in the layer above; null in an entry layer,
// where parents are 0, 1, 2, ...
__device__ __forceinline__ std::int32_t const* parents_of(Args const& args, int row) {
  std::int64_t const t = QueryTile(args.tiles, row / kQueryTile).t + row % kQueryTile;
  bool const first = args.layer >= entry_layer(t, args.top_k);
  return first ? nullptr : args.parents_in + static_cast<std::int64_t>(row) * args.top_k;
}

__device__ __forceinline__ int first_child(std::int32_t const* parents, int j) {
  return (parents != nullptr ? parents[j] : j) * kSiblings;
}

// Where the selection of a row goes; null where the caller of the forward does not want it.
__device__ __forceinline__ std::int32_t* selection_of(Args const& args, QueryTile const& tile, std::int64_t query) {
  if (args.selection == nullptr) return nullptr;
  std::int64_t const b = tile.bh / args.H_kv;
  std::int64_t const h = tile.bh % args.H_kv;
  return args.selection + ((b * args.tiles.T_q + query) * args.H_kv + h) * args.top_k;
}

// Writes the nodes of a row from shared memory, behind a barrier.
template <int kThreads>
__device__ __forceinline__ void write_nodes(Args const& args, int row, std::int32_t const* nodes) {
  QueryTile const tile(args.tiles, row / kQueryTile);
  auto* const out = reinterpret_cast<int4*>(args.nodes + static_cast<std::int64_t>(row) * args.top_k);
  auto* const selection = reinterpret_cast<int4*>(selection_of(args, tile, tile.first + row % kQueryTile));
#pragma unroll 1
  for (int i = threadIdx.x; i < args.top_k / 4; i += kThreads) {
    int4 const four = reinterpret_cast<int4 const*>(nodes)[i];
    out[i] = four;
    if (selection != nullptr) selection[i] = four;
  }
}

// Serves rows of at most 4 * kThreads * kChunks candidates.
template <int kThreads, int kChunks>
__global__ void __launch_bounds__(kThreads, (kChunks == 16 ? 640 : 1024) / kThreads)
    select_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  constexpr int kWords = kChunks / 8;  // words of 32 candidates that a thread writes
  static_assert(kChunks % 8 == 0);
  using Scratch = topk::Scratch<kThreads, 4 * kChunks>;
  __shared__ Scratch scratch;
  __shared__ alignas(8) uint32_t marks[kWords * kThreads];
  int const row = blockIdx.x;
  QueryTile const tile(args.tiles, row / kQueryTile);
  if (!tile.has(row % kQueryTile)) return;
  Candidates const c = candidates(tile.t + row % kQueryTile, args.layer, args.layers, args.top_k);

  if (c.n <= args.top_k) {  // Everything is selected, and no importance was computed.
    std::int32_t const* const parents = parents_of(args, row);
    auto* const nodes = reinterpret_cast<std::int32_t*>(scratch.list);
#pragma unroll 1
    for (int p = threadIdx.x; p < args.top_k; p += kThreads) {
      nodes[p] = p < c.n ? first_child(parents, p / kSiblings) + p % kSiblings : -1;
    }
    __syncthreads();
    write_nodes<kThreads>(args, row, nodes);
    return;
  }

  int const last = c.n - 1;  // the rightmost candidate, which is selected whatever its importance
  Row<kThreads, kChunks> x;
  x.load(args.importance + row * args.width, last);
  scratch.clear_histogram();
  if (threadIdx.x == 0) scratch.few_count = 0;

  uint32_t bins[topk::kRowBins] = {};
  x.each([&](uint32_t y, int i, int e) {
    uint32_t& bin = bins[(i < 0 ? 1 : i % 2) * 4 + e];
    bin = max(bin, y);
  });
#pragma unroll
  for (int i = 0; i < topk::kRowBins; ++i) bins[i] = min(bins[i], topk::kInfinity);
  uint32_t const k = args.top_k - 1;
  uint32_t high;
  uint32_t low = topk::warp_bound(bins, (k + Scratch::kWarps - 1) / Scratch::kWarps, high);
  if (threadIdx.x % 32 == 0) {
    scratch.lowest[threadIdx.x / 32] = low;
    scratch.highest[threadIdx.x / 32] = high;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < Scratch::kWarps; ++w) {
    low = min(low, scratch.lowest[w]);
    high = max(high, scratch.highest[w]);
  }

  // `end` counts bytes, so that an address is one addition away.
  int end = threadIdx.x * 4;
  x.each([&](uint32_t y, int, int) {
    if (y >= low) {
      *reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(scratch.list) + end) = y;
      end += kThreads * 4;
    }
  });
  topk::Threshold const threshold = topk::threshold(scratch, end / 4, low, high, k);

  uint32_t selected[kWords];
  uint32_t total;
  if (threshold.equal == threshold.room) {  // the same in every thread
    x.mark(last, marks, [&](uint32_t y) { return y >= threshold.value; }, selected);
  } else {
    uint32_t equal[kWords];
    x.mark(last, marks, [&](uint32_t y) { return min(y, topk::kInfinity) == threshold.value; }, equal);
    uint32_t place = topk::block_prefix(count(equal), scratch.warp_sums, total);
    x.mark(last, marks, [&](uint32_t y) { return min(y, topk::kInfinity) > threshold.value; }, selected);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      for (uint32_t rest = equal[w]; rest != 0; rest &= rest - 1) {
        if (place++ < threshold.room) selected[w] |= rest & (0u - rest);
      }
    }
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if (last / 32 == kWords * static_cast<int>(threadIdx.x) + w) selected[w] |= 1u << last % 32;
  }

  // The block index is read once more, so that nothing that follows from it occupies registers until here.
  std::int32_t const* const parents = parents_of(args, static_cast<int>(ptx::block_index()));
  int first[2 * kWords];  // the first child of each parent
#pragma unroll
  for (int i = 0; i < 2 * kWords; ++i) {
    int const j = 2 * kWords * static_cast<int>(threadIdx.x) + i;
    first[i] = j < c.parents ? first_child(parents, j) : 0;
  }
  int place = static_cast<int>(topk::block_prefix(count(selected), scratch.warp_sums, total));
  std::uint16_t* const expanded = args.expanded + static_cast<int>(ptx::block_index()) * (args.width / kSiblings);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    int const j = 2 * (kWords * static_cast<int>(threadIdx.x) + w);  // the first of the two parents of a word
    int const exist = c.n - j * kSiblings;
    uint32_t const bits = selected[w] | (exist >= 32 ? 0u : ~0u << exist);
    if (j < c.parents) expanded[j] = static_cast<std::uint16_t>(bits);
    if (j + 1 < c.parents) expanded[j + 1] = static_cast<std::uint16_t>(bits >> 16);
  }
  // A thread finds a few nodes each; they are collected in shared memory, because so few neighbours waste lines of
  // global memory.
  static_assert(sizeof(scratch.list) >= kMaxTopK * sizeof(std::int32_t));
  auto* const nodes = reinterpret_cast<std::int32_t*>(scratch.list);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    for (uint32_t rest = selected[w]; rest != 0; rest &= rest - 1) {
      int const bit = __ffs(rest) - 1;
      nodes[place++] = (bit < kSiblings ? first[2 * w] : first[2 * w + 1] - kSiblings) + bit;
    }
  }
  __syncthreads();
  write_nodes<kThreads>(args, static_cast<int>(ptx::block_index()), nodes);
}

}  // namespace htree_cuda::tree::select

// Appending to a cached tree: tokens are copied behind the lengths, and the nodes that become complete are pooled layer by
// layer, with the arithmetic of tree/pool. Memory bound: a thread moves 16 bytes of a row at a time.
//
//   append_step     16 tokens or fewer a sequence: one CTA a sequence copies, pools and advances the length. Each layer
//                   completes one node at most
//   append_segments more: one CTA for 4096 tokens of one sequence and head, aligned to their nodes of three layers
//   append_finish   then: one CTA a sequence pools the layers above and advances the length
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "host/launch_overlapped.cuh"
#include "namespaces.h"
#include "tree/cache_view.cuh"

namespace htree_cuda::tree::append {

using namespace host;

inline constexpr int kThreads = 256;
inline constexpr int kStepTokens = 16;     // at most, of a single launch
inline constexpr int kSegmentLayers = 3;   // above the tokens, pooled with them
inline constexpr int kSegmentTokens = 1 << (kLog2Siblings * kSegmentLayers);

struct Input {
  char const* x;  // [B, T_new, H_kv, dim] of 16 bits, by strides in elements
  std::int64_t stride_b;
  std::int64_t stride_t;
  std::int64_t stride_h;
  int dim;
  bool vectors;  // 16 bytes may be read at once
};

struct Args {
  CacheView cache;
  Input k;
  Input v;
  std::int32_t const* seqused;
  int T_new;
};

// What a call does to one sequence.
struct Span {
  int begin;  // its length
  int end;    // afterwards; `begin` where nothing is written
  bool overflows;

  __device__ Span(Args const& args, int b) {
    int const wanted = args.seqused == nullptr ? args.T_new : min(max(args.seqused[b], 0), args.T_new);
    // A length that no cache writes is brought into range, and stays so.
    begin = min(max(args.cache.lengths[b], 0), args.cache.max_tokens);
    overflows = wanted > 0 && wanted > args.cache.capacity(b) - begin;
    end = overflows || args.cache.overflowed[b] != 0 ? begin : begin + wanted;
  }
};

// A chunk is 8 elements of a row; those of K come first.
struct Chunk {
  bool of_v;
  int index;  // in its row

  __device__ Chunk(Args const& args, int i) : of_v(i >= args.k.dim / 8), index(of_v ? i - args.k.dim / 8 : i) {}

  __device__ __forceinline__ uint4 fetch(Args const& args, int b, int token, int h) const {
    Input const& in = of_v ? args.v : args.k;
    char const* const row = in.x + 2 * (b * in.stride_b + token * in.stride_t + h * in.stride_h);
    if (in.vectors) return __ldg(reinterpret_cast<uint4 const*>(row) + index);
    std::uint16_t const* const x = reinterpret_cast<std::uint16_t const*>(row) + 8 * index;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __ldg(x + 2 * i) | static_cast<uint32_t>(__ldg(x + 2 * i + 1)) << 16;
    return {words[0], words[1], words[2], words[3]};
  }

  __device__ __forceinline__ uint4* at(Args const& args, LayerRows const& rows, int node) const {
    char* const base = rows.upper ? (of_v ? args.cache.v_upper : args.cache.k_upper) : (of_v ? args.cache.v : args.cache.k);
    return reinterpret_cast<uint4*>(base + rows.row(args.cache, node) * 2 * (of_v ? args.v.dim : args.k.dim)) + index;
  }
};

__host__ __device__ inline int chunks_of_row(Args const& args) { return (args.k.dim + args.v.dim) / 8; }

// The mean of a node's 16 children, added in ascending order in float32 from the first, rounded to nearest even.
template <class Element>
__device__ __forceinline__ void pool_node(Args const& args, int b, int h, int layer, Chunk const& chunk, int node) {
  LayerRows const below(args.cache, b, h, layer - 1);
  float sum[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) sum[e] = -0.0f;  // -0 + x is x for every x
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 children[kSiblings / 2];
#pragma unroll
    for (int c = 0; c < kSiblings / 2; ++c) {
      children[c] = *chunk.at(args, below, node * kSiblings + half * (kSiblings / 2) + c);
    }
#pragma unroll
    for (int c = 0; c < kSiblings / 2; ++c) {
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] += static_cast<float>(reinterpret_cast<Element const*>(&children[c])[e]);
    }
  }
  uint4 mean;
#pragma unroll
  for (int e = 0; e < 8; ++e) reinterpret_cast<Element*>(&mean)[e] = Element(sum[e] * (1.0f / kSiblings));
  *chunk.at(args, LayerRows(args.cache, b, h, layer), node) = mean;
}

// Nodes first .. last - 1 of a layer, of the heads from `h` on.
template <class Element>
__device__ __forceinline__ void pool_nodes(Args const& args, int b, int h, int heads, int layer, int first, int last) {
  int const chunks = chunks_of_row(args);
#pragma unroll 1
  for (int i = threadIdx.x; i < heads * (last - first) * chunks; i += kThreads) {
    int const head = h + i / chunks % heads;
    pool_node<Element>(args, b, head, layer, Chunk(args, i % chunks), first + i / chunks / heads);
  }
}

// Tokens first .. last - 1 of the sequence.
__device__ __forceinline__ void copy_tokens(Args const& args, Span const& span, int b, int h, int heads, int first, int last) {
  int const chunks = chunks_of_row(args);
#pragma unroll 1
  for (int i = threadIdx.x; i < heads * (last - first) * chunks; i += kThreads) {
    int const head = h + i / chunks % heads;
    int const token = first + i / chunks / heads;
    Chunk const chunk(args, i % chunks);
    *chunk.at(args, LayerRows(args.cache, b, head, 0), token) = chunk.fetch(args, b, token - span.begin, head);
  }
}

__device__ __forceinline__ void advance_length(Args const& args, Span const& span, int b) {
  if (threadIdx.x != 0) return;
  if (span.overflows) args.cache.overflowed[b] = 1;
  args.cache.lengths[b] = span.end;
}

template <class Element>
__global__ void __launch_bounds__(kThreads) append_step_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  int const b = blockIdx.x;
  Span const span(args, b);
  __syncthreads();  // every thread has read the length
  if (span.end > span.begin) {
    copy_tokens(args, span, b, 0, args.cache.H_kv, span.begin, span.end);
#pragma unroll 1
    for (int layer = 1; layer < args.cache.num_layers; ++layer) {
      int const first = span.begin >> (kLog2Siblings * layer);
      int const last = span.end >> (kLog2Siblings * layer);
      if (first == last) break;  // nor does a layer above complete a node
      __syncthreads();
      pool_nodes<Element>(args, b, 0, args.cache.H_kv, layer, first, last);
    }
  }
  advance_length(args, span, b);
}

template <class Element>
__global__ void __launch_bounds__(kThreads) append_segments_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  int const segments = (args.T_new + kSegmentTokens - 1) / kSegmentTokens + 1;
  int const h = static_cast<int>(blockIdx.x / segments % args.cache.H_kv);
  int const b = static_cast<int>(blockIdx.x / segments / args.cache.H_kv);
  Span const span(args, b);
  std::int64_t const origin =
      static_cast<std::int64_t>(span.begin / kSegmentTokens + static_cast<int>(blockIdx.x % segments)) * kSegmentTokens;
  if (origin >= span.end) return;
  int const begin = max(span.begin, static_cast<int>(origin));
  int const end = static_cast<int>(min(static_cast<std::int64_t>(span.end), origin + kSegmentTokens));
  copy_tokens(args, span, b, h, 1, begin, end);
#pragma unroll 1
  for (int layer = 1; layer <= kSegmentLayers && layer < args.cache.num_layers; ++layer) {
    __syncthreads();
    pool_nodes<Element>(args, b, h, 1, layer, begin >> (kLog2Siblings * layer), end >> (kLog2Siblings * layer));
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) append_finish_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  int const b = blockIdx.x;
  Span const span(args, b);
  __syncthreads();  // every thread has read the length
#pragma unroll 1
  for (int layer = kSegmentLayers + 1; layer < args.cache.num_layers; ++layer) {
    pool_nodes<Element>(args, b, 0, args.cache.H_kv, layer, span.begin >> (kLog2Siblings * layer),
                        span.end >> (kLog2Siblings * layer));
    __syncthreads();
  }
  advance_length(args, span, b);
}

}  // namespace htree_cuda::tree::append

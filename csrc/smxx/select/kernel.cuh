// Selection of one layer: the min(top_k, n) most important candidates of each query, the rightmost among them, ties to
// the lower position. One CTA a query; a thread holds the importance of one or two parents (16 candidates each).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../device/forward_steps.h"
#include "../../device/topk.cuh"

namespace htree_cuda::selecting {

inline constexpr int kThreads = 256;

template <int kParents>
__global__ void __launch_bounds__(kThreads) select_kernel(const __grid_constant__ Args args) {
  __shared__ topk::Scratch scratch;
  int const row = blockIdx.x;
  int const in_block = row % kBlockQueries;
  QueryBlock const block(args.blocks, row / kBlockQueries);
  std::int64_t const query = block.first + in_block;
  if (query >= args.blocks.T_q) return;
  Candidates const c = candidates(args.blocks.q_start + query, args.layer, args.layers, args.top_k);
  std::int32_t const* const parents = args.parents_in + static_cast<std::int64_t>(row) * args.top_k;
  std::int32_t* const nodes = args.nodes + static_cast<std::int64_t>(row) * args.top_k;
  std::int64_t const b = block.bh / args.H_kv;
  std::int64_t const h = block.bh % args.H_kv;
  std::int32_t* const selection =
      args.selection == nullptr ? nullptr
                                : args.selection + ((b * args.blocks.T_q + query) * args.H_kv + h) * args.top_k;
  auto const put = [&](int place, int node) {
    nodes[place] = node;
    if (selection != nullptr) selection[place] = node;
  };
  bool const below = args.layer < first_layer(args.blocks.q_start + query, args.top_k);
  auto const first_child = [&](int j) { return (below ? parents[j] : j) * kSiblings; };

  if (c.n <= args.top_k) {  // everything is selected; no importance was computed
    for (int p = threadIdx.x; p < args.top_k; p += kThreads) {
      put(p, p < c.n ? first_child(p / kSiblings) + p % kSiblings : -1);
    }
    return;
  }

  float const* const importance = args.importance + row * args.width;
  uint32_t keys[kParents * kSiblings];
#pragma unroll
  for (int i = 0; i < kParents; ++i) {
    int const j = i * kThreads + threadIdx.x;
#pragma unroll
    for (int quarter = 0; quarter < kSiblings / 4; ++quarter) {
      float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
      if (j < c.parents) x = reinterpret_cast<float4 const*>(importance + j * kSiblings)[quarter];
      float const values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const p = j * kSiblings + quarter * 4 + e;
        keys[i * kSiblings + quarter * 4 + e] = p < c.n - 1 ? topk::key(values[e]) : 0;
      }
    }
  }
  // The rightmost takes one of the places.
  topk::Threshold const threshold = topk::threshold<kThreads>(keys, args.top_k - 1, scratch);

  uint32_t above[kParents], equal[kParents];
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kParents; ++i) {
    above[i] = equal[i] = 0;
#pragma unroll
    for (int e = 0; e < kSiblings; ++e) {
      above[i] |= static_cast<uint32_t>(keys[i * kSiblings + e] > threshold.key) << e;
      equal[i] |= static_cast<uint32_t>(keys[i * kSiblings + e] == threshold.key) << e;
    }
    packed |= __popc(equal[i]) << (16 * i);
  }
  uint32_t total;
  if (threshold.equal != threshold.room) {  // the same in every thread
    uint32_t const before = topk::block_prefix<kThreads>(packed, scratch.warp_sums, total);
#pragma unroll
    for (int i = 0; i < kParents; ++i) {
      uint32_t place = (before >> (16 * i) & 0xffffu) + (i == 1 ? total & 0xffffu : 0);
      uint32_t kept = 0;
      for (uint32_t rest = equal[i]; rest != 0; rest &= rest - 1) {
        if (place++ < threshold.room) kept |= rest & (0u - rest);
      }
      equal[i] = kept;
    }
  }
  packed = 0;
#pragma unroll
  for (int i = 0; i < kParents; ++i) {
    int const j = i * kThreads + threadIdx.x;
    above[i] |= equal[i];
    if (j == (c.n - 1) / kSiblings) above[i] |= 1u << ((c.n - 1) % kSiblings);
    packed |= __popc(above[i]) << (16 * i);
  }
  uint32_t const before = topk::block_prefix<kThreads>(packed, scratch.warp_sums, total);
#pragma unroll
  for (int i = 0; i < kParents; ++i) {
    int const j = i * kThreads + threadIdx.x;
    if (j >= c.parents) continue;
    int const last = c.n - 1 - j * kSiblings;  // children beyond it do not exist
    uint32_t const missing = last >= kSiblings - 1 ? 0u : 0xffffu & ~((2u << last) - 1u);
    args.closed[row * (args.width / kSiblings) + j] = static_cast<std::uint16_t>(above[i] | missing);
    int place = (before >> (16 * i) & 0xffffu) + (i == 1 ? total & 0xffffu : 0);
    int const child = above[i] != 0 ? first_child(j) : 0;
    for (uint32_t rest = above[i]; rest != 0; rest &= rest - 1) put(place++, child + __ffs(rest) - 1);
  }
}

}  // namespace htree_cuda::selecting

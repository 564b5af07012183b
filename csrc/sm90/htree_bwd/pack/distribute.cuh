// Gradients of nodes become gradients of tokens: a node is the mean of its children, so that each child receives the
// node's sum divided by their number. Memory bound; a thread has four neighbouring elements of one token. Element is the
// dtype that they are rounded to, or float: then they may be added to what is there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernel.cuh"
#include "pack.h"

namespace htree_cuda::sm90::htree_bwd::pack {

template <class Element>
__global__ void __launch_bounds__(kThreads) distribute_kernel(const __grid_constant__ Distribute args) {
  wait_for_previous_grid();
  int const columns = args.dim / 4;
  std::int64_t const i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  int const column = static_cast<int>(i % columns) * 4;
  std::int64_t const T = args.sequences == nullptr ? args.tree.N[0] : args.tokens;
  std::int64_t t = i / columns % T;
  int const head = static_cast<int>(i / columns / T);
  if (head >= args.heads) return;
  std::int64_t const bh = args.first_head + head;
  std::int64_t const row = ((bh / args.H_kv) * T + t) * args.H_kv + bh % args.H_kv;
  Element* const out = static_cast<Element*>(args.out) + row * args.dim + column;
  // With sequences of different lengths the token's own sequence says where its nodes begin.
  Sequence sequence{};
  std::int32_t own = 0;
  bool const several = args.sequences != nullptr;
  if (several) {
    if (t < args.part->k_begin || t >= args.part->k_end) return;
    own = sequence_at(args.sequence_count, t, [&](std::int32_t n) { return args.sequences[n].key; });
    sequence = args.sequences[own];
    t -= sequence.key;
    if (t < 0 || t >= sequence.keys) {  // padding
      if constexpr (!std::is_same_v<Element, float>) *reinterpret_cast<uint2*>(out) = {0, 0};
      else if (!args.add) *reinterpret_cast<float4*>(out) = {0.0f, 0.0f, 0.0f, 0.0f};
      return;
    }
  }
  auto const nodes = [&](int layer) -> std::int64_t {
    if (!several) return args.tree.N[layer];
    int const shift = kLog2Siblings * layer;
    return (sequence.keys + (std::int64_t(1) << shift) - 1) >> shift;
  };
  float const* const sums = args.sums + head * args.node_rows * args.dim + column;
  float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int layer = args.tree.layers - 1; layer >= 0; --layer) {
    if (several && !has_room(sequence, log2_room_from(layer, args.tree.top_k))) continue;  // no query visits its nodes
    std::int64_t const node = t >> (kLog2Siblings * layer);
    std::int64_t const begin =
        args.begin[layer] + (several ? sequences::first_block(sequence.before, own, layer, args.tree.top_k) * kSiblings : 0);
    float4 const sum = *reinterpret_cast<float4 const*>(sums + (begin + node) * args.dim);
    x.x += sum.x, x.y += sum.y, x.z += sum.z, x.w += sum.w;
    if (layer == 0) break;
    std::int64_t const children =
        min(nodes(layer - 1) - node * kSiblings, static_cast<std::int64_t>(kSiblings));
    float const count = static_cast<float>(children);
    x.x /= count, x.y /= count, x.z /= count, x.w /= count;
  }
  if constexpr (std::is_same_v<Element, float>) {
    float4* const sum = reinterpret_cast<float4*>(out);
    float4 const before = args.add ? *sum : float4{0.0f, 0.0f, 0.0f, 0.0f};
    *sum = {before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w};
  } else {
    alignas(8) Element const rounded[4] = {Element(x.x), Element(x.y), Element(x.z), Element(x.w)};
    *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2 const*>(rounded);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd::pack

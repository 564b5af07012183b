// Mean pooling of consecutive layers, memory bound: every input byte is read once and every node written once.
//
// The arithmetic is fixed by the definition and does not depend on the schedule: children are added in ascending
// order in float32 starting from the first, divided by their number, rounded to nearest even to the element type; a
// layer pools the rounded nodes of the layer below.
#pragma once

#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

#include "namespaces.h"
#include "host/launch_overlapped.cuh"
#include "device/barriers.cuh"
#include "config.cuh"

namespace htree_cuda::tree::pool {

using namespace device;

template <class Config>
using Access = cutlass::AlignedArray<typename Config::Element, Config::kVec, Config::kAccess>;

template <class Config>
__device__ __forceinline__ Access<Config> load_global(typename Config::Element const* address) {
  Access<Config> value;
  if constexpr (Config::kAccess == kVectorBytes) {
    reinterpret_cast<uint4&>(value) = __ldg(reinterpret_cast<uint4 const*>(address));
  } else {
    value[0] = *address;
  }
  return value;
}

// Running sum of the children of one node.
template <class Config>
struct Mean {
  using Element = typename Config::Element;
  float sum[Config::kVec];

  // -0 and not +0: -0 + x is x for every x, so the sum starts from the first child, signed zeros included.
  __device__ __forceinline__ Mean() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kVec; ++i) sum[i] = -0.0f;
  }

  __device__ __forceinline__ void add(Access<Config> const& child) {
    cutlass::NumericArrayConverter<float, Element, Config::kVec> convert;
    cutlass::Array<float, Config::kVec> const x = convert(child);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kVec; ++i) sum[i] += x[i];
  }

  __device__ __forceinline__ Access<Config> get(int count, int log2_r) const {
    cutlass::Array<float, Config::kVec> mean;
    if (count == (1 << log2_r)) {
      // Dividing by a power of two and multiplying by its exact inverse round the same real number.
      float const inverse = __int_as_float((127 - log2_r) << 23);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Config::kVec; ++i) mean[i] = sum[i] * inverse;
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Config::kVec; ++i) mean[i] = __fdiv_rn(sum[i], float(count));
    }
    cutlass::NumericArrayConverter<Element, float, Config::kVec, cutlass::FloatRoundStyle::round_to_nearest> convert;
    Access<Config> value;
    static_cast<cutlass::Array<Element, Config::kVec>&>(value) = convert(mean);
    return value;
  }
};

// Mean of `count` children, child c being load(c): kBatch loads are issued before the first is added.
template <class Config, class Load>
__device__ __forceinline__ Access<Config> pool(int count, int log2_r, Load const& load) {
  Mean<Config> mean;
  Access<Config> batch[Config::kBatch];
  int c = 0;
  for (; c + Config::kBatch <= count; c += Config::kBatch) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kBatch; ++j) batch[j] = load(c + j);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kBatch; ++j) mean.add(batch[j]);
  }
  if (c < count) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kBatch; ++j) {
      if (c + j < count) batch[j] = load(c + j);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Config::kBatch; ++j) {
      if (c + j < count) mean.add(batch[j]);
    }
  }
  return mean.get(count, log2_r);
}

// Children of node `node` that exist among the `below` nodes of the layer below.
__device__ __forceinline__ int children(std::int64_t node, std::int64_t below, int log2_r) {
  std::int64_t const left = below - (node << log2_r);
  return static_cast<int>(left < (std::int64_t(1) << log2_r) ? left : std::int64_t(1) << log2_r);
}

template <class Config>
__global__ void __launch_bounds__(kThreads, kMinBlocksPerSM)
    tree_pool_kernel(__grid_constant__ Args<typename Config::Element> const args) {
  wait_for_previous_grid();
  using Element = typename Config::Element;
  extern __shared__ __align__(16) unsigned char shared_bytes[];

  // Column groups of K and V vary fastest, so that CTAs that run together read whole rows of tokens.
  unsigned const groups = args.jobs[0].column_groups + args.jobs[1].column_groups;
  unsigned const group_all = blockIdx.x % groups;
  std::int64_t tile = blockIdx.x / groups % args.tiles;
  std::int64_t b = blockIdx.x / groups / args.tiles;
  bool const second = group_all >= unsigned(args.jobs[0].column_groups);
  Job<Element> const& job = args.jobs[second ? 1 : 0];
  int const group = int(group_all) - (second ? args.jobs[0].column_groups : 0);

  int const columns = 1 << args.log2_columns;
  int const column = threadIdx.x & (columns - 1);
  int const slot = threadIdx.x >> args.log2_columns;
  int const slots = kThreads >> args.log2_columns;
  int const column_all = (group << args.log2_columns) + column;
  int const h = column_all / job.columns_per_head;
  int const d = (column_all - h * job.columns_per_head) * Config::kVec;
  bool const active = h < args.H_kv;

  Element const* in = job.in + b * job.stride_b + h * job.stride_h + d;
  Element* const tree = job.tree + (b * args.H_kv + h) * job.tree_stride_h + d;
  // Nodes of a layer, and where they begin.
  Sequence sequence{};
  std::int32_t own = 0;
  bool const several = args.sequences != nullptr;
  if (several) {
    int const shift = args.log2_r * (args.first + 1) + args.log2_nodes;
    auto const begin = [&](std::int32_t i) {
      std::int64_t const before = args.sequences[i].before;
      return (before >> shift) + sequences_with_room(before, i, args.log2_from[1]);
    };
    own = sequence_at(args.sequence_count, tile, begin);
    sequence = args.sequences[own];
    tile -= begin(own);
    if (tile < 0 || !has_room(sequence, args.log2_from[1])) return;  // no tile of any sequence; the CTA's threads agree
    std::int64_t const row = args.first > 0 ? sequence_nodes(sequence.before, own, args.first, args.log2_from[0])
                             : args.packed  ? sequence.key
                                            : 0;
    in += (args.first > 0 || args.packed ? 0 : own) * job.stride_b + row * job.stride_t;
  }
  auto const nodes = [&](int layer) -> std::int64_t {
    if (!several) return args.N[layer];
    int const shift = args.log2_r * (args.first + layer);
    return (sequence.keys + (std::int64_t(1) << shift) - 1) >> shift;
  };
  auto const tree_node = [&](int layer) -> std::int64_t {
    return args.tree_node[layer] + (several ? sequence_nodes(sequence.before, own, args.first + layer, args.log2_from[layer]) : 0);
  };
  Access<Config>* above = reinterpret_cast<Access<Config>*>(shared_bytes);

  for (int local = slot; local < 1 << args.log2_nodes; local += slots) {
    std::int64_t const node = (tile << args.log2_nodes) + local;
    if (!active || node >= nodes(1)) break;
    Element const* const first = in + (node << args.log2_r) * job.stride_t;
    Access<Config> const mean = pool<Config>(children(node, nodes(0), args.log2_r), args.log2_r, [&](int c) {
      return load_global<Config>(first + c * job.stride_t);
    });
    *reinterpret_cast<Access<Config>*>(tree + (tree_node(1) + node) * job.dim) = mean;
    if (args.fused > 1) above[(local << args.log2_columns) + column] = mean;
  }

  // The subtrees above: the nodes of a layer go to the buffer that the layer below was not read from.
  Access<Config>* below = above + (1 << (args.log2_nodes + args.log2_columns));
  for (int layer = 1; layer < args.fused; ++layer) {
    // Orders this layer's reads after the writes of the layer below, and its writes after the reads before those.
    barriers::named_sync(0, kThreads);
    Access<Config>* const swap = below;
    below = above;
    above = swap;
    if (several && !has_room(sequence, args.log2_from[layer + 1])) return;
    int const log2_nodes = args.log2_nodes - layer * args.log2_r;
    for (int local = slot; local < 1 << log2_nodes; local += slots) {
      std::int64_t const node = (tile << log2_nodes) + local;
      if (!active || node >= nodes(layer + 1)) break;
      Access<Config> const* const first = below + (local << (args.log2_r + args.log2_columns)) + column;
      Access<Config> const mean = pool<Config>(children(node, nodes(layer), args.log2_r), args.log2_r, [&](int c) {
        return first[c << args.log2_columns];
      });
      *reinterpret_cast<Access<Config>*>(tree + (tree_node(layer + 1) + node) * job.dim) = mean;
      if (layer + 1 < args.fused) above[(local << args.log2_columns) + column] = mean;
    }
  }
}

}  // namespace htree_cuda::tree::pool

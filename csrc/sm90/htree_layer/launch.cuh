// Launches of a pass; the files in inst/ instantiate them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernel.cuh"
#include "launch.h"

namespace htree_cuda::layer {

// Says which blocks the CTAs of a walk have, which come behind `earlier` others; returns how many CTAs these are.
template <class Cfg>
int deal_blocks(Args& args, Some const& some, int earlier = 0) {
  WalkArgs& own = args.walks[static_cast<int>(Cfg::kWalk)];
  if constexpr (Cfg::kChildRows) {  // the groups are those of the unions
    int const first = own.groups.group_of(args.blocks, some.begin);
    int const last = own.groups.group_of(args.blocks, some.begin + some.count - 1);
    own.end_block = earlier + last;
    return last - first + 1;
  } else if constexpr (Cfg::kShares) {
    own.groups = BlockGroups::of(args.blocks, some.begin, some.count, Cfg::kQueries);
    int const groups = own.groups.count(args.blocks);
    own.end_block = earlier + groups - 1;
    return groups;
  } else {
    own.end_block = earlier + some.begin + some.count - 1;
    return some.count;
  }
}

template <class Cfg>
void launch_one(Args args, Some const& some, cudaStream_t stream) {
  if (some.count == 0) return;
  int const ctas = deal_blocks<Cfg>(args, some);
  launch_overlapped(htree_layer_kernel<Cfg>, ctas, Cfg::kThreads, Cfg::kSharedBytes, stream, args);
}

// Later queries, which walk more, begin first.
template <class Later, class Earlier>
void launch_two(Args args, Some const& later, Some const& earlier, cudaStream_t stream) {
  if constexpr (!Later::kChildRows) {  // theirs has either alone as well: fewer kernels to build
    if (earlier.count == 0) return launch_one<Later>(args, later, stream);
    if (later.count == 0) return launch_one<Earlier>(args, earlier, stream);
  }
  int const first = later.count == 0 ? 0 : deal_blocks<Later>(args, later);
  int const rest = earlier.count == 0 ? 0 : deal_blocks<Earlier>(args, earlier, first);
  if (first + rest == 0) return;
  launch_overlapped(htree_layer_kernel_of_two<Later, Earlier>, first + rest, Later::kThreads,
                    std::max<int>(Later::kSharedBytes, Earlier::kSharedBytes), stream, args,
                    static_cast<std::uint32_t>(first));
}

template <class Below, class Dense, class First>
void launch_ways(Args const& args, Blocks const& blocks, cudaStream_t stream) {
  if (blocks.dense.count == 0) return launch_two<Below, First>(args, blocks.below, blocks.first, stream);
  if constexpr (!std::is_void_v<Dense>) {
    if (blocks.below.count == 0) return launch_two<Dense, First>(args, blocks.dense, blocks.first, stream);
    launch_two<Below, Dense>(args, blocks.below, blocks.dense, stream);
    launch_one<First>(args, blocks.first, stream);
  }
}

// Where queries share a warp, in First and, if those below do too, in SharedBelow. Otherwise First has a launch of its own: chunks are
// large then, so that few have queries of several ways, and fewer kernels are built.
template <class Below, class Dense, class SharedBelow, class First>
void launch_shared(Args const& args, Blocks const& blocks, cudaStream_t stream) {
  if constexpr (Below::kReadsValues && std::is_same_v<typename Below::Element, __nv_bfloat16>) {
    if (queries_of_below(args.G, args.blocks.T_q, DType::kBFloat16, args.layer) > 1) {
      return launch_two<SharedBelow, First>(args, blocks.below, blocks.first, stream);
    }
  }
  if constexpr (std::is_void_v<Dense>) {
    launch_one<Below>(args, blocks.below, stream);
  } else {
    launch_two<Below, Dense>(args, blocks.below, blocks.dense, stream);
  }
  launch_one<First>(args, blocks.first, stream);
}

template <class Below, class Dense, class First>
void launch(Args const& args, Blocks const& blocks, cudaStream_t stream) {
  switch (queries_of_first(args.G, args.blocks.T_q)) {
    case 1: return launch_ways<Below, Dense, First>(args, blocks, stream);
    case 2: return launch_shared<Below, Dense, typename Below::OfPairs, typename First::OfPairs>(args, blocks, stream);
    case 4: return launch_shared<Below, Dense, typename Below::OfQuads, typename First::OfQuads>(args, blocks, stream);
  }
}

}  // namespace htree_cuda::layer

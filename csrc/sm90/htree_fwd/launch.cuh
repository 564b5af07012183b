// Launches of a pass; the files in instantiations/ instantiate them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernel.cuh"
#include "launch.h"

namespace htree_cuda::sm90::htree_fwd {

// Says which blocks the CTAs of a walk have, which come behind `earlier` others; returns how many CTAs these are.
template <class Cfg>
int deal_blocks(Args& args, Some const& some, int earlier = 0) {
  KindArgs& own = args.kinds[static_cast<int>(Cfg::kKind)];
  if constexpr (Cfg::kSwapAB) {  // the groups are those of the unions
    int const first = own.groups.group_of(args.blocks, some.begin);
    int const last = own.groups.group_of(args.blocks, some.begin + some.count - 1);
    own.end_block = earlier + last;
    return last - first + 1;
  } else if constexpr (Cfg::kSharesWarp) {
    own.groups = BlockGroups::of(args.blocks, some.begin, some.count, Cfg::kQueriesPerWarp);
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
  launch_overlapped(htree_fwd_kernel<Cfg>, ctas, Cfg::kThreads, Cfg::kSharedBytes, stream, args);
}

// Later queries, which walk more, begin first.
template <class Later, class Earlier>
void launch_two(Args args, Some const& later, Some const& earlier, cudaStream_t stream) {
  if constexpr (!Later::kSwapAB) {  // theirs has either alone as well: fewer kernels to build
    if (earlier.count == 0) return launch_one<Later>(args, later, stream);
    if (later.count == 0) return launch_one<Earlier>(args, earlier, stream);
  }
  int const first = later.count == 0 ? 0 : deal_blocks<Later>(args, later);
  int const rest = earlier.count == 0 ? 0 : deal_blocks<Earlier>(args, earlier, first);
  if (first + rest == 0) return;
  launch_overlapped(htree_fwd_joint_kernel<Later, Earlier>, first + rest, Later::kThreads,
                    std::max<int>(Later::kSharedBytes, Earlier::kSharedBytes), stream, args,
                    static_cast<std::uint32_t>(first));
}

template <class Selected, class HalfSelected, class Entry>
void launch_ways(Args const& args, Blocks const& blocks, cudaStream_t stream) {
  if (blocks.half_selected.count == 0) return launch_two<Selected, Entry>(args, blocks.selected, blocks.first, stream);
  if constexpr (!std::is_void_v<HalfSelected>) {
    if (blocks.selected.count == 0) return launch_two<HalfSelected, Entry>(args, blocks.half_selected, blocks.first, stream);
    launch_two<Selected, HalfSelected>(args, blocks.selected, blocks.half_selected, stream);
    launch_one<Entry>(args, blocks.first, stream);
  }
}

// Where queries share a warp, in First and, if those below do too, in SwapABKernel. Otherwise First has a launch of its own: chunks are
// large then, so that few have queries of several ways, and fewer kernels are built.
template <class Selected, class HalfSelected, class SwapABKernel, class Entry>
void launch_shared(Args const& args, Blocks const& blocks, cudaStream_t stream) {
  if constexpr (Selected::kReadsValues && std::is_same_v<typename Selected::Element, __nv_bfloat16>) {
    if (queries_of_selected(args.G, args.blocks.T_q, DType::kBFloat16, args.layer) > 1) {
      return launch_two<SwapABKernel, Entry>(args, blocks.selected, blocks.first, stream);
    }
  }
  if constexpr (std::is_void_v<HalfSelected>) {
    launch_one<Selected>(args, blocks.selected, stream);
  } else {
    launch_two<Selected, HalfSelected>(args, blocks.selected, blocks.half_selected, stream);
  }
  launch_one<Entry>(args, blocks.first, stream);
}

template <class Selected, class HalfSelected, class Entry>
void launch(Args const& args, Blocks const& blocks, cudaStream_t stream) {
  switch (queries_of_entry(args.G, args.blocks.T_q)) {
    case 1: return launch_ways<Selected, HalfSelected, Entry>(args, blocks, stream);
    case 2: return launch_shared<Selected, HalfSelected, typename Selected::TwoQueries, typename Entry::TwoQueries>(args, blocks, stream);
    case 4: return launch_shared<Selected, HalfSelected, typename Selected::FourQueries, typename Entry::FourQueries>(args, blocks, stream);
  }
}

}  // namespace htree_cuda::sm90::htree_fwd

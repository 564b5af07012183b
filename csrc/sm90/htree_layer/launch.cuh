// Launches of a pass; the files in inst/ instantiate them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernel.cuh"
#include "launch.h"

namespace htree_cuda::layer {

template <class Cfg>
std::uint32_t& end_block(Args& args) {
  return args.walks[static_cast<int>(Cfg::kWalk)].end_block;
}

template <class Cfg>
void launch_one(Args args, Some const& some, cudaStream_t stream) {
  if (some.count == 0) return;
  end_block<Cfg>(args) = some.begin + some.count - 1;
  launch_overlapped(htree_layer_kernel<Cfg>, some.count, Cfg::kThreads, Cfg::kSharedBytes, stream, args);
}

// Later queries, which walk more, begin first.
template <class Later, class Earlier>
void launch_two(Args args, Some const& later, Some const& earlier, cudaStream_t stream) {
  if (earlier.count == 0) return launch_one<Later>(args, later, stream);
  if (later.count == 0) return launch_one<Earlier>(args, earlier, stream);
  end_block<Later>(args) = later.begin + later.count - 1;
  end_block<Earlier>(args) = later.count + earlier.begin + earlier.count - 1;
  launch_overlapped(htree_layer_kernel_of_two<Later, Earlier>, later.count + earlier.count, Later::kThreads,
                    std::max<int>(Later::kSharedBytes, Earlier::kSharedBytes), stream, args,
                    static_cast<std::uint32_t>(later.count));
}

template <class Below, class Dense, class First>
void launch(Args const& args, Blocks const& blocks, cudaStream_t stream) {
  if (blocks.dense.count == 0) return launch_two<Below, First>(args, blocks.below, blocks.first, stream);
  if constexpr (!std::is_void_v<Dense>) {
    if (blocks.below.count == 0) return launch_two<Dense, First>(args, blocks.dense, blocks.first, stream);
    launch_two<Below, Dense>(args, blocks.below, blocks.dense, stream);
    launch_one<First>(args, blocks.first, stream);
  }
}

}  // namespace htree_cuda::layer

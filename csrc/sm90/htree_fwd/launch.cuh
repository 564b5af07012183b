// The launch of one kernel; each file in instantiations/ instantiates those of a pass, a dtype and head dimensions.
#pragma once

#include <algorithm>
#include <type_traits>

#include "host/launch_lane.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace htree_cuda::sm90::htree_fwd {

template <class Element, int kK, int kV, Pass kPass, int kSelectedQueries, int kEntryQueries>
void launch(Args const& args, Grid const& grid, LaneStream stream) {
  constexpr bool kHalf = kSelectedQueries == 1 && !std::is_same_v<Element, __half>;
  using Selected = Traits<Element, kK, kV, kPass, LayerKind::kSelected, kSelectedQueries>;
  using HalfSelected = std::conditional_t<kHalf, Traits<Element, kK, kV, kPass, LayerKind::kHalfSelected>, void>;
  using Entry = Traits<Element, kK, kV, kPass, LayerKind::kEntry, kEntryQueries>;
  int shared_bytes = std::max<int>(Selected::kSharedBytes, Entry::kSharedBytes);
  if constexpr (kHalf) shared_bytes = std::max<int>(shared_bytes, HalfSelected::kSharedBytes);
  launch_in_lane(htree_fwd_kernel<Selected, HalfSelected, Entry>, grid.ctas, Selected::kThreads, shared_bytes,
                    stream, args, grid);
}

}  // namespace htree_cuda::sm90::htree_fwd

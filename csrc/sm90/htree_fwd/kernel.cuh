// The forward kernel splits a CTA into roles: one warp copies KV blocks, one writes query masks, twelve consume them.
// The loops of the consumers are in {score,attend}_{entry,selected,selected_swapab}.cuh.
#pragma once

#include <algorithm>
#include <type_traits>

#include "host/launch_lane.cuh"
#include "launch.h"
#include "attend_selected.cuh"
#include "attend_selected_swapab.cuh"
#include "score_selected.cuh"
#include "score_selected_swapab.cuh"
#include "attend_entry.cuh"
#include "score_entry.cuh"
#include "producer.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
__device__ __forceinline__ void serve_tile(Args const& args, char* shared_memory) {
  uint32_t const base = (ptx::shared_address(shared_memory) + Cfg::kAlignment - 1) / Cfg::kAlignment * Cfg::kAlignment;
  Ring<Cfg> const ring(base + Cfg::kRingOffset);
  int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    ring.barriers.init(2, Cfg::kConsumers);
    barriers::mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_grid();
  // The host does not know which tiles of a packed call have queries of this layer kind.
  if (args.tiles.entries != nullptr && stream_count<Cfg>(args) == 0) return;

  if (warp >= Cfg::kConsumers) {
    ptx::lower_registers<Cfg::kProducerRegisters>();
    if (warp == Cfg::kConsumers) produce<Cfg>(args, ring);
    if (warp == Cfg::kConsumers + 1) write_query_masks<Cfg>(args, ring);
  } else {
    ptx::raise_registers<Cfg::kConsumerRegisters>();
    State<Cfg> state(args);
    load_queries(state);
    if constexpr (Cfg::kKind == LayerKind::kEntry) {
      if constexpr (Cfg::kReadsValues) {
        attend_entry(state, ring);
      } else {
        score_entry(state, ring);
      }
    } else if constexpr (Cfg::kSwapAB && Cfg::kReadsValues) {
      attend_selected_swapab(state, ring);
    } else if constexpr (Cfg::kSwapAB) {
      score_selected_swapab(state, ring);
    } else if constexpr (Cfg::kReadsValues) {
      attend_selected(state, ring);
    } else {
      score_selected(state, ring);
    }
  }
}

// A pass over a layer for a chunk of queries: CTAs before grid.half_selected_cta serve tiles for which the layer is
// selected, then half-selected, then entry. One launch has all of them, so that no kind leaves SMs idle at its end.
template <class Selected, class HalfSelected, class Entry>
__global__ void __launch_bounds__(Selected::kThreads, 1)
    htree_fwd_kernel(const __grid_constant__ Args args, const __grid_constant__ Grid grid) {
  static_assert(Selected::kThreads == Entry::kThreads);
  extern __shared__ char shared_memory[];
  if (blockIdx.x >= grid.entry_cta) {
    serve_tile<Entry>(args, shared_memory);
  } else if constexpr (std::is_void_v<HalfSelected>) {
    serve_tile<Selected>(args, shared_memory);
  } else if (blockIdx.x >= grid.half_selected_cta) {
    serve_tile<HalfSelected>(args, shared_memory);
  } else {
    serve_tile<Selected>(args, shared_memory);
  }
}

// Each file in instantiations/ has the launches of a pass, a dtype and head dimensions.
template <class Element, int kK, int kV, Pass kPass, int kSelectedQueries, int kEntryQueries>
void launch(Args const& args, Grid const& grid, LaneStream stream) {
  constexpr bool kHalf = kSelectedQueries == 1 && !std::is_same_v<Element, __half>;
  using Selected = Traits<Element, kK, kV, kPass, LayerKind::kSelected, kSelectedQueries>;
  using HalfSelected = std::conditional_t<kHalf, Traits<Element, kK, kV, kPass, LayerKind::kHalfSelected>, void>;
  using Entry = Traits<Element, kK, kV, kPass, LayerKind::kEntry, kEntryQueries>;
  int shared_bytes = std::max<int>(Selected::kSharedBytes, Entry::kSharedBytes);
  if constexpr (kHalf) shared_bytes = std::max<int>(shared_bytes, HalfSelected::kSharedBytes);
  launch_in_lane(htree_fwd_kernel<Selected, HalfSelected, Entry>, grid.ctas, Selected::kThreads, shared_bytes, stream,
                 args, grid);
}

}  // namespace htree_cuda::sm90::htree_fwd

// Roles of the layer kernel; the work is in mainloop.cuh (ring, producer), query.cuh, consumer.cuh, first.cuh and
// first_groups.cuh (queries in their entry layer), rotating.cuh, below.cuh and score pass.cuh (the others), below_shared.cuh (several
// of those a warp).
#pragma once

#include <type_traits>

#include "host/launch_overlapped.cuh"
#include "attend_selected.cuh"
#include "attend_selected_swapab.cuh"
#include "score_selected.cuh"
#include "attend_entry.cuh"
#include "producer.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
__device__ __forceinline__ void run_block(Args const& args, char* shared_memory) {
  uint32_t const base = (ptx::shared_address(shared_memory) + Cfg::kAlignment - 1) / Cfg::kAlignment * Cfg::kAlignment;
  Ring<Cfg> const ring(base + Cfg::kRingOffset);
  int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    ring.barriers.init(2, Cfg::kConsumers);
    barriers::mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_grid();

  if (warp >= Cfg::kConsumers) {
    ptx::lower_registers<Cfg::kProducerRegisters>();
    if (warp == Cfg::kConsumers) produce<Cfg>(args, ring);
    if (warp == Cfg::kConsumers + 1) write_query_masks<Cfg>(args, ring);
  } else {
    ptx::raise_registers<Cfg::kConsumerRegisters>();
    if constexpr (Cfg::kKind == LayerKind::kEntry) {
      EntryConsumer<Cfg>(args).run(ring);
    } else if constexpr (Cfg::kSwapAB) {
      SelectedAttendSwapAB<Cfg>(args, ring).run(ring);
    } else {
      std::conditional_t<Cfg::kReadsValues, SelectedAttend<Cfg>, SelectedScore<Cfg>>(args, ring).run(ring);
    }
  }
}

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) htree_fwd_kernel(const __grid_constant__ Args args) {
  extern __shared__ char shared_memory[];
  run_block<Cfg>(args, shared_memory);
}

// A pass for queries that walk the layer in two ways, in one launch, so that neither leaves SMs idle in its end.
// CTAs from `earlier_cta` on have blocks of the second one.
template <class Later, class Earlier>
__global__ void __launch_bounds__(Later::kThreads, 1)
    htree_fwd_joint_kernel(const __grid_constant__ Args args, uint32_t earlier_cta) {
  static_assert(Later::kThreads == Earlier::kThreads);
  extern __shared__ char shared_memory[];
  if (blockIdx.x < earlier_cta) {
    run_block<Later>(args, shared_memory);
  } else {
    run_block<Earlier>(args, shared_memory);
  }
}

}  // namespace htree_cuda::sm90::htree_fwd

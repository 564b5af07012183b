// Roles of the matrix kernels; the work is in queries.cuh, nodes.cuh, first_queries.cuh and first_nodes.cuh.
#pragma once

#include "host/launch_overlapped.cuh"
#include "dkdv_selected.cuh"
#include "dq_selected.cuh"
#include "dkdv_entry.cuh"
#include "dq_entry.cuh"

namespace htree_cuda::sm90::htree_bwd {

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) htree_bwd_kernel(const __grid_constant__ Args args) {
  extern __shared__ char shared_memory[];
  uint32_t const base = ptx::shared_address(shared_memory);
  uint32_t const shared = (base + Cfg::kAlignment - 1) / Cfg::kAlignment * Cfg::kAlignment;
  int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  wait_for_previous_grid();

  if constexpr (Cfg::kPass == Pass::kNodes) {
    run_nodes<Cfg>(args, shared, warp);
  } else if constexpr (Cfg::kPass == Pass::kFirstQueries) {
    run_first_queries<Cfg>(args, shared, warp);
  } else if constexpr (Cfg::kPass == Pass::kFirstNodes) {
    run_first_nodes<Cfg>(args, shared, warp);
  } else {
    Ring<Cfg> const ring(shared);
    if (threadIdx.x == 0) {
      ring.barriers.init(1, Cfg::kConsumers);
      barriers::mbarrier_init_fence();
    }
    __syncthreads();

    if (warp >= Cfg::kConsumers) {
      ptx::lower_registers<Cfg::kProducerRegisters>();
      if (warp != Cfg::kConsumers) return;
      produce_parents<Cfg>(args, ring);
    } else {
      ptx::raise_registers<Cfg::kConsumerRegisters>();
      Query<Cfg>(args, ring, warp).run(ring, warp);
    }
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

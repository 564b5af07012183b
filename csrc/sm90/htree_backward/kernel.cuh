// Roles of the two matrix kernels; the work is in queries.cuh and nodes.cuh.
#pragma once

#include "nodes.cuh"
#include "queries.cuh"

namespace htree_cuda::gradient {

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) htree_backward_kernel(const __grid_constant__ Args args) {
  extern __shared__ char shared_memory[];
  uint32_t const base = ptx::shared_address(shared_memory);
  Ring<Cfg> const ring((base + Cfg::kAlignment - 1) / Cfg::kAlignment * Cfg::kAlignment);
  int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    ring.barriers.init(1, Cfg::kConsumers);
    if constexpr (Cfg::kPass == Pass::kNodes) barriers::mbarrier_init(ring.resident_barrier, 1);
    barriers::mbarrier_init_fence();
  }
  __syncthreads();

  if (warp >= Cfg::kConsumers) {
    ptx::lower_registers<Cfg::kProducerRegisters>();
    if (warp != Cfg::kConsumers) return;
    if constexpr (Cfg::kPass == Pass::kQueries) {
      produce_parents<Cfg>(args, ring);
    } else {
      produce_queries<Cfg>(args, ring);
    }
  } else {
    ptx::raise_registers<Cfg::kConsumerRegisters>();
    if constexpr (Cfg::kPass == Pass::kQueries) {
      Query<Cfg>(args, warp).run(ring, warp);
    } else {
      Parent<Cfg>(args, ring, warp).run(ring);
    }
  }
}

}  // namespace htree_cuda::gradient

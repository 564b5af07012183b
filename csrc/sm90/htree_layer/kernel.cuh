// Roles of the layer kernel; the work is in mainloop.cuh (ring, producer), consumer.cuh, first.cuh and below.cuh.
#pragma once

#include <type_traits>

#include "../../common/overlap.cuh"
#include "below.cuh"
#include "first.cuh"
#include "mainloop.cuh"

namespace htree_cuda::layer {

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) htree_layer_kernel(const __grid_constant__ Args args) {
  extern __shared__ char shared_memory[];
  uint32_t const base = (ptx::shared_address(shared_memory) + Cfg::kAlignment - 1) / Cfg::kAlignment * Cfg::kAlignment;
  Ring<Cfg> const ring(base + Cfg::kRingOffset);
  int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    ring.barriers.init(1, Cfg::kConsumers);
    barriers::mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_grid();

  if (warp >= Cfg::kConsumers) {
    ptx::lower_registers<Cfg::kProducerRegisters>();
    if (warp == Cfg::kConsumers) produce<Cfg>(args, ring);
  } else {
    ptx::raise_registers<Cfg::kConsumerRegisters>();
    if constexpr (Cfg::kWalk == Walk::kFirst) {
      FirstConsumer<Cfg>(args).run(ring);
    } else {
      BelowConsumer<Cfg>(args, ring).run(ring);
    }
  }
}

}  // namespace htree_cuda::layer

// Roles of the attn_dist kernel. A persistent grid of one CTA an SM: two consumer warpgroups, one producer, one
// reducer.
#pragma once

#include "config.cuh"
#include "mainloop.cuh"
#include "reducer.cuh"

namespace htree_cuda::sm90::attn_dist {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attn_dist_kernel(__grid_constant__ KernelParams const params, __grid_constant__ CUtensorMap const q_map) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename C::SharedStorage*>(shared_bytes);
  RingBarriers<C::kStages> const ring{ptx::shared_address(&shared.full[0]), ptx::shared_address(&shared.empty[0])};

  // Uniform, so that addresses derived from them live in uniform registers, where WGMMA wants its descriptors.
  int const warp = uniform(threadIdx.x / 32);
  int const warpgroup = warp / C::kWarps;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&q_map);
    ring.init(C::kWarps, C::kEmptyUnits);
    for (int c = 0; c < C::kConsumers; ++c) sum_barriers<C>(shared, c).init(C::kWarps, C::kWarps / C::kConsumers);
    barriers::mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup > C::kConsumers) {
    ptx::lower_registers<C::kReducerRegisters>();
    Reducer<C>(params, shared, warp % C::kWarps).run();
  } else if (warpgroup == C::kConsumers) {
    ptx::lower_registers<C::kProducerRegisters>();
    Producer<C>(params, q_map, shared, ring).run();
  } else {
    ptx::raise_registers<C::kConsumerRegisters>();
    Consumer<C>(params, shared, ring, warpgroup, warp % C::kWarps).run();
  }
}

}  // namespace htree_cuda::sm90::attn_dist

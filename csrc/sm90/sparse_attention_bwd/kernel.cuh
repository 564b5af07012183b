// Roles of the kernel that computes dq and the sums of dkv. The grid is persistent, one CTA an SM: two consumer
// warpgroups, one producer warpgroup.
#pragma once

#include "config.cuh"
#include "producer.cuh"
#include "score_consumer.cuh"
#include "sum_consumer.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sparse_attention_bwd_kernel(__grid_constant__ KernelParams const params, __grid_constant__ CUtensorMap const q_map,
                                __grid_constant__ CUtensorMap const dout_map) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename C::SharedStorage*>(shared_bytes);

  // Uniform, so that addresses derived from them live in uniform registers, where WGMMA wants its descriptors.
  int const warp = uniform(threadIdx.x / 32);
  int const warpgroup = warp / C::kWarps;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&q_map);
    ptx::prefetch_tensor_map(&dout_map);
    Barriers<C>(shared).init(shared);
    barriers::mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == C::kConsumers) {
    ptx::lower_registers<C::kProducerRegisters>();
    Producer<C>(params, q_map, dout_map, shared, warp % C::kWarps).run();
  } else if (warpgroup == 0) {
    ptx::raise_registers<C::kConsumerRegisters[0]>();
    ScoreConsumer<C>(params, shared).run();
  } else {
    ptx::raise_registers<C::kConsumerRegisters[1]>();
    SumConsumer<C>(params, shared).run();
  }
}

}  // namespace htree_cuda::sm90::sparse_attention_bwd

// Roles of the kernel that computes dq and the sums of dkv of more than 64 heads: clusters of two CTAs, one CTA an SM.
#pragma once

#include "config.cuh"
#include "pair_consumer.cuh"
#include "producer.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

template <class C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(C::kThreads, 1)
    sparse_attention_bwd_pair_kernel(__grid_constant__ KernelParams const params,
                                     __grid_constant__ CUtensorMap const q_map,
                                     __grid_constant__ CUtensorMap const dout_map) {
  static_assert(C::kCtas == 2);
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
  barriers::cluster_arrive();
  barriers::cluster_wait();

  if (warpgroup == C::kConsumers) {
    ptx::lower_registers<C::kProducerRegisters>();
    Producer<C>(params, q_map, dout_map, shared, warp % C::kWarps).run();
  } else if (warpgroup == 0) {
    ptx::raise_registers<C::kConsumerRegisters[0]>();
    PairConsumer<C, 0>(params, shared, warp % C::kWarps).run();
  } else {
    ptx::raise_registers<C::kConsumerRegisters[1]>();
    PairConsumer<C, 1>(params, shared, warp % C::kWarps).run();
  }

  // The other CTA may still arrive at barriers here.
  __syncwarp();
  barriers::cluster_arrive();
  barriers::cluster_wait();
}

}  // namespace htree_cuda::sm90::sparse_attention_bwd

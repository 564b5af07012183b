// Roles of the indexer's dense kernel: two or four consumer warpgroups and a producer. A CTA takes one unit of work.
#pragma once

#include "consumer.cuh"

namespace htree_cuda::sm90::indexer {

// One thread copies the queries of the consumers, then every key tile.
template <class C>
__device__ __forceinline__ void produce(KernelParams const& p, Work const& work, CUtensorMap const& q_map, CUtensorMap const& k_map,
                                        typename C::SharedStorage& shared, RingBarriers<C::kStages> ring) {
  uint32_t const queries_full = ptx::shared_address(&shared.queries_full);
  barriers::mbarrier_arrive_expect_bytes(queries_full, C::kQuerySets * C::kQueryBytes);
#pragma unroll
  for (int c = 0; c < C::kQuerySets; ++c) {
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      ptx::tma_load_4d(ptx::shared_address(shared.queries[c]) + panel * C::kQueryPanelBytes, &q_map, queries_full,
                       ptx::kEvictNormal, panel * C::kPanelCols, 0, work.query + c * C::kQueries, work.b * p.q_coord_b);
    }
  }
  RingPosition<C::kStages> at;
#pragma unroll 1
  for (int tile = 0; tile < work.tiles; ++tile, at = at.ahead(1)) {
    ring.wait_empty(at, "free stage");
    uint32_t const full = ring.full_at(at.slot);
    barriers::mbarrier_arrive_expect_bytes(full, C::kStageBytes);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      ptx::tma_load_4d(ptx::shared_address(shared.keys[at.slot]) + panel * C::kKeyPanelBytes, &k_map, full,
                       ptx::kEvictNormal, panel * C::kPanelCols, work.first_key + tile * kTileKeys, work.b * p.k_coord_b, 0);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    indexer_logits_kernel(__grid_constant__ KernelParams const params, __grid_constant__ CUtensorMap const q_map,
                          __grid_constant__ CUtensorMap const k_map) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename C::SharedStorage*>(shared_bytes);
  RingBarriers<C::kStages> const ring{ptx::shared_address(&shared.full[0]), ptx::shared_address(&shared.empty[0])};
  int const warp = uniform(threadIdx.x / 32);
  int const warpgroup = warp / 4;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&q_map);
    ptx::prefetch_tensor_map(&k_map);
    ring.init(1, C::kEmptyUnits);
    barriers::mbarrier_init(ptx::shared_address(&shared.queries_full), 1);
    barriers::mbarrier_init_fence();
  }
  Work work = Work::of<C>(params, blockIdx.x);
  work.write_windows<C>(params, shared);
  __syncthreads();
  work.find_tiles<C>(shared);

  if (warpgroup == C::kConsumers) {
    ptx::lower_registers<C::kProducerRegisters>();
    if (warp % 4 == 0 && ptx::elect() && work.tiles > 0) produce<C>(params, work, q_map, k_map, shared, ring);
  } else {
    ptx::raise_registers<C::kConsumerRegisters>();
    Consumer<C>(params, shared, ring, work, warpgroup, warp % 4).run();
  }
}

}  // namespace htree_cuda::sm90::indexer

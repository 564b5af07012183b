// Barriers of the kernel that computes dq and the sums of dkv
//   name             who arrives                          who waits       what becomes visible, or free
//   keys_full[part]  one lane of each producer warp       consumer 0, a   panels of the tile (cp.async, fenced by each
//                                                         pair's both     copying thread); with the first also `rows`
//   keys_empty       one lane of each of the 8 consumer   producer        both consumers have multiplied dS with the
//                    warps                                                keys of the tile; one CTA: and read `rows`
//   q_full           one lane of producer warp 0, with    both consumers  Q and dO of the unit (TMA)
//                    TMA bytes
//   q_empty          one lane of each of the 8 consumer   producer warp   the last products of the unit with Q and dO
//                    warps                                0
//   ds_full          one lane of each warp of consumer 0  both consumers  P and dS of the tile (st.shared, fenced by each
//                                                                         writing thread)
//   ds_empty         one lane of each warp of consumer 1  consumer 0      all its products with P and dS of the tile
//
// A pair of CTAs has in addition, or otherwise
//   ds_full          one lane of each of the 8 consumer   both consumers  P and dS of all 64 keys of the tile
//                    warps, and the bytes of the other
//                    CTA's keys (st.async)
//   ds_empty         one lane of each of the other CTA's  both consumers  all products of the other CTA with P and dS of
//                    8 consumer warps                                     the tile: partial scores and dP may go there
//   partial_full     one lane of the warp that waits, and its warp        partial scores [0], partial dP [1] (st.async)
//   [which][warp]    the other's bytes
//   partial_empty    one lane of the other CTA's warp     its warp        the other has read partial dP: P and dS may go
//   [warp]                                                                there
#pragma once

#include <cstdint>

#include "device/barriers.cuh"
#include "device/ptx.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

template <class C>
class Barriers {
public:
  __device__ __forceinline__ explicit Barriers(typename C::SharedStorage& shared)
      : keys_empty(ptx::shared_address(&shared.keys_empty)), q_full(ptx::shared_address(&shared.q_full)),
        q_empty(ptx::shared_address(&shared.q_empty)), ds_full(ptx::shared_address(&shared.ds_full)),
        ds_empty(ptx::shared_address(&shared.ds_empty)), keys_full_(ptx::shared_address(&shared.keys_full[0])) {}

  __device__ __forceinline__ void init(typename C::SharedStorage& shared) const {
#pragma unroll
    for (int i = 0; i < C::kParts; ++i) barriers::mbarrier_init(keys_full(i), C::kWarps);
    barriers::mbarrier_init(keys_empty, C::kConsumers * C::kWarps);
    barriers::mbarrier_init(q_full, 1);
    barriers::mbarrier_init(q_empty, C::kConsumers * C::kWarps);
    barriers::mbarrier_init(ds_full, C::kWeightConsumers * C::kWarps);
    barriers::mbarrier_init(ds_empty, C::kWeightConsumers * C::kWarps);
    if constexpr (C::kCtas > 1) {
#pragma unroll
      for (int i = 0; i < C::kConsumers * C::kWarps; ++i) {
        barriers::mbarrier_init(ptx::shared_address(&shared.partial_full[i]), 1);
        barriers::mbarrier_init(ptx::shared_address(&shared.partial_full[C::kConsumers * C::kWarps + i]), 1);
        barriers::mbarrier_init(ptx::shared_address(&shared.partial_empty[i]), 1);
      }
    }
  }

  __device__ __forceinline__ uint32_t keys_full(int part) const { return keys_full_ + 8 * part; }

  uint32_t const keys_empty, q_full, q_empty, ds_full, ds_empty;

private:
  uint32_t const keys_full_;
};

}  // namespace htree_cuda::sm90::sparse_attention_bwd

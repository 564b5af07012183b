// A ring of shared-memory stages between one producer and its consumers: a full and an empty mbarrier a stage, and the
// position in the ring that both sides advance by the same rule.
#pragma once

#include <cstdint>

#include "barriers.cuh"

namespace htree_cuda::device {

// A position in a ring of kStages stages: the slot, and the parity of the round.
template <int kStages>
struct RingPosition {
  uint32_t slot = 0;
  uint32_t parity = 0;

  // The position `steps` further, which is at most one round.
  __device__ __forceinline__ RingPosition ahead(uint32_t steps) const {
    uint32_t const next = slot + steps;
    if constexpr ((kStages & (kStages - 1)) == 0) return {next % kStages, parity ^ next / kStages};
    bool const wraps = next >= kStages;
    return {wraps ? next - kStages : next, wraps ? parity ^ 1u : parity};
  }

  // The position `steps` back, which is at most one round. Before the first round it has the parity of a phase that
  // counts as complete.
  __device__ __forceinline__ RingPosition behind(uint32_t steps) const {
    bool const wraps = slot < steps;
    return {wraps ? slot + kStages - steps : slot - steps, wraps ? parity ^ 1u : parity};
  }
};

// The barriers of a ring, addressed by slot, kStride bytes apart. A new ring is empty: producers wait for the parity
// before their own, so that the wait passes at once in the first round.
template <int kStages, int kStride = 8>
struct RingBarriers {
  uint32_t full;   // shared address of the first of kStages 64-bit words
  uint32_t empty;  // the same of the empty barriers

  __device__ __forceinline__ void init(uint32_t full_arrivals, uint32_t empty_arrivals) const {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      barriers::mbarrier_init(full + kStride * i, full_arrivals);
      barriers::mbarrier_init(empty + kStride * i, empty_arrivals);
    }
  }

  __device__ __forceinline__ uint32_t full_at(uint32_t slot) const { return full + kStride * slot; }
  __device__ __forceinline__ uint32_t empty_at(uint32_t slot) const { return empty + kStride * slot; }

  __device__ __forceinline__ void wait_full(RingPosition<kStages> at, char const* name) const {
    barriers::mbarrier_wait(full_at(at.slot), at.parity, name);
  }
  __device__ __forceinline__ bool test_full(RingPosition<kStages> at) const {
    return barriers::mbarrier_test_wait(full_at(at.slot), at.parity);
  }
  __device__ __forceinline__ bool test_empty(RingPosition<kStages> at) const {
    return barriers::mbarrier_test_wait(empty_at(at.slot), at.parity ^ 1u);
  }
  __device__ __forceinline__ void wait_empty(RingPosition<kStages> at, char const* name) const {
    barriers::mbarrier_wait(empty_at(at.slot), at.parity ^ 1u, name);
  }
};

}  // namespace htree_cuda::device

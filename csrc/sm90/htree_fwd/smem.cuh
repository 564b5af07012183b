// The ring of stages in shared memory: what lies where is said in traits.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "traits.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
struct Ring {
  uint32_t stages;
  RingBarriers<Cfg::kStages, Cfg::kStageBytes> barriers;

  __device__ explicit Ring(uint32_t shared)
      : stages(shared), barriers{shared + Cfg::kFullOffset, shared + Cfg::kEmptyOffset} {}

  __device__ __forceinline__ uint32_t stage(uint32_t slot) const { return stages + slot * Cfg::kStageBytes; }
  // The query mask of consumer `i` for the stage (traits.cuh).
  static __device__ __forceinline__ uint32_t mask(uint32_t stage, int i) { return stage + Cfg::kMaskOffset + 4 * i; }
  // The query mask of consumer `i` for the stage behind this one.
  static __device__ __forceinline__ uint32_t next_mask(uint32_t stage, int i) {
    return stage + Cfg::kNextMaskOffset + 4 * i;
  }
  // Half-selected layers: the index of the block in slot `i`.
  static __device__ __forceinline__ uint32_t node(uint32_t stage, int i) {
    return stage + Cfg::kNodeOffset + 4 * i;
  }
};

}  // namespace htree_cuda::sm90::htree_fwd

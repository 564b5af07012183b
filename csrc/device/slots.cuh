// Which slots of an index list count, for the kernels over such lists. Their parameters name the same fields:
//   indices [B, s_q, topk], topk_length [B, s_q] or null, causal, q_start, q_start_step, key_stride, topk, s_kv
#pragma once

#include <cstdint>

#include "sm90.cuh"

namespace htree_cuda::device::slots {

// q_start entries that travel in a kernel's parameters; longer lists are launched in chunks of batches.
inline constexpr int kMaxStarts = 128;

// Slots of row b * s_q + s at and past it are invalid; at most topk.
template <class Params>
__device__ __forceinline__ int length(Params const& p, int row) {
  int length = p.topk;
  if (p.topk_length != nullptr) {
    length = uniform(min(max(p.topk_length[row], 0), p.topk));
  }
  return length;
}

// Key rows at and past it are invalid for query s of batch b; at most s_kv.
template <class Params>
__device__ __forceinline__ int visible(Params const& p, int b, int s) {
  int visible = p.s_kv;
  if (p.causal) {
    int64_t const rows = (p.q_start[b * p.q_start_step] + s + 1) / p.key_stride;
    visible = rows < p.s_kv ? static_cast<int>(rows) : p.s_kv;
  }
  return visible;
}

}  // namespace htree_cuda::device::slots

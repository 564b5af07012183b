// Index lists and which of their slots count, for the kernels over such lists. Their parameters name the same fields:
//   indices [B, s_q, topk], topk_length [B, s_q] or null, with the strides of each dimension in elements, causal, q_start,
//   q_start_step, key_stride, topk, s_kv
#pragma once

#include <cstdint>

#include "sm90.cuh"

namespace htree_cuda::device::slots {

// q_start entries that travel in a kernel's parameters; longer lists are launched in chunks of batches.
inline constexpr int kMaxStarts = 128;

// The list of query s of batch b, whose slots lie indices_stride_t apart.
template <class Params>
__device__ __forceinline__ int const* list(Params const& p, int b, int s) {
  return p.indices + b * p.indices_stride_b + s * p.indices_stride_s;
}

// Slots of query s of batch b at and past it are invalid; at most topk.
template <class Params>
__device__ __forceinline__ int length(Params const& p, int b, int s) {
  int length = p.topk;
  if (p.topk_length != nullptr) {
    // Strides of 32 bits: wider products take registers that the consumers of sparse_attention do not have.
    uint64_t const at = static_cast<uint64_t>(static_cast<uint32_t>(b)) * p.topk_length_stride_b +
                        static_cast<uint64_t>(static_cast<uint32_t>(s)) * p.topk_length_stride_s;
    length = uniform(min(max(p.topk_length[at], 0), p.topk));
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

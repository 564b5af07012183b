// Which key rows a query sees: bounds of its own, and the causal rule.
#pragma once

#include <cstdint>

#include "slots.cuh"

namespace htree_cuda::device {

struct Window {
  int const* k_start;  // [B, s_q] or null
  int64_t k_start_stride_b;
  int64_t k_start_stride_s;
  int const* k_end;    // [B, s_q] or null
  int64_t k_end_stride_b;
  int64_t k_end_stride_s;
  int64_t key_stride;  // tokens that a key row stands for
  int64_t q_start[slots::kMaxStarts];
  int q_start_step;    // 1: one entry a batch; 0: q_start[0] for all
  bool causal;
};

struct KeyRange {
  int first;
  int end;  // at least first
};

// The rows of query s of batch b, within 0 .. s_kv.
__device__ __forceinline__ KeyRange key_range(Window const& window, int b, int s, int s_kv) {
  int first = 0;
  int end = s_kv;
  if (window.k_start != nullptr) {
    first = max(window.k_start[b * window.k_start_stride_b + s * window.k_start_stride_s], 0);
  }
  if (window.k_end != nullptr) {
    end = min(window.k_end[b * window.k_end_stride_b + s * window.k_end_stride_s], end);
  }
  if (window.causal) {
    int64_t const rows = (window.q_start[b * window.q_start_step] + s + 1) / window.key_stride;
    end = rows < end ? static_cast<int>(rows) : end;
  }
  first = min(first, s_kv);
  return {first, max(first, end)};
}

}  // namespace htree_cuda::device

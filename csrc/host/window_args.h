// What the launchers of kernels over windows of keys share: checks, chunks of batches, the window as kernels read it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "params.h"
#include "device/window.cuh"

namespace htree_cuda::host::window_args {

inline void require(char const* op, bool holds, std::string const& what) {
  if (!holds) throw std::invalid_argument(std::string(op) + ": " + what);
}

inline void check(char const* op, KeyWindow const& window, std::int64_t B, std::int64_t s_q, std::int64_t s_kv) {
  constexpr std::int64_t kIntMax = std::numeric_limits<int>::max();
  require(op, B >= 0 && s_q >= 0 && s_kv >= 0, "negative size");
  require(op, s_q <= kIntMax && s_kv <= kIntMax, "s_q or s_kv too large");
  require(op, window.q_start == nullptr || window.k_stride >= 1,
          "k_stride must be at least 1, got " + std::to_string(window.k_stride));
}

inline bool one_start(KeyWindow const& window, std::int64_t B) {
  return window.q_start == nullptr ||
         std::all_of(window.q_start, window.q_start + B, [&](std::int64_t start) { return start == window.q_start[0]; });
}

// Calls launch(first batch, batches) for chunks of batches: rows (batch, query) are counted in 32 bits, and starts
// travel in the kernel's parameters, one for all where they are alike.
template <class Launch>
void for_each_chunk(KeyWindow const& window, std::int64_t B, std::int64_t s_q, Launch&& launch) {
  std::int64_t chunk = std::min<std::int64_t>(B, std::numeric_limits<int>::max() / std::max<std::int64_t>(s_q, 1));
  if (!one_start(window, B)) chunk = std::min<std::int64_t>(chunk, device::slots::kMaxStarts);
  for (std::int64_t b = 0; b < B; b += chunk) launch(b, std::min(chunk, B - b));
}

// The window of `batches` batches from b on, whose queries begin `s` queries further than the window's own.
inline device::Window at(KeyWindow const& window, std::int64_t B, std::int64_t b, std::int64_t batches, std::int64_t s = 0) {
  device::Window result{};
  if (window.k_start != nullptr) {
    result.k_start = window.k_start + b * window.k_start_stride_b + s * window.k_start_stride_s;
    result.k_start_stride_b = window.k_start_stride_b;
    result.k_start_stride_s = window.k_start_stride_s;
  }
  if (window.k_end != nullptr) {
    result.k_end = window.k_end + b * window.k_end_stride_b + s * window.k_end_stride_s;
    result.k_end_stride_b = window.k_end_stride_b;
    result.k_end_stride_s = window.k_end_stride_s;
  }
  result.causal = window.q_start != nullptr;
  result.key_stride = window.k_stride;
  if (result.causal) {
    bool const one = one_start(window, B);
    result.q_start_step = one ? 0 : 1;
    for (std::int64_t i = 0; i < (one ? 1 : batches); ++i) result.q_start[i] = window.q_start[b + i] + s;
  }
  return result;
}

}  // namespace htree_cuda::host::window_args

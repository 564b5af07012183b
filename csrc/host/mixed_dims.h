// Kernels for K != V are built on request alone (HTREE_CUDA_MIXED_DIMS=1): they are half of all htree kernels.
#pragma once

#ifndef HTREE_CUDA_MIXED_DIMS
#define HTREE_CUDA_MIXED_DIMS 0
#endif

#include <cstdint>
#include <type_traits>

namespace htree_cuda::host {

inline constexpr bool kMixedDims = HTREE_CUDA_MIXED_DIMS != 0;

// Calls run(K, V) with the head dimensions as integral constants. tree_args::check has refused all others.
template <class Run>
auto dispatch_dims(std::int64_t K, std::int64_t V, Run&& run) {
  using K64 = std::integral_constant<int, 64>;
  using K128 = std::integral_constant<int, 128>;
  if constexpr (kMixedDims) {
    if (K == 64 && V == 128) return run(K64{}, K128{});
    if (K == 128 && V == 64) return run(K128{}, K64{});
  }
  return K == 128 ? run(K128{}, K128{}) : run(K64{}, K64{});
}

}  // namespace htree_cuda::host

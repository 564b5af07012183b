// Numbers of the chip that several kernels name.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace htree_cuda::device {

// The largest dynamic shared memory of a CTA on SM90: 227 KB.
inline constexpr int kMaxSharedBytes = 232448;

// The mask of a warp operation in which all 32 lanes take part.
inline constexpr unsigned kFullWarp = 0xffffffffu;

// Tells the compiler that x is the same in every lane, so that x may live in a uniform register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kFullWarp, x, 0); }

}  // namespace htree_cuda::device

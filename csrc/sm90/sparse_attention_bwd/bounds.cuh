// The power of two that the integers of a key row's sum are multiples of, from the bounds that prepare.cuh gives each
// query. These kernels know neither element type nor head dimension, so that launch.cu alone compiles them.
#pragma once

#include <cstdint>

#include "config.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

inline constexpr int kBoundsThreads = 256;
// Exponents: of a bound that is zero, and of one that is not finite.
inline constexpr int kNoExponent = -(1 << 20);
inline constexpr int kBrokenExponent = 1 << 20;
// Sums stay below 2^61, which leaves room for what rounding adds.
inline constexpr int kSumBits = 61;

// An integer e with x <= 2^e. What may overflow float32 counts as not finite: the products could give infinities, which
// no integer stands for.
__device__ __forceinline__ int exponent_above(double x) {
  if (!(x < 0x1p127)) return kBrokenExponent;
  if (x == 0.0) return kNoExponent;
  return ilogb(x) + 1;
}

// The largest contribution of each key row, and how many there are; a block a query.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) bounds_kernel(__grid_constant__ KernelParams const p) {
  int const row = blockIdx.x;
  int const b = row / p.s_q;
  int const s = row - b * p.s_q;
  int const length = slots::length(p, b, s);
  int const visible = slots::visible(p, b, s);
  double2 const query = p.query_bounds[row];
  int const* const list = slots::list(p, b, s);
  for (int slot = threadIdx.x; slot < length; slot += kThreads) {
    int const index = list[slot * p.indices_stride_t];
    if (static_cast<unsigned>(index) >= static_cast<unsigned>(visible)) continue;
    int64_t const at = static_cast<int64_t>(b) * p.s_kv + index;
    atomicMax(p.exponents + at, exponent_above(query.x * p.norms[at] + query.y));
    atomicAdd(p.counts + at, 1);
  }
}

// The factor of each key row, a power of two, and which rows are not finite.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) factors_kernel(__grid_constant__ KernelParams const p) {
  int64_t const at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= static_cast<int64_t>(p.B) * p.s_kv) return;
  int const exponent = p.exponents[at];
  int const bits = 32 - __clz(p.counts[at]);  // there are less than 2^bits
  p.factors[at] = exp2f(static_cast<float>(min(max(kSumBits - exponent - bits, -126), 127)));
  p.broken[at] = exponent == kBrokenExponent;
}

}  // namespace htree_cuda::sm90::sparse_attention_bwd

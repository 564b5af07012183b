// Two neighbouring 16-bit elements in one register, and reductions over the four lanes that share a row of a fragment.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "elements.cuh"
#include "ptx.cuh"
#include "sm90.cuh"

namespace htree_cuda::device {

template <class Element>
struct Pairs;

template <>
struct Pairs<__half> {
  static __device__ float2 unpack(uint32_t x) { return __half22float2(*reinterpret_cast<half2 const*>(&x)); }
  static __device__ uint32_t pack(float lo, float hi) {
    half2 const x = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t const*>(&x);
  }
  static __device__ void mma(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_fp16(c, a, b0, b1);
  }
};

template <>
struct Pairs<__nv_bfloat16> {
  static __device__ float2 unpack(uint32_t x) {
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 const*>(&x));
  }
  static __device__ uint32_t pack(float lo, float hi) {
    __nv_bfloat162 const x = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t const*>(&x);
  }
  static __device__ void mma(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_bf16(c, a, b0, b1);
  }
};

template <>
struct Pairs<cutlass::half_t> : Pairs<__half> {};

template <>
struct Pairs<cutlass::bfloat16_t> : Pairs<__nv_bfloat16> {};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

}  // namespace htree_cuda::device

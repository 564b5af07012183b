// Warpgroup matrix multiplication on 64 x 64 x 16 tiles of 16-bit elements with float32 sums, over the atoms that
// CUTLASS wraps. Operands in shared memory are K-major panels of 64 elements a row, 128-byte swizzle (gather.cuh).
#pragma once

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <utility>

#include "ptx.cuh"

namespace htree_cuda::wgmma {

// Thread t of a warpgroup (warp w = t / 32, lane l) holds of a 64 x 64 result, for block j of eight columns:
//   acc[4 j + 0..1]  row 16 w + l / 4,      columns 8 j + 2 (l % 4) + 0..1
//   acc[4 j + 2..3]  row 16 w + l / 4 + 8,  the same columns
inline constexpr int kAccumulators = 32;
// Elements along the contraction that one instruction takes.
inline constexpr int kDepth = 16;

template <class Element>
struct Atom;

template <>
struct Atom<cutlass::bfloat16_t> {
  using RS = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;
  using SS = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;
};

template <>
struct Atom<cutlass::half_t> {
  using RS = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;
  using SS = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;
};

// Matrix descriptor of a K-major operand with the 128-byte swizzle: the start address in units of 16 bytes, 1024 bytes
// between groups of eight rows, layout type 1. A step of kDepth elements moves the address by 32 bytes.
struct Descriptor {
  uint32_t low;

  Descriptor() = default;
  __device__ __forceinline__ explicit Descriptor(uint32_t shared_address) : low(((shared_address >> 4) & 0x3fffu) | (1u << 16)) {}
  __device__ __forceinline__ uint64_t at(int byte_offset) const {
    constexpr uint64_t kHigh = (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
    return kHigh | (low + static_cast<uint32_t>(byte_offset >> 4));
  }
};

namespace detail {

template <class Mma, size_t... I>
__device__ __forceinline__ void rs(float (&acc)[kAccumulators], uint32_t const (&a)[4], uint64_t b, bool accumulate,
                                   std::index_sequence<I...>) {
  Mma::fma(a[0], a[1], a[2], a[3], b, acc[I]...,
           accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

template <class Mma, size_t... I>
__device__ __forceinline__ void ss(float (&acc)[kAccumulators], uint64_t a, uint64_t b, bool accumulate,
                                   std::index_sequence<I...>) {
  Mma::fma(a, b, acc[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

}  // namespace detail

// acc (+)= A B^T, A in registers: 64 x 16, this thread's fragment in the order of ldmatrix.x4.
template <class Element>
__device__ __forceinline__ void mma_rs(float (&acc)[kAccumulators], uint32_t const (&a)[4], uint64_t b, bool accumulate) {
  detail::rs<typename Atom<Element>::RS>(acc, a, b, accumulate, std::make_index_sequence<kAccumulators>{});
}

// The same with A in shared memory.
template <class Element>
__device__ __forceinline__ void mma_ss(float (&acc)[kAccumulators], uint64_t a, uint64_t b, bool accumulate) {
  detail::ss<typename Atom<Element>::SS>(acc, a, b, accumulate, std::make_index_sequence<kAccumulators>{});
}

// Before the first multiplication that reads registers which ordinary instructions wrote or read.
__device__ __forceinline__ void fence() { cute::warpgroup_arrive(); }
__device__ __forceinline__ void commit() { cute::warpgroup_commit_batch(); }
template <int kPending>
__device__ __forceinline__ void wait() {
  cute::warpgroup_wait<kPending>();
}

// Ties the values of `acc` to this place in the program: the compiler knows nothing of the asynchronous writes, and
// without this may read an accumulator above the wait that completes it.
__device__ __forceinline__ void pin(float (&acc)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    cute::warpgroup_fence_operand(acc[i]);
  }
}

}  // namespace htree_cuda::wgmma

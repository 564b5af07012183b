// Warpgroup matrix multiplication of 16-bit elements with float32 sums, over the atoms that CUTLASS wraps: 64 rows and
// as many columns as there are accumulators. Operands in shared memory are panels of 64 elements a row, 128-byte
// swizzle (gather.cuh): scores contract the columns of a panel (K-major), values its rows (MN-major).
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>

#include <cstdint>
#include <utility>

#include "elements.cuh"
#include "ptx.cuh"
#include "wgmma_layout.cuh"

namespace htree_cuda::device::wgmma {

using cute::SM90::GMMA::Major;

// The instructions for an element of both operands, kCount accumulators and the major dimension of B.
template <class Element, int kCount, Major kMajor>
struct Atom;

template <>
struct Atom<cutlass::bfloat16_t, 32, Major::K> {
  using RS = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::K>;
  using SS = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::K>;
};

template <>
struct Atom<cutlass::half_t, 32, Major::K> {
  using RS = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<Major::K, Major::K>;
  using SS = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<Major::K, Major::K>;
};

template <>
struct Atom<cutlass::bfloat16_t, 16, Major::K> {
  using SS = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_SS<Major::K, Major::K>;
};

template <>
struct Atom<cutlass::half_t, 16, Major::K> {
  using SS = cute::SM90::GMMA::MMA_64x32x16_F32F16F16_SS<Major::K, Major::K>;
};

template <>
struct Atom<cutlass::bfloat16_t, 8, Major::MN> {
  using SST = cute::SM90::GMMA::MMA_64x16x16_F32BF16BF16_SS<Major::MN, Major::MN>;
};

template <>
struct Atom<cutlass::half_t, 8, Major::MN> {
  using SST = cute::SM90::GMMA::MMA_64x16x16_F32F16F16_SS<Major::MN, Major::MN>;
};

template <>
struct Atom<cutlass::bfloat16_t, 16, Major::MN> {
  using SS = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_SS<Major::K, Major::MN>;
  using SST = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_SS<Major::MN, Major::MN>;
};

template <>
struct Atom<cutlass::half_t, 16, Major::MN> {
  using SS = cute::SM90::GMMA::MMA_64x32x16_F32F16F16_SS<Major::K, Major::MN>;
  using SST = cute::SM90::GMMA::MMA_64x32x16_F32F16F16_SS<Major::MN, Major::MN>;
};

template <>
struct Atom<cutlass::bfloat16_t, 32, Major::MN> {
  using RS = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::MN>;
  using SST = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<Major::MN, Major::MN>;
};

template <>
struct Atom<cutlass::half_t, 32, Major::MN> {
  using RS = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<Major::K, Major::MN>;
  using SST = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<Major::MN, Major::MN>;
};

template <>
struct Atom<cutlass::bfloat16_t, 64, Major::MN> {
  using RS = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<Major::K, Major::MN>;
};

template <>
struct Atom<cutlass::half_t, 64, Major::MN> {
  using RS = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_RS<Major::K, Major::MN>;
};

template <>
struct Atom<cutlass::bfloat16_t, 128, Major::MN> {
  using RS = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_RS<Major::K, Major::MN>;
  using SS = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<Major::K, Major::MN>;
};

template <>
struct Atom<cutlass::half_t, 128, Major::MN> {
  using RS = cute::SM90::GMMA::MMA_64x256x16_F32F16F16_RS<Major::K, Major::MN>;
  using SS = cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<Major::K, Major::MN>;
};

template <>
struct Atom<cutlass::bfloat16_t, 64, Major::K> {
  using SS = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<Major::K, Major::K>;
};

template <>
struct Atom<cutlass::half_t, 64, Major::K> {
  using SS = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<Major::K, Major::K>;
};

// 32 elements along the contraction: the same 32 bytes.
template <>
struct Atom<cutlass::float_e4m3_t, 64, Major::K> {
  using SS = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>;
};

template <>
struct Atom<cutlass::float_e4m3_t, 32, Major::K> {
  using SS = cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<>;
};

// Matrix descriptor of an operand with the 128-byte swizzle: the start address in units of 16 bytes, 1024 bytes between
// groups of eight rows, layout type 1. K-major: a step of kDepth elements moves the address by 32 bytes. MN-major: the
// rows are what is contracted, a step of kDepth rows moves the address by 2048 bytes, and the panels of 64 columns lie
// `panel_bytes` apart, a distance that a K-major operand does not use.
struct Descriptor {
  uint32_t low;

  Descriptor() = default;
  __device__ __forceinline__ explicit Descriptor(uint32_t shared_address, uint32_t panel_bytes = 16)
      : low(((shared_address >> 4) & 0x3fffu) | (panel_bytes >> 4 << 16)) {}
  __device__ __forceinline__ uint64_t at(int byte_offset) const {
    constexpr uint64_t kHigh = (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
    return kHigh | (low + static_cast<uint32_t>(byte_offset >> 4));
  }
};

namespace detail {

template <class Mma, size_t... I>
__device__ __forceinline__ void rs(float (&acc)[sizeof...(I)], uint32_t const (&a)[4], uint64_t b, bool accumulate,
                                   std::index_sequence<I...>) {
  Mma::fma(a[0], a[1], a[2], a[3], b, acc[I]...,
           accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

template <class Mma, size_t... I>
__device__ __forceinline__ void ss(float (&acc)[sizeof...(I)], uint64_t a, uint64_t b, bool accumulate,
                                   std::index_sequence<I...>) {
  Mma::fma(a, b, acc[I]..., accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

}  // namespace detail

// acc (+)= A B^T (Major::K) or A B (Major::MN). A is 64 x 16 and lies in registers: this thread's fragment in the order
// of ldmatrix.x4.
template <class Element, Major kMajor = Major::K, int kCount>
__device__ __forceinline__ void mma_rs(float (&acc)[kCount], uint32_t const (&a)[4], uint64_t b, bool accumulate) {
  detail::rs<typename Atom<Element, kCount, kMajor>::RS>(acc, a, b, accumulate, std::make_index_sequence<kCount>{});
}

// The same product with A in shared memory.
template <class Element, Major kMajor = Major::K, int kCount>
__device__ __forceinline__ void mma_ss(float (&acc)[kCount], uint64_t a, uint64_t b, bool accumulate) {
  detail::ss<typename Atom<Element, kCount, kMajor>::SS>(acc, a, b, accumulate, std::make_index_sequence<kCount>{});
}

// acc (+)= A^T B, both in shared memory with the contracted dimension as rows.
template <class Element, int kCount>
__device__ __forceinline__ void mma_ss_transposed(float (&acc)[kCount], uint64_t a, uint64_t b, bool accumulate) {
  detail::ss<typename Atom<Element, kCount, Major::MN>::SST>(acc, a, b, accumulate, std::make_index_sequence<kCount>{});
}

// Comes before the first multiplication that reads registers which ordinary instructions wrote or read.
__device__ __forceinline__ void fence() { cute::warpgroup_arrive(); }
__device__ __forceinline__ void commit() { cute::warpgroup_commit_batch(); }
template <int kPending>
__device__ __forceinline__ void wait() {
  cute::warpgroup_wait<kPending>();
}

// Ties the values of `acc` to this place in the program. The compiler knows nothing of asynchronous writes: without
// this it may read an accumulator above the wait that completes it, or overwrite an operand that is read until then.
template <class T, int kCount>
__device__ __forceinline__ void pin(T (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    cute::warpgroup_fence_operand(acc[i]);
  }
}

}  // namespace htree_cuda::device::wgmma

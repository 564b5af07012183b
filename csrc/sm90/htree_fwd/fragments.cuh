// Products of mma.sync in a selected layer: operands as they lie in the ring, and exponents of what comes out.
#pragma once

#include "rope_inplace.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_fwd {

// One 16-byte load a lane gives the operands of two products, 16 columns of keys or 16 columns of values. One address
// serves all of a block, and the rest is a constant.
inline constexpr int kFragmentBytes = 512;

// The address of the first slot of a query mask that is not empty.
template <class Cfg>
__device__ __forceinline__ uint32_t slot_of(uint32_t stage, uint32_t query_mask) {
  return stage + (Cfg::kHalfSelected ? query_mask & Cfg::kSlotMask : __ffs(query_mask) - 1) * Cfg::kSlotBytes;
}

// The query mask without its first slot.
template <class Cfg>
__device__ __forceinline__ uint32_t rest_of(uint32_t query_mask) {
  return Cfg::kHalfSelected ? query_mask >> 8 : query_mask & (query_mask - 1);
}

__device__ __forceinline__ void fill(float (&products)[2][4], float value) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) products[tile][e] = value;
  }
}

__device__ __forceinline__ void load_fragment(uint32_t (&b)[4], uint32_t address) {
  uint4 const x = ptx::load_shared_16B(address);
  b[0] = x.x, b[1] = x.y, b[2] = x.z, b[3] = x.w;
}

template <class Cfg>
__device__ __forceinline__ void load_keys(State<Cfg> const& s, uint32_t (&b)[4], uint32_t slot, int i) {
  load_fragment(b, slot + s.rope.fragment_lane + Cfg::kKeyOffset + i * kFragmentBytes);
}

template <class Cfg>
__device__ __forceinline__ void multiply_keys(State<Cfg>& s, float (&products)[2][4], uint32_t const (&b)[4], int i) {
  auto const& a = reinterpret_cast<uint32_t const(&)[4]>(rotated(s)[i]);
  ptx::mma_fp16(products[0], a, b[0], b[1]);
  ptx::mma_fp16(products[1], a, b[2], b[3]);
}

template <class Cfg>
__device__ __forceinline__ uint32_t scales_of(uint32_t slot) { return slot + Cfg::kScaleOffset; }

// Exponents from products, relative to the reference.
template <class Cfg>
__device__ __forceinline__ void exponents_of_products(State<Cfg> const& s, Factors const& factors,
                                                      float const (&products)[2][4], float (&x)[2][4]) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[tile][e] = exponent_of_product(s, e / 2, products[tile][e], factors);
  }
}

// Whether an exponent of this thread exceeds kSlack, so that a maximum has to be updated, or is NaN.
__device__ __forceinline__ bool overflows(float const (&x)[2][4]) {
  float largest[2];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    largest[tile] =
        ptx::max_or_nan(ptx::max_or_nan(x[tile][0], x[tile][1]), ptx::max_or_nan(x[tile][2], x[tile][3]));
  }
  return !(ptx::max_or_nan(largest[0], largest[1]) <= kSlack);
}

template <class Cfg>
__device__ __forceinline__ void exponents_of_scores(State<Cfg> const& s, float const (&raw)[2][4], float (&x)[2][4]) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[tile][e] = exponent(s, e / 2, raw[tile][e]);
  }
}

template <class Cfg>
__device__ __forceinline__ void release_stage(State<Cfg> const& s, uint32_t stage) {
  barriers::release(stage + Cfg::kEmptyOffset);
}

}  // namespace htree_cuda::sm90::htree_fwd

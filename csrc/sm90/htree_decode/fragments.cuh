// Rows of keys, values and queries as operands of m16n8k8 in tf32, read from global memory in 16-byte chunks.
//
// A lane is lane = 4 g + t. Keys: it holds chunks t, t + 4, ... of the rows g and g + 8 of a block, so that both elements
// of a rotated pair (m, m + K / 2) are its own; products contract pair s of all lanes at step s. Values: it holds chunks g
// and g + 8 of the rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9; tile i of O^T has, in row g, element i of the lane's
// elements, and in row g + 8 element i + kDimTiles. Queries: heads g and g + 8, as keys.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device/ptx.cuh"
#include "config.cuh"
#include "layer.cuh"

namespace htree_cuda::sm90::htree_decode {

// Two neighbouring elements of 16 bits.
__device__ __forceinline__ float2 unpack(uint32_t x, __nv_bfloat16) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack(uint32_t x, __half) {
  return __half22float2(reinterpret_cast<half2 const&>(x));
}

__device__ __forceinline__ uint32_t word_of(uint4 const& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// Element i of a row's chunks, where i is known to the compiler.
template <class Element, int kChunks>
__device__ __forceinline__ float element(uint4 const (&chunks)[kChunks], int i) {
  float2 const two = unpack(word_of(chunks[i / 8], i % 8 / 2), Element{});
  return i % 2 ? two.y : two.x;
}

// An operand in tf32. The tensor cores cut 13 bits, which would make every product too small. Rotated fp16 elements, which
// have as many bits as tf32, are rounded. Rotated bf16 elements are cut after they were multiplied by kUnbias, with their
// rotation and at no cost: the error has no mean, and four times as small a spread as rounding to bf16 has. An element that
// was not rotated stays what it was.
template <class Element>
__device__ __forceinline__ uint32_t operand(float x) {
  if constexpr (std::is_same_v<Element, __half>) return ptx::round_tf32(x);
  return __float_as_uint(x);
}
template <class Element>
inline constexpr float kUnbias = std::is_same_v<Element, __half> ? 1.0f : 1.0f + 1.0f / 3072.0f;  // 1 + 2^-11 / 1.5

// The heads of a query, rotated, in shared memory: every lane of a warp keeps its own there, and no other lane reads them.
// Pair s of head tile i is element s % 4 of `of_lane[(i * kPairs / 2 + s / 4) * 32]` (the low one) and of the float4
// kPairs / 4 * 32 behind it (the high one). Heads that do not exist are zeros.
template <class Cfg>
struct Query {
  float4* of_lane;

  __device__ __forceinline__ Query(float4* queries, int warp)
      : of_lane(queries + warp * Cfg::kQueryVectors * 32 + threadIdx.x % 32) {}

  __device__ __forceinline__ float4& low(int i, int s) const { return of_lane[(i * (Cfg::kPairs / 2) + s / 4) * 32]; }
  __device__ __forceinline__ float4& high(int i, int s) const {
    return of_lane[(i * (Cfg::kPairs / 2) + Cfg::kPairs / 4 + s / 4) * 32];
  }

  // `given`: the heads as they are, in shared memory. `angles` is the row of the table of the position by which they rotate.
  __device__ __forceinline__ void load(uint4 const* given, float2 const* angles) {
    using Element = typename Cfg::Element;
    int const lane = threadIdx.x % 32;
    constexpr int kOctets = Cfg::kPairs / 8;
    float4 angle[Cfg::kPairs / 2];
#pragma unroll
    for (int i = 0; i < Cfg::kPairs / 2; ++i) {
      angle[i] = __ldg(reinterpret_cast<float4 const*>(angles) + 4 * (lane % 4) + 16 * (i / 4) + i % 4);
    }
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
      uint4 const* const row = given + (lane / 4 + 8 * i) * (Cfg::kK / 8) + lane % 4;
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        uint4 const chunks[2] = {row[4 * octet], row[4 * (octet + kOctets)]};
#pragma unroll
        for (int s = 0; s < 8; s += 4) {
          float x[4], y[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float4 const& two = angle[(8 * octet + s + e) / 2];
            x[e] = element<Element>(chunks, s + e);
            y[e] = element<Element>(chunks, s + e + 8);
            rotate(x[e], y[e], e % 2 ? two.z : two.x, e % 2 ? two.w : two.y);
            x[e] *= kUnbias<Element>;
            y[e] *= kUnbias<Element>;
          }
          low(i, 8 * octet + s) = {x[0], x[1], x[2], x[3]};
          high(i, 8 * octet + s) = {y[0], y[1], y[2], y[3]};
        }
      }
    }
  }

  static __device__ __forceinline__ void rotate(float& x, float& y, float cos, float sin) {
    float const low = x;
    x = low * cos - y * sin;
    y = low * sin + y * cos;
  }
};

// 8 elements of a row of the query; `vectors`: 16 bytes may be read at once.
__device__ __forceinline__ uint4 load_query_chunk(void const* row, int chunk, bool vectors) {
  if (vectors) return __ldg(static_cast<uint4 const*>(row) + chunk);
  std::uint16_t const* const x = static_cast<std::uint16_t const*>(row) + 8 * chunk;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __ldg(x + 2 * i) | static_cast<uint32_t>(__ldg(x + 2 * i + 1)) << 16;
  return {words[0], words[1], words[2], words[3]};
}

// What a lane holds of the 16 keys of a block.
template <class Cfg>
struct Keys {
  static constexpr int kOctets = Cfg::kPairs / 8;
  uint4 rows[2][Cfg::kKeyChunks];

  // Where the lane's two rows lie. Rows from `count` on are zeros and are not read.
  struct Source {
    char const* from[2];
    int count;

    __device__ __forceinline__ Source(int count_, BlockAddress<Cfg::kK> const& address) : count(count_) {
      int const lane = threadIdx.x % 32;
      int const candidates[2] = {lane / 4, lane / 4 + 8};
      address.rows(candidates, from);
      from[0] += lane % 4 * 16;
      from[1] += lane % 4 * 16;
    }
  };

  // The two chunks of a row that hold eight pairs; interleaved ones are separated when they are used.
  __device__ __forceinline__ void load(Source const& source, int octet, Pairing const& pairing) {
    int2 offset = {64 * octet, 64 * (octet + kOctets)};
    if constexpr (!Cfg::kHalves) {
      int const t = threadIdx.x % 4;
      int2 const chunks = pair_chunks(pairing, t + 4 * octet, Cfg::kK / 8);
      offset = {(chunks.x - t) * 16, (chunks.y - t) * 16};
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool const reads = static_cast<int>(threadIdx.x % 32) / 4 + 8 * i < source.count;
      rows[i][octet] = ptx::load_global_once_if(reads, source.from[i] + offset.x);
      rows[i][octet + kOctets] = ptx::load_global_once_if(reads, source.from[i] + offset.y);
    }
  }

  // Products with the query: s[tile][e] of candidate 8 tile + 2 t + e % 2 and head g + 8 (e / 2). The query rotates back
  // by a step as it passes. `rotations`: the lane's part of the table's row g in shared memory, `step` of that of the step.
  // Chunks that are done make room for those of the `next` block, which are on their way while the rest is multiplied.
  __device__ __forceinline__ void multiply(Query<Cfg> const& q, float4 const* rotations, float4 const* step,
                                           Source const& next, Pairing const& pairing, float (&s)[2][4]) {
    using Element = typename Cfg::Element;
    float sums[2][2][4] = {};  // of even and odd pairs: shorter chains of products
#pragma unroll
    for (int four = 0; four < Cfg::kPairs; four += 4) {
      __syncwarp();  // what the next four pairs need is loaded when the last four are done: registers are scarce
      if constexpr (!Cfg::kHalves) {
        if (four % 8 == 0 && pairing.interleaved) {
#pragma unroll
          for (int i = 0; i < 2; ++i) separate_pairs(rows[i][four / 8], rows[i][four / 8 + kOctets]);
        }
      }
      uint32_t a[4][4] = {};
      float4 const back[2] = {step[2 * four], step[2 * four + 4]};
#pragma unroll
      for (int i = 0; i < Cfg::kHeadTiles; ++i) {
        float4 const low = q.low(i, four);
        float4 const high = q.high(i, four);
        float x[4] = {low.x, low.y, low.z, low.w};
        float y[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          a[e][i] = operand<Element>(x[e]);
          a[e][2 + i] = operand<Element>(y[e]);
          float4 const angle = back[e / 2];
          Query<Cfg>::rotate(x[e], y[e], e % 2 ? angle.z : angle.x, e % 2 ? -angle.w : -angle.y);
        }
        q.low(i, four) = {x[0], x[1], x[2], x[3]};
        q.high(i, four) = {y[0], y[1], y[2], y[3]};
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float4 const angle = rotations[8 * tile * (Cfg::kRotationStride / 2) + (four + e) / 2 * 4];
          float low = element<Element>(rows[tile], four + e);
          float high = element<Element>(rows[tile], four + e + Cfg::kPairs);
          Query<Cfg>::rotate(low, high, e % 2 ? angle.z : angle.x, e % 2 ? angle.w : angle.y);
          ptx::mma_tf32(sums[e % 2][tile], a[e], operand<Element>(low), operand<Element>(high));
        }
      }
      if (four % 8 == 4) load(next, four / 8, pairing);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[tile][e] = sums[0][tile][e] + sums[1][tile][e];
    }
  }
};

// What a lane holds of the 16 values of a block.
template <class Cfg>
struct Values {
  uint4 rows[4][Cfg::kValueChunks];

  // Rows that are not `attended` (bit c) are zeros and are not read: what they hold may not be finite.
  __device__ __forceinline__ void load(uint32_t attended, BlockAddress<Cfg::kV> const& address) {
    int const lane = threadIdx.x % 32;
    int const first = 2 * (lane % 4);
    int const candidates[4] = {first, first + 1, first + 8, first + 9};
    char const* from[4];
    address.rows(candidates, from);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int c = 0; c < Cfg::kValueChunks; ++c) {
        rows[i][c] = ptx::load_global_once_if(attended >> candidates[i] & 1u, from[i] + lane / 4 * 16 + 128 * c);
      }
    }
  }

  // Adds P of the block: p[tile][e] as the products of Keys have it, in tf32.
  __device__ __forceinline__ void add(uint32_t const (&p)[2][4], float (&o)[Cfg::kHeadTiles][Cfg::kDimTiles][4]) const {
    using Element = typename Cfg::Element;
#pragma unroll
    for (int tile = 0; tile < Cfg::kDimTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto const value = [&](int row, int i) { return __float_as_uint(element<Element>(rows[2 * half + row], i)); };
        uint32_t const a[4] = {value(0, tile), value(0, tile + Cfg::kDimTiles), value(1, tile),
                               value(1, tile + Cfg::kDimTiles)};
#pragma unroll
        for (int i = 0; i < Cfg::kHeadTiles; ++i) ptx::mma_tf32(o[i][tile], a, p[half][2 * i], p[half][2 * i + 1]);
      }
    }
  }

  // The dimension that row g (i < kDimTiles) or row g + 8 of tile i % kDimTiles of O^T stands for.
  static __device__ __forceinline__ int dimension(int i, int g) { return i / 8 * 64 + 8 * g + i % 8; }
};

}  // namespace htree_cuda::sm90::htree_decode

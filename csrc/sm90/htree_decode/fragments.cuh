// Rows of keys, values and queries as operands of m16n8k8 in tf32, read from global memory in 16-byte chunks.
//
// A lane is lane = 4 g + t. Keys: it holds chunks t, t + 4, ... of the rows g and g + 8 of a block, so that both elements
// of a rotated pair (m, m + K / 2) are its own; products contract pair s of all lanes at step s. Queries: head g (and
// g + 8), as keys. Values: of a half of the dimensions it holds chunks as of keys, which are transposed when they are used.
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

// x and y, a rotated pair, by an angle. Roundings are spelt out: every kernel that scores a block has the same.
__device__ __forceinline__ void rotate(float& x, float& y, float cos, float sin) {
  float const low = x;
  x = fmaf(low, cos, -__fmul_rn(y, sin));
  y = fmaf(low, sin, __fmul_rn(y, cos));
}

// The heads of a query, rotated: pairs of head g + 8 i. Heads that do not exist are zeros.
template <class Cfg>
struct Query {
  float low[Cfg::kHeadTiles][Cfg::kPairs];
  float high[Cfg::kHeadTiles][Cfg::kPairs];

  // `given`: the heads as they are, in shared memory. `angles` is the row of the table of the position by which they rotate.
  __device__ __forceinline__ void load(uint4 const* given, float2 const* angles) {
    using Element = typename Cfg::Element;
    int const lane = lane_of_warp();
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
        for (int s = 0; s < 8; ++s) {
          float4 const& two = angle[(8 * octet + s) / 2];
          float x = element<Element>(chunks, s);
          float y = element<Element>(chunks, s + 8);
          rotate(x, y, s % 2 ? two.z : two.x, s % 2 ? two.w : two.y);
          low[i][8 * octet + s] = __fmul_rn(x, kUnbias<Element>);
          high[i][8 * octet + s] = __fmul_rn(y, kUnbias<Element>);
        }
      }
    }
  }

  // Rotates back by a step, as multiply does. `step`: as there.
  __device__ __forceinline__ void pass(float4 const* step) {
#pragma unroll
    for (int pair = 0; pair < Cfg::kPairs; ++pair) {
      if (pair % 4 == 0) __syncwarp();  // registers are scarce: see multiply
      float4 const back = step[pair / 2 * 4];
#pragma unroll
      for (int i = 0; i < Cfg::kHeadTiles; ++i) {
        rotate(low[i][pair], high[i][pair], pair % 2 ? back.z : back.x, -(pair % 2 ? back.w : back.y));
      }
    }
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
  static constexpr int kAtOnce = 4;  // pairs
  uint4 rows[2][Cfg::kKeyChunks];

  // Where the lane's two rows lie, of those of a block. Rows from `count` on are zeros and are not read.
  struct Source {
    char const* from[2];
    int count;

    __device__ __forceinline__ Source(int count_, char const* keys, uint32_t const* rows) : count(count_) {
      int const lane = lane_of_warp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        from[i] = keys + static_cast<std::int64_t>(rows[lane / 4 + 8 * i]) * (2 * Cfg::kK) + lane % 4 * 16;
      }
    }
  };

  // The two chunks of a row that hold eight pairs; interleaved ones are separated when they are used.
  __device__ __forceinline__ void load(Source const& source, int octet, Pairing const& pairing) {
    int2 offset = {64 * octet, 64 * (octet + kOctets)};
    if constexpr (!Cfg::kHalves) {
      int const t = lane_of_warp() % 4;
      int2 const chunks = pair_chunks(pairing, t + 4 * octet, Cfg::kK / 8);
      offset = {(chunks.x - t) * 16, (chunks.y - t) * 16};
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool const reads = lane_of_warp() / 4 + 8 * i < source.count;
      rows[i][octet] = ptx::load_global_once_if(reads, source.from[i] + offset.x);
      rows[i][octet + kOctets] = ptx::load_global_once_if(reads, source.from[i] + offset.y);
    }
  }

  // Products with the query: s[i][e] of candidate g + 8 (e / 2) and head 8 i + 2 t + e % 2. The query rotates back by a
  // step as it passes. `rotations`: the lane's part of the table's row g in shared memory, `step` of that of the step.
  // Chunks that are done make room for others, which are on their way while the rest is multiplied: the second octet of this
  // block, whose Source is here(), then the first of the next one, whose Source is next(). Each is loaded when the other one
  // has arrived: loads share a scoreboard, so that whoever waits for one waits for all.
  template <class Here, class Next>
  __device__ __forceinline__ void multiply(Query<Cfg>& q, float4 const* rotations, float4 const* step, Here const& here, Next const& next,
                                           Pairing const& pairing, float (&s)[Cfg::kHeadTiles][4]) {
    using Element = typename Cfg::Element;
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][e] = 0.0f;
    }
#pragma unroll
    for (int first = 0; first < Cfg::kPairs; first += kAtOnce) {
      __syncwarp();  // what the next pairs need is loaded when the last ones are done: registers are scarce
      if constexpr (!Cfg::kHalves) {
        if (first % 8 == 0 && pairing.interleaved) {
#pragma unroll
          for (int i = 0; i < 2; ++i) separate_pairs(rows[i][first / 8], rows[i][first / 8 + kOctets]);
        }
      }
#pragma unroll
      for (int pair = first; pair < first + kAtOnce; ++pair) {
        auto const cos = [&](float4 const& two) { return pair % 2 ? two.z : two.x; };
        auto const sin = [&](float4 const& two) { return pair % 2 ? two.w : two.y; };
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float4 const angle = rotations[8 * i * (Cfg::kRotationStride / 2) + pair / 2 * 4];
          float low = element<Element>(rows[i], pair);
          float high = element<Element>(rows[i], pair + Cfg::kPairs);
          rotate(low, high, cos(angle), sin(angle));
          a[i] = operand<Element>(low);
          a[2 + i] = operand<Element>(high);
        }
        float4 const back = step[pair / 2 * 4];
#pragma unroll
        for (int i = 0; i < Cfg::kHeadTiles; ++i) {
          ptx::mma_tf32(s[i], a, operand<Element>(q.low[i][pair]), operand<Element>(q.high[i][pair]));
          rotate(q.low[i][pair], q.high[i][pair], cos(back), -sin(back));
        }
      }
      if (kOctets == 2 && first == 0) load(here(), 1, pairing);
      if (first == (kOctets == 2 ? 8 : Cfg::kPairs - kAtOnce)) load(next(), 0, pairing);
    }
  }
};

// What a lane holds of a half of the 16 values of a block: of its rows g and g + 8 chunks t, t + 4, ... of the half. Eight lanes
// that the SM serves at once meet in two lines. Lanes that read what they multiply would meet in four.
template <class Cfg>
struct Values {
  static constexpr int kChunks = Cfg::kV / 64;
  uint4 rows[2][kChunks] = {};  // a value of nobody would stay alive wherever loops lead

  // Rows that are not `attended` (bit c: candidate c) are zeros and are not read: what they hold may not be finite.
  // `values`: the lane's first chunk of row 0 of the cache's tensor. `places`: of the block's candidates, from the lane's on.
  __device__ __forceinline__ void load(uint32_t attended, char const* values, uint32_t const* places) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool const wanted = attended >> (lane_of_warp() / 4 + 8 * i) & 1u;
      auto const* const from = reinterpret_cast<uint4 const*>(values + static_cast<std::int64_t>(places[8 * i]) * (2 * Cfg::kV));
#pragma unroll
      for (int c = 0; c < kChunks; ++c) rows[i][c] = wanted ? __ldcg(from + 4 * c) : uint4{0, 0, 0, 0};
    }
  }

  // Adds P of the block: p[i] of candidates 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, and head g + 8 i. Transposed, a word of the lane's
  // has two candidates of a dimension: tile 2 c + w / 2 has words w and w + 1 of chunks c in rows g and g + 8.
  __device__ __forceinline__ void add(float4 const (&p)[Cfg::kHeadTiles],
                                      float (&o)[Cfg::kHeadTiles][Cfg::kSideTiles][4]) const {
    using Element = typename Cfg::Element;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
          float2 const first = unpack(ptx::transpose_matrix(word_of(rows[i][c], w)), Element{});
          float2 const second = unpack(ptx::transpose_matrix(word_of(rows[i][c], w + 1)), Element{});
          uint32_t const a[4] = {__float_as_uint(first.x), __float_as_uint(second.x), __float_as_uint(first.y),
                                 __float_as_uint(second.y)};
#pragma unroll
          for (int n = 0; n < Cfg::kHeadTiles; ++n) {
            ptx::mma_tf32(o[n][2 * c + w / 2], a, __float_as_uint(i == 0 ? p[n].x : p[n].z),
                          __float_as_uint(i == 0 ? p[n].y : p[n].w));
          }
        }
      }
    }
  }
};

}  // namespace htree_cuda::sm90::htree_decode

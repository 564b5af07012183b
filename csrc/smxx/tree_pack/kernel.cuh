// Packing a layer for the gathers of htree attention: for every (b, h_kv, parent) one contiguous block
//
//   [scales 16 x float | keys 16 x K fp16 | values 16 x V]
//
// in which one bulk copy finds everything about 16 siblings. `by_node`, for queries that walk all parents, four of them
// lie together,
//
//   [scales 64 x float | keys K / 64 panels of 64 x 64 fp16 | values V / 64 panels of 64 x 64]
//
// the panels as WGMMA takes them. Keys are turned by their place c among the siblings, or by the node's index (RoPE in
// float32), normalised by a power of two, rounded once, to fp16 or where nothing is selected to the dtype, and brought
// to one scale a parent unless they differ much (rope::uneven_scale); the elements of a pair become neighbours
// (rope::tile_of); values are copied. Rows are swizzled: 16-byte chunk i of row c lies at chunk i ^ (c % 8) of its 128
// bytes, so that ldmatrix reads them without bank conflicts.
// Children beyond the end of the layer are zeros. A key with a non-finite element is NaN throughout, so that its score
// is NaN whatever the query. Values that are not finite (the mean of finite ones may overflow) become zeros, because
// probabilities of zero multiply them too, and all scales of their parent have the sign of negative numbers, so that
// who takes such a value notices. Memory bound: a warp a parent, 16-byte accesses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/overlap.cuh"
#include "../../device/chunk.cuh"
#include "../../device/forward_steps.h"

namespace htree_cuda::packing {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kMaxK = 128;

template <class Element, int kK>
__global__ void __launch_bounds__(kThreads) tree_pack_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  constexpr int kLanesPerRow = kK / 16;  // a lane has 8 pairs: a chunk of the low half and one of the high half
  constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  int const lane = threadIdx.x % 32;
  std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (block >= args.blocks) return;
  std::int64_t parent = block % args.parents_per_head;
  if (args.lists.nodes != nullptr) {
    std::int64_t const list = block / args.lists.per_block;
    std::int64_t const entry = block % args.lists.per_block;
    if (entry >= args.lists.counts[list]) return;
    std::int32_t* const node = args.lists.nodes + list * args.lists.stride + entry;
    parent = *node;
    block += args.lists.begin * args.lists.per_block;
    __syncwarp();
    if (lane == 0) *node = static_cast<std::int32_t>(block % args.parents_per_head);
  }
  std::int64_t const bh = block / args.parents_per_head;
  std::int64_t const b = bh / args.H_kv;
  std::int64_t const h = bh % args.H_kv;
  std::int64_t const first = parent * kSiblings;
  int const children = static_cast<int>(min(args.N - first, static_cast<std::int64_t>(kSiblings)));
  // Where this parent's part of its tile is, and how its keys are spread there.
  int const together = args.by_node ? kTileParents : 1;
  int const slot = static_cast<int>(block % together);
  int const key_bytes = kSiblings * kK * 2;
  int const key_row_bytes = args.by_node ? 128 : 2 * kK;
  int const value_row_bytes = args.by_node ? 128 : 2 * args.v.dim;
  int const panel_bytes = args.by_node ? kTileParents * kSiblings * 128 : 128;
  char* const tile = args.packed + (block - slot) * args.block_bytes;
  float* const scales = reinterpret_cast<float*>(tile) + slot * kSiblings;
  char* const keys = tile + together * kSiblings * 4 + slot * kSiblings * key_row_bytes;
  char* const values = tile + together * (kSiblings * 4 + key_bytes) + slot * kSiblings * value_row_bytes;
  auto const chunk_of = [&](char* rows, int bytes, int c, int chunk) {
    return reinterpret_cast<uint4*>(rows + chunk / 8 * panel_bytes + c * bytes) + (chunk % 8 ^ c % 8);
  };
  auto const row_of = [&](Source const& x, int c) {
    return static_cast<Element const*>(x.in) + b * x.stride_b + (first + c) * x.stride_n + h * x.stride_h;
  };

  int const chunks = args.v.dim / 8;
  bool finite_values = true;
  for (int i = lane; i < kSiblings * chunks; i += 32) {
    int const c = i / chunks;
    int const chunk = i % chunks;
    uint4 x = {0, 0, 0, 0};
    if (c < children) x = load_chunk(row_of(args.v, c), chunk, args.v.vectors);
    float elements[8];
    to_float<Element>(x, elements);
    uint32_t(&words)[4] = reinterpret_cast<uint32_t(&)[4]>(x);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (isfinite(elements[e])) continue;
      finite_values = false;
      words[e / 2] &= e % 2 ? 0x0000ffffu : 0xffff0000u;
    }
    *chunk_of(values, value_row_bytes, c, chunk) = x;
  }
  finite_values = __all_sync(0xffffffffu, finite_values);
  if (!finite_values && lane == 0) atomicOr(args.spoilt, 1);

  constexpr int kSteps = kSiblings / kRowsAtOnce;
  int const chunk = lane % kLanesPerRow;
  uint4 words[kSteps][2];
  int exponents[kSteps];
  bool finite[kSteps];
  int largest_exponent = rope::kNoExponent;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int const c = step * kRowsAtOnce + lane / kLanesPerRow;
    words[step][0] = words[step][1] = {0, 0, 0, 0};
    if (c < children) {
      Element const* const row = row_of(args.k, c);
      words[step][0] = load_chunk(row, chunk, args.k.vectors);
      words[step][1] = load_chunk(row, chunk + kLanesPerRow, args.k.vectors);
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    float lo[8], hi[8];
    to_float<Element>(words[step][0], lo);
    to_float<Element>(words[step][1], hi);
    float largest = 0.0f;
    bool all = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      all &= isfinite(lo[i]) && isfinite(hi[i]);
      largest = fmaxf(largest, fmaxf(fabsf(lo[i]), fabsf(hi[i])));
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanesPerRow; lanes *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
      all &= __shfl_xor_sync(0xffffffffu, static_cast<int>(all), lanes) != 0;
    }
    finite[step] = all;
    exponents[step] = all && largest > 0.0f ? rope::row_exponent(largest) : rope::kNoExponent;
    largest_exponent = max(largest_exponent, exponents[step]);
  }
#pragma unroll
  for (int lanes = kLanesPerRow; lanes < 32; lanes *= 2) {
    largest_exponent = max(largest_exponent, __shfl_xor_sync(0xffffffffu, largest_exponent, lanes));
  }
  largest_exponent = largest_exponent == rope::kNoExponent ? 0 : max(largest_exponent, rope::kLeastShared);
  bool even = true;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (exponents[step] == rope::kNoExponent) exponents[step] = largest_exponent;
    even &= largest_exponent - exponents[step] <= rope::kEven;
  }
  even = __all_sync(0xffffffffu, even);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int const c = step * kRowsAtOnce + lane / kLanesPerRow;
    float lo[8], hi[8];
    to_float<Element>(words[step][0], lo);
    to_float<Element>(words[step][1], hi);
    rope::KeyScale const scale = rope::key_scale(exponents[step]);
    int const below = rope::kEven - (largest_exponent - exponents[step]);
    half2 const lift = __float2half2_rn(even ? rope::power_of_two(below) : 1.0f);
    // Positions beyond the last node are nobody's: their keys are zeros.
    std::int64_t const position = args.by_node ? first + min(c, children - 1) : c;
    float4 const* const turns = reinterpret_cast<float4 const*>(args.turns + position * (kK / 2) + 8 * chunk);
    alignas(16) half2 turned[2][4];  // pairs 8 chunk + 2 i, and those between them
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float4 const two = __ldg(turns + i / 2);
      float2 const turn = i % 2 ? float2{two.z, two.w} : float2{two.x, two.y};
      float const x = lo[i] * scale.factor;
      float const y = hi[i] * scale.factor;
      float const nan = __int_as_float(0x7fffffff);
      float const low = finite[step] ? x * turn.x - y * turn.y : nan;
      float const high = finite[step] ? x * turn.y + y * turn.x : nan;
      half2 const pair =
          __floats2half2_rn(rounded<Element>(low, args.as_inputs), rounded<Element>(high, args.as_inputs));
      turned[i % 2][i / 2] = __hmul2(lift, pair);
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      *chunk_of(keys, key_row_bytes, c, rope::tile_of(chunk, odd)) = *reinterpret_cast<uint4 const*>(turned[odd]);
    }
    float const size = even ? rope::power_of_two(largest_exponent - rope::kHeadroom - rope::kEven) : scale.scale;
    float const signed_scale = finite_values ? size : -size;
    if (chunk == 0) scales[c] = c == 0 && !even ? rope::uneven_scale(signed_scale) : signed_scale;
  }
}

// What a turn, seen as a complex number, is multiplied by where ranks follow: see rope::TurnColumns. `step`: of a rank.
__device__ __forceinline__ double2 compensated(double2 turn, double2 step, int period) {
  double const c = __half2float(__double2half(step.x));
  double const s = __half2float(__double2half(step.y));
  // The rounded step backwards, of the exact one: 1 but for 2^-10 at most, so that two terms of each series are enough.
  double const x = c * step.x + s * step.y;
  double const y = c * step.y - s * step.x;
  double const ranks = -0.5 * (period - 1);
  double const excess = x * x + y * y - 1.0;
  double const length = 1.0 + 0.5 * ranks * excess * (1.0 + 0.5 * (0.5 * ranks - 1.0) * excess);
  double const tangent = y / x;
  double const angle = ranks * (tangent - tangent * tangent * tangent / 3.0);
  double const cosine = length * (1.0 - 0.5 * angle * angle);
  double const sine = length * (angle - angle * angle * angle / 6.0);
  return {turn.x * cosine - turn.y * sine, turn.x * sine + turn.y * cosine};
}

// A thread has four pairs, those of one entry of fragment_turns.
static __global__ void __launch_bounds__(kThreads)
    turns_kernel(float2* turns, rope::Turns* fragment_turns, QueryTurns query_turns, std::int64_t positions, int K,
                 double base, int* zero) {
  wait_for_previous_grid();
  std::int64_t const i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  int const entries = K / 8;
  if (i == 0 && zero != nullptr) *zero = 0;
  if (i >= positions * entries) return;
  std::int64_t const position = i / entries;
  int const entry = static_cast<int>(i % entries);
  rope::Turns fragment;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const m = entry / 4 * 16 + entry % 4 * 2 + half * 8;
    double const frequencies[2] = {rope::frequency(m, K, base), rope::frequency(m + 1, K, base)};
    double2 const x = rope::turn(position, frequencies[0]);
    double2 const y = rope::turn(position, frequencies[1]);
    fragment.cos[half] = half2(__double2half(x.x), __double2half(y.x));
    fragment.sin[half] = half2(__double2half(x.y), __double2half(y.y));
    *reinterpret_cast<float4*>(turns + position * (K / 2) + m) = {
        static_cast<float>(x.x), static_cast<float>(x.y), static_cast<float>(y.x), static_cast<float>(y.y)};
    if (query_turns.begin == nullptr) continue;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      double2 const step = rope::turn(kSiblings, frequencies[odd]);
      auto const write = [&](rope::TurnColumns* table, double2 turn) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          table[(entry % 4 * 2 + g) * (K / 32) + entry / 4].tile[rope::tile_of(half, odd)] = rope::turn_column(turn, g);
        }
      };
      write(query_turns.begin + position * (K / 4), compensated(odd ? y : x, step, query_turns.period));
      if (position == 0) write(query_turns.step, step);
    }
  }
  if (fragment_turns != nullptr) fragment_turns[i] = fragment;
}

}  // namespace htree_cuda::packing

// Packing a layer for the gathers of htree attention: for every (b, h_kv, parent) one contiguous KV block
//
//   [scales 16 x float | keys 16 x K fp16 | values 16 x V]
//
// so that one bulk copy brings everything about 16 siblings. Keys and values are fragments: 512 bytes for every 16
// columns, in which 16 bytes of each lane are that lane's part of the operands B of two m16n8k16 products. With
// `tiles`, for queries that read all blocks, four blocks lie together,
//
//   [scales 64 x float | keys K / 64 panels of 64 x 64 fp16 | values V / 64 panels of 64 x 64]
//
// and the panels are operands of WGMMA: 16-byte chunk i of row c lies at chunk i ^ (c % 8) of its 128 bytes.
//
// Keys are rotated, in float32, by their place c among the siblings or by the index of their node, scaled by a power of
// two, and rounded once: to fp16, or to the dtype where nothing is selected. Then they are brought to one scale a
// block, unless their scales differ much (row_scale::uneven_scale). The elements of a pair become neighbours
// (rope::tile_of).
//
// Children past the end of the layer are zeros. A key with a non-finite element is NaN throughout, so that its score is
// NaN whatever the query. Values that are not finite (the mean of finite ones may overflow) become zeros, because
// probabilities of zero multiply them too; all scales of their block are then negative, so that a query that attends
// such a value notices.
//
// Memory bound: a warp packs one block, by accesses of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "namespaces.h"
#include "device/sm90.cuh"
#include "host/launch_overlapped.cuh"
#include "tree/row_chunk.cuh"
#include "tree/row_scale.cuh"
#include "tree/pack.h"

namespace htree_cuda::tree::pack {

using namespace host;
using namespace device;

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;

// Where the 16 bytes of lane 4 g + t lie among the fragments of columns 16 step .. 16 step + 15.
__device__ __forceinline__ uint4* fragment(char* fragments, int step, int g, int t) {
  return reinterpret_cast<uint4*>(fragments) + step * 32 + 4 * g + t;
}

// Stores rows of keys as operands B. Lane 4 g + t has columns 16 step + {0, 8} + 2 t + {0, 1}, in words (row g, 0), (g,
// 8), (g + 8, 0), (g + 8, 8). rows[i] holds chunk `chunk`, one of the two chunks of the step, of row first + i *
// rows_at_once; the lane beside this one has the other chunk.
template <int kRows>
__device__ __forceinline__ void store_key_fragments(char* keys, int step, int chunk, int first, int rows_at_once,
                                                    uint32_t const (&rows)[kRows][4]) {
  bool const second = chunk % 2;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
#pragma unroll
    for (int word = 0; word < 4; word += 2) {  // Either lane keeps every other word of a row and sends the rest.
      int const t = word + second;
      uint32_t own[2], other[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const(&row)[4] = rows[i + half * kRows / 2];
        own[half] = second ? row[word + 1] : row[word];
        other[half] = __shfl_xor_sync(kFullWarp, second ? row[word] : row[word + 1], 1);
      }
      *fragment(keys, step, first + i * rows_at_once, t) =
          second ? uint4{other[0], own[0], other[1], own[1]} : uint4{own[0], other[0], own[1], other[1]};
    }
  }
}

// Stores rows of keys as operands A. In step `chunk`, columns 2 t + {0, 1} are the first elements of pairs
// 8 chunk + 2 t + {0, 1} and columns 8 + 2 t + {0, 1} are the second ones, in words (row g, 0), (g + 8, 0), (g, 8),
// (g + 8, 8). pairs[odd][i][t] holds both elements of pair 8 chunk + 2 t + odd of row first + i * rows_at_once.
template <int kRows>
__device__ __forceinline__ void store_key_rows(char* keys, int chunk, int first, int rows_at_once,
                                               uint32_t const (&pairs)[2][kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint32_t const low[2] = {pairs[0][i][t], pairs[1][i][t]};
      uint32_t const high[2] = {pairs[0][i + kRows / 2][t], pairs[1][i + kRows / 2][t]};
      *fragment(keys, chunk, first + i * rows_at_once, t) = {
          __byte_perm(low[0], low[1], 0x5410), __byte_perm(high[0], high[1], 0x5410),
          __byte_perm(low[0], low[1], 0x7632), __byte_perm(high[0], high[1], 0x7632)};
    }
  }
}

// Element e of x and element e of y, in one word.
__device__ __forceinline__ uint32_t pair_of(uint4 const& x, uint4 const& y, int e) {
  uint32_t const(&a)[4] = reinterpret_cast<uint32_t const(&)[4]>(x);
  uint32_t const(&b)[4] = reinterpret_cast<uint32_t const(&)[4]>(y);
  return __byte_perm(a[e / 2], b[e / 2], e % 2 ? 0x7632 : 0x5410);
}

// Replaces elements that are not finite by zeros. Returns whether all were finite.
template <class Element>
__device__ __forceinline__ bool clear_not_finite(uint4& chunk) {
  float elements[8];
  to_float<Element>(chunk, elements);
  uint32_t(&words)[4] = reinterpret_cast<uint32_t(&)[4]>(chunk);
  bool finite = true;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (isfinite(elements[e])) continue;
    finite = false;
    words[e / 2] &= e % 2 ? 0x0000ffffu : 0xffff0000u;
  }
  return finite;
}

// kOperandsA: fragments are operands A, for products whose rows are children (swap A/B).
template <class Element, int kK, bool kOperandsA>
__global__ void __launch_bounds__(kThreads) tree_pack_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  constexpr int kLanesPerRow = kK / 16;  // a lane has 8 pairs: a chunk of the first half and one of the second half
  constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  int const lane = threadIdx.x % 32;
  std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (block >= args.blocks) return;
  std::int64_t parent = block % args.blocks_per_head;
  if (args.lists.nodes != nullptr) {
    std::int64_t list = block / args.lists.per_block;
    std::int64_t entry = block % args.lists.per_block;
    if (list < args.lists.sets.to) {
      int const place = args.lists.sets.place_of(args.lists.tiles, static_cast<int>(list));
      list -= place;
      entry += place * args.lists.per_block;
    }
    if (entry >= args.lists.counts[list]) return;
    parent = args.lists.nodes[list * args.lists.stride + entry];
    block += args.lists.tiles.begin * args.lists.per_block;
    if (lane == 0) {
      args.lists.places[list * args.lists.stride + entry] = static_cast<std::int32_t>(block % args.blocks_per_head);
    }
  }
  std::int64_t const bh = block / args.blocks_per_head;
  std::int64_t b = bh / args.H_kv;
  std::int64_t h = bh % args.H_kv;
  // Where the block lies in its tile, and how its rows are spread there.
  int const together = args.tiles ? kTileBlocks : 1;
  std::int64_t N = args.N;
  std::int64_t k_row = 0;
  std::int64_t v_row = 0;
  if (args.sequences != nullptr) {
    std::int32_t const own = sequence_at(args.sequence_count, parent, [&](std::int32_t i) {
      return sequence_blocks(args.sequences[i].before, i, args.layer, together, args.log2_from);
    });
    Sequence const sequence = args.sequences[own];
    int const shift = kLog2Siblings * args.layer;
    N = min(N, (sequence.keys + (std::int64_t(1) << shift) - 1) >> shift);
    parent -= sequence_blocks(sequence.before, own, args.layer, together, args.log2_from);
    // Tiles are read as a whole, but at the bottom without the blocks that do not exist (sm90/htree_fwd/producer.cuh).
    int const whole = args.layer == 0 ? 1 : together;
    if (parent < 0 || parent / whole * whole * kSiblings >= N || !has_room(sequence, args.log2_from)) return;
    h = bh;
    b = own;
    k_row = args.k.first_row(sequence, own);
    v_row = args.v.first_row(sequence, own);
  }
  std::int64_t const first = parent * kSiblings;
  int const children = static_cast<int>(min(N - first, static_cast<std::int64_t>(kSiblings)));
  int const slot = static_cast<int>(block % together);
  char* const tile = args.packed + (block - slot) * args.block_bytes;
  float* const scales = reinterpret_cast<float*>(tile) + slot * kSiblings;
  char* const keys = tile + together * kSiblings * 4;
  char* const values = keys + together * kSiblings * kK * 2;
  auto const chunk_of = [&](char* panels, int c, int chunk) {
    constexpr int kPanelBytes = kTileBlocks * kSiblings * 128;
    char* const row = panels + chunk / 8 * kPanelBytes + (slot * kSiblings + c) * 128;
    return reinterpret_cast<uint4*>(row) + (chunk % 8 ^ c % 8);
  };
  auto const value_chunk = [&](int c, int chunk) -> uint4 {
    if (c >= children) return {0, 0, 0, 0};
    Element const* const row = static_cast<Element const*>(args.v.in) + b * args.v.stride_b +
                               (v_row + first + c) * args.v.stride_n + h * args.v.stride_h;
    return load_chunk(row, chunk, args.v.vectors);
  };

  int const chunks = args.v.dim / 8;
  bool finite_values = true;
  if (args.tiles) {
    for (int i = lane; i < kSiblings * chunks; i += 32) {
      uint4 x = value_chunk(i / chunks, i % chunks);
      finite_values &= clear_not_finite<Element>(x);
      *chunk_of(values, i / chunks, i % chunks) = x;
    }
  } else {
    // Lane 4 g + t gets rows 2 t + {0, 1, 8, 9} of columns 16 step + g + {0, 8}, in words (0, 1; 0), (8, 9; 0), (0, 1;
    // 8), (8, 9; 8). Operands A have the second word behind the third.
    for (int i = lane; i < chunks / 2 * 4; i += 32) {
      int const step = i / 4;
      int const t = i % 4;
      uint4 x[4][2];
#pragma unroll
      for (int row = 0; row < 4; ++row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          x[row][half] = value_chunk(2 * t + row % 2 + row / 2 * 8, 2 * step + half);
        }
      }
#pragma unroll
      for (int row = 0; row < 4; ++row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) finite_values &= clear_not_finite<Element>(x[row][half]);
      }
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        uint32_t const low = pair_of(x[2][0], x[3][0], g), high = pair_of(x[0][1], x[1][1], g);
        *fragment(values, step, g, t) = {pair_of(x[0][0], x[1][0], g), kOperandsA ? high : low,
                                         kOperandsA ? low : high, pair_of(x[2][1], x[3][1], g)};
      }
    }
  }
  finite_values = __all_sync(kFullWarp, finite_values);
  if (!finite_values && lane == 0) atomicOr(args.has_nonfinite_v, 1);

  constexpr int kSteps = kSiblings / kRowsAtOnce;
  int const chunk = lane % kLanesPerRow;
  uint4 words[kSteps][2];
  int exponents[kSteps];
  bool finite[kSteps];
  int largest_exponent = row_scale::kNoExponent;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int const c = step * kRowsAtOnce + lane / kLanesPerRow;
    words[step][0] = words[step][1] = {0, 0, 0, 0};
    if (c < children) {
      Element const* const row = static_cast<Element const*>(args.k.in) + b * args.k.stride_b +
                                 (k_row + first + c) * args.k.stride_n + h * args.k.stride_h;
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
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, lanes));
      all &= __shfl_xor_sync(kFullWarp, static_cast<int>(all), lanes) != 0;
    }
    finite[step] = all;
    exponents[step] = all && largest > 0.0f ? row_scale::row_exponent(largest) : row_scale::kNoExponent;
    largest_exponent = max(largest_exponent, exponents[step]);
  }
#pragma unroll
  for (int lanes = kLanesPerRow; lanes < 32; lanes *= 2) {
    largest_exponent = max(largest_exponent, __shfl_xor_sync(kFullWarp, largest_exponent, lanes));
  }
  largest_exponent = largest_exponent == row_scale::kNoExponent ? 0 : max(largest_exponent, row_scale::kMinShared);
  bool even = true;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (exponents[step] == row_scale::kNoExponent) exponents[step] = largest_exponent;
    even &= largest_exponent - exponents[step] <= row_scale::kEven;
  }
  even = __all_sync(kFullWarp, even);
  alignas(16) uint32_t rotated[2][kSteps][4];  // pairs 8 chunk + 2 i, then pairs 8 chunk + 2 i + 1
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int const c = step * kRowsAtOnce + lane / kLanesPerRow;
    float lo[8], hi[8];
    to_float<Element>(words[step][0], lo);
    to_float<Element>(words[step][1], hi);
    row_scale::KeyScale const scale = row_scale::key_scale(exponents[step]);
    int const below = row_scale::kEven - (largest_exponent - exponents[step]);
    half2 const lift = __float2half2_rn(even ? row_scale::power_of_two(below) : 1.0f);
    // A child past the last node has no position; its key is zeros, so that any rotation serves.
    std::int64_t const position = args.by_node ? first + min(c, children - 1) : c;
    float4 const* const rotations = reinterpret_cast<float4 const*>(args.rotations + position * (kK / 2) + 8 * chunk);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float4 const two = __ldg(rotations + i / 2);
      float2 const rotation = i % 2 ? float2{two.z, two.w} : float2{two.x, two.y};
      float const x = lo[i] * scale.factor;
      float const y = hi[i] * scale.factor;
      float const nan = __int_as_float(0x7fffffff);
      float const low = finite[step] ? x * rotation.x - y * rotation.y : nan;
      float const high = finite[step] ? x * rotation.y + y * rotation.x : nan;
      half2 const pair =
          __floats2half2_rn(rounded<Element>(low, args.as_inputs), rounded<Element>(high, args.as_inputs));
      half2 const lifted = __hmul2(lift, pair);
      rotated[i % 2][step][i / 2] = reinterpret_cast<uint32_t const&>(lifted);
    }
    float const size =
        even ? row_scale::power_of_two(largest_exponent - row_scale::kHeadroom - row_scale::kEven) : scale.scale;
    float const signed_scale = finite_values ? size : -size;
    if (chunk == 0) scales[c] = c == 0 && !even ? row_scale::uneven_scale(signed_scale) : signed_scale;
  }
  if constexpr (kOperandsA) {
    store_key_rows<kSteps>(keys, chunk, lane / kLanesPerRow, kRowsAtOnce, rotated);
  } else {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      int const column = rope::tile_of(chunk, odd);
      if (args.tiles) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          uint4* const to = chunk_of(keys, step * kRowsAtOnce + lane / kLanesPerRow, column);
          *to = *reinterpret_cast<uint4 const*>(rotated[odd][step]);
        }
      } else {
        store_key_fragments<kSteps>(keys, column / 2, chunk, lane / kLanesPerRow, kRowsAtOnce, rotated[odd]);
      }
    }
  }
}

// A rotation as a complex number, times a factor that takes back half of the error of the rotations that follow it
// (rope::RotationColumns). The query is then rotated in place by the inverse of `step`, rounded to fp16.
__device__ __forceinline__ double2 compensated(double2 rotation, double2 step, int period) {
  double const c = __half2float(__double2half(step.x));
  double const s = __half2float(__double2half(step.y));
  // The rounded inverse step relative to the exact one differs from 1 by 2^-10 at most, so that two terms of each
  // series are enough.
  double const x = c * step.x + s * step.y;
  double const y = c * step.y - s * step.x;
  double const ranks = -0.5 * (period - 1);
  double const excess = x * x + y * y - 1.0;
  double const length = 1.0 + 0.5 * ranks * excess * (1.0 + 0.5 * (0.5 * ranks - 1.0) * excess);
  double const tangent = y / x;
  double const angle = ranks * (tangent - tangent * tangent * tangent / 3.0);
  double const cosine = length * (1.0 - 0.5 * angle * angle);
  double const sine = length * (angle - angle * angle * angle / 6.0);
  return {rotation.x * cosine - rotation.y * sine, rotation.x * sine + rotation.y * cosine};
}

// A thread computes four pairs, which are one entry of fragment_rotations.
static __global__ void __launch_bounds__(kThreads)
    rotations_kernel(float2* rotations, rope::FragmentRotations* fragment_rotations, QueryRotations query_rotations,
                     std::int64_t positions, int K, rope::Frequencies of, int* zero) {
  wait_for_previous_grid();
  std::int64_t const i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  int const entries = K / 8;
  if (i == 0 && zero != nullptr) *zero = 0;
  if (i >= positions * entries) return;
  std::int64_t const position = i / entries;
  int const entry = static_cast<int>(i % entries);
  rope::FragmentRotations fragment;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const m = entry / 4 * 16 + entry % 4 * 2 + half * 8;
    double const frequencies[2] = {rope::frequency(m, K, of), rope::frequency(m + 1, K, of)};
    double2 const x = rope::rotation(position, frequencies[0]);
    double2 const y = rope::rotation(position, frequencies[1]);
    fragment.cos[half] = half2(__double2half(x.x), __double2half(y.x));
    fragment.sin[half] = half2(__double2half(x.y), __double2half(y.y));
    *reinterpret_cast<float4*>(rotations + position * (K / 2) + m) = {
        static_cast<float>(x.x), static_cast<float>(x.y), static_cast<float>(y.x), static_cast<float>(y.y)};
    if (query_rotations.step == nullptr) continue;
    if (query_rotations.packed_restart != nullptr) {
      double2 const steps[2] = {rope::rotation(kSiblings, frequencies[0]), rope::rotation(kSiblings, frequencies[1])};
      auto const write = [&](rope::PackedRotations* table, double2 first, double2 second) {
        table[entry % 4 * (K / 16) + m / 8] = {half2(__double2half(first.x), __double2half(second.x)),
                                               half2(__double2half(first.y), __double2half(second.y))};
      };
      if (position < query_rotations.restarts) {
        write(query_rotations.packed_restart + position * (K / 4), compensated(x, steps[0], query_rotations.period),
              compensated(y, steps[1], query_rotations.period));
      }
      if (position == 0) write(query_rotations.packed_step, steps[0], steps[1]);
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      double2 const step = rope::rotation(kSiblings, frequencies[odd]);
      auto const write = [&](rope::RotationColumns* table, double2 rotation) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          table[(entry % 4 * 2 + g) * (K / 32) + entry / 4].tile[rope::tile_of(half, odd)] = rope::rotation_column(rotation, g);
        }
      };
      double2 const rotation = odd ? y : x;
      if (position < query_rotations.restarts) {
        write(query_rotations.begin + position * (K / 4), compensated(rotation, step, query_rotations.period));
      }
      if (position < query_rotations.forwards) {
        write(query_rotations.forward + position * (K / 4), compensated(rotation, {step.x, -step.y}, query_rotations.period));
      }
      if (position == 0) write(query_rotations.step, step);
    }
  }
  if (fragment_rotations != nullptr) fragment_rotations[i] = fragment;
}

}  // namespace htree_cuda::tree::pack

// Packing KV blocks and queries as operands of the backward's matrix products (layout.h). A warp packs one block or one
// query, by accesses of 16 bytes where the strides allow them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "device/pairs.cuh"
#include "device/sm90.cuh"
#include "host/launch_overlapped.cuh"
#include "host/math.h"
#include "pack.h"
#include "tree/row_chunk.cuh"
#include "tree/row_scale.cuh"

namespace htree_cuda::sm90::htree_bwd::pack {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;

template <class Element>
__device__ __forceinline__ Element const* row_of(Source const& x, std::int64_t b, std::int64_t n, std::int64_t h) {
  return static_cast<Element const*>(x.in) + b * x.stride_b + n * x.stride_n + h * x.stride_h;
}

// The maximum over the kLanes neighbouring lanes that share a row; below, the sum.
template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, lanes));
  return x;
}

template <int kLanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) x += __shfl_xor_sync(kFullWarp, x, lanes);
  return x;
}

// Where 16 bytes of a row lie in the panels of a tile.
__device__ __forceinline__ char* panel_chunk(char* panels, int row, int chunk) {
  return panels + chunk / 8 * kPanelBytes + row * 128 + ((chunk % 8 ^ row % 8) << 4);
}

// Packs the KV blocks of one layer. A key that is not finite becomes zeros with a NaN as its `inverse`: its score is
// then NaN whatever the query, and its product with the zero weight of a query that does not attend it is 0. Children
// past the end of the layer are zeros.
template <class Element, int kK>
__global__ void __launch_bounds__(kThreads) pack_kv_kernel(const __grid_constant__ PackKv args) {
  wait_for_previous_grid();
  constexpr int kLanesPerRow = kK / 16;  // a lane has 8 pairs: a chunk of the first half and one of the second half
  constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  int const lane = threadIdx.x % 32;
  std::int64_t const block = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (block >= args.blocks) return;
  std::int64_t const head = args.first_head + block / args.blocks_per_head;
  std::int64_t b = head / args.H_kv;
  std::int64_t const h = head % args.H_kv;
  std::int64_t first = block % args.blocks_per_head * kSiblings;
  std::int64_t N = args.N;
  std::int64_t begin = 0;  // the row of the layer's first node
  if (args.sequences != nullptr) {
    int const together = args.in_tiles ? kTileBlocks : 1;
    std::int32_t const own = sequence_at(args.sequence_count, first / kSiblings, [&](std::int32_t i) {
      return sequence_blocks(args.sequences[i].before, i, args.layer, together, args.log2_from);
    });
    Sequence const sequence = args.sequences[own];
    int const shift = kLog2Siblings * args.layer;
    N = min(N, (sequence.keys + (std::int64_t(1) << shift) - 1) >> shift);
    first -= sequence_blocks(sequence.before, own, args.layer, together, args.log2_from) * kSiblings;
    if (first < 0 || first / (together * kSiblings) * (together * kSiblings) >= N) return;
    if (!has_room(sequence, args.log2_from)) return;
    b = args.batch ? own : 0;
    begin = args.batch        ? 0
            : args.layer == 0 ? sequence.key
                              : sequence_nodes(sequence.before, own, args.layer, args.log2_from);
  }
  int const children = static_cast<int>(min(N - first, static_cast<std::int64_t>(kSiblings)));
  // The block has an operand of its own, or 16 rows of each panel of its tile.
  int const slot = static_cast<int>(block % kTileBlocks);
  char* const packed = args.in_tiles ? args.packed + block / kTileBlocks * kv_tile_bytes(kK, args.V)
                                    : args.packed + block * (kBlockHeader + operand_bytes(kK, args.V));
  float* const inverse = reinterpret_cast<float*>(packed) + (args.in_tiles ? slot * kSiblings : 0);
  char* const keys = packed + (args.in_tiles ? kKvTileHeader : kBlockHeader);
  char* const values = keys + (args.in_tiles ? kTileRows : kSiblings) * kK * 2;
  auto const chunk_of = [&](char* rows, int dim, int c, int chunk) {
    return reinterpret_cast<uint4*>(args.in_tiles ? panel_chunk(rows, slot * kSiblings + c, chunk)
                                                 : rows + c * dim * 2 + ((chunk ^ (c % 8)) << 4));
  };

#pragma unroll
  for (int step = 0; step < kSiblings / kRowsAtOnce; ++step) {
    int const c = step * kRowsAtOnce + lane / kLanesPerRow;
    int const chunk = lane % kLanesPerRow;
    float lo[8] = {}, hi[8] = {};
    if (c < children) {
      Element const* const row = row_of<Element>(args.k, b, begin + first + c, h);
      to_float<Element>(load_chunk(row, chunk, args.k.vectors, args.k.stride_d), lo);
      to_float<Element>(load_chunk(row, chunk + kLanesPerRow, args.k.vectors, args.k.stride_d), hi);
    }
    float largest = 0.0f;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      finite &= isfinite(lo[i]) && isfinite(hi[i]);
      largest = fmaxf(largest, fmaxf(fabsf(lo[i]), fabsf(hi[i])));
    }
    finite = lanes_max<kLanesPerRow>(finite ? 0.0f : 1.0f) == 0.0f;
    row_scale::RowScale const scale = row_scale::row_scale(lanes_max<kLanesPerRow>(largest));
    // A child past the end of the layer has no position; its key is zeros, so that any rotation serves.
    std::int64_t const position = args.in_tiles && c < children ? first + c : c;
    float4 const* const rotations = reinterpret_cast<float4 const*>(args.rotations + position * (kK / 2) + 8 * chunk);
    alignas(16) half rotated_lo[8], rotated_hi[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float4 const two = __ldg(rotations + i / 2);
      float const cosine = i % 2 ? two.z : two.x;
      float const sine = i % 2 ? two.w : two.y;
      float const x = lo[i] * scale.factor;
      float const y = hi[i] * scale.factor;
      rotated_lo[i] = __float2half_rn(finite ? rounded<Element>(x * cosine - y * sine, args.as_inputs) : 0.0f);
      rotated_hi[i] = __float2half_rn(finite ? rounded<Element>(x * sine + y * cosine, args.as_inputs) : 0.0f);
    }
    *chunk_of(keys, kK, c, chunk) = *reinterpret_cast<uint4 const*>(rotated_lo);
    *chunk_of(keys, kK, c, chunk + kLanesPerRow) = *reinterpret_cast<uint4 const*>(rotated_hi);
    if (args.keys != nullptr) {  // not scaled, since bf16 has the range of the inputs
      uint32_t key_lo[4], key_hi[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float4 const two = __ldg(rotations + i);
        float const(&x)[2] = reinterpret_cast<float(&)[2]>(lo[2 * i]);
        float const(&y)[2] = reinterpret_cast<float(&)[2]>(hi[2 * i]);
        key_lo[i] = Pairs<__nv_bfloat16>::pack(x[0] * two.x - y[0] * two.y, x[1] * two.z - y[1] * two.w);
        key_hi[i] = Pairs<__nv_bfloat16>::pack(x[0] * two.y + y[0] * two.x, x[1] * two.w + y[1] * two.z);
        key_lo[i] = finite ? key_lo[i] : 0;
        key_hi[i] = finite ? key_hi[i] : 0;
      }
      uint4* const row = reinterpret_cast<uint4*>(args.keys + (block * kSiblings + c) * kK * 2);
      row[chunk ^ (c % 8)] = {key_lo[0], key_lo[1], key_lo[2], key_lo[3]};
      row[(chunk + kLanesPerRow) ^ (c % 8)] = {key_hi[0], key_hi[1], key_hi[2], key_hi[3]};
    }
    if (chunk == 0) inverse[c] = finite ? scale.inverse : __int_as_float(0x7fffffff);
  }

  int const chunks = args.V / 8;
  for (int i = lane; i < kSiblings * chunks; i += 32) {
    int const c = i / chunks;
    int const chunk = i % chunks;
    uint4 x = {0, 0, 0, 0};
    if (c < children) x = load_chunk(row_of<Element>(args.v, b, begin + first + c, h), chunk, args.v.vectors, args.v.stride_d);
    *chunk_of(values, args.V, c, chunk) = x;
  }
}

// Lane i keeps the number of head i. The heads pass by kRows at a time, in `step`, each in 32 / kRows lanes.
template <int kRows>
__device__ __forceinline__ void keep(float& kept, float x, int step, int lane) {
  float const passed = __shfl_sync(kFullWarp, x, lane % kRows * (32 / kRows));
  if (lane / kRows == step) kept = passed;
}

// Packs the queries of a chunk, both ways. Heads past G are zeros with lse2 = +inf, so that their probabilities are 0.
// A row of q or dout that is not finite becomes zeros with a NaN as lse2: its products are then NaN with keys that it
// attends, and 0 with all others. Queries that do not exist are packed like heads past G, and only their tiles are ever
// read.
template <class Element, int kK, int kV>
__global__ void __launch_bounds__(kThreads) pack_queries_kernel(const __grid_constant__ PackQueries args) {
  wait_for_previous_grid();
  int const lane = threadIdx.x % 32;
  std::int64_t const item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  int const row = static_cast<int>(item % args.chunk.rows);
  int const head = static_cast<int>(item / args.chunk.rows);
  if (head >= args.chunk.heads || row < args.begin || row >= args.end) return;
  std::int64_t const bh = args.chunk.first_head + head;
  std::int64_t const first = bh % args.H_kv * args.G;  // the first query head of the group
  bool exists = row < args.chunk.queries;
  std::int64_t b = bh / args.H_kv;
  std::int64_t query = args.chunk.first_query + row;
  std::int64_t t = args.chunk.position(row);
  if (args.sequences.row_tiles != nullptr) {
    sequences::Rows const own = args.sequences.rows_from(row, 1);
    exists = own.count > 0;
    b = own.sequence;
    query = own.query;
    t = own.t;
  }
  int const heads = exists ? args.G : 0;
  int const unit = unit_heads(args.G);
  char* const packed = args.packed + item * query_bytes(kK, kV, unit) + query_begin(unit);
  char* const tile = args.tiles + item / tile_queries(unit) * query_tile_bytes(kK, kV);
  int const tile_row = static_cast<int>(item % tile_queries(unit)) * unit;
  char* const panels = tile + kQueryTileHeader;
  std::int64_t const position = heads == 0 ? 0 : candidates_in_entry(t, entry_layer(t, args.tree.top_k)) - 1;

  // Lane i < 16 keeps the numbers of head i; nonfinite is 1 where a row has an element that is not finite.
  float nonfinite_dout = 0.0f, nonfinite_q = 0.0f, delta = 0.0f, inverse = 0.0f;
  {
    constexpr int kLanes = kV / 8;
    constexpr int kRows = 32 / kLanes;
    int const chunk = lane % kLanes;
#pragma unroll
    for (int step = 0; step < kMaxGroupHeads / kRows; ++step) {
      if (step * kRows >= unit) break;
      int const g = step * kRows + lane / kLanes;
      uint4 x = {0, 0, 0, 0};
      float dout[8] = {}, out[8] = {};
      if (g < heads) {
        x = load_chunk(row_of<Element>(args.dout, b, query, first + g), chunk, args.dout.vectors, args.dout.stride_d);
        to_float<Element>(x, dout);
        Element const* const row = row_of<Element>(args.out, b, query, first + g);
        to_float<Element>(load_chunk(row, chunk, args.out.vectors, args.out.stride_d), out);
      }
      float sum = 0.0f;
      bool finite = true;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        finite &= isfinite(dout[i]);
        sum = fmaf(dout[i], out[i], sum);
      }
      float const nonfinite = lanes_max<kLanes>(finite ? 0.0f : 1.0f);
      keep<kRows>(nonfinite_dout, nonfinite, step, lane);
      keep<kRows>(delta, lanes_sum<kLanes>(sum), step, lane);
      if (nonfinite != 0.0f) x = {0, 0, 0, 0};
      if (g < unit) {
        reinterpret_cast<uint4*>(packed + query_header(unit) + 2 * (unit * kK + g * kV))[chunk ^ (g % 8)] = x;
        *reinterpret_cast<uint4*>(panel_chunk(panels + kTileRows * 2 * kK, tile_row + g, chunk)) = x;
      }
    }
  }
  {
    constexpr int kLanes = kK / 8;
    constexpr int kRows = 32 / kLanes;
    int const chunk = lane % kLanes;
#pragma unroll
    for (int step = 0; step < kMaxGroupHeads / kRows; ++step) {
      if (step * kRows >= unit) break;
      int const g = step * kRows + lane / kLanes;
      float q[8] = {};
      if (g < heads) {
        Element const* const row = row_of<Element>(args.q, b, query, first + g);
        to_float<Element>(load_chunk(row, chunk, args.q.vectors, args.q.stride_d), q);
      }
      float largest = 0.0f;
      bool finite = true;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        finite &= isfinite(q[i]);
        largest = fmaxf(largest, fabsf(q[i]));
      }
      float const nonfinite = lanes_max<kLanes>(finite ? 0.0f : 1.0f);
      row_scale::RowScale const scale = row_scale::row_scale(lanes_max<kLanes>(largest));
      keep<kRows>(nonfinite_q, nonfinite, step, lane);
      keep<kRows>(inverse, scale.inverse, step, lane);
      // The other element of each pair is in the lane whose chunk is half a row away.
      bool const second_half = chunk >= kLanes / 2;
      float4 const* const rotations =
          reinterpret_cast<float4 const*>(args.rotations + position * (kK / 2) + 8 * (chunk % (kLanes / 2)));
      alignas(16) half scaled[8], rotated[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float const x = nonfinite != 0.0f ? 0.0f : q[i] * scale.factor;
        float const y = __shfl_xor_sync(kFullWarp, x, kLanes / 2);
        float4 const two = __ldg(rotations + i / 2);
        float const cosine = i % 2 ? two.z : two.x;
        float const sine = i % 2 ? two.w : two.y;
        scaled[i] = __float2half_rn(x);
        rotated[i] = __float2half_rn(second_half ? y * sine + x * cosine : x * cosine - y * sine);
      }
      if (g < unit) {
        reinterpret_cast<uint4*>(packed + query_header(unit) + g * kK * 2)[chunk ^ (g % 8)] =
            *reinterpret_cast<uint4 const*>(scaled);
        *reinterpret_cast<uint4*>(panel_chunk(panels, tile_row + g, chunk)) = *reinterpret_cast<uint4 const*>(rotated);
      }
    }
  }
  if (lane >= kMaxGroupHeads) return;
  float lse2 = __int_as_float(0x7f800000);
  if (lane < heads) {
    std::int64_t const H = static_cast<std::int64_t>(args.H_kv) * args.G;
    bool const nonfinite = nonfinite_dout != 0.0f || nonfinite_q != 0.0f;
    lse2 = nonfinite ? __int_as_float(0x7fffffff)
                     : args.lse[(b * args.T_q + query) * H + first + lane] * static_cast<float>(kLog2E);
    delta -= args.dlse[b * args.dlse_stride_b + query * args.dlse_stride_t + (first + lane) * args.dlse_stride_h];
  }
  float* const header = reinterpret_cast<float*>(packed) + lane;
  float* const tile_header = reinterpret_cast<float*>(tile) + tile_row + lane;
  float const numbers[3] = {args.scale_log2 * (1 << kHeadroom) * inverse, lse2, delta};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (lane < unit) header[i * unit] = tile_header[i * kTileRows] = numbers[i];
  }
}

}  // namespace htree_cuda::sm90::htree_bwd::pack

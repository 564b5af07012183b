// The end of a pass: the state for the layer below, or the result. A split query is merged, and values that are not
// finite reach the outputs of the queries that attended them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/pairs.cuh"
#include "host/math.h"
#include "row_map.cuh"
#include "smem.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_fwd {

// NaN for infinities: what an infinite input reached is NaN, whatever its sign and weight.
__device__ __forceinline__ float infinite_to_nan(float x) { return fmaf(x, 0.0f, x); }

// The row of args.values at which the nodes of the warp's sequence begin.
template <class Cfg>
__device__ __forceinline__ std::int64_t first_row(State<Cfg> const& s) {
  if (s.args.tiles.entries == nullptr) return 0;
  std::int32_t const sequence = s.args.tiles.entry(tile_of_warp(s)).sequence();
  return s.args.values.first_row(s.args.sequences[sequence], sequence);
}

// The ring holds zeros in the place of values that are not finite, and the sign of a block's first scale says that it
// has some. Once all is summed, the values of such a block are read where they came from, and columns of O where one is
// not finite become NaN. `row_of` is the row of this thread whose query took the block.
template <class Cfg>
__device__ __forceinline__ void propagate_nan_of_block(State<Cfg>& s, std::int64_t block, int rank, int row_of = 0) {
  QueryTile const tile = own_tile(s);
  int const last = candidates_of<Cfg>(s.args, tile.t + query_of_row(s, row_of)) - 1;
  uint32_t masked = rank == last / kSiblings ? causal_mask(last % kSiblings) : 0u;
  if (s.args.layer > 0) masked = s.args.expanded[launch_row(s, row_of) * (s.args.width / kSiblings) + rank];
  tree::pack::Source const& values = s.args.values;
  typename Cfg::Element const* const rows =
      static_cast<typename Cfg::Element const*>(values.in) + tile.bh / s.args.H_kv * values.stride_b +
      (first_row(s) + block * kSiblings) * values.stride_n + tile.bh % s.args.H_kv * values.stride_h + 2 * s.tq;
#pragma unroll 1
  for (uint32_t open = 0xffffu & ~masked; open != 0; open &= open - 1) {
    typename Cfg::Element const* const row = rows + (__ffs(open) - 1) * values.stride_n;
#pragma unroll
    for (int tile = 0; tile < Cfg::kValueTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (isfinite(static_cast<float>(row[8 * tile + e]))) continue;
        if (!Cfg::kSharesWarp || row_of == 0) s.o[tile][e] = not_a_number();
        if (!Cfg::kSharesWarp || row_of == 1) s.o[tile][2 + e] = not_a_number();
      }
    }
  }
}

template <class Cfg>
__device__ __forceinline__ void sync_consumers(State<Cfg> const& s) {
  barriers::named_sync(Cfg::kMergeBarrier, Cfg::kConsumers * 32);
}

// Where consumer `warp` leaves maximum and sum of a row's head: after an attend pass in the ring, else before it, since a score
// pass goes on to read its ring.
template <class Cfg>
__device__ __forceinline__ uint32_t merge_head_place(State<Cfg> const& s, Ring<Cfg> const& ring, int warp, int row) {
  return ring.stages + static_cast<uint32_t>(Cfg::kMergeHeadOffset + (warp * 16 + head_of_row(s, row)) * 16);
}

// Merges maximum, sum and the rightmost candidate's score of both heads over all consumers, in the order of their
// ranks, and rescales O to the maximum.
template <class Cfg>
__device__ __forceinline__ void merge_heads(State<Cfg>& s, Ring<Cfg> const& ring) {
  sync_consumers(s);  // after an attend pass no consumer reads the ring any more
  if (s.tq == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 const own = {__float_as_uint(s.max[i]), __float_as_uint(s.sum[i]), __float_as_uint(s.right[i]), 0u};
      ptx::store_shared_16B(merge_head_place(s, ring, s.warp, i), own);
    }
  }
  sync_consumers(s);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float largest = kNoLeaf;
    float sum = 0.0f;
    float right = 0.0f;
#pragma unroll 1
    for (int w = 0; w < Cfg::kConsumers; ++w) {
      uint4 const other = ptx::load_shared_16B(merge_head_place(s, ring, w, i));
      float const merged = fmaxf(largest, __uint_as_float(other.x));
      sum = sum * ptx::exp2_movable((largest - merged) * s.unit[i]) +
            __uint_as_float(other.y) * ptx::exp2_movable((__uint_as_float(other.x) - merged) * s.unit[i]);
      right += __uint_as_float(other.z);
      largest = merged;
    }
    float const factor = update_max(s, i, largest);
    s.sum[i] = sum;
    s.right[i] = right;
    if constexpr (Cfg::kReadsValues) {
#pragma unroll
      for (int tile = 0; tile < Cfg::kValueTiles; ++tile) {
        s.o[tile][2 * i] *= factor;
        s.o[tile][2 * i + 1] *= factor;
      }
    }
  }
}

// The states of several queries, each of the heads that exist, rounded up to 4 or 8.
template <class Cfg>
__device__ __forceinline__ void write_states(State<Cfg> const& s) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!row_active(s, i)) continue;
    if (s.tq == 0) s.args.state_sum[state_row(s, i) * 16 + head_of_row(s, i)] = {s.max[i], s.sum[i]};
    float* const o = state_of_row<Cfg>(s.args, state_row(s, i)) + 8 * head_of_row(s, i) + 2 * s.tq;
#pragma unroll
    for (int tile = 0; tile < Cfg::kValueTiles; ++tile) {
      *reinterpret_cast<float2*>(o + tile * 8 * Cfg::kUnitHeads) = {s.o[tile][2 * i], s.o[tile][2 * i + 1]};
    }
  }
}

template <class Cfg>
__device__ __forceinline__ void write_state(State<Cfg>& s) {
  if constexpr (Cfg::kSharesWarp) {
    write_states(s);
    return;
  }
  if (s.tq == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) s.args.state_sum[state_row(s) * 16 + head_of_row(s, i)] = {s.max[i], s.sum[i]};
  }
#pragma unroll
  for (int tile = 0; tile < Cfg::kValueTiles; ++tile) {
    s.args.state_out[(state_row(s) * Cfg::kValueTiles + tile) * 32 + s.lane] = {s.o[tile][0], s.o[tile][1],
                                                                                s.o[tile][2], s.o[tile][3]};
  }
}

// What an attention sink adds to the sum of a head, whose exponentials are relative to exp2(largest * unit).
template <class Cfg>
__device__ __forceinline__ float sink_weight(State<Cfg> const& s, int head, float largest, float unit) {
  constexpr float kLog2E = static_cast<float>(host::kLog2E);
  if (s.args.attn_sink == nullptr) return 0.0f;
  // A head that does not exist, or is of no query, writes nothing, and reads one that does.
  int const h_kv = max(static_cast<int>(own_tile(s).bh % s.args.H_kv), 0);
  float const sink = __ldg(s.args.attn_sink + h_kv * s.args.G + min(head, s.args.G - 1));
  return ptx::exp2_movable(fmaf(sink, kLog2E, -largest * unit));
}

// `inverse`: of the denominators of both heads.
template <class Cfg>
__device__ __forceinline__ void write_tile(State<Cfg> const& s, std::int64_t first, int tile, float const (&inverse)[2],
                                           float const (&o)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!has_head(s, i)) continue;
    uint32_t* const out = reinterpret_cast<uint32_t*>(static_cast<typename Cfg::Element*>(s.args.out) +
                                                      head_index(s, first, i) * Cfg::kV);
    out[4 * tile + s.tq] = Pairs<typename Cfg::Element>::pack(infinite_to_nan(o[2 * i] * inverse[i]),
                                                              infinite_to_nan(o[2 * i + 1] * inverse[i]));
  }
}

template <class Cfg>
__device__ __forceinline__ void write_lse(State<Cfg> const& s, std::int64_t first) {
  constexpr float kLn2 = static_cast<float>(host::kLn2);
  if (s.tq != 0) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!has_head(s, i)) continue;
    s.args.lse[head_index(s, first, i)] =
        infinite_to_nan(fmaf(s.max[i], s.unit[i] * kLn2, log2f(s.sum[i]) * kLn2));
  }
}

template <class Cfg>
__device__ __forceinline__ void write_result(State<Cfg> const& s, std::int64_t first, float const (&inverse)[2]) {
#pragma unroll
  for (int tile = 0; tile < Cfg::kValueTiles; ++tile) write_tile(s, first, tile, inverse, s.o[tile]);
}

// After merge_heads: O is summed over the consumers in the order of their ranks. Each consumer sums and writes some of
// its columns.
template <class Cfg>
__device__ __forceinline__ void write_merged_result(State<Cfg> const& s, Ring<Cfg> const& ring, std::int64_t first,
                                                    float const (&inverse)[2]) {
  auto const at = [&](int consumer, int tile) {
    return ring.stage(consumer / Cfg::kMergePerStage) + Cfg::kMergeOutOffset +
           consumer % Cfg::kMergePerStage * Cfg::kMergeOutBytes + (tile * 32 + s.lane) * 16;
  };
#pragma unroll
  for (int tile = 0; tile < Cfg::kValueTiles; ++tile) {
    ptx::store_shared_16B(at(s.warp, tile), {__float_as_uint(s.o[tile][0]), __float_as_uint(s.o[tile][1]),
                                            __float_as_uint(s.o[tile][2]), __float_as_uint(s.o[tile][3])});
  }
  sync_consumers(s);
#pragma unroll 1
  for (int tile = s.warp; tile < Cfg::kValueTiles; tile += Cfg::kConsumers) {
    float o[4] = {};
#pragma unroll 1
    for (int w = 0; w < Cfg::kConsumers; ++w) {
      uint4 const other = ptx::load_shared_16B(at(w, tile));
      o[0] += __uint_as_float(other.x), o[1] += __uint_as_float(other.y);
      o[2] += __uint_as_float(other.z), o[3] += __uint_as_float(other.w);
    }
    write_tile(s, first, tile, inverse, o);
  }
}

template <class Cfg>
__device__ __forceinline__ void finish_attend(State<Cfg>& s, Ring<Cfg> const& ring) {
  if (!s.active) return;
  s.sum[0] = quad_sum(s.sum[0]);
  s.sum[1] = quad_sum(s.sum[1]);
  if (s.args.layer > 0) {
    write_state(s);
    return;
  }
  bool const merges = !Cfg::kSharesWarp && split(s);
  if (merges) merge_heads(s, ring);
  std::int64_t const first = first_head(s);
  if (!merges || threadIdx.x < 32) write_lse(s, first);
  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    inverse[i] = 1.0f / (s.sum[i] + sink_weight(s, head_of_row(s, i), s.max[i], s.unit[i]));
  }
  merges ? write_merged_result(s, ring, first, inverse) : write_result(s, first, inverse);
}

}  // namespace htree_cuda::sm90::htree_fwd

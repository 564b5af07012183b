// How a consumer warp loads its queries: scaled to fp16, rotated in an entry layer, with the state that the layer above
// left.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "row_map.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_fwd {

// Queries in fragments, of operand A or with swap A/B of operand B: words[i][kk][part] holds elements 16 kk + 8 part +
// 2 tq and the next one of row i.
template <class Cfg>
using QueryWords = uint32_t[2][Cfg::kSteps][2];

// Reads the rows of q. Rows past the last head are zero.
template <class Cfg>
__device__ __forceinline__ void fetch_query(State<Cfg> const& s, QueryTile const& tile, QueryWords<Cfg>& words) {
  std::int64_t const b = tile.bh / s.args.H_kv;
  std::int64_t const h_kv = tile.bh % s.args.H_kv;
  std::uint16_t const* const base = static_cast<std::uint16_t const*>(s.args.q) + b * s.args.q_stride_b +
                                    h_kv * s.args.G * s.args.q_stride_h + 2 * s.tq;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint16_t const* const row =
        base + (tile.first + query_of_row(s, i)) * s.args.q_stride_t + head_of_row(s, i) * s.args.q_stride_h;
#pragma unroll
    for (int part = 0; part < 2 * Cfg::kSteps; ++part) words[i][part / 2][part % 2] = 0;
    if (head_of_row(s, i) >= s.args.G || !row_exists(s, tile, i)) continue;
    if (s.args.q_pairs) {
#pragma unroll
      for (int part = 0; part < 2 * Cfg::kSteps; ++part) {
        words[i][part / 2][part % 2] = __ldg(reinterpret_cast<uint32_t const*>(row + 8 * part));
      }
    } else {
#pragma unroll
      for (int part = 0; part < 2 * Cfg::kSteps; ++part) {
        uint32_t const low = __ldg(row + 8 * part);
        words[i][part / 2][part % 2] = low | static_cast<uint32_t>(__ldg(row + 8 * part + 1)) << 16;
      }
    }
  }
}

// Scales the rows to fp16. In an entry layer it rotates them by n - 1, in float32, and rounds once.
template <class Type, class Cfg>
__device__ __forceinline__ void rotate_query_of(State<Cfg>& s, QueryWords<Cfg> const& words) {
  // The rotations are on their way together with the query. Those of the second row's query are read when the first row
  // is rotated.
  float4 rotations[Cfg::kHalfSteps][2];
  auto const fetch_rotation = [&](int position) {
#pragma unroll
    for (int i = 0; i < 2 * Cfg::kHalfSteps; ++i) {
      float2 const* const pair =
          s.args.rotations + (Cfg::kSharesWarp ? max(position, 0) : position) * (Cfg::kK / 2) + 8 * i + 2 * s.tq;
      rotations[i / 2][i % 2] = __ldg(reinterpret_cast<float4 const*>(pair));
    }
  };
  if constexpr (!Cfg::kIsSelected) fetch_rotation(row_position(s, 0));
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t largest = 0;  // the bits of magnitudes compare as the magnitudes do
#pragma unroll
    for (int part = 0; part < 2 * Cfg::kSteps; ++part) {
      largest = __vmaxu2(largest, words[i][part / 2][part % 2] & 0x7fff7fffu);
    }
    float2 const two = Pairs<Type>::unpack(largest);
    row_scale::QueryScale const scale = row_scale::query_scale(quad_max(fmaxf(two.x, two.y)), s.args.scale);
    s.unit[i] = scale.unit;
    factor[i] = scale.factor;
  }
  auto const rotate_row = [&](int i, int kk, int part) {
    float4 const& rotation = rotations[kk][part];
    float2 lo = Pairs<Type>::unpack(words[i][kk][part]);
    float2 hi = Pairs<Type>::unpack(words[i][kk + Cfg::kHalfSteps][part]);
    lo.x *= factor[i], lo.y *= factor[i], hi.x *= factor[i], hi.y *= factor[i];
    if constexpr (!Cfg::kIsSelected) {
      float2 const x = lo;
      float2 const y = hi;
      lo = {x.x * rotation.x - y.x * rotation.y, x.y * rotation.z - y.y * rotation.w};
      hi = {x.x * rotation.y + y.x * rotation.x, x.y * rotation.w + y.y * rotation.z};
    }
    if constexpr (Cfg::kSwapAB) {  // the first elements of two pairs, then their second ones
      s.q[2 * kk + part][2 * i] = __floats2half2_rn(lo.x, lo.y);
      s.q[2 * kk + part][2 * i + 1] = __floats2half2_rn(hi.x, hi.y);
    } else {
      int const even = rope::tile_of(2 * kk + part, 0), odd = rope::tile_of(2 * kk + part, 1);
      s.q[even / 2][even % 2 * 2 + i] = __floats2half2_rn(lo.x, hi.x);
      s.q[odd / 2][odd % 2 * 2 + i] = __floats2half2_rn(lo.y, hi.y);
    }
  };
  if constexpr (Cfg::kSharesWarp && !Cfg::kIsSelected) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1) fetch_rotation(row_position(s, 1));
#pragma unroll
      for (int part = 0; part < 2 * Cfg::kHalfSteps; ++part) rotate_row(i, part / 2, part % 2);
    }
  } else {
#pragma unroll
    for (int part = 0; part < 2 * Cfg::kHalfSteps; ++part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) rotate_row(i, part / 2, part % 2);
    }
  }
}

template <class Cfg>
__device__ __forceinline__ void rotate_query(State<Cfg>& s, QueryWords<Cfg> const& words) {
  if constexpr (!std::is_void_v<typename Cfg::Element>) {
    rotate_query_of<typename Cfg::Element>(s, words);
  } else if (s.args.q_half) {
    rotate_query_of<__half>(s, words);
  } else {
    rotate_query_of<__nv_bfloat16>(s, words);
  }
}

// Reads the state that the layer above left: O, maximum and sum. An entry layer starts from zeros.
template <class Cfg>
__device__ __forceinline__ void fetch_state(State<Cfg>& s, float2 (&state)[2]) {
  if constexpr (Cfg::kPass == Pass::kAttend) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      state[i] = Cfg::kIsSelected ? s.args.state_sum[state_row(s) * 16 + head_of_row(s, i)] : float2{kNoLeaf, 0.0f};
    }
#pragma unroll
    for (int tile = 0; tile < Cfg::kValueTiles; ++tile) {
      float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
      if constexpr (Cfg::kIsSelected) o = s.args.state_out[(state_row(s) * Cfg::kValueTiles + tile) * 32 + s.lane];
      s.o[tile][0] = o.x, s.o[tile][1] = o.y, s.o[tile][2] = o.z, s.o[tile][3] = o.w;
    }
  }
}

template <class Cfg>
__device__ __forceinline__ void begin_state(State<Cfg>& s, float2 const (&state)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s.max[i] = kNoLeaf;
    s.sum[i] = 0.0f;
    s.right[i] = 0.0f;
    s.reference[i] = not_a_number();
    if constexpr (Cfg::kPass == Pass::kAttend && Cfg::kIsSelected) {
      s.max[i] = state[i].x;
      update_reference(s, i);
      s.sum[i] = s.tq == 0 ? state[i].y : 0.0f;
    }
  }
}

// All that a consumer knows before the first block.
template <class Cfg>
__device__ __forceinline__ void load_queries(State<Cfg>& s) {
  QueryTile const tile = own_tile(s);
  QueryWords<Cfg> words;
  fetch_query(s, tile, words);  // on its way while everything else is found out
  s.stages = (stream_count<Cfg>(s.args) + Cfg::kStageSlots - 1) / Cfg::kStageSlots;
  s.active = row_works(s, tile, 0);
  if constexpr (Cfg::kSwapAB) s.each_active = {s.active, row_works(s, tile, 1)};
  begin_sweep(s, tile);
  if constexpr (Cfg::kSharesWarp) s.active = __any_sync(kFullWarp, row_active(s, 0) || row_active(s, 1));
  if (s.active) {
    float2 state[2];
    if constexpr (!Cfg::kSwapAB) fetch_state(s, state);
    rotate_query(s, words);
    if constexpr (!Cfg::kSwapAB) begin_state(s, state);
  } else {
#pragma unroll
    for (int i = 0; i < Cfg::kSteps * 4; ++i) s.q[i / 4][i % 4] = half2{};
  }
}

}  // namespace htree_cuda::sm90::htree_fwd

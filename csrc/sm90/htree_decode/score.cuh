// The score pass of a selecting layer: scores of the CTA's parts, kept in shared memory, then lse over all parts and the
// importance of every candidate.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/barriers.cuh"
#include "device/ptx.cuh"
#include "args.cuh"
#include "config.cuh"
#include "exchange.cuh"
#include "fragments.cuh"
#include "layer.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_decode {

inline constexpr float kMasked = -__builtin_huge_valf();

// A lane's part of the rows of the rotation table in shared memory: of the float4 of two pairs, every fourth.
template <class Cfg>
__device__ __forceinline__ float4 const* lane_rotations(Smem<Cfg> const& smem, int row) {
  return smem.rotations + row * (Cfg::kRotationStride / 2) + threadIdx.x % 4;
}

template <class Cfg>
__device__ __forceinline__ BlockAddress<Cfg::kK> key_address(Args const& args, Smem<Cfg> const& smem, Layer const& layer, int block) {
  char const* const keys = layer.rows.upper ? args.cache.k_upper : args.cache.k;
  return {keys + smem.rows[block - layer.first] * (2 * Cfg::kK), args.cache, layer, block};
}

template <class Cfg>
__device__ __forceinline__ BlockAddress<Cfg::kV> value_address(Args const& args, Smem<Cfg> const& smem, Layer const& layer, int block) {
  char const* const values = layer.rows.upper ? args.cache.v_upper : args.cache.v;
  return {values + smem.rows[block - layer.first] * (2 * Cfg::kV), args.cache, layer, block};
}

// Writes the first row of each of the CTA's blocks, which keys and values have in common.
template <class Cfg>
__device__ __forceinline__ void find_rows(Args const& args, Smem<Cfg>& smem, Layer const& layer) {
#pragma unroll 1
  for (int block = layer.first + static_cast<int>(threadIdx.x); block < layer.last; block += Cfg::kThreads) {
    smem.rows[block - layer.first] = layer.first_row(args.cache, block);
  }
}

// Brings the keys, or the values, of a warp's blocks to L2.
template <class Cfg>
__device__ __forceinline__ void prefetch_keys(Args const& args, Smem<Cfg> const& smem, Layer const& layer, int warp) {
#pragma unroll 1
  for (int block = layer.first + warp; block < layer.last; block += Cfg::kWarps) {
    key_address<Cfg>(args, smem, layer, block).prefetch(layer.readable_of(block));
  }
}

template <class Cfg>
__device__ __forceinline__ void prefetch_values(Args const& args, Smem<Cfg> const& smem, Layer const& layer, int warp) {
#pragma unroll 1
  for (int block = layer.first + warp; block < layer.last; block += Cfg::kWarps) {
    value_address<Cfg>(args, smem, layer, block).prefetch(layer.readable_of(block));
  }
}

// Scores of a block in units of log2, masked where there is no candidate to read; where the lane's heads do not exist they
// are zeros. The query rotates on to the warp's next block.
template <class Cfg>
__device__ __forceinline__ void score_keys(Args const& args, Smem<Cfg> const& smem, Keys<Cfg>& keys, int readable,
                                           typename Keys<Cfg>::Source const& next, Query<Cfg> const& q, float (&s)[2][4]) {
  keys.multiply(q, lane_rotations<Cfg>(smem, threadIdx.x % 32 / 4), lane_rotations<Cfg>(smem, kSiblings), next, args.pairing,
                s);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int const candidate = 8 * tile + 2 * (threadIdx.x % 4) + e % 2;
      s[tile][e] = candidate < readable ? s[tile][e] * args.scale_log2 : kMasked;
    }
  }
}

// The query rotated as a warp's first block of a part needs it.
template <class Cfg>
__device__ __forceinline__ void begin_query(Args const& args, Layer const& layer, Smem<Cfg> const& smem, int first, Query<Cfg>& q) {
  int const block = min(first, layer.blocks - 1);
  q.load(smem.query, args.rotations + static_cast<std::int64_t>(layer.n - 1 - kSiblings * block) * (Cfg::kK / 2));
}

template <class Cfg>
__device__ __forceinline__ float4* stored_scores(Args const& args, Smem<Cfg>& smem, int block_of_cta) {
  return smem.tail + Cfg::kFirstScore + (block_of_cta * score_lanes(args.G) + static_cast<int>(ptx::lane_index())) * Cfg::kHeadTiles;
}

// Stores the scores of the CTA's parts. The keys of a warp's next block are on their way while those of the one before are
// multiplied, the first ones of a part while the query rotates.
template <class Cfg>
__device__ __forceinline__ void score(Args const& args, Layer const& layer, Smem<Cfg>& smem, int warp) {
  bool const stores = static_cast<int>(threadIdx.x % 32) < score_lanes(args.G);
  Query<Cfg> q(smem.layers.queries, warp);
  // Where the part ends that the warp scores lies in shared memory, and takes no register.
  auto const end = [&] { return Cfg::kPartsOfCta == 1 ? layer.last : smem.part_ends[warp]; };
  auto const source = [&](int block) {
    return typename Keys<Cfg>::Source(block < end() ? layer.readable_of(block) : 0,
                                      key_address<Cfg>(args, smem, layer, min(block, end() - 1)));
  };
#pragma unroll 1
  for (int begin = layer.first; begin < layer.last; begin = end()) {
    if constexpr (Cfg::kPartsOfCta > 1) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) smem.part_ends[warp] = begin < layer.middle ? layer.middle : layer.last;
      __syncwarp();
    }
    Keys<Cfg> keys;
    {
      auto const first = source(begin + warp);
#pragma unroll
      for (int octet = 0; octet < Keys<Cfg>::kOctets; ++octet) keys.load(first, octet, args.pairing);
    }
    begin_query<Cfg>(args, layer, smem, begin + warp, q);
#pragma unroll 1
    for (int block = begin + warp; block < end(); block += Cfg::kWarps) {
      int const readable = layer.readable_of(block);
      float s[2][4];
      score_keys<Cfg>(args, smem, keys, readable, source(block + Cfg::kWarps), q, s);
      float4* const to = stored_scores<Cfg>(args, smem, block - layer.first);
#pragma unroll
      for (int i = 0; i < Cfg::kHeadTiles; ++i) {
        if (stores) to[i] = {s[0][2 * i], s[0][2 * i + 1], s[1][2 * i], s[1][2 * i + 1]};
      }
    }
  }
}

// (maximum, sum) of the scores of each head, part and warp, to warp_sums; each lane reads what it has stored.
template <class Cfg>
__device__ __forceinline__ void sum_scores(Args const& args, Layer const& layer, Smem<Cfg>& smem, int warp) {
  int const lane = lane_of<Cfg>();
#pragma unroll 1
  for (int part = 0; part < Cfg::kPartsOfCta; ++part) {
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
      float2 sum = {kNoScore, 0.0f};
      if (lane < score_lanes(args.G)) {
#pragma unroll 1
        for (int block = layer.first_of<Cfg>(part) + warp; block < layer.last_of<Cfg>(part); block += Cfg::kWarps) {
          float4 const x = stored_scores<Cfg>(args, smem, block - layer.first)[i];
          float const most = fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), sum.x);
          sum.y *= ptx::exp2_movable(sum.x - most);
          sum.y += ptx::exp2_movable(x.x - most);
          sum.y += ptx::exp2_movable(x.y - most);
          sum.y += ptx::exp2_movable(x.z - most);
          sum.y += ptx::exp2_movable(x.w - most);
          sum.x = most;
        }
      }
      __syncwarp();
      sum = combine_quad(sum);
      if (lane % 4 == 0) smem.warp_sums[(part * Cfg::kWarps + warp) * kHeads + lane / 4 + 8 * i] = sum;
    }
  }
}

// Hands the sums of the CTA's parts to every CTA of the cluster, and clears the histogram.
template <class Cfg>
__device__ __forceinline__ void share_sums(Args const& args, Smem<Cfg>& smem) {
  Split<Cfg> const split(args);
#pragma unroll 1
  for (int i = threadIdx.x; i < kBins / 4; i += Cfg::kThreads) smem.histogram[i] = uint4{};
  __syncthreads();  // warp_sums
  // Number 16 (P c + p) + head, of P parts a CTA, hands the head's sums of part p to CTA c.
#pragma unroll 1
  for (int i = threadIdx.x; i < split.parts() * kHeads; i += Cfg::kThreads) {
    int const head = i % kHeads;
    if (head >= Cfg::kTileHeads) continue;
    int const part = i / kHeads % Cfg::kPartsOfCta;
    int const to = i / kHeads / Cfg::kPartsOfCta;
    float2 const* const of_part = smem.warp_sums + part * Cfg::kWarps * kHeads + head;
    float2 whole = of_part[0];
#pragma unroll
    for (int w = 1; w < Cfg::kWarps; ++w) whole = combine(whole, of_part[w * kHeads]);
    float2 const* const place = &smem.part_sums[(cta_index() * Cfg::kPartsOfCta + part) * kHeads + head];
    ptx::store_async(ptx::map_to_rank(ptx::shared_address(place), to), whole,
                     ptx::map_to_rank(inbox(smem, Message::kSums), to));
  }
}

// Importances begin .. begin + range may be the threshold. In the first round, all: bins are eighths of powers of two from
// 2^-27 on, and the end bins hold what lies outside.
struct Range {
  static constexpr uint32_t kFirstBin = (127 - 27) << 3;
  static constexpr int kFirstShift = 20;
  static constexpr uint32_t kInfinity = 0x7f800000u;

  uint32_t begin = 0;
  uint32_t range = kInfinity;
  bool first = true;

  __device__ __forceinline__ int shift() const { return max(24 - __clz(range), 0); }
  __device__ __forceinline__ bool holds(uint32_t x) const { return x - begin <= range; }
  __device__ __forceinline__ uint32_t bin(uint32_t x) const {
    if (!first) return (x - begin) >> shift();
    uint32_t const eighth = x >> kFirstShift;
    return eighth <= kFirstBin ? 0u : min(eighth - kFirstBin, kBins - 1u);
  }
  __device__ __forceinline__ void narrow(uint32_t bin) {
    if (first) {
      begin = bin == 0 ? 0u : (kFirstBin + bin) << kFirstShift;
      range = bin == 0 ? ((kFirstBin + 1) << kFirstShift) - 1 : bin == kBins - 1 ? kInfinity - begin : (1u << kFirstShift) - 1;
    } else {
      int const bits = shift();
      begin += bin << bits;
      range = (1u << bits) - 1;
    }
    first = false;
  }
};

// Importances of the CTA's candidates, as bits that compare as they do, and their histogram; NaN counts as infinity. A barrier of the CTA
// is needed before they are read.
template <class Cfg>
__device__ __forceinline__ void score_importance(Args const& args, Layer const& layer, Smem<Cfg>& smem, int warp) {
  int const lane = lane_of<Cfg>();
  int const parts = Split<Cfg>(args).parts();
  float lse[Cfg::kHeadTiles];
#pragma unroll
  for (int i = 0; i < Cfg::kHeadTiles; ++i) {
    int const head = lane / 4 + 8 * i;
    float2 whole = smem.part_sums[lane % 4 * kHeads + head];
#pragma unroll 1
    for (int p = lane % 4 + 4; p < parts; p += 4) whole = combine(whole, smem.part_sums[p * kHeads + head]);
    whole = combine_quad(whole);
    // A head that does not exist adds nothing.
    lse[i] = head < args.G ? whole.x + __log2f(whole.y) : __builtin_huge_valf();
  }
  bool const stored = lane < score_lanes(args.G);
#pragma unroll 1
  for (int block = layer.first + warp; block < layer.last; block += Cfg::kWarps) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float4 const* const from = stored_scores<Cfg>(args, smem, block - layer.first);
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
      float4 const x = stored ? from[i] : float4{kMasked, kMasked, kMasked, kMasked};
      sum[0] += ptx::exp2_movable(x.x - lse[i]);
      sum[1] += ptx::exp2_movable(x.y - lse[i]);
      sum[2] += ptx::exp2_movable(x.z - lse[i]);
      sum[3] += ptx::exp2_movable(x.w - lse[i]);
    }
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], d);
    }
    if (lane < 4) {
      uint32_t* const to = smem.layers.importance + (block - layer.first) * kSiblings + 2 * lane;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const candidate = e / 2 * 8 + e % 2;
        uint32_t const x = min(__float_as_uint(sum[e]) & 0x7fffffffu, Range::kInfinity);
        to[candidate] = x;
        if (candidate + 2 * lane < layer.importances_of(block)) {
          atomicAdd(reinterpret_cast<uint32_t*>(smem.histogram) + Range{}.bin(x), 1u);
        }
      }
    }
  }
}

}  // namespace htree_cuda::sm90::htree_decode

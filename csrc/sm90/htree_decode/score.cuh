// The score pass of a layer: scores of the CTA's parts, kept in shared memory, and their maxima.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/barriers.cuh"
#include "device/ptx.cuh"
#include "args.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "layer.cuh"

namespace htree_cuda::sm90::htree_decode {

inline constexpr float kMasked = -__builtin_huge_valf();

// The maximum before the first candidate: any score exceeds it, and what was summed up to then is zero.
inline constexpr float kNoScore = -3.402823466e38f;

// A lane's part of the rows of the rotation table in shared memory: of the float4 of two pairs, every fourth.
template <class Cfg>
__device__ __forceinline__ float4 const* lane_rotations(Smem<Cfg> const& smem, int row) {
  return smem.rotations + row * (Cfg::kRotationStride / 2) + lane_of_warp() % 4;
}

// Writes where the CTA's candidates lie, keys and values alike.
template <class Cfg>
__device__ __forceinline__ void find_rows(Args const& args, Smem<Cfg>& smem, Layer const& layer) {
  bool const whole = layer.rows.whole_blocks();
#pragma unroll 1
  for (int i = threadIdx.x; i < (layer.last - layer.first) * (kSiblings / 4); i += Cfg::kThreads) {
    int const node = layer.first_node(layer.first + i / (kSiblings / 4)) + i % (kSiblings / 4) * 4;
    uint32_t row[4];
    row[0] = static_cast<uint32_t>(layer.rows.row(args.cache, node));
#pragma unroll 1
    for (int n = 1; n < 4; ++n) {
      uint32_t const next = whole ? row[0] + n : static_cast<uint32_t>(layer.rows.row(args.cache, node + n));
      if (n == 1) row[1] = next;
      if (n == 2) row[2] = next;
      if (n == 3) row[3] = next;
    }
    smem.rows[i] = {row[0], row[1], row[2], row[3]};
  }
}

template <class Cfg>
__device__ __forceinline__ char const* keys_of(Args const& args, Layer const& layer) {
  return layer.rows.upper ? args.cache.k_upper : args.cache.k;
}
template <class Cfg>
__device__ __forceinline__ char const* values_of(Args const& args, Layer const& layer) {
  return layer.rows.upper ? args.cache.v_upper : args.cache.v;
}

inline constexpr int kPrefetched = 64;  // blocks of a CTA that have room in L2 where all CTAs bring theirs

// Brings the CTA's first rows of `bytes` each, of keys or of values, to L2, a line of 128 bytes a thread.
template <class Cfg, int kBytes>
__device__ __forceinline__ void prefetch(Smem<Cfg> const& smem, Layer const& layer, char const* from) {
  constexpr int kLines = kBytes / 128;
  int const last = min(layer.last, layer.first + kPrefetched);
  int const count = kSiblings * (last - layer.first) - (last == layer.blocks ? kSiblings - layer.readable : 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < count * kLines; i += Cfg::kThreads) {
    std::int64_t const row = reinterpret_cast<uint32_t const*>(smem.rows)[i / kLines];
    ptx::prefetch_l2(from + row * kBytes + i % kLines * 128);
  }
}
template <class Cfg>
__device__ __forceinline__ void prefetch_keys(Args const& args, Smem<Cfg> const& smem, Layer const& layer) {
  prefetch<Cfg, 2 * Cfg::kK>(smem, layer, keys_of<Cfg>(args, layer));
}
template <class Cfg>
__device__ __forceinline__ void prefetch_values(Args const& args, Smem<Cfg> const& smem, Layer const& layer) {
  prefetch<Cfg, 2 * Cfg::kV>(smem, layer, values_of<Cfg>(args, layer));
}

// Scores and P of candidates 4 i .. 4 i + 3 of a block and head are a float4. Heads 2 and 3 of every four have the places of
// theirs turned by half a row, so that lanes that store a column of scores meet in a bank twice, not four times.
__device__ __forceinline__ int score_place(Args const& args, int block_of_cta, int head, int four) {
  return (block_of_cta * args.G + head) * (kSiblings / 4) + (four ^ head / 2 % 2 * 2);
}

// Stores the scores of a block in units of log2, masked where there is no candidate to read, and raises the maxima.
template <class Cfg>
__device__ __forceinline__ void store_scores(Args const& args, Smem<Cfg>& smem, int block_of_cta, int readable,
                                             float (&s)[Cfg::kHeadTiles][4], float (&most)[Cfg::kHeadTiles][2]) {
  int const lane = lane_of_warp();
  float* const scores = smem.scores(args);
#pragma unroll
  for (int i = 0; i < Cfg::kHeadTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int const candidate = lane / 4 + e / 2 * 8;
      int const head = 8 * i + lane % 4 * 2 + e % 2;
      float const x = candidate < readable ? s[i][e] * args.scale_log2 : kMasked;
      most[i][e % 2] = fmaxf(most[i][e % 2], x);
      if (head < args.G) scores[4 * score_place(args, block_of_cta, head, candidate / 4) + candidate % 4] = x;
    }
  }
}

// Stores the scores of the CTA's parts, and the maxima of each stream. The keys of a stream's next block are on their way
// while those of the one before are multiplied, the first ones while the query rotates.
template <class Cfg>
__device__ __forceinline__ void score(Args const& args, Layer const& layer, Smem<Cfg>& smem, int warp) {
  Split const split(args);
  int const lane = lane_of_warp();
#pragma unroll 1
  for (int stream = warp; stream < split.streams_of_cta(); stream += Cfg::kWarps) {
    int const end = layer.first_of(split, stream / kStreams + 1);
    int block = layer.first_of(split, stream / kStreams) + stream % kStreams;
    float most[Cfg::kHeadTiles][2];
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) most[i][0] = most[i][1] = kNoScore;
    if (block < end) {
      auto const source = [&](int wanted) {
        auto const* const rows = reinterpret_cast<uint32_t const*>(smem.rows);
        return typename Keys<Cfg>::Source(wanted < end ? layer.readable_of(wanted) : 0, keys_of<Cfg>(args, layer),
                                          rows + (min(wanted, end - 1) - layer.first) * kSiblings);
      };
      Keys<Cfg> keys;
      {
        auto const first = source(block);
#pragma unroll
        for (int octet = 0; octet < Keys<Cfg>::kOctets; ++octet) keys.load(first, octet, args.pairing);
      }
      Query<Cfg> q;
      q.load(smem.query, args.rotations + static_cast<std::int64_t>(layer.n - 1 - kSiblings * block) * (Cfg::kK / 2));
#pragma unroll 1
      for (; block < end; block += kStreams) {
        float s[Cfg::kHeadTiles][4];
        keys.multiply(q, lane_rotations<Cfg>(smem, lane / 4), lane_rotations<Cfg>(smem, kSiblings),
                      [&] { return source(block + kStreams); }, args.pairing, s);
        store_scores<Cfg>(args, smem, block - layer.first, layer.readable_of(block), s, most);
      }
    }
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) most[i][e] = fmaxf(most[i][e], __shfl_xor_sync(0xffffffffu, most[i][e], d));
        if (lane < 4) smem.maxima[stream * kHeads + 8 * i + 2 * lane + e] = most[i][e];
      }
    }
  }
}

}  // namespace htree_cuda::sm90::htree_decode

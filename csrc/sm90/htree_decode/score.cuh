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
__device__ __forceinline__ void find_rows(Args const& args, Smem<Cfg>& smem, Layer const& layer, int warp) {
  bool const whole = layer.rows.whole_blocks();
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < (layer.last - layer.first) * (kSiblings / 4); i += Cfg::kThreads) {
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
    smem.rows[layer.rows_begin + i] = {row[0], row[1], row[2], row[3]};
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

// Scores and P of candidates 4 i .. 4 i + 3 of a block and head are a float4. Heads 2 and 3 of every four have the places of
// theirs shifted by half a row, so that lanes that store a column of scores meet in a bank twice, not four times.
__device__ __forceinline__ int score_place(Args const& args, int block_of_cta, int head, int four) {
  return (block_of_cta * args.G + head) * (kSiblings / 4) + (four ^ head / 2 % 2 * 2);
}

// Where a CTA has more warps than streams, two take a stream.
template <class Cfg>
__device__ __forceinline__ int log2_shares_of_stream(Split const& split) {
  return Cfg::kWarps >= 2 * split.streams_of_cta() ? 1 : 0;
}

// Stores the scores of a block in units of log2, that of candidate g and head 2 t at `to`, masked where there is no candidate to read, and keeps the maxima.
template <class Cfg>
__device__ __forceinline__ void store_scores(Args const& args, float* to, int readable,
                                             float (&s)[Cfg::kHeadTiles][4], float (&most)[Cfg::kHeadTiles][2]) {
  int const lane = lane_of_warp();
#pragma unroll
  for (int i = 0; i < Cfg::kHeadTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float const x = lane / 4 + e / 2 * 8 < readable ? s[i][e] * args.scale_log2 : kMasked;
      most[i][e % 2] = fmaxf(most[i][e % 2], x);
      int const place = (8 * i + e % 2) * kSiblings + (e / 2 ? (lane % 2 ? -8 : 8) : 0);
      if (8 * i + lane % 4 * 2 + e % 2 < args.G) to[place] = x;
    }
  }
}

// By what the query rotates at the first block of a stream.
template <class Cfg>
__device__ __forceinline__ float2 const* first_rotation(Args const& args, Layer const& layer, int block) {
  return args.rotations + static_cast<std::int64_t>(layer.n - 1 - kSiblings * block) * (Cfg::kK / 2);
}

// Brings to L2 what score() reads of the table of rotations.
template <class Cfg>
__device__ __forceinline__ void prefetch_rotations(Args const& args, Layer const& layer, int warp) {
  Split const split(args);
  constexpr int kLines = Cfg::kK / 2 * sizeof(float2) / 128;  // of a row
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < kLines * split.streams_of_cta(); i += Cfg::kThreads) {
    int const stream = i / kLines;
    int const block = layer.first_of(split, stream / kStreams) + stream % kStreams;
    if (block >= layer.first_of(split, stream / kStreams + 1)) continue;
    ptx::prefetch_l2(reinterpret_cast<char const*>(first_rotation<Cfg>(args, layer, block)) + i % kLines * 128);
  }
}

// Stores the scores of the CTA's parts, and the maxima of each stream. The keys of a stream's next block are on their way
// while those of the one before are multiplied, the first ones while the query rotates. Of two warps that share a stream the
// second begins in its middle, up to which its query has rotated block by block too.
template <class Cfg>
__device__ __forceinline__ void score(Args const& args, Layer const& layer, Smem<Cfg>& smem, int warp) {
  Split const split(args);
  int const log2_shares = log2_shares_of_stream<Cfg>(split);
#pragma unroll 1
  for (int i = warp; i < split.streams_of_cta() << log2_shares; i += Cfg::kWarps) {
    int const stream = i >> log2_shares;
    int end = layer.first_of(split, stream / kStreams + 1);
    int block = layer.first_of(split, stream / kStreams) + stream % kStreams;
    int passed = 0;
    if (log2_shares != 0) {
      int const half = (end - block + 2 * kStreams - 1) / (2 * kStreams);  // of the stream's blocks, rounded up
      i % 2 == 0 ? end = min(end, block + half * kStreams) : passed = half;
    }
    float most[Cfg::kHeadTiles][2];
#pragma unroll
    for (int tile = 0; tile < Cfg::kHeadTiles; ++tile) most[tile][0] = most[tile][1] = kNoScore;
    if (block + passed * kStreams < end) {
      auto const* rows = reinterpret_cast<uint32_t const*>(smem.rows + layer.rows_begin) + (block + passed * kStreams - layer.first) * kSiblings;
      Keys<Cfg> keys;
      {
        typename Keys<Cfg>::Source const first(layer.readable_of(block + passed * kStreams), keys_of<Cfg>(args, layer), rows);
        keys.load(first, 0, args.pairing);
      }
      Query<Cfg> q;
      q.load(smem.query, first_rotation<Cfg>(args, layer, block));
#pragma unroll 1
      for (; passed > 0; --passed, block += kStreams) q.pass(lane_rotations<Cfg>(smem, kSiblings));
      int const lane = lane_of_warp();
      float* to = smem.scores(args) + 4 * score_place(args, block - layer.first, lane % 4 * 2, lane / 16) + lane / 4 % 4;
#pragma unroll 1
      for (; block < end; block += kStreams) {
        auto const here = [&] {
          return typename Keys<Cfg>::Source(layer.readable_of(block), keys_of<Cfg>(args, layer), rows);
        };
        auto const next = [&] {
          bool const more = block + kStreams < end;
          return typename Keys<Cfg>::Source(more ? layer.readable_of(block + kStreams) : 0, keys_of<Cfg>(args, layer),
                                            rows + (more ? kStreams * kSiblings : 0));
        };
        float s[Cfg::kHeadTiles][4];
        keys.multiply(q, lane_rotations<Cfg>(smem, lane_of_warp() / 4), lane_rotations<Cfg>(smem, kSiblings), here, next, args.pairing, s);
        store_scores<Cfg>(args, to, layer.readable_of(block), s, most);
        rows += kStreams * kSiblings;
        to += kStreams * kSiblings * args.G;
      }
    }
#pragma unroll
    for (int tile = 0; tile < Cfg::kHeadTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
          most[tile][e] = fmaxf(most[tile][e], __shfl_xor_sync(kFullWarp, most[tile][e], d));
        }
        if (lane_of_warp() < 4) smem.maxima[i * kHeads + 8 * tile + 2 * lane_of_warp() + e] = most[tile][e];
      }
    }
  }
}

}  // namespace htree_cuda::sm90::htree_decode

// What becomes of the scores of a layer: P, sums that go to all CTAs, and the importance of every candidate.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/ptx.cuh"
#include "args.cuh"
#include "config.cuh"
#include "exchange.cuh"
#include "score.cuh"

namespace htree_cuda::sm90::htree_decode {

// Nothing has been attended yet. A barrier of the CTA is needed before states are added to.
template <class Cfg>
__device__ __forceinline__ void clear_states(Args const& args, Smem<Cfg>& smem) {
  Split const split(args);
  int const floats = kSlots * split.parts_of_cta() * args.G * Cfg::kOutputStride;
#pragma unroll 1
  for (int i = threadIdx.x; i < floats / 4; i += Cfg::kThreads) reinterpret_cast<float4*>(smem.states(args))[i] = float4{};
#pragma unroll 1
  for (int i = threadIdx.x; i < split.parts_of_cta() * kHeads; i += Cfg::kThreads) smem.references[i] = kNoScore;
#pragma unroll 1
  for (int i = threadIdx.x; i < split.parts_of_cta() * kSlots * kHeads; i += Cfg::kThreads) smem.slot_sums[i] = 0.0f;
}

// P lies in shared memory times this: the tensor cores cut it to tf32, as they do with rotated bf16 elements.
inline constexpr float kCut = kUnbias<__nv_bfloat16>;

// The largest score of a head in part `part` of the CTA.
template <class Cfg>
__device__ __forceinline__ float part_maximum(Smem<Cfg> const& smem, Split const& split, int part, int head) {
  int const warps = kStreams << log2_shares_of_stream<Cfg>(split);
  float most = kNoScore;
#pragma unroll 8
  for (int w = 0; w < warps; ++w) most = fmaxf(most, smem.maxima[(part * warps + w) * kHeads + head]);
  return most;
}

// Scores become P = exp2(score - the part's maximum), whose sums go to smem.sums, times kCut, and what can be read is attended so far. What was attended before is relative to the
// largest score of the layers above, in smem.references: a node that was expanded may be the largest, because the logarithm
// of its children's sum exceeds it.
template <class Cfg>
__device__ __forceinline__ void exponentiate(Args const& args, Layer const& layer, Smem<Cfg>& smem, int warp) {
  Split const split(args);
  int const lane = lane_of_warp();
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < split.parts_of_cta() * kHeads; i += Cfg::kThreads) {
    if (i % kHeads >= args.G) continue;
    float const most = part_maximum(smem, split, i / kHeads, i % kHeads);
    float const before = smem.references[i];
    float const reference = fmaxf(before, most);
    smem.part_maxima[i] = most;
    smem.references[i] = reference;
    smem.factors[i] = {ptx::exp2_movable(before - reference), ptx::exp2_movable(most - reference)};
  }
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < layer.last - layer.first; i += Cfg::kThreads) {
    smem.attended[i] = static_cast<std::uint16_t>((1u << layer.readable_of(layer.first + i)) - 1u);
  }
  float4* const scores = reinterpret_cast<float4*>(smem.scores(args));
#pragma unroll 1
  for (int stream = warp; stream < split.streams_of_cta(); stream += Cfg::kWarps) {
    int const part = stream / kStreams;
    int const end = layer.first_of(split, part + 1);
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
      int const head = lane / 4 + 8 * i;
      float sum = 0.0f;
      if (head < args.G) {
        float const most = part_maximum(smem, split, part, head);
#pragma unroll 2
        for (int block = layer.first_of(split, part) + stream % kStreams; block < end; block += kStreams) {
          float4& x = scores[score_place(args, block - layer.first, head, lane % 4)];
          float4 const p = {ptx::exp2_movable(x.x - most), ptx::exp2_movable(x.y - most), ptx::exp2_movable(x.z - most),
                            ptx::exp2_movable(x.w - most)};
          x = {__fmul_rn(p.x, kCut), __fmul_rn(p.y, kCut), __fmul_rn(p.z, kCut), __fmul_rn(p.w, kCut)};
          sum += (p.x + p.y) + (p.z + p.w);
        }
      }
      __syncwarp();
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (lane % 4 == 0) smem.sums[stream * kHeads + head] = sum;
    }
  }
}

// Hands the sums of the CTA's parts to every CTA of the cluster, and clears the histogram.
template <class Cfg>
__device__ __forceinline__ void share_sums(Args const& args, Smem<Cfg>& smem, int warp) {
  Split const split(args);
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < kBins / 4; i += Cfg::kThreads) smem.histogram[i] = uint4{};
  __syncthreads();  // sums
  // Number 16 (P c + p) + head, of P parts a CTA, hands the head's sum of part p to CTA c.
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < split.parts() * kHeads; i += Cfg::kThreads) {
    int const head = i % kHeads;
    if (head >= args.G) continue;
    int const part = i / kHeads & split.parts_of_cta() - 1;
    int const to = i / kHeads >> split.log2_parts_of_cta;
    float const* const of_part = smem.sums + part * kStreams * kHeads + head;
    float sum = of_part[0];
#pragma unroll
    for (int w = 1; w < kStreams; ++w) sum += of_part[w * kHeads];
    float2 const* const place = &smem.part_sums[(cta_index() * split.parts_of_cta() + part) * kHeads + head];
    ptx::store_async(ptx::map_to_rank(ptx::shared_address(place), to), float2{smem.part_maxima[part * kHeads + head], sum},
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

// Importances of the CTA's candidates, as bits that compare as they do, and their histogram; NaN counts as infinity. A barrier of
// the CTA is needed before they are read.
template <class Cfg>
__device__ __forceinline__ void score_importance(Args const& args, Layer const& layer, Smem<Cfg>& smem, int warp) {
  Split const split(args);
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < split.parts_of_cta() * kHeads; i += Cfg::kThreads) {
    int const head = i % kHeads;
    if (head >= args.G) continue;
    float most = kNoScore;
#pragma unroll 4
    for (int p = 0; p < split.parts(); ++p) most = fmaxf(most, smem.part_sums[p * kHeads + head].x);
    float sum = 0.0f;
#pragma unroll 4
    for (int p = 0; p < split.parts(); ++p) {
      float2 const of_part = smem.part_sums[p * kHeads + head];
      sum = fmaf(of_part.y, ptx::exp2_movable(of_part.x - most), sum);
    }
    smem.importance_factors[i] = ptx::exp2_movable(smem.part_maxima[i] - (most + __log2f(sum)));
  }
  __syncthreads();
  float const* const scores = smem.scores(args);
  int const count = layer.candidates_of_cta();
#pragma unroll 1
  for (int part = 0; part < split.parts_of_cta(); ++part) {
    float const* const factors = smem.importance_factors + part * kHeads;
    int const end = kSiblings * (layer.first_of(split, part + 1) - layer.first);
#pragma unroll 1
    for (int i = kSiblings * (layer.first_of(split, part) - layer.first) + thread_of_cta(warp); i < end; i += Cfg::kThreads) {
      float sum = 0.0f;
#pragma unroll 4
      for (int head = 0; head < args.G; ++head) {
        sum = fmaf(scores[4 * score_place(args, i / kSiblings, head, i % kSiblings / 4) + i % 4], factors[head], sum);
      }
      uint32_t const x = min(__float_as_uint(sum) & 0x7fffffffu, Range::kInfinity);
      smem.importance[i] = x;
      if (i < count) atomicAdd(reinterpret_cast<uint32_t*>(smem.histogram) + Range{}.bin(x), 1u);
    }
  }
}

}  // namespace htree_cuda::sm90::htree_decode

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

// Importances begin .. begin + range may be the threshold. In the first round, all: near the mean, from a half to four times it,
// bins are 64ths of powers of two, because of log-normal importances the 16th part begins there whatever their spread up to
// e^3; farther they are powers of two, and the end bins hold what lies outside.
struct Range {
  static constexpr int kFineShift = 17;
  static constexpr int kOctave = 1 << 23 - kFineShift;  // fine bins of a power of two
  static constexpr int kFine = 3 * kOctave;
  static constexpr int kCoarse = (kBins - kFine) / 2;   // bins on each side
  static constexpr uint32_t kInfinity = 0x7f800000u;

  // The first fine bin where importances have this mean.
  static __device__ __forceinline__ int fine_of(float mean) {
    return static_cast<int>(__float_as_uint(mean) >> kFineShift) - kOctave;
  }

  int fine;
  uint32_t begin = 0;
  uint32_t range = kInfinity;
  bool first = true;

  __device__ __forceinline__ explicit Range(int fine_) : fine(fine_) {}
  __device__ __forceinline__ int shift() const { return max(24 - __clz(range), 0); }
  __device__ __forceinline__ bool holds(uint32_t x) const { return x - begin <= range; }
  // In the first round.
  __device__ __forceinline__ int bin_of_all(uint32_t x) const {
    int const place = static_cast<int>(x >> kFineShift) - fine;
    if (place < 0) return max(kCoarse - 1 - (-1 - place) / kOctave, 0);
    return place < kFine ? kCoarse + place : min(kCoarse + kFine + (place - kFine) / kOctave, kBins - 1);
  }
  // In later rounds, of what it holds.
  __device__ __forceinline__ uint32_t bin(uint32_t x) const { return (x - begin) >> shift(); }
  __device__ __forceinline__ void narrow(uint32_t bin) {
    if (first) {
      int const b = static_cast<int>(bin);
      bool const low = b < kCoarse;
      bool const high = b >= kCoarse + kFine;
      int const place = low ? (b - kCoarse) * kOctave : high ? kFine + (b - kCoarse - kFine) * kOctave : b - kCoarse;
      begin = static_cast<uint32_t>(fine + place) << kFineShift;
      range = ((low || high ? kOctave : 1u) << kFineShift) - 1;
      if (b == 0) range += begin, begin = 0;
      if (b == kBins - 1) range = kInfinity - begin;
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
  // Half a warp adds the parts of a head, one a lane.
  static_assert(kMaxParts == 16 && 2 * Cfg::kWarps >= kHeads);
  if (int const head = thread_of_cta(warp) / kMaxParts; 2 * warp < args.G) {
    int const part = thread_of_cta(warp) % kMaxParts;
    bool const exists = head < args.G && part < split.parts();
    float2 const of_part = exists ? smem.part_sums[part * kHeads + head] : float2{kNoScore, 0.0f};
    float most = of_part.x;
#pragma unroll
    for (int d = 1; d < kMaxParts; d *= 2) most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, d));
    float sum = __fmul_rn(of_part.y, ptx::exp2_movable(of_part.x - most));
#pragma unroll
    for (int d = 1; d < kMaxParts; d *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, d));
    if (head < args.G && part < split.parts_of_cta()) {
      int const i = part * kHeads + head;
      smem.importance_factors[i] = ptx::exp2_movable(smem.part_maxima[i] - (most + __log2f(sum)));
    }
  }
  __syncthreads();
  float const* const scores = smem.scores(args);
  int const count = layer.candidates_of_cta();
  Range const all(layer.fine);
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
      if (i < count) atomicAdd(reinterpret_cast<uint32_t*>(smem.histogram) + all.bin_of_all(x), 1u);
    }
  }
}

}  // namespace htree_cuda::sm90::htree_decode

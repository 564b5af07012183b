// The end of a descent: states of the warps become one of the CTA, those of the parts the output. Both are added in a fixed
// order.
#pragma once

#include <cuda_runtime.h>

#include "device/barriers.cuh"
#include "device/ptx.cuh"
#include "score.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_decode {

// The output of one of the CTA's parts, relative to the maxima of merged_sums, goes to the CTAs that add the parts: each has a share of the
// dimensions.
template <class Cfg>
__device__ __forceinline__ void merge_warps(Args const& args, Smem<Cfg>& smem, int part_of_cta, int warp) {
  Split<Cfg> const split(args);
  int const part = cta_index() * Cfg::kPartsOfCta + part_of_cta;
  int const lane = lane_of<Cfg>();
  State<Cfg> state;
  state.load(warp_outputs(smem, part_of_cta, warp));
  __syncthreads();  // queries and importances are not needed any more, nor what was merged of the part before
#pragma unroll
  for (int i = 0; i < Cfg::kHeadTiles; ++i) {
    float sum = state.sum[i];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) smem.warp_sums[warp * kHeads + lane / 4 + 8 * i] = {state.max[i], sum};
    float* const out = reinterpret_cast<float*>(smem.merge.out) + (warp * Cfg::kTileHeads + 8 * i + 2 * (lane % 4)) * Cfg::kV;
#pragma unroll
    for (int tile = 0; tile < Cfg::kDimTiles; ++tile) {
      int const upper = Values<Cfg>::dimension(tile, lane / 4);
      int const lower = Values<Cfg>::dimension(tile + Cfg::kDimTiles, lane / 4);
      out[upper] = state.o[i][tile][0];
      out[Cfg::kV + upper] = state.o[i][tile][1];
      out[lower] = state.o[i][tile][2];
      out[Cfg::kV + lower] = state.o[i][tile][3];
    }
  }
  __syncthreads();
  // The factor of each warp and head, in the place of its maximum.
  if (threadIdx.x < Cfg::kTileHeads) {
    float2* const of_head = smem.warp_sums + threadIdx.x;
    float most = kNoScore;
#pragma unroll
    for (int w = 0; w < Cfg::kWarps; ++w) most = fmaxf(most, of_head[w * kHeads].x);
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Cfg::kWarps; ++w) {
      float const factor = ptx::exp2_movable(of_head[w * kHeads].x - most);
      sum += of_head[w * kHeads].y * factor;
      of_head[w * kHeads].x = factor;
    }
    smem.merged_sums[threadIdx.x] = {most, sum};
  }
  __syncthreads();
  // Number 16 c + head hands the head's sum to CTA c.
#pragma unroll 1
  for (int i = threadIdx.x; i < split.ctas() * kHeads; i += Cfg::kThreads) {
    int const head = i % kHeads;
    if (head >= args.G) continue;
    ptx::store_async(ptx::map_to_rank(ptx::shared_address(&smem.part_sums[part * kHeads + head]), i / kHeads),
                     smem.merged_sums[head], ptx::map_to_rank(inbox(smem, Message::kOutputs), i / kHeads));
  }
  constexpr int kVectors = Cfg::kTileHeads * Cfg::kV / 4;
  int const share = Cfg::kV / split.ctas();
#pragma unroll 1
  for (int i = threadIdx.x; i < args.G * (Cfg::kV / 4); i += Cfg::kThreads) {
    int const head = i / (Cfg::kV / 4);
    float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < Cfg::kWarps; ++w) {
      float const factor = smem.warp_sums[w * kHeads + head].x;
      float4 const x = smem.merge.out[w * kVectors + i];
      out.x += x.x * factor, out.y += x.y * factor, out.z += x.z * factor, out.w += x.w * factor;
    }
    int const d = i % (Cfg::kV / 4) * 4;
    float* const to = reinterpret_cast<float*>(smem.tail) + (part * Cfg::kTileHeads + head) * share + d % share;
    ptx::store_async(ptx::map_to_rank(ptx::shared_address(to), d / share), out,
                     ptx::map_to_rank(inbox(smem, Message::kOutputs), d / share));
  }
}

// What an attention sink adds to the sum of a head, which is relative to exp2(most).
__device__ __forceinline__ float sink_weight(Args const& args, std::int64_t head, float most) {
  if (args.attn_sink == nullptr) return 0.0f;
  float const sink = __ldg(args.attn_sink + head);
  return ptx::exp2_movable(fmaf(sink, 1.44269504088896341f, -most));
}

// out and lse of the query, each CTA its share of the dimensions, once it has the outputs of all parts.
template <class Cfg>
__device__ __forceinline__ void write_output(Args const& args, Smem<Cfg>& smem, std::int64_t first_head) {
  Split<Cfg> const split(args);
  int const parts = split.parts();
  int const cta = cta_index();
  int const share = Cfg::kV / split.ctas();
  auto* const out = static_cast<typename Cfg::Element*>(args.out);
#pragma unroll 1
  for (int i = threadIdx.x; i < args.G * share; i += Cfg::kThreads) {
    int const head = i / share;
    int const d = cta * share + i % share;
    float2 const* const sums = smem.part_sums + head;
    float const* const outs = reinterpret_cast<float const*>(smem.tail) + head * share + i % share;
    float most = kNoScore;
#pragma unroll 4
    for (int p = 0; p < parts; ++p) most = fmaxf(most, sums[p * kHeads].x);
    float x = 0.0f;
    float sum = 0.0f;
#pragma unroll 4
    for (int p = 0; p < parts; ++p) {
      float2 const of_part = sums[p * kHeads];
      float const factor = ptx::exp2_movable(of_part.x - most);
      x += outs[p * Cfg::kTileHeads * share] * factor;
      sum += of_part.y * factor;
    }
    x /= sum + sink_weight(args, static_cast<std::int64_t>(smem.unit.h) * args.G + head, most);
    if (fabsf(x) == __builtin_huge_valf()) x = __int_as_float(0x7fffffff);  // an attended value that is not finite: NaN
    out[(first_head + head) * Cfg::kV + d] = static_cast<typename Cfg::Element>(x);
    if (cta == 0 && i % share == 0) {
      args.lse[first_head + head] = static_cast<float>((static_cast<double>(most) + log2(static_cast<double>(sum))) * 0.6931471805599453);
    }
  }
}

}  // namespace htree_cuda::sm90::htree_decode

// The end of a descent: slots become parts, and parts the output. Both are added in a fixed order.
#pragma once

#include <cuda_runtime.h>

#include "device/barriers.cuh"
#include "device/ptx.cuh"
#include "host/math.h"
#include "score.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_decode {

// Outputs of the CTA's parts, relative to their references, go to the CTAs that add the parts: each has a share of the
// dimensions. A barrier of the CTA was between the last attend pass and this.
template <class Cfg>
__device__ __forceinline__ void share_outputs(Args const& args, Smem<Cfg>& smem, int warp) {
  Split const split(args);
  int const first_part = cta_index() * split.parts_of_cta();
  // Number 16 (P c + p) + head, of P parts a CTA, hands the head's sum of part p to CTA c.
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < split.parts() * kHeads; i += Cfg::kThreads) {
    int const head = i % kHeads;
    if (head >= args.G) continue;
    int const part = i / kHeads & split.parts_of_cta() - 1;
    int const to = i / kHeads >> split.log2_parts_of_cta;
    float sum = smem.slot_sums[part * kSlots * kHeads + head];
#pragma unroll
    for (int slot = 1; slot < kSlots; ++slot) sum += smem.slot_sums[(part * kSlots + slot) * kHeads + head];
    ptx::store_async(ptx::map_to_rank(ptx::shared_address(&smem.part_sums[(first_part + part) * kHeads + head]), to),
                     float2{smem.references[part * kHeads + head], sum},
                     ptx::map_to_rank(inbox(smem, Message::kOutputs), to));
  }
  int const share = Cfg::kV / split.ctas();
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < split.parts_of_cta() * args.G * (Cfg::kV / 4); i += Cfg::kThreads) {
    int const d = i % (Cfg::kV / 4) * 4;
    int const head = i / (Cfg::kV / 4) % args.G;
    int const part = i / (Cfg::kV / 4) / args.G;
    float const* const of_part = smem.states(args) + (part * kSlots * args.G + head) * Cfg::kOutputStride + d;
    float4 out = reinterpret_cast<float4 const&>(of_part[0]);
#pragma unroll
    for (int slot = 1; slot < kSlots; ++slot) {
      float4 const x = reinterpret_cast<float4 const&>(of_part[slot * args.G * Cfg::kOutputStride]);
      out.x += x.x, out.y += x.y, out.z += x.z, out.w += x.w;
    }
    float* const to = smem.outputs() + ((first_part + part) * args.G + head) * share + d % share;
    ptx::store_async(ptx::map_to_rank(ptx::shared_address(to), d / share), out,
                     ptx::map_to_rank(inbox(smem, Message::kOutputs), d / share));
  }
}

// What an attention sink adds to the sum of a head, which is relative to exp2(most).
__device__ __forceinline__ float sink_weight(Args const& args, std::int64_t head, float most) {
  if (args.attn_sink == nullptr) return 0.0f;
  float const sink = __ldg(args.attn_sink + head);
  return ptx::exp2_movable(fmaf(sink, static_cast<float>(kLog2E), -most));
}

// The largest reference of a head's parts, and their sums relative to it.
template <class Cfg>
__device__ __forceinline__ float2 add_sums(Args const& args, Smem<Cfg> const& smem, int head) {
  int const parts = Split(args).parts();
  float most = kNoScore;
#pragma unroll 4
  for (int p = 0; p < parts; ++p) most = fmaxf(most, smem.part_sums[p * kHeads + head].x);
  float sum = 0.0f;
#pragma unroll 4
  for (int p = 0; p < parts; ++p) {
    float2 const of_part = smem.part_sums[p * kHeads + head];
    sum = fmaf(of_part.y, ptx::exp2_movable(of_part.x - most), sum);
  }
  return {most, sum};
}

// out and lse of the query, each CTA its share of the dimensions, once it has the outputs of all parts.
template <class Cfg>
__device__ __forceinline__ void write_output(Args const& args, Smem<Cfg>& smem, std::int64_t first_head, int warp) {
  Split const split(args);
  int const parts = split.parts();
  int const cta = cta_index();
  int const share = Cfg::kV / split.ctas();
  auto* const out = static_cast<typename Cfg::Element*>(args.out);
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < args.G * share; i += Cfg::kThreads) {
    int const head = i / share;
    int const d = cta * share + i % share;
    float2 const* const sums = smem.part_sums + head;
    float const* const outs = smem.outputs() + head * share + i % share;
    float most = kNoScore;
#pragma unroll 4
    for (int p = 0; p < parts; ++p) most = fmaxf(most, sums[p * kHeads].x);
    float x = 0.0f;
    float sum = 0.0f;
#pragma unroll 4
    for (int p = 0; p < parts; ++p) {
      float2 const of_part = sums[p * kHeads];
      float const factor = ptx::exp2_movable(of_part.x - most);
      x += outs[p * args.G * share] * factor;
      sum += of_part.y * factor;
    }
    x /= sum + sink_weight(args, static_cast<std::int64_t>(smem.unit.h) * args.G + head, most);
    if (fabsf(x) == __builtin_huge_valf()) x = __int_as_float(0x7fffffff);  // an attended value that is not finite: NaN
    out[(first_head + head) * Cfg::kV + d] = static_cast<typename Cfg::Element>(x);
  }
  if (cta == 0 && warp == Cfg::kWarps - 1 && lane_of_warp() < args.G) {
    int const head = lane_of_warp();
    float2 const total = add_sums(args, smem, head);
    args.lse[first_head + head] =
        static_cast<float>((static_cast<double>(total.x) + log2(static_cast<double>(total.y))) * kLn2);
  }
}

}  // namespace htree_cuda::sm90::htree_decode

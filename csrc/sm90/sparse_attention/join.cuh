// Parts of a list to out and lse: a block has a query's head, a thread four columns. A part is a sum relative to its own
// offset, in float32; parts are added in their order.
#pragma once

#include <cstdint>

#include "device/pairs.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::sparse_attention {

inline constexpr int kJoinThreads = kValueDim / 4;

template <class Element>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(__grid_constant__ KernelParams const p) {
  __shared__ float2 terms[kMaxParts];  // offset and sum
  int const row = blockIdx.x / p.h_q;
  int const head = blockIdx.x - row * p.h_q;
  int const group = head / kGroupHeads;
  // The first part's row, in heads; p.groups counts parts.
  int64_t const first = (static_cast<int64_t>(row) * p.groups + group * p.parts) * kGroupHeads + head % kGroupHeads;
  for (int part = threadIdx.x; part < p.parts; part += kJoinThreads) {
    PartTerms const x = p.part_terms[first + part * kGroupHeads];
    terms[part] = {x.offset, x.sum[0] + x.sum[1]};
  }
  __syncthreads();
  float offset = kNoOffset;
  for (int part = 0; part < p.parts; ++part) offset = fmaxf(offset, terms[part].x);
  float sum = 0.f;
  float4 out = {0.f, 0.f, 0.f, 0.f};
  float4 const* const rows = reinterpret_cast<float4 const*>(p.part_out + first * kValueDim) + threadIdx.x;
#pragma unroll 8
  for (int part = 0; part < p.parts; ++part) {
    // A part without a tile has written no row, one without a valid slot zeros.
    if (terms[part].y == 0.f) continue;
    float const factor = exp2f(terms[part].x - offset);
    float4 const x = rows[static_cast<int64_t>(part) * (kGroupHeads * kValueDim / 4)];
    sum += terms[part].y * factor;
    out = {fmaf(x.x, factor, out.x), fmaf(x.y, factor, out.y), fmaf(x.z, factor, out.z), fmaf(x.w, factor, out.w)};
  }
  float denominator = sum;
  if (p.sink != nullptr) denominator += exp2f(fmaf(p.sink[head * p.sink_stride], kLog2E, -offset));
  float const inverse = sum == 0.f ? 0.f : 1.f / denominator;
  if (threadIdx.x == 0) p.lse[blockIdx.x] = sum == 0.f ? -INFINITY : (offset + log2f(sum)) * p.lse_scale;
  uint2 const words = {Pairs<Element>::pack(out.x * inverse, out.y * inverse),
                       Pairs<Element>::pack(out.z * inverse, out.w * inverse)};
  reinterpret_cast<uint2*>(p.out)[static_cast<int64_t>(blockIdx.x) * kJoinThreads + threadIdx.x] = words;
}

}  // namespace htree_cuda::sm90::sparse_attention

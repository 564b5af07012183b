// The work of one CTA: every gridDim.x-th unit, a unit being one query and one group of 64 heads. Groups of a query are
// neighbours, so CTAs that run side by side gather the same rows at the same time and meet in L2.
#pragma once

#include <cstdint>

#include "../device/slots.cuh"
#include "config.cuh"

namespace htree_cuda::sparse {

using slots::uniform;

struct Unit {
  int b, s;     // query s of batch b
  int row;      // b * s_q + s
  int group;    // of heads
  int tiles;    // of 64 slots, up to the query's length
  int length;   // slots at and past it are invalid; at most topk
  int visible;  // key rows at and past it are invalid; at most s_kv
};

class WorkList {
public:
  __device__ __forceinline__ explicit WorkList(KernelParams const& p) : p_(p), unit_(blockIdx.x) {}

  __device__ __forceinline__ bool done() const { return unit_ >= p_.units; }
  __device__ __forceinline__ void next() { unit_ += gridDim.x; }

  __device__ __forceinline__ Unit unit() const {
    Unit u;
    // The launcher keeps B * s_q below 2^31.
    u.row = uniform(static_cast<int>(unit_ / p_.groups));
    u.group = uniform(static_cast<int>(unit_ - static_cast<int64_t>(u.row) * p_.groups));
    u.b = uniform(u.row / p_.s_q);
    u.s = u.row - u.b * p_.s_q;
    u.length = slots::length(p_, u.row);
    u.tiles = (u.length + 63) / 64;
    u.visible = slots::visible(p_, u.b, u.s);
    return u;
  }

private:
  KernelParams const& p_;
  int64_t unit_;
};

}  // namespace htree_cuda::sparse

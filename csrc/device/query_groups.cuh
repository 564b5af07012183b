// The work of one CTA, or of a cluster of kCtas, of a kernel over index lists: every gridDim.x-th unit, a unit being one
// query and one group of heads. Groups of a query are neighbours, so CTAs that run side by side gather the same rows at
// the same time and meet in L2. The kernel's parameters name rows (B * s_q), groups, s_q, and what slots.cuh reads.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "slots.cuh"

namespace htree_cuda::device::query_groups {

struct Unit {
  int b, s;     // query s of batch b
  int row;      // b * s_q + s
  int group;    // of heads
  int tiles;    // of 64 slots, up to the query's length
  int length;   // slots at and past it are invalid; at most topk
  int visible;  // key rows at and past it are invalid; at most s_kv
};

template <class Params, int kCtas = 1>
class WorkList {
public:
  __device__ __forceinline__ explicit WorkList(Params const& p) : p_(p), row_(0), group_(0) {
    advance(blockIdx.x / kCtas);
  }

  // The launcher keeps B * s_q below 2^31.
  __device__ __forceinline__ bool done() const { return row_ >= static_cast<unsigned>(p_.rows); }
  __device__ __forceinline__ void next() { advance((kCtas > 1 ? ptx::grid_size() : gridDim.x) / kCtas); }

  __device__ __forceinline__ Unit unit() const {
    Unit u;
    u.row = uniform(static_cast<int>(row_));
    u.group = uniform(static_cast<int>(group_));
    u.b = uniform(u.row / p_.s_q);
    u.s = u.row - u.b * p_.s_q;
    u.length = slots::length(p_, u.b, u.s);
    u.tiles = (u.length + 63) / 64;
    u.visible = slots::visible(p_, u.b, u.s);
    return u;
  }

private:
  __device__ __forceinline__ void advance(unsigned units) {
    // Divided each time: registers are scarce where a pair of CTAs has a unit.
    unsigned const groups = kCtas > 1 ? ptx::opaque(static_cast<uint32_t>(p_.groups)) : p_.groups;
    row_ += units / groups;
    group_ += units % groups;
    if (group_ >= groups) {
      group_ -= groups;
      ++row_;
    }
  }

  Params const& p_;
  unsigned row_, group_;
};

}  // namespace htree_cuda::device::query_groups

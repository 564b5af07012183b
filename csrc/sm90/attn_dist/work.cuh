// The work of one CTA: a contiguous range of units (query, pass over heads, tile of 64 slots), cut into segments of one
// query and pass. Producer and consumers step through the same segments, so their trip counts agree by construction.
#pragma once

#include <cstdint>

#include "device/slots.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::attn_dist {

// How the producer's warps share the rows of a tile.
template <class C>
using Gather = gather::RowGather<C::kTileKeys>;

struct Segment {
  int b, s, pass;     // query s of batch b, a pass over its heads
  int tile;           // first tile
  int tiles;          // of this CTA, invalid ones by length included
  int live;           // leading tiles that hold a slot below the query's length; the rest is zeros
  int row;            // b * s_q + s
  int length;         // slots at and past it are invalid; at most topk
  int visible;        // key rows at and past it are invalid; at most s_kv
};

class WorkRange {
public:
  __device__ __forceinline__ explicit WorkRange(KernelParams const& p) : p_(p) {
    int64_t const begin = p.units * blockIdx.x / gridDim.x;
    int64_t const end = p.units * (blockIdx.x + 1) / gridDim.x;
    int64_t const row_pass = begin / p.tiles;
    int64_t const row = row_pass / p.passes;
    left_ = uniform(static_cast<int>(end - begin));
    tile_ = uniform(static_cast<int>(begin - row_pass * p.tiles));
    pass_ = uniform(static_cast<int>(row_pass - row * p.passes));
    row_ = uniform(static_cast<int>(row));
  }

  __device__ __forceinline__ bool done() const { return left_ <= 0; }

  __device__ __forceinline__ Segment segment() const {
    Segment g;
    g.b = uniform(row_ / p_.s_q);
    g.s = row_ - g.b * p_.s_q;
    g.pass = pass_;
    g.tile = tile_;
    g.tiles = min(p_.tiles - tile_, left_);
    g.row = row_;
    g.length = slots::length(p_, g.b, g.s);
    g.live = min(max((g.length + 63) / 64 - tile_, 0), g.tiles);
    g.visible = slots::visible(p_, g.b, g.s);
    return g;
  }

  // Past the segment.
  __device__ __forceinline__ void next() {
    left_ -= p_.tiles - tile_;
    tile_ = 0;
    if (++pass_ == p_.passes) {
      pass_ = 0;
      ++row_;
    }
  }

private:
  KernelParams const& p_;
  // The launcher keeps B * s_q and the units of a CTA below 2^31.
  int row_, pass_, tile_, left_;
};

}  // namespace htree_cuda::sm90::attn_dist

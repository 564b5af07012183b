// The warpgroup that adds what the consumers leave: of each tile and consumer 64 columns of 32 sums over two heads
// each, in the order of the warps. Invalid slots, which the producer tells, become zero, and the sums go to global
// memory by bulk copies, 32 a warp (by plain stores where rows of `out` are not multiples of 16 bytes). None of it
// holds up a WGMMA.
#pragma once

#include <cstdint>

#include "device/barriers.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "work.cuh"

namespace htree_cuda::sm90::attn_dist {

// Warps 2 c and 2 c + 1 serve consumer c, a thread a column.
template <class C>
class Reducer {
public:
  __device__ __forceinline__ Reducer(KernelParams const& p, typename C::SharedStorage& shared, int warp)
      : p_(p), consumer_(warp / kWarpsEach), column_(threadIdx.x % C::kTileKeys),
        barriers_(sum_barriers<C>(shared, consumer_)), sums_(ptx::shared_address(&shared.sums[consumer_][0][0][column_])),
        valid_(ptx::shared_address(&shared.valid[0][0])),
        staging_(ptx::shared_address(&shared.staging[consumer_][0])) {}

  __device__ __forceinline__ void run() {
    uint32_t tile = 0;  // of all that the producer gathers
    for (WorkRange work(p_); !work.done(); work.next()) {
      Segment const g = work.segment();
      int const group = p_.first_group + g.pass * C::kGroups + (kSplitHeads ? consumer_ : 0);
      float* const out = p_.out + ((static_cast<int64_t>(g.b) * p_.groups + group) * p_.s_q + g.s) * p_.topk;
      for (int t = kSplitHeads ? 0 : consumer_; t < g.live; t += kSplitHeads ? 1 : C::kConsumers) {
        store(out, (g.tile + t) * C::kTileKeys, tile + t);
      }
      tile += g.live;
      if (kSplitHeads || consumer_ == 0) {
        store_zeros(out, (g.tile + g.live) * C::kTileKeys, min((g.tile + g.tiles) * C::kTileKeys, p_.topk));
      }
    }
    ptx::bulk_wait_read<0>();
  }

private:
  static constexpr bool kSplitHeads = C::kSplit == Split::kHeads;
  static constexpr int kWarpsEach = C::kWarps / C::kConsumers;
  static_assert(kWarpsEach * 32 == C::kTileKeys);

  // The tile at hand, the `tile`-th of all, which began at slot `first`.
  __device__ __forceinline__ void store(float* out, int first, uint32_t tile) {
    barriers_.wait_full(at_, "attn_dist: sums of a tile");
    float warps[C::kWarps];
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      float rows[C::kSumRows];
#pragma unroll
      for (int i = 0; i < C::kSumRows; ++i) {
        rows[i] = ptx::load_shared_float(sums_ + (w * C::kSumRows + i) * C::kSumStride * 4);
      }
      warps[w] = ((rows[0] + rows[1]) + (rows[2] + rows[3])) + ((rows[4] + rows[5]) + (rows[6] + rows[7]));
    }
    uint32_t const valid =
        ptx::load_shared_4B(valid_ + 4 * (tile % C::kValidTiles * C::kWarps + Gather<C>::warp_of(column_)));
    float const sum = (warps[0] + warps[1]) + (warps[2] + warps[3]);
    __syncwarp();
    if (lane() == 0) barriers::mbarrier_arrive(barriers_.empty_at(0));
    at_ = at_.ahead(1);

    float const value = valid >> Gather<C>::lane_of(column_) & 1 ? sum : 0.f;
    if (p_.bulk_store) {
      ptx::bulk_wait_read<0>();
      __syncwarp();
      ptx::store_shared_4B(staging_ + 4 * column_, __float_as_uint(value));
      ptx::fence_proxy_async_shared();
      __syncwarp();
      int const warps_first = first + column_ - lane();
      int const count = min(p_.topk - warps_first, 32);
      if (lane() == 0 && count > 0) {
        ptx::bulk_store(out + warps_first, staging_ + 4 * (column_ - lane()), 4 * count, ptx::kEvictFirst);
        ptx::bulk_commit();
      }
    } else if (first + column_ < p_.topk) {
      out[first + column_] = value;
    }
  }

  // In the slots of a segment's tiles past the query's length.
  __device__ __forceinline__ void store_zeros(float* out, int slot, int end) const {
    for (slot += column_; slot < end; slot += C::kTileKeys) out[slot] = 0.f;
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  KernelParams const& p_;
  int const consumer_, column_;
  RingBarriers<1> const barriers_;
  uint32_t const sums_, valid_, staging_;
  RingPosition<1> at_;
};

}  // namespace htree_cuda::sm90::attn_dist

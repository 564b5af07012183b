// The warpgroup that adds what the consumers leave: of each tile and consumer 64 columns of 32 sums over two heads each,
// in the order of the warps. Invalid slots, which the producer tells, become zero, and the sums go to global memory by
// bulk copies, 32 a warp (by plain stores where rows of `out` are not multiples of 16 bytes). None of it holds up a WGMMA.
#pragma once

#include <cstdint>

#include "../device/barriers.cuh"
#include "../device/pipeline.cuh"
#include "../device/ptx.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "work.cuh"

namespace htree_cuda::distribution {

// Warps 2 c and 2 c + 1 serve consumer c, 32 columns each. Lanes l and l + 16 add columns 2 l and 2 l + 1, each of two of
// the consumer's warps, and exchange one: lane l + 16 keeps the second.
template <class C>
class Reducer {
public:
  __device__ __forceinline__ Reducer(KernelParams const& p, typename C::SharedStorage& shared, int warp)
      : p_(p), consumer_(warp / kWarpsEach), first_column_(warp % kWarpsEach * 32),
        column_(first_column_ + lane() % 16 * 2 + lane() / 16),
        barriers_(sum_barriers<C>(shared, consumer_)),
        sums_(ptx::shared_address(&shared.sums[consumer_][lane() / 16 * 2][0][column_ / 2 * 2])),
        valid_(ptx::shared_address(&shared.valid[0][Gather<C>::warp_of(column_)])),
        staging_(ptx::shared_address(&shared.staging[consumer_][first_column_])) {}

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
    static_assert(C::kWarps == 4);
    float2 warps[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      float2 rows[C::kSumRows];
#pragma unroll
      for (int i = 0; i < C::kSumRows; ++i) {
        rows[i] = ptx::load_shared_8B(sums_ + (w * C::kSumRows + i) * C::kSumStride * 4);
      }
#pragma unroll
      for (int i = 1; i < C::kSumRows; i *= 2) {
#pragma unroll
        for (int j = 0; j < C::kSumRows; j += 2 * i) {
          rows[j].x += rows[j + i].x;
          rows[j].y += rows[j + i].y;
        }
      }
      warps[w] = rows[0];
    }
    uint32_t const valid = ptx::load_shared_4B(valid_ + 4 * C::kWarps * (tile % C::kValidTiles));
    float const left = warps[0].x + warps[1].x;
    float const right = warps[0].y + warps[1].y;
    bool const is_right = lane() >= 16;
    float const sum = (is_right ? right : left) + __shfl_xor_sync(0xffffffffu, is_right ? left : right, 16);
    ptx::bulk_wait_read<0>();  // of the tile before, for the stores after the meeting
    __syncwarp();
    if (lane() == 0) barriers::mbarrier_arrive(barriers_.empty_at(0));
    at_ = at_.ahead(1);

    float const value = valid >> Gather<C>::lane_of(column_) & 1 ? sum : 0.f;
    first += first_column_;
    if (p_.bulk_store) {
      ptx::store_shared_4B(staging_ + 4 * (column_ - first_column_), __float_as_uint(value));
      ptx::fence_proxy_async_shared();
      __syncwarp();
      int const count = min(p_.topk - first, 32);
      if (lane() == 0 && count > 0) {
        ptx::bulk_store(out + first, staging_, 4 * count, ptx::kEvictFirst);
        ptx::bulk_commit();
      }
    } else if (first + column_ - first_column_ < p_.topk) {
      out[first + column_ - first_column_] = value;
    }
  }

  // In the slots of a segment's tiles past the query's length.
  __device__ __forceinline__ void store_zeros(float* out, int slot, int end) const {
    for (slot += column_; slot < end; slot += C::kTileKeys) out[slot] = 0.f;
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  KernelParams const& p_;
  int const consumer_, first_column_, column_;
  RingBarriers<1> const barriers_;
  uint32_t const sums_, valid_, staging_;
  RingPosition<1> at_;
};

}  // namespace htree_cuda::distribution

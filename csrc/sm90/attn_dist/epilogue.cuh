// From a 64 x 64 tile of scores in accumulators to 64 sums over heads in global memory, behind the WGMMAs of the
// following tile:
//
//   exponentials go to fresh registers (writing the accumulators in place would make ptxas wait for every WGMMA in
//   flight), rows l / 4 and l / 4 + 8 added at once; a transposing reduction over the eight lanes of a column, 14
//   shuffles, leaves lane l with columns 2 l and 2 l + 1 of the warp's 16 heads, which go to the warp's own slot in
//   shared memory; one warp, a different one each tile, waits for the slots of the others (who only arrive), adds the
//   four in the order of the warps, zeroes the invalid slots and stores 256 bytes
//
// The order of every addition is fixed: results are the same bits each time.
#pragma once

#include <cstdint>

#include "../device/barriers.cuh"
#include "../device/ptx.cuh"
#include "config.cuh"
#include "work.cuh"

namespace htree_cuda::distribution {

template <class C>
class Epilogue {
public:
  __device__ __forceinline__ Epilogue(KernelParams const& p, typename C::SharedStorage& shared, int warpgroup, int warp)
      : p_(p), shared_(shared), warpgroup_(warpgroup), warp_(warp) {}

  // A new query or group of heads: reads the two rows of lse that this thread's accumulators belong to. True when one
  // of them is of a head that contributes nothing.
  __device__ __forceinline__ bool begin(Segment const& g, int group) {
    __syncwarp();  // every lane has read the row of the segment before
    float lse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const head = group * C::kGroupHeads + warp_ * 16 + lane() / 4 + 8 * i;
      lse[i] = head < p_.h_q ? __ldg(p_.lse + static_cast<int64_t>(g.row) * p_.h_q + head) : INFINITY;
    }
    // Minus infinity marks a head that contributes nothing.
    ptx::store_shared_8B(lse_address(), {isinf(lse[0]) ? -INFINITY : -lse[0] * p_.lse_scale,
                                         isinf(lse[1]) ? -INFINITY : -lse[1] * p_.lse_scale});
    if (lane() == 0) {
      OutputRow& row = shared_.rows[warpgroup_][warp_];
      int64_t const out_row = (static_cast<int64_t>(g.b) * p_.groups + group) * p_.s_q + g.s;
      row.out = p_.out + out_row * p_.topk;
      row.indices = p_.indices + static_cast<int64_t>(g.row) * p_.topk;
      row.length = g.length;
      row.visible = g.visible;
    }
    __syncwarp();
    return isinf(lse[0]) || isinf(lse[1]);
  }

  // Whether any thread of the warpgroup said `value`; what they wrote before is visible after.
  __device__ __forceinline__ bool meet_any(bool value) const {
    return barriers::named_sync_or(kMeetBarrier + warpgroup_, 128, value);
  }

  // From scores to the warp's partial sums in shared memory, in two halves; between them the main loop issues WGMMAs.
  // kMasked: some head of the group contributes nothing.
  template <bool kMasked>
  __device__ __forceinline__ void reduce_first_half(float const (&acc)[wgmma::kAccumulators]) {
    float2 const negative_lse = ptx::load_shared_8B_volatile(lse_address());
    pair_sums<kMasked, 0>(acc, negative_lse);
    pair_sums<kMasked, 1>(acc, negative_lse);
  }

  template <bool kMasked>
  __device__ __forceinline__ void reduce_second_half(float const (&acc)[wgmma::kAccumulators]) {
    // Read again, not kept: without this dependence on what comes after the latest WGMMAs, ptxas moves these
    // exponentials before them.
    float2 const negative_lse = ptx::load_shared_8B_volatile(lse_address());
    pair_sums<kMasked, 2>(acc, negative_lse);
    pair_sums<kMasked, 3>(acc, negative_lse);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        columns_[j][c] = exchange(columns_[j][c], columns_[j + 2][c], 8);
      }
    }
    // Now lane l holds block l / 4, columns 2 (l % 4) + 0..1 of it, summed over the warp's 16 heads.
    float2 total;
    total.x = exchange(columns_[0][0], columns_[1][0], 4);
    total.y = exchange(columns_[0][1], columns_[1][1], 4);
    ptx::store_shared_8B(partial(warp_), total);
    if (C::kStoreWithoutMeeting && !my_turn()) barriers::named_arrive(store_barrier(), 128);
  }

  // The storing warp asks for the indices of the tile that will be reduced next; its slots start at `first_slot`.
  __device__ __forceinline__ void prefetch(int first_slot) {
    if (!my_turn()) return;
    OutputRow const& row = shared_.rows[warpgroup_][warp_];
    int const slot = first_slot + 2 * lane();
    int const length = row.length;
    int const* const indices = row.indices + slot;
    index_[0] = slot < length ? __ldg(indices) : -1;
    index_[1] = slot + 1 < length ? __ldg(indices + 1) : -1;
  }

  // Sums of the tile that prefetch() was told of, reduced since: the warp whose turn it is waits for the others'.
  __device__ __forceinline__ void store(int first_slot) {
    if (!C::kStoreWithoutMeeting || my_turn()) barriers::named_sync(store_barrier(), 128);
    if (my_turn()) store_sums(first_slot);
    tick_ = (tick_ + 1) % C::kWarps;
  }

  // Before the CTA ends: shared memory that a bulk store still reads must live on.
  __device__ __forceinline__ void drain() const {
    if (p_.bulk_store && lane() == 0) ptx::bulk_wait_read<0>();
  }

private:
  __device__ __forceinline__ bool my_turn() const { return tick_ == warp_; }
  __device__ __forceinline__ int store_barrier() const { return kStoreBarrier + C::kWarps * warpgroup_ + tick_; }

  __device__ __forceinline__ void store_sums(int first_slot) const {
    float2 part[C::kWarps];
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      part[w] = ptx::load_shared_8B(partial(w));
    }
    float2 sum;
    sum.x = (part[0].x + part[1].x) + (part[2].x + part[3].x);
    sum.y = (part[0].y + part[1].y) + (part[2].y + part[3].y);
    OutputRow const& row = shared_.rows[warpgroup_][warp_];
    unsigned const visible = row.visible;
    sum.x = static_cast<unsigned>(index_[0]) < visible ? sum.x : 0.f;
    sum.y = static_cast<unsigned>(index_[1]) < visible ? sum.y : 0.f;
    float* const out = row.out + first_slot;
    int const slots = min(C::kTileKeys, p_.topk - first_slot);
    if (p_.bulk_store) {
      uint32_t const staging = ptx::shared_address(&shared_.staging[warpgroup_][warp_][0]);
      if (lane() == 0) ptx::bulk_wait_read<0>();  // this warp's store of four tiles ago
      __syncwarp();
      ptx::store_shared_8B(staging + 8 * lane(), sum);
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (lane() == 0) {
        ptx::bulk_store(out, staging, 4 * slots);
        ptx::bulk_commit();
      }
    } else {
      int const slot = 2 * lane();
      if (slot < slots) out[slot] = sum.x;
      if (slot + 1 < slots) out[slot + 1] = sum.y;
    }
  }

  // Blocks (of eight columns) kPair and kPair + 4.
  template <bool kMasked, int kPair>
  __device__ __forceinline__ void pair_sums(float const (&acc)[wgmma::kAccumulators], float2 negative_lse) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      columns_[kPair][c] = exchange(row_sum<kMasked>(acc, kPair, c, negative_lse),
                                    row_sum<kMasked>(acc, kPair + 4, c, negative_lse), 16);
    }
  }

  // Column `c` of this thread's two in block `block` of eight columns, its two rows added.
  template <bool kMasked>
  __device__ __forceinline__ float row_sum(float const (&acc)[wgmma::kAccumulators], int block, int c,
                                           float2 negative_lse) const {
    float p0 = ptx::exp2_approx(fmaf(acc[4 * block + c], p_.scale_log2, negative_lse.x));
    float p1 = ptx::exp2_approx(fmaf(acc[4 * block + 2 + c], p_.scale_log2, negative_lse.y));
    if (kMasked) {
      // Select, do not multiply: the score of a head that contributes nothing may be NaN.
      p0 = negative_lse.x != -INFINITY ? p0 : 0.f;
      p1 = negative_lse.y != -INFINITY ? p1 : 0.f;
    }
    return p0 + p1;
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ uint32_t lse_address() const {
    return ptx::shared_address(&shared_.negative_lse[warpgroup_][threadIdx.x % 128]);
  }

  // Where this lane's two columns of warp `warp`'s sums of the current tile lie.
  __device__ __forceinline__ uint32_t partial(int warp) const {
    return ptx::shared_address(&shared_.partial[warpgroup_][tick_][warp][2 * lane()]);
  }

  // The lane whose bit `bit` is clear keeps `low` and gives `high` away, its partner the other way round.
  __device__ __forceinline__ static float exchange(float low, float high, int bit) {
    bool const upper = lane() & bit;
    float const keep = upper ? high : low;
    float const give = upper ? low : high;
    return keep + __shfl_xor_sync(0xffffffffu, give, bit);
  }

  KernelParams const& p_;
  typename C::SharedStorage& shared_;
  int const warpgroup_, warp_;
  int index_[2];
  float columns_[4][2];
  int tick_ = 0;  // tile modulo 4: its slots in `partial`, the warp that stores it and the barrier where that one waits
};

// Zeros in the slots of a segment's tiles past the query's length; all threads of a warpgroup.
template <class C>
__device__ __forceinline__ void store_zeros(KernelParams const& p, Segment const& g, int group, int thread) {
  int64_t const out_row = (static_cast<int64_t>(g.b) * p.groups + group) * p.s_q + g.s;
  int const end = min((g.tile + g.tiles) * C::kTileKeys, p.topk);
  for (int slot = (g.tile + g.live) * C::kTileKeys + thread; slot < end; slot += 128) {
    p.out[out_row * p.topk + slot] = 0.f;
  }
}

}  // namespace htree_cuda::distribution

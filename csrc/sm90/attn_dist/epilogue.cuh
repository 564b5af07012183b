// From a 64 x 64 tile of scores in accumulators to 64 sums over heads in global memory, behind the WGMMAs of the
// following tile:
//
//   exponentials go to fresh registers (writing the accumulators in place would make ptxas wait for every WGMMA in
//   flight), rows l / 4 and l / 4 + 8 added at once; a transposing reduction over the eight lanes of a column, 14
//   shuffles, leaves lane l with columns 2 l and 2 l + 1 of the warp's 16 heads, which go to the warp's own slot in
//   shared memory; a tile later, when the warps have met, each adds the four slots of 16 columns in the order of the
//   warps, zeroes the invalid slots and stores 64 bytes by a bulk copy (plain stores where rows are not multiples of 16
//   bytes)
//
// The four warps do the same, because WGMMAs wait for the slowest of them.
//
// The order of every addition is fixed: results are the same bits each time.
#pragma once

#include <cfloat>
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
    ptx::store_shared_8B(lse_address(), {negative(lse[0]), negative(lse[1])});
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

  // The four warps of the warpgroup: partial sums written before are visible after, and those read may be overwritten.
  __device__ __forceinline__ void meet() const { barriers::named_sync(kConsumerBarrier + warpgroup_, 128); }

  // Likewise; whether any thread said `value`.
  __device__ __forceinline__ bool meet_any(bool value) const {
    return barriers::named_sync_or(kConsumerBarrier + warpgroup_, 128, value);
  }

  // What is left of the tile before (`stored`: there is one), then the reduction of this tile,
  // which began at `slot`, in slices for the main loop to put among its WGMMAs. The meeting comes first: it also tells
  // that the sums which this tile's overwrite have been read. kMasked: some head of the group contributes nothing.
  static constexpr int kSlices = 8;

  template <bool kMasked, int kSlice>
  __device__ __forceinline__ void slice(float const (&acc)[wgmma::kAccumulators], int slot, bool stored) {
    if constexpr (kSlice == 0) {
      begin<0>(acc);
      meet();
      store(slot - C::kTileKeys, stored);
    } else if constexpr (kSlice <= 4) {
      // Sums wait for exponentials, so those of the next blocks begin before.
      float p[8];
      take(p);
      if constexpr (kSlice < 4) begin<kSlice>(acc);
      reduce<kMasked, kSlice - 1>(p);
    } else if constexpr (kSlice == 5) {
      half_ ^= 1;
      fetch(slot);
    } else if constexpr (kSlice == 6) {
      send(slot - C::kTileKeys, stored);
    }
  }

  // Asks for the index of this lane's slot of the tile at `first_slot`: 16 slots a warp, two lanes each.
  __device__ __forceinline__ void fetch(int first_slot) {
    OutputRow const& row = shared_.rows[warpgroup_][warp_];
    int const slot = first_slot + 16 * warp_ + lane() % 16;
    index_ = ptx::load_global_if(slot < row.length, row.indices + slot, -1);
  }

  // After a meeting: the sums of the tile reduced last. Two lanes a column, each adds two of four slots a warp.
  __device__ __forceinline__ void store(int first_slot, bool wanted) const {
    OutputRow const& row = shared_.rows[warpgroup_][warp_];
    int const column = 16 * warp_ + lane() % 16;
    float part[2 * C::kWarps];
#pragma unroll
    for (int i = 0; i < 2 * C::kWarps; ++i) {
      part[i] = ptx::load_shared_float(partial(half_ ^ 1, i / 2, lane() / 16 * 2 + i % 2, column));
    }
    float sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    bool const valid = static_cast<unsigned>(index_) < static_cast<unsigned>(row.visible);
    int const slot = first_slot + column;
    float const value = valid ? sum : 0.f;
    ptx::store_global_if(wanted && !p_.bulk_store && lane() < 16 && slot < p_.topk, row.out + slot, value);
    // No branch around this: see multiply() in mainloop.cuh. Lanes l and l + 16 hold and write the same.
    finish_stores();
    __syncwarp();
    ptx::store_shared_4B(staging() + 4 * (lane() % 16), __float_as_uint(value));
  }

  // The bulk copy of what store() has staged. Apart from it, because the fence takes long.
  __device__ __forceinline__ void send(int first_slot, bool wanted) const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    OutputRow const& row = shared_.rows[warpgroup_][warp_];
    int const first = first_slot + 16 * warp_;
    int const count = min(p_.topk - first, 16);
    ptx::bulk_store_if(wanted && p_.bulk_store && lane() == 0 && count > 0, row.out + first, staging(), 4 * count);
    ptx::bulk_commit();
  }

  // Until this warp's bulk stores have read what they store.
  __device__ __forceinline__ void finish_stores() const { ptx::bulk_wait_read<0>(); }

private:
  // An lse as the exponent takes it, in base 2. Minus infinity marks a head that contributes nothing; the change of base
  // must not make one of a finite lse.
  __device__ __forceinline__ float negative(float lse) const {
    if (isinf(lse)) return -INFINITY;
    float const exponent = -lse * p_.lse_scale;
    return exponent < -FLT_MAX ? -FLT_MAX : exponent;
  }

  // Exponentials of blocks (of eight columns) kPair and kPair + 4.
  template <int kPair>
  __device__ __forceinline__ void begin(float const (&acc)[wgmma::kAccumulators]) {
    // Read again each time, not kept: this access stays where it is among the waits for WGMMAs, and so do the
    // exponentials between it and the sums' store. ptxas would else collect those of all slices before or after.
    float2 const negative_lse = ptx::load_shared_8B_volatile(lse_address());
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float const x = acc[4 * (kPair + 4 * (i / 4)) + i % 4];
      p_exp_[i] = ptx::exp2_approx(fmaf(x, p_.scale_log2, i / 2 % 2 ? negative_lse.y : negative_lse.x));
    }
  }

  __device__ __forceinline__ void take(float (&p)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] = p_exp_[i];
  }

  // Rows of blocks kPair and kPair + 4 added, then the halves of the warp. Then lane l holds columns
  // 2 (l % 4) + 0..1 of block kPair + 4 (l / 16), of four heads a slot l / 4 % 4.
  template <bool kMasked, int kPair>
  __device__ __forceinline__ void reduce(float const (&p)[8]) {
    float2 negative_lse = {};
    if (kMasked) negative_lse = ptx::load_shared_8B_volatile(lse_address());
    auto const rows = [&](int block, int column) {
      float const x = p[4 * block + column];
      float const y = p[4 * block + 2 + column];
      if (!kMasked) return x + y;
      // Select, do not multiply: the score of a head that contributes nothing may be NaN.
      return (negative_lse.x != -INFINITY ? x : 0.f) + (negative_lse.y != -INFINITY ? y : 0.f);
    };
    float2 sum;
    sum.x = exchange(rows(0, 0), rows(1, 0), 16);
    sum.y = exchange(rows(0, 1), rows(1, 1), 16);
    ptx::store_shared_8B_volatile(
        partial(half_, warp_, lane() / 4 % 4, 8 * (kPair + 4 * (lane() / 16)) + 2 * (lane() % 4)), sum);
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ uint32_t lse_address() const {
    return ptx::shared_address(&shared_.negative_lse[warpgroup_][threadIdx.x % 128]);
  }

  __device__ __forceinline__ uint32_t staging() const {
    return ptx::shared_address(&shared_.staging[warpgroup_][warp_][0]);
  }

  // Column `column` of slot `slot` of warp `warp`'s partial sums.
  __device__ __forceinline__ uint32_t partial(int half, int warp, int slot, int column) const {
    return ptx::shared_address(&shared_.partial[warpgroup_][half][warp][slot][column]);
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
  int index_ = -1;  // of no slot, until that of a first tile is asked for
  int half_ = 0;  // of `partial`, to write
  float p_exp_[8];
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

// From a 64 x 64 tile of scores in a consumer's accumulators to sums over two heads in shared memory, behind the WGMMAs
// of the following tile; the reducer (reducer.cuh) adds them up.
//
//   exponentials go to fresh registers (writing the accumulators in place would make ptxas wait for every WGMMA in
//   flight), rows l / 4 and l / 4 + 8 are added at once, and their sums go to shared memory: eight rows of 64 columns a warp
//
// A block of eight columns is exponentiated in one step of the main loop and added in the next, which finds its
// exponentials done. The four warps do the same, because WGMMAs wait for the slowest of them.
//
// The order of every addition is fixed: results are the same bits each time.
#pragma once

#include <cfloat>
#include <cstdint>

#include "device/barriers.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "config.cuh"
#include "work.cuh"

namespace htree_cuda::sm90::attn_dist {

// The sums of one consumer on their way to the reducer: one tile's at a time.
template <class C>
__device__ __forceinline__ RingBarriers<1> sum_barriers(typename C::SharedStorage& shared, int consumer) {
  return {ptx::shared_address(&shared.sums_full[consumer]), ptx::shared_address(&shared.sums_empty[consumer])};
}

template <class C>
class Epilogue {
public:
  __device__ __forceinline__ Epilogue(KernelParams const& p, typename C::SharedStorage& shared, int warpgroup, int warp)
      : p_(p), barriers_(sum_barriers<C>(shared, warpgroup)), warp_(warp),
        sums_(ptx::shared_address(&shared.sums[warpgroup][warp][lane() / 4][lane() % 4 * 2])) {}

  // A new query or group of heads: reads the two rows of lse that this thread's accumulators belong to. True when one
  // of them is of a head that contributes nothing.
  __device__ __forceinline__ bool begin(Segment const& g, int group) {
    float const* const rows = p_.lse + g.b * p_.lse_stride_b + g.s * p_.lse_stride_s;
    float lse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const head = group * C::kGroupHeads + warp_ * 16 + lane() / 4 + 8 * i;
      lse[i] = head < p_.h_q ? __ldg(rows + head * p_.lse_stride_h) : INFINITY;
      negative_lse_[i] = negative(lse[i]);
    }
    return isinf(lse[0]) || isinf(lse[1]);
  }

  // Whether the reducer has read what the next tile's sums overwrite, and waiting for it.
  __device__ __forceinline__ bool test_room() const { return barriers_.test_empty(at_); }
  __device__ __forceinline__ void wait_room() const { barriers_.wait_empty(at_, "attn_dist: room for sums"); }

  // The steps of one tile, for the main loop to put among the WGMMAs of the next. kMasked: some head of the group
  // contributes nothing. No branch: see multiply() in mainloop.cuh.
  static constexpr int kBlocks = C::kTileKeys / 8;
  static constexpr int kSteps = kBlocks + 1;

  template <bool kMasked, int kStep>
  __device__ __forceinline__ void step(float const (&acc)[wgmma::kAccumulators]) {
    if constexpr (kStep > 0) add<kMasked, kStep - 1>();
    if constexpr (kStep < kBlocks) exponentiate<kStep>(acc);
    if constexpr (kStep == kSteps - 1) hand_over();
  }

private:
  // An lse as the exponent takes it, in base 2. Minus infinity marks a head that contributes nothing; the change of
  // base must not make one of a finite lse.
  __device__ __forceinline__ float negative(float lse) const {
    if (isinf(lse)) return -INFINITY;
    float const exponent = -lse * p_.lse_scale;
    return exponent < -FLT_MAX ? -FLT_MAX : exponent;
  }

  template <int kBlock>
  __device__ __forceinline__ void exponentiate(float const (&acc)[wgmma::kAccumulators]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      exponentials_[i] = ptx::exp2_approx(fmaf(acc[4 * kBlock + i], p_.scale_log2, negative_lse_[i / 2]));
    }
  }

  template <bool kMasked, int kBlock>
  __device__ __forceinline__ void add() const {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Select, do not multiply: the score of a head that contributes nothing may be NaN.
      x[i] = !kMasked || negative_lse_[i / 2] != -INFINITY ? exponentials_[i] : 0.f;
    }
    ptx::store_shared_8B_volatile(sums_ + kBlock * 8 * 4, {x[0] + x[2], x[1] + x[3]});
  }

  __device__ __forceinline__ void hand_over() {
    __syncwarp();
    if (lane() == 0) barriers::mbarrier_arrive(barriers_.full_at(0));
    at_ = at_.ahead(1);
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  KernelParams const& p_;
  RingBarriers<1> const barriers_;
  int const warp_;
  uint32_t const sums_;  // this thread's row and columns of the first block
  RingPosition<1> at_;   // of the sums of the tile at hand
  float negative_lse_[2];
  float exponentials_[4];
};

}  // namespace htree_cuda::sm90::attn_dist

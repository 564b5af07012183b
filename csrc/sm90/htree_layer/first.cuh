// Walk::kFirst: a warpgroup computes the scores of its four queries against four parents at once by WGMMA, 64 heads by 64
// keys, the queries in registers and the keys where the bulk copy put them. All queries see the same keys, so nothing is
// read twice. What follows belongs to a warp and its query alone, parent after parent; a warp whose query does not take a
// parent has its scores computed all the same and ignores them.
#pragma once

#include "../device/wgmma.cuh"
#include "consumer.cuh"

namespace htree_cuda::layer {

template <class Cfg>
class FirstConsumer : public Consumer<Cfg> {
  using Base = Consumer<Cfg>;
  using Base::active_;
  using Base::args_;
  using Base::groups_;
  using Base::kSteps;
  using Base::lane_;
  using Base::position_;
  using Base::q_;
  using Base::warp_;
  static_assert(Cfg::kStageSlots * kSiblings == 64 && wgmma::kAccumulators == 8 * Cfg::kStageSlots);

public:
  __device__ explicit FirstConsumer(Args const& args) : Base(args) {}

  __device__ void run(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    if constexpr (Cfg::kReadsValues) {
      if (active_ && position_ >= 0) Base::fetch_closed(0);
    }
    for (int group = 0; group < groups_; ++group) {
      ring.barriers.wait_full(at, "htree_layer consumer: full");
      uint32_t const mine = active_ ? ptx::load_shared_4B(ring.masks + at.slot * Cfg::kMaskBytes + 4 * warp_) : 0u;
      // Through a shuffle, which tells the compiler that it is uniform: descriptors live in uniform registers.
      uint32_t const stage = __shfl_sync(kFullWarp, ring.stages + at.slot * Cfg::kStageBytes, 0);
      float products[wgmma::kAccumulators];
      multiply(products, stage);
#pragma unroll
      for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
        if (mine >> slot & 1u) parent(reinterpret_cast<float(&)[2][4]>(products[8 * slot]), stage, slot);
      }
      __syncwarp();
      if (lane_ == 0) barriers::mbarrier_arrive(ring.barriers.empty_at(at.slot));
      at = at.ahead(1);
    }
    Base::finish(ring);
  }

private:
  __device__ __forceinline__ void multiply(float (&products)[wgmma::kAccumulators], uint32_t stage) const {
    wgmma::Descriptor const keys(stage + Cfg::kKeyOffset);
    wgmma::fence();
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      wgmma::mma_rs<cutlass::half_t>(products, reinterpret_cast<uint32_t const(&)[4]>(q_[kk]),
                                     keys.at(kk / 4 * Cfg::kKeyPanelBytes + kk % 4 * 32), kk > 0);
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::pin(products);
  }

  __device__ __forceinline__ void parent(float (&raw)[2][4], uint32_t stage, int slot) {
    bool const last = position_ < kSiblings;
    bool const infinite = Base::apply_scales(stage + Cfg::kScaleOffset + slot * Cfg::kScaleBytes, raw);
    if constexpr (Cfg::kReadsValues) {
      uint32_t const dead = Base::closed(last);
      Base::fetch_closed(1);
      uint32_t p[4];
      Base::exponentials(raw, dead, p);
      Base::add_values(stage + Cfg::kValueOffset + slot * Cfg::kValueBytes, p, 0, last, infinite);
    } else {
      Base::consider(raw, 0, last);
    }
    Base::advance(1);
  }
};

}  // namespace htree_cuda::layer

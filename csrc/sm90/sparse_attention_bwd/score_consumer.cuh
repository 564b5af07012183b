// The consumer warpgroup that makes P and dS of a CTA with 64 heads. Per tile of 64 keys
//   scores   S = Q K^T and dP = dO V^T of all heads and keys
//   softmax  P and dS, rounded, to shared memory
//   dq       dq += dS K on the first kDqCols columns, in accumulators for the whole unit
// It is a tile ahead of sum_consumer.cuh where that has room for P and dS.
#pragma once

#include <cstdint>

#include "device/barriers.cuh"
#include "device/gather.cuh"
#include "device/ptx.cuh"
#include "device/query_groups.cuh"
#include "device/wgmma.cuh"
#include "barriers.cuh"
#include "config.cuh"
#include "steps.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

template <class C>
class ScoreConsumer {
public:
  using Element = typename C::Element;

  __device__ __forceinline__ ScoreConsumer(KernelParams const& p, typename C::SharedStorage& shared)
      : p_(p), barriers_(shared), operands_(shared) {}

  __device__ __forceinline__ void run() {
    float dq[C::kDqCols / 2];
    for (query_groups::WorkList<KernelParams> work(p_); !work.done(); work.next()) {
      Unit const u = work.unit();
      if (u.tiles == 0) {
        store_zeros<C>(p_, u, u.group * C::kGroupHeads, C::kGroupHeads, warp() * 32 + lane());
        continue;
      }
      barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.q_full, rounds_ >> 1, "sparse_attention_bwd: Q");
      rounds_ ^= 2;
#pragma unroll
      for (int i = 0; i < C::kDqCols / 2; ++i) dq[i] = 0.f;
#pragma unroll 1
      for (int left = u.tiles; left > 0; --left) {
        tile(u, dq);
        rounds_ ^= 1;
      }
      barriers::warp_arrive(barriers_.q_empty);
      store_dq(u, dq);
    }
  }

private:
  // Derived where it is needed: registers are scarce.
  __device__ __forceinline__ int warp() const { return static_cast<int>(ptx::opaque(threadIdx.x) / 32 % C::kWarps); }

  static constexpr int kScores = C::kTileKeys / 2;  // accumulators of 64 heads by the tile's keys

  __device__ __forceinline__ void tile(Unit const& u, float (&dq)[C::kDqCols / 2]) {
    // S, then dP.
    float s[kScores];
    float dp[kScores];
    wgmma::Descriptor const keys(uniform(operands_.keys));
    wgmma::Descriptor const q(uniform(operands_.q));
    wgmma::Descriptor const dout(uniform(operands_.dout));
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.keys_full(part), rounds_ & 1,
                                                           "sparse_attention_bwd: keys");
      wgmma::fence();
#pragma unroll
      for (int i = 0; i < C::kPartPanels * C::kPanelSteps; ++i) {
        int const at = (part * C::kPartPanels + i / C::kPanelSteps) * C::kPanelBytes + i % C::kPanelSteps * 32;
        wgmma::mma_ss<Element>(s, q.at(at), keys.at(at), part > 0 || i > 0);
      }
      wgmma::commit();
    }
    // The same address, of which the compiler does not know that it is: it would keep descriptors of the scores' products.
    wgmma::Descriptor const values(uniform(ptx::opaque(operands_.keys)));
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < C::kValuePanels * C::kPanelSteps; ++i) {
      int const at = i / C::kPanelSteps * C::kPanelBytes + i % C::kPanelSteps * 32;
      wgmma::mma_ss<Element>(dp, dout.at(at), values.at(at), i > 0);
    }
    wgmma::commit();

    // Meanwhile what follows from the slots and the heads alone.
    int const first_head = u.group * C::kGroupHeads + warp() * 16;
    float lse2[2];
    load_lse2(p_, u, first_head, lse2, fresh_lane());
    wgmma::wait<1>();
    wgmma::pin(s);
    exponentiate(p_, lse2, s);
    HeadTerms terms[2];
    load_terms(p_, u, first_head, terms, fresh_lane());
    uint32_t const valid = valid_keys<C::kTileKeys>(operands_.rows, fresh_lane());
    wgmma::wait<0>();
    wgmma::pin(dp);
    form_operands(terms, valid, s, dp);
    barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.ds_empty, ~rounds_ & 1,
                                                         "sparse_attention_bwd: room for dS");
    publish<Element>(operands_.p, warp() * 16, 0, s, fresh_lane());
    publish<Element>(operands_.ds, warp() * 16, 0, dp, fresh_lane());
    ptx::fence_proxy_async_shared();
    __syncwarp();
    barriers::warp_arrive(barriers_.ds_full);
    barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.ds_full, rounds_ & 1, "sparse_attention_bwd: dS");

    wgmma::Descriptor const ds(uniform(operands_.ds));
    wgmma::Descriptor const columns(uniform(operands_.keys), C::kPanelBytes);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < C::kKeySteps; ++i) {
      wgmma::mma_ss<Element, Major::MN>(dq, ds.at(i * 32), columns.at(i * kRowStep), true);
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::pin(dq);
    barriers::release(barriers_.keys_empty);
  }

  __device__ __forceinline__ void store_dq(Unit const& u, float const (&dq)[C::kDqCols / 2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const head = u.group * C::kGroupHeads + warp() * 16 + fresh_lane() / 4 + 8 * i;
      if (head >= p_.h_q) continue;
      store_columns<Element>(p_.dq + 2 * ((static_cast<int64_t>(u.row) * p_.h_q + head) * C::kHeadDim + 2 * (fresh_lane() % 4)),
                             dq, i);
    }
  }

  KernelParams const& p_;
  Barriers<C> const barriers_;
  Operands<C> const operands_;
  // Bit 0: parity of the tile, of its keys and of its P and dS. Bit 1: of the unit.
  uint32_t rounds_ = 0;
};

}  // namespace htree_cuda::sm90::sparse_attention_bwd

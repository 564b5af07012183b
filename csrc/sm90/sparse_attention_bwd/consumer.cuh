// The consumer warpgroups. Per tile of 64 keys, each of the two
//   scores   S = Q K^T and dP = dO V^T of 64 heads and its own 32 keys
//   softmax  P and dS, rounded, to shared memory for both
//   dq       dq += dS K on its own columns, in accumulators for the whole unit
//   dkv      dS^T Q + P^T dO of all 64 keys on its own columns, panel by panel; while one panel's sums leave for global
//            memory, the tensor cores multiply the next
// Own columns are four panels of 64, and half of the ninth panel of 576.
#pragma once

#include <cstdint>
#include <utility>

#include "device/barriers.cuh"
#include "device/gather.cuh"
#include "device/ptx.cuh"
#include "device/query_groups.cuh"
#include "device/wgmma.cuh"
#include "barriers.cuh"
#include "config.cuh"
#include "steps.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

template <class C, int kMe>
class Consumer {
public:
  using Element = typename C::Element;

  __device__ __forceinline__ Consumer(KernelParams const& p, typename C::SharedStorage& shared, int warp)
      : p_(p), barriers_(shared), warp_(warp), keys_(ptx::shared_address(&shared.keys[0])),
        q_(ptx::shared_address(&shared.q[0])), dout_(ptx::shared_address(&shared.dout[0])),
        p_operand_(ptx::shared_address(&shared.p[0])), ds_operand_(ptx::shared_address(&shared.ds[0])),
        rows_(ptx::shared_address(&shared.rows[0])) {}

  __device__ __forceinline__ void run() {
    float dq[wgmma::kValueAccumulators];
    float dq_tail[kTail];
    for (query_groups::WorkList<KernelParams> work(p_); !work.done(); work.next()) {
      Unit const u = work.unit();
      if (u.tiles == 0) {
        store_zeros<C>(p_, u, u.group * C::kGroupHeads, C::kGroupHeads, kMe * 128 + warp_ * 32 + lane());
        continue;
      }
      barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.q_full, rounds_ >> 1, "sparse_attention_bwd: Q");
      rounds_ ^= 2;
#pragma unroll
      for (int i = 0; i < wgmma::kValueAccumulators; ++i) dq[i] = 0.f;
#pragma unroll
      for (int i = 0; i < kTail; ++i) dq_tail[i] = 0.f;
#pragma unroll 1
      for (int left = u.tiles; left > 0; --left) {
        tile(u, dq, dq_tail);
        rounds_ ^= 1;
      }
      barriers::warp_arrive(barriers_.q_empty);
      store_dq(u, dq, dq_tail);
    }
  }

private:
  static constexpr int kTail = C::kTailCols ? C::kTailCols / 2 : 1;
  static constexpr int kOwn = C::kOwnKeys / 2;             // accumulators of 64 heads by its own keys

  __device__ __forceinline__ void tile(Unit const& u, float (&dq)[wgmma::kValueAccumulators], float (&dq_tail)[kTail]) {
    // S, then dP.
    float s[kOwn];
    float dp[kOwn];
    wgmma::Descriptor const own_keys(uniform(keys_ + kMe * C::kOwnKeys * gather::kPanelBytesPerRow));
    wgmma::Descriptor const q(uniform(q_));
    wgmma::Descriptor const dout(uniform(dout_));
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.keys_full(part), rounds_ & 1,
                                                           "sparse_attention_bwd: keys");
      wgmma::fence();
#pragma unroll
      for (int i = 0; i < C::kPartPanels * C::kPanelSteps; ++i) {
        int const at = (part * C::kPartPanels + i / C::kPanelSteps) * C::kPanelBytes + i % C::kPanelSteps * 32;
        wgmma::mma_ss<Element>(s, q.at(at), own_keys.at(at), part > 0 || i > 0);
      }
      wgmma::commit();
    }
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < C::kValuePanels * C::kPanelSteps; ++i) {
      int const at = i / C::kPanelSteps * C::kPanelBytes + i % C::kPanelSteps * 32;
      wgmma::mma_ss<Element>(dp, dout.at(at), own_keys.at(at), i > 0);
    }
    wgmma::commit();

    // Meanwhile what follows from the slots and the heads alone.
    int const key = warp_ * 16 + lane() / 4;
    int const row[2] = {static_cast<int>(ptx::load_shared_4B(rows_ + 4 * key)),
                        static_cast<int>(ptx::load_shared_4B(rows_ + 4 * (key + 8)))};
    HeadTerms terms[2];
    load_terms(p_, u, u.group * C::kGroupHeads + warp_ * 16, terms, lane());
    wgmma::wait<1>();
    wgmma::pin(s);
    exponentiate(p_, {terms[0].lse2, terms[1].lse2}, s);
    uint32_t const valid = valid_keys<C::kOwnKeys>(rows_ + 4 * kMe * C::kOwnKeys, lane());
    wgmma::wait<0>();
    wgmma::pin(dp);
    form_operands(terms, valid, s, dp);
    barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.ds_empty, ~rounds_ & 1,
                                                         "sparse_attention_bwd: room for dS");
    publish<Element>(p_operand_, warp_ * 16, kMe * (C::kOwnKeys / 8), s, lane());
    publish<Element>(ds_operand_, warp_ * 16, kMe * (C::kOwnKeys / 8), dp, lane());
    ptx::fence_proxy_async_shared();
    __syncwarp();
    barriers::warp_arrive(barriers_.ds_full);
    barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.ds_full, rounds_ & 1, "sparse_attention_bwd: dS");

    // The products of dq += dS K.
    wgmma::Descriptor const ds(uniform(ds_operand_));
    wgmma::Descriptor const columns(uniform(keys_ + kMe * C::kOwnPanels * C::kPanelBytes), C::kPanelBytes);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < C::kKeySteps; ++i) {
      wgmma::mma_ss<Element, Major::MN>(dq, ds.at(i * 32), columns.at(i * kRowStep), true);
    }
    if constexpr (C::kTailCols > 0) {
      wgmma::Descriptor const tail(uniform(keys_ + C::kValuePanels * C::kPanelBytes + kMe * C::kTailCols * 2));
#pragma unroll
      for (int i = 0; i < C::kKeySteps; ++i) {
        wgmma::mma_ss<Element, Major::MN>(dq_tail, ds.at(i * 32), tail.at(i * kRowStep), true);
      }
    }
    wgmma::commit();

    // dkv, some columns at a time: while their sums leave, the other consumer's products keep the tensor cores busy. A second
    // set of sums in flight takes registers that there are not.
    Target<C> const target = target_of<C>(p_, u, row);
    float sums[C::kSumCols / 2];
    multiply_columns(sums, 0);
    wgmma::wait<1>();
    wgmma::pin(dq);
    if constexpr (C::kTailCols > 0) wgmma::pin(dq_tail);
    barriers::warp_arrive(barriers_.keys_empty);
#pragma unroll
    for (int column = 0; column < C::kOwnCols; column += C::kSumCols) {
      bool const last = column + C::kSumCols == C::kOwnCols;
      wgmma::wait<0>();
      wgmma::pin(sums);
      if (C::kTailCols == 0 && last) barriers::warp_arrive(barriers_.ds_empty);
      add<C>(target, sums, kMe * C::kOwnCols + column, lane());
      if (!last) multiply_columns(sums, column + C::kSumCols);
    }
    if constexpr (C::kTailCols > 0) {
      float tail[kTail];
      multiply_tail(tail);
      wgmma::wait<0>();
      wgmma::pin(tail);
      barriers::warp_arrive(barriers_.ds_empty);
      add<C>(target, tail, C::kValueDim + kMe * C::kTailCols, lane());
    }
  }

  // sums = dS^T Q + P^T dO of the tile on this consumer's columns from `column` on.
  __device__ __forceinline__ void multiply_columns(float (&sums)[C::kSumCols / 2], int column) const {
    int const at = (kMe * C::kOwnPanels + column / C::kPanelCols) * C::kPanelBytes + column % C::kPanelCols * 2;
    multiply<Element, C::kHeadSteps>(sums, ds_operand_, q_ + at, false);
    multiply<Element, C::kHeadSteps>(sums, p_operand_, dout_ + at, true);
    wgmma::commit();
  }

  // The same on its half of the panel past the values.
  __device__ __forceinline__ void multiply_tail(float (&sums)[kTail]) const {
    multiply<Element, C::kHeadSteps>(sums, ds_operand_, q_ + C::kValuePanels * C::kPanelBytes + kMe * C::kTailCols * 2, false);
    wgmma::commit();
  }

  __device__ __forceinline__ void store_dq(Unit const& u, float const (&dq)[wgmma::kValueAccumulators],
                                           float const (&dq_tail)[kTail]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const head = u.group * C::kGroupHeads + warp_ * 16 + lane() / 4 + 8 * i;
      if (head >= p_.h_q) continue;
      char* const to = p_.dq + 2 * ((static_cast<int64_t>(u.row) * p_.h_q + head) * C::kHeadDim + 2 * (lane() % 4));
      store_columns<Element>(to + 2 * kMe * C::kOwnPanels * C::kPanelCols, dq, i);
      if constexpr (C::kTailCols > 0) store_columns<Element>(to + 2 * (C::kValueDim + kMe * C::kTailCols), dq_tail, i);
    }
  }

  KernelParams const& p_;
  Barriers<C> const barriers_;
  int const warp_;
  uint32_t const keys_, q_, dout_, p_operand_, ds_operand_, rows_;
  // Bit 0: parity of the tile, of its keys and of its P and dS. Bit 1: of the unit.
  uint32_t rounds_ = 0;
};

}  // namespace htree_cuda::sm90::sparse_attention_bwd

// The consumer warpgroup that adds to dkv, of a CTA with 64 heads. Per tile of 64 keys, once score_consumer.cuh has made
// P and dS,
//   dkv      dS^T Q + P^T dO of all 64 keys, some columns at a time, two such sums in registers: while one leaves for
//            global memory, the tensor cores multiply the next. The last two leave while P and dS of the next tile come, so
//            that memory nearly always has something to add
//   dq       dq += dS K on the columns from kDqCols on, in accumulators for the whole unit, beside the first sums
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
class SumConsumer {
public:
  using Element = typename C::Element;

  __device__ __forceinline__ SumConsumer(KernelParams const& p, typename C::SharedStorage& shared)
      : p_(p), barriers_(shared), operands_(shared) {}

  __device__ __forceinline__ void run() {
    float dq[C::kDqCols / 2];
    float tails[2][kTail];
    for (query_groups::WorkList<KernelParams> work(p_); !work.done(); work.next()) {
      Unit const u = work.unit();
      if (u.tiles == 0) {
        store_zeros<C>(p_, u, u.group * C::kGroupHeads, C::kGroupHeads, 128 + warp() * 32 + lane());
        continue;
      }
      barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.q_full, rounds_ >> 1, "sparse_attention_bwd: Q");
      rounds_ ^= 2;
#pragma unroll
      for (int i = 0; i < C::kDqCols / 2; ++i) dq[i] = 0.f;
#pragma unroll
      for (int i = 0; i < kTail; ++i) tails[0][i] = tails[1][i] = 0.f;
#pragma unroll 1
      for (int left = u.tiles; left > 0; --left) {
        tile(u, dq, tails);
        rounds_ ^= 1;
      }
      barriers::warp_arrive(barriers_.q_empty);
      store_dq(u, dq, tails);
    }
  }

private:
  // Derived where it is needed: registers are scarce.
  __device__ __forceinline__ int warp() const { return static_cast<int>(ptx::opaque(threadIdx.x) / 32 % C::kWarps); }

  static constexpr int kTail = C::kTailCols ? C::kTailCols / 4 : 1;  // accumulators of half of the columns past the values
  static constexpr int kPieces = C::kHeadDim / C::kSumCols;
  static_assert(kPieces % 2 == 0);

  __device__ __forceinline__ void tile(Unit const& u, float (&dq)[C::kDqCols / 2], float (&tails)[2][kTail]) {
    float sums[2][C::kSumCols / 2];
    barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.ds_full, rounds_ & 1, "sparse_attention_bwd: dS");
    multiply_piece(sums[0], 0);
    wgmma::commit();
    multiply_dq(dq, tails);
    multiply_piece(sums[1], 1);
    wgmma::commit();
    Target<C> const target = target_of<C>(p_, u, operands_.rows, warp() * 16, fresh_lane());
#pragma unroll
    for (int piece = 0; piece < kPieces - 2; ++piece) {
      wgmma::wait<1>();
      wgmma::pin(sums[piece % 2]);
      if (piece == 1) {
        wgmma::pin(dq);
        if constexpr (C::kTailCols > 0) {
          wgmma::pin(tails[0]);
          wgmma::pin(tails[1]);
        }
        barriers::release(barriers_.keys_empty);
      }
      add<C>(p_, u, target, sums[piece % 2], piece * C::kSumCols, fresh_lane());
      multiply_piece(sums[piece % 2], piece + 2);
      wgmma::commit();
    }
    wgmma::wait<0>();
    wgmma::pin(sums[0]);
    wgmma::pin(sums[1]);
    barriers::warp_arrive(barriers_.ds_empty);
    add<C>(p_, u, target, sums[0], (kPieces - 2) * C::kSumCols, fresh_lane());
    add<C>(p_, u, target, sums[1], (kPieces - 1) * C::kSumCols, fresh_lane());
  }

  // dq += dS K.
  __device__ __forceinline__ void multiply_dq(float (&dq)[C::kDqCols / 2], float (&tails)[2][kTail]) const {
    wgmma::Descriptor const ds(uniform(operands_.ds));
    wgmma::Descriptor const columns(uniform(operands_.keys + C::kDqCols / C::kPanelCols * C::kPanelBytes), C::kPanelBytes);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < C::kKeySteps; ++i) {
      wgmma::mma_ss<Element, Major::MN>(dq, ds.at(i * 32), columns.at(i * kRowStep), true);
    }
    if constexpr (C::kTailCols > 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wgmma::Descriptor const tail(uniform(operands_.keys + C::kValuePanels * C::kPanelBytes + half * C::kTailCols));
#pragma unroll
        for (int i = 0; i < C::kKeySteps; ++i) {
          wgmma::mma_ss<Element, Major::MN>(tails[half], ds.at(i * 32), tail.at(i * kRowStep), true);
        }
      }
    }
  }

  // Columns `piece` of dkv.
  __device__ __forceinline__ void multiply_piece(float (&sums)[C::kSumCols / 2], int piece) const {
    int const column = piece * C::kSumCols;
    int const at = column / C::kPanelCols * C::kPanelBytes + column % C::kPanelCols * 2;
    wgmma::fence();
    multiply<Element, C::kHeadSteps>(sums, operands_.ds, operands_.q + at, false);
    if (column < C::kValueDim) multiply<Element, C::kHeadSteps>(sums, operands_.p, operands_.dout + at, true);
  }

  __device__ __forceinline__ void store_dq(Unit const& u, float const (&dq)[C::kDqCols / 2],
                                           float const (&tails)[2][kTail]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const head = u.group * C::kGroupHeads + warp() * 16 + fresh_lane() / 4 + 8 * i;
      if (head >= p_.h_q) continue;
      char* const to = p_.dq + 2 * ((static_cast<int64_t>(u.row) * p_.h_q + head) * C::kHeadDim + 2 * (fresh_lane() % 4));
      store_columns<Element>(to + 2 * C::kDqCols, dq, i);
      if constexpr (C::kTailCols > 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          store_columns<Element>(to + 2 * C::kValueDim + half * C::kTailCols, tails[half], i);
        }
      }
    }
  }

  KernelParams const& p_;
  Barriers<C> const barriers_;
  Operands<C> const operands_;
  // Bit 0: parity of the tile, of its keys and of its P and dS. Bit 1: of the unit.
  uint32_t rounds_ = 0;
};

}  // namespace htree_cuda::sm90::sparse_attention_bwd

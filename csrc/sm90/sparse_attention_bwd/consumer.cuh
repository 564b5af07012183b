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
#include "device/pairs.cuh"
#include "device/ptx.cuh"
#include "device/query_groups.cuh"
#include "device/wgmma.cuh"
#include "barriers.cuh"
#include "config.cuh"
#include "order.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

using query_groups::Unit;
using WorkList = query_groups::WorkList<KernelParams>;
using wgmma::Major;

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
    for (WorkList work(p_); !work.done(); work.next()) {
      Unit const u = work.unit();
      if (u.tiles == 0) {
        store_zeros(u);
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
  static constexpr int kRowStep = wgmma::kDepth * gather::kPanelBytesPerRow;

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

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
    load_terms(u, terms);
    wgmma::wait<1>();
    wgmma::pin(s);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      s[i] = ptx::exp2_movable(fmaf(s[i], p_.scale_log2, -terms[i / 2 % 2].lse2));
    }
    uint32_t const valid = own_valid();
    wgmma::wait<0>();
    wgmma::pin(dp);
    // What does not count is replaced and not only weighted by zero: 0 * NaN is NaN.
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      bool const counts = valid >> (i / 4 * 2 + i % 2) & 1;
      HeadTerms const& head = terms[i / 2 % 2];
      dp[i] = counts ? s[i] * fmaf(head.slope, dp[i], head.offset) : 0.f;
      s[i] = counts ? s[i] * head.weight : 0.f;
    }
    barriers::mbarrier_wait<barriers::Waiting::kPolling>(barriers_.ds_empty, ~rounds_ & 1,
                                                         "sparse_attention_bwd: room for dS");
    publish(p_operand_, s);
    publish(ds_operand_, dp);
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
    Target const target = target_of(u, row);
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
      add(target, sums, kMe * C::kOwnCols + column);
      if (!last) multiply_columns(sums, column + C::kSumCols);
    }
    if constexpr (C::kTailCols > 0) {
      float tail[kTail];
      multiply_tail(tail);
      wgmma::wait<0>();
      wgmma::pin(tail);
      barriers::warp_arrive(barriers_.ds_empty);
      add(target, tail, C::kValueDim + kMe * C::kTailCols);
    }
  }

  // The terms of this thread's two heads. Heads past h_q have S = 0.
  __device__ __forceinline__ void load_terms(Unit const& u, HeadTerms (&terms)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const head = u.group * C::kGroupHeads + warp_ * 16 + lane() / 4 + 8 * i;
      int64_t const at = static_cast<int64_t>(u.row) * p_.h_q + min(head, p_.h_q - 1);
      float4 const x = __ldg(reinterpret_cast<float4 const*>(p_.terms) + at);
      terms[i] = {head < p_.h_q ? x.x : INFINITY, x.y, x.z, x.w};
    }
  }

  // A bit for each of this thread's own keys, 2 (lane % 4) + 0..1 of every eight: bit 2 j + i.
  __device__ __forceinline__ uint32_t own_valid() const {
    uint32_t valid = 0;
#pragma unroll
    for (int j = 0; j < C::kOwnKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const row = ptx::load_shared_4B(rows_ + 4 * (kMe * C::kOwnKeys + 8 * j + 2 * (lane() % 4) + i));
        valid |= (row >= 0 ? 1u : 0u) << (2 * j + i);
      }
    }
    return valid;
  }

  // 64 heads by this consumer's keys, rounded, to its columns of an operand.
  __device__ __forceinline__ void publish(uint32_t operand, float const (&x)[kOwn]) const {
    int const head = warp_ * 16 + lane() % 16;
#pragma unroll
    for (int j = 0; j < C::kOwnKeys / 8; j += 2) {
      uint32_t const fragment[4] = {pack(x[4 * j], x[4 * j + 1]), pack(x[4 * j + 2], x[4 * j + 3]),
                                    pack(x[4 * j + 4], x[4 * j + 5]), pack(x[4 * j + 6], x[4 * j + 7])};
      uint32_t const chunk = kMe * (C::kOwnKeys / 8) + j + lane() / 16;
      ptx::store_matrix_x4(operand + gather::swizzled_offset(head, chunk), fragment);
    }
  }

  __device__ __forceinline__ static uint32_t pack(float low, float high) { return Pairs<Element>::pack(low, high); }

  // sums = dS^T Q + P^T dO of the tile on this consumer's columns from `column` on.
  __device__ __forceinline__ void multiply_columns(float (&sums)[C::kSumCols / 2], int column) const {
    int const at = (kMe * C::kOwnPanels + column / C::kPanelCols) * C::kPanelBytes + column % C::kPanelCols * 2;
    multiply(sums, ds_operand_, q_ + at, false);
    multiply(sums, p_operand_, dout_ + at, true);
    wgmma::commit();
  }

  // The same on its half of the panel past the values.
  __device__ __forceinline__ void multiply_tail(float (&sums)[kTail]) const {
    multiply(sums, ds_operand_, q_ + C::kValuePanels * C::kPanelBytes + kMe * C::kTailCols * 2, false);
    wgmma::commit();
  }

  template <int kCount>
  __device__ __forceinline__ static void multiply(float (&sums)[kCount], uint32_t weights, uint32_t rows,
                                                  bool accumulate) {
    wgmma::Descriptor const a(uniform(weights));
    wgmma::Descriptor const b(uniform(rows));
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < C::kHeadSteps; ++i) {
      wgmma::mma_ss_transposed<Element>(sums, a.at(i * kRowStep), b.at(i * kRowStep), accumulate || i > 0);
    }
  }

  // ---- sums of dkv -----------------------------------------------------------------------------------------------

  // Where this thread's two rows of a tile are added.
  struct Target {
    typename Order<C::kSums>::Sum* row[2];
    float factor[2];
  };

  __device__ __forceinline__ Target target_of(Unit const& u, int const (&row)[2]) const {
    Target target;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int64_t const at = static_cast<int64_t>(u.b) * p_.s_kv + max(row[i], 0);
      // Null where there is none.
      target.row[i] = row[i] < 0 ? nullptr : static_cast<typename Order<C::kSums>::Sum*>(p_.sums) + at * C::kHeadDim;
      if constexpr (C::kSums == Sums::kDeterministic) target.factor[i] = __ldg(p_.factors + at);
    }
    return target;
  }

  // Adds 64 keys by 2 kCount columns from `column` on, as order.cuh says.
  template <int kCount>
  __device__ __forceinline__ void add(Target const& target, float const (&sums)[kCount], int column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (C::kSums == Sums::kAtomic) {
        float* const to = target.row[i] + column + 4 * (lane() % 4);
#pragma unroll
        for (int j = 0; j < kCount / 4; j += 2) {
          float const* const x = &sums[4 * j + 2 * i];
          ptx::reduce_add_16B_if(target.row[i] != nullptr, to + 8 * j, make_float4(x[0], x[1], x[4], x[5]));
        }
      } else {
        long long* const to = target.row[i] + column + lane() % 4;
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float const x = sums[4 * j + 2 * i + c] * target.factor[i];
            ptx::reduce_add_rounded_if(target.row[i] != nullptr, to + 8 * j + 4 * c, x);
          }
        }
      }
    }
  }

  // ---- dq --------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void store_dq(Unit const& u, float const (&dq)[wgmma::kValueAccumulators],
                                           float const (&dq_tail)[kTail]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const head = u.group * C::kGroupHeads + warp_ * 16 + lane() / 4 + 8 * i;
      if (head >= p_.h_q) continue;
      char* const to = p_.dq + 2 * ((static_cast<int64_t>(u.row) * p_.h_q + head) * C::kHeadDim + 2 * (lane() % 4));
#pragma unroll
      for (int j = 0; j < wgmma::kValueAccumulators / 4; ++j) {
        __stcs(reinterpret_cast<uint32_t*>(to + 2 * (kMe * C::kOwnPanels * C::kPanelCols + 8 * j)),
               pack(dq[4 * j + 2 * i], dq[4 * j + 2 * i + 1]));
      }
      if constexpr (C::kTailCols > 0) {
#pragma unroll
        for (int j = 0; j < kTail / 4; ++j) {
          __stcs(reinterpret_cast<uint32_t*>(to + 2 * (C::kValueDim + kMe * C::kTailCols + 8 * j)),
                 pack(dq_tail[4 * j + 2 * i], dq_tail[4 * j + 2 * i + 1]));
        }
      }
    }
  }

  // A query without slots.
  __device__ __forceinline__ void store_zeros(Unit const& u) const {
    constexpr int kChunks = C::kHeadDim / 8;
    int const first = u.group * C::kGroupHeads;
    int const heads = min(C::kGroupHeads, p_.h_q - first);
    char* const to = p_.dq + 2 * (static_cast<int64_t>(u.row) * p_.h_q + first) * C::kHeadDim;
    for (int i = kMe * 128 + warp_ * 32 + lane(); i < heads * kChunks; i += C::kConsumers * 128) {
      __stcs(reinterpret_cast<uint4*>(to + 16 * i), uint4{0, 0, 0, 0});
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

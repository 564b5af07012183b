// From a unit's unnormalised output in accumulators to out and lse in global memory: both consumers' sums are added,
// the sink joins the denominator, and each warp passes its 16 rows, 64 columns at a time, through its consumer's
// probabilities (which nobody reads any more) so that a store instruction writes whole 128-byte lines.
#pragma once

#include <cstdint>

#include "device/barriers.cuh"
#include "device/gather.cuh"
#include "device/pairs.cuh"
#include "device/ptx.cuh"
#include "config.cuh"
#include "softmax.cuh"
#include "work.cuh"

namespace htree_cuda::sm90::sparse_attention {

template <class C>
class Epilogue {
public:
  __device__ __forceinline__ Epilogue(KernelParams const& p, typename C::SharedStorage& shared, int warpgroup, int warp)
      : p_(p), me_(warpgroup), warp_(warp), row_sum_(ptx::shared_address(&shared.row_sum[0][0][0])),
        staging_(ptx::shared_address(&shared.probabilities[warpgroup][0])),
        meeting_(ptx::shared_address(&shared.meeting)) {}

  __device__ __forceinline__ void store(Unit const& u, float const (&out)[wgmma::kValueAccumulators],
                                        Softmax<C> const& softmax) {
    int const row = warp_ * 16 + lane() / 4;
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = softmax.sum(i);
      if (lane() % 4 == 0) ptx::store_shared_4B(sum_address(me_, row + 8 * i), __float_as_uint(sum[i]));
    }
    barriers::mbarrier_arrive(meeting_);
    wait_for(meeting_, unit_parity_, "sparse_attention: the other consumer's sums");
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __uint_as_float(ptx::load_shared_4B(sum_address(1 - me_, row + 8 * i)));
      int const head = u.group * C::kGroupHeads + row + 8 * i;
      bool const exists = head < p_.h_q;
      float denominator = sum[i];
      if (p_.sink != nullptr && exists) {
        denominator += ptx::exp2_movable(fmaf(__ldg(p_.sink + head * p_.sink_stride), kLog2E, -softmax.offset(i)));
      }
      inverse[i] = sum[i] == 0.f ? 0.f : 1.f / denominator;
      if (exists && me_ == 0 && lane() % 4 == 0) {
        p_.lse[static_cast<int64_t>(u.row) * p_.h_q + head] =
            sum[i] == 0.f ? -INFINITY : (softmax.offset(i) + log2f(sum[i])) * p_.lse_scale;
      }
    }
    // The sums are read before this consumer can come to the meeting after next, and overwritten after it.
    unit_parity_ ^= 1;
    uint32_t const first = staging_ + gather::swizzled_offset(row, 0) + lane() % 4 * 4;
#pragma unroll
    for (int panel = 0; panel < 2 * C::kQuarterPanels; ++panel) {
#pragma unroll
      for (int block = 0; block < 8; ++block) {
        float const* const x = &out[4 * (8 * panel + block)];
        uint32_t const at = first ^ (block * gather::kChunkBytes);
        ptx::store_shared_4B(at, Pairs<typename C::Element>::pack(x[0] * inverse[0], x[1] * inverse[0]));
        ptx::store_shared_4B(at + 8 * gather::kPanelBytesPerRow,
                             Pairs<typename C::Element>::pack(x[2] * inverse[1], x[3] * inverse[1]));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const staged = warp_ * 16 + 4 * i + lane() / 8;
        uint4 const chunk = ptx::load_shared_16B(staging_ + gather::swizzled_offset(staged, lane() % 8));
        int const head = u.group * C::kGroupHeads + staged;
        if (head < p_.h_q) store_chunk(u, head, (me_ * 2 * C::kQuarterPanels + panel) * 8 + lane() % 8, chunk);
      }
      __syncwarp();  // the next panel, or the next unit's probabilities, go to the same place
    }
  }

  // The sums of a part of a list, as they are; join.cuh does the rest.
  __device__ __forceinline__ void store_part(Unit const& u, float const (&out)[wgmma::kValueAccumulators],
                                             Softmax<C> const& softmax) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = warp_ * 16 + lane() / 4 + 8 * i;
      float const sum = softmax.sum(i);
      if (first_head<C>(p_, u) + row >= p_.h_q) continue;
      int64_t const at = part_row(u) + row;
      if (lane() % 4 == 0) {
        PartTerms& terms = p_.part_terms[at];
        terms.sum[me_] = sum;
        if (me_ == 0) terms.offset = softmax.offset(i);
      }
      float* const to = p_.part_out + at * C::kValueDim + me_ * (C::kValueDim / 2) + lane() % 4 * 2;
#pragma unroll
      for (int j = 0; j < wgmma::kValueAccumulators / 4; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(out[4 * j + 2 * i], out[4 * j + 2 * i + 1]);
      }
    }
  }

  // A query, or a part of its list, without slots.
  __device__ __forceinline__ void store_empty(Unit const& u) const {
    constexpr int kChunks = C::kValueDim / 8;
    int const thread = me_ * 128 + warp_ * 32 + lane();
    int const first = first_head<C>(p_, u);
    int const heads = min(C::kGroupHeads, p_.h_q - first);
    if constexpr (C::kParts) {
      if (thread < heads) p_.part_terms[part_row(u) + thread] = {kNoOffset, {0.f, 0.f}};
    } else {
      for (int i = thread; i < heads * kChunks; i += C::kConsumers * 128) {
        store_chunk(u, first + i / kChunks, i % kChunks, uint4{0, 0, 0, 0});
      }
      if (thread < heads) p_.lse[static_cast<int64_t>(u.row) * p_.h_q + first + thread] = -INFINITY;
    }
  }

private:
  __device__ __forceinline__ int64_t part_row(Unit const& u) const {
    return (static_cast<int64_t>(u.row) * p_.groups + u.group) * C::kGroupHeads;
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ uint32_t sum_address(int consumer, int row) const {
    return row_sum_ + 4 * ((unit_parity_ * C::kConsumers + consumer) * C::kGroupHeads + row);
  }

  // Eight columns of a row of out, which nobody here reads again.
  __device__ __forceinline__ void store_chunk(Unit const& u, int head, int chunk, uint4 value) const {
    int64_t const row = static_cast<int64_t>(u.row) * p_.h_q + head;
    __stcs(reinterpret_cast<uint4*>(p_.out + (row * C::kValueDim + 8 * chunk) * 2), value);
  }

  KernelParams const& p_;
  int const me_, warp_;
  uint32_t const row_sum_, staging_, meeting_;
  uint32_t unit_parity_ = 0;
};

}  // namespace htree_cuda::sm90::sparse_attention

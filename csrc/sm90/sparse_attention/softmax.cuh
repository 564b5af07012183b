// Online softmax of one consumer: rows lane / 4 and lane / 4 + 8 of its warp's 16 heads.
//
// Exponentials are taken relative to an offset that both consumers agree on, tile by tile: whoever computed a tile's
// scores leaves the offset beside the probabilities. It moves up when a score exceeds it by more than kSlack (binary)
// and otherwise stays behind the maximum, so that the output is rarely rescaled; float32 sums and the exponent ranges
// of bfloat16 and float16 have room for 2^8.
#pragma once

#include <cstdint>

#include "device/pairs.cuh"
#include "device/ptx.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::sparse_attention {

template <class C>
class Softmax {
public:
  static constexpr float kSlack = 8.f;

  __device__ __forceinline__ Softmax(KernelParams const& p, typename C::SharedStorage& shared, int warpgroup, int warp)
      : p_(p), me_(warpgroup), probabilities_(ptx::shared_address(&shared.probabilities[warpgroup][0])),
        row_max_(ptx::shared_address(&shared.row_max[0][0])),
        moved_(ptx::shared_address(&shared.moved[0][0])), valid_(ptx::shared_address(&shared.valid[warpgroup][0])),
        row_(warp * 16 + lane() / 4) {}

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      offset_[i] = kNoOffset;
      sum_[i] = 0.f;
      factor_[i] = 1.f;
    }
  }

  // Scores of a tile of this consumer to probabilities, in the fragments of WGMMA's A operand.
  __device__ __forceinline__ void exponentiate(float (&scores)[wgmma::kAccumulators],
                                               uint32_t (&probabilities)[C::kTileSteps][4]) {
    // An infinite score becomes NaN, as in the definition, and its row with it: minus infinity would pass as a slot
    // that does not count.
#pragma unroll
    for (int i = 0; i < wgmma::kAccumulators; ++i) {
      scores[i] = fmaf(scores[i], p_.scale_log2, scores[i] * 0.f);
    }
    mask(scores);
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < wgmma::kAccumulators; ++i) {
      largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = quad_max(largest[i]);
      move_offset(i, largest[i] > offset_[i] + kSlack ? largest[i] : offset_[i]);
    }
#pragma unroll
    for (int step = 0; step < C::kTileSteps; ++step) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // 8 step + 2 part: columns of one row
        int const i = 8 * step + 2 * part;
        int const row = part % 2;
        float const low = ptx::exp2_movable(scores[i] - offset_[row]);
        float const high = ptx::exp2_movable(scores[i + 1] - offset_[row]);
        sum_[row] += low + high;
        probabilities[step][part] = Pairs<typename C::Element>::pack(low, high);
      }
    }
  }

  // Leaves for the other consumer: the probabilities as WGMMA reads them from shared memory, their offsets, and whether
  // this warp moved one of them.
  __device__ __forceinline__ void publish(uint32_t const (&probabilities)[C::kTileSteps][4], bool moved) const {
    // Row r keeps 16-byte chunk c at c ^ (r % 8); both rows of this thread are lane / 4 modulo 8.
    uint32_t const first = probabilities_ + gather::swizzled_offset(row_, 0) + lane() % 4 * 4;
#pragma unroll
    for (int step = 0; step < C::kTileSteps; ++step) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        uint32_t const chunk = 2 * step + part / 2;
        ptx::store_shared_4B((first ^ (chunk * gather::kChunkBytes)) + part % 2 * 8 * gather::kPanelBytesPerRow,
                             probabilities[step][part]);
      }
    }
    if (lane() % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::store_shared_4B(offset_address(me_, i), __float_as_uint(offset_[i]));
      }
    }
    if (lane() == 0) ptx::store_shared_4B(moved_ + 4 * (me_ * C::kWarps + row_ / 16), moved);
    ptx::fence_proxy_async_shared();
    __syncwarp();
  }

  // Adopts the offsets of the other consumer's latest tile. Returns whether a warp moved one of them, the same in all
  // threads of the warpgroup: between tiles both outputs are relative to the same offsets, so that the offsets of both
  // move together.
  __device__ __forceinline__ bool take_offsets() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      move_offset(i, __uint_as_float(ptx::load_shared_4B(offset_address(1 - me_, i))));
    }
    static_assert(C::kWarps == 4);
    uint4 const moved = ptx::load_shared_16B(moved_ + 4 * (1 - me_) * C::kWarps);
    return (moved.x | moved.y | moved.z | moved.w) != 0;
  }

  // Whether a row of the warp has moved away from the offset to which the output is relative. A factor of one changes
  // no bit, so that skipping the rescale of other warps does not make a row depend on its neighbours.
  __device__ __forceinline__ bool has_moved() const {
    return __any_sync(kFullWarp, factor_[0] != 1.f || factor_[1] != 1.f);
  }

  // Rescales the output from the offset before to the latest one.
  __device__ __forceinline__ void rescale(float (&out)[wgmma::kValueAccumulators]) const {
#pragma unroll
    for (int i = 0; i < wgmma::kValueAccumulators; ++i) {
      out[i] *= factor_[i / 2 % 2];
    }
  }

  __device__ __forceinline__ float offset(int i) const { return offset_[i]; }
  // This consumer's part of the denominator, the same in the four lanes of a row.
  __device__ __forceinline__ float sum(int i) const { return quad_sum(sum_[i]); }

private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ uint32_t offset_address(int consumer, int i) const {
    return row_max_ + 4 * (consumer * C::kGroupHeads + row_ + 8 * i);
  }

  __device__ __forceinline__ void move_offset(int i, float offset) {
    // Before the first valid slot there is only zero to scale.
    factor_[i] = offset_[i] == kNoOffset ? 1.f : ptx::exp2_movable(offset_[i] - offset);
    sum_[i] *= factor_[i];
    offset_[i] = offset;
  }

  // Minus infinity for the slots that do not count.
  __device__ __forceinline__ void mask(float (&scores)[wgmma::kAccumulators]) const {
    uint32_t const valid[2] = {ptx::load_shared_4B(valid_), ptx::load_shared_4B(valid_ + 4)};
    if ((valid[0] & valid[1]) == 0xffffffffu) return;
    // This thread's columns, 2 (lane % 4) + 0..1 of every eight, are bits 2 (lane % 2) + 0..1 of every four.
    uint32_t const own = (lane() & 2 ? valid[1] : valid[0]) >> (lane() % 2 * 2);
#pragma unroll
    for (int i = 0; i < wgmma::kAccumulators; ++i) {
      scores[i] = own >> (i / 4 * 4 + i % 2) & 1 ? scores[i] : -INFINITY;
    }
  }

  KernelParams const& p_;
  int const me_;
  uint32_t const probabilities_, row_max_, moved_, valid_;
  int const row_;
  float offset_[2];  // binary: of score * scale_log2
  float sum_[2];     // over this thread's columns of this consumer's tiles
  float factor_[2];  // from the offset before to this one
};

}  // namespace htree_cuda::sm90::sparse_attention

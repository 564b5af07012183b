// Walk::kBelow: a warp computes the scores of its query against one selected parent after the other, by ldmatrix and
// mma.sync. A rank has a RoPE position of its own, so the query turns for every parent.
#pragma once

#include "consumer.cuh"

namespace htree_cuda::layer {

template <class Cfg>
class BelowConsumer : public Consumer<Cfg> {
  using Base = Consumer<Cfg>;
  using Base::active_;
  using Base::add_values;
  using Base::advance;
  using Base::apply_scales;
  using Base::args_;
  using Base::closed;
  using Base::consider;
  using Base::exponentials;
  using Base::fetch_closed;
  using Base::groups_;
  using Base::kHalf;
  using Base::kK;
  using Base::kV;
  using Base::lane_;
  using Base::position_;
  using Base::q_;
  using Base::rightmost;
  using Base::tq_;
  using Base::value_lane_;
  using Base::warp_;
  // Turns that are loaded ahead, in ranks and in k-steps of one; registers decide.
  static constexpr int kFetched = Cfg::kReadsValues ? 1 : 2;
  static constexpr int kAhead = Cfg::kReadsValues && kK == 128 && kV == 128 ? kHalf / 2 : kHalf;

public:
  __device__ explicit BelowConsumer(Args const& args) : Base(args), key_lane_(Base::lane_offset(Cfg::kKeyRowBytes)) {}

  __device__ void run(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    if (active_ && position_ >= 0) {
#pragma unroll
      for (int i = 0; i < kFetched; ++i) fetch(i, i);
    }
    for (int group = 0; group < groups_; ++group) {
      ring.barriers.wait_full(at, "htree_layer consumer: full");
      uint32_t mine = active_ ? ptx::load_shared_4B(ring.masks + at.slot * Cfg::kMaskBytes + 4 * warp_) : 0u;
      uint32_t const stage = ring.stages + at.slot * Cfg::kStageBytes;
#pragma unroll 1
      while (mine != 0) {
        uint32_t const first = stage + (__ffs(mine) - 1) * Cfg::kSlotBytes;
        mine &= mine - 1;
        if (mine != 0) {
          two_parents(first, stage + (__ffs(mine) - 1) * Cfg::kSlotBytes);
          mine &= mine - 1;
        } else {
          one_parent(first);
        }
      }
      __syncwarp();
      if (lane_ == 0) barriers::mbarrier_arrive(ring.barriers.empty_at(at.slot));
      at = at.ahead(1);
    }
    Base::finish(ring);
  }

private:
  __device__ __forceinline__ rope::Turns turns(int ahead, int kk) const {
    int const further = position_ - kSiblings * ahead * args_.rank_step;
    rope::Turns const* const row = args_.fragment_turns + ((further < 0 ? rightmost() : further) * (kK / 8) + tq_);
    uint4 const x = __ldg(reinterpret_cast<uint4 const*>(row + kk * 4));
    return *reinterpret_cast<rope::Turns const*>(&x);
  }

  // k-steps in the order in which scores take them: the first half of them touches every 128-byte line of a row of
  // turns, so that the others, loaded when they are needed, come from L1.
  static constexpr int step_at(int i) { return kHalf == 4 ? (i % 2) * 2 + i / 2 : i; }

  // What the parent `ahead` ranks further needs; the last parent's where there is none.
  __device__ __forceinline__ void fetch(int buffer, int ahead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetched_[buffer][i] = turns(ahead, step_at(i));
    if constexpr (Cfg::kReadsValues) fetch_closed(ahead);
  }

  // Two chains of products where registers allow: their latency is what these passes wait for; beside O, the products of
  // the parent before fill the gaps of one. Returns whether some value of the parent is not finite.
  __device__ __forceinline__ bool scores(uint32_t slot, int ahead, float (&raw)[2][4]) {
    constexpr bool kTwoChains = !Cfg::kReadsValues;
    float second[2][4];
    float(&upper)[2][4] = kTwoChains ? second : raw;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[tile][e] = second[tile][e] = 0.0f;
    }
    rope::Turns late[kHalf - kAhead + 1];
#pragma unroll
    for (int i = kAhead; i < kHalf; ++i) late[i - kAhead] = turns(ahead, step_at(i));
    // Where the rows are equally long, one register serves keys and values.
    uint32_t const keys = slot + Cfg::kKeyOffset + (kK == kV ? value_lane_ : key_lane_);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      int const kk = step_at(i);
      half2 lo[4], hi[4];
      rope::turn_fragments(lo, hi, q_[kk], q_[kk + kHalf],
                           i < kAhead ? fetched_[ahead % kFetched][i] : late[i - kAhead]);
      uint32_t b[4];
      ptx::load_matrix_x4(b, keys ^ (kk << 5));
      auto const& a_lo = reinterpret_cast<uint32_t const(&)[4]>(lo);
      ptx::mma_fp16(raw[0], a_lo, b[0], b[1]);
      ptx::mma_fp16(raw[1], a_lo, b[2], b[3]);
      ptx::load_matrix_x4(b, keys ^ ((kk + kHalf) << 5));
      auto const& a_hi = reinterpret_cast<uint32_t const(&)[4]>(hi);
      ptx::mma_fp16(upper[0], a_hi, b[0], b[1]);
      ptx::mma_fp16(upper[1], a_hi, b[2], b[3]);
    }
    if constexpr (kTwoChains) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) raw[tile][e] += second[tile][e];
      }
    }
    return apply_scales(slot + Cfg::kScaleOffset, raw);
  }

  __device__ __forceinline__ void one_parent(uint32_t slot) {
    bool const last = position_ < kSiblings;
    float raw[2][4];
    bool const infinite = scores(slot, 0, raw);
    if constexpr (Cfg::kReadsValues) {
      uint32_t const dead = closed(last);
      fetch(0, 1);
      uint32_t p[4];
      exponentials(raw, dead, p);
      add_values(slot + Cfg::kValueOffset, p, 0, last, infinite);
    } else {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) fetched_[0][i] = fetched_[1][i];
      fetch(1, 2);
      consider(raw, 0, last);
    }
    advance(1);
  }

  __device__ __forceinline__ void two_parents(uint32_t slot, uint32_t next_slot) {
    bool const last = position_ < 2 * kSiblings;
    float raw[2][4], next[2][4];
    bool const infinite = scores(slot, 0, raw);
    if constexpr (Cfg::kReadsValues) {
      uint32_t const dead = closed(false);
      fetch(0, 1);
      uint32_t p[4];
      exponentials(raw, dead, p);
      bool const next_infinite = scores(next_slot, 1, next);  // between the products of the first
      add_values(slot + Cfg::kValueOffset, p, 0, false, infinite);
      uint32_t const next_dead = closed(last);
      fetch(0, 2);
      exponentials(next, next_dead, p);
      add_values(next_slot + Cfg::kValueOffset, p, 1, last, next_infinite);
    } else {
      scores(next_slot, 1, next);
      fetch(0, 2);
      fetch(1, 3);
      consider(raw, 0, false);
      consider(next, 1, last);
    }
    advance(2);
  }

  uint32_t const key_lane_;
  rope::Turns fetched_[kFetched][kAhead];
};

}  // namespace htree_cuda::layer

// Score passes in a selected layer, see rotating.cuh. Products with a parent's keys pass beside the exponentials of the one before it;
// LayerKind::kHalfSelected: two parents that nothing lies between are taken together, and done with before others are.
#pragma once

#include "rope_inplace.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
class SelectedScore : public RotatingConsumer<Cfg> {
  using Base = RotatingConsumer<Cfg>;
  using Base::active_;
  using Base::advance;
  using Base::args_;
  using Base::overflows;
  using Base::clear;
  using Base::cursor_;
  using Base::exponents;
  using Base::exponents_of;
  using Base::fetch_rotation;
  using Base::groups_;
  using Base::kHalfSelected;
  using Base::kSteps;
  using Base::left_;
  using Base::load_keys;
  using Base::multiply_keys;
  using Base::position_;
  using Base::release;
  using Base::rest_of;
  using Base::scales_of;
  using Base::slot_of;
  using Base::sum_;
  using Base::rotate;
  using Base::rotate_to;
  using Base::warp_;
  using Base::was_last;

public:
  __device__ SelectedScore(Args const& args, Ring<Cfg> const& ring)
      : Base(args, ring), column_(static_cast<int>(ptx::opaque(Base::column()))) {}

  // The lse, then the importance relative to it: the parents pass by twice.
  __device__ void run(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    score_all<Sweep::kLse>(ring, at);
    if (active_) {
      Base::finish_lse(ring);
      Base::repeat_sweep();
      if constexpr (kHalfSelected) Base::keep_restart(position_);
      if (Base::split()) Base::skip(warp_);
      left_ = -1;
      ptx::copy_async_wait<0>();  // rotates of a rank behind the last may be on their way
      __syncwarp();
      fetch_rotation(0);
      if constexpr (kHalfSelected) Base::restart_rotation();
    }
    score_all<Sweep::kImportance>(ring, at);
  }

private:
  template <Sweep kSweep>
  __device__ __forceinline__ void score_all(Ring<Cfg> const& ring, RingPosition<Cfg::kStages>& at) {
    Ring<Cfg> const own(ptx::opaque(ring.stages));
    Scored scored;
    clear(scored.scores, -Base::kInfinity);
    scored.scale = 1.0f;
    scored.cursor = cursor_;  // what is written there before there is a parent, is written again
    uint32_t next_query_mask = 0;   // kHalfSelected: of the stage behind the one at hand
    if (kHalfSelected && groups_ > 0 && active_) {
      own.barriers.wait_full(at, "htree_fwd consumer: full");
      next_query_mask = ptx::load_shared_4B(own.mask(own.stage(at.slot), warp_));
    }
#pragma unroll 1
    for (int groups = groups_; groups > 0; --groups) {
      own.barriers.wait_full(at, "htree_fwd consumer: full");
      uint32_t const stage = own.stage(at.slot);
      if constexpr (kHalfSelected) {
        uint32_t const query_mask = next_query_mask;
        if (active_) next_query_mask = ptx::load_shared_4B(own.next_mask(stage, warp_));
        score_stage<kSweep>(stage, query_mask);
      } else {
        uint32_t query_mask = active_ ? ptx::load_shared_4B(own.mask(stage, warp_)) : 0u;
        uint32_t slot = slot_of(stage, query_mask);
#pragma unroll 1
        while (query_mask != 0) {
          rotate_to(stage, query_mask);
          query_mask = rest_of(query_mask);
          uint32_t const next = slot_of(stage, query_mask);
          score<kSweep>(slot, scored);
          slot = next;
        }
      }
      release(stage);
      at = at.ahead(1);
    }
    if (!kHalfSelected && left_ >= 0) account_last<kSweep>(scored);  // there was a parent
  }

  // What is known of the parent that waits, in a scoring pass.
  struct Scored {
    float scores[2][4];  // lse: products, which the scale has not met; importance: exponents
    float scale;
    int cursor;
  };

  // A round of a scoring pass.
  template <Sweep kSweep>
  __device__ __forceinline__ void score(uint32_t slot, Scored& scored) {
    account<kSweep>(scored);
    float scale = ptx::load_shared_float(scales_of(slot));
    float products[2][4];
    clear(products, 0.0f);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t keys[4];
      load_keys(keys, slot, i);
      multiply_keys(products, keys, i);
      if constexpr (!kHalfSelected) rotate(i);
    }
    Base::settle(scale, scales_of(slot), products);
    if constexpr (kSweep == Sweep::kImportance) {
      importance_exponents(scale, products, scored.scores);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) scored.scores[i / 4][i % 4] = products[i / 4][i % 4];
    }
    scored.scale = scale;
    scored.cursor = cursor_;
    advance();
  }

  // kHalfSelected: the parents `mine` of a stage. Two are taken together where the query leaves none out between them, so that chains
  // of products and exponentials of one pass beside those of the other; what they come to is the same, bitwise: which ones
  // share a stage is a matter of the neighbours.
  template <Sweep kSweep>
  __device__ __forceinline__ void score_stage(uint32_t stage, uint32_t query_mask) {
    constexpr uint32_t kNext = 8;
#pragma unroll 1
    while (query_mask != 0) {
      rotate_to(stage, query_mask);
      if ((query_mask & ~Cfg::kGapMask) == kWholeStage && score_whole<kSweep>(stage)) return;
      // The lse takes the last parent of all alone, and leaves children out there.
      bool const inner = kSweep == Sweep::kImportance || position_ >= 2 * kSiblings;
      if ((query_mask >> kNext & (Cfg::kTaken | Cfg::kGapMask)) == Cfg::kTaken && inner) {
        score_together<kSweep, 2>({slot_of(stage, query_mask), slot_of(stage, query_mask >> kNext)});
        query_mask >>= 2 * kNext;
      } else {
        score_together<kSweep, 1>({slot_of(stage, query_mask)});
        query_mask >>= kNext;
      }
    }
  }

  // kHalfSelected: all parents of a stage in straight line, exponentials of two beside products of the others. Where a maximum would
  // rise or keys have scales of their own nothing is done: they are taken two by two then, and what they come to is the same.
  template <Sweep kSweep>
  __device__ __forceinline__ bool score_whole(uint32_t stage) {
    constexpr int kParents = Cfg::kStageSlots;
    if (kSweep == Sweep::kLse ? position_ < kParents * kSiblings : Base::far_) return false;
    float scale[kParents];
    float x[kParents][2][4];  // products, then their exponents
#pragma unroll
    for (int parent = 0; parent < kParents; ++parent) {
      scale[parent] = ptx::load_shared_float(scales_of(stage + parent * Cfg::kSlotBytes));
      clear(x[parent], 0.0f);
    }
#pragma unroll
    for (int first = 0; first < kParents; first += 2) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int parent = first; parent < first + 2; ++parent) {
          uint32_t keys[4];
          load_keys(keys, stage + parent * Cfg::kSlotBytes, i);
          multiply_keys(x[parent], keys, i);
        }
      }
    }
    if constexpr (kSweep == Sweep::kLse) {
      float sum[kParents][2];
      bool asked = false;
#pragma unroll
      for (int parent = 0; parent < kParents; ++parent) {
        exponents(Base::factors(scale[parent]), x[parent], x[parent]);
        asked |= overflows(x[parent]);
        sum_up(x[parent], sum[parent]);
      }
      if (__any_sync(kFullWarp, asked)) return false;
#pragma unroll
      for (int parent = 0; parent < kParents; ++parent) {
        sum_[0] += sum[parent][0];
        sum_[1] += sum[parent][1];
      }
    } else {
      bool const shared = !isnan((scale[0] + scale[1]) + (scale[2] + scale[3]));
#pragma unroll
      for (int parent = 0; parent < kParents; ++parent) {
        exponents(Base::finite_factors(scale[parent]), x[parent], x[parent]);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[parent][e / 4][e % 4] = ptx::exp2_movable(x[parent][e / 4][e % 4]);
      }
#pragma unroll
      for (int first = 0; first < kParents; first += 2) {
        Base::add_columns_of_two(reinterpret_cast<float const(&)[2][2][4]>(x[first]), cursor_ + first, shared);
      }
      if (!shared) return false;
    }
#pragma unroll
    for (int parent = 0; parent < kParents; ++parent) advance();
    return true;
  }

  template <Sweep kSweep, int kParents>
  __device__ __forceinline__ void score_together(uint32_t const (&slots)[kParents]) {
    float scale[kParents];
    float products[kParents][2][4];
#pragma unroll
    for (int parent = 0; parent < kParents; ++parent) {
      scale[parent] = ptx::load_shared_float(scales_of(slots[parent]));
      clear(products[parent], 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int parent = 0; parent < kParents; ++parent) {
        uint32_t keys[4];
        load_keys(keys, slots[parent], i);
        multiply_keys(products[parent], keys, i);
      }
    }
    if (isnan(kParents == 1 ? scale[0] : scale[0] + scale[kParents - 1])) {
#pragma unroll
      for (int parent = 0; parent < kParents; ++parent) {
        Base::settle(scale[parent], scales_of(slots[parent]), products[parent]);
      }
    }
    if constexpr (kSweep == Sweep::kLse) {
      if (kParents == 1 && position_ < kSiblings) {
        Base::apply(scale[0], products[0]);
        Base::add_to_lse(products[0], true);
      } else {
        normalise(scale, products);
      }
    } else {
      float x[kParents][2][4];
#pragma unroll
      for (int parent = 0; parent < kParents; ++parent) {
        importance_exponents(scale[parent], products[parent], x[parent]);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[parent][e / 4][e % 4] = ptx::exp2_movable(x[parent][e / 4][e % 4]);
      }
      if constexpr (kParents == 1) {
        Base::add_columns(x[0], cursor_, column_);
      } else {
        Base::add_columns_of_two(x, cursor_);
      }
    }
#pragma unroll
    for (int parent = 0; parent < kParents; ++parent) advance();
  }

  __device__ __forceinline__ void importance_exponents(float scale, float (&products)[2][4], float (&x)[2][4]) const {
    if (!Base::far_) {
      exponents(Base::finite_factors(scale), products, x);
    } else {
      Base::apply(scale, products);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i / 4][i % 4] = Base::importance_exponent(i % 4 / 2, products[i / 4][i % 4]);
      }
    }
  }

  static __device__ __forceinline__ void sum_up(float const (&x)[2][4], float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = (ptx::exp2_movable(x[0][2 * i]) + ptx::exp2_movable(x[0][2 * i + 1])) +
               (ptx::exp2_movable(x[1][2 * i]) + ptx::exp2_movable(x[1][2 * i + 1]));
    }
  }

  // Adds parents to the lse, in their order.
  template <int kParents>
  __device__ __forceinline__ void normalise(float const (&scale)[kParents], float (&products)[kParents][2][4]) {
    float x[kParents][2][4];
    float sum[kParents][2];
    bool again = false;
#pragma unroll
    for (int parent = 0; parent < kParents; ++parent) {
      exponents(Base::factors(scale[parent]), products[parent], x[parent]);
      again |= overflows(x[parent]);
      sum_up(x[parent], sum[parent]);  // while the warp votes
    }
    if (__any_sync(kFullWarp, again)) {
#pragma unroll
      for (int parent = 0; parent < kParents; ++parent) {
        if (kParents > 1) {  // the maximum that the one before raised may do
          exponents(Base::factors(scale[parent]), products[parent], x[parent]);
          sum_up(x[parent], sum[parent]);
        }
        if (kParents == 1 || __any_sync(kFullWarp, overflows(x[parent]))) {
          Base::apply(scale[parent], products[parent]);
          Base::template raise_own<1>(products[parent]);
          exponents_of(products[parent], x[parent]);
          sum_up(x[parent], sum[parent]);
        }
        sum_[0] += sum[parent][0];
        sum_[1] += sum[parent][1];
      }
      return;
    }
#pragma unroll
    for (int parent = 0; parent < kParents; ++parent) {
      sum_[0] += sum[parent][0];
      sum_[1] += sum[parent][1];
    }
  }

  template <Sweep kSweep>
  __device__ __forceinline__ void account(Scored& scored) {
    if constexpr (kSweep == Sweep::kLse) {
      normalise<1>({scored.scale}, reinterpret_cast<float(&)[1][2][4]>(scored.scores));
    } else {
      float x[2][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[tile][e] = ptx::exp2_movable(scored.scores[tile][e]);
      }
      Base::add_columns(x, scored.cursor, column_);
    }
  }

  template <Sweep kSweep>
  __device__ __forceinline__ void account_last(Scored& scored) {
    if constexpr (kSweep == Sweep::kLse) {
      Base::apply(scored.scale, scored.scores);
      Base::add_to_lse(scored.scores, was_last());
    } else {
      account<kSweep>(scored);
    }
  }

  static constexpr uint32_t kWholeStage = 0x03020100u + 0x01010101u * Cfg::kTaken;  // every slot, no gap between two of them
  int const column_;
};

}  // namespace htree_cuda::sm90::htree_fwd

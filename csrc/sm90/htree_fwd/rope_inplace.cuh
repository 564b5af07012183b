// Below their entry layer, what passes have in common: queries that rotation from parent to parent, and products with keys.
//
// A warp computes the scores of its query against one selected parent after the other, by mma.sync, whose operands lie in shared
// memory as lanes read them (tree_pack). A rank has a RoPE position of its own, so the query rotates from parent to parent: in
// place, by the sixteen positions between them, with rotations that stay in registers. It restarts from the query itself and the
// table every few ranks of its own (`Args::restart_period`), before what rounding adds up to matters.
//
// LayerKind::kHalfSelected: keys are rotated by their node, so that what lies between query and key changes where the query leaves parents
// out: then it rotates by sixteen positions for each of them, the other way round, and restarts after restart_period of those.
#pragma once

#include "consumer.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
class RotatingConsumer : public Consumer<Cfg> {
protected:
  using Base = Consumer<Cfg>;
  using Base::active_;
  using Base::args_;
  using Base::cursor_;
  using Base::kK;
  using Base::kSlack;
  using Base::kSteps;
  using Base::lane_;
  using Base::position_;
  using Base::q_;
  using Base::warp_;
  using Factors = typename Base::Factors;
  static constexpr bool kHalfSelected = Cfg::kKind == LayerKind::kHalfSelected;

  __device__ RotatingConsumer(Args const& args, Ring<Cfg> const& ring)
      : Base(args),
        shared_(ring.stages - Cfg::kRingOffset),
        fragment_lane_(ptx::opaque(lane_ * 16)) {
    if (!active_) return;
    int const g = lane_ / 4;
    bool const holds = lane_ % 4 == g / 2;
#pragma unroll
    for (int i = 0; i < kK / 32; ++i) {
      uint4 const x = __ldg(reinterpret_cast<uint4 const*>(args.step_rotation + g * (kK / 32) + i));
      uint32_t const words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        step_[4 * i + tile] = !holds ? 0u : kHalfSelected ? words[tile] : rope::inverse_column(words[tile], g);
      }
    }
    uint32_t const zeros = fetched_rotation() + Cfg::kZerosOffset;
    if (lane_ < 4) ptx::store_shared_16B(zeros + lane_ * 16, {0, 0, 0, 0});
    if constexpr (kHalfSelected) keep_restart(position_);
    if (Base::split()) skip(warp_);
    if constexpr (Cfg::kReadsValues) {
      uint32_t const saved = saved_query();
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
        auto const& x = reinterpret_cast<uint32_t const(&)[4]>(q_[kk]);
        ptx::store_shared_16B(saved + kk * 512, {x[0], x[1], x[2], x[3]});
      }
    }
    fetch_rotation(0);
    if constexpr (kHalfSelected) restart_rotation();
  }

  __device__ __forceinline__ void release(uint32_t stage) const {
    barriers::release(stage + Cfg::kEmptyOffset);
  }

  static __device__ __forceinline__ void clear(float (&products)[2][4], float value) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) products[tile][e] = value;
    }
  }

  // The first slot of those that are left of a word of the stage.
  static __device__ __forceinline__ uint32_t slot_of(uint32_t stage, uint32_t query_mask) {
    return stage + (kHalfSelected ? query_mask & Cfg::kSlotMask : __ffs(query_mask) - 1) * Cfg::kSlotBytes;
  }

  // And the others.
  static __device__ __forceinline__ uint32_t rest_of(uint32_t query_mask) { return kHalfSelected ? query_mask >> 8 : query_mask & (query_mask - 1); }

  // Beside O there are no registers for the query as it is: each thread leaves its part in shared memory.
  // What is needed every few ranks alone is found out again there: registers are scarcer than instructions.
  __device__ __forceinline__ uint32_t saved_query() const {
    return shared_ + warp_ * (kSteps * 512) + ptx::lane_index() * 16;
  }

  // The query as the parent at hand sees it.
  __device__ __forceinline__ auto& rotated() {
    if constexpr (Cfg::kReadsValues) {
      return q_;
    } else {
      return rotated_;
    }
  }

  // The rotations of the rank at hand are fetched while the ranks before it pass.
  __device__ __forceinline__ uint32_t fetched_rotation() const {
    return shared_ + Cfg::kRotationOffset + warp_ * Cfg::kRotationBytes;
  }

  // Those of the rank that many further. kHalfSelected: of where it restarts next.
  __device__ __forceinline__ void fetch_rotation(int ranks) const {
    int const position = kHalfSelected ? kept_restart() : position_ - ranks * kSiblings;
    int const lane = static_cast<int>(ptx::lane_index());
    bool const exists = kHalfSelected ? position < own<Cfg>(args_).restarts : position >= 0;
    if (exists && lane < Cfg::kColumnsBytes / 16) {
      ptx::copy_async_16B(fetched_rotation() + lane * 16, own<Cfg>(args_).restart_rotations + (position * (kK / 4) + lane), 0);
    }
    ptx::copy_async_commit();
  }

  // A split query: on by so many periods, which are others' to sum.
  __device__ __forceinline__ void skip(int periods) {
    position_ -= periods * args_.restart_period * kSiblings;
    cursor_ += periods * args_.restart_period;
  }

  // kHalfSelected: the position of the query where it restarts next.
  __device__ __forceinline__ uint32_t begin_address() const { return fetched_rotation() + Cfg::kColumnsBytes; }
  __device__ __forceinline__ int kept_restart() const { return static_cast<int>(ptx::load_shared_4B(begin_address())); }
  __device__ __forceinline__ void keep_restart(int position) const {
    __syncwarp();
    if (ptx::lane_index() == 0) ptx::store_shared_4B(begin_address(), static_cast<uint32_t>(position));
    __syncwarp();
  }

  // Before the first parent of `mine`.
  __device__ __forceinline__ void rotate_to(uint32_t stage, uint32_t query_mask) {
    if constexpr (kHalfSelected) {
      if (query_mask & Cfg::kGapMask) rotate_over_gap(stage, query_mask);
    } else if (left_ <= 0) {
      if (Base::split() && left_ == 0) skip(Cfg::kConsumers - 1);
      restart_rotation();
    }
  }

  __device__ __forceinline__ void rotate_over_gap(uint32_t stage, uint32_t query_mask) {
    int steps = static_cast<int>((query_mask & Cfg::kGapMask) >> Cfg::kSlotBits);
    if (steps == static_cast<int>(Cfg::kMaxGap)) {
      // The last of top_k parents is the query's own.
      if (Base::split() && !Base::takes(args_.top_k - 1 - (position_ >> kLog2Siblings))) skip(Cfg::kConsumers - 1);
      uint32_t const parent = ptx::load_shared_4B(Ring<Cfg>::parent(stage, query_mask & Cfg::kSlotMask));
      steps = (position_ + static_cast<int>(parent) * kSiblings - kept_restart()) / kSiblings + left_;
    }
    if (steps >= left_) rotate_far(steps);
#pragma unroll 1
    for (; steps > 0; --steps) {
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) rotate(kk);
      left_ -= 1;
    }
  }

  // To where it restarts last, and how many steps are left then.
  __device__ __forceinline__ void rotate_far(int& steps) {
    steps -= left_;
    if (steps >= args_.restart_period) {
      int const rest = steps % args_.restart_period;
      keep_restart(kept_restart() + (steps - rest) * kSiblings);
      steps = rest;
      ptx::copy_async_wait<0>();
      __syncwarp();
      fetch_rotation(0);
    }
    restart_rotation();
  }

  __device__ __forceinline__ void restart_rotation() {
    ptx::copy_async_wait<0>();
    __syncwarp();
    int const lane = static_cast<int>(ptx::lane_index());
    bool const holds = lane % 4 == lane / 8;
    uint32_t const columns = fetched_rotation() + (holds ? lane / 4 * Cfg::kColumnBytes : Cfg::kZerosOffset);
#pragma unroll
    for (int i = 0; i < kK / 32; ++i) {
      uint4 const x = ptx::load_shared_16B(columns + i * 16);
      uint32_t const matrices[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int kk = 2 * i; kk < 2 * i + 2; ++kk) {
        uint32_t q[4];
        if constexpr (Cfg::kReadsValues) {
          uint4 const words = ptx::load_shared_16B(saved_query() + kk * 512);
          q[0] = words.x, q[1] = words.y, q[2] = words.z, q[3] = words.w;
        } else {
#pragma unroll
          for (int word = 0; word < 4; ++word) q[word] = reinterpret_cast<uint32_t const&>(q_[kk][word]);
        }
        multiply(kk, q, matrices[2 * kk % 4], matrices[2 * kk % 4 + 1]);
      }
    }
    __syncwarp();
    if constexpr (kHalfSelected) keep_restart(kept_restart() + args_.restart_period * kSiblings);
    fetch_rotation(args_.restart_period * (Base::split() ? Cfg::kConsumers : 1));
    left_ = args_.restart_period;
  }

  // Step kk of the rotated query: of what is given, by the matrices of its tiles.
  __device__ __forceinline__ void multiply(int kk, uint32_t const (&q)[4], uint32_t low, uint32_t high) {
    auto& to = reinterpret_cast<uint32_t(&)[4]>(rotated()[kk]);
    ptx::multiply_fp16(to[0], to[1], q[0], q[1], low);
    ptx::multiply_fp16(to[2], to[3], q[2], q[3], high);
  }

  // FragmentRotations step kk to the next rank.
  __device__ __forceinline__ void rotate(int kk) {
    multiply(kk, reinterpret_cast<uint32_t const(&)[4]>(rotated()[kk]), step_[2 * kk], step_[2 * kk + 1]);
  }

  __device__ __forceinline__ void advance() {
    position_ -= kSiblings;
    cursor_ += 1;
    if constexpr (!kHalfSelected) left_ -= 1;
  }

  // Operands B of two products, which contract 16 columns of keys or the 16 rows of 16 columns of values: one address serves
  // all of a parent, the rest is a constant.
  static constexpr int kFragmentBytes = 512;

  static __device__ __forceinline__ void load_fragment(uint32_t (&b)[4], uint32_t address) {
    uint4 const x = ptx::load_shared_16B(address);
    b[0] = x.x, b[1] = x.y, b[2] = x.z, b[3] = x.w;
  }

  __device__ __forceinline__ void load_keys(uint32_t (&b)[4], uint32_t slot, int i) const {
    load_fragment(b, slot + fragment_lane_ + Cfg::kKeyOffset + i * kFragmentBytes);
  }

  __device__ __forceinline__ void multiply_keys(float (&products)[2][4], uint32_t const (&b)[4], int i) {
    auto const& a = reinterpret_cast<uint32_t const(&)[4]>(rotated()[i]);
    ptx::mma_fp16(products[0], a, b[0], b[1]);
    ptx::mma_fp16(products[1], a, b[2], b[3]);
  }

  static __device__ __forceinline__ uint32_t scales_of(uint32_t slot) { return slot + Cfg::kScaleOffset; }

  // Exponents of the scores whose products these are, relative to the reference.
  __device__ __forceinline__ void exponents(Factors const& factors, float const (&products)[2][4],
                                            float (&x)[2][4]) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = Base::exponent_of_product(e / 2, products[tile][e], factors);
    }
  }

  // Whether one of this thread's exceeds kSlack, so that a maximum rises, or is NaN.
  static __device__ __forceinline__ bool overflows(float const (&x)[2][4]) {
    float largest[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      largest[tile] =
          ptx::max_or_nan(ptx::max_or_nan(x[tile][0], x[tile][1]), ptx::max_or_nan(x[tile][2], x[tile][3]));
    }
    return !(ptx::max_or_nan(largest[0], largest[1]) <= kSlack);
  }

  __device__ __forceinline__ void exponents_of(float const (&raw)[2][4], float (&x)[2][4]) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = Base::exponent(e / 2, raw[tile][e]);
    }
  }

  // Whether the parent that waits is the query's last.
  __device__ __forceinline__ bool was_last() const { return position_ < 0; }

  uint32_t const shared_;
  uint32_t const fragment_lane_;
  int left_ = -1;  // ranks until rotating restarts; -1: until it begins. kHalfSelected: parents left out until then
  half2 rotated_[Cfg::kReadsValues ? 1 : kSteps][4];
  uint32_t step_[kK / 8];  // the matrices that rotation a query to its next rank, kHalfSelected: over a parent that is left out
};

}  // namespace htree_cuda::sm90::htree_fwd

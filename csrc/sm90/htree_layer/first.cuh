// Walk::kFirst: a warpgroup computes the scores of its four queries against four parents at once by WGMMA, 64 heads by 64
// keys, and adds P V likewise, 64 heads by V columns; keys and values are where the bulk copy put them. All queries see the
// same parents, so nothing is read twice. What is between the two products belongs to a warp and its query alone; scores
// of parents that it does not take are ignored, and their P is zero. The queries wait in shared memory: beside O and the
// scores there are no registers for them.
#pragma once

#include <type_traits>

#include "../device/wgmma.cuh"
#include "consumer.cuh"

namespace htree_cuda::layer {

template <class Cfg>
class FirstConsumer : public Consumer<Cfg> {
  using Base = Consumer<Cfg>;
  using Base::active_;
  using Base::args_;
  using Base::cursor_;
  using Base::groups_;
  using Base::kSteps;
  using Base::kValueTiles;
  using Base::lane_;
  using Base::o_;
  using Base::position_;
  using Base::q_;
  using Base::warp_;
  static constexpr int kParents = Cfg::kStageSlots;
  static_assert(kParents * kSiblings == 64 && wgmma::kAccumulators == 8 * kParents && wgmma::kDepth == kSiblings);

public:
  __device__ explicit FirstConsumer(Args const& args) : Base(args) {}

  __device__ void run(Ring<Cfg> const& ring) {
    store_queries(queries_of(ring));
    wgmma::Descriptor const queries(queries_of(ring));
    if constexpr (Cfg::kReadsValues) {
      add_all(ring, queries);
      if (*args_.spoilt != 0) spoil();
    } else {
      score_all(ring, queries);
    }
    Base::finish(ring);
  }

private:
  // Two groups at a time: the scores of the second are under way while those of the first are considered.
  __device__ __forceinline__ void score_all(Ring<Cfg> const& ring, wgmma::Descriptor const& queries) {
    RingPosition<Cfg::kStages> begun, at;
    int group = 0;
    for (; group + 1 < groups_; group += 2) {
      float first[2 * kParents][4], second[2 * kParents][4];
      multiply_keys(first, ring, queries, begun);
      multiply_keys(second, ring, queries, begun);
      consider<1>(first, ring, at);
      consider<0>(second, ring, at);
    }
    if (group < groups_) {
      float last[2 * kParents][4];
      multiply_keys(last, ring, queries, begun);
      consider<0>(last, ring, at);
    }
  }

  __device__ __forceinline__ void add_all(Ring<Cfg> const& ring, wgmma::Descriptor const& queries) {
    RingPosition<Cfg::kStages> begun, at;
    uint32_t held = 0;  // empty barrier of the stage whose values are being multiplied
    fetch_closed();
    for (int group = 0; group < groups_; ++group) {
      float raw[2 * kParents][4];
      uint32_t const stage = multiply_keys(raw, ring, queries, begun);
      uint32_t const mine = taken(ring, at);
      Scales scales[kParents];
      load_scales(scales, stage);
      wgmma::wait<0>();
      wgmma::pin(products(raw));
      wgmma::pin(out());
      if (group > 0) release(held);
      held = ring.barriers.empty_at(at.slot);
      uint32_t p[kParents][4] = {};
      if (mine != 0) probabilities(raw, scales, mine, p);
      multiply_values(p, stage);
      position_ -= kParents * kSiblings;
      cursor_ += kParents;
      fetch_closed();
      at = at.ahead(1);
    }
    wgmma::wait<0>();
    wgmma::pin(out());
    if (groups_ > 0) release(held);
  }

  using Scales = typename Base::Scales;

  __device__ __forceinline__ auto& out() { return reinterpret_cast<float(&)[4 * kValueTiles]>(o_); }

  static __device__ __forceinline__ auto& products(float (&raw)[2 * kParents][4]) {
    return reinterpret_cast<float(&)[wgmma::kAccumulators]>(raw);
  }

  static __device__ __forceinline__ auto& of_parent(float (&raw)[2 * kParents][4], int slot) {
    return reinterpret_cast<float(&)[2][4]>(raw[2 * slot]);
  }

  // A bit for each parent of the stage that the query takes.
  __device__ __forceinline__ uint32_t taken(Ring<Cfg> const& ring, RingPosition<Cfg::kStages> const& at) const {
    return active_ ? ptx::load_shared_4B(ring.mask(ring.stage(at.slot), warp_)) : 0u;
  }

  __device__ __forceinline__ void load_scales(Scales (&scales)[kParents], uint32_t stage) const {
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      scales[slot] = Base::load_scales(stage + Cfg::kScaleOffset + slot * Cfg::kScaleBytes);
    }
  }

  __device__ __forceinline__ void release(uint32_t empty) const {
    __syncwarp();
    if (lane_ == 0) barriers::mbarrier_arrive(empty);
  }

  // Of the parents of the group at hand, those up to the query's own; the others are not written.
  __device__ __forceinline__ void fetch_closed() {
    if constexpr (Cfg::kReadsValues) {
      if (!active_ || args_.layer == 0) return;
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        if (position_ >= slot * kSiblings) closed_[slot] = args_.closed[cursor_ + slot];
      }
    }
  }

  // Where the queries of this warpgroup are.
  __device__ __forceinline__ uint32_t queries_of(Ring<Cfg> const& ring) const {
    return __shfl_sync(kFullWarp, ring.stages - Cfg::kRingOffset + warp_ / 4 * Cfg::kQueryBytes, 0);
  }

  // In the order of WGMMA's operands; a lane points stmatrix at row lane % 16 of its query, chunk lane / 16 of two.
  __device__ __forceinline__ void store_queries(uint32_t queries) const {
    int const row = warp_ % 4 * 16 + lane_ % 16;
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      int const chunk = kk % 4 * 2 + lane_ / 16;
      ptx::store_matrix_x4(queries + kk / 4 * Cfg::kQueryPanelBytes + row * 128 + ((chunk ^ row % 8) << 4),
                           reinterpret_cast<uint32_t const(&)[4]>(q_[kk]));
    }
    ptx::fence_proxy_async_shared();
    barriers::named_sync(Cfg::kQueryBarrier + warp_ / 4, 128);
  }

  // Begins the scores of the next group's parents, once it is there; returns where the stage is.
  __device__ __forceinline__ uint32_t multiply_keys(float (&raw)[2 * kParents][4], Ring<Cfg> const& ring,
                                                    wgmma::Descriptor const& queries,
                                                    RingPosition<Cfg::kStages>& begun) const {
    ring.barriers.wait_full(begun, "htree_layer consumer: full");
    // Through a shuffle, which tells the compiler that it is uniform: descriptors live in uniform registers.
    uint32_t const stage = __shfl_sync(kFullWarp, ring.stage(begun.slot), 0);
    wgmma::Descriptor const keys(stage + Cfg::kKeyOffset);
    wgmma::fence();
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      wgmma::mma_ss<cutlass::half_t>(products(raw), queries.at(kk / 4 * Cfg::kQueryPanelBytes + kk % 4 * 32),
                                     keys.at(kk / 4 * Cfg::kPanelBytes + kk % 4 * 32), kk > 0);
    }
    wgmma::commit();
    begun = begun.ahead(1);
    return stage;
  }

  // O += P V, complete when the next stage's scores are.
  __device__ __forceinline__ void multiply_values(uint32_t const (&p)[kParents][4], uint32_t stage) {
    using Element =
        std::conditional_t<std::is_same_v<typename Cfg::Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;
    wgmma::Descriptor const values(stage + Cfg::kValueOffset, Cfg::kPanelBytes);
    wgmma::pin(out());
    wgmma::fence();
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      wgmma::mma_rs<Element, wgmma::Major::MN>(out(), p[slot], values.at(slot * kSiblings * 128), true);
    }
    wgmma::commit();
  }

  // The scores of the group at hand, once at most kPending later products are not complete.
  template <int kPending>
  __device__ __forceinline__ void consider(float (&raw)[2 * kParents][4], Ring<Cfg> const& ring,
                                           RingPosition<Cfg::kStages>& at) {
    uint32_t const mine = taken(ring, at);
    Scales scales[kParents];
    load_scales(scales, ring.stage(at.slot));
    wgmma::wait<kPending>();
    wgmma::pin(products(raw));
    release(ring.barriers.empty_at(at.slot));
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) Base::apply(scales[slot], of_parent(raw, slot));
    if constexpr (Cfg::kPass == Pass::kImportance) {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) Base::weigh(of_parent(raw, slot), cursor_ + slot, mine >> slot & 1u);
    } else if (mine == (1u << kParents) - 1 && position_ >= kParents * kSiblings) {
      Base::template normalise<kParents>(raw);
    } else {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        bool const last = position_ < (slot + 1) * kSiblings;
        if (mine >> slot & 1u) Base::add_to_normaliser(of_parent(raw, slot), last);
      }
    }
    position_ -= kParents * kSiblings;
    cursor_ += kParents;
    at = at.ahead(1);
  }

  __device__ __forceinline__ void probabilities(float (&raw)[2 * kParents][4], Scales const (&scales)[kParents],
                                                uint32_t mine, uint32_t (&p)[kParents][4]) {
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      Base::apply(scales[slot], of_parent(raw, slot));
      bool const last = position_ < (slot + 1) * kSiblings;
      uint32_t dead = args_.layer > 0 ? closed_[slot] : last ? Base::behind(Base::rightmost()) : 0u;
      if ((mine >> slot & 1u) == 0) dead = 0xffffu;
      Base::mask(of_parent(raw, slot), dead);
    }
    Base::template exponentials<kParents>(raw, p);
  }

  // See Base::spoil.
  __device__ __forceinline__ void spoil() {
    QueryBlock const block(args_.blocks, ptx::block_index());
    int const count = parents_of<Cfg>(args_, block, Base::query());
#pragma unroll 1
    for (int parent = 0; parent < count; ++parent) {
      if (Base::split() && !Base::takes(parent)) continue;
      char const* const tile = Base::packed_parents() + parent / kParents * kParents * args_.block_bytes;
      if (reinterpret_cast<float const*>(tile)[parent % kParents * kSiblings] < 0.0f) Base::spoil(parent, parent);
    }
  }

  uint32_t closed_[kParents] = {};
};

}  // namespace htree_cuda::layer

// Both ends of the ring: the producer warpgroup that fills it with Q and gathered K, and the consumer warpgroups that
// multiply. One gather serves 128 heads: both consumers read the same K stages.
//
// Barriers
//   name          who arrives                           who waits           what becomes visible, or free
//   full[slot]    4 producer warps, one lane each,      the consumers it    the stage's K rows (cp.async, fenced by each
//                 after every lane waited for its own   is meant for; the   writing thread) or Q panels (TMA); all stages
//                 copies and fenced them; TMA bytes     producer, before    before it are full or have been (hand_over)
//                 where the stage is Q                  the next stage
//   empty[slot]   8 units: a warp gives one where both  the producer        the slot may be rewritten: the WGMMAs (K) or
//                 consumers read the stage, two where                       ldmatrix (Q) that read it have finished
//                 only its own does
//   named 1, 2    the 4 warps of consumer 0, 1          the same            once a segment: Q's ninth panel is written
//                                                                           and fenced; once a tile: the partial sums of
//                                                                           the tile before are written, and those of
//                                                                           the one before that have been read
//
// Stages of a segment, in order: Q of each group of 64 heads, then those of each live tile.
//   Split::kHeads   two groups; consumer c reads Q of group c, and both read every K stage
//   Split::kKeys    one group; both read its Q, and consumer c reads tiles c, c + 2, ...
#pragma once

#include <cstdint>

#include "../device/barriers.cuh"
#include "../device/gather.cuh"
#include "../device/pipeline.cuh"
#include "../device/ptx.cuh"
#include "../device/wgmma.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "work.cuh"

namespace htree_cuda::distribution {

// ---- producer --------------------------------------------------------------------------------------------------

template <class C>
class Producer {
public:
  __device__ __forceinline__ Producer(KernelParams const& p, CUtensorMap const& q_map,
                                      typename C::SharedStorage& shared, RingBarriers<C::kStages> ring)
      : p_(p), q_map_(q_map), ring_(ring), thread_(threadIdx.x % 128),
        stages_(ptx::shared_address(&shared.ring[0][0])) {}

  __device__ __forceinline__ void run() {
    gather::RowGather<C::kTileKeys> copy(thread_);
    for (WorkRange work(p_); !work.done(); work.next()) {
      Segment const g = work.segment();
      if (g.live == 0) continue;
      int const* const indices = p_.indices + static_cast<int64_t>(g.row) * p_.topk;
      char const* const k = p_.k + g.b * p_.k_stride_b;
      int slot = g.tile * C::kTileKeys + copy.row_to_load();
      int index = slot < g.length ? __ldg(indices + slot) : -1;
      load_q(g);
      for (int t = 0; t < g.live; ++t) {
        copy.point(static_cast<unsigned>(index) < static_cast<unsigned>(g.visible) ? index : -1, k, p_.k_stride_s);
        // Looked at no earlier than the next tile.
        slot += C::kTileKeys;
        index = t + 1 < g.live && slot < g.length ? __ldg(indices + slot) : -1;
#pragma unroll
        for (int st = 0; st < C::kTileStages; ++st) {
          ring_.wait_empty(at_, "attn_dist: a free stage for K");
          copy.template copy<C::kStagePanels>(stages_ + at_.slot * C::kStageBytes, st * C::kStageCols * 2);
          issued();
        }
      }
    }
    while (pending_ > 0) hand_over<0>();
  }

private:
  __device__ __forceinline__ void load_q(Segment const& g) {
    int const first = p_.first_group + g.pass * C::kGroups;
    for (int group = first; group < first + C::kGroups; ++group) {
#pragma unroll 1
      for (int st = 0; st < C::kTileStages; ++st) {
        ring_.wait_empty(at_, "attn_dist: a free stage for Q");
        if (thread_ == 0) {
          uint32_t const full = ring_.full_at(at_.slot);
          barriers::mbarrier_expect_bytes(full, C::kStageBytes);
#pragma unroll
          for (int p = 0; p < C::kStagePanels; ++p) {
            ptx::tma_load_4d(stages_ + at_.slot * C::kStageBytes + p * C::kPanelBytes, &q_map_, full, ptx::kEvictFirst,
                             st * C::kStageCols + p * C::kPanelCols, group * C::kGroupHeads * p_.q_coord_h,
                             g.s * p_.q_coord_s, g.b * p_.q_coord_b);
          }
        }
        __syncwarp();
        issued();
      }
    }
  }

  // The stage at `at_` is on its way; the one issued kCopyLag stages ago goes to the consumers.
  __device__ __forceinline__ void issued() {
    ptx::copy_async_commit();
    at_ = at_.ahead(1);
    if (++pending_ > C::kCopyLag) hand_over<C::kCopyLag>();
  }

  // Hands over the oldest of the pending stages: all but kInFlight of the issued ones have landed.
  template <int kInFlight>
  __device__ __forceinline__ void hand_over() {
    ptx::copy_async_wait<kInFlight>();
    ptx::fence_proxy_async_shared();
    // In the order of the ring: a barrier tells only the parity of its phase, so a consumer that passes over a stage of
    // the other one relies on it being complete when a later one is.
    ring_.wait_full(oldest_.behind(1), "attn_dist: the stage before");
    __syncwarp();
    if (thread_ % 32 == 0) barriers::mbarrier_arrive(ring_.full_at(oldest_.slot));
    oldest_ = oldest_.ahead(1);
    --pending_;
  }

  KernelParams const& p_;
  CUtensorMap const& q_map_;
  RingBarriers<C::kStages> const ring_;
  int const thread_;
  uint32_t const stages_;
  RingPosition<C::kStages> at_;      // to issue next
  RingPosition<C::kStages> oldest_;  // to hand over next
  int pending_ = 0;                  // stages between the two
};

// ---- consumers -------------------------------------------------------------------------------------------------

template <class C>
class Consumer {
public:
  __device__ __forceinline__ Consumer(KernelParams const& p, typename C::SharedStorage& shared,
                                      RingBarriers<C::kStages> ring, int warpgroup, int warp)
      : p_(p), ring_(ring), warpgroup_(warpgroup), warp_(warp), stages_(ptx::shared_address(&shared.ring[0][0])),
        q_panel_(ptx::shared_address(&shared.q_panel[warpgroup][0])), epilogue_(p, shared, warpgroup, warp) {}

  __device__ __forceinline__ void run() {
    for (WorkRange work(p_); !work.done(); work.next()) {
      Segment const g = work.segment();
      bool const split_heads = C::kSplit == Split::kHeads;
      int const group = p_.first_group + g.pass * C::kGroups + (split_heads ? warpgroup_ : 0);
      if (g.live < g.tiles && (split_heads || warpgroup_ == 0)) store_zeros<C>(p_, g, group, threadIdx.x % 128);
      if (g.live == 0) continue;
      bool const silent_heads = epilogue_.begin(g, group);
      load_q();
      // After this meeting the ninth panel is written.
      bool const masked = epilogue_.meet_any(silent_heads);
      if constexpr (C::kSplit == Split::kKeys) {
        alternate_tiles(g.tile, g.live);
      } else if (masked) {
        pipelined_tiles<true>(g.tile * C::kTileKeys, g.live);
      } else {
        pipelined_tiles<false>(g.tile * C::kTileKeys, g.live);
      }
    }
    epilogue_.finish_stores();
  }

private:
  // Q of this consumer's group, from the ring to registers and the ninth panel.
  __device__ __forceinline__ void load_q() {
    int const thread = threadIdx.x % 128;
    int const lane = thread % 32;
    if (C::kGroups > 1) at_ = at_.ahead(warpgroup_ * C::kTileStages);
    RingPosition<C::kStages> const first = at_;
    // ldmatrix: lane l names row l % 16 of the warp's 16, 16-byte chunk l / 16 of the two that a step takes.
    uint32_t const row = warp_ * 16 + lane % 16;
#pragma unroll
    for (int st = 0; st < C::kTileStages; ++st) {
      ring_.wait_full(at_, "attn_dist: Q");
      uint32_t const stage = stages_ + at_.slot * C::kStageBytes;
#pragma unroll
      for (int p = 0; p < C::kStagePanels; ++p) {
        int const panel = st * C::kStagePanels + p;
        if (panel < C::kRegPanels) {
#pragma unroll
          for (int k = 0; k < C::kPanelSteps; ++k) {
            ptx::load_matrix_x4(q_[panel * C::kPanelSteps + k],
                                stage + p * C::kPanelBytes + gather::swizzled_offset(row, 2 * k + lane / 16));
          }
        } else {
#pragma unroll
          for (int i = 0; i < C::kPanelBytes / (128 * 16); ++i) {
            uint32_t const at = (i * 128 + thread) * 16;
            ptx::store_shared_16B(q_panel_ + at, ptx::load_shared_16B(stage + p * C::kPanelBytes + at));
          }
        }
      }
      at_ = at_.ahead(1);
    }
    // Before the slots are given back: ldmatrix has read them (an mbarrier arrive does not wait for it, and a TMA load
    // of the next Q was seen to overtake it), and the ninth panel is visible to WGMMA.
    ptx::fence_proxy_async_shared();
    __syncwarp();
#pragma unroll
    for (int st = 0; st < C::kTileStages; ++st) {
      release(first.ahead(st).slot, C::kQueryUnits);
    }
    if (C::kGroups > 1) at_ = at_.ahead((1 - warpgroup_) * C::kTileStages);
  }

  // Heads split: `count` tiles, the first at slot `slot`. Two accumulator sets take turns: while one is written by
  // WGMMAs, the epilogue reads the other.
  template <bool kMasked>
  __device__ __forceinline__ void pipelined_tiles(int slot, int count) {
    float even[wgmma::kAccumulators];
    float odd[wgmma::kAccumulators];
    multiply<false, kMasked>(even, odd, 0, false);
    bool stored = false;  // partial sums of the tile before `slot` wait to be stored
#pragma unroll 1
    for (; count > 2; count -= 2) {
      multiply<true, kMasked>(odd, even, slot, stored);
      multiply<true, kMasked>(even, odd, slot + C::kTileKeys, true);
      slot += 2 * C::kTileKeys;
      stored = true;
    }
    if (count == 2) {
      multiply<true, kMasked>(odd, even, slot, stored);
      finish<kMasked>(odd, slot + C::kTileKeys, true);
    } else {
      finish<kMasked>(even, slot, stored);
    }
  }

  // Keys split: every other of `live` tiles from `tile` on. The gather is the limit and the other warpgroup keeps the
  // tensor cores busy, so a stage is freed as early as can be instead of running the epilogue behind the next tile.
  __device__ __forceinline__ void alternate_tiles(int tile, int live) {
    float acc[wgmma::kAccumulators];
#pragma unroll 1
    for (int t = 0; t < live; ++t) {
      if (t % 2 != warpgroup_) {
        at_ = at_.ahead(C::kTileStages);
        continue;
      }
      multiply<false, true>(acc, acc, 0, false);
      finish<true>(acc, (tile + t) * C::kTileKeys, false);
    }
  }

  // Issues the WGMMAs of the tile at `at_` into `next`, and among them the epilogue of the tile in `last`, which began at
  // slot `last_slot`. `stored`: the tile before that one has partial sums to store.
  //
  // WGMMAs queue up and run by themselves; what costs time is an empty queue. So after each panel's four the warp waits
  // for the panel before (with four still queued), does a slice of the epilogue and issues the next four. There is no
  // branch between: after one ptxas wants a warpgroup.arrive, which drains the queue. All stages of the tile are therefore
  // waited for at its beginning (they are there: the tensor cores are the limit).
  template <bool kOverlap, bool kMasked>
  __device__ __forceinline__ void multiply(float (&next)[wgmma::kAccumulators], float (&last)[wgmma::kAccumulators],
                                           int last_slot, bool stored) {
    // Through a shuffle, which tells the compiler that it is uniform: each WGMMA would else move its descriptor from
    // vector to uniform registers.
    at_.slot = uniform(at_.slot);
    wgmma::Descriptor k[C::kTileStages];
#pragma unroll
    for (int st = 0; st < C::kTileStages; ++st) {
      k[st] = wgmma::Descriptor(stages_ + at_.ahead(st).slot * C::kStageBytes);
    }
#pragma unroll
    for (int st = 0; st < C::kTileStages; ++st) ring_.wait_full(at_.ahead(st), "attn_dist: K");
    wgmma::fence();
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      int const st = panel / C::kStagePanels;
      multiply_panel(next, panel, k[st]);
      if (panel > 0 || kOverlap) wgmma::wait<1>();
      if (panel == 0 && kOverlap) {
        release(previous_slot_, C::kKeyUnits);
        wgmma::pin(last);
      } else if (panel > 0 && panel % C::kStagePanels == 0) {
        release(at_.ahead(st - 1).slot, C::kKeyUnits);
      }
      if constexpr (kOverlap) slices<kMasked, 0>(panel, last, last_slot, stored);
    }
    previous_slot_ = at_.ahead(C::kTileStages - 1).slot;
    at_ = at_.ahead(C::kTileStages);
  }

  // Four WGMMAs, a group of their own.
  __device__ __forceinline__ void multiply_panel(float (&acc)[wgmma::kAccumulators], int panel, wgmma::Descriptor k) {
    wgmma::Descriptor const q(q_panel_);
#pragma unroll
    for (int s = 0; s < C::kPanelSteps; ++s) {
      int const step = panel * C::kPanelSteps + s;
      uint64_t const b = k.at(panel % C::kStagePanels * C::kPanelBytes + s * 32);
      if (panel < C::kRegPanels) {
        wgmma::mma_rs<typename C::Element>(acc, q_[step], b, step > 0);
      } else {
        wgmma::mma_ss<typename C::Element>(acc, q.at(s * 32), b, true);
      }
    }
    wgmma::commit();
  }

  // The slices of the epilogue, from kSlice on, that come after panel `panel`.
  template <bool kMasked, int kSlice>
  __device__ __forceinline__ void slices(int panel, float (&last)[wgmma::kAccumulators], int last_slot, bool stored) {
    if constexpr (kSlice < Epilogue<C>::kSlices) {
      if (panel == kSlice * C::kPanels / Epilogue<C>::kSlices) {
        epilogue_.template slice<kMasked, kSlice>(last, last_slot, stored);
      }
      slices<kMasked, kSlice + 1>(panel, last, last_slot, stored);
    }
  }

  // The epilogue of the last tile, at slot `slot`, with nothing behind it; `stored` as above.
  template <bool kMasked>
  __device__ __forceinline__ void finish(float (&acc)[wgmma::kAccumulators], int slot, bool stored) {
    wgmma::wait<0>();
    release(previous_slot_, C::kKeyUnits);
    wgmma::pin(acc);
    finish_slices<kMasked, 0>(acc, slot, stored);
    epilogue_.meet();
    epilogue_.store(slot, true);
    epilogue_.send(slot, true);
  }

  template <bool kMasked, int kSlice>
  __device__ __forceinline__ void finish_slices(float (&acc)[wgmma::kAccumulators], int slot, bool stored) {
    if constexpr (kSlice < Epilogue<C>::kSlices) {
      epilogue_.template slice<kMasked, kSlice>(acc, slot, stored);
      finish_slices<kMasked, kSlice + 1>(acc, slot, stored);
    }
  }

  __device__ __forceinline__ void release(uint32_t slot, uint32_t units) const {
    if (threadIdx.x % 32 == 0) barriers::mbarrier_arrive(ring_.empty_at(slot), units);
  }

  KernelParams const& p_;
  RingBarriers<C::kStages> const ring_;
  int const warpgroup_, warp_;
  uint32_t const stages_, q_panel_;
  Epilogue<C> epilogue_;
  RingPosition<C::kStages> at_;
  uint32_t previous_slot_ = 0;
  uint32_t q_[C::kRegPanels * C::kPanelSteps][4];
};

}  // namespace htree_cuda::distribution

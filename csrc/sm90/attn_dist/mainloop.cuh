// Both ends of the ring: the producer warpgroup that fills it with Q and gathered K, and the consumer warpgroups that
// multiply. One gather serves 128 heads: both consumers read the same K stages.
//
// Barriers
//   name          who arrives                           who waits           what becomes visible, or free
//   full[slot]    one lane of the producer warp whose   both consumers      the stage's K rows (cp.async, fenced by each
//                 stage it is: K after every lane                           writing thread) or Q panels (TMA)
//                 waited for its copies and fenced
//                 them; Q at once, with TMA bytes
//   empty[slot]   one lane of each of the 8 consumer    the producer warp   the slot may be rewritten: the WGMMAs (K) or
//                 warps; at once where the stage is     whose stage is      ldmatrix (Q) that read it have finished
//                 meant for the other consumer          next in the slot
//   named 1, 2    the 4 warps of consumer 0, 1          the same            once a segment: Q's ninth panel is written
//                                                                           and fenced
//   named 3 .. 10 the other 3 warps of the consumer     the warp whose      the partial sums of the tile (reused four
//                                                       turn it is to store tiles on: see kStoreWithoutMeeting)
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

// The four warps take turns, a stage each: the fence that hands a stage over stalls a warp until its copies have
// landed, while the other three go on issuing.
template <class C>
class Producer {
public:
  __device__ __forceinline__ Producer(KernelParams const& p, CUtensorMap const& q_map,
                                      typename C::SharedStorage& shared, RingBarriers<C::kStages> ring, int warp)
      : p_(p), q_map_(q_map), ring_(ring), warp_(warp), lane_(threadIdx.x % 32),
        stages_(ptx::shared_address(&shared.ring[0][0])), copy_(lane_) {}

  __device__ __forceinline__ void run() {
    at_ = at_.ahead(warp_);
    int mine = warp_;  // the next stage that is this warp's turn, counted from the segment's first
    for (WorkRange work(p_); !work.done(); work.next()) {
      Segment const g = work.segment();
      if (g.live == 0) continue;
      int const q_stages = C::kGroups * C::kTileStages;
      int const stages = q_stages + g.live * C::kTileStages;
      for (; mine < q_stages; mine += C::kWarps) load_q(g, mine);
      if (mine < stages) {
        char const* const base = p_.k + g.b * p_.k_stride_b + copy_.chunk_offset();
        Rows next = load_indices(g, (mine - q_stages) / C::kTileStages);
        for (; mine < stages; mine += C::kWarps) {
          int const stage = mine - q_stages;
          // Looked at no earlier than here, a stage after they were asked for.
          Rows current;
#pragma unroll
          for (int i = 0; i < Copy::kRowsPerLane; ++i) {
            current[i] = static_cast<unsigned>(next[i]) < static_cast<unsigned>(g.visible) ? next[i] : -1;
          }
          if (mine + C::kWarps < stages) next = load_indices(g, (stage + C::kWarps) / C::kTileStages);
          load_k(base + stage % C::kTileStages * (C::kStageCols * 2), current);
        }
      }
      mine -= stages;
    }
    hand_over<0>();
  }

private:
  using Copy = gather::WarpGather<C::kTileKeys>;
  using Rows = typename Copy::Rows;

  // The indices of a tile: lane l has those of slots l and l + 32, -1 past the query's length.
  __device__ __forceinline__ Rows load_indices(Segment const& g, int t) const {
    Rows indices;
#pragma unroll
    for (int i = 0; i < Copy::kRowsPerLane; ++i) {
      int const slot = (g.tile + t) * C::kTileKeys + lane_ + 32 * i;
      indices[i] = slot < g.length ? __ldg(p_.indices + static_cast<int64_t>(g.row) * p_.topk + slot) : -1;
    }
    return indices;
  }

  __device__ __forceinline__ void load_k(char const* first_column, Rows const& rows) {
    wait_empty("attn_dist: a free stage for K");
    copy_.template copy<C::kStagePanels>(stages_ + at_.slot * C::kStageBytes, first_column, p_.k_stride_s, rows);
    ptx::copy_async_commit();
    hand_over<1>();
    pending_ = ring_.full_at(at_.slot);
    at_ = at_.ahead(C::kWarps);
  }

  __device__ __forceinline__ void load_q(Segment const& g, int stage) {
    wait_empty("attn_dist: a free stage for Q");
    if (lane_ == 0) {
      int const group = p_.first_group + g.pass * C::kGroups + stage / C::kTileStages;
      uint32_t const full = ring_.full_at(at_.slot);
      barriers::mbarrier_arrive_expect_bytes(full, C::kStageBytes);
#pragma unroll
      for (int p = 0; p < C::kStagePanels; ++p) {
        ptx::tma_load_4d(stages_ + at_.slot * C::kStageBytes + p * C::kPanelBytes, &q_map_, full, ptx::kEvictFirst,
                         stage % C::kTileStages * C::kStageCols + p * C::kPanelCols,
                         group * C::kGroupHeads * p_.q_coord_h, g.s * p_.q_coord_s, g.b * p_.q_coord_b);
      }
    }
    __syncwarp();
    at_ = at_.ahead(C::kWarps);
  }

  // While the ring is full there is time to hand over what has been issued; while it is not, one stage stays in flight
  // behind the next.
  __device__ __forceinline__ void wait_empty(char const* name) {
    if (!ring_.test_empty(at_)) {
      hand_over<0>();
      ring_.wait_empty(at_, name);
    }
  }

  // Gives the consumers the pending stage, leaving kInFlight younger ones alone.
  template <int kInFlight>
  __device__ __forceinline__ void hand_over() {
    if (pending_ == 0) return;
    ptx::copy_async_wait<kInFlight>();
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_ == 0) barriers::mbarrier_arrive(pending_);
    pending_ = 0;
  }

  KernelParams const& p_;
  CUtensorMap const& q_map_;
  RingBarriers<C::kStages> const ring_;
  int const warp_, lane_;
  uint32_t const stages_;
  Copy const copy_;
  RingPosition<C::kStages> at_;
  uint32_t pending_ = 0;  // full barrier of the stage this warp has issued and not handed over; 0: none
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
      // After this meeting the ninth panel is written, and the partial sums of the segment before have been read.
      bool const masked = epilogue_.meet_any(silent_heads);
      if constexpr (C::kSplit == Split::kKeys) {
        alternate_tiles(g.tile, g.live);
      } else if (masked) {
        pipelined_tiles<true>(g.tile * C::kTileKeys, g.live);
      } else {
        pipelined_tiles<false>(g.tile * C::kTileKeys, g.live);
      }
    }
    epilogue_.drain();
  }

private:
  // Q of this consumer's group, from the ring to registers and the ninth panel.
  __device__ __forceinline__ void load_q() {
    int const thread = threadIdx.x % 128;
    int const lane = thread % 32;
    if (C::kGroups > 1 && warpgroup_ == 1) pass_over(C::kTileStages);
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
      release(first.ahead(st).slot);
    }
    if (C::kGroups > 1 && warpgroup_ == 0) pass_over(C::kTileStages);
  }

  // Stages meant for the other consumer. This one waits for them and gives them back all the same: a barrier tells
  // only the parity of its phase, so whoever skipped one could take it for the one before or after.
  __device__ __forceinline__ void pass_over(int stages) {
#pragma unroll 1
    for (int st = 0; st < stages; ++st) {
      ring_.wait_full(at_, "attn_dist: a stage of the other consumer");
      release(at_.slot);
      at_ = at_.ahead(1);
    }
  }

  // Heads split: `count` tiles, the first at slot `slot`. Two accumulator sets take turns: while one is written by
  // WGMMAs, the epilogue reads the other.
  template <bool kMasked>
  __device__ __forceinline__ void pipelined_tiles(int slot, int count) {
    float even[wgmma::kAccumulators];
    float odd[wgmma::kAccumulators];
    multiply<false, kMasked>(even, odd, slot);
#pragma unroll 1
    for (; count > 2; count -= 2) {
      multiply<true, kMasked>(odd, even, slot);
      multiply<true, kMasked>(even, odd, slot + C::kTileKeys);
      slot += 2 * C::kTileKeys;
    }
    if (count == 2) {
      multiply<true, kMasked>(odd, even, slot);
      finish<kMasked>(odd, slot + C::kTileKeys);
    } else {
      finish<kMasked>(even, slot);
    }
  }

  // Keys split: every other of `live` tiles from `tile` on. The gather is the limit and the other warpgroup keeps the
  // tensor cores busy, so a stage is freed as early as can be instead of running the epilogue behind the next tile.
  __device__ __forceinline__ void alternate_tiles(int tile, int live) {
    float acc[wgmma::kAccumulators];
#pragma unroll 1
    for (int t = 0; t < live; ++t) {
      if (t % 2 != warpgroup_) {
        pass_over(C::kTileStages);
        continue;
      }
      multiply<false, true>(acc, acc, 0);
      finish<true>(acc, (tile + t) * C::kTileKeys);
    }
  }

  // Issues the WGMMAs of the tile at `at_` into `next`. They queue up, and in their shadow the warp does the epilogue
  // of the tile in `last`, which began at slot `last_slot`, a part a stage: so the queue does not run dry.
  template <bool kOverlap, bool kMasked>
  __device__ __forceinline__ void multiply(float (&next)[wgmma::kAccumulators], float (&last)[wgmma::kAccumulators],
                                           int last_slot) {
#pragma unroll
    for (int st = 0; st < C::kTileStages; ++st) {
      multiply_stage(next, st);
      // The stage before has been multiplied once only this one is in the queue.
      if (kOverlap || st > 0) {
        wgmma::wait<1>();
        release(previous_slot_);
      }
      previous_slot_ = at_.slot;
      at_ = at_.ahead(1);
      if constexpr (kOverlap) {
        constexpr int kLast = C::kTileStages - 1;
        if (st == 0) {
          wgmma::pin(last);
          epilogue_.template reduce_first_half<kMasked>(last);
        }
        if (st == (kLast < 1 ? kLast : 1)) {
          // Branches, which keeps ptxas from spreading the second half among the WGMMAs before it.
          epilogue_.prefetch(last_slot);
          epilogue_.template reduce_second_half<kMasked>(last);
        }
        if (st == (kLast < 2 ? kLast : 2)) epilogue_.store(last_slot);
      }
    }
  }

  // The WGMMAs of the stage at `at_`; a group of their own.
  __device__ __forceinline__ void multiply_stage(float (&acc)[wgmma::kAccumulators], int st) {
    // Through a shuffle, which tells the compiler that it is uniform: each WGMMA would else move its descriptor from
    // vector to uniform registers.
    wgmma::Descriptor const stage(uniform(stages_ + at_.slot * C::kStageBytes));
    wgmma::Descriptor const q_panel(q_panel_);
    ring_.wait_full(at_, "attn_dist: K");
    // In the block of the WGMMAs: after a branch ptxas would else insert its own and serialise them (C7520).
    wgmma::fence();
#pragma unroll
    for (int s = 0; s < C::kStagePanels * C::kPanelSteps; ++s) {
      int const panel = st * C::kStagePanels + s / C::kPanelSteps;
      int const step = st * C::kStagePanels * C::kPanelSteps + s;
      uint64_t const b = stage.at((s / C::kPanelSteps) * C::kPanelBytes + (s % C::kPanelSteps) * 32);
      if (panel < C::kRegPanels) {
        wgmma::mma_rs<typename C::Element>(acc, q_[step], b, step > 0);
      } else {
        wgmma::mma_ss<typename C::Element>(acc, q_panel.at((s % C::kPanelSteps) * 32), b, true);
      }
    }
    wgmma::commit();
  }

  // The epilogue of a tile with nothing behind it.
  template <bool kMasked>
  __device__ __forceinline__ void finish(float (&acc)[wgmma::kAccumulators], int slot) {
    epilogue_.prefetch(slot);
    wgmma::wait<0>();
    release(previous_slot_);
    wgmma::pin(acc);
    epilogue_.template reduce_first_half<kMasked>(acc);
    epilogue_.template reduce_second_half<kMasked>(acc);
    epilogue_.store(slot);
  }

  __device__ __forceinline__ void release(uint32_t slot) const {
    if (threadIdx.x % 32 == 0) barriers::mbarrier_arrive(ring_.empty_at(slot));
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

// Both ends of the ring: the producer warpgroup that fills it with Q and gathered K, and the consumer warpgroups that
// multiply. One gather serves 128 heads: both consumers read the same K stages.
//
// Barriers
//   name          who arrives                           who waits           what becomes visible, or free
//   full[slot]    4 producer warps, one lane each,      the consumers it    the stage's K rows (cp.async, fenced by each
//                 after every lane waited for its own   is meant for; the   writing thread) or Q panels (TMA); all stages
//                 copies and fenced them; TMA bytes     producer, behind    before it are full or have been (hand_over,
//                 where the stage is Q                  Q                   tile)
//   empty[slot]   8 units: a warp gives one where both  the producer        the slot may be rewritten: the WGMMAs (K) or
//                 consumers read the stage, two where                       ldmatrix (Q) that read it have finished
//                 only its own does
//   sums_full     4 warps of the consumer, after a      its 2 warps of the  sums over two heads of a tile
//   [consumer]    tile's last sums                      reducer
//   sums_empty    2 warps of the reducer                the consumer        the sums of the tile before have been read: there
//   [consumer]                                                              is room for the next
//   named 1, 2    the 4 warps of consumer 0, 1          the same            twice a segment: WGMMAs of the segment before
//                                                                           have read Q's ninth panel; it is written
//                                                                           and fenced
//
// `valid` has no barrier of its own. The producer writes a tile's words before it hands over its keys, and the
// consumers pass that on with its sums. When it writes those of tile j, tile j - 1 has room in the ring: the tile that
// was in its place, kStages / kTileStages tiles ago, has been given back, by a consumer which had by then room for the
// sums of a tile at most four before that one (Split::kKeys; the other consumer's at most five): the reducer has read
// all before.
//
// Stages of a segment, in order: Q of each group of 64 heads, then those of each live tile.
//   Split::kHeads   two groups; consumer c reads Q of group c, and both read every K stage
//   Split::kKeys    one group; both read its Q, and consumer c reads tiles c, c + 2, ...
#pragma once

#include <cstdint>
#include <numeric>

#include "device/barriers.cuh"
#include "device/gather.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "work.cuh"

namespace htree_cuda::sm90::attn_dist {

// ---- producer --------------------------------------------------------------------------------------------------

template <class C>
class Producer {
public:
  __device__ __forceinline__ Producer(KernelParams const& p, CUtensorMap const& q_map,
                                      typename C::SharedStorage& shared, RingBarriers<C::kStages> ring)
      : p_(p), q_map_(q_map), ring_(ring), thread_(threadIdx.x % 128),
        stages_(ptx::opaque(ptx::shared_address(&shared.ring[0][0]))),
        valid_(ptx::shared_address(&shared.valid[0][thread_ / 32])) {}

  __device__ __forceinline__ void run() {
    Gather<C> gather(thread_);
    uint32_t words = 0;  // where the tile's valid bits go
    for (WorkRange work(p_); !work.done(); work.next()) {
      Segment const g = work.segment();
      if (g.live == 0) continue;
      char const* const rows = ptx::opaque(gather.chunk_of(p_.k + g.b * p_.k_stride_b));
      // Indices are loaded two tiles before they are needed, because loads queue up behind the copies of more than a
      // tile.
      int slot = g.tile * C::kTileKeys + gather.row_to_load();
      int const* const indices = ptx::opaque(slots::list(p_, g.b, g.s));
      int const end = min(g.length, (g.tile + g.live) * C::kTileKeys);
      auto const next_index = [&] {
        int const index = slot < end ? __ldcs(indices + slot * p_.indices_stride_t) : -1;
        slot += C::kTileKeys;
        return index;
      };
      int index = next_index();
      int upcoming = next_index();
      auto const point = [&] {
        bool const is_valid = static_cast<unsigned>(index) < static_cast<unsigned>(g.visible);
        uint32_t const valid = __ballot_sync(kFullWarp, is_valid);
        gather.point(is_valid ? index : -1, rows, p_.k_stride_s);
        if (thread_ % 32 == 0) ptx::store_shared_4B(valid_ + words, valid);
        words = (words + kTileWords) % (C::kValidTiles * kTileWords);
        index = upcoming;
        upcoming = next_index();
      };
      load_q(g);
      int left = g.live;
#pragma unroll 1
      for (; left > max(g.live - kFirstTiles, 0); --left) {
        point();
        first_tile(gather);
      }
      if (left > 0) {
#pragma unroll 1
        for (; left > 0; --left) {
          point();
          next_tile(gather);
          at_ = at_.ahead(C::kTileStages);
        }
        oldest_ = at_.behind(C::kCopyLag);
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

  static constexpr uint32_t kTileWords = 4 * C::kWarps;

  // Copies one of a segment's first tiles: what is handed over is Q, or comes behind it, or nothing was issued yet.
  static constexpr int kFirstTiles = C::kCopyLag / C::kTileStages + 1;
  __device__ __forceinline__ void first_tile(Gather<C> const& gather) {
#pragma unroll
    for (int st = 0; st < C::kTileStages; ++st) {
      ring_.wait_empty(at_, "attn_dist: a free stage for K");
      gather.template copy<C::kStagePanels>(stages_ + at_.slot * C::kStageBytes, st * C::kStageCols * 2);
      issued();
    }
  }

  // Any other, with code for each place that it can have in the ring, so that all addresses are constants: its first
  // stage is a multiple of kStep, at least kBegin and below kEnd.
  static constexpr int kStep = std::gcd(C::kStages, C::kTileStages);
  template <int kBegin = 0, int kEnd = C::kStages>
  __device__ __forceinline__ void next_tile(Gather<C> const& gather) {
    if constexpr (kEnd - kBegin == kStep) {
      tile<kBegin>(gather);
    } else {
      constexpr int kMiddle = kBegin + (kEnd - kBegin) / kStep / 2 * kStep;
      if (at_.slot < kMiddle) {
        next_tile<kBegin, kMiddle>(gather);
      } else {
        next_tile<kMiddle, kEnd>(gather);
      }
    }
  }

  // Copies a tile whose first stage is kFirst. It hands over stages that these warps filled, behind others that they
  // filled: each warp does so in the order of the ring, and that order is the barriers'.
  template <int kFirst>
  __device__ __forceinline__ void tile(Gather<C> const& gather) {
#pragma unroll
    for (int st = 0; st < C::kTileStages; ++st) {
      RingPosition<C::kStages> const at{static_cast<uint32_t>(kFirst + st) % C::kStages,
                                        kFirst + st < C::kStages ? at_.parity : at_.parity ^ 1u};
      ring_.wait_empty(at, "attn_dist: a free stage for K");
      gather.template copy<C::kStagePanels>(stages_ + at.slot * C::kStageBytes, st * C::kStageCols * 2);
      ptx::copy_async_commit();
      ptx::copy_async_wait<C::kCopyLag>();
      arrive(at.behind(C::kCopyLag));
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
    // In the order of the ring: a barrier tells only the parity of its phase, so a consumer that passes over a stage of
    // the other one relies on it being complete when a later one is.
    ring_.wait_full(oldest_.behind(1), "attn_dist: the stage before");
    arrive(oldest_);
    oldest_ = oldest_.ahead(1);
    --pending_;
  }

  __device__ __forceinline__ void arrive(RingPosition<C::kStages> at) const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (thread_ % 32 == 0) barriers::mbarrier_arrive(ring_.full_at(at.slot));
  }

  KernelParams const& p_;
  CUtensorMap const& q_map_;
  RingBarriers<C::kStages> const ring_;
  int const thread_;
  uint32_t const stages_, valid_;
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
        keys_(stages_), q_panel_(ptx::shared_address(&shared.q_panel[warpgroup][0])),
        epilogue_(p, shared, warpgroup, warp) {}

  __device__ __forceinline__ void run() {
    for (WorkRange work(p_); !work.done(); work.next()) {
      Segment const g = work.segment();
      bool const split_heads = C::kSplit == Split::kHeads;
      int const group = p_.first_group + g.pass * C::kGroups + (split_heads ? warpgroup_ : 0);
      if (g.live == 0) continue;
      bool const silent_heads = epilogue_.begin(g, group);
      load_q();
      // After this meeting the ninth panel is written.
      // Uniform, so that the ring's arithmetic behind this branch stays in uniform registers.
      bool const masked = uniform(barriers::named_sync_or(kConsumerBarrier + warpgroup_, 128, silent_heads));
      if (masked) {
        tiles<true>(g.live);
      } else {
        tiles<false>(g.live);
      }
    }
  }

private:
  // Q of this consumer's group, from the ring to registers and the ninth panel.
  __device__ __forceinline__ void load_q() {
    int const thread = threadIdx.x % 128;
    int const lane = thread % 32;
    if (C::kGroups > 1) at_ = at_.ahead(warpgroup_ * C::kTileStages);
    RingPosition<C::kStages> const first = at_;
    // A warp writes parts of the ninth panel that others multiply.
    if (C::kSharedPanels > 0) barriers::named_sync(kConsumerBarrier + warpgroup_, 128);
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

  template <bool kMasked>
  __device__ __forceinline__ void tiles(int live) {
    if constexpr (C::kSplit == Split::kHeads) {
      pipelined_tiles<kMasked>(live);
    } else {
      alternate_tiles<kMasked>(live);
    }
  }

  // Heads split: `count` tiles. Two accumulator sets alternate: while WGMMAs write one, the epilogue reads the other.
  template <bool kMasked>
  __device__ __forceinline__ void pipelined_tiles(int count) {
    float even[wgmma::kAccumulators];
    float odd[wgmma::kAccumulators];
    landed_ = room_ = false;  // Q came between
    multiply<false, kMasked>(even, odd);
#pragma unroll 1
    for (; count > 2; count -= 2) {
      multiply<true, kMasked>(odd, even);
      multiply<true, kMasked>(even, odd);
    }
    if (count == 2) {
      multiply<true, kMasked>(odd, even);
      finish<kMasked>(odd);
    } else {
      finish<kMasked>(even);
    }
  }

  // Keys split: every other of `live` tiles. The gather is the limit and the other warpgroup keeps the tensor cores
  // busy, so a stage is freed as early as can be instead of running the epilogue behind the next tile.
  template <bool kMasked>
  __device__ __forceinline__ void alternate_tiles(int live) {
    float acc[wgmma::kAccumulators];
    if (warpgroup_ == 1) at_ = at_.ahead(C::kTileStages);
    int t = warpgroup_;
#pragma unroll 1
    for (; t < live; t += C::kConsumers) {
      landed_ = false;
      multiply<false, kMasked>(acc, acc);
      at_ = at_.ahead(C::kTileStages);
      finish<kMasked>(acc);
    }
    // To the end of the segment.
    if (t > live) at_ = at_.behind(C::kTileStages);
  }

  // Issues the WGMMAs of the tile at `at_` into `next`, and among them the epilogue of the tile in `last`.
  //
  // WGMMAs queue up and run by themselves; what costs time is an empty queue. So after each panel's four the warp waits
  // for the panel before (with four still queued), does a step of the epilogue and issues the next four. There is no
  // branch between: after one ptxas wants a warpgroup.arrive, which drains the queue. Whatever the tile needs is
  // therefore waited for at its start, and is usually known to be there by the end of the tile before.
  template <bool kOverlap, bool kMasked>
  __device__ __forceinline__ void multiply(float (&next)[wgmma::kAccumulators], float (&last)[wgmma::kAccumulators]) {
    // Through a shuffle, which tells the compiler that it is uniform: each WGMMA would else move its descriptor from
    // vector to uniform registers.
    at_.slot = uniform(at_.slot);
    wgmma::Descriptor k[C::kTileStages];
#pragma unroll
    for (int st = 0; st < C::kTileStages; ++st) {
      k[st] = keys_;
      k[st].low += at_.ahead(st).slot * (C::kStageBytes / 16);
    }
    if (!landed_) {
#pragma unroll
      for (int st = 0; st < C::kTileStages; ++st) ring_.wait_full(at_.ahead(st), "attn_dist: K");
    }
    if (kOverlap && !room_) epilogue_.wait_room();
    RingPosition<C::kStages> const after = at_.ahead(C::kTileStages);
    wgmma::fence();
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      int const st = panel / C::kStagePanels;
      multiply_panel(next, panel, k[st]);
      if (kOverlap || (panel > 0 && panel % C::kStagePanels == 0)) wgmma::wait<1>();
      if (panel == 0 && kOverlap) {
        release(previous_slot_, C::kKeyUnits);
        wgmma::pin(last);
      } else if (panel > 0 && panel % C::kStagePanels == 0) {
        release(at_.ahead(st - 1).slot, C::kKeyUnits);
      }
      if constexpr (kOverlap) steps<kMasked, 0>(panel, last);
    }
    if (C::kSplit == Split::kHeads) {
      landed_ = true;
#pragma unroll
      for (int st = 0; st < C::kTileStages; ++st) landed_ &= ring_.test_full(after.ahead(st));
      room_ = epilogue_.test_room();
    }
    previous_slot_ = at_.ahead(C::kTileStages - 1).slot;
    at_ = after;
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

  // The steps of the epilogue, from kStep on, that come after panel `panel`. The last two panels leave the reducer time
  // to make room before the epilogue needs it.
  static constexpr int kStepPanels = C::kPanels > 4 ? C::kPanels - 2 : C::kPanels;
  template <bool kMasked, int kStep>
  __device__ __forceinline__ void steps(int panel, float const (&last)[wgmma::kAccumulators]) {
    if constexpr (kStep < Epilogue<C>::kSteps) {
      if (panel == kStep * kStepPanels / Epilogue<C>::kSteps) epilogue_.template step<kMasked, kStep>(last);
      steps<kMasked, kStep + 1>(panel, last);
    }
  }

  // The epilogue of a segment's last tile, with nothing behind it.
  template <bool kMasked>
  __device__ __forceinline__ void finish(float (&acc)[wgmma::kAccumulators]) {
    wgmma::wait<0>();
    release(previous_slot_, C::kKeyUnits);
    wgmma::pin(acc);
    epilogue_.wait_room();
    finish_steps<kMasked, 0>(acc);
  }

  template <bool kMasked, int kStep>
  __device__ __forceinline__ void finish_steps(float const (&acc)[wgmma::kAccumulators]) {
    if constexpr (kStep < Epilogue<C>::kSteps) {
      epilogue_.template step<kMasked, kStep>(acc);
      finish_steps<kMasked, kStep + 1>(acc);
    }
  }

  __device__ __forceinline__ void release(uint32_t slot, uint32_t units) const {
    if (threadIdx.x % 32 == 0) barriers::mbarrier_arrive(ring_.empty_at(slot), units);
  }

  KernelParams const& p_;
  RingBarriers<C::kStages> const ring_;
  int const warpgroup_, warp_;
  uint32_t const stages_;
  wgmma::Descriptor const keys_;  // of the first stage
  uint32_t const q_panel_;
  Epilogue<C> epilogue_;
  RingPosition<C::kStages> at_;
  uint32_t previous_slot_ = 0;
  bool landed_ = false;  // the next tile
  bool room_ = false;    // for the sums of the tile before it
  uint32_t q_[C::kRegPanels * C::kPanelSteps][4];
};

}  // namespace htree_cuda::sm90::attn_dist

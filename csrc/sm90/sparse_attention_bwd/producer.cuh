// The producer warpgroup: gathers tiles of 64 key rows by cp.async, a thread 16 bytes of four rows' panels, and loads Q and
// dO of a unit by TMA.
#pragma once

#include <cstdint>

#include "device/barriers.cuh"
#include "device/gather.cuh"
#include "device/ptx.cuh"
#include "device/query_groups.cuh"
#include "barriers.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

using query_groups::Unit;

template <class C>
class Producer {
public:
  __device__ __forceinline__ Producer(KernelParams const& p, CUtensorMap const& q_map, CUtensorMap const& dout_map,
                                      typename C::SharedStorage& shared, int warp)
      : p_(p), q_map_(q_map), dout_map_(dout_map), shared_(shared), barriers_(shared), warp_(warp) {}

  __device__ __forceinline__ void run() {
    for (query_groups::WorkList<KernelParams, C::kCtas> work(p_); !work.done(); work.next()) {
      Unit const u = work.unit();
      if (p_.begun != nullptr) keep_pace();
#pragma unroll 1
      for (int t = 0; t < u.tiles; ++t) {
        // Opaque: what follows from the thread is not kept from tile to tile.
        Gather gather(static_cast<int>(ptx::opaque(threadIdx.x) % 128));
        int const slot = t * C::kTileKeys + (gather.row_to_load() ^ C::kOwnKeys * rank());
        int const index = slot < u.length ? __ldg(slots::list(p_, u.b, u.s) + slot * p_.indices_stride_t) : -1;
        int const row = static_cast<unsigned>(index) < static_cast<unsigned>(u.visible) ? index : -1;
        gather.point(row, gather.chunk_of(p_.kv + u.b * p_.kv_stride_b), p_.kv_stride_s);
        gather.compute_addresses();
        rounds_ ^= 1;
        barriers::mbarrier_wait(barriers_.keys_empty, rounds_ & 1, "sparse_attention_bwd: room for keys");
        if (threadIdx.x % 32 < 16) shared_.rows[tile_rows() + gather.row_to_load()] = row;  // two lanes have each
        // One CTA gives keys back long before Q, a pair at nearly the same time.
        bool const loads_q = t == 0 && warp_ == 0;
        if (C::kCtas > 1 && loads_q) load_q(u);
        move_parts(gather);
        if (C::kCtas == 1 && loads_q) load_q(u);
      }
    }
  }

private:
  using Gather = gather::RowGather<C::kTileKeys>;
  // CTAs begin their units together, so that ascending lists have all of them in the same part of kv at the same time:
  // what they read and add to is then in L2, however large dkv is. Nothing but time depends on it, and the wait is
  // bounded: other work may hold SMs.
  __device__ __forceinline__ void keep_pace() {
    ++units_;
    if (threadIdx.x % 128 == 0) {
      auto const groups = static_cast<int>(ptx::opaque(p_.groups));
      int const all = min(units_ * static_cast<int>(ptx::grid_size()), p_.rows * groups * C::kCtas);
      int begun = atomicAdd(p_.begun, 1) + 1;
      for (int tries = 0; begun < all && tries < kTries; ++tries) {
        __nanosleep(100);
        begun = atomicAdd(p_.begun, 0);
      }
    }
    barriers::named_sync(kProducerBarrier, 128);
  }
  static constexpr int kTries = 200;
  static constexpr int kBoxHeads = 64;

  // Where the tile's row numbers begin.
  __device__ __forceinline__ int tile_rows() const { return C::kRowBuffers > 1 && !(rounds_ & 1) ? C::kTileKeys : 0; }

  // The rank of this CTA among the CTAs that share a unit.
  __device__ __forceinline__ static int rank() { return C::kCtas > 1 ? static_cast<int>(ptx::cluster_rank()) : 0; }

  // Copies the tile part by part, at most kPartsAhead at a time, and hands each over when this warp's share of it has come.
  template <int kPart = 0>
  __device__ __forceinline__ void move_parts(Gather const& gather) const {
    if constexpr (kPart < C::kParts) {
      constexpr int kPanel = kPart * C::kPartPanels;
      uint32_t const to = ptx::shared_address(&shared_.keys[0]) + kPanel * C::kPanelBytes;
      gather.template copy<C::part_panels(kPart)>(to, 2 * C::column(kPanel, rank()));
      ptx::copy_async_commit();
    }
    constexpr int kCome = kPart + 1 - C::kPartsAhead;
    if constexpr (kCome >= 0) {
      ptx::copy_async_wait<(kPart < C::kParts ? kPart + 1 : C::kParts) - kCome - 1>();
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (ptx::elect()) barriers::mbarrier_arrive(barriers_.keys_full(kCome));
    }
    if constexpr (kCome + 1 < C::kParts) move_parts<kPart + 1>(gather);
  }

  __device__ __forceinline__ void load_q(Unit const& u) {
    rounds_ ^= 2;
    barriers::mbarrier_wait(barriers_.q_empty, rounds_ >> 1, "sparse_attention_bwd: room for Q");
    if (ptx::elect()) {
      barriers::mbarrier_arrive_expect_bytes(barriers_.q_full, (C::kPanels + C::kValuePanels) * C::kHeadPanelBytes);
      // A box has 64 heads.
#pragma unroll 1
      for (int first = 0; first < C::kGroupHeads; first += kBoxHeads) {
        int const head = u.group * C::kGroupHeads + first;
        uint32_t const row = first * gather::kPanelBytesPerRow;
#pragma unroll 1
        for (int panel = 0; panel < C::kPanels; ++panel) {
          ptx::tma_load_4d(ptx::shared_address(&shared_.q[0]) + row + panel * C::kHeadPanelBytes, &q_map_,
                           barriers_.q_full, ptx::kEvictFirst, C::column(panel, rank()), head * p_.q_coord_h,
                           u.s * p_.q_coord_s, u.b * p_.q_coord_b);
        }
#pragma unroll 1
        for (int panel = 0; panel < C::kValuePanels; ++panel) {
          ptx::tma_load_4d(ptx::shared_address(&shared_.dout[0]) + row + panel * C::kHeadPanelBytes, &dout_map_,
                           barriers_.q_full, ptx::kEvictFirst, C::column(panel, rank()), head * p_.dout_coord_h,
                           u.s * p_.dout_coord_s, u.b * p_.dout_coord_b);
        }
      }
    }
    __syncwarp();
  }

  KernelParams const& p_;
  CUtensorMap const& q_map_;
  CUtensorMap const& dout_map_;
  typename C::SharedStorage& shared_;
  Barriers<C> const barriers_;
  int const warp_;
  int units_ = 0;
  uint32_t rounds_ = 0;  // bit 0: parity of the tile; bit 1: of the unit
};

}  // namespace htree_cuda::sm90::sparse_attention_bwd

// The producer warpgroup: TMA gathers tiles of 64 key rows, a box for each 64 columns of a row, and loads Q and dO of a
// unit. A box takes no registers while it is under way, and consumers need all that there are.
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
  __device__ __forceinline__ Producer(KernelParams const& p, CUtensorMap const& kv_map, CUtensorMap const& q_map,
                                      CUtensorMap const& dout_map, typename C::SharedStorage& shared, int warp)
      : p_(p), kv_map_(kv_map), q_map_(q_map), dout_map_(dout_map), shared_(shared), barriers_(shared), warp_(warp) {}

  __device__ __forceinline__ void run() {
    for (query_groups::WorkList<KernelParams, C::kCtas> work(p_); !work.done(); work.next()) {
      Unit const u = work.unit();
      if (p_.begun != nullptr) keep_pace();
#pragma unroll 1
      for (int t = 0; t < u.tiles; ++t) {
        int const slot = t * C::kTileKeys + (key() ^ C::kOwnKeys * rank());
        int const index = slot < u.length ? __ldg(slots::list(p_, u.b, u.s) + slot * p_.indices_stride_t) : -1;
        // TMA fills a row before the first with zeros.
        int const row = static_cast<unsigned>(index) < static_cast<unsigned>(u.visible) ? index : -1;
        rounds_ ^= 1;
        // Opaque here and below: what is not kept takes no register.
        auto const share = static_cast<int>(ptx::opaque(static_cast<uint32_t>(warp_))) * C::kShares / C::kWarps;
        barriers::mbarrier_wait(barriers_.keys_empty(share), rounds_ & 1, "sparse_attention_bwd: room for keys");
        if (threadIdx.x % 2 == 0) shared_.rows[tile_rows() + key()] = row;
        __syncwarp();
        gather(u);
        if (t == 0 && warp_ == 0) load_q(u);
      }
    }
  }

private:
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
  static constexpr int kWarpKeys = C::kTileKeys / C::kWarps;
  // The numbers of the next rows are on their way while boxes start.
  static constexpr bool kReadsAhead = C::kRowsRead > 1;

  // Two threads share a row.
  __device__ __forceinline__ static int key() { return threadIdx.x % 128 / 2; }

  // Where the tile's row numbers begin.
  __device__ __forceinline__ int tile_rows() const { return C::kRowBuffers > 1 && !(rounds_ & 1) ? C::kTileKeys : 0; }

  // The rank of this CTA among the CTAs that share a unit.
  __device__ __forceinline__ static int rank() { return C::kCtas > 1 ? static_cast<int>(ptx::cluster_rank()) : 0; }

  // The warp's rows, whose numbers lie in shared memory. One lane starts all boxes, so that what TMA is told lies in uniform
  // registers without a loop over lanes, which took 55 cycles a box.
  __device__ __forceinline__ void gather(Unit const& u) const {
    if (ptx::elect()) {
      uint32_t const rows = ptx::shared_address(&shared_.rows[0]) + 4 * (tile_rows() + kWarpKeys * warp_);
      uint32_t const to = ptx::shared_address(&shared_.keys[0]) + kWarpKeys * warp_ * gather::kPanelBytesPerRow;
      int const z = u.b * p_.kv_coord_b;
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
        uint32_t const full = barriers_.keys_full(part);
        barriers::mbarrier_arrive_expect_bytes(full, C::part_panels(part) * C::kPanelBytes / C::kWarps);
        int next[C::kRowsRead];
        if (kReadsAhead) load_rows(rows, next);
        // More rows at once do not fit the uniform registers.
#pragma unroll(kReadsAhead ? 1 : 4)
        for (int i = 0; i < kWarpKeys; i += C::kRowsRead) {
          int row[C::kRowsRead];
          if (kReadsAhead) {
#pragma unroll
            for (int j = 0; j < C::kRowsRead; ++j) row[j] = next[j];
            load_rows(rows + 4 * ((i + C::kRowsRead) % kWarpKeys), next);  // after the last the first, to no purpose
          } else {
            load_rows(rows + 4 * i, row);
          }
#pragma unroll
          for (int j = 0; j < C::kRowsRead; ++j) {
            int const y = p_.kv_coord_s == 0 ? min(row[j], 0) : row[j];  // -1 stays -1
#pragma unroll
            for (int panel = part * C::kPartPanels; panel < part * C::kPartPanels + C::part_panels(part); ++panel) {
              ptx::tma_load_4d(to + panel * C::kPanelBytes + (i + j) * gather::kPanelBytesPerRow, &kv_map_, full,
                               ptx::kEvictNormal, C::column(panel, rank()), 0, y, z);
            }
          }
        }
      }
    }
    __syncwarp();
  }

  // The numbers of neighbouring rows.
  __device__ __forceinline__ static void load_rows(uint32_t from, int (&row)[1]) { row[0] = ptx::load_shared_4B(from); }
  __device__ __forceinline__ static void load_rows(uint32_t from, int (&row)[2]) {
    float2 const pair = ptx::load_shared_8B(from);
    row[0] = __float_as_int(pair.x);
    row[1] = __float_as_int(pair.y);
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
  CUtensorMap const& kv_map_;
  CUtensorMap const& q_map_;
  CUtensorMap const& dout_map_;
  typename C::SharedStorage& shared_;
  Barriers<C> const barriers_;
  int const warp_;
  int units_ = 0;
  uint32_t rounds_ = 0;  // bit 0: parity of the tile; bit 1: of the unit
};

}  // namespace htree_cuda::sm90::sparse_attention_bwd

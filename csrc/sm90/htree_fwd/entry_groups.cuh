// Groups of four parents in a entry layer: what a warpgroup multiplies of them, whom they concern, and what consumers keep of them.
// See first.cuh.
#pragma once

#include <type_traits>

#include "device/wgmma.cuh"
#include "consumer.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
class EntryGroups : public Consumer<Cfg> {
protected:
  using Base = Consumer<Cfg>;
  using Base::active_;
  using Base::args_;
  using Base::kPerUnit;
  using Base::kSharesWarp;
  using Base::kSteps;
  using Base::kValueTiles;
  using Base::lane_;
  using Base::max_;
  using Base::o_;
  using Base::q_;
  using Base::tq_;
  using Base::warp_;
  static constexpr int kParents = Cfg::kStageSlots;
  static constexpr int kWords = kParents / 2;  // of 16 bits for each parent
  static constexpr int kOwnLanes = 32 / kPerUnit;  // that have rows of the same queries
  static constexpr int kGroupsFetched = kOwnLanes / kWords;  // whose expanded candidates they ask for at once
  static constexpr int kRows = kSharesWarp ? 2 : 1;  // of this thread, that may be of different queries
  static_assert(kParents * kSiblings == 64 && wgmma::kAccumulators == 8 * kParents && wgmma::kDepth == kSiblings);

  __device__ explicit EntryGroups(Args const& args) : Base(args) {}

  // A group of parents whose scores are under way.
  struct Begun {
    float raw[2 * kParents][4];
    uint32_t stage;
  };

  __device__ __forceinline__ auto& out() { return reinterpret_cast<float(&)[4 * kValueTiles]>(o_); }

  static __device__ __forceinline__ auto& products(float (&raw)[2 * kParents][4]) {
    return reinterpret_cast<float(&)[wgmma::kAccumulators]>(raw);
  }

  static __device__ __forceinline__ auto& of_parent(float (&raw)[2 * kParents][4], int slot) {
    return reinterpret_cast<float(&)[2][4]>(raw[2 * slot]);
  }

  static __device__ __forceinline__ uint32_t scales_of(uint32_t stage, int slot) {
    return stage + Cfg::kScaleOffset + slot * Cfg::kScaleBytes;
  }

  static __device__ __forceinline__ void load_scales(float (&scales)[kParents], uint32_t stage) {
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) scales[slot] = ptx::load_shared_float(scales_of(stage, slot));
  }

  __device__ __forceinline__ void release(uint32_t stage) const {
    barriers::release(stage + Cfg::kEmptyOffset);
  }

  // Of kGroupsFetched groups from the parent so many further on, those up to the own of row i's query; the others are not
  // written. Of its lanes the i-th has those of parents 2 i and the next.
  __device__ __forceinline__ uint32_t fetch_expanded(int i, int parents) const {
    if ((!kSharesWarp && !active_) || args_.layer == 0) return 0;
    int const parent = parents + 2 * (lane_ % kOwnLanes);
    int const position = Base::position(i);
    std::uint16_t const* const expanded = args_.expanded + Base::cursor(i) + parent;
    if (position >= (parent + 1) * kSiblings) return *reinterpret_cast<uint32_t const*>(expanded);
    return position >= parent * kSiblings ? *expanded : 0u;
  }

  // Cfg::kKeeps: this lane's of what fetch_expanded found for row 0, 128 bytes behind it for row 1, and those of the lanes of a query
  // side by side; the cursor of a query; the maximum of a row.
  __device__ __forceinline__ uint32_t kept_expanded(Ring<Cfg> const& ring) const {
    return kept(ring) + ptx::lane_index() * 4;
  }
  __device__ __forceinline__ uint32_t kept_cursor(Ring<Cfg> const& ring) const {
    return kept(ring) + 256 + ptx::lane_index() / 16 * 4;
  }
  __device__ __forceinline__ uint32_t kept_maximum(Ring<Cfg> const& ring, int i) const {
    return kept(ring) + 320 + 32 * i + ptx::lane_index() / 4 * 4;
  }
  __device__ __forceinline__ uint32_t kept(Ring<Cfg> const& ring) const {
    return ring.stages - Cfg::kRingOffset + Cfg::kRotationOffset + warp_ * Cfg::kKeptBytes;
  }

  __device__ __forceinline__ void keep_maximum(Ring<Cfg> const& ring, int i) const {
    if (tq_ == 0) ptx::store_shared_4B(kept_maximum(ring, i), __float_as_uint(max_[i]));
  }
  __device__ __forceinline__ void fetch_maximum(Ring<Cfg> const& ring, int i) {
    max_[i] = __uint_as_float(ptx::load_shared_4B(kept_maximum(ring, i)));
  }

  // Where the queries of this warpgroup are.
  __device__ __forceinline__ uint32_t queries_of(Ring<Cfg> const& ring) const {
    return __shfl_sync(kFullWarp, ring.stages - Cfg::kRingOffset + warp_ / 4 * Cfg::kQueryBytes, 0);
  }

  // In the order of WGMMA's operands; a lane points stmatrix at row lane % 16 of its warp's, chunk lane / 16 of two.
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

  // Waits for the next group.
  __device__ __forceinline__ void begin(Begun& begun, Ring<Cfg> const& ring, RingPosition<Cfg::kStages>& at) const {
    ring.barriers.wait_full(at, "htree_fwd consumer: full");
    // Through a shuffle, which tells the compiler that it is uniform: descriptors live in uniform registers.
    begun.stage = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
    at = at.ahead(1);
  }

  // Whether row i's query takes a parent of the group at hand: those up to its own, unless others share the query.
  __device__ __forceinline__ bool takes(uint32_t stage, int slot, int i = 0) const {
    if (!kSharesWarp && Base::split()) return ptx::load_shared_4B(Ring<Cfg>::mask(stage, warp_)) >> slot & 1u;
    return Base::position(i) >= slot * kSiblings;
  }

  // It takes all of the group, and has more behind it.
  __device__ __forceinline__ bool whole(int i = 0) const {
    return (kSharesWarp || !Base::split()) && Base::position(i) >= kParents * kSiblings;
  }

  // Whether one of the lanes that have rows of the same query says so.
  __device__ __forceinline__ bool any_own(bool says) const {
    return kPerUnit == 1 ? __any_sync(kFullWarp, says) : (__ballot_sync(kFullWarp, says) & Base::own_lanes()) != 0;
  }

  // So do all queries of the warp.
  __device__ __forceinline__ bool all_whole() const {
    bool const both = whole(0) && whole(1);
    return kPerUnit == 1 ? both : __all_sync(kFullWarp, both);
  }

  // Begins the scores; the queries in shared memory.
  __device__ __forceinline__ void multiply_keys(Begun& begun, wgmma::Descriptor const& queries) const {
    wgmma::Descriptor const keys(begun.stage + Cfg::kKeyOffset);
    wgmma::fence();
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      wgmma::mma_ss<cutlass::half_t>(products(begun.raw), queries.at(kk / 4 * Cfg::kQueryPanelBytes + kk % 4 * 32),
                                     keys.at(kk / 4 * Cfg::kPanelBytes + kk % 4 * 32), kk > 0);
    }
    wgmma::commit();
  }

  // The same, this warp's queries in registers.
  __device__ __forceinline__ void multiply_keys(Begun& begun) const {
    wgmma::Descriptor const keys(begun.stage + Cfg::kKeyOffset);
    wgmma::fence();
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      wgmma::mma_rs<cutlass::half_t>(products(begun.raw), reinterpret_cast<uint32_t const(&)[4]>(q_[kk]),
                                     keys.at(kk / 4 * Cfg::kPanelBytes + kk % 4 * 32), kk > 0);
    }
    wgmma::commit();
  }

  // O += P V.
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

  // Candidates that take no part in P, in the order of this thread's columns: bit 16 (slot % 2) + 8 tile + e of word
  // slot / 2. Given: the expanded ones of row i's query as they are in memory.
  __device__ __forceinline__ void find_masked(int i, uint32_t stage, uint32_t (&masked)[kWords]) const {
    if (!whole(i)) {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        bool const last = args_.layer == 0 && Base::position(i) < (slot + 1) * kSiblings;
        uint32_t const more = !takes(stage, slot, i) ? 0xffffu : last ? Base::behind(Base::rightmost(i)) : 0u;
        masked[slot / 2] |= more << (slot % 2 * kSiblings);
      }
    }
#pragma unroll
    for (auto& word : masked) word >>= 2 * tq_;
  }

  // Children of `masked` (bit 8 tile + e: that of this thread's column) take no part.
  static __device__ __forceinline__ void mask(float (&raw)[2][4], uint32_t masked) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (masked >> (8 * tile + e % 2) & 1u) raw[tile][e] = -Base::kInfinity;
      }
    }
  }

  // Of row i alone.
  static __device__ __forceinline__ void mask_row(int i, float (&raw)[2][4], uint32_t masked) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (masked >> (8 * tile + e) & 1u) raw[tile][2 * i + e] = -Base::kInfinity;
      }
    }
  }
};

}  // namespace htree_cuda::sm90::htree_fwd

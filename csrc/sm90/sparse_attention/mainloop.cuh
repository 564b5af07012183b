// Both ends of the key buffers: the producer warpgroup that gathers tiles of 64 rows, and the two consumer warpgroups
// that hold one half of the output columns each. Tile t of a unit lies in buffer t % 2; consumer t % 2, its owner,
// computes its scores and probabilities, both consumers multiply them with their half of its values.
//
// Barriers
//   name                       who arrives                 who waits            what becomes visible, or free
//   keys_full[buffer][quarter] one lane of each of the two consumer `buffer`    columns of the tile (cp.async, fenced by
//                              producer warps that gather                       each writing thread); with the first
//                              these columns                                    quarter of its own half also `valid` and
//                                                                               the columns past the values. The other
//                                                                               consumer learns of all of them through
//                                                                               probabilities_full
//   keys_empty[buffer][half]   one lane of each warp of    the producer warps   consumer `half` has multiplied with
//                              consumer `half`             that fill it next    these values, so everybody with the
//                                                                               keys; the owner's: and with the columns
//                                                                               past the values
//   q_full                     one lane of producer warp   both consumers       Q of the unit (TMA)
//                              0, with TMA bytes
//   q_empty                    one lane of each of the 8   producer warp 0      every score of the unit is computed
//                              consumer warps
//   probabilities_full[c]      one lane of each warp of    consumer 1 - c       probabilities and offsets of a tile of
//                              consumer c, every thread                         consumer c (st.shared, fenced)
//                              having fenced its own
//   meeting                    all consumer threads        the same             once a unit: row_sum; and nobody reads
//                                                                               `probabilities` any more
// With Config::kParts nobody waits for q_empty or at the meeting.
//
// `probabilities[c]`, `row_max[c]`, `moved[c]` and `valid[c]` need no barrier to be written again: consumer c writes
// those of tile t + 2 after its scores, so after all of tile t + 2 has landed where tile t was, so after the other
// consumer gave its half of tile t back, having multiplied with them. The producer writes `valid` after the owner gave
// its half back.
#pragma once

#include <cstdint>

#include "device/barriers.cuh"
#include "device/gather.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "softmax.cuh"
#include "work.cuh"

namespace htree_cuda::sm90::sparse_attention {

// Shared addresses of the barriers.
template <class C>
class Barriers {
public:
  __device__ __forceinline__ explicit Barriers(typename C::SharedStorage& shared)
      : q_full(ptx::shared_address(&shared.q_full)), q_empty(ptx::shared_address(&shared.q_empty)),
        keys_full_(ptx::shared_address(&shared.keys_full[0][0])),
        keys_empty_(ptx::shared_address(&shared.keys_empty[0][0])),
        probabilities_full_(ptx::shared_address(&shared.probabilities_full[0])),
        meeting_(ptx::shared_address(&shared.meeting)) {}

  __device__ __forceinline__ void init() const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      barriers::mbarrier_init(keys_full_ + 8 * i, C::kFullArrivals);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      barriers::mbarrier_init(keys_empty_ + 8 * i, C::kWarps);
    }
    barriers::mbarrier_init(q_full, 1);
    barriers::mbarrier_init(q_empty, C::kConsumers * C::kWarps);
#pragma unroll
    for (int c = 0; c < C::kConsumers; ++c) {
      barriers::mbarrier_init(probabilities_full_ + 8 * c, C::kWarps);
    }
    barriers::mbarrier_init(meeting_, C::kConsumers * 128);
  }

  __device__ __forceinline__ uint32_t keys_full(int buffer, int quarter) const {
    return keys_full_ + 32 * buffer + 8 * quarter;
  }
  __device__ __forceinline__ uint32_t keys_empty(int buffer, int half) const {
    return keys_empty_ + 16 * buffer + 8 * half;
  }
  __device__ __forceinline__ uint32_t probabilities_full(int consumer) const {
    return probabilities_full_ + 8 * consumer;
  }

  uint32_t const q_full, q_empty;

private:
  uint32_t const keys_full_, keys_empty_, probabilities_full_, meeting_;
};

// ---- producer --------------------------------------------------------------------------------------------------

// Warps 0 and 1 gather the half of each tile that its owner frees, which comes first, and the columns past the values;
// warps 2 and 3 gather the other half. So a warp that waits until its copies have landed keeps nobody from issuing the
// next.
template <class C>
class Producer {
public:
  __device__ __forceinline__ Producer(KernelParams const& p, CUtensorMap const& q_map,
                                      typename C::SharedStorage& shared, int warp)
      : p_(p), q_map_(q_map), shared_(shared), barriers_(shared), warp_(warp),
        keys_(ptx::opaque(ptx::shared_address(&shared.keys[0][0]))), gather_(threadIdx.x % C::kGatherThreads) {}

  __device__ __forceinline__ void run() {
    if (warp_ < 2) {
      gather_halves<true>();
    } else {
      gather_halves<false>();
    }
  }

private:
  // The two buffers alternate, and each has code of its own. So all offsets of the copies are constants, and no copy
  // waits for the one before to have read its address register.
  template <bool kOwners>
  __device__ __forceinline__ void gather_halves() {
    for (WorkList<C> work(p_); !work.done(); work.next()) {
      Unit const u = work.unit();
      if (u.tiles == 0) continue;
      if (kOwners && warp_ == 0) load_q(u);
      int const* const list = slots::list(p_, u.b, u.s);
      // Indices are loaded two tiles before they are needed, because loads queue up behind the copies in flight.
      int even = load_index(list, u, 0);
      int odd = load_index(list, u, 1);
#pragma unroll 1
      for (int t = 0; t < u.tiles; t += 2) {
        gather_half<kOwners, 0>(list, u, t, even);
        if (t + 1 < u.tiles) gather_half<kOwners, 1>(list, u, t + 1, odd);
      }
    }
  }

  // The index of the row of tile t that this lane loads for its warp; -1 past the query's length.
  __device__ __forceinline__ int load_index(int const* list, Unit const& u, int t) const {
    int const slot = (u.first_tile + t) * C::kTileKeys + gather_.row_to_load();
    return slot < u.length ? __ldg(list + slot * p_.indices_stride_t) : -1;
  }

  // Gathers half of tile t. `index` is what load_index returned for t; it becomes the index for the next tile in this
  // buffer.
  template <bool kOwners, int kBuffer>
  __device__ __forceinline__ void gather_half(int const* list, Unit const& u, int t, int& index) {
    constexpr int kHalf = kOwners ? kBuffer : 1 - kBuffer;
    bool const is_valid = static_cast<unsigned>(index) < static_cast<unsigned>(u.visible);
    gather_.point(is_valid ? index : -1, gather_.chunk_of(p_.kv + u.b * p_.kv_stride_b), p_.kv_stride_s);
    // A bit for each row that this warp's lanes loaded.
    uint32_t const valid = __ballot_sync(kFullWarp, is_valid);
    index = load_index(list, u, t + 2);
    gather_.compute_addresses();
    wait_for(barriers_.keys_empty(kBuffer, kHalf), parity_before(kBuffer),
                            "sparse_attention: a free half of a tile");
    if (C::kKeyPanels > 0 && kOwners) copy_panels<kBuffer, 4 * C::kQuarterPanels, C::kKeyPanels>();
    copy_panels<kBuffer, 2 * kHalf * C::kQuarterPanels, C::kQuarterPanels>();
    ptx::copy_async_commit();
    copy_panels<kBuffer, (2 * kHalf + 1) * C::kQuarterPanels, C::kQuarterPanels>();
    ptx::copy_async_commit();
    if (kOwners && threadIdx.x % 32 == 0) shared_.valid[kBuffer][warp_] = valid;
    ptx::copy_async_wait<1>();
    hand_over(barriers_.keys_full(kBuffer, 2 * kHalf));
    ptx::copy_async_wait<0>();
    hand_over(barriers_.keys_full(kBuffer, 2 * kHalf + 1));
  }

  template <int kBuffer, int kFirst, int kCount>
  __device__ __forceinline__ void copy_panels() const {
    gather_.template copy<kCount>(keys_ + kBuffer * C::kTileBytes + kFirst * C::kPanelBytes,
                                  kFirst * gather::kPanelBytesPerRow);
  }

  // Hands over the columns that this warp copied and waited for.
  __device__ __forceinline__ void hand_over(uint32_t full) const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barriers::mbarrier_arrive(full);
  }

  __device__ __forceinline__ void load_q(Unit const& u) {
    wait_for(barriers_.q_empty, parity_before(kQ), "sparse_attention: room for Q");
    if (threadIdx.x % 32 == 0) {
      barriers::mbarrier_arrive_expect_bytes(barriers_.q_full, C::kSharedPanels * C::kPanelBytes);
#pragma unroll 1
      for (int panel = 0; panel < C::kSharedPanels; ++panel) {
        ptx::tma_load_4d(ptx::shared_address(&shared_.q[0]) + panel * C::kPanelBytes, &q_map_, barriers_.q_full,
                         ptx::kEvictFirst, panel * C::kPanelCols, first_head<C>(p_, u) * p_.q_coord_h,
                         u.s * p_.q_coord_s, u.b * p_.q_coord_b);
      }
    }
    __syncwarp();
  }

  // The parity of the phase in which the load before is given back; the count moves on to the next phase.
  __device__ __forceinline__ uint32_t parity_before(int what) {
    rounds_ ^= 1u << what;
    return rounds_ >> what & 1;
  }

  KernelParams const& p_;
  CUtensorMap const& q_map_;
  typename C::SharedStorage& shared_;
  Barriers<C> const barriers_;
  int const warp_;
  uint32_t const keys_;
  gather::RowGather<C::kTileKeys, C::kGatherThreads> gather_;
  static constexpr int kQ = 2;
  uint32_t rounds_ = 0;  // bit b: parity of the tiles gathered into buffer b; bit kQ: of the units whose Q was loaded
};

// ---- consumers -------------------------------------------------------------------------------------------------

// Consumer kMe adds the tiles to its output columns in ascending order: its own tiles (kMe, kMe + 2, ...) alternate
// with the other consumer's.
template <class C, int kMe>
class Consumer {
public:
  __device__ __forceinline__ Consumer(KernelParams const& p, typename C::SharedStorage& shared, int warp)
      : p_(p), barriers_(shared), keys_(ptx::shared_address(&shared.keys[0][0])),
        q_(ptx::shared_address(&shared.q[0])), probabilities_(ptx::shared_address(&shared.probabilities[0][0])),
        softmax_(p, shared, kMe, warp), epilogue_(p, shared, kMe, warp), warp_(warp) {}

  __device__ __forceinline__ void run() {
    WorkList<C> work(p_);
    Unit u;
    if (!next_unit(work, u)) return;
    if constexpr (C::kParts) return run_part(u);
    float out[wgmma::kValueAccumulators];
    load_q_panel(u);
    wait_q();
    if constexpr (kMe == 0) {
      // The scores of a unit's first tile are multiplied while the output of the unit before is on its way out.
      float scores[wgmma::kAccumulators];
      multiply_keys(scores);
      while (true) {
        begin(out);
        finish_tile(out, scores, u.tiles <= 2);
        own_tiles(out, 2, u.tiles);
        Unit next;
        bool const more = next_unit(work, next);
        if (more) load_q_panel(next);
        if (u.tiles % 2 == 0) last_tile_of_other(out);
        if (!more) break;
        wait_q();
        multiply_keys(scores);
        epilogue_.store(u, out, softmax_);
        u = next;
      }
      epilogue_.store(u, out, softmax_);
    } else {
      while (true) {
        begin(out);
        if (u.tiles == 1) {
          __syncwarp();  // every lane has seen Q's phase, which may now pass
          barriers::warp_arrive(barriers_.q_empty);
        }
        own_tiles(out, 1, u.tiles);
        if (u.tiles % 2 == 1) last_tile_of_other(out);
        epilogue_.store(u, out, softmax_);
        if (!next_unit(work, u)) break;
        load_q_panel(u);
        wait_q();
      }
    }
  }

private:
  // The only unit of a CTA.
  __device__ __forceinline__ void run_part(Unit const& u) {
    float out[wgmma::kValueAccumulators];
    load_q_panel(u);
    wait_q();
    begin(out);
    if constexpr (kMe == 0) {
      float scores[wgmma::kAccumulators];
      multiply_keys(scores);
      finish_tile(out, scores, u.tiles <= 2);
    }
    own_tiles(out, kMe == 0 ? 2 : 1, u.tiles);
    if (u.tiles % 2 == kMe) last_tile_of_other(out);
    epilogue_.store_part(u, out, softmax_);
  }

  // The next unit with a tile; those without on the way are written. False when there is none.
  __device__ __forceinline__ bool next_unit(WorkList<C>& work, Unit& u) const {
    for (; !work.done(); work.next()) {
      u = work.unit();
      if (u.tiles > 0) {
        work.next();
        return true;
      }
      epilogue_.store_empty(u);
    }
    return false;
  }

  __device__ __forceinline__ void begin(float (&out)[wgmma::kValueAccumulators]) {
#pragma unroll
    for (int i = 0; i < wgmma::kValueAccumulators; ++i) {
      out[i] = 0.f;
    }
    softmax_.begin();
  }

  // This consumer's tiles from `t` on, each behind a tile of the other consumer. The tensor cores multiply the other
  // tile's probabilities with its values between the two halves of this tile's scores. The half of the other tile goes
  // back at once, before this consumer waits for the half of its own tile that the other consumer gives back in the
  // same way.
  __device__ __forceinline__ void own_tiles(float (&out)[wgmma::kValueAccumulators], int t, int tiles) {
#pragma unroll 1
    for (; t < tiles; t += 2) {
      float scores[wgmma::kAccumulators];
      multiply_keys_of_own_half(scores);
      take_offsets(out);
      multiply_values_of_other(out);
      multiply_keys_of_quarter(scores, 2 * kOther);
      wgmma::wait<1>();
      barriers::warp_arrive(barriers_.keys_empty(kOther, kMe));
      multiply_keys_of_quarter(scores, 2 * kOther + 1);
      finish_tile(out, scores, t + 2 >= tiles);
    }
  }

  __device__ __forceinline__ void last_tile_of_other(float (&out)[wgmma::kValueAccumulators]) {
    take_offsets(out);
    multiply_values_of_other(out);
    wgmma::wait<0>();
    wgmma::pin(out);
    barriers::warp_arrive(barriers_.keys_empty(kOther, kMe));
  }

  // The tile of this consumer whose scores are being multiplied. `last`: of this unit.
  __device__ __forceinline__ void finish_tile(float (&out)[wgmma::kValueAccumulators],
                                              float (&scores)[wgmma::kAccumulators], bool last) {
    wgmma::wait<0>();
    wgmma::pin(scores);
    wgmma::pin(out);
    if (last) barriers::warp_arrive(barriers_.q_empty);
    uint32_t probabilities[C::kTileSteps][4];
    softmax_.exponentiate(scores, probabilities);
    bool const moved = softmax_.has_moved();
    softmax_.publish(probabilities, moved);
    // Each of the writing threads has fenced.
    barriers::warp_arrive(barriers_.probabilities_full(kMe));
    if (moved) softmax_.rescale(out);
    multiply_values(out, probabilities);
    wgmma::wait<0>();
    wgmma::pin(out);
    barriers::warp_arrive(barriers_.keys_empty(kMe, kMe));
  }

  // scores = Q K^T of this consumer's tile, in the order in which its columns land: those that it frees itself first. A
  // group of WGMMAs a quarter.
  __device__ __forceinline__ void multiply_keys(float (&scores)[wgmma::kAccumulators]) {
    multiply_keys_of_own_half(scores);
    multiply_keys_of_quarter(scores, 2 * kOther);
    multiply_keys_of_quarter(scores, 2 * kOther + 1);
  }

  __device__ __forceinline__ void multiply_keys_of_own_half(float (&scores)[wgmma::kAccumulators]) {
    constexpr int own = 2 * kMe;
    keys_round_ ^= 1;
    wait_keys(own);
    // The products with a register operand come first, because a fence behind them waits until they have read it.
    if constexpr (C::kRegPanels > 0) {
      wgmma::Descriptor const keys(uniform(keys_ + kMe * C::kTileBytes + C::kSharedPanels * C::kPanelBytes));
      wgmma::fence();
#pragma unroll
      for (int step = 0; step < C::kPanelSteps; ++step) {
        wgmma::mma_rs<typename C::Element>(scores, q_panel_[step], keys.at(step * 32), step > 0);
      }
    }
    multiply_quarter<C::kRegPanels == 0>(scores, own);
    wgmma::commit();
    multiply_keys_of_quarter(scores, own + 1);
  }

  __device__ __forceinline__ void multiply_keys_of_quarter(float (&scores)[wgmma::kAccumulators], int quarter) {
    wait_keys(quarter);
    multiply_quarter<false>(scores, quarter);
    wgmma::commit();
  }

  __device__ __forceinline__ void wait_keys(int quarter) const {
    wait_for(barriers_.keys_full(kMe, quarter), keys_round_, "sparse_attention: a quarter of the keys");
  }

  template <bool kFirst>
  __device__ __forceinline__ void multiply_quarter(float (&scores)[wgmma::kAccumulators], int quarter) const {
    wgmma::Descriptor const q(uniform(q_ + quarter * C::kQuarterBytes));
    wgmma::Descriptor const keys(uniform(keys_ + kMe * C::kTileBytes + quarter * C::kQuarterBytes));
    // In the block of the WGMMAs: after a branch ptxas would else insert its own and serialise them (C7520).
    wgmma::fence();
#pragma unroll
    for (int s = 0; s < C::kQuarterPanels * C::kPanelSteps; ++s) {
      int const at = s / C::kPanelSteps * C::kPanelBytes + s % C::kPanelSteps * 32;
      wgmma::mma_ss<typename C::Element>(scores, q.at(at), keys.at(at), !kFirst || s > 0);
    }
  }

  // Waits for the other consumer's probabilities; the output takes over their offsets. A move is rare enough to wait
  // for the scores in flight: ptxas would else see an output that WGMMAs may be writing, and wait each time (C7517).
  // All four warps wait where one has moved its offset: PTX leaves a wait undefined that not the whole warpgroup
  // executes.
  __device__ __forceinline__ void take_offsets(float (&out)[wgmma::kValueAccumulators]) {
    wait_for(barriers_.probabilities_full(kOther), other_round_,
                            "sparse_attention: probabilities of the other consumer");
    other_round_ ^= 1;
    if (softmax_.take_offsets()) {
      wgmma::wait<0>();
      softmax_.rescale(out);
    }
  }

  // out += P V on this consumer's columns of the other's tile, P in shared memory; a group of its own.
  __device__ __forceinline__ void multiply_values_of_other(float (&out)[wgmma::kValueAccumulators]) const {
    wgmma::Descriptor const probabilities(uniform(probabilities_ + kOther * C::kPanelBytes));
    wgmma::Descriptor const values(uniform(keys_ + kOther * C::kTileBytes + kMe * C::kHalfBytes), C::kPanelBytes);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < C::kTileSteps; ++step) {
      wgmma::mma_ss<typename C::Element, wgmma::Major::MN>(out, probabilities.at(step * 32), values.at(step * kValueStep), true);
    }
    wgmma::commit();
  }

  // The same of its own tile, P in registers.
  __device__ __forceinline__ void multiply_values(float (&out)[wgmma::kValueAccumulators],
                                                  uint32_t const (&probabilities)[C::kTileSteps][4]) const {
    wgmma::Descriptor const values(uniform(keys_ + kMe * C::kTileBytes + kMe * C::kHalfBytes), C::kPanelBytes);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < C::kTileSteps; ++step) {
      wgmma::mma_rs<typename C::Element, wgmma::Major::MN>(out, probabilities[step], values.at(step * kValueStep), true);
    }
    wgmma::commit();
  }

  __device__ __forceinline__ void wait_q() {
    wait_for(barriers_.q_full, q_round_, "sparse_attention: Q");
    q_round_ ^= 1;
  }

  // The columns of Q that are a register operand, straight from global memory: fragments in the order of ldmatrix.x4,
  // zeros for heads past h_q.
  __device__ __forceinline__ void load_q_panel(Unit const& u) {
    if constexpr (C::kRegPanels > 0) {
      int const lane = threadIdx.x % 32;
      char const* const row = p_.q + u.b * p_.q_stride_b + u.s * p_.q_stride_s +
                              2 * (C::kSharedPanels * C::kPanelCols + 2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const head = first_head<C>(p_, u) + warp_ * 16 + lane / 4 + 8 * i;
        char const* const at = row + head * p_.q_stride_h;
#pragma unroll
        for (int step = 0; step < C::kPanelSteps; ++step) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            q_panel_[step][2 * c + i] =
                head < p_.h_q ? __ldg(reinterpret_cast<uint32_t const*>(at + 2 * (16 * step + 8 * c))) : 0u;
          }
        }
      }
    }
  }

  static constexpr int kOther = 1 - kMe;
  static constexpr int kValueStep = wgmma::kDepth * gather::kPanelBytesPerRow;

  KernelParams const& p_;
  Barriers<C> const barriers_;
  uint32_t const keys_, q_, probabilities_;
  Softmax<C> softmax_;
  Epilogue<C> epilogue_;
  int const warp_;
  uint32_t keys_round_ = 1;   // parity of this consumer's tile
  uint32_t other_round_ = 0;  // and of the other's
  uint32_t q_round_ = 0;
  uint32_t q_panel_[C::kRegPanels ? C::kPanelSteps : 1][4];
};

}  // namespace htree_cuda::sm90::sparse_attention

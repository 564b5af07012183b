// The consumer warpgroups of a pair of CTAs (PairConfig). Per tile of 64 keys, each of a CTA's two
//   scores   S = Q K^T, later dP = dO V^T, of its 64 heads and all keys, over the CTA's columns. What concerns the other
//            CTA's 32 keys goes to the warp of the same number there, what comes from it is added to its own
//   softmax  P and dS of its 64 heads and the CTA's own 32 keys, rounded, to the shared memory of both CTAs
//   dq       dq += dS K of its 64 heads on the CTA's columns, in accumulators for the whole unit
//   dkv      dS^T Q + P^T dO of all 128 heads on half of the CTA's columns, panel by panel
// Partial scores travel while the tensor cores multiply dO.
//
// Partial scores come to where a warp's P and dS of the CTA's own keys are later, partial dP to where those of the other's
// keys are. Both places are free because
//   - all warps of this CTA have arrived at the other's ds_empty after their last product with P and dS, for which the
//     other waits before it sends scores and dP. Whoever has received the scores of a tile therefore also may write P and
//     dS of its own keys
//   - the warp that reads dP arrives at the other's partial_empty, for which the other waits before it sends P and dS
#pragma once

#include <cstdint>

#include "device/barriers.cuh"
#include "device/gather.cuh"
#include "device/ptx.cuh"
#include "device/query_groups.cuh"
#include "device/wgmma.cuh"
#include "barriers.cuh"
#include "config.cuh"
#include "steps.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

template <class C, int kMe>
class PairConsumer {
public:
  using Element = typename C::Element;

  __device__ __forceinline__ PairConsumer(KernelParams const& p, typename C::SharedStorage& shared, int warp)
      : p_(p), barriers_(shared), warp_(warp), keys_(ptx::shared_address(&shared.keys[0])), q_(ptx::shared_address(&shared.q[0])),
        dout_(ptx::shared_address(&shared.dout[0])), p_operand_(ptx::shared_address(&shared.p[0])),
        ds_operand_(ptx::shared_address(&shared.ds[0])), rows_(ptx::shared_address(&shared.rows[0])),
        partial_full_(ptx::shared_address(&shared.partial_full[kMe * C::kWarps + warp])),
        partial_empty_(ptx::shared_address(&shared.partial_empty[kMe * C::kWarps + warp])) {}

  __device__ __forceinline__ void run() {
    float dq[wgmma::kValueAccumulators];
    float dq_tail[kTail];
    for (query_groups::WorkList<KernelParams, C::kCtas> work(p_); !work.done(); work.next()) {
      Unit const u = work.unit();
      if (u.tiles == 0) {
        store_zeros<C>(p_, u, u.group * C::kGroupHeads + rank() * C::kOwnHeads, C::kOwnHeads,
                       kMe * 128 + warp() * 32 + fresh_lane());
        continue;
      }
      barriers::mbarrier_wait<kWaiting>(barriers_.q_full, rounds_ >> 1, "sparse_attention_bwd: Q");
      rounds_ ^= 2;
#pragma unroll
      for (int i = 0; i < wgmma::kValueAccumulators; ++i) dq[i] = 0.f;
#pragma unroll
      for (int i = 0; i < kTail; ++i) dq_tail[i] = 0.f;
      float scores[2 * kOwn];
      if constexpr (kScoresAhead) {
        multiply_keys(scores, rounds_ & 1, true);
        wgmma::wait<0>();
        wgmma::pin(scores);
      }
#pragma unroll 1
      for (int left = u.tiles; left > 0; --left) {
        tile(u, left > 1, scores, dq, dq_tail);
        rounds_ ^= 1;
      }
      __syncwarp();
      if (ptx::elect()) barriers::mbarrier_arrive(barriers_.q_empty);
      store_dq(u, dq, dq_tail);
    }
  }

private:
  static constexpr int kOwnKeysBarrier = kProducerBarrier + 1;  // named, of each consumer
  static constexpr auto kWaiting = barriers::Waiting::kPolling;
  // A tile's scores are multiplied beside the last sums of the tile before. Integers take the registers for that.
  static constexpr bool kScoresAhead = C::kSums == Sums::kAtomic;
  static constexpr int kTail = C::kTailCols ? C::kTailCols / 2 : 1;
  static constexpr int kOwnTail = C::kOwnTailCols ? C::kOwnTailCols / 2 : 1;
  static constexpr int kOwn = C::kOwnKeys / 2;  // accumulators of 64 heads by the CTA's own keys, which lie first
  static constexpr int kPieces = kOwn / 4;      // of 16 bytes, of a lane

  // The ranks of this CTA and of the other one are read where they are needed, since registers are scarce.
  __device__ __forceinline__ static int rank() { return static_cast<int>(ptx::cluster_rank()); }
  __device__ __forceinline__ static uint32_t peer() { return ptx::cluster_rank() ^ 1; }

  __device__ __forceinline__ int warp() const { return static_cast<int>(ptx::opaque(static_cast<uint32_t>(warp_))); }

  __device__ __forceinline__ int first_head(Unit const& u) const {
    return u.group * C::kGroupHeads + kMe * C::kOwnHeads + warp() * 16;
  }

  // With kScoresAhead `scores` are this tile's partial scores on entry, on return the next one's, if there are `more` of the
  // unit.
  __device__ __forceinline__ void tile(Unit const& u, bool more, float (&scores)[2 * kOwn],
                                       float (&dq)[wgmma::kValueAccumulators], float (&dq_tail)[kTail]) {
    float s[kOwn];
    float dp[kOwn];
    {
      // Partial dP, while partial scores travel.
      float values[2 * kOwn];
      if constexpr (!kScoresAhead) multiply_keys(scores, rounds_ & 1, true);
      multiply_values(values);
      barriers::mbarrier_wait<kWaiting>(barriers_.ds_empty, ~rounds_ & 1, "sparse_attention_bwd: room for scores");
      if constexpr (!kScoresAhead) {
        wgmma::wait<1>();
        wgmma::pin(scores);
      }
      send_partial(scores, kOfScores);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) s[i] = scores[i];
      wgmma::wait<0>();
      wgmma::pin(values);
      send_partial(values, kOfDp);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) dp[i] = values[i];
    }
    // While dP travels.
    float lse2[2];
    load_lse2(p_, u, first_head(u), lse2, fresh_lane());
    receive_partial(s, kOfScores);
    exponentiate(p_, lse2, s);
    HeadTerms terms[2];
    load_terms(p_, u, first_head(u), terms, fresh_lane());
    uint32_t const valid = valid_keys<C::kOwnKeys>(rows(), fresh_lane());
    receive_partial(dp, kOfDp);
    uint32_t const read = __float_as_uint(dp[0]) | __float_as_uint(dp[4]) | __float_as_uint(dp[8]) | __float_as_uint(dp[12]);
    __syncwarp();
    uint32_t const empty = barriers::once_read(ptx::map_to_rank(partial_empty_, peer()), read);
    if (ptx::elect()) barriers::mbarrier_arrive_cluster_having_read(empty);
    form_operands(terms, valid, s, dp);
    __syncwarp();  // all lanes have read what P and dS are written over
    publish<Element>(p_operand_, kMe * C::kOwnHeads + warp() * 16, 0, s, fresh_lane());
    publish<Element>(ds_operand_, kMe * C::kOwnHeads + warp() * 16, 0, dp, fresh_lane());
    ptx::fence_proxy_async_shared();
    __syncwarp();
    barriers::mbarrier_wait<kWaiting>(partial_empty_, rounds_ & 1, "sparse_attention_bwd: room for weights");
    send_weights();
    if (ptx::elect()) barriers::mbarrier_arrive_expect_bytes(barriers_.ds_full, C::kWeightBytes);

    // dq += dS K: of the CTA's own keys while the other's are on their way.
    barriers::named_sync(kOwnKeysBarrier + kMe, 128);
    multiply_dq<0, C::kKeySteps / 2>(dq, dq_tail);
    wgmma::commit();
    barriers::mbarrier_wait<kWaiting>(barriers_.ds_full, rounds_ & 1, "sparse_attention_bwd: dS");
    // What the other CTA stored came through the generic proxy.
    ptx::fence_proxy_async_shared();
    multiply_dq<C::kKeySteps / 2, C::kKeySteps>(dq, dq_tail);

    // dkv, some columns at a time: while the sums of some leave, the tensor cores multiply the next ones, and in the end the
    // next tile's scores, whose keys come meanwhile.
    Target<C> const target = target_of<C>(p_, u, rows(), warp() * 16, fresh_lane());
    int const first = rank() * C::kCtaCols + kMe * C::kOwnCols;
    float tail[kOwnTail];
    float first_sums[C::kSumCols / 2];
    float second_sums[C::kSumCols / 2];
    wgmma::commit();
    if constexpr (C::kTailCols > 0) {
      multiply_tail(tail);
      wgmma::commit();
    }
    multiply_columns(first_sums, 0);
    wgmma::wait<(C::kTailCols > 0 ? 2 : 1)>();
    wgmma::pin(dq);
    if constexpr (C::kTailCols > 0) wgmma::pin(dq_tail);
    if (ptx::elect()) barriers::mbarrier_arrive(barriers_.keys_empty);
    wgmma::wait<1>();
    if constexpr (C::kTailCols > 0) {
      wgmma::pin(tail);
      add<C>(p_, u, target, tail, C::kValueDim + rank() * C::kTailCols + kMe * C::kOwnTailCols, fresh_lane());
    }
    multiply_columns(second_sums, C::kSumCols);
    wgmma::wait<1>();
    wgmma::pin(first_sums);
    add<C>(p_, u, target, first_sums, first, fresh_lane());
    // After the unit's last tile scores of no keys, to no purpose: a branch around products takes registers.
    if constexpr (kScoresAhead) multiply_keys(scores, ~rounds_ & 1, more);
    wgmma::wait<(kScoresAhead ? C::kParts : 0)>();
    wgmma::pin(second_sums);
    if (ptx::elect()) barriers::mbarrier_arrive_cluster_having_read(ptx::map_to_rank(barriers_.ds_empty, peer()));
    add<C>(p_, u, target, second_sums, first + C::kSumCols, fresh_lane());
    if constexpr (kScoresAhead) {
      wgmma::wait<0>();
      wgmma::pin(scores);
    }
  }

  // The numbers of the tile's rows.
  __device__ __forceinline__ uint32_t rows() const { return rows_ + (rounds_ & 1) * (4 * C::kTileKeys); }

  static_assert(C::kOwnCols == 2 * C::kSumCols);

  // ---- scores --------------------------------------------------------------------------------------------------------

  // Its 64 heads by all keys of the tile of parity `parity` over the CTA's columns; under way on return, in kParts groups.
  // Where there is no such tile in the unit, dO stands for its keys, and nobody is waited for.
  __device__ __forceinline__ void multiply_keys(float (&s)[2 * kOwn], uint32_t parity, bool exists) const {
    // A zero that the assembler does not know: otherwise it keeps descriptors of dP's products for these.
    uint32_t const first_key = uniform((exists ? keys_ : dout_) + ptx::cluster_rank() / C::kCtas);
    wgmma::Descriptor const keys(first_key);
    wgmma::Descriptor const q(uniform(q_ + kMe * C::kOwnHeadBytes));
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      if (exists) barriers::mbarrier_wait<kWaiting>(barriers_.keys_full(part), parity, "sparse_attention_bwd: keys");
      wgmma::fence();
#pragma unroll
      for (int i = 0; i < C::part_panels(part) * C::kPanelSteps; ++i) {
        int const panel = part * C::kPartPanels + i / C::kPanelSteps;
        int const step = i % C::kPanelSteps * 32;
        if (panel < C::kValuePanels) {
          wgmma::mma_ss<Element>(s, q.at(panel * C::kHeadPanelBytes + step), keys.at(panel * C::kPanelBytes + step),
                                 panel > 0 || step > 0);
        }
      }
      if (C::kTailCols > 0 && part == C::kParts - 1) {
        int const half = rank() * C::kTailCols * 2;
        wgmma::Descriptor const tail(uniform(first_key + C::kValuePanels * C::kPanelBytes + half));
        wgmma::Descriptor const q_tail(
            uniform(q_ + kMe * C::kOwnHeadBytes + C::kValuePanels * C::kHeadPanelBytes + half));
#pragma unroll
        for (int i = 0; i < C::kTailSteps; ++i) wgmma::mma_ss<Element>(s, q_tail.at(i * 32), tail.at(i * 32), true);
      }
      wgmma::commit();
    }
  }

  // Its 64 heads of dO by all keys over the CTA's columns of values; under way on return.
  __device__ __forceinline__ void multiply_values(float (&dp)[2 * kOwn]) const {
    wgmma::Descriptor const keys(uniform(keys_));
    wgmma::Descriptor const dout(uniform(dout_ + kMe * C::kOwnHeadBytes));
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < C::kValuePanels * C::kPanelSteps; ++i) {
      int const panel = i / C::kPanelSteps;
      int const step = i % C::kPanelSteps * 32;
      wgmma::mma_ss<Element>(dp, dout.at(panel * C::kHeadPanelBytes + step), keys.at(panel * C::kPanelBytes + step),
                             i > 0);
    }
    wgmma::commit();
  }

  // ---- between the CTAs ----------------------------------------------------------------------------------------------

  // A lane has pieces of 16 bytes in P, and as many in dS, of the warp's 16 heads and the CTA's own 32 keys: this is the
  // address of the first, piece_offset says where the others lie. Eight lanes have two rows four apart, whose own chunks
  // are in different halves of the banks. Computed where it is needed: registers are scarce.
  __device__ __forceinline__ uint32_t own_pieces() const {
    uint32_t const lane = ptx::lane_index();
    uint32_t const row = lane / 8 + lane / 4 % 2 * 4;
    return p_operand_ + kMe * C::kOwnHeadBytes + warp() * kRowStep + gather::swizzled_offset(row, lane % 4);
  }
  __device__ __forceinline__ uint32_t piece_offset(int i) const {
    return i % 2 * 8 * gather::kPanelBytesPerRow + i / 2 * (ds_operand_ - p_operand_);
  }
  static_assert(kPieces == 4, "two of P and two of dS");

  // What is partial, its barrier and its place: the bytes that an address changes by.
  static constexpr uint32_t kOfScores = 0;  // the chunks 0 .. 3 of a row
  static constexpr uint32_t kOfDp = 64;     // the chunks 4 .. 7

  __device__ __forceinline__ uint32_t partial_full(uint32_t of) const {
    return partial_full_ + of / kOfDp * (8 * C::kConsumers * C::kWarps);
  }

  // The half of accumulators that concerns the other's keys.
  __device__ __forceinline__ void send_partial(float const (&x)[2 * kOwn], uint32_t of) const {
    uint32_t const others = ptx::map_to_rank(own_pieces(), peer());
    uint32_t const full = ptx::map_to_rank(partial_full(of), peer());
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float const* const piece = &x[kOwn + 4 * i];
      ptx::store_async((others + piece_offset(i)) ^ of, make_float4(piece[0], piece[1], piece[2], piece[3]), full);
    }
  }

  // Adds what the other has of this CTA's keys.
  __device__ __forceinline__ void receive_partial(float (&x)[kOwn], uint32_t of) const {
    if (ptx::elect()) barriers::mbarrier_arrive_expect_bytes(partial_full(of), C::kPartialBytes);
    barriers::mbarrier_wait<kWaiting>(partial_full(of), rounds_ & 1, "sparse_attention_bwd: partial scores");
    uint32_t const own = own_pieces();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint4 const piece = ptx::load_shared_16B((own + piece_offset(i)) ^ of);
      x[4 * i] += __uint_as_float(piece.x);
      x[4 * i + 1] += __uint_as_float(piece.y);
      x[4 * i + 2] += __uint_as_float(piece.z);
      x[4 * i + 3] += __uint_as_float(piece.w);
    }
  }

  // P and dS of the warp's heads and the CTA's own keys, which are the other's last 32: the chunks 4 .. 7 of a row.
  __device__ __forceinline__ void send_weights() const {
    uint32_t const own = own_pieces();
    uint32_t const others = ptx::map_to_rank(own, peer());
    uint32_t const full = ptx::map_to_rank(barriers_.ds_full, peer());
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint4 const piece = ptx::load_shared_16B(own + piece_offset(i));
      ptx::store_async((others + piece_offset(i)) ^ 64, piece, full);
    }
  }

  // ---- dq and dkv ----------------------------------------------------------------------------------------------------

  // dq += dS K over the steps kFirst .. kLast - 1 of 16 keys.
  template <int kFirst, int kLast>
  __device__ __forceinline__ void multiply_dq(float (&dq)[wgmma::kValueAccumulators], float (&dq_tail)[kTail]) const {
    wgmma::Descriptor const ds(uniform(ds_operand_ + kMe * C::kOwnHeadBytes));
    wgmma::Descriptor const columns(uniform(keys_), C::kPanelBytes);
    wgmma::fence();
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) {
      wgmma::mma_ss<Element, Major::MN>(dq, ds.at(i * 32), columns.at(i * kRowStep), true);
    }
    if constexpr (C::kTailCols > 0) {
      wgmma::Descriptor const tail(uniform(keys_ + C::kValuePanels * C::kPanelBytes + rank() * C::kTailCols * 2));
#pragma unroll
      for (int i = kFirst; i < kLast; ++i) {
        wgmma::mma_ss<Element, Major::MN>(dq_tail, ds.at(i * 32), tail.at(i * kRowStep), true);
      }
    }
  }

  // sums = dS^T Q + P^T dO of the tile on 2 kCount columns of this consumer from `column` on.
  template <int kCount>
  __device__ __forceinline__ void multiply_columns(float (&sums)[kCount], int column) const {
    int const own = kMe * C::kOwnCols + column;
    int const at = own / C::kPanelCols * C::kHeadPanelBytes + own % C::kPanelCols * 2;
    wgmma::fence();
    multiply<Element, C::kHeadSteps>(sums, ds_operand_, q_ + at, false);
    multiply<Element, C::kHeadSteps>(sums, p_operand_, dout_ + at, true);
    wgmma::commit();
  }

  // The same on its part of the columns past the values.
  __device__ __forceinline__ void multiply_tail(float (&sums)[kOwnTail]) const {
    uint32_t const at =
        C::kValuePanels * C::kHeadPanelBytes + 2 * (rank() * C::kTailCols + kMe * C::kOwnTailCols);
    wgmma::fence();
    multiply<Element, C::kHeadSteps>(sums, ds_operand_, q_ + at, false);
  }

  __device__ __forceinline__ void store_dq(Unit const& u, float const (&dq)[wgmma::kValueAccumulators],
                                           float const (&dq_tail)[kTail]) const {
    int const lane = fresh_lane();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const head = first_head(u) + lane / 4 + 8 * i;
      if (head >= p_.h_q) continue;
      char* const to = p_.dq + 2 * ((static_cast<int64_t>(u.row) * p_.h_q + head) * C::kHeadDim + 2 * (lane % 4));
      store_columns<Element>(to + 2 * rank() * C::kCtaCols, dq, i);
      if constexpr (C::kTailCols > 0) store_columns<Element>(to + 2 * (C::kValueDim + rank() * C::kTailCols), dq_tail, i);
    }
  }

  KernelParams const& p_;
  Barriers<C> const barriers_;
  int const warp_;
  uint32_t const keys_, q_, dout_, p_operand_, ds_operand_, rows_, partial_full_, partial_empty_;
  // Bit 0: parity of the tile, of its keys and of its P and dS. Bit 1: of the unit.
  uint32_t rounds_ = 0;
};

}  // namespace htree_cuda::sm90::sparse_attention_bwd

// One consumer: S^T = K q^T for every key tile, ReLU and the weighted sum over heads in registers.
//
// Keys are the rows of a product and the heads of several queries its columns, so that a thread holds a quarter of the
// heads of two keys: the sum over heads is the thread's own but for two exchanges among four lanes. A consumer's queries
// are two halves with accumulators of their own: the products of one run while the other is summed.
//
//   barrier          arrives                              waits
//   queries_full     producer and the bytes of q          both consumers, once
//   full[stage]      producer and the bytes of a tile     both consumers
//   empty[stage]     each warp of both consumers          producer
#pragma once

#include "device/wgmma.cuh"
#include "work.cuh"

namespace htree_cuda::sm90::indexer {

template <class C>
struct Consumer {
  using Shared = typename C::SharedStorage;
  using Ring = RingBarriers<C::kStages>;
  static constexpr int kColumnGroups = C::kHeads / 8;     // of eight heads
  static constexpr int kSums = 2 * C::kHalfQueries;       // of a thread and half: two keys of each query
  static constexpr int kOwn = kSums / 4;                  // that a lane ends up with

  KernelParams const& p;
  Shared& shared;
  Ring ring;
  Work work;
  int consumer;
  int warp;
  int lane;
  float weights[C::kWeights];

  __device__ __forceinline__ Consumer(KernelParams const& p, Shared& shared, Ring ring, Work work, int consumer, int warp)
      : p(p), shared(shared), ring(ring), work(work), consumer(consumer), warp(warp), lane(threadIdx.x % 32) {
#pragma unroll
    for (int q = 0; q < C::kQueries; ++q) {
      int const s = work.query + consumer * C::kQueries + q;
#pragma unroll
      for (int i = 0; i < C::kHeads / 4; ++i) {
        int const h = head(i);
        float weight = 0.0f;
        if (s < p.s_q && h < p.h_i) {
          weight = p.weights[work.b * p.weights_stride_b + s * p.weights_stride_s + h * p.weights_stride_h];
          if (p.q_scale != nullptr) {
            weight *= p.q_scale[work.b * p.q_scale_stride_b + s * p.q_scale_stride_s + h * p.q_scale_stride_h];
          }
        }
        weights[q * (C::kHeads / 4) + i] = weight;
      }
    }
  }

  // The thread's i-th head of a query.
  __device__ __forceinline__ int head(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

  __device__ __forceinline__ void run() {
    fill();
    if (work.tiles == 0) return;
    barriers::mbarrier_wait(ptx::shared_address(&shared.queries_full), 0, "queries");
    RingPosition<C::kStages> at;
    // Both products are issued before the first is summed: otherwise ptxas moves what sums one between the instructions of
    // the other. While the second is summed, the other consumer's products run.
#pragma unroll 1
    for (int tile = 0; tile < work.tiles; ++tile, at = at.ahead(1)) {
      float lower[C::kAccumulators];
      float upper[C::kAccumulators];
      ring.wait_full(at, "keys");
      multiply<0>(lower, at.slot);
      multiply<1>(upper, at.slot);
      Keys const keys = keys_of(tile);
      wait<1>(lower);
      finish<0>(lower, keys);
      wait<0>(upper);
      barriers::release(ring.empty_at(at.slot));
      finish<1>(upper, keys);
    }
  }

  // What a thread knows of its two keys of a tile.
  struct Keys {
    int first;
    float scale[2];
  };

  __device__ __forceinline__ Keys keys_of(int tile) const {
    Keys keys{work.first_key + tile * kTileKeys + warp * 16 + lane / 4, {1.0f, 1.0f}};
    if (p.k_scale != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const key = min(keys.first + 8 * half, p.s_kv - 1);
        keys.scale[half] = p.k_scale[work.b * p.k_scale_stride_b + key * p.k_scale_stride_s];
      }
    }
    return keys;
  }

  template <int kPending>
  static __device__ __forceinline__ void wait(float (&acc)[C::kAccumulators]) {
    wgmma::wait<kPending>();
    wgmma::pin(acc);
  }

  template <int kHalf>
  __device__ __forceinline__ void multiply(float (&acc)[C::kAccumulators], uint32_t slot) {
    wgmma::Descriptor const keys(ptx::shared_address(shared.keys[slot]));
    wgmma::Descriptor const queries(ptx::shared_address(shared.queries[consumer]) + kHalf * C::kHalfPanelBytes);
    wgmma::pin(acc);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      int const panel = step / C::kPanelSteps;
      int const column = step % C::kPanelSteps * 32;
      wgmma::mma_ss<typename C::Element>(acc, keys.at(panel * C::kKeyPanelBytes + column),
                                         queries.at(panel * C::kQueryPanelBytes + column), step > 0);
    }
    wgmma::commit();
  }

  // ReLU, weights, the sum over heads, the key's scale; then the sums go where they belong.
  template <int kHalf>
  __device__ __forceinline__ void finish(float const (&acc)[C::kAccumulators], Keys const& keys) {
    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kHeads / 4; ++i) {
#pragma unroll
      for (int q = 0; q < C::kHalfQueries; ++q) {
        float const weight = weights[(kHalf * C::kHalfQueries + q) * (C::kHeads / 4) + i];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float z = acc[4 * (q * kColumnGroups + i / 2) + 2 * half + i % 2];
          // A head that does not exist is a row of zeros, whose product with an infinite key is NaN.
          if (C::kPadded) z = head(i) < p.h_i ? z : 0.0f;
          sums[2 * q + half] = fmaf(ptx::max_or_nan(z, 0.0f), weight, sums[2 * q + half]);
        }
      }
    }
    exchange<kSums, 2>(sums);
    exchange<kSums / 2, 1>(sums);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      int const place = (lane >> 1 & 1) * (kSums / 2) + (lane & 1) * (kSums / 4) + i;
      int const half = place % 2;
      int const q = consumer * C::kQueries + kHalf * C::kHalfQueries + place / 2;
      int const s = work.query + q;
      int const j = keys.first + 8 * half;
      bool const visible = (j >= shared.first[q]) & (j < shared.end[q]);
      bool const wanted = visible | (p.fill & (s < p.s_q) & (j < work.end));
      float const value = sums[i] * (half ? keys.scale[1] : keys.scale[0]);
      ptx::store_global_if(wanted, p.out + work.b * p.out_stride_b + s * p.out_stride_s + j, visible ? value : -INFINITY);
    }
  }

  // Lanes `distance` apart add their sums; each keeps one half of them. Which lane adds does not matter to the bits.
  template <int kCount, int kDistance>
  __device__ __forceinline__ void exchange(float (&sums)[kSums]) {
    bool const upper = lane & kDistance;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      float const other = upper ? sums[i] : sums[i + kCount / 2];
      float const own = upper ? sums[i + kCount / 2] : sums[i];
      sums[i] = own + __shfl_xor_sync(kFullWarp, other, kDistance);
    }
  }

  // Minus infinity in the part of the segment that no tile covers.
  __device__ __forceinline__ void fill() {
    if (!p.fill) return;
    int const until = work.tiles == 0 ? work.end : work.first_key;
    int const from = work.tiles == 0 ? work.end : work.first_key + work.tiles * kTileKeys;
#pragma unroll 1
    for (int q = 0; q < C::kQueries; ++q) {
      int const s = work.query + consumer * C::kQueries + q;
      if (s >= p.s_q) break;
      float* const row = p.out + work.b * p.out_stride_b + s * p.out_stride_s;
#pragma unroll 1
      for (int j = work.begin + static_cast<int>(threadIdx.x % 128); j < until; j += 128) row[j] = -INFINITY;
#pragma unroll 1
      for (int j = from + static_cast<int>(threadIdx.x % 128); j < work.end; j += 128) row[j] = -INFINITY;
    }
  }
};

}  // namespace htree_cuda::sm90::indexer

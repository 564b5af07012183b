// One consumer: S^T = K q^T for every key tile, ReLU and the weighted sum over heads in registers.
//
// Keys are the rows of a product and the heads of several queries its columns, so that a thread holds a quarter of the
// heads of two keys: the sum over heads is the thread's own but for two exchanges among four lanes. A consumer's queries
// are two halves with accumulators of their own: the products of one run while the other is summed. Where the consumers
// split the keys of one query, the products of the others run meanwhile.
//
//   barrier          arrives                              waits
//   queries_full     producer and the bytes of q          consumers, once
//   full[stage]      producer and the bytes of a tile     the consumers of the tile: both, or one
//   empty[stage]     each warp of these                   producer
#pragma once

#include "device/wgmma.cuh"
#include "work.cuh"

namespace htree_cuda::sm90::indexer {

template <class C>
struct Consumer {
  using Shared = typename C::SharedStorage;
  using Ring = RingBarriers<C::kStages>;
  static constexpr int kColumnGroups = C::kHeads / 8;              // of eight heads
  static constexpr int kHalfSums = 2 * C::kHalfQueries;            // of a thread and half: two keys of each query
  static constexpr int kSums = C::kHalves * kHalfSums;
  static constexpr int kOwnQueries = C::kSplitsKeys ? 1 : C::kQueries / 4;  // whose sums a lane ends up with
  static_assert(C::kSplitsKeys ? C::kQueries == 1 : C::kQueries % 4 == 0);

  // What a lane knows of a query whose logits it stores.
  struct Row {
    float* out;
    int first, end;  // its window
    int fill_end;    // up to where the row is written outside its window
  };

  KernelParams const& p;
  Shared& shared;
  Ring ring;
  Work work;
  int consumer;
  int warp;
  int lane;
  float weights[C::kWeights];
  Row rows[kOwnQueries];

  __device__ __forceinline__ Consumer(KernelParams const& p, Shared& shared, Ring ring, Work work, int consumer, int warp)
      : p(p), shared(shared), ring(ring), work(work), consumer(consumer), warp(warp), lane(threadIdx.x % 32) {
    load_weights();
#pragma unroll
    for (int i = 0; i < kOwnQueries; ++i) {
      int const q = query_set() * C::kQueries + (C::kSplitsKeys ? 0 : lane % 4 * kOwnQueries + i);
      int const s = work.query + q;
      rows[i] = {p.out + work.b * p.out_stride_b + s * p.out_stride_s, shared.first[q], shared.end[q],
                 p.fill && s < p.s_q ? work.end : 0};
    }
  }

  // Weights times q_scale; -0 for what does not exist, which changes no sum, not even -0. Nothing branches, so that all
  // loads are under way at the same time.
  __device__ __forceinline__ void load_weights() {
    auto const each = [&](auto const& use) {
#pragma unroll
      for (int q = 0; q < C::kQueries; ++q) {
#pragma unroll
        for (int i = 0; i < C::kHeads / 4; ++i) use(weights[q * (C::kHeads / 4) + i], query(q), head(i));
      }
    };
    each([&](float& weight, int s, int h) {
      weight = __ldg(p.weights + work.b * p.weights_stride_b + min(s, p.s_q - 1) * p.weights_stride_s +
                     min(h, p.h_i - 1) * p.weights_stride_h);
    });
    if (p.q_scale != nullptr) {
      each([&](float& weight, int s, int h) {
        weight *= __ldg(p.q_scale + work.b * p.q_scale_stride_b + min(s, p.s_q - 1) * p.q_scale_stride_s +
                        min(h, p.h_i - 1) * p.q_scale_stride_h);
      });
    }
    each([&](float& weight, int s, int h) { weight = (s < p.s_q) & (h < p.h_i) ? weight : -0.0f; });
  }

  // Which of the CTA's sets of queries the consumer has: all share one where they split the keys.
  __device__ __forceinline__ int query_set() const { return C::kSplitsKeys ? 0 : consumer; }

  // The consumer's q-th query.
  __device__ __forceinline__ int query(int q) const { return work.query + query_set() * C::kQueries + q; }

  // The thread's i-th head of a query.
  __device__ __forceinline__ int head(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

  __device__ __forceinline__ void run() {
    fill();
    int const first_tile = C::kSplitsKeys ? consumer : 0;
    if (work.tiles <= first_tile) return;
    int const tiles = (work.tiles - first_tile + C::kTileStep - 1) / C::kTileStep;
    barriers::mbarrier_wait(ptx::shared_address(&shared.queries_full), 0, "queries");
    auto const at = RingPosition<C::kStages>{}.ahead(first_tile);
    Keys const keys{work.first_key + first_tile * kTileKeys + warp * 16 + lane / 4, {1.0f, 1.0f}};
    float const* const scales = p.k_scale + work.b * p.k_scale_stride_b + keys.first * p.k_scale_stride_s;
    if constexpr (C::kSplitsKeys) {
      multiply_own_tiles(tiles, at, keys, scales);
    } else {
      multiply_halves(tiles, at, keys, scales);
    }
  }

  // A thread's two keys of a tile, eight apart.
  struct Keys {
    int first;
    float scale[2];
  };

  // While one consumer sums a tile, products of the others run. The scales of the next tile are on their way meanwhile.
  __device__ __forceinline__ void multiply_own_tiles(int tiles, RingPosition<C::kStages> at, Keys keys, float const* scales) {
    load_scales(keys, scales);
#pragma unroll 1
    for (int left = tiles; left > 0; --left, at = at.ahead(C::kTileStep)) {
      float products[C::kAccumulators];
      float sums[kSums] = {};
      Keys next{keys.first + C::kTileStep * kTileKeys, {1.0f, 1.0f}};
      ring.wait_full(at, "keys");
      multiply<0>(products, at.slot);
      load_scales(next, scales);
      wait<0>(products);
      barriers::release(ring.empty_at(at.slot));
      sum<0>(products, sums);
      finish(sums, keys);
      keys = next;
    }
  }

  __device__ __forceinline__ void multiply_halves(int tiles, RingPosition<C::kStages> at, Keys keys, float const* scales) {
    ring.wait_full(at, "keys");
    // Both products are issued before the first is summed: otherwise ptxas moves what sums one between the instructions of
    // the other. While the second is summed, the other consumer's products run.
#pragma unroll 1
    for (int left = tiles; left > 0; --left) {
      float lower[C::kAccumulators];
      float upper[C::kAccumulators];
      float sums[kSums] = {};
      multiply<0>(lower, at.slot);
      multiply<1>(upper, at.slot);
      load_scales(keys, scales);
      wait<1>(lower);
      sum<0>(lower, sums);
      // Here, because ptxas moves the wait for the second product ahead of the sum of the first unless a branch lies between.
      auto const next = at.ahead(1);
      if (left > 1) ring.wait_full(next, "keys");
      wait<0>(upper);
      barriers::release(ring.empty_at(at.slot));
      sum<1>(upper, sums);
      finish(sums, keys);
      keys.first += kTileKeys;
      at = next;
    }
  }

  // The scales of the keys at hand, and goes on to the next tile's.
  __device__ __forceinline__ void load_scales(Keys& keys, float const*& scales) const {
    if (p.k_scale == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (keys.first + 8 * half < p.s_kv) keys.scale[half] = __ldg(scales + 8 * half * p.k_scale_stride_s);
    }
    scales += C::kTileStep * kTileKeys * p.k_scale_stride_s;
  }

  template <int kPending>
  static __device__ __forceinline__ void wait(float (&acc)[C::kAccumulators]) {
    wgmma::wait<kPending>();
    wgmma::pin(acc);
  }

  template <int kHalf>
  __device__ __forceinline__ void multiply(float (&acc)[C::kAccumulators], uint32_t slot) {
    wgmma::Descriptor const keys(ptx::shared_address(shared.keys[slot]));
    wgmma::Descriptor const queries(ptx::shared_address(shared.queries[query_set()]) + kHalf * C::kHalfPanelBytes);
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

  // ReLU, weights and the sum over the thread's heads of a half.
  template <int kHalf>
  __device__ __forceinline__ void sum(float const (&acc)[C::kAccumulators], float (&sums)[kSums]) const {
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
          float& sum = sums[kHalf * kHalfSums + 2 * q + half];
          sum = fmaf(ptx::max_or_nan(z, 0.0f), weight, sum);
        }
      }
    }
  }

  // The sum over all heads and the key's scale; every lane stores what it ends up with: two keys of its queries. Of one
  // query two lanes have each key, and the first stores.
  __device__ __forceinline__ void finish(float (&sums)[kSums], Keys const& keys) {
    exchange<kSums, 2>(sums);
    if constexpr (C::kSplitsKeys) {
      sums[0] += __shfl_xor_sync(kFullWarp, sums[0], 1);
      bool const second = lane & 2;
      store(rows[0], keys.first + (second ? 8 : 0), sums[0] * (second ? keys.scale[1] : keys.scale[0]), lane % 2 == 0);
    } else {
      exchange<kSums / 2, 1>(sums);
#pragma unroll
      for (int i = 0; i < kOwnQueries; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          store(rows[i], keys.first + 8 * half, sums[2 * i + half] * keys.scale[half], true);
        }
      }
    }
  }

  __device__ __forceinline__ void store(Row const& row, int j, float value, bool wanted) const {
    bool const visible = (j >= row.first) & (j < row.end);
    ptx::store_global_if((visible | (j < row.fill_end)) & wanted, row.out + j, visible ? value : -INFINITY);
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
    constexpr int kStep = C::kSplitsKeys ? C::kConsumers * 128 : 128;  // consumers have the same query, or each its own
    int const thread = static_cast<int>(threadIdx.x) % kStep;
#pragma unroll 1
    for (int q = 0; q < C::kQueries; ++q) {
      int const s = query(q);
      if (s >= p.s_q) break;
      float* const row = p.out + work.b * p.out_stride_b + s * p.out_stride_s;
#pragma unroll 1
      for (int j = work.begin + thread; j < until; j += kStep) row[j] = -INFINITY;
#pragma unroll 1
      for (int j = from + thread; j < work.end; j += kStep) row[j] = -INFINITY;
    }
  }
};

}  // namespace htree_cuda::sm90::indexer

// dq: a warp holds a query and walks its parents below the top, layer by layer; then it adds the top's share, which is
// there already (top_queries.cuh).
//
// A parent of rank j adds sum_c dS_c R^-1(k_c, n - 1 - 16 j) to dq, k_c being turned by its place c. So it is the keys
// that turn, in packed fp16, once: for the scores, where q stays as it is, and transposed between registers for dq.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "operands.cuh"

namespace htree_cuda::gradient {

// Lanes look at a group of parents each, and at the visits of all queries of the CTA in it.
template <class Cfg>
__device__ void produce_parents(Args const& args, Ring<Cfg> const& ring) {
  int const lane = threadIdx.x % 32;
  int const blocks = args.chunk.rows / kGroupQueries;
  int const head = blockIdx.x / blocks;
  int const first = blockIdx.x % blocks * kGroupQueries;
  int const queries = min(args.chunk.queries - first, kGroupQueries);
  Sender<Cfg> sender(ring);
  auto const source = [&](Entry const& entry) {
    return args.nodes[entry.detail] +
           (static_cast<std::int64_t>(head) * args.tree.parents[entry.detail] + entry.which) * Cfg::kNodeBytes;
  };
  for (int layer = args.tree.layers - 2; layer >= 0 && queries > 0; --layer) {
    Candidates const c = candidates(args.chunk.position(first + lane), layer, args.tree.layers, args.tree.top_k);
    unsigned const working = __ballot_sync(kFullWarp, lane < queries && works(layer, c, args.tree.top_k));
    // Parents are nodes of the layer above: none beyond the last query's rightmost.
    std::int64_t const reach = args.chunk.position(first + queries - 1) >> (kLog2Siblings * (layer + 1));
    int const groups = working == 0 ? 0 : static_cast<int>(reach / kGroupParents) + 1;
    for (int base = 0; base < groups; base += 32) {
      uint4 visited[kGroupQueries / 4] = {};  // by the eight queries, one word each
      if (base + lane < groups) {
        uint4 const* const entries =
            reinterpret_cast<uint4 const*>(entry_of(args, layer, head, base + lane, first));
#pragma unroll
        for (int i = 0; i < kGroupQueries / 4; ++i) visited[i] = __ldg(entries + i);
      }
      // Byte p: the queries that visit parent p of this lane's group.
      uint32_t takers[2] = {};
#pragma unroll
      for (int i = 0; i < kGroupQueries; ++i) {
        uint4 const& four = visited[i / 4];
        uint32_t mask = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
        if (!(working >> i & 1u)) mask = 0;
        // Four bits to the lowest bit of a byte each: 0x204081 puts bit b at 8 b.
        takers[0] |= ((mask & 0xfu) * 0x204081u & 0x01010101u) << i;
        takers[1] |= ((mask >> 4 & 0xfu) * 0x204081u & 0x01010101u) << i;
      }
      int count = 0;
#pragma unroll
      for (int p = 0; p < kGroupParents; ++p) count += (takers[p / 4] >> (p % 4 * 8) & 0xffu) != 0;
      int p = -1;
      sender.append(count, [&](int) {
        do {
          ++p;
        } while ((takers[p / 4] >> (p % 4 * 8) & 0xffu) == 0);
        return Entry{takers[p / 4] >> (p % 4 * 8) & 0xffu, (base + lane) * kGroupParents + p, layer};
      });
      sender.send(source);
    }
  }
  sender.finish(source);
}

template <class Cfg>
class Query {
  using Element = typename Cfg::Element;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kHalf = kK / 32;   // k-steps of the low half of the pairs
  static constexpr int kTiles = kK / 8;

public:
  __device__ Query(Args const& args, Ring<Cfg> const& ring, int warp)
      : args_(args), lane_(threadIdx.x % 32), g_(lane_ / 4), tq_(lane_ % 4), turns_(ring.turns_of(warp)) {
    int const blocks = args.chunk.rows / kGroupQueries;
    head_ = blockIdx.x / blocks;
    row_ = blockIdx.x % blocks * kGroupQueries + warp;
    exists_ = row_ < args.chunk.queries;
    if (exists_) load();
    clear(dq_);
  }

  __device__ void run(Ring<Cfg> const& ring, int warp) {
    receive(ring, warp, [&](uint32_t slot, Entry const& entry) { take(slot, entry.which, entry.detail); });
    if (exists_) finish();
  }

private:
  // Two elements of row i's step: columns 16 step + 8 part + 2 tq + {0, 1}.
  __device__ __forceinline__ uint32_t word(char const* rows, int row_bytes, int row, int step, int part) const {
    return __ldg(reinterpret_cast<uint32_t const*>(rows + row * row_bytes + (((2 * step + part) ^ (row % 8)) << 4) +
                                                   4 * tq_));
  }

  __device__ __forceinline__ void load() {
    char const* const packed =
        args_.queries + (static_cast<std::int64_t>(head_) * args_.chunk.rows + row_) * Cfg::kQueryBytes;
    char const* const q = packed + kQueryHeader;
    char const* const dout = q + 16 * Cfg::kKeyRowBytes;
    float const* const header = reinterpret_cast<float const*>(packed);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = g_ + 8 * i;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int step = 0; step < kK / 16; ++step) {
          q_[step][2 * part + i] = word(q, Cfg::kKeyRowBytes, row, step, part);
        }
#pragma unroll
        for (int step = 0; step < kV / 16; ++step) {
          dout_[step][2 * part + i] = word(dout, Cfg::kValueRowBytes, row, step, part);
        }
      }
      unit_[i] = header[row];
      lse2_[i] = header[kMaxGroupHeads + row];
      delta_[i] = header[2 * kMaxGroupHeads + row];
    }
  }

  // Brings the turns of a position; of two that follow one another each has its own place.
  __device__ __forceinline__ void bring(int position) const {
    if (lane_ < kK / 8) {
      rope::Turns const* const turns = args_.fragment_turns + position * (kK / 8) + lane_;
      ptx::copy_async_16B(turns_at(position) + lane_ * 16, turns, position);
    }
    ptx::copy_async_commit();
  }

  __device__ __forceinline__ uint32_t turns_at(int position) const {
    return turns_ + (position >> kLog2Siblings & 1) * Cfg::kTurnsBytes;
  }

  __device__ __forceinline__ void take(uint32_t slot, int parent, int layer) {
    if (layer != layer_) {
      layer_ = layer;
      below_ = Below(args_, layer, head_);
      position_ = candidates(args_.chunk.position(row_), layer, args_.tree.layers, args_.tree.top_k).n - 1;
      ptx::copy_async_wait<0>();
      __syncwarp();
      bring(position_);
    }
    uint32_t const closed = below_.expanded(args_, parent, row_) | beyond(position_);
    ptx::copy_async_wait<0>();
    __syncwarp();
    bring(position_ - kSiblings);  // what the next parent of this layer needs
    float raw[2][4], dp[2][4];
    uint32_t keys[kK / 16][4];
    products(slot, raw, dp, keys);
    float ds[2][4];
    float largest[2] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float2 const inverse = ptx::load_shared_8B(slot + Cfg::kNodeOffset + tile * 32 + tq_ * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const i = e / 2;
        float const of_key = e % 2 ? inverse.y : inverse.x;
        bool const open = !(closed >> (8 * tile + 2 * tq_ + e % 2) & 1u);
        ds[tile][e] = weights(open, raw[tile][e], of_key, unit_[i], lse2_[i], dp[tile][e], delta_[i], of_key).ds;
        largest[i] = fmaxf(largest[i], fabsf(ds[tile][e]));
      }
    }
    fit_scale(weight_scale_, largest, [&](float const (&factor)[2]) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dq_[tile][e] *= factor[e / 2];
      }
    });
    add_keys(keys, ds);
    position_ -= kSiblings;
  }

  // Scores and dP, in two chains of products each: the latency of one is what a warp would wait for. keys: as dq takes
  // them, turned back and transposed.
  __device__ __forceinline__ void products(uint32_t slot, float (&raw)[2][4], float (&dp)[2][4],
                                           uint32_t (&keys)[kK / 16][4]) const {
    Steps const rows(slot + matrix_lane<false>(lane_, Cfg::kKeyRowBytes));
    Steps const values(slot + matrix_lane<false>(lane_, Cfg::kValueRowBytes));
    uint32_t const turns_of_lane = turns_at(position_) + tq_ * 16;
    float raw_odd[2][4], dp_odd[2][4];
    clear(raw);
    clear(dp);
    clear(raw_odd);
    clear(dp_odd);
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) {
      uint4 const words = ptx::load_shared_16B(turns_of_lane + kk * 64);
      rope::Turns const& turns = reinterpret_cast<rope::Turns const&>(words);
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        ptx::load_matrix_x4(keys[step], rows[step] + Cfg::kRowsOffset);
      }
      turn_columns<true>(keys[kk], keys[kk + kHalf], turns);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto const& b = keys[kk + half * kHalf];
        auto& sums = half == 0 ? raw : raw_odd;
        ptx::mma_fp16(sums[0], q_[kk + half * kHalf], b[0], b[1]);
        ptx::mma_fp16(sums[1], q_[kk + half * kHalf], b[2], b[3]);
      }
#pragma unroll
      for (int step = kk * kV / 16 / kHalf; step < (kk + 1) * kV / 16 / kHalf; ++step) {
        uint32_t b[4];
        ptx::load_matrix_x4(b, values[step] + Cfg::kValueOffset);
        auto& sums = step % 2 == 0 ? dp : dp_odd;
        Pairs<Element>::mma(sums[0], dout_[step], b[0], b[1]);
        Pairs<Element>::mma(sums[1], dout_[step], b[2], b[3]);
      }
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
#pragma unroll
        for (int i = 0; i < 4; ++i) keys[step][i] = ptx::transpose_matrix(keys[step][i]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        raw[tile][e] += raw_odd[tile][e];
        dp[tile][e] += dp_odd[tile][e];
      }
    }
  }

  __device__ __forceinline__ void add_keys(uint32_t const (&keys)[kK / 16][4], float const (&ds)[2][4]) {
    uint32_t a[4];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[2 * tile + i] =
            Pairs<__half>::pack(ds[tile][2 * i] * weight_scale_[i], ds[tile][2 * i + 1] * weight_scale_[i]);
      }
    }
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::mma_fp16(dq_[2 * step + i], a, keys[step][i], keys[step][2 + i]);
    }
  }

  __device__ __forceinline__ void finish() {
    ptx::copy_async_wait<0>();
    std::int64_t const bh = args_.chunk.first_head + head_;
    std::int64_t const query = bh / args_.H_kv * args_.T_q + args_.chunk.first_query + row_;
    std::int64_t const first = (query * args_.H_kv + bh % args_.H_kv) * args_.G;
    std::int64_t const row = static_cast<std::int64_t>(head_) * args_.chunk.rows + row_;
    float const* const top =
        reinterpret_cast<float const*>(args_.top_queries + row / kTileQueries * query_tile_bytes(kK, kV) +
                                       kQueryTileHeader) +
        row % kTileQueries * kMaxGroupHeads * kK + 2 * tq_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const g = g_ + 8 * i;
      if (g >= args_.G) continue;
      float const inverse = inverse_of(weight_scale_[i]);
      uint32_t* const out = reinterpret_cast<uint32_t*>(static_cast<Element*>(args_.dq) + (first + g) * kK) + tq_;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float2 const share = __ldg(reinterpret_cast<float2 const*>(top + g * kK + 8 * tile));
        out[4 * tile] = Pairs<Element>::pack(fmaf(dq_[tile][2 * i], inverse, share.x) * args_.scale,
                                             fmaf(dq_[tile][2 * i + 1], inverse, share.y) * args_.scale);
      }
    }
  }

  Args const& args_;
  int const lane_;
  int const g_;
  int const tq_;
  uint32_t const turns_;
  int head_;
  int row_;
  bool exists_;
  int layer_ = kMaxLayers;
  Below below_;
  int position_ = 0;  // of the query as the parent at hand sees it: n - 1 - 16 rank
  uint32_t q_[kK / 16][4];
  uint32_t dout_[kV / 16][4];
  float unit_[2];
  float lse2_[2];
  float delta_[2];
  float weight_scale_[2] = {kFirstScale, kFirstScale};
  float dq_[kTiles][4];
};

}  // namespace htree_cuda::gradient

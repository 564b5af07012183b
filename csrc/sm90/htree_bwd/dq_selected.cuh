// dq: a warp holds a query and walks its parents below its first layer, layer by layer; then it adds that one's share,
// which is there already (first_queries.cuh).
//
// A parent of rank j adds sum_c dS_c R^-1(k_c, n - 1 - 16 j) to dq, k_c being rotated by its place c. So it is the keys
// that rotation, in packed fp16, once: for the scores, where q stays as it is, and transposed between registers for dq.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "operands.cuh"

namespace htree_cuda::sm90::htree_bwd {

// Lanes look at a group of parents each, and at the visits of all queries of the CTA in it.
template <class Cfg>
__device__ void produce_parents(Args const& args, Ring<Cfg> const& ring) {
  int const lane = threadIdx.x % 32;
  int const blocks = args.chunk.rows / kGroupQueries;
  int const head = blockIdx.x / blocks;
  int const first = blockIdx.x % blocks * kGroupQueries;
  int const queries = min(args.chunk.queries - first, kGroupQueries);
  Sender<Cfg> sender(ring);
  int const highest = lane < queries ? entry_layer(args.chunk.position(first + lane), args.tree.top_k) : 0;
  for (int layer = args.highest - 1; layer >= 0; --layer) {
    unsigned const working = __ballot_sync(kFullWarp, layer < highest);
    // Parents are nodes of the layer above: none beyond the last query's rightmost.
    std::int64_t const reach = args.chunk.position(first + queries - 1) >> (kLog2Siblings * (layer + 1));
    int const groups = working == 0 ? 0 : static_cast<int>(reach / kGroupParents) + 1;
    char const* const nodes =
        args.nodes[layer] + static_cast<std::int64_t>(head) * args.tree.parents[layer] * Cfg::kNodeBytes;
    auto const source = [&](Entry const& entry) {
      return nodes + static_cast<std::int64_t>(entry.which) * Cfg::kNodeBytes;
    };
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
        return Entry{takers[p / 4] >> (p % 4 * 8) & 0xffu, (base + lane) * kGroupParents + p};
      });
      sender.send(layer, source);
    }
    sender.send_rest(layer, source);
  }
  sender.finish();
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
      : args_(args),
        g_(threadIdx.x % 32 / 4),
        tq_(threadIdx.x % 4),
        key_lane_(ptx::opaque(matrix_lane<false>(threadIdx.x % 32, Cfg::kKeyRowBytes))),
        value_lane_(kK == kV ? key_lane_ : ptx::opaque(matrix_lane<false>(threadIdx.x % 32, Cfg::kValueRowBytes))),
        inverse_lane_(ptx::opaque(static_cast<uint32_t>(Cfg::kNodeOffset + tq_ * 8))),
        rotations_(ptx::opaque(ring.rotations_of(warp) + tq_ * 16)),
        new_rotations_(ptx::opaque(ring.rotations_of(warp) + threadIdx.x % (kK / 4) * 8)),
        table_(ptx::opaque(reinterpret_cast<uint2 const*>(args.fragment_rotations) + threadIdx.x % (kK / 4))) {
    int const blocks = args.chunk.rows / kGroupQueries;
    head_ = blockIdx.x / blocks;
    row_ = blockIdx.x % blocks * kGroupQueries + warp;
    exists_ = row_ < args.chunk.queries;
    if (exists_) load();
    clear(dq_);
  }

  __device__ void run(Ring<Cfg> const& ring, int warp) {
    receive(
        ring, warp, [&](int layer) { begin(layer); },
        [&](uint32_t stage, Note const& note, int layer, uint32_t own) {
          layer == 0 ? take<true>(stage, note, own) : take<false>(stage, note, own);
        });
    if (!exists_) return;
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) add_keys(step);
    finish();
  }

private:
  // Fragments of 16 rows as they lie in memory: columns 16 step + 8 part + 2 tq + {0, 1} of rows g and g + 8. The swizzle
  // exchanges 16 bytes within 128, so that eight addresses serve all.
  template <int kSteps>
  __device__ __forceinline__ void load(uint32_t (&fragments)[kSteps][4], char const* rows) const {
    constexpr int kRowBytes = 32 * kSteps;
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
      char const* const at = rows + g_ * kRowBytes + ((chunk ^ g_) << 4) + 4 * tq_;
#pragma unroll
      for (int step = chunk / 2; step < kSteps; step += 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          fragments[step][2 * (chunk % 2) + i] =
              __ldg(reinterpret_cast<uint32_t const*>(at + step / 4 * 128 + 8 * i * kRowBytes));
        }
      }
    }
  }

  __device__ __forceinline__ void load() {
    char const* const packed =
        args_.queries + (static_cast<std::int64_t>(head_) * args_.chunk.rows + row_) * Cfg::kQueryBytes;
    load(q_, packed + kQueryHeader);
    load(dout_, packed + kQueryHeader + 16 * Cfg::kKeyRowBytes);
    float const* const header = reinterpret_cast<float const*>(packed);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = g_ + 8 * i;
      unit_[i] = header[row];
      lse2_[i] = header[kMaxGroupHeads + row];
      offset_[i] = lse2_[i] - exponent_of(kFirstScaleOfProbability);
      delta_[i] = header[2 * kMaxGroupHeads + row];
    }
  }

  // This lane's part of the rotations of a position, on their way to shared memory.
  __device__ __forceinline__ uint2 rotations(int position) const {
    return __ldg(table_ + static_cast<std::int64_t>(position) * (kK / 4));
  }

  __device__ __forceinline__ void store_rotations(uint2 words) const {
    __syncwarp();
    ptx::store_shared_8B(new_rotations_, words);
    __syncwarp();
  }

  __device__ __forceinline__ void begin(int layer) {
    below_ = Below(args_, layer, head_);
    position_ = candidates_in_selected(args_.chunk.position(row_), layer, args_.tree.top_k) - 1;
    store_rotations(rotations(position_));
  }

  // The first slot that is left.
  static __device__ __forceinline__ uint32_t slot_of(uint32_t stage, uint32_t own) {
    return stage + (__ffs(own) - 1) * (Cfg::kSlotBytes / 8);
  }

  template <bool kBottom>
  __device__ __forceinline__ void take(uint32_t stage, Note const& note, uint32_t own) {
    uint32_t slot = slot_of(stage, own);
#pragma unroll 1
    do {
      uint32_t expanded = 0;
      if constexpr (!kBottom) {
        uint32_t const which = ptx::load_shared_4B(note.which((__ffs(own) - 1) / 8));
        expanded = below_.expanded(args_, static_cast<int>(which), row_);
      }
      own &= own - 1;
      uint32_t const next = ptx::opaque(slot_of(stage, own));  // early: it is what the next one waits for
      add<kBottom>(slot, expanded);
      slot = next;
    } while (own != 0);
  }

  // One parent: weights from its products, and the keys as dq takes them, which wait for the next one. Its own products
  // with the weights are those that pass while the next one's keys arrive and rotate.
  template <bool kBottom>
  __device__ __forceinline__ void add(uint32_t slot, uint32_t expanded) {
    uint2 const next_rotations = rotations(max(position_ - kSiblings, 0));
    float raw[2][4], dp[2][4];
    products(slot, raw, dp);
    float p[2][4];
    float2 inverse[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      inverse[tile] = ptx::load_shared_8B(slot + inverse_lane_ + tile * 32);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[tile][e] = probability(raw[tile][e], e % 2 ? inverse[tile].y : inverse[tile].x, unit_[e / 2], offset_[e / 2]);
        dp[tile][e] -= delta_[e / 2];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ds_[2 * tile + i] = Pairs<__half>::pack(p[tile][2 * i] * dp[tile][2 * i] * inverse[tile].x,
                                                p[tile][2 * i + 1] * dp[tile][2 * i + 1] * inverse[tile].y);
      }
    }
    uint32_t const masked = expanded | causal_mask(position_);
    if constexpr (!kBottom) close(masked);
    // At the bottom only a query's last parent has children behind it.
    bool const some = kBottom && position_ < kSiblings - 1;
    if (__any_sync(kFullWarp, leave(ds_[0], ds_[1], ds_[2], ds_[3]) || some)) fit(p, dp, inverse, masked);
    store_rotations(next_rotations);
    position_ -= kSiblings;
  }

  // Weights of closed children become zero.
  __device__ __forceinline__ void close(uint32_t masked) {
    uint32_t const first = (masked << 8) >> (2 * tq_ + 1);  // of this lane's columns of tile i, in the sign of byte i
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t const mask = ptx::spread_signs(first, first >> 1, tile);
#pragma unroll
      for (int i = 0; i < 2; ++i) ds_[2 * tile + i] &= ~mask;
    }
  }

  // The weights again, from probabilities times the rows' scales: closed ones are zero, and those that leave the range make
  // the scale fall.
  __device__ __forceinline__ void fit(float const (&p)[2][4], float const (&dp)[2][4], float2 const (&inverse)[2],
                                      uint32_t masked) {
    float ds[2][4];
    float largest[2] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const i = e / 2;
        bool const open = !(masked >> (8 * tile + 2 * tq_ + e % 2) & 1u);
        ds[tile][e] = weight(open, p[tile][e] * inverse_of(weight_scale_[i]), dp[tile][e], 0.0f,
                             e % 2 ? inverse[tile].y : inverse[tile].x);
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
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      offset_[i] = lse2_[i] - exponent_of(weight_scale_[i]);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        ds_[2 * tile + i] =
            Pairs<__half>::pack(ds[tile][2 * i] * weight_scale_[i], ds[tile][2 * i + 1] * weight_scale_[i]);
      }
    }
  }

  // Scores and dP of a parent, and the products of dq of the one before, whose keys give way to this one's, rotated.
  __device__ __forceinline__ void products(uint32_t slot, float (&raw)[2][4], float (&dp)[2][4]) {
    Steps const rows(slot + key_lane_);
    Steps const values(slot + value_lane_);
    clear(raw);
    clear(dp);
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) {
      uint4 const words = ptx::load_shared_16B(rotations_ + kk * 64);
      rope::FragmentRotations const& rotations = reinterpret_cast<rope::FragmentRotations const&>(words);
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        add_keys(step);
        ptx::load_matrix_x4(keys_[step], rows[step] + Cfg::kRowsOffset);
      }
      rotation_columns<true>(keys_[kk], keys_[kk + kHalf], rotations);
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        auto const& b = keys_[step];
        ptx::mma_fp16(raw[0], q_[step], b[0], b[1]);
        ptx::mma_fp16(raw[1], q_[step], b[2], b[3]);
      }
#pragma unroll
      for (int step = kk * kV / 16 / kHalf; step < (kk + 1) * kV / 16 / kHalf; ++step) {
        uint32_t b[4];
        ptx::load_matrix_x4(b, values[step] + Cfg::kValueOffset);
        Pairs<Element>::mma(dp[0], dout_[step], b[0], b[1]);
        Pairs<Element>::mma(dp[1], dout_[step], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void add_keys(int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::mma_fp16(dq_[2 * step + i], ds_, ptx::transpose_matrix(keys_[step][i]),
                    ptx::transpose_matrix(keys_[step][2 + i]));
    }
  }

  __device__ __forceinline__ void finish() {
    std::int64_t const bh = args_.chunk.first_head + head_;
    std::int64_t const query = bh / args_.H_kv * args_.T_q + args_.chunk.first_query + row_;
    std::int64_t const first = (query * args_.H_kv + bh % args_.H_kv) * args_.G;
    std::int64_t const row = static_cast<std::int64_t>(head_) * args_.chunk.rows + row_;
    float const* const first_share =
        reinterpret_cast<float const*>(args_.query_tiles + row / kTileQueries * query_tile_bytes(kK, kV) +
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
        float2 const share = __ldg(reinterpret_cast<float2 const*>(first_share + g * kK + 8 * tile));
        out[4 * tile] = Pairs<Element>::pack(fmaf(dq_[tile][2 * i], inverse, share.x) * args_.scale,
                                             fmaf(dq_[tile][2 * i + 1], inverse, share.y) * args_.scale);
      }
    }
  }

  Args const& args_;
  int const g_;
  int const tq_;
  uint32_t const key_lane_;
  uint32_t const value_lane_;
  uint32_t const inverse_lane_;
  uint32_t const rotations_;
  uint32_t const new_rotations_;
  uint2 const* const table_;
  int head_;
  int row_;
  bool exists_;
  Below below_;
  int position_ = 0;  // of the query as the parent at hand sees it: n - 1 - 16 rank
  uint32_t q_[kK / 16][4];
  uint32_t dout_[kV / 16][4];
  float unit_[2];
  float lse2_[2];
  float offset_[2];  // such that probabilities come out times the row's scale
  float delta_[2];
  float weight_scale_[2] = {kFirstScaleOfProbability, kFirstScaleOfProbability};
  uint32_t keys_[kK / 16][4] = {};  // of the parent before, rotated; add_keys transposes them; and its weights
  uint32_t ds_[4] = {};
  float dq_[kTiles][4];
};

}  // namespace htree_cuda::sm90::htree_bwd

// dq of selected layers: dq_selected. A warp holds a query and steps through the KV blocks that the query visits, layer
// by layer. In the end it adds dq of the entry layer, which dq_entry has left in the query tile.
//
// A KV block of rank j adds sum_c dS_c R^-1(k_c, n - 1 - 16 j) to dq, where k_c is rotated by its place c. So the keys
// are rotated, in packed fp16, once for two uses: as they are for the scores, where q is not rotated, and transposed
// between registers for dq.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "args.h"
#include "host/launch_overlapped.cuh"
#include "kv_stream.cuh"
#include "operands.cuh"
#include "reverse_index/lookup.cuh"
#include "traits.cuh"
#include "weights.cuh"

namespace htree_cuda::sm90::htree_bwd {

// The producer. A lane looks at eight KV blocks at a time, half a word, for all queries of the CTA.
template <class Cfg>
__device__ void produce_kv_blocks(Args const& args, KvRing<Cfg> const& ring) {
  constexpr int kLaneBlocks = kWordBlocks / 2;
  int const lane = threadIdx.x % 32;
  int const first_bit = lane % 2 * kLaneBlocks;
  int const ctas = args.chunk.rows / kCtaQueries;  // of a head
  int const head = blockIdx.x / ctas;
  int const first = blockIdx.x % ctas * kCtaQueries;
  sequences::Rows rows{};
  int queries = min(args.chunk.queries - first, kCtaQueries);
  std::int64_t origin = args.chunk.position(first);
  if (args.sequences.any()) {
    rows = args.sequences.rows_from(first, kCtaQueries);
    queries = rows.count;
    origin = rows.t;
  }
  auto const position = [&](int query) { return origin + query; };
  KvSender<Cfg> sender(ring);
  int const own_entry = lane < queries ? entry_layer(position(lane), args.tree.top_k) : 0;
  for (int layer = args.max_entry - 1; layer >= 0; --layer) {
    // The queries for which this layer is a selected layer, a bit each.
    unsigned const selecting = __ballot_sync(kFullWarp, layer < own_entry);
    // The parents of KV blocks are nodes of the layer above, up to the last query's rightmost.
    std::int64_t const reach = position(queries - 1) >> (kLog2Siblings * (layer + 1));
    int const lanes = selecting == 0 ? 0 : static_cast<int>(reach / kLaneBlocks) + 1;
    std::int64_t block_begin = static_cast<std::int64_t>(head) * args.tree.kv_blocks[layer];
    if (args.sequences.any()) block_begin += sequences::first_block(rows.before, rows.sequence, layer, args.tree.top_k);
    char const* const operands = args.kv_blocks[layer] + block_begin * Cfg::Slot::kBlockBytes;
    auto const source = [&](Entry const& entry) {
      return operands + static_cast<std::int64_t>(entry.block) * Cfg::Slot::kBlockBytes;
    };
    for (int base = 0; base < lanes; base += 32) {
      uint4 visited[kCtaQueries / 4] = {};  // one word of each query
      if (base + lane < lanes) {
        uint4 const* const index =
            reinterpret_cast<uint4 const*>(reverse_index::word_at(args, layer, head, (base + lane) / 2, first));
#pragma unroll
        for (int i = 0; i < kCtaQueries / 4; ++i) visited[i] = __ldg(index + i);
      }
      // Byte p is the query mask of this lane's block p.
      uint32_t query_masks[2] = {};
#pragma unroll
      for (int i = 0; i < kCtaQueries; ++i) {
        uint4 const& four = visited[i / 4];
        uint32_t mask = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
        mask = selecting >> i & 1u ? mask >> first_bit : 0;
        query_masks[0] |= reverse_index::spread_four(mask) << i;
        query_masks[1] |= reverse_index::spread_four(mask >> 4) << i;
      }
      int count = 0;
#pragma unroll
      for (int p = 0; p < kLaneBlocks; ++p) count += (query_masks[p / 4] >> (p % 4 * 8) & 0xffu) != 0;
      int p = -1;
      sender.append(count, [&](int) {
        do {
          ++p;
        } while ((query_masks[p / 4] >> (p % 4 * 8) & 0xffu) == 0);
        return Entry{query_masks[p / 4] >> (p % 4 * 8) & 0xffu, (base + lane) * kLaneBlocks + p};
      });
      sender.send(layer, source);
    }
    sender.send_rest(layer, source);
  }
  sender.finish();
}

// A consumer warp and its query.
template <class Cfg>
class DqSelectedConsumer {
  using Element = typename Cfg::Element;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kHalf = kK / 32;  // steps of 16 columns that hold the first elements of pairs
  static constexpr int kTiles = kK / 8;

public:
  __device__ DqSelectedConsumer(Args const& args, KvRing<Cfg> const& ring, int warp)
      : args_(args),
        g_(threadIdx.x % 32 / 4),
        tq_(threadIdx.x % 4),
        key_lane_(ptx::opaque(ldmatrix_offset<false>(threadIdx.x % 32, Cfg::Slot::kKeyRowBytes))),
        value_lane_(kK == kV ? key_lane_
                             : ptx::opaque(ldmatrix_offset<false>(threadIdx.x % 32, Cfg::Slot::kValueRowBytes))),
        inverse_lane_(ptx::opaque(static_cast<uint32_t>(Cfg::Slot::kBlockOffset + tq_ * 8))),
        rotations_(ptx::opaque(ring.rotations_of(warp) + tq_ * 16)),
        new_rotations_(ptx::opaque(ring.rotations_of(warp) + threadIdx.x % (kK / 4) * 8)),
        table_(ptx::opaque(reinterpret_cast<uint2 const*>(args.fragment_rotations) + threadIdx.x % (kK / 4))) {
    int const ctas = args.chunk.rows / kCtaQueries;  // of a head
    head_ = blockIdx.x / ctas;
    row_ = blockIdx.x % ctas * kCtaQueries + warp;
    exists_ = args.sequences.any() ? args.sequences.rows_from(row_, 1).count > 0 : row_ < args.chunk.queries;
    if (exists_) load();
    clear(dq_);
  }

  __device__ void run(KvRing<Cfg> const& ring, int warp) {
    receive(
        ring, warp, [&](int layer) { begin(layer); },
        [&](uint32_t stage, Note const& note, int layer, uint32_t own) {
          layer == 0 ? use_stage<true>(stage, note, own) : use_stage<false>(stage, note, own);
        });
    if (!exists_) return;
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) add_keys(step);
    finish();
  }

private:
  // Loads A fragments of 16 rows as they lie in global memory: columns 16 step + 8 part + 2 tq + {0, 1} of rows g and g
  // + 8. The swizzle exchanges chunks of 16 bytes within 128 bytes, so that eight addresses serve all steps.
  template <int kSteps>
  __device__ __forceinline__ void load(uint32_t (&fragments)[kSteps][4], char const* rows, int heads) const {
    constexpr int kRowBytes = 32 * kSteps;
    bool const exists[2] = {g_ < heads, g_ + 8 < heads};
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
      char const* const at = rows + g_ * kRowBytes + ((chunk ^ g_) << 4) + 4 * tq_;
#pragma unroll
      for (int step = chunk / 2; step < kSteps; step += 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t& words = fragments[step][2 * (chunk % 2) + i];
          words = 0;
          if (exists[i]) words = __ldg(reinterpret_cast<uint32_t const*>(at + step / 4 * 128 + 8 * i * kRowBytes));
        }
      }
    }
  }

  __device__ __forceinline__ void load() {
    int const heads = unit_heads(args_.G);
    char const* const packed = args_.queries + (static_cast<std::int64_t>(head_) * args_.chunk.rows + row_) *
                                                   query_bytes(kK, kV, heads) + query_begin(heads);
    load(q_, packed + query_header(heads), heads);
    load(dout_, packed + query_header(heads) + heads * Cfg::Slot::kKeyRowBytes, heads);
    float const* const header = reinterpret_cast<float const*>(packed);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = g_ + 8 * i;
      bool const exists = row < heads;
      unit_[i] = exists ? header[row] : 0.0f;
      lse2_[i] = exists ? header[heads + row] : __int_as_float(0x7f800000);
      offset_[i] = lse2_[i] - exponent_of(kInitialProbabilityScale);
      delta_[i] = exists ? header[2 * heads + row] : 0.0f;
    }
  }

  // Returns this lane's part of the rotation by a position, on its way to shared memory.
  __device__ __forceinline__ uint2 rotations(int position) const {
    return __ldg(table_ + static_cast<std::int64_t>(position) * (kK / 4));
  }

  __device__ __forceinline__ void store_rotations(uint2 words) const {
    __syncwarp();
    ptx::store_shared_8B(new_rotations_, words);
    __syncwarp();
  }

  __device__ __forceinline__ void begin(int layer) {
    expanded_ = reverse_index::Expanded(args_, layer, head_);
    std::int64_t const t = args_.sequences.any() ? args_.sequences.rows_from(row_, 1).t : args_.chunk.position(row_);
    position_ = candidates_in_selected(t, layer, args_.tree.top_k) - 1;
    store_rotations(rotations(position_));
  }

  // The first slot that `own` still names.
  static __device__ __forceinline__ uint32_t slot_of(uint32_t stage, uint32_t own) {
    return stage + (__ffs(own) - 1) * (Cfg::Slot::kBytes / 8);
  }

  // The KV blocks of a stage that this query visits, slot by slot.
  template <bool kBottom>
  __device__ __forceinline__ void use_stage(uint32_t stage, Note const& note, uint32_t own) {
    uint32_t slot = slot_of(stage, own);
#pragma unroll 1
    do {
      uint32_t expanded = 0;
      if constexpr (!kBottom) {
        uint32_t const block = ptx::load_shared_4B(note.block_of((__ffs(own) - 1) / 8));
        expanded = expanded_.of_block(args_, static_cast<int>(block), row_);
      }
      own &= own - 1;
      // Computed before the products, because the next block begins by waiting for this address.
      uint32_t const next = ptx::opaque(slot_of(stage, own));
      add_block<kBottom>(slot, expanded);
      slot = next;
    } while (own != 0);
  }

  // One KV block: its products become weights, which wait with its rotated keys for the next block. The products of dq,
  // weights times keys, are issued while the keys of the next block arrive and are rotated.
  template <bool kBottom>
  __device__ __forceinline__ void add_block(uint32_t slot, uint32_t expanded) {
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
    uint32_t const masked = expanded | reverse_index::causal_mask(position_);
    if constexpr (!kBottom) mask_weights(masked);
    // At the bottom only the last block of a query has masked children.
    bool const some = kBottom && position_ < kSiblings - 1;
    if (__any_sync(kFullWarp, overflows(ds_[0], ds_[1], ds_[2], ds_[3]) || some)) recompute(p, dp, inverse, masked);
    store_rotations(next_rotations);
    position_ -= kSiblings;
  }

  // The weights of masked children become zero.
  __device__ __forceinline__ void mask_weights(uint32_t masked) {
    // The bit of this lane's first column of tile i becomes the sign of byte i.
    uint32_t const first = (masked << 8) >> (2 * tq_ + 1);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t const mask = ptx::spread_signs(first, first >> 1, tile);
#pragma unroll
      for (int i = 0; i < 2; ++i) ds_[2 * tile + i] &= ~mask;
    }
  }

  // Computes the weights once more, from probabilities that include the scales of their rows: weights of masked
  // children are zero, and weights that overflow make the scale fall.
  __device__ __forceinline__ void recompute(float const (&p)[2][4], float const (&dp)[2][4], float2 const (&inverse)[2],
                                            uint32_t masked) {
    float ds[2][4];
    float largest[2] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const i = e / 2;
        bool const attends = !(masked >> (8 * tile + 2 * tq_ + e % 2) & 1u);
        ds[tile][e] = weight(attends, p[tile][e] * inverse_of(weight_scale_[i]), dp[tile][e], 0.0f,
                             e % 2 ? inverse[tile].y : inverse[tile].x);
        largest[i] = fmaxf(largest[i], fabsf(ds[tile][e]));
      }
    }
    lower_scale(weight_scale_, largest, [&](float const (&factor)[2]) {
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

  // Scores and dP of a KV block, and between them the products of dq of the block before, whose keys in registers give
  // way to the rotated keys of this one.
  __device__ __forceinline__ void products(uint32_t slot, float (&raw)[2][4], float (&dp)[2][4]) {
    StepAddresses const rows(slot + key_lane_);
    StepAddresses const values(slot + value_lane_);
    clear(raw);
    clear(dp);
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) {
      uint4 const words = ptx::load_shared_16B(rotations_ + kk * 64);
      rope::FragmentRotations const& rotations = reinterpret_cast<rope::FragmentRotations const&>(words);
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        add_keys(step);
        ptx::load_matrix_x4(keys_[step], rows[step] + Cfg::Slot::kRowsOffset);
      }
      rotate_columns<true>(keys_[kk], keys_[kk + kHalf], rotations);
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        auto const& b = keys_[step];
        ptx::mma_fp16(raw[0], q_[step], b[0], b[1]);
        ptx::mma_fp16(raw[1], q_[step], b[2], b[3]);
      }
#pragma unroll
      for (int step = kk * kV / 16 / kHalf; step < (kk + 1) * kV / 16 / kHalf; ++step) {
        uint32_t b[4];
        ptx::load_matrix_x4(b, values[step] + Cfg::Slot::kValueOffset);
        Pairs<Element>::mma(dp[0], dout_[step], b[0], b[1]);
        Pairs<Element>::mma(dp[1], dout_[step], b[2], b[3]);
      }
    }
  }

  // Adds dS K of the block before to 16 columns of dq.
  __device__ __forceinline__ void add_keys(int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::mma_fp16(dq_[2 * step + i], ds_, ptx::transpose_matrix(keys_[step][i]),
                    ptx::transpose_matrix(keys_[step][2 + i]));
    }
  }

  // Writes dq: the sum of this kernel plus dq of the entry layer, times the softmax scale.
  __device__ __forceinline__ void finish() {
    std::int64_t const bh = args_.chunk.first_head + head_;
    std::int64_t query = bh / args_.H_kv * args_.T_q + args_.chunk.first_query + row_;
    if (args_.sequences.any()) {
      sequences::Rows const rows = args_.sequences.rows_from(row_, 1);
      query = rows.sequence * args_.T_q + rows.query;
    }
    std::int64_t const first = (query * args_.H_kv + bh % args_.H_kv) * args_.G;
    std::int64_t const row = static_cast<std::int64_t>(head_) * args_.chunk.rows + row_;
    float const* const share_of_row = entry_share<kK, kV>(args_, row) + 2 * tq_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const g = g_ + 8 * i;
      if (g >= args_.G) continue;
      float const inverse = inverse_of(weight_scale_[i]);
      uint32_t* const out = reinterpret_cast<uint32_t*>(static_cast<Element*>(args_.dq_of(row_)) + (first + g) * kK) + tq_;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float2 const share = __ldg(reinterpret_cast<float2 const*>(share_of_row + g * kK + 8 * tile));
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
  reverse_index::Expanded expanded_;
  int position_ = 0;  // of the query as the KV block at hand sees it: n - 1 - 16 rank
  uint32_t q_[kK / 16][4];
  uint32_t dout_[kV / 16][4];
  float unit_[2];
  float lse2_[2];
  float offset_[2];  // lse2 less the exponent of the row's scale, so that probabilities are multiplied by that scale
  float delta_[2];
  float weight_scale_[2] = {kInitialProbabilityScale, kInitialProbabilityScale};
  uint32_t keys_[kK / 16][4] = {};  // rotated keys of the block before, which add_keys transposes
  uint32_t ds_[4] = {};             // its weights
  float dq_[kTiles][4];
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) dq_selected_kernel(const __grid_constant__ Args args) {
  extern __shared__ char shared_memory[];
  uint32_t const shared = align_shared<Cfg>(shared_memory);
  int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  wait_for_previous_grid();

  KvRing<Cfg> const ring(shared);
  if (threadIdx.x == 0) {
    ring.barriers.init(1, Cfg::kConsumers);
    barriers::mbarrier_init_fence();
  }
  __syncthreads();

  if (warp >= Cfg::kConsumers) {
    ptx::lower_registers<Cfg::kProducerRegisters>();
    if (warp != Cfg::kConsumers) return;
    produce_kv_blocks<Cfg>(args, ring);
  } else {
    ptx::raise_registers<Cfg::kConsumerRegisters>();
    DqSelectedConsumer<Cfg>(args, ring, warp).run(ring, warp);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

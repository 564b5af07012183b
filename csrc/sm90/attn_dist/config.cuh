// Data sheet of the attn_dist kernel: tiles, shared memory, barriers, register split.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "namespaces.h"
#include "device/elements.cuh"
#include "device/gather.cuh"
#include "device/slots.cuh"
#include "device/sm90.cuh"
#include "device/wgmma_layout.cuh"

namespace htree_cuda::sm90::attn_dist {

using namespace host;
using namespace device;

// What the kernel is told. Strides in bytes, but for the list's.
struct KernelParams {
  char const* k;             // [B, s_kv, d_qk]
  int64_t k_stride_b;
  int64_t k_stride_s;
  int const* indices;        // [B, s_q, topk], strides in elements, as of lse and lengths
  int64_t indices_stride_b;
  int64_t indices_stride_s;
  int64_t indices_stride_t;
  float const* lse;          // [B, s_q, h_q]
  int64_t lse_stride_b;
  int64_t lse_stride_s;
  int64_t lse_stride_h;
  int const* topk_length;    // [B, s_q] or null
  uint32_t topk_length_stride_b;
  uint32_t topk_length_stride_s;
  float* out;                // [B, groups, s_q, topk]
  int64_t units;             // B * s_q * passes * tiles: (query, pass, tile) in this order of nesting
  int64_t key_stride;        // tokens a key row stands for
  int64_t q_start[slots::kMaxStarts];
  int q_start_step;          // 1: one entry a batch; 0: q_start[0] for all
  int s_q;
  int s_kv;
  int h_q;
  int groups;                // of 64 heads
  int first_group;           // that this launch serves
  int passes;                // of 128 heads (64 where keys are split) that this launch serves
  int topk;
  int tiles;                 // of 64 slots, the last may be partial
  int q_coord_h;             // 0 where q's stride is 0 (the tensor map has one element there), else 1
  int q_coord_s;
  int q_coord_b;
  float scale_log2;          // sm_scale * log2(e)
  float lse_scale;           // to base 2
  bool causal;
  bool bulk_store;           // rows of `out` are multiples of 16 bytes
};

// How the two consumer warpgroups share the work.
enum class Split {
  kHeads,  // 64 heads each of every key tile: one gather serves 128 heads, the tensor cores are the limit
  kKeys,   // the same (at most 64) heads of alternate key tiles: the gather is the limit
};

template <class Element_, int kHeadDim_, Split kSplit_>
struct Config {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Split kSplit = kSplit_;

  // ---- tiles ----
  static constexpr int kTileKeys = 64;         // keys of one score tile: N of the WGMMA
  static constexpr int kGroupHeads = 64;       // heads of one consumer warpgroup: M of the WGMMA
  static constexpr int kPanelCols = 64;        // 128 bytes: one swizzle row, one L2 line
  static constexpr int kPanelBytes = 64 * 128;
  static constexpr int kPanels = kHeadDim / kPanelCols;
  static_assert(kHeadDim % kPanelCols == 0 && kElementBytes<Element> == 2);

  // A stage is part of a tile, so that a slot is free again after a third (576) or a fourth (512) of the tile's
  // multiplications: with whole tiles as stages the same memory holds two, and the gather stalls.
  static constexpr int kStagePanels = kPanels % 3 == 0 ? 3 : 2;
  static constexpr int kStageCols = kStagePanels * kPanelCols;
  static constexpr int kStageBytes = kStagePanels * kPanelBytes;
  static constexpr int kTileStages = kPanels / kStagePanels;
  static constexpr int kStages = kStagePanels == 3 ? 8 : 12;
  static_assert(kPanels % kStagePanels == 0);
  static_assert(2 * kTileStages <= kStages, "both groups' Q, or two tiles, pass through the ring at once");

  // Stages whose copies the producer leaves in flight before it waits for the oldest, fences and hands it over. More
  // hides more latency; fewer leaves more finished stages in front of the consumers.
  static constexpr int kCopyLag = 2;
  static_assert(kCopyLag + kTileStages < kStages, "a consumer frees a stage once it has the whole next tile");

  // ---- Q ----
  // 64 x 576 in registers would be 144 a thread and leave no room for a second set of accumulators: the ninth panel is
  // a shared-memory operand.
  static constexpr int kRegPanels = kPanels < 8 ? kPanels : 8;
  static constexpr int kSharedPanels = kPanels - kRegPanels;
  static_assert(kSharedPanels <= 1);
  static constexpr int kPanelSteps = kPanelCols / wgmma::kDepth;

  // ---- threads and registers ----
  static constexpr int kConsumers = 2;  // warpgroups; then one that gathers and one that adds what they leave
  static constexpr int kGroups = kSplit == Split::kHeads ? kConsumers : 1;  // of heads, at a time
  static constexpr int kWarps = 4;      // of a warpgroup
  static constexpr int kThreads = 128 * (kConsumers + 2);
  static constexpr int kConsumerRegisters = kSplit == Split::kHeads ? 224 : 208;
  static constexpr int kProducerRegisters = kSplit == Split::kHeads ? 32 : 48;
  static constexpr int kReducerRegisters = kSplit == Split::kHeads ? 32 : 40;
  // What the launch grants: 65536 / 512.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters + kReducerRegisters <=
                    (kConsumers + 2) * kLaunchRegisters,
                "setmaxnreg would wait for ever");
  static_assert(16 * kRegPanels + 2 * wgmma::kAccumulators <= 224 - 32,
                "Q, two accumulator sets and the epilogue share the consumer's registers");

  // ---- shared memory ----
  static constexpr int kValidTiles = kSharedPanels ? 16 : 32;
  static_assert(kValidTiles >= kStages / kTileStages + 8, "see mainloop.cuh");
  // Row r holds the sum of heads r and r + 8 of a warp's 16. The stride puts the 32 bytes that half a warp writes at
  // once to each of four rows into different banks.
  static constexpr int kSumRows = 8;
  static constexpr int kSumStride = kTileKeys + 8;
  struct SharedStorage {
    alignas(1024) uint8_t ring[kStages][kStageBytes];                            // K tiles; Q on its way to registers
    alignas(1024) uint8_t q_panel[kConsumers][kSharedPanels ? kPanelBytes : 16];  // the ninth panel of Q
    alignas(16) float sums[kConsumers][kWarps][kSumRows][kSumStride];
    // Slots of a tile that count, a bit each: RowGather::lane_of(slot) of word warp_of(slot).
    uint32_t valid[kValidTiles][kWarps];
    alignas(16) float staging[kConsumers][kTileKeys];  // sums over 64 heads on their way to global memory
    uint64_t full[kStages];
    uint64_t empty[kStages];
    uint64_t sums_full[kConsumers];
    uint64_t sums_empty[kConsumers];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes, "shared memory of an SM90 CTA");

  // An empty barrier completes at one unit from each of the 4 warps of both consumers; where one consumer reads the
  // stage alone, its warps give two.
  static constexpr int kEmptyUnits = kConsumers * kWarps;
  static constexpr int kKeyUnits = kSplit == Split::kHeads ? 1 : 2;
  static constexpr int kQueryUnits = kSplit == Split::kHeads ? 2 : 1;
  static_assert(kTileStages + 1 < kStages, "a consumer has read a stage less than a round before the one it waits for");
};

// Named barriers; 0 is __syncthreads'. One a consumer warpgroup.
inline constexpr int kConsumerBarrier = 1;

}  // namespace htree_cuda::sm90::attn_dist

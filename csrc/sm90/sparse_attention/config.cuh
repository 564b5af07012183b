// Data sheet of the sparse_attention kernel: tiles, shared memory, barriers, register split.
#pragma once

#include <cuda.h>

#include <cfloat>
#include <cstdint>

#include "namespaces.h"
#include "device/barriers.cuh"
#include "device/elements.cuh"
#include "device/gather.cuh"
#include "device/slots.cuh"
#include "device/sm90.cuh"
#include "device/wgmma_layout.cuh"
#include "host/math.h"

namespace htree_cuda::sm90::sparse_attention {

using namespace host;
using namespace device;

// What a part of a list has of a head beside its row: the offset of the exponentials, and their sum by each consumer, which is
// 0 without a valid slot.
struct PartTerms {
  float offset;
  float sum[2];
};

// What the kernel is told. Strides in bytes, but for the list's.
struct KernelParams {
  char const* q;             // [B, s_q, h_q, d_qk]
  int64_t q_stride_b;
  int64_t q_stride_s;
  int64_t q_stride_h;
  char const* kv;            // [B, s_kv, d_qk]
  int64_t kv_stride_b;
  int64_t kv_stride_s;
  int const* indices;        // [B, s_q, topk], strides in elements, as of lengths and sinks
  int64_t indices_stride_b;
  int64_t indices_stride_s;
  int64_t indices_stride_t;
  int const* topk_length;    // [B, s_q] or null
  uint32_t topk_length_stride_b;
  uint32_t topk_length_stride_s;
  float const* sink;         // [h_q] natural, or null
  int64_t sink_stride;
  char* out;                 // [B, s_q, h_q, 512] contiguous
  float* lse;                // [B, s_q, h_q] contiguous
  float* part_out;           // of kernels with kParts: [B, s_q, groups, 64, 512] unnormalised
  PartTerms* part_terms;     // [B, s_q, groups, 64]
  int64_t key_stride;        // tokens a key row stands for
  int64_t q_start[slots::kMaxStarts];
  int q_start_step;          // 1: one entry a batch; 0: q_start[0] for all
  int s_q;
  int s_kv;
  int h_q;
  int rows;                  // B * s_q
  int groups;                // of 64 heads, times parts
  int parts;                 // of each list
  int topk;
  int q_coord_h;             // 0 where q's stride is 0 (the tensor map has one element there), else 1
  int q_coord_s;
  int q_coord_b;
  float scale_log2;          // sm_scale * log2(e)
  float lse_scale;           // from base 2
  bool causal;
};

inline constexpr int kValueDim = 512;
inline constexpr int kGroupHeads = 64;  // heads of a CTA: M of every WGMMA
inline constexpr int kMaxParts = 132;
inline constexpr float kLog2E = static_cast<float>(host::kLog2E);
// The offset of exponentials while no slot was valid: any score exceeds it.
inline constexpr float kNoOffset = -FLT_MAX;

// Waits are polled: the registers that suspension takes would spill.
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity, char const* name) {
  barriers::mbarrier_wait<barriers::Waiting::kPolling>(barrier, parity, name);
}

template <class Element_, int kHeadDim_, bool kParts_>
struct Config {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kParts = kParts_;  // a CTA has a part of a list

  // ---- tiles ----
  static constexpr int kTileKeys = 64;    // keys of one score tile: N of its WGMMAs, K of those of the values
  static constexpr int kGroupHeads = sparse_attention::kGroupHeads;
  static constexpr int kPanelCols = 64;   // 128 bytes: one swizzle row, one L2 line
  static constexpr int kPanelBytes = 64 * 128;
  static constexpr int kPanels = kHeadDim / kPanelCols;
  static constexpr int kValueDim = sparse_attention::kValueDim;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static_assert(kHeadDim % kPanelCols == 0 && kHeadDim >= kValueDim && kElementBytes<Element> == 2);

  // A tile lands in quarters of its value columns, so that its scores begin with the first, and is freed in halves: a
  // consumer holds the outputs of one half of the value columns and is the last to read that half. The columns past the
  // values (a panel of 576) come and go with the first quarter and the half of the tile's owner.
  static constexpr int kQuarterPanels = kValueDim / kPanelCols / 4;
  static constexpr int kQuarterBytes = kQuarterPanels * kPanelBytes;
  static constexpr int kHalfBytes = 2 * kQuarterBytes;
  static constexpr int kKeyPanels = kPanels - 4 * kQuarterPanels;

  // ---- Q ----
  // The ninth panel of 576 columns is a register operand: shared memory has no room for it beside two tiles of keys.
  static constexpr int kSharedPanels = 4 * kQuarterPanels;
  static constexpr int kRegPanels = kKeyPanels;
  static_assert(kRegPanels <= 1);
  static constexpr int kPanelSteps = kPanelCols / wgmma::kDepth;
  static constexpr int kTileSteps = kTileKeys / wgmma::kDepth;

  // ---- threads and registers ----
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kWarps = 4;      // of a warpgroup
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Consumer 0 keeps the scores of the next unit beside the output of this one.
  static constexpr int kConsumerRegisters[kConsumers] = {240, 216};
  static constexpr int kProducerRegisters = 48;
  // What the launch grants: 65536 / 384 rounded down to a multiple of 8.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kConsumerRegisters[0] + kConsumerRegisters[1] + kProducerRegisters <= (kConsumers + 1) * kLaunchRegisters,
                "setmaxnreg would wait for ever");
  static_assert(wgmma::kValueAccumulators + wgmma::kAccumulators + 16 * kRegPanels <= kConsumerRegisters[1] - 40,
                "output, scores, which become probabilities, and a panel of Q share the consumer's registers");

  // ---- shared memory ----
  struct SharedStorage {
    alignas(1024) uint8_t keys[2][kTileBytes];                     // tile t of a query in buffer t % 2
    alignas(1024) uint8_t q[kSharedPanels * kPanelBytes];
    alignas(1024) uint8_t probabilities[kConsumers][kPanelBytes];  // of tiles of consumer c; then its output, staged
    float row_max[kConsumers][kGroupHeads];     // the offset of the exponentials in `probabilities`
    alignas(16) uint32_t moved[kConsumers][kWarps];  // whether a warp of consumer c moved one of its offsets for them
    float row_sum[2][kConsumers][kGroupHeads];  // each consumer's part of the denominator, two units deep
    // Slots of a tile that count, a bit each: bit 4 j + i of word w is slot 8 j + 4 w + i (RowGather).
    uint32_t valid[2][2];
    uint64_t keys_full[2][4];                   // [buffer][quarter]
    uint64_t keys_empty[2][2];                  // [buffer][half]
    uint64_t q_full;
    uint64_t q_empty;
    uint64_t probabilities_full[kConsumers];
    uint64_t meeting;
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes, "shared memory of an SM90 CTA");

  static constexpr int kGatherThreads = 64;  // two warps share each column of a tile
  static constexpr int kFullArrivals = kGatherThreads / 32;
};

}  // namespace htree_cuda::sm90::sparse_attention

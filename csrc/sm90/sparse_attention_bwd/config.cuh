// Data sheets of the backward of sparse_attention: tiles, shared memory, barriers, register split.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "namespaces.h"
#include "device/barriers.cuh"
#include "device/elements.cuh"
#include "device/gather.cuh"
#include "device/slots.cuh"
#include "device/sm90.cuh"
#include "device/wgmma_layout.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

using namespace host;
using namespace device;

// What a query's head needs beside its scores. With S = exp2(score * scale_log2 - lse2):
//   P = weight * S             of the output, whose denominator the sink joins
//   dS = S * (slope * dP + offset)   the gradient of a dot product of q and k, the scale included
struct HeadTerms {
  float lse2, weight, slope, offset;
};

// How contributions to a row of dkv meet.
enum class Sums {
  kAtomic,         // float32, in the order of arrival
  kDeterministic,  // integers, multiples of a power of two that each row has for itself: any order gives the same bits
};

// What the kernels are told. Strides in bytes, but for the list's, lengths and sinks, dlse, in elements.
struct KernelParams {
  char const* q;             // [B, s_q, h_q, d_qk]
  int64_t q_stride_b;
  int64_t q_stride_s;
  int64_t q_stride_h;
  char const* kv;            // [B, s_kv, d_qk]
  int64_t kv_stride_b;
  int64_t kv_stride_s;
  char const* dout;          // [B, s_q, h_q, 512]
  int64_t dout_stride_b;
  int64_t dout_stride_s;
  int64_t dout_stride_h;
  char const* out;           // [B, s_q, h_q, 512] contiguous
  float const* lse;          // [B, s_q, h_q] contiguous
  float const* dlse;         // [B, s_q, h_q]
  int64_t dlse_stride_b;
  int64_t dlse_stride_s;
  int64_t dlse_stride_h;
  int const* indices;        // [B, s_q, topk]
  int64_t indices_stride_b;
  int64_t indices_stride_s;
  int64_t indices_stride_t;
  int const* topk_length;    // [B, s_q] or null
  uint32_t topk_length_stride_b;
  uint32_t topk_length_stride_s;
  float const* sink;         // [h_q] natural, or null
  int64_t sink_stride;
  char* dq;                  // [B, s_q, h_q, d_qk] contiguous
  char* dkv;                 // [B, s_kv, d_qk] contiguous
  HeadTerms* terms;          // [B, s_q, h_q]
  float* to_sink;            // [B, s_q, h_q], with a sink: minus the gradient that a query gives it
  void* sums;                // [B, s_kv, d_qk] float or int64_t, columns in the order of order.cuh
  int* begun;                // units that have begun, or null: CTAs do not wait for each other
  // Only kernels with kDeterministic use the members that follow.
  double2* query_bounds;     // [B, s_q]: a contribution is at most x |v| + y
  float* norms;              // [B, s_kv]: |v|, or NaN where the row is not finite
  int* exponents;            // [B, s_kv]: of the largest contribution
  int* counts;               // [B, s_kv]: of contributions
  float* factors;            // [B, s_kv]: what a contribution is multiplied by
  int* broken;               // [B, s_kv]: not 0 where a contribution may not be finite
  int64_t key_stride;        // tokens a key row stands for
  int64_t q_start[slots::kMaxStarts];
  int q_start_step;          // 1: one entry a batch; 0: q_start[0] for all
  int B;
  int s_q;
  int s_kv;
  int h_q;
  int rows;                  // B * s_q
  int groups;                // of kGroupHeads
  int topk;
  int q_coord_h;             // 0 where q's stride is 0 (the tensor map has one element there), else 1
  int q_coord_s;
  int q_coord_b;
  int dout_coord_h;
  int dout_coord_s;
  int dout_coord_b;
  float scale;               // sm_scale
  float scale_log2;          // sm_scale * log2(e)
  float lse_scale;           // to base 2
  float dlse_scale;          // to the gradient of the natural lse
  bool causal;
};

// Named barriers; 0 is __syncthreads'.
inline constexpr int kProducerBarrier = 1;

// One CTA has 64 heads.
template <class Element_, int kHeadDim_, Sums kSums_>
struct Config {
  using Element = Element_;
  static constexpr int kCtas = 1;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Sums kSums = kSums_;

  // ---- tiles ----
  static constexpr int kTileKeys = 64;
  static constexpr int kGroupHeads = 64;  // heads of a CTA
  static constexpr int kPanelCols = 64;   // 128 bytes: one swizzle row, one L2 line
  static constexpr int kPanelBytes = 64 * 128;
  static constexpr int kHeadPanelBytes = kGroupHeads * 128;
  static constexpr int kPanels = kHeadDim / kPanelCols;
  static constexpr int kValueDim = 512;
  static constexpr int kValuePanels = kValueDim / kPanelCols;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static_assert(kHeadDim % kPanelCols == 0 && kHeadDim >= kValueDim && kElementBytes<Element> == 2);

  // A tile lands in parts, so that its scores begin with the first.
  static constexpr int kPartPanels = kPanels % 3 == 0 ? 3 : 2;
  static constexpr int kParts = kPanels / kPartPanels;
  static_assert(kPanels % kPartPanels == 0);
  // Parts under way at once. Sums pass through the same pipe as copies and take longer behind 72 KB of them (2%, H200,
  // 2026-11-29).
  static constexpr int kPartsAhead = 1;
  // Panels of a part, and the first column of a panel.
  static __host__ __device__ constexpr int part_panels(int) { return kPartPanels; }
  static __device__ __forceinline__ int column(int panel, int) { return panel * kPanelCols; }

  // ---- how the two consumers share a tile ----
  // One makes P and dS and has dq on the first columns; the other has dq on the rest and all of dkv, so that sums leave
  // without a pause.
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kWeightConsumers = 1;  // that write P and dS
  static constexpr int kOwnKeys = kTileKeys;  // of the CTA
  static constexpr int kRowBuffers = 1;  // for the numbers of a tile's rows
  static constexpr int kDqCols = 256;   // of the first, and of the second but for kTailCols
  static constexpr int kTailCols = kHeadDim - 2 * kDqCols;
  static_assert(kTailCols == 0 || kTailCols == 64);
  // Columns of dkv in accumulators, twice: while some leave, the next ones are multiplied.
  static constexpr int kSumCols = 32;
  static constexpr int kPanelSteps = kPanelCols / wgmma::kDepth;
  static constexpr int kHeadSteps = kGroupHeads / wgmma::kDepth;
  static constexpr int kKeySteps = kTileKeys / wgmma::kDepth;

  // ---- threads and registers ----
  static constexpr int kWarps = 4;  // of a warpgroup
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters[kConsumers] = {232, 240};
  static constexpr int kProducerRegisters = 32;
  // What the launch grants: 65536 / 384 rounded down to a multiple of 8.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kConsumerRegisters[0] + kConsumerRegisters[1] + kProducerRegisters <= (kConsumers + 1) * kLaunchRegisters,
                "setmaxnreg would wait for ever");
  static_assert(wgmma::kValueAccumulators + kTailCols / 2 + 2 * kSumCols / 2 <= kConsumerRegisters[1] - 40,
                "dq and some columns of dkv share the consumer's registers");

  // ---- shared memory ----
  struct SharedStorage {
    alignas(1024) uint8_t keys[kTileBytes];
    alignas(1024) uint8_t q[kTileBytes];
    alignas(1024) uint8_t dout[kValuePanels * kPanelBytes];
    alignas(1024) uint8_t p[kPanelBytes];   // heads by keys
    alignas(1024) uint8_t ds[kPanelBytes];  // heads by keys
    alignas(16) int rows[kTileKeys];        // of the tile's slots, -1 for an invalid one
    uint64_t keys_full[kParts];
    uint64_t keys_empty;
    uint64_t q_full;
    uint64_t q_empty;
    uint64_t ds_full;
    uint64_t ds_empty;
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes, "shared memory of an SM90 CTA");
};

// Two CTAs, a cluster, have 128 heads: each has half of the columns of q, dO and the keys, of all heads, and half of dq and
// of dkv. What the scores of a tile need of the other's columns comes as partial sums, through distributed shared memory,
// so that a contribution to dkv leaves the chip once for 128 heads.
//   columns  CTA r has four panels of values, 256 r .. 256 r + 255, and 32 columns past the values, 512 + 32 r on, for
//            which both hold the whole ninth panel
//   keys     CTA r makes P and dS of its own 32 keys, which lie first in its tile: slot i of a tile is its key i ^ 32 r
//   heads    consumer w has heads 64 w .. 64 w + 63 of the scores and of dq, and half of the columns of dkv
template <class Element_, int kHeadDim_, Sums kSums_>
struct PairConfig {
  using Element = Element_;
  static constexpr int kCtas = 2;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr Sums kSums = kSums_;

  // ---- tiles ----
  static constexpr int kTileKeys = 64;
  static constexpr int kOwnKeys = kTileKeys / kCtas;
  static constexpr int kRowBuffers = 2;  // for the numbers of a tile's rows
  static constexpr int kGroupHeads = 128;  // heads of a cluster
  static constexpr int kPanelCols = 64;
  static constexpr int kPanelBytes = kTileKeys * 128;
  static constexpr int kHeadPanelBytes = kGroupHeads * 128;
  static constexpr int kValueDim = 512;
  static constexpr int kValuePanels = kValueDim / kCtas / kPanelCols;
  static constexpr int kTailPanels = (kHeadDim - kValueDim) / kPanelCols;
  static constexpr int kPanels = kValuePanels + kTailPanels;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static_assert(kTailPanels <= 1 && kHeadDim >= kValueDim && kHeadDim % kPanelCols == 0 && kElementBytes<Element> == 2);

  static constexpr int kPartPanels = 2;
  static constexpr int kParts = (kPanels + kPartPanels - 1) / kPartPanels;
  static __host__ __device__ constexpr int part_panels(int part) {
    return part + 1 < kParts ? kPartPanels : kPanels - (kParts - 1) * kPartPanels;
  }
  static constexpr int kPartsAhead = kParts;  // the next scores wait for them
  static __device__ __forceinline__ int column(int panel, int rank) {
    return panel < kValuePanels ? (rank * kValuePanels + panel) * kPanelCols : kValueDim;
  }

  // ---- how the two consumers share a tile ----
  static constexpr int kConsumers = 2;
  static constexpr int kWeightConsumers = kConsumers;  // that write P and dS
  static constexpr int kOwnHeads = kGroupHeads / kConsumers;
  static constexpr int kOwnHeadBytes = kOwnHeads * 128;
  static constexpr int kCtaCols = kValueDim / kCtas;
  static constexpr int kOwnCols = kCtaCols / kConsumers;  // of dkv
  static constexpr int kSumCols = 64;
  static constexpr int kTailCols = kTailPanels * kPanelCols / kCtas;     // of dq
  static constexpr int kOwnTailCols = kTailCols / kConsumers;            // of dkv
  static_assert(kTailCols == 0 || kTailCols == 32);
  static constexpr int kPanelSteps = kPanelCols / wgmma::kDepth;
  static constexpr int kTailSteps = kTailCols / wgmma::kDepth;
  static constexpr int kHeadSteps = kGroupHeads / wgmma::kDepth;
  static constexpr int kKeySteps = kTileKeys / wgmma::kDepth;
  static_assert(kCtaCols == 256 && kOwnCols % kSumCols == 0, "a product of 256 columns for dq");

  // ---- threads and registers ----
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters[kConsumers] = {240, 240};
  static constexpr int kProducerRegisters = 24;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kConsumerRegisters[0] + kConsumerRegisters[1] + kProducerRegisters <= (kConsumers + 1) * kLaunchRegisters,
                "setmaxnreg would wait for ever");

  // ---- what a warp exchanges with the warp of the same number in the other CTA, for its 16 heads ----
  // Partial scores of the other's 32 keys, and partial dP of them, in float32. They come to where P and dS of 16 heads are
  // later, scores to those of one's own 32 keys, dP to those of the other's.
  static constexpr int kPartialBytes = 16 * kOwnKeys * 4;
  // P and dS of its 32 keys, rounded.
  static constexpr int kWeightBytes = 2 * 16 * kOwnKeys * 2;
  static_assert(kPartialBytes == kWeightBytes);

  // ---- shared memory ----
  struct SharedStorage {
    alignas(1024) uint8_t keys[kTileBytes];
    alignas(1024) uint8_t q[kPanels * kHeadPanelBytes];
    alignas(1024) uint8_t dout[kValuePanels * kHeadPanelBytes];
    alignas(1024) uint8_t p[kHeadPanelBytes];   // heads by keys
    alignas(1024) uint8_t ds[kHeadPanelBytes];  // heads by keys
    alignas(16) int rows[kRowBuffers * kTileKeys];  // of the slots of a tile, and of the next; -1 for an invalid one
    uint64_t keys_full[kParts];
    uint64_t keys_empty;
    uint64_t q_full;
    uint64_t q_empty;
    uint64_t ds_full;
    uint64_t ds_empty;
    uint64_t partial_full[2 * kConsumers * kWarps];
    uint64_t partial_empty[kConsumers * kWarps];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes, "shared memory of an SM90 CTA");
};

}  // namespace htree_cuda::sm90::sparse_attention_bwd

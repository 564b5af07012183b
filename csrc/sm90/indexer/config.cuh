// Data sheet of the indexer's dense kernel: tiles, shared memory, barriers, register split.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "namespaces.h"
#include "device/elements.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "device/sm90.cuh"
#include "device/wgmma_layout.cuh"
#include "device/window.cuh"

namespace htree_cuda::sm90::indexer {

using namespace host;
using namespace device;

// What the kernel is told. Strides in elements.
struct KernelParams {
  float const* weights;
  int64_t weights_stride_b, weights_stride_s, weights_stride_h;
  float const* q_scale;  // or null
  int64_t q_scale_stride_b, q_scale_stride_s, q_scale_stride_h;
  float const* k_scale;  // or null
  int64_t k_scale_stride_b, k_scale_stride_s;
  Window window;
  float* out;
  int64_t out_stride_b, out_stride_s;
  int s_q;
  int s_kv;
  int h_i;
  int batches;
  int query_tiles;  // of the queries of a CTA
  int segment_keys;  // of a CTA, a multiple of kTileKeys
  int q_coord_b;    // 0 where one batch element stands for all, else 1
  int k_coord_b;
  bool fill;        // minus infinity outside the windows
};

inline constexpr int kTileKeys = 64;  // M of the WGMMA
// Keys of one CTA: long against what it takes to load the queries, short against the work of all CTAs. Fewer where SMs would
// have nothing to do, as in a step of decoding.
inline constexpr int kSegmentKeys = 4096;
inline constexpr int kFewestSegmentKeys = 256;
static_assert(kSegmentKeys % kFewestSegmentKeys == 0 && kFewestSegmentKeys % kTileKeys == 0);
inline constexpr int kPanelRowBytes = 128;  // one swizzle row

// What the consumers of a CTA divide.
enum class Split {
  kQueries,  // each has queries of its own, and both multiply every key tile
  kKeys,     // of one query: each multiplies every fourth key tile
};

template <class Element_, int kDim_, int kHeads_, bool kPadded_, Split kSplit_>
struct Config {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kHeads = kHeads_;  // columns of a query
  static constexpr bool kPadded = kPadded_;  // h_i is less
  static constexpr Split kSplit = kSplit_;
  static constexpr bool kSplitsKeys = kSplit == Split::kKeys;
  static constexpr int kConsumers = kSplitsKeys ? 4 : 2;  // warpgroups

  // ---- tiles ----
  static constexpr int kColumns = kSplitsKeys ? kHeads : 128;  // N of the WGMMA: heads of a query, or of several
  static constexpr int kHalves = kSplitsKeys ? 1 : 2;  // products of a consumer, one of which runs while it sums the other
  static constexpr int kHalfQueries = kColumns / kHeads;
  static constexpr int kQueries = kHalves * kHalfQueries;  // of one consumer
  static constexpr int kQuerySets = kSplitsKeys ? 1 : kConsumers;
  static constexpr int kTileQueries = kQuerySets * kQueries;  // of the CTA
  static constexpr int kTileStep = kSplitsKeys ? kConsumers : 1;  // from one key tile of a consumer to its next
  static constexpr int kDimBytes = kDim * kElementBytes<Element>;
  static constexpr int kPanelCols = kPanelRowBytes / kElementBytes<Element>;
  static constexpr int kPanels = (kDimBytes + kPanelRowBytes - 1) / kPanelRowBytes;
  static constexpr int kSteps = kDimBytes / 32;  // products of a tile
  static constexpr int kPanelSteps = kPanelRowBytes / 32;
  static constexpr int kKeyPanelBytes = kTileKeys * kPanelRowBytes;
  static constexpr int kHalfPanelBytes = kColumns * kPanelRowBytes;
  static constexpr int kQueryPanelBytes = kHalves * kHalfPanelBytes;
  static constexpr int kStageBytes = kPanels * kKeyPanelBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static_assert(kDimBytes % 32 == 0 && kHeads % 8 == 0);

  // ---- threads and registers ----
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kAccumulators = kColumns / 2;      // of a half
  static constexpr int kWeights = kQueries * kHeads / 4;  // of a thread
  static constexpr int kConsumerRegisters = kSplitsKeys ? 112 : 240;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * kLaunchRegisters,
                "setmaxnreg would wait for ever");
  static_assert(kHalves * kAccumulators + kWeights <= kConsumerRegisters - 40, "accumulators, weights and the epilogue share the registers");

  // ---- shared memory ----
  static constexpr int kStages = kPanels == 1 ? 12 : kSplitsKeys ? 8 : 6;
  static_assert(kStages % kTileStep == 0);
  struct SharedStorage {
    alignas(1024) uint8_t queries[kQuerySets][kQueryBytes];
    alignas(1024) uint8_t keys[kStages][kStageBytes];
    int first[kTileQueries];  // windows
    int end[kTileQueries];
    uint64_t full[kStages];
    uint64_t empty[kStages];
    uint64_t queries_full;
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kSharedBytes <= kMaxSharedBytes, "shared memory of an SM90 CTA");

  static constexpr int kEmptyUnits = (kSplitsKeys ? 1 : kConsumers) * 4;  // a warp of a consumer of the tile gives one
};

}  // namespace htree_cuda::sm90::indexer

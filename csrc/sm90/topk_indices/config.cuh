// Data sheet of topk_indices: the tile of a row, the buffer of candidates, the bins of a histogram.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "namespaces.h"
#include "device/sm90.cuh"
#include "device/topk.cuh"
#include "device/window.cuh"

namespace htree_cuda::sm90::topk_indices {

using namespace device;

// What the kernel is told. Strides in elements.
struct KernelParams {
  float const* logits;  // [B, s_q, n]
  int64_t stride_b;
  int64_t stride_s;
  Window window;
  int* indices;   // [B, s_q, topk]
  float* values;  // [B, s_q, topk] or null
  int rows;       // B * s_q
  int s_q;
  int n;
  int topk;
};

struct Config {
  // Two CTAs an SM: while one waits for its tile the other counts.
  static constexpr int kCtas = 2;
  static constexpr int kThreads = 512;
  // CTAs of a row, at most, where there are few rows.
  static constexpr int kRowCtas = 8;
  static constexpr int kWarps = kThreads / 32;

  // A tile is what all threads load at a time. Within a warp's part, vector j of lane l holds elements 128 j + 4 l + 0..3.
  static constexpr int kVectors = 4;
  static constexpr int kThreadElements = 4 * kVectors;
  static constexpr int kWarpElements = 32 * kThreadElements;
  static constexpr int kTile = kWarps * kWarpElements;
  static_assert(kVectors == 4 && 32 * 4 <= 255, "counts of the four vectors of all lanes share a word");

  // A buffer of candidates that has been cut to topk takes any whole tile.
  static constexpr int kCapacity = 12288;
  static constexpr int kMaxBuffered = kCapacity - kTile;
  static_assert(kMaxBuffered >= 2048 && kCapacity % 4 == 0);

  static constexpr int kBinBits = 11;
  static constexpr int kBins = 1 << kBinBits;
  static_assert(kBins == 4 * kThreads, "a thread sums four bins");

  // Shared memory of all: what a search for a threshold needs.
  struct alignas(16) Search {
    uint4 histogram[kBins / 4];  // zero between searches
    uint32_t warp_sums[kWarps];
    uint32_t tile_sums[2][kWarps];
    uint32_t lowest[kWarps];
    uint32_t highest[kWarps];
    uint32_t digit, room, equal;
    uint32_t padding;  // the compiler may load the three as four
    uint32_t few[32];
    uint32_t few_count;
  };

  struct alignas(16) Buffered {
    float value[kCapacity];
    int row[kCapacity];
    Search search;
    int counts[kRowCtas];  // of entries, in the first of the CTAs that divide a row
  };
  static constexpr int kSharedBytes = sizeof(Buffered);
  static_assert(kCtas * (kSharedBytes + 1024) <= 228 * 1024, "shared memory of an SM");
};

}  // namespace htree_cuda::sm90::topk_indices

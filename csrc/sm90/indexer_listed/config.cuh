// Data sheet of the listed indexer, forward and backward: tiles, shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "namespaces.h"
#include "device/barriers.cuh"
#include "device/pairs.cuh"
#include "device/ptx.cuh"
#include "device/sm90.cuh"
#include "device/window.cuh"

namespace htree_cuda::sm90::indexer_listed {

using namespace device;

// What the kernel is told. Strides in elements.
struct KernelParams {
  void const* q;
  int64_t q_stride_b, q_stride_s, q_stride_h;
  void const* k;
  int64_t k_stride_b, k_stride_s;
  float const* weights;
  int64_t weights_stride_b, weights_stride_s, weights_stride_h;
  Window window;
  int const* indices;
  int64_t indices_stride_b, indices_stride_s, indices_stride_t;
  int const* topk_length;  // or null
  int64_t topk_length_stride_b, topk_length_stride_s;
  float* out;              // forward
  int64_t out_stride_b, out_stride_s;
  float const* dlogits;    // backward
  int64_t dlogits_stride_b, dlogits_stride_s, dlogits_stride_t;
  void* dq;                // [B, s_q, h_i, d_i]
  float* dk;               // [B, s_kv, d_i]
  float* dweights;         // [B, s_q, h_i]
  int s_q;
  int s_kv;
  int h_i;
  int topk;
};

enum class Pass { kForward, kBackward };

template <class Element_, int kDim_, Pass kPass_>
struct Config {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr Pass kPass = kPass_;
  // A gradient of a mean over queries is so small that dz in fp16 would be denormal or zero.
  static constexpr bool kScaled = kPass == Pass::kBackward && std::is_same_v<Element, cutlass::half_t>;
  static constexpr int kTopExponent = 15;  // of dz where it is scaled: |dz| <= 2^15, half of what fp16 holds
  static constexpr int kHeads = 64;  // rows of the products; heads past h_i are zeros
  static constexpr int kSlots = 64;  // of a tile
  static constexpr int kThreads = 256;
  // Two CTAs an SM where registers allow: one gathers while the other multiplies.
  static constexpr int kCtas = kPass == Pass::kForward ? 2 : 1;
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kRowPieces = kRowBytes / 16;
  static constexpr int kBuffers = 2;
  static_assert(kDim == 64 || kDim == 128);

  struct SharedStorage {
    alignas(128) uint8_t query[kHeads * kRowBytes];
    alignas(128) uint8_t keys[kBuffers][kSlots * kRowBytes];  // dq of half of the slots at the end
    alignas(128) uint8_t dz[kHeads * kSlots * 2];
    float sums[4][kSlots];        // forward: of 16 heads each; kScaled: largest gradient and weight of each warp
    float row_sums[kHeads];       // backward: dweights of half of the slots
    float gradient[kBuffers][kSlots];
    int row[kBuffers][kSlots];    // -1: an invalid slot
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);
  static_assert(kBuffers * kSlots * kRowBytes >= kHeads * kDim * 4);
  static_assert(kCtas * (kSharedBytes + 1024) <= 228 * 1024, "shared memory of an SM");
};

}  // namespace htree_cuda::sm90::indexer_listed

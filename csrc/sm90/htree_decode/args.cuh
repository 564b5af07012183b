// What the decode kernel is told, and where the rows of a cached tree lie.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "namespaces.h"
#include "params.h"
#include "tree/cache_view.cuh"

namespace htree_cuda::sm90::htree_decode {

using namespace host;
using namespace device;
using namespace tree;

// A call attends `T_q` queries a sequence, the last of its tokens; one cluster of CTAs serves one query of one KV head.
struct Args {
  tree::CacheView cache;

  void const* q;  // [B, T_q, H_kv * G, K], last dimension contiguous
  std::int64_t q_stride_b;
  std::int64_t q_stride_t;
  std::int64_t q_stride_h;
  std::int32_t const* seqused_q;  // [B], or null: all T_q
  bool q_vectors;                 // 16 bytes of a row of q may be read at once

  void* out;                // [B, T_q, H_kv * G, V] contiguous
  float* lse;               // [B, T_q, H_kv * G] contiguous
  std::int32_t* selection;  // [selection_layers, B, T_q, H_kv, top_k] contiguous, or null
  int selection_layers;

  float2 const* rotations;  // [16 * top_k, K / 2] cos and sin of a position
  float scale_log2;         // scale * log2(e)
  int B;
  int T_q;
  int G;
  int top_k;
};

}  // namespace htree_cuda::sm90::htree_decode

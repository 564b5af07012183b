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

// Which elements of a row are rotated pairs, in chunks of 8 elements. Chunk c of the first ones and chunk c of the second
// ones make 8 pairs. In halves the first `halves` chunks of both come from the first 2 * halves chunks of a row, the others
// from behind them; interleaved, both come from chunks 2 c and 2 c + 1.
struct Pairing {
  int halves;
  bool interleaved;
};

// The two chunks of a row, of `chunks` in all, from which chunk c of first and of second elements come.
__device__ __forceinline__ int2 pair_chunks(Pairing const& pairing, int c, int chunks) {
  if (pairing.interleaved) return {2 * c, 2 * c + 1};
  int const behind = pairing.halves;
  return c < behind ? int2{c, c + behind} : int2{c + behind, c + chunks / 2};
}

// First and second elements of interleaved pairs, from the two chunks that hold them.
__device__ __forceinline__ void separate_pairs(uint4& x, uint4& y) {
  uint4 const a = x;
  uint4 const b = y;
  x = {__byte_perm(a.x, a.y, 0x5410), __byte_perm(a.z, a.w, 0x5410), __byte_perm(b.x, b.y, 0x5410),
       __byte_perm(b.z, b.w, 0x5410)};
  y = {__byte_perm(a.x, a.y, 0x7632), __byte_perm(a.z, a.w, 0x7632), __byte_perm(b.x, b.y, 0x7632),
       __byte_perm(b.z, b.w, 0x7632)};
}

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
  int log2_parts;         // log2_parts_of(top_k, G): read from here, it takes no register
  int log2_parts_of_cta;  // that a CTA takes: launch.cuh
  Pairing pairing;
  float const* attn_sink;  // [H_kv * G] natural, or null
};

}  // namespace htree_cuda::sm90::htree_decode

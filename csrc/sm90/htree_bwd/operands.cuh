// How the kernels of selected layers read packed operands (layout.h) as fragments of m16n8k16.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "args.h"
#include "layout.h"

namespace htree_cuda::sm90::htree_bwd {

// Where the row lies that a lane names for ldmatrix.x4 of 16 rows and 16 columns, relative to the matrix.
//   kRowsFirst   rows 0..7 and 8..15 of the first eight columns, then of the other eight. The result is an A fragment; or two
//                B fragments by columns, registers {0, 2} and {1, 3}; or, transposed, two B fragments by rows, {0, 1} and
//                {2, 3}.
//   otherwise    rows 0..7 of both halves of the columns, then rows 8..15. The result is two B fragments by columns, {0, 1}
//                and {2, 3}.
template <bool kRowsFirst>
__device__ __forceinline__ uint32_t ldmatrix_offset(int lane, int row_bytes) {
  int const id = lane / 8;
  int const row = lane % 8 + (kRowsFirst ? id % 2 : id / 2) * 8;
  int const chunk = kRowsFirst ? id / 2 : id % 2;
  return row * row_bytes + ((chunk ^ (row % 8)) << 4);
}

// A lane's addresses in all columns of an operand that begins at a multiple of 256 bytes, 16 columns a step. The
// swizzle exchanges chunks of 16 bytes within 128 bytes, so that four addresses serve every step, at constant
// distances.
struct StepAddresses {
  uint32_t at[4];

  __device__ __forceinline__ explicit StepAddresses(uint32_t lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = lane ^ (i << 5);
  }
  // The addresses of a line that is no multiple of 128, a line being an address without its chunk of 16 bytes.
  __device__ __forceinline__ StepAddresses(uint32_t line, uint32_t chunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = line + (chunk ^ (i << 5));
  }
  __device__ __forceinline__ uint32_t operator[](int step) const { return at[step % 4] + step / 4 * 128; }
};

// Rotates a B fragment by columns, registers {0, 1} or {2, 3}.
__device__ __forceinline__ void rotate_tile(uint32_t (&lo)[4], uint32_t (&hi)[4], int tile,
                                            rope::FragmentRotations const& rotations) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    half2& x = reinterpret_cast<half2&>(lo[2 * tile + part]);
    half2& y = reinterpret_cast<half2&>(hi[2 * tile + part]);
    half2 const before = x;
    x = __hfma2(y, __hneg2(rotations.sin[part]), __hmul2(x, rotations.cos[part]));
    y = __hfma2(before, rotations.sin[part], __hmul2(y, rotations.cos[part]));
  }
}

// Rotates two B fragments by columns, registers {0, 1} and {2, 3}, of the first half of the pairs against the same of
// the second half. kInverse rotates by the negative angle, which is the same with the halves exchanged.
template <bool kInverse>
__device__ __forceinline__ void rotate_columns(uint32_t (&lo)[4], uint32_t (&hi)[4],
                                               rope::FragmentRotations const& rotations) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    half2& x = reinterpret_cast<half2&>(kInverse ? hi[i] : lo[i]);
    half2& y = reinterpret_cast<half2&>(kInverse ? lo[i] : hi[i]);
    half2 const cosine = rotations.cos[i % 2];
    half2 const sine = rotations.sin[i % 2];
    half2 const before = x;
    x = __hfma2(y, __hneg2(sine), __hmul2(x, cosine));
    y = __hfma2(before, sine, __hmul2(y, cosine));
  }
}

// dq of the entry layer of a row, [unit_heads, K], where dq_entry leaves it. `row` counts all heads' rows.
template <int kK, int kV>
__device__ __forceinline__ float const* entry_share(Args const& args, std::int64_t row) {
  int const heads = unit_heads(args.G);
  int const queries = tile_queries(heads);
  char const* const tile = args.query_tiles + row / queries * query_tile_bytes(kK, kV);
  return reinterpret_cast<float const*>(tile + kQueryTileHeader) + row % queries * heads * kK;
}

template <int kTiles>
__device__ __forceinline__ void clear(float (&x)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[tile][e] = 0.0f;
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

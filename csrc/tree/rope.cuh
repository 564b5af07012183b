// RoPE as the htree kernels apply it.
//
// In the entry layer of a query a candidate's position is the index of its node. Keys are rotated by that index when
// the tree is packed, and the query is rotated once, by n - 1. In a selected layer scores need
//   <R(q, n - 1), R(k, 16 j + c)> = <R(q, n - 1 - 16 j), R(k, c)>
// so keys are rotated by their place c among their siblings, and a query is rotated once per KV block j. Rotated
// operands are fp16 (tree/row_scale.cuh). Keys of the bottom layer, whose scores select nothing, keep the precision of
// the inputs.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace htree_cuda::tree::rope {

// The angles of a call: base ** (-2 m / K), or a table.
struct Frequencies {
  double base;
  double const* table;  // [K / 2], or null
};

// Angle of pair m from one position to the next, in float64.
__device__ inline double frequency(int m, int K, Frequencies const& of) {
  return of.table != nullptr ? of.table[m] : pow(of.base, -2.0 * m / K);
}

// cos and sin of a position.
__device__ inline double2 rotation(std::int64_t position, double frequency) {
  double sine, cosine;
  sincos(static_cast<double>(position) * frequency, &sine, &cosine);
  return {cosine, sine};
}

// cos and sin in the order of m16n8k16's fragments: entry [position][kk][tq] (kk < K / 32, tq < 4) holds the pairs
// 16 kk + 2 tq + {0, 1, 8, 9}, which rotate fragment kk of the first half against fragment kk + K / 32.
struct alignas(16) FragmentRotations {
  half2 cos[2];
  half2 sin[2];
};

// Rotations as matrices. Where the two elements of a pair are neighbours, eight columns (four pairs) are a tile that
// one m16n8k8 product rotates: the 8 x 8 matrix has the rotations of the pairs on its diagonal, and the fp16 sums of
// the product are operands as they come. Lane 4 g + t holds column g of rows 2 t and 2 t + 1 of that matrix, zeros but
// for t = g / 2. Entry [position][g][i] (i < K / 32) holds column g for the tiles 4 i .. 4 i + 3.
//
// A query that is rotated in place, by -16 positions from rank to rank or by 16 past a block that was left out,
// multiplies every pair by the rounded matrix each time. Seen as a complex number that factor is off from 1 by 2^-11 or
// so, and the error adds up. The rotations from which a query restarts take back what half a period adds (`compensated`
// in tree/pack/kernel.cuh), so that the error is half as large at either end of a period.
struct alignas(16) RotationColumns {
  half2 tile[4];
};

// cos and sin for packed arithmetic, of heads that are columns: one register holds the first elements of two pairs,
// another one the second elements. Entry [position][t][step] (t < 4, step < K / 16) serves the pairs 8 step + 2 t + {0,
// 1}.
struct alignas(8) PackedRotations {
  half2 cos;
  half2 sin;
};

// The tile of a pair whose first element lies in a 16-byte chunk. The even ones of the eight pairs of a chunk make one
// tile and the odd ones another, so that a thread that holds fragments of a row as it lies in memory holds both
// elements of every pair in its fragments of tiles.
__host__ __device__ constexpr int tile_of(int chunk, int odd) { return chunk / 2 * 4 + 2 * odd + chunk % 2; }

// Column g of the rotation of one pair: x cos - y sin for even g, x sin + y cos for odd g.
__device__ __forceinline__ half2 rotation_column(double2 rotation, int g) {
  half const c = __double2half(rotation.x);
  return g % 2 ? half2(__double2half(rotation.y), c) : half2(c, __double2half(-rotation.y));
}

// The same column of the inverse rotation.
__device__ __forceinline__ uint32_t inverse_column(uint32_t column, int g) {
  return column ^ (g % 2 ? 0x8000u : 0x80000000u);
}

}  // namespace htree_cuda::tree::rope

// Gathering rows of global memory into shared memory in the layout WGMMA reads: K-major panels of 64 elements of 16
// bits (128 bytes) a row with the 128-byte swizzle, so 16-byte chunk c of row r lies at chunk c ^ (r % 8).
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace htree_cuda::gather {

inline constexpr int kPanelBytesPerRow = 128;
inline constexpr int kChunkBytes = 16;
inline constexpr int kChunksPerRow = kPanelBytesPerRow / kChunkBytes;

// Byte offset of a 16-byte chunk in a panel whose base is 1024-byte aligned.
__host__ __device__ constexpr uint32_t swizzled_offset(uint32_t row, uint32_t chunk) {
  return row * kPanelBytesPerRow + ((chunk ^ (row & 7u)) * kChunkBytes);
}

// How kThreads threads share kRows rows: eight neighbouring threads cover the 128 bytes of a row's panel (one L2 line),
// so a warp instruction reads four whole lines and writes four rows without bank conflicts. Thread t owns chunk t % 8 of
// rows t / 8 + i * (kThreads / 8).
template <int kRows, int kThreads>
struct RowGather {
  static constexpr int kRowStep = kThreads / kChunksPerRow;
  static constexpr int kRowsPerThread = kRows / kRowStep;
  static constexpr int kPanelBytes = kRows * kPanelBytesPerRow;
  static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0, "a thread's rows must share their place in the swizzle");

  // Where thread `t` writes in a panel, its first row.
  __device__ static uint32_t offset_of(uint32_t t) { return swizzled_offset(t / kChunksPerRow, t % kChunksPerRow); }

  // kPanels neighbouring panels of this thread's rows; rows[i] points at the thread's chunk of the first panel.
  template <int kPanels>
  __device__ __forceinline__ static void copy(uint32_t shared, char const* const (&rows)[kRowsPerThread],
                                              bool const (&valid)[kRowsPerThread], int byte_offset) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        ptx::copy_async_16B(shared + p * kPanelBytes + i * kRowStep * kPanelBytesPerRow,
                            rows[i] + byte_offset + p * kPanelBytesPerRow, valid[i]);
      }
    }
  }
};

}  // namespace htree_cuda::gather

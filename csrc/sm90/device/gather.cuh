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

// One warp copies kRows of the kPanelRows rows of panels. Eight neighbouring lanes cover the 128 bytes of a row's panel
// (one L2 line), so an instruction reads four whole lines and writes four rows without bank conflicts.
template <int kRows, int kPanelRows = kRows>
class WarpGather {
public:
  static constexpr int kRowsPerLane = kRows / 32;
  static constexpr int kPanelBytes = kPanelRows * kPanelBytesPerRow;
  static_assert(kRows % 32 == 0 && kPanelRows >= kRows);

  // Row numbers as loaded, one coalesced load for 32: lane l has those of rows l, l + 32, ...; negative: zeros.
  struct Rows {
    int row[kRowsPerLane];
    __device__ int& operator[](int i) { return row[i]; }
    __device__ int operator[](int i) const { return row[i]; }
  };

  __device__ __forceinline__ explicit WarpGather(int lane)
      : lane_(lane), even_(swizzled_offset(lane / kChunksPerRow, lane % kChunksPerRow)) {}

  // Where in a panel's 128 bytes this lane reads.
  __device__ __forceinline__ int chunk_offset() const { return lane_ % kChunksPerRow * kChunkBytes; }

  // kPanels neighbouring panels of the rows, the first of them at `shared`; `base` is the first panel of row 0 plus
  // chunk_offset().
  template <int kPanels>
  __device__ __forceinline__ void copy(uint32_t shared, char const* base, uint64_t row_stride,
                                       Rows const& rows) const {
    constexpr int kRowsAtOnce = 32 / kChunksPerRow;
    uint32_t const even = shared + even_;
    uint32_t const odd = shared + (even_ ^ (kRowsAtOnce * kChunkBytes));  // rows 4 .. 7 of eight: bit 2 of the swizzle
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      int const row =
          __shfl_sync(0xffffffffu, rows[i * kRowsAtOnce / 32], i * kRowsAtOnce % 32 + lane_ / kChunksPerRow);
      // Row 0 stands in for an invalid one; it is not read.
      char const* const source = base + static_cast<uint64_t>(static_cast<uint32_t>(max(row, 0))) * row_stride;
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        ptx::copy_async_16B((i % 2 == 0 ? even : odd) + p * kPanelBytes + i * kRowsAtOnce * kPanelBytesPerRow,
                            source + p * kPanelBytesPerRow, row);
      }
    }
  }

private:
  int const lane_;
  uint32_t const even_;
};

}  // namespace htree_cuda::gather

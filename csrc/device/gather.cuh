// Gathering rows of global memory into shared memory in the layout WGMMA reads: K-major panels of 64 elements of 16
// bits (128 bytes) a row with the 128-byte swizzle, so 16-byte chunk c of row r lies at chunk c ^ (r % 8).
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "sm90.cuh"

namespace htree_cuda::device::gather {

inline constexpr int kPanelBytesPerRow = 128;
inline constexpr int kChunkBytes = 16;
inline constexpr int kChunksPerRow = kPanelBytesPerRow / kChunkBytes;

// Byte offset of a 16-byte chunk in a panel whose base is 1024-byte aligned.
__host__ __device__ constexpr uint32_t swizzled_offset(uint32_t row, uint32_t chunk) {
  return row * kPanelBytesPerRow + ((chunk ^ (row & 7u)) * kChunkBytes);
}

// The share of each thread in kRows rows that a warpgroup, or half of one, gathers. Shares are even, because a warp
// with more to issue slows the other warps of its quarter of the SM, and a WGMMA waits for the slowest quarter. Eight
// neighbouring lanes cover the 128 bytes of a row's panel (one L2 line), so that an instruction reads four whole lines
// and writes four rows without bank conflicts. Thread t of kThreads owns chunk t % 8 of rows t / 8 + kRowStep i.
template <int kRows, int kThreads = 128>
class RowGather {
public:
  static constexpr int kRowStep = kThreads / kChunksPerRow;
  static constexpr int kRowsPerThread = kRows / kRowStep;
  static constexpr int kPanelBytes = kRows * kPanelBytesPerRow;
  static_assert(kRows % kRowStep == 0 && kRowStep % 8 == 0, "a thread's rows share their place in the swizzle");

  __device__ __forceinline__ explicit RowGather(int thread)
      : thread_(thread), offset_(swizzled_offset(thread / kChunksPerRow, thread % kChunksPerRow)) {}

  // The row whose number this lane loads for its warp, so that one load serves the warp's rows. With 128 threads each
  // row is loaded twice.
  __device__ __forceinline__ int row_to_load() const {
    int const lane = thread_ % 32;
    return thread_ / 32 * 4 + lane % 4 + kRowStep * (lane / 4 % kRowsPerThread);
  }

  // The warp and the first lane that load the number of `row`.
  static __device__ __forceinline__ int warp_of(int row) { return row % kRowStep / 4; }
  static __device__ __forceinline__ int lane_of(int row) { return row % 4 + row / kRowStep * 4; }

  // This thread's chunk of the row at `row`.
  __device__ __forceinline__ char const* chunk_of(char const* row) const {
    return row + thread_ % kChunksPerRow * kChunkBytes;
  }

  // Finds this thread's chunks of the first panel from the row numbers that the lanes loaded; a negative number stands
  // for a row of zeros. `base` is chunk_of(row 0).
  __device__ __forceinline__ void point(int number, char const* base, uint64_t row_stride) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      sign_[i] = __shfl_sync(kFullWarp, number, thread_ % 32 / kChunksPerRow + 4 * i);
      // Row 0 stands in for a row of zeros and is not read.
      source_[i] = base + static_cast<uint64_t>(static_cast<uint32_t>(max(sign_[i], 0))) * row_stride;
    }
  }

  // Has the addresses of point() computed before any volatile access that follows, such as a wait after which every
  // cycle counts.
  __device__ __forceinline__ void compute_addresses() {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      source_[i] = ptx::opaque(source_[i]);
    }
  }

  // Copies kPanels neighbouring panels, from byte `column` of the rows on.
  template <int kPanels>
  __device__ __forceinline__ void copy(uint32_t shared, int column) const {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        ptx::copy_async_16B(shared + offset_ + p * kPanelBytes + i * kRowStep * kPanelBytesPerRow,
                            source_[i] + column + p * kPanelBytesPerRow, sign_[i]);
      }
    }
  }

private:
  int const thread_;
  uint32_t const offset_;
  char const* source_[kRowsPerThread];
  int sign_[kRowsPerThread];
};

}  // namespace htree_cuda::device::gather

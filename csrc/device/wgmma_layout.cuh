// What a thread holds of a WGMMA's result. wgmma.cuh has the instructions.
#pragma once

namespace htree_cuda::device::wgmma {

// What thread t of a warpgroup (warp w = t / 32, lane l) holds of a result of 64 rows, for the j-th eight columns:
//   acc[4 j + 0..1]  row 16 w + l / 4,      columns 8 j + 2 (l % 4) + 0..1
//   acc[4 j + 2..3]  row 16 w + l / 4 + 8,  the same columns
inline constexpr int kAccumulators = 32;        // of a 64 x 64 result
inline constexpr int kValueAccumulators = 128;  // of a 64 x 256 result
// Elements along the contraction of one instruction.
inline constexpr int kDepth = 16;

}  // namespace htree_cuda::device::wgmma

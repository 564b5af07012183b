// A row of logits in tiles, and the order of its elements as integers.
#pragma once

#include "config.cuh"
#include "device/ptx.cuh"

namespace htree_cuda::sm90::topk_indices {

inline constexpr uint32_t kNaNKey = 0xffffffffu;

// Compares as the logits do: NaN above infinity, -0 equal to +0.
__device__ __forceinline__ uint32_t order_key(float x) {
  uint32_t const bits = __float_as_uint(x + 0.0f);
  uint32_t const key = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return x != x ? kNaNKey : key;
}

__device__ __forceinline__ float from_key(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// Whether x comes before `limit`, which is no NaN: larger, or NaN. With a limit of minus infinity: x is a candidate.
__device__ __forceinline__ bool passes(float x, float limit) { return !(x <= limit); }

// The visible part of a row. Positions count from a 16-byte boundary at or before the row's start.
struct Row {
  float const* aligned;
  uint32_t shift;  // position of the row's first element
  uint32_t first;  // positions of the visible part
  uint32_t end;

  __device__ __forceinline__ Row(KernelParams const& p, int row) {
    int const b = row / p.s_q;
    int const s = row % p.s_q;
    float const* const start = p.logits + b * p.stride_b + s * p.stride_s;
    shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(start) / 4 % 4);
    aligned = start - shift;
    KeyRange const range = key_range(p.window, b, s, p.n);
    first = range.first + shift;
    end = range.end + shift;
  }

  __device__ __forceinline__ uint32_t first_tile() const { return first / 4 * 4; }

  // The position of this thread's vector j in the tile that begins at `tile`.
  static __device__ __forceinline__ uint32_t position(uint32_t tile, int j) {
    return tile + threadIdx.x / 32 * Config::kWarpElements + j * 128 + threadIdx.x % 32 * 4;
  }
  __device__ __forceinline__ int row_of(uint32_t position) const { return static_cast<int>(position - shift); }

  // This thread's elements of a tile; what is not visible is minus infinity and not read.
  __device__ __forceinline__ void load(float (&x)[Config::kThreadElements], uint32_t tile) const {
#pragma unroll
    for (int j = 0; j < Config::kVectors; ++j) {
      uint32_t const at = position(tile, j);
      bool const whole = at >= first && at + 4 <= end;
      uint4 const four = ptx::load_global_once_if(whole, aligned + at);
      uint32_t const bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) x[4 * j + c] = whole ? __uint_as_float(bits[c]) : -INFINITY;
      if (!whole && at < end && at + 4 > first) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (at + c >= first && at + c < end) x[4 * j + c] = __ldg(aligned + at + c);
        }
      }
    }
  }
};

// The sum of the four bytes of x.
__device__ __forceinline__ uint32_t sum_of_bytes(uint32_t x) {
  return ((x & 0x00ff00ffu) + (x >> 8 & 0x00ff00ffu)) * 0x00010001u >> 16;
}

// The places of marked elements in a warp's part of a tile. A mask has a bit for each element of the thread.
struct WarpPlaces {
  uint32_t before;  // a byte for each vector: marked elements of lower lanes
  uint32_t totals;  // the same of all lanes

  __device__ __forceinline__ explicit WarpPlaces(uint32_t mask) {
    uint32_t const own = __popc(mask & 0xfu) | __popc(mask & 0xf0u) << 8 | __popc(mask & 0xf00u) << 16 |
                         __popc(mask & 0xf000u) << 24;
    uint32_t inclusive = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      uint32_t const lower = __shfl_up_sync(kFullWarp, inclusive, d);
      if (threadIdx.x % 32 >= d) inclusive += lower;
    }
    before = inclusive - own;
    totals = __shfl_sync(kFullWarp, inclusive, 31);
  }

  __device__ __forceinline__ uint32_t total() const { return sum_of_bytes(totals); }

  // Marked elements of the warp's part before this thread's vector j.
  __device__ __forceinline__ uint32_t before_vector(int j) const {
    uint32_t const earlier = totals & ((1u << 8 * j) - 1);
    return sum_of_bytes(earlier) + (before >> 8 * j & 0xffu);
  }
};

}  // namespace htree_cuda::sm90::topk_indices

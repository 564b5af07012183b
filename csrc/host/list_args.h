// What the launchers of kernels over index lists share: checks of q and of the list, chunks of batches, the tensor map
// of q. `Params` is the op's struct of params.h, `Kernel` the struct of parameters that its kernel gets.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

#include "driver.h"
#include "math.h"
#include "params.h"
#include "recording.h"
#include "device/slots.cuh"

namespace htree_cuda::host::list_args {

inline constexpr int kGroupHeads = 64;
inline constexpr int kTileKeys = 64;

inline void require(char const* op, bool holds, std::string const& what) {
  if (!holds) throw std::invalid_argument(std::string(op) + ": " + what);
}

inline void require_aligned(char const* op, char const* name, void const* pointer) {
  std::int64_t const past = misalignment(pointer, 16);
  require(op, past == 0, std::string(name) + " must be 16-byte aligned, got an address " + std::to_string(past) +
                             " bytes past a multiple of 16");
}

struct Stride {
  char const* name;
  std::int64_t size, stride;
};

inline void require_strides(char const* op, std::initializer_list<Stride> strides) {
  for (auto const& [name, size, stride] : strides) {
    require(op, size <= 1 || (stride >= 0 && stride % 8 == 0 && stride < (std::int64_t{1} << 39)),
            std::string(name) + " stride must be a multiple of 16 bytes (8 elements), got " + std::to_string(stride));
  }
}

// Checks sizes, q and the list.
template <class Params>
void check(char const* op, Params const& p) {
  constexpr std::int64_t kIntMax = std::numeric_limits<int>::max();
  require(op, p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16, "q must be bfloat16 or float16");
  require(op, p.B >= 0 && p.s_q >= 0 && p.s_kv >= 0 && p.h_q >= 1 && p.topk >= 0, "negative size, or h_q < 1");
  require(op, p.s_q <= kIntMax && p.s_kv <= kIntMax && p.h_q <= (1 << 24), "s_q, s_kv or h_q too large");
  require(op, p.topk <= (1 << 30), "topk must be at most 2^30, got " + std::to_string(p.topk));
  require(op, p.q_start == nullptr || p.k_stride >= 1,
          "k_stride must be at least 1, got " + std::to_string(p.k_stride));
  std::int64_t const widest = std::max(p.topk_length_stride_b, p.topk_length_stride_s);
  require(op, p.topk_length == nullptr || widest < (std::int64_t{1} << 32),
          "topk_length's strides must be less than 2^32 elements, got " + std::to_string(widest));
  require_aligned(op, "q", p.q);
  require_strides(op, {{"q's batch", p.B, p.q_stride_b},
                       {"q's query", p.s_q, p.q_stride_s},
                       {"q's head", p.h_q, p.q_stride_h}});
  // Heads past h_q must read zeros, which a tensor map with a stride of 0 cannot say.
  require(op, p.h_q == 1 || p.q_stride_h > 0, "q's head stride must not be 0 (heads expanded from one)");
}

// Calls launch(first batch, batches, one_start) for chunks of batches: rows (batch, query) are counted in 32 bits, and
// starts travel in the kernel's parameters, one for all where they are alike.
template <class Params, class Launch>
void for_each_chunk(Params const& p, Launch&& launch) {
  bool const one_start = p.q_start == nullptr || std::all_of(p.q_start, p.q_start + p.B, [&](std::int64_t start) {
                           return start == p.q_start[0];
                         });
  std::int64_t chunk = std::min<std::int64_t>(p.B, std::numeric_limits<int>::max() / p.s_q);
  if (!one_start) chunk = std::min<std::int64_t>(chunk, device::slots::kMaxStarts);
  for (std::int64_t b = 0; b < p.B; b += chunk) {
    launch(b, std::min(chunk, p.B - b), one_start);
  }
}

// Moves what set_slots reads to batch `b` and the batches after it.
template <class Params>
void skip_slots(Params& p, std::int64_t b) {
  p.indices += b * p.indices_stride_b;
  if (p.topk_length != nullptr) p.topk_length += b * p.topk_length_stride_b;
  if (p.q_start != nullptr) p.q_start += b;
}

// Sets the list and what decides which of its slots count.
template <class Params, class Kernel>
void set_slots(Params const& p, bool one_start, Kernel& kernel) {
  kernel.indices = p.indices;
  kernel.indices_stride_b = p.indices_stride_b;
  kernel.indices_stride_s = p.indices_stride_s;
  kernel.indices_stride_t = p.indices_stride_t;
  kernel.topk_length = p.topk_length;
  kernel.topk_length_stride_b = static_cast<std::uint32_t>(p.topk_length_stride_b);
  kernel.topk_length_stride_s = static_cast<std::uint32_t>(p.topk_length_stride_s);
  kernel.s_q = static_cast<int>(p.s_q);
  kernel.s_kv = static_cast<int>(p.s_kv);
  kernel.topk = static_cast<int>(p.topk);
  kernel.causal = p.q_start != nullptr;
  kernel.key_stride = p.k_stride;
  if (kernel.causal) {
    kernel.q_start_step = one_start ? 0 : 1;
    std::copy_n(p.q_start, one_start ? 1 : p.B, kernel.q_start);
  }
}

// A tensor [B, s_q, h_q, columns] of 16-bit elements with the last dimension contiguous; strides in elements.
struct Heads {
  void const* base;
  std::int64_t columns, B, s_q, h_q;
  std::int64_t stride_b, stride_s, stride_h;
  DType dtype;
};

// Its tensor map as (column, head, query, batch), in boxes of 64 columns of 64 heads. Heads past h_q read zeros instead of
// the next query. A dimension of size 1 or stride 0 (an expanded view) becomes one element whose coordinate is always 0:
// its `coord` is then 0, else 1.
inline CUtensorMap encode_heads(Heads const& x, int& coord_h, int& coord_s, int& coord_b) {
  if (recording() != nullptr) return {};
  static auto const encode =
      driver_entry_point<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
  struct Dimension {
    std::int64_t size, stride;
    int* coordinate;
  } const dimensions[] = {{x.h_q, x.stride_h, &coord_h}, {x.s_q, x.stride_s, &coord_s}, {x.B, x.stride_b, &coord_b}};
  cuuint64_t size[4] = {static_cast<cuuint64_t>(x.columns)};
  cuuint64_t stride_bytes[3];
  for (int i = 0; i < 3; ++i) {
    auto const& dimension = dimensions[i];
    bool const one = dimension.size == 1 || dimension.stride == 0;
    size[i + 1] = one ? 1 : dimension.size;
    stride_bytes[i] = 2 * (one ? x.columns : dimension.stride);
    *dimension.coordinate = one ? 0 : 1;
  }
  cuuint32_t const box[4] = {64, kGroupHeads, 1, 1};
  cuuint32_t const element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  check_driver(encode(&map,
                      x.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                      4, const_cast<void*>(x.base), size, stride_bytes, box, element_strides,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
               "cuTensorMapEncodeTiled");
  return map;
}

// The tensor map of q.
template <class Params, class Kernel>
CUtensorMap encode_q(Params const& p, Kernel& kernel) {
  return encode_heads({p.q, p.d_qk, p.B, p.s_q, p.h_q, p.q_stride_b, p.q_stride_s, p.q_stride_h, p.dtype},
                      kernel.q_coord_h, kernel.q_coord_s, kernel.q_coord_b);
}

}  // namespace htree_cuda::host::list_args

// Host side of attn_dist: checks the request, encodes Q's tensor map, chooses the instantiation and the grid.
#include "launch.h"

#include <cudaTypedefs.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "../../common/cuda_check.h"
#include "../../common/dispatch.h"
#include "../../common/driver.h"
#include "../../common/math.h"
#include "../../params.h"
#include "config.cuh"

namespace htree_cuda {

namespace {

using distribution::KernelParams;
using distribution::kMaxStarts;
using distribution::Split;

constexpr int kGroupHeads = 64;
constexpr int kPassHeads = 128;
constexpr int kTileKeys = 64;

void require(bool holds, std::string const& what) {
  if (!holds) throw std::invalid_argument("attn_dist: " + what);
}

void check(AttnDistParams const& p) {
  auto const number = [](std::int64_t x) { return std::to_string(x); };
  auto const aligned = [](void const* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; };
  constexpr std::int64_t kIntMax = std::numeric_limits<int>::max();
  require(p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16, "q must be bfloat16 or float16");
  require(p.B >= 0 && p.s_q >= 0 && p.s_kv >= 0 && p.h_q >= 1 && p.topk >= 0, "negative size, or h_q < 1");
  require(p.s_q <= kIntMax && p.s_kv <= kIntMax && p.h_q <= (1 << 24), "s_q, s_kv or h_q too large");
  require(p.topk <= (1 << 30), "topk must be at most 2^30, got " + number(p.topk));
  require(p.q_start == nullptr || p.k_stride >= 1, "k_stride must be at least 1, got " + number(p.k_stride));
  require(aligned(p.q), "q must be 16-byte aligned");
  require(aligned(p.k), "k must be 16-byte aligned");
  require(aligned(p.out), "out must be 16-byte aligned");
  struct {
    char const* name;
    std::int64_t size, stride;
  } const strides[] = {{"q's batch", p.B, p.q_stride_b},   {"q's query", p.s_q, p.q_stride_s},
                       {"q's head", p.h_q, p.q_stride_h},  {"k's batch", p.B, p.k_stride_b},
                       {"k's row", p.s_kv, p.k_stride_s}};
  for (auto const& [name, size, stride] : strides) {
    require(size <= 1 || (stride >= 0 && stride % 8 == 0 && stride < (std::int64_t{1} << 39)),
            std::string(name) + " stride must be a multiple of 16 bytes (8 elements), got " + number(stride));
  }
  // Heads past h_q must read zeros, which a tensor map with one head for all cannot say.
  require(p.h_q == 1 || p.q_stride_h > 0, "q's head stride must not be 0 (heads expanded from one)");
}

// Q as (d, head, query, batch), boxes of 64 columns of 64 heads: heads past h_q read zero, not the next query's. A
// dimension of size 1 or stride 0 (an expanded view) becomes one element whose coordinate is always 0.
CUtensorMap encode_q(AttnDistParams const& p, KernelParams& kernel) {
  static auto const encode =
      driver_entry_point<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
  struct Dimension {
    std::int64_t size, stride;
    int* coordinate;
  } const dimensions[] = {{p.h_q, p.q_stride_h, &kernel.q_coord_h},
                          {p.s_q, p.q_stride_s, &kernel.q_coord_s},
                          {p.B, p.q_stride_b, &kernel.q_coord_b}};
  cuuint64_t size[4] = {static_cast<cuuint64_t>(p.d_qk)};
  cuuint64_t stride_bytes[3];
  for (int i = 0; i < 3; ++i) {
    auto const& dimension = dimensions[i];
    bool const one = dimension.size == 1 || dimension.stride == 0;
    size[i + 1] = one ? 1 : dimension.size;
    stride_bytes[i] = 2 * (one ? p.d_qk : dimension.stride);
    *dimension.coordinate = one ? 0 : 1;
  }
  cuuint32_t const box[4] = {64, kGroupHeads, 1, 1};
  cuuint32_t const element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  check_driver(encode(&map,
                      p.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                      4, const_cast<void*>(p.q), size, stride_bytes, box, element_strides,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
               "cuTensorMapEncodeTiled");
  return map;
}

template <class Element, Split kSplit>
void dispatch_head_dim(std::int64_t d_qk, KernelParams const& kernel, CUtensorMap const& map, int grid,
                       cudaStream_t stream) {
  switch (d_qk) {
    case 576: return distribution::launch<Element, 576, kSplit>(kernel, map, grid, stream);
    case 512: return distribution::launch<Element, 512, kSplit>(kernel, map, grid, stream);
    case 192: return distribution::launch<Element, 192, kSplit>(kernel, map, grid, stream);
    case 128: return distribution::launch<Element, 128, kSplit>(kernel, map, grid, stream);
  }
  throw std::invalid_argument("attn_dist: d_qk must be 576, 512, 192 or 128, got " + std::to_string(d_qk));
}

// `passes` over the heads from `first_group` on.
template <Split kSplit>
void launch_passes(AttnDistParams const& p, KernelParams kernel, CUtensorMap const& map, std::int64_t first_group,
                   std::int64_t passes, int processors, cudaStream_t stream) {
  if (passes == 0) return;
  kernel.first_group = static_cast<int>(first_group);
  kernel.passes = static_cast<int>(passes);
  kernel.units = p.B * p.s_q * passes * kernel.tiles;
  int const grid = static_cast<int>(std::min<std::int64_t>(processors, kernel.units));
  require(kernel.units / grid < std::numeric_limits<int>::max(), "too much work for one launch");
  if (p.dtype == DType::kBFloat16) {
    dispatch_head_dim<cutlass::bfloat16_t, kSplit>(p.d_qk, kernel, map, grid, stream);
  } else {
    dispatch_head_dim<cutlass::half_t, kSplit>(p.d_qk, kernel, map, grid, stream);
  }
}

// Batches small enough for one launch.
void launch_chunk(AttnDistParams const& p, bool one_start, int processors, cudaStream_t stream) {
  KernelParams kernel{};
  kernel.k = static_cast<char const*>(p.k);
  kernel.k_stride_b = 2 * p.k_stride_b;
  kernel.k_stride_s = 2 * p.k_stride_s;
  kernel.indices = p.indices;
  kernel.lse = p.lse;
  kernel.topk_length = p.topk_length;
  kernel.out = p.out;
  kernel.s_q = static_cast<int>(p.s_q);
  kernel.s_kv = static_cast<int>(p.s_kv);
  kernel.h_q = static_cast<int>(p.h_q);
  kernel.groups = static_cast<int>(ceil_div(p.h_q, kGroupHeads));
  kernel.topk = static_cast<int>(p.topk);
  kernel.tiles = static_cast<int>(ceil_div(p.topk, kTileKeys));
  kernel.scale_log2 = static_cast<float>(p.sm_scale * 1.4426950408889634074);
  kernel.lse_scale = static_cast<float>(std::log2(p.lse_base));
  kernel.causal = p.q_start != nullptr;
  kernel.key_stride = p.k_stride;
  if (kernel.causal) {
    kernel.q_start_step = one_start ? 0 : 1;
    std::copy_n(p.q_start, one_start ? 1 : p.B, kernel.q_start);
  }
  kernel.bulk_store = p.topk % 4 == 0;
  CUtensorMap const map = encode_q(p, kernel);
  // Passes of 128 heads share each gather between the consumers; a remainder of at most 64 heads has nothing to share.
  std::int64_t const remainder = p.h_q % kPassHeads;
  std::int64_t const wide = p.h_q / kPassHeads + (remainder > kGroupHeads);
  std::int64_t const narrow = remainder > 0 && remainder <= kGroupHeads;
  launch_passes<Split::kHeads>(p, kernel, map, 0, wide, processors, stream);
  launch_passes<Split::kKeys>(p, kernel, map, 2 * wide, narrow, processors, stream);
}

}  // namespace

void attn_dist(AttnDistParams const& params, void* stream) {
  check(params);
  if (params.B == 0 || params.s_q == 0 || params.topk == 0) return;
  int device = 0;
  int processors = 0;
  HTREE_CUDA_CHECK(cudaGetDevice(&device));
  HTREE_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));

  bool const one_start = params.q_start == nullptr ||
                         std::all_of(params.q_start, params.q_start + params.B,
                                     [&](std::int64_t start) { return start == params.q_start[0]; });
  // Rows (batch, query) are counted in 32 bits, starts travel in the kernel's parameters.
  std::int64_t chunk = std::min<std::int64_t>(params.B, std::numeric_limits<int>::max() / params.s_q);
  if (!one_start) chunk = std::min<std::int64_t>(chunk, kMaxStarts);
  std::int64_t const groups = ceil_div(params.h_q, kGroupHeads);
  for (std::int64_t b = 0; b < params.B; b += chunk) {
    AttnDistParams part = params;
    part.B = std::min(chunk, params.B - b);
    part.q = static_cast<char const*>(params.q) + 2 * b * params.q_stride_b;
    part.k = static_cast<char const*>(params.k) + 2 * b * params.k_stride_b;
    part.indices = params.indices + b * params.s_q * params.topk;
    part.lse = params.lse + b * params.s_q * params.h_q;
    if (params.topk_length != nullptr) part.topk_length = params.topk_length + b * params.s_q;
    part.out = params.out + b * groups * params.s_q * params.topk;
    if (params.q_start != nullptr) part.q_start = params.q_start + b;
    launch_chunk(part, one_start, processors, static_cast<cudaStream_t>(stream));
  }
}

}  // namespace htree_cuda

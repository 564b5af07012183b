// Host side of indexer_logits: checks the request, encodes the tensor maps, picks the instantiation.
#include "launch.h"

#include <cudaTypedefs.h>

#include <cstdint>
#include <limits>
#include <string>

#include "host/cuda_check.h"
#include "host/driver.h"
#include "host/math.h"
#include "host/recording.h"
#include "host/window_args.h"
#include "params.h"
#include "config.cuh"

namespace htree_cuda::sm90::indexer {

namespace {

using host::window_args::require;

constexpr char const* kOp = "indexer_logits";
constexpr int kMaxHeads = 64;
constexpr int kFewQueries = 4;  // of a batch element, for each of which keys are read again

int element_bytes(DType dtype) { return dtype == DType::kFloat8E4M3 ? 1 : 2; }

void check(IndexerLogitsParams const& p) {
  host::window_args::check(kOp, p.window, p.B, p.s_q, p.s_kv);
  require(kOp, p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16 || p.dtype == DType::kFloat8E4M3,
          "q must be bfloat16, float16 or float8_e4m3fn");
  require(kOp, p.h_i >= 1 && p.h_i <= kMaxHeads, "h_i must lie in 1 .. 64, got " + std::to_string(p.h_i));
  require(kOp, p.d_i == 64 || p.d_i == 128, "d_i must be 64 or 128, got " + std::to_string(p.d_i));
  require(kOp, p.s_kv <= std::numeric_limits<int>::max() - kSegmentKeys, "s_kv too large");
  require(kOp, host::misalignment(p.q, 16) == 0 && host::misalignment(p.k, 16) == 0, "q and k must be 16-byte aligned");
  struct {
    char const* name;
    std::int64_t size, stride;
    bool may_be_zero;
  } const strides[] = {{"q's batch", p.B, p.q_stride_b, true},    {"q's query", p.s_q, p.q_stride_s, false},
                       {"q's head", p.h_i, p.q_stride_h, false},  {"k's batch", p.B, p.k_stride_b, true},
                       {"k's row", p.s_kv, p.k_stride_s, false}};
  for (auto const& [name, size, stride, may_be_zero] : strides) {
    std::int64_t const bytes = stride * element_bytes(p.dtype);
    require(kOp, size <= 1 || (bytes % 16 == 0 && bytes < (std::int64_t{1} << 40) && (bytes > 0 || (may_be_zero && bytes == 0))),
            std::string(name) + " stride must be a positive multiple of 16 bytes, got " + std::to_string(bytes));
  }
}

struct Dimension {
  std::int64_t size, stride;  // in elements
};

// A tensor map of (column, three dimensions) in boxes of one 128-byte panel of columns. What lies outside reads zeros.
CUtensorMap encode(DType dtype, void const* pointer, std::int64_t columns, Dimension const (&dimensions)[3], int const (&box)[3]) {
  if (host::recording() != nullptr) return {};
  static auto const encode_tiled =
      host::driver_entry_point<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
  int const bytes = element_bytes(dtype);
  cuuint64_t size[4] = {static_cast<cuuint64_t>(columns)};
  cuuint64_t stride_bytes[3];
  cuuint32_t boxes[4] = {static_cast<cuuint32_t>(kPanelRowBytes / bytes)};
  for (int i = 0; i < 3; ++i) {
    bool const one = dimensions[i].size == 1 || dimensions[i].stride == 0;
    size[i + 1] = one ? 1 : dimensions[i].size;
    stride_bytes[i] = static_cast<cuuint64_t>((one ? columns : dimensions[i].stride) * bytes);
    boxes[i + 1] = static_cast<cuuint32_t>(box[i]);
  }
  cuuint32_t const element_strides[4] = {1, 1, 1, 1};
  CUtensorMapDataType const type = dtype == DType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  CUtensorMap map;
  host::check_driver(encode_tiled(&map, type, 4, const_cast<void*>(pointer), size, stride_bytes, boxes, element_strides,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                     "cuTensorMapEncodeTiled");
  return map;
}

template <class Element, int kDim, int kHeads, Split kSplit>
void launch_batches(IndexerLogitsParams const& p, KernelParams kernel, int processors, cudaStream_t stream) {
  using C = Config<Element, kDim, kHeads, false, kSplit>;
  constexpr bool kKeys = kSplit == Split::kKeys;
  CUtensorMap const q_map =
      encode(p.dtype, p.q, p.d_i, {{p.h_i, p.q_stride_h}, {p.s_q, p.q_stride_s}, {p.B, p.q_stride_b}}, {kHeads, C::kQueries, 1});
  CUtensorMap const k_map =
      encode(p.dtype, p.k, p.d_i, {{p.s_kv, p.k_stride_s}, {p.B, p.k_stride_b}, {1, 0}}, {kTileKeys, 1, 1});
  std::int64_t const tiles = host::ceil_div(p.s_q, C::kTileQueries);
  auto const units_of = [&](std::int64_t keys) { return tiles * p.B * host::ceil_div(p.s_kv, keys); };
  std::int64_t segment = kSegmentKeys;
  while (segment > kFewestSegmentKeys && units_of(segment / 2) <= processors) segment /= 2;
  std::int64_t const units = units_of(segment);
  require(kOp, units <= std::numeric_limits<int>::max(), "too much work for one launch");
  kernel.query_tiles = static_cast<int>(tiles);
  kernel.segment_keys = static_cast<int>(segment);
  int const grid = static_cast<int>(units);
  if (host::Recording* const told = host::recording()) {
    told->add("logits",
              std::string("indexer_logits_kernel<") + host::dtype_name(p.dtype) + ", " + std::to_string(kDim) + ", " +
                  std::to_string(kHeads) + (kKeys ? ", few>" : p.h_i == kHeads ? ">" : ", padded>"),
              std::to_string(C::kTileQueries) + (kKeys ? " query x " : " queries x ") + std::to_string(segment) + " keys",
              kKeys          ? "4 queries or fewer: a CTA has one, and its consumers split the keys"
              : kHeads == 32 ? "32 heads or fewer: a consumer multiplies keys with 8 queries at once"
                             : "more than 32 heads: a consumer multiplies keys with 4 queries at once",
              grid);
    return;
  }
  if (!kKeys && p.h_i == kHeads) {
    launch<Element, kDim, kHeads, false, Split::kQueries>(kernel, q_map, k_map, grid, stream);
  } else {
    launch<Element, kDim, kHeads, true, kSplit>(kernel, q_map, k_map, grid, stream);
  }
}

template <class Element, int kDim>
void dispatch_queries(IndexerLogitsParams const& p, KernelParams const& kernel, int processors, cudaStream_t stream) {
  auto const run = p.s_q <= kFewQueries ? launch_batches<Element, kDim, 64, Split::kKeys>  // bound by memory: any heads
                   : p.h_i <= 32        ? launch_batches<Element, kDim, 32, Split::kQueries>
                                        : launch_batches<Element, kDim, 64, Split::kQueries>;
  run(p, kernel, processors, stream);
}

template <class Element>
void dispatch(IndexerLogitsParams const& p, KernelParams const& kernel, int processors, cudaStream_t stream) {
  auto const run = p.d_i == 64 ? dispatch_queries<Element, 64> : dispatch_queries<Element, 128>;
  run(p, kernel, processors, stream);
}

// Batches whose starts fit one launch.
void launch_chunk(IndexerLogitsParams const& p, device::Window const& window, int processors, cudaStream_t stream) {
  KernelParams kernel{};
  kernel.weights = p.weights;
  kernel.weights_stride_b = p.weights_stride_b;
  kernel.weights_stride_s = p.weights_stride_s;
  kernel.weights_stride_h = p.weights_stride_h;
  kernel.q_scale = p.q_scale;
  kernel.q_scale_stride_b = p.q_scale_stride_b;
  kernel.q_scale_stride_s = p.q_scale_stride_s;
  kernel.q_scale_stride_h = p.q_scale_stride_h;
  kernel.k_scale = p.k_scale;
  kernel.k_scale_stride_b = p.k_scale_stride_b;
  kernel.k_scale_stride_s = p.k_scale_stride_s;
  kernel.window = window;
  kernel.out = p.out;
  kernel.out_stride_b = p.out_stride_b;
  kernel.out_stride_s = p.out_stride_s;
  kernel.s_q = static_cast<int>(p.s_q);
  kernel.s_kv = static_cast<int>(p.s_kv);
  kernel.h_i = static_cast<int>(p.h_i);
  kernel.batches = static_cast<int>(p.B);
  kernel.q_coord_b = p.q_stride_b != 0;
  kernel.k_coord_b = p.k_stride_b != 0;
  kernel.fill = p.fill;
  switch (p.dtype) {
    case DType::kBFloat16: return dispatch<cutlass::bfloat16_t>(p, kernel, processors, stream);
    case DType::kFloat16: return dispatch<cutlass::half_t>(p, kernel, processors, stream);
    default: return dispatch<cutlass::float_e4m3_t>(p, kernel, processors, stream);
  }
}

}  // namespace

}  // namespace htree_cuda::sm90::indexer

namespace htree_cuda {

void indexer_logits(IndexerLogitsParams const& p, void* stream) {
  using namespace sm90::indexer;
  check(p);
  if (p.B == 0 || p.s_q == 0 || p.s_kv == 0) return;
  int const processors = host::sm_count();
  host::window_args::for_each_chunk(p.window, p.B, p.s_q, [&](std::int64_t b, std::int64_t batches) {
    IndexerLogitsParams part = p;
    part.B = batches;
    part.q = static_cast<char const*>(p.q) + b * p.q_stride_b * element_bytes(p.dtype);
    part.k = static_cast<char const*>(p.k) + b * p.k_stride_b * element_bytes(p.dtype);
    part.weights = p.weights + b * p.weights_stride_b;
    if (p.q_scale != nullptr) part.q_scale = p.q_scale + b * p.q_scale_stride_b;
    if (p.k_scale != nullptr) part.k_scale = p.k_scale + b * p.k_scale_stride_b;
    part.out = p.out + b * p.out_stride_b;
    launch_chunk(part, host::window_args::at(p.window, p.B, b, batches), processors, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace htree_cuda

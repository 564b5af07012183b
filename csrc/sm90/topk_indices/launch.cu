// Host side of topk_indices: checks the request, picks the kernel, and a CTA for a row or several that divide it.
#include "launch.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "host/recording.h"
#include "host/window_args.h"
#include "params.h"
#include "config.cuh"

namespace htree_cuda::sm90::topk_indices {

namespace {

constexpr char const* kOp = "topk_indices";

void check(TopkIndicesParams const& p) {
  using host::window_args::require;
  host::window_args::check(kOp, p.window, p.B, p.s_q, p.n);
  require(kOp, p.topk >= 1 && p.topk <= (1 << 30), "topk must lie in 1 .. 2^30, got " + std::to_string(p.topk));
  require(kOp, reinterpret_cast<std::uintptr_t>(p.logits) % 4 == 0, "logits must be 4-byte aligned");
}

// CTAs that divide a row: as many as have SMs of their own, where a CTA alone would take several tiles.
int ctas_of_row(int rows, int n, int processors) {
  int ctas = n >= 4 * Config::kTile ? Config::kRowCtas : 1;
  while (ctas > 1 && rows > processors / ctas) ctas /= 2;
  return ctas;
}

}  // namespace

}  // namespace htree_cuda::sm90::topk_indices

namespace htree_cuda {

void topk_indices(TopkIndicesParams const& p, void* stream) {
  using namespace sm90::topk_indices;
  check(p);
  if (p.B == 0 || p.s_q == 0) return;
  int const processors = host::sm_count();
  host::window_args::for_each_chunk(p.window, p.B, p.s_q, [&](std::int64_t b, std::int64_t batches) {
    KernelParams kernel{};
    kernel.logits = p.logits + b * p.stride_b;
    kernel.stride_b = p.stride_b;
    kernel.stride_s = p.stride_s;
    kernel.window = host::window_args::at(p.window, p.B, b, batches);
    kernel.indices = p.indices + b * p.s_q * p.topk;
    kernel.values = p.values == nullptr ? nullptr : p.values + b * p.s_q * p.topk;
    kernel.rows = static_cast<int>(batches * p.s_q);
    kernel.s_q = static_cast<int>(p.s_q);
    kernel.n = static_cast<int>(p.n);
    kernel.topk = static_cast<int>(p.topk);
    auto const cuda_stream = static_cast<cudaStream_t>(stream);
    bool const buffered = p.topk <= Config::kMaxBuffered;
    int const ctas = buffered ? ctas_of_row(kernel.rows, kernel.n, processors) : 1;
    if (host::Recording* const told = host::recording()) {
      bool const divided = ctas > 1;
      told->add("select", divided ? "topk_indices_divided" : buffered ? "topk_indices_buffered" : "topk_indices_rescan",
                divided ? "a part of the logits of a query" : "the logits of a query",
                divided    ? "few rows: a cluster of CTAs divides each, so that more SMs read it"
                : buffered ? "the winners so far fit in shared memory: the row is read once"
                           : "more winners than fit in shared memory: the row is read again for each histogram",
                kernel.rows * ctas);
      return;
    }
    if (ctas > 1) return launch_divided(kernel, ctas, cuda_stream);
    buffered ? launch_buffered(kernel, cuda_stream) : launch_rescan(kernel, cuda_stream);
  });
}

}  // namespace htree_cuda

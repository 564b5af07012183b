// A launcher's call written down instead of launched: what `explain` tells of kernels over index lists. The launcher runs as it
// does for a launch, up to its last step, so that what is told is what would run.
#pragma once

#include <cstdint>
#include <string>

#include "cuda_check.h"
#include "launch_rows.h"

namespace htree_cuda::host {

struct Recording {
  int processors;  // of the GPU that is told of
  LaunchRows rows;

  void add(char const* phase, std::string const& kernel, std::string const& tile, char const* reason, std::int64_t ctas) {
    LaunchRow& row = rows.at(phase, 0, -1, "", kernel, tile, reason);
    row.launches += 1;
    row.ctas += ctas;
  }
};

// What this thread's launchers write to; null, as everywhere but in `explain`: they launch.
Recording* recording();

// SMs of the current device, or of the GPU that is told of.
inline int sm_count() {
  if (Recording const* const told = recording()) return told->processors;
  int device = 0;
  int count = 0;
  HTREE_CUDA_CHECK(cudaGetDevice(&device));
  HTREE_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// A dtype in the name of a kernel.
inline char const* dtype_name(DType dtype) {
  return dtype == DType::kBFloat16 ? "bf16" : dtype == DType::kFloat16 ? "fp16" : "e4m3";
}

}  // namespace htree_cuda::host

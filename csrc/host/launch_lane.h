// A stream that may be one of two that a launcher keeps at work at once.
#pragma once

#include <cuda_runtime_api.h>

namespace htree_cuda::host {

// Where a second stream has work, no grid should come onto the SMs before the one before it has ended, as
// launch_overlapped.cuh has it: a thread block that waits there keeps an SM from the other stream's.
struct LaneStream {
  cudaStream_t stream;
  bool alone;

  LaneStream(cudaStream_t stream, bool alone = true) : stream(stream), alone(alone) {}
};

}  // namespace htree_cuda::host

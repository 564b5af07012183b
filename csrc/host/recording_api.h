// The two calls around a recording (recording.h), for whoever calls the launchers.
#pragma once

#include "params.h"

namespace htree_cuda {

// From begin_recording on, the launchers of kernels over index lists that this thread calls write down what they would
// launch on a GPU with so many SMs, and launch nothing: they need no GPU and look at no pointer. end_recording calls
// `sink` for every kernel, in the order of their first launches; without a sink it only ends.
HTREE_CUDA_API void begin_recording(int processors);
HTREE_CUDA_API void end_recording(LaunchSink sink, void* context);

}  // namespace htree_cuda

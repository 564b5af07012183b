#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "dispatch.h"
#include "host/launch_lane.h"

namespace htree_cuda::sm90::htree_fwd {

// Launches a kernel of dispatch.h's variants; defined in kernel.cuh, instantiated in instantiations/.
template <class Element, int kK, int kV, Pass kPass, int kSelectedQueries, int kEntryQueries>
void launch(Args const& args, Grid const& grid, LaneStream stream);

}  // namespace htree_cuda::sm90::htree_fwd

// The units of this kernel.
#pragma once

#include "device/query_groups.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::sparse_attention {

using query_groups::Unit;
using WorkList = query_groups::WorkList<KernelParams>;

}  // namespace htree_cuda::sm90::sparse_attention

#include "sm90/htree_fwd/kernel.cuh"

namespace htree_cuda::sm90::htree_fwd {

// A score pass reads no values: its kernels name no dtype of values, and their V is nominal.
template void launch<void, 128, 64, Pass::kScore, 1, 1>(Args const&, Grid const&, LaneStream);
template void launch<void, 128, 64, Pass::kScore, 2, 2>(Args const&, Grid const&, LaneStream);
template void launch<void, 128, 64, Pass::kScore, 4, 4>(Args const&, Grid const&, LaneStream);

}  // namespace htree_cuda::sm90::htree_fwd

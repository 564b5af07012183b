#include "kernel.cuh"

namespace htree_cuda::uniting {
namespace {

template <bool kPairs>
void launch(Args const& args, int ctas, cudaStream_t stream) {
  launch_overlapped(unite_kernel<kPairs>, ctas, Config<kPairs>::kThreads, Config<kPairs>::kSharedBytes, stream, args);
}

}  // namespace

void unite(Args const& args, int blocks, cudaStream_t stream) {
  args.by_pairs ? launch<true>(args, args.pairs.count(args.blocks), stream) : launch<false>(args, blocks, stream);
}

}  // namespace htree_cuda::uniting

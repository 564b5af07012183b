#include "kernel.cuh"

namespace htree_cuda::tree::pack {
namespace {

template <class Element, bool kOperandsA>
void launch(Args const& args, cudaStream_t stream) {
  unsigned const blocks = grid_blocks("forward", args.blocks, kWarps);
  if (args.k.dim == 128) {
    launch_overlapped(tree_pack_kernel<Element, 128, kOperandsA>, blocks, kThreads, 0, stream, args);
  } else {
    launch_overlapped(tree_pack_kernel<Element, 64, kOperandsA>, blocks, kThreads, 0, stream, args);
  }
}

}  // namespace

void tree_pack(Args const& args, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat16) {
    args.operands_a ? launch<__half, true>(args, stream) : launch<__half, false>(args, stream);
  } else {
    args.operands_a ? launch<__nv_bfloat16, true>(args, stream) : launch<__nv_bfloat16, false>(args, stream);
  }
}

void make_rotations(float2* rotations, rope::FragmentRotations* fragment_rotations,
                    QueryRotations const& query_rotations, std::int64_t positions, int K, rope::Frequencies frequencies,
                    int* zero, cudaStream_t stream) {
  unsigned const blocks = grid_blocks("forward", positions * (K / 8), kThreads);
  launch_overlapped(rotations_kernel, blocks, kThreads, 0, stream, rotations, fragment_rotations, query_rotations,
                    positions, K, frequencies, zero);
}

}  // namespace htree_cuda::tree::pack

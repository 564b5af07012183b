#include "host/mixed_dims.h"
#include "add_segments.cuh"
#include "distribute.cuh"
#include "kernel.cuh"

namespace htree_cuda::sm90::htree_bwd::pack {
namespace {

template <class Element>
void pack_kv_of(PackKv const& args, cudaStream_t stream) {
  unsigned const blocks = grid_blocks("backward", args.blocks, kWarps);
  if (args.K == 128) {
    launch_overlapped(pack_kv_kernel<Element, 128>, blocks, kThreads, 0, stream, args);
  } else {
    launch_overlapped(pack_kv_kernel<Element, 64>, blocks, kThreads, 0, stream, args);
  }
}

template <class Element>
void pack_queries_of(PackQueries const& args, cudaStream_t stream) {
  unsigned const blocks = grid_blocks("backward", std::int64_t(args.chunk.heads) * args.chunk.rows, kWarps);
  dispatch_dims(args.K, args.V, [&](auto K, auto V) {
    launch_overlapped(pack_queries_kernel<Element, decltype(K)::value, decltype(V)::value>, blocks, kThreads, 0, stream, args);
  });
}

}  // namespace

void pack_kv(PackKv const& args, DType dtype, cudaStream_t stream) {
  dtype == DType::kFloat16 ? pack_kv_of<__half>(args, stream) : pack_kv_of<__nv_bfloat16>(args, stream);
}

void pack_queries(PackQueries const& args, DType dtype, cudaStream_t stream) {
  dtype == DType::kFloat16 ? pack_queries_of<__half>(args, stream) : pack_queries_of<__nv_bfloat16>(args, stream);
}

void add_segments(Args const& args, int K, int V, cudaStream_t stream) {
  std::int64_t pairs = 0;
  for (int l = args.min_entry; l <= args.max_entry; ++l) pairs += std::int64_t(args.chunk.heads) * args.entry[l].pairs;
  unsigned const blocks = grid_blocks("backward", pairs * (kItemNodes * (K + V) / 4), kThreads);
  launch_overlapped(add_segments_kernel, blocks, kThreads, 0, stream, args, K, V);
}

void distribute(Distribute const& args, DType dtype, cudaStream_t stream) {
  std::int64_t const tokens = args.sequences == nullptr ? args.tree.N[0] : args.tokens;
  unsigned const blocks = grid_blocks("backward", args.heads * tokens * (args.dim / 4), kThreads);
  if (args.float32) {
    launch_overlapped(distribute_kernel<float>, blocks, kThreads, 0, stream, args);
  } else if (dtype == DType::kFloat16) {
    launch_overlapped(distribute_kernel<__half>, blocks, kThreads, 0, stream, args);
  } else {
    launch_overlapped(distribute_kernel<__nv_bfloat16>, blocks, kThreads, 0, stream, args);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd::pack

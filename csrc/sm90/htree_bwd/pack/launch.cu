#include <algorithm>
#include <limits>
#include <stdexcept>

#include "host/math.h"
#include "kernel.cuh"
#include "distribute.cuh"
#include "sm90/htree_bwd/reverse_index/kernel.cuh"

namespace htree_cuda::sm90::htree_bwd {
namespace {

unsigned blocks_for(std::int64_t items, int per_block) {
  std::int64_t const blocks = ceil_div(items, std::int64_t(per_block));
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::invalid_argument("backward: B * H_kv * T is too large for one launch (more than 2^31 thread blocks)");
  }
  return static_cast<unsigned>(blocks);
}

template <class Element>
void pack_nodes_of(PackNodes const& args, cudaStream_t stream) {
  unsigned const blocks = blocks_for(args.blocks, kWarps);
  if (args.K == 128) {
    launch_overlapped(pack_nodes_kernel<Element, 128>, blocks, kThreads, 0, stream, args);
  } else {
    launch_overlapped(pack_nodes_kernel<Element, 64>, blocks, kThreads, 0, stream, args);
  }
}

template <class Element, int kK>
void pack_queries_of(PackQueries const& args, cudaStream_t stream) {
  unsigned const blocks = blocks_for(std::int64_t(args.chunk.heads) * args.chunk.rows, kWarps);
  if (args.V == 128) {
    launch_overlapped(pack_queries_kernel<Element, kK, 128>, blocks, kThreads, 0, stream, args);
  } else {
    launch_overlapped(pack_queries_kernel<Element, kK, 64>, blocks, kThreads, 0, stream, args);
  }
}

}  // namespace

void pack_nodes(PackNodes const& args, DType dtype, cudaStream_t stream) {
  dtype == DType::kFloat16 ? pack_nodes_of<__half>(args, stream) : pack_nodes_of<__nv_bfloat16>(args, stream);
}

void pack_queries(PackQueries const& args, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat16) {
    args.K == 128 ? pack_queries_of<__half, 128>(args, stream)
                  : pack_queries_of<__half, 64>(args, stream);
  } else {
    args.K == 128 ? pack_queries_of<__nv_bfloat16, 128>(args, stream)
                  : pack_queries_of<__nv_bfloat16, 64>(args, stream);
  }
}

void index_visits(Index const& args, cudaStream_t stream) {
  std::int64_t const lists = std::int64_t(args.layers) * args.chunk.heads * args.chunk.rows;
  launch_overlapped(index_kernel, blocks_for(lists, kWarps), kThreads, 0, stream, args);
}

void distribute(Distribute const& args, DType dtype, cudaStream_t stream) {
  unsigned const blocks = blocks_for(args.heads * args.tree.N[0] * (args.dim / 4), kThreads);
  if (dtype == DType::kFloat16) {
    launch_overlapped(distribute_kernel<__half>, blocks, kThreads, 0, stream, args);
  } else {
    launch_overlapped(distribute_kernel<__nv_bfloat16>, blocks, kThreads, 0, stream, args);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

// Checks a request, splits its layers and tensors into launches. No allocation, no synchronisation.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "host/dispatch_dtype.h"
#include "params.h"
#include "kernel.cuh"

namespace htree_cuda::tree::pool {
namespace {

[[noreturn]] void reject(std::string const& what) { throw std::invalid_argument("tree_pool: " + what); }

constexpr int kMaxPoolLayers = 64;  // r >= 2 and T < 2^63

struct Tree {
  std::int64_t N[kMaxPoolLayers];      // nodes of each layer
  std::int64_t begin[kMaxPoolLayers];  // where layer l >= 1 begins among the M nodes of the tree
  std::int64_t M;
};

// With how many sequences the room of a layer above the bottom is counted.
std::int64_t with_room(TreePoolParams const& p) { return p.packed ? p.total_k : p.sequence_count; }

Tree make_tree(TreePoolParams const& p) {
  if (p.B < 0 || p.T < 1 || p.H_kv < 1 || p.k.dim < 1 || p.v.dim < 1) {
    reject("B >= 0 and T, H_kv, K, V >= 1 are required, got B " + std::to_string(p.B) + ", T " + std::to_string(p.T) +
           ", H_kv " + std::to_string(p.H_kv) + ", K " + std::to_string(p.k.dim) + ", V " + std::to_string(p.v.dim));
  }
  std::int64_t const r = p.compression_rate;
  if (!is_power_of_two(r) || r < 2 || r > (1 << 30)) {
    reject("compression_rate must be a power of two in 2 .. 2^30, got " + std::to_string(r));
  }
  if (p.layers < 1 || p.layers >= kMaxPoolLayers) reject("layers must be in 1 .. 63, got " + std::to_string(p.layers));
  Tree tree{};
  tree.N[0] = p.T;
  for (int l = 1; l < p.layers; ++l) {
    tree.N[l] = ceil_div(tree.N[l - 1], r);
    tree.begin[l] = tree.M;
    tree.M += p.sequences == nullptr ? tree.N[l] : sequence_nodes(p.total_k, with_room(p), l, log2_room_from(l, p.top_k));
  }
  return tree;
}

bool vectors_fit(TreePoolTensor const& x, int element_bytes) {
  std::int64_t const vec = kVectorBytes / element_bytes;
  auto const pointer = [](void const* p) { return reinterpret_cast<std::uintptr_t>(p) % kVectorBytes == 0; };
  return pointer(x.in) && pointer(x.tree) && x.dim % vec == 0 && x.stride_b % vec == 0 && x.stride_t % vec == 0 &&
         x.stride_h % vec == 0;
}

// Layers first + 1 .. first + fused of one or two tensors. Returns how many layers were pooled.
template <class Config>
int launch_layers(TreePoolParams const& p, Tree const& tree, TreePoolTensor const* const* tensors, int count, int first,
                  cudaStream_t stream) {
  using Element = typename Config::Element;
  int const log2_r = log2_floor(p.compression_rate);

  std::int64_t widest = 0;
  for (int i = 0; i < count; ++i) widest = std::max(widest, p.H_kv * (tensors[i]->dim / Config::kVec));
  if (p.H_kv > std::numeric_limits<int>::max() || widest > std::numeric_limits<int>::max() - kMaxColumns) {
    reject("H_kv times the head dimension must stay below 2^31");
  }
  int log2_columns = 0;
  while ((1 << log2_columns) < kMaxColumns && (1 << log2_columns) < widest) ++log2_columns;

  // Nodes of a tile: 256 tokens at least, one node for every slot at least, 48 KB of shared memory at most.
  int const log2_slots = log2_floor(kThreads) - log2_columns;
  int const log2_nodes = std::max(std::min(std::max(8 - log2_r, 3), 6), log2_slots);
  int const fused = std::min(p.layers - 1 - first, 1 + log2_nodes / log2_r);

  Args<Element> args{};
  args.B = p.B;
  args.H_kv = static_cast<int>(p.H_kv);
  args.log2_r = log2_r;
  args.log2_columns = log2_columns;
  args.log2_nodes = log2_nodes;
  args.fused = fused;
  for (int l = 0; l <= fused; ++l) {
    args.N[l] = tree.N[first + l];
    args.tree_node[l] = tree.begin[first + l];
  }
  args.tiles = ceil_div(args.N[1], std::int64_t(1) << log2_nodes);
  if (p.sequences != nullptr) {
    args.sequences = static_cast<Sequence const*>(p.sequences);
    args.sequence_count = static_cast<std::int32_t>(p.sequence_count);
    args.first = first;
    args.packed = p.packed;
    for (int l = 0; l <= fused; ++l) args.log2_from[l] = log2_room_from(first + l, p.top_k);
    args.tiles = (p.total_k >> (log2_r * (first + 1) + log2_nodes)) +
                 sequences_with_room(p.total_k, with_room(p), args.log2_from[1]);
    args.tiles = std::max<std::int64_t>(args.tiles, 1);
  }

  std::int64_t groups = 0;
  for (int i = 0; i < count; ++i) {
    TreePoolTensor const& x = *tensors[i];
    Job<Element>& job = args.jobs[i];
    job.tree = static_cast<Element*>(x.tree);
    job.tree_stride_h = tree.M * x.dim;
    if (first == 0) {
      job.in = static_cast<Element const*>(x.in);
      job.stride_b = x.stride_b;
      job.stride_t = x.stride_t;
      job.stride_h = x.stride_h;
    } else {
      job.in = job.tree + tree.begin[first] * x.dim;
      job.stride_b = p.H_kv * job.tree_stride_h;
      job.stride_t = x.dim;
      job.stride_h = job.tree_stride_h;
    }
    job.dim = static_cast<int>(x.dim);
    job.columns_per_head = static_cast<int>(x.dim / Config::kVec);
    job.column_groups = static_cast<int>(ceil_div(p.H_kv * job.columns_per_head, std::int64_t(1) << log2_columns));
    groups += job.column_groups;
  }

  std::int64_t const max_blocks = std::numeric_limits<int>::max();
  if (args.tiles > max_blocks || groups > max_blocks || groups * args.tiles > max_blocks / p.B) {
    reject("B * T * H_kv * (K + V) is too large for one launch (more than 2^31 tiles)");
  }
  unsigned const blocks = static_cast<unsigned>(groups * args.tiles * p.B);

  std::size_t const shared_nodes = fused > 1 ? (1 << log2_nodes) + (1 << (log2_nodes - log2_r)) : 0;
  std::size_t const shared_bytes = (shared_nodes << log2_columns) * Config::kAccess;
  launch_overlapped(tree_pool_kernel<Config>, blocks, kThreads, shared_bytes, stream, args);
  return fused;
}

template <class Config>
void launch(TreePoolParams const& p, Tree const& tree, TreePoolTensor const* const* tensors, int count,
            cudaStream_t stream) {
  for (int first = 0; first < p.layers - 1;) first += launch_layers<Config>(p, tree, tensors, count, first, stream);
}

}  // namespace

}  // namespace htree_cuda::tree::pool

namespace htree_cuda {

void tree_pool(TreePoolParams const& p, void* stream) {
  using namespace tree::pool;
  Tree const tree = make_tree(p);
  if (p.layers == 1 || p.B == 0) return;
  dispatch_dtype("tree_pool", p.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::type;
    using Vector = Config<Element, kVectorBytes / int(sizeof(Element))>;
    using Scalar = Config<Element, 1>;
    // K and V share their launches unless only one of them can be read 16 bytes at a time.
    TreePoolTensor const* vectors[2];
    TreePoolTensor const* scalars[2];
    int n_vectors = 0;
    int n_scalars = 0;
    for (TreePoolTensor const* x : {&p.k, &p.v}) {
      if (vectors_fit(*x, int(sizeof(Element)))) {
        vectors[n_vectors++] = x;
      } else {
        scalars[n_scalars++] = x;
      }
    }
    cudaStream_t const s = static_cast<cudaStream_t>(stream);
    if (n_vectors > 0) launch<Vector>(p, tree, vectors, n_vectors, s);
    if (n_scalars > 0) launch<Scalar>(p, tree, scalars, n_scalars, s);
  });
}

}  // namespace htree_cuda

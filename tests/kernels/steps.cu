// The helpers of the forward that have no binding of their own, for tests of one of them alone.
#include <exception>
#include <string>

#include "tree/build_union.h"
#include "tree/select.h"

// One block of at most 12 queries of one head, in memory of the caller. They return what went wrong.
#define EXPORT extern "C" __attribute__((visibility("default")))

template <class Run>
static char const* attempt(Run const& run) {
  static thread_local std::string error;
  try {
    run();
    error.clear();
  } catch (std::exception const& x) {
    error = x.what();
  }
  return error.c_str();
}

EXPORT char const* emulator_select(long long T_q, long long q_start, int layer, int layers, int top_k,
                                   float const* importance, long long width, std::int32_t const* parents,
                                   std::int32_t* nodes, std::uint16_t* expanded, std::int32_t* selection) {
  htree_cuda::tree::select::Args args{};
  args.tiles = {0, 1, T_q, q_start};
  args.H_kv = 1;
  args.layer = layer;
  args.layers = layers;
  args.top_k = top_k;
  args.importance = importance;
  args.width = width;
  args.max_candidates = width;
  args.parents_in = parents;
  args.nodes = nodes;
  args.expanded = expanded;
  args.selection = selection;
  return attempt([&] { htree_cuda::tree::select::select(args, htree_cuda::tree::kQueryTile, nullptr); });
}

// Of one head, whose blocks are one group.
EXPORT char const* emulator_build_union(long long T_q, long long q_start, int layer, int layers, int top_k, int group,
                                  std::int32_t const* nodes, std::int32_t* union_nodes, void* union_masks,
                                  std::int32_t* union_count) {
  int const blocks = static_cast<int>((T_q + htree_cuda::tree::kQueryTile - 1) / htree_cuda::tree::kQueryTile);
  htree_cuda::tree::build_union::Args args{};
  args.tiles = {0, static_cast<std::uint32_t>(blocks), T_q, q_start};
  args.layer = layer;
  args.layers = layers;
  args.top_k = top_k;
  args.parents = ((q_start + T_q - 1) >> (4 * (layer + 1))) + 1;
  args.nodes = nodes;
  args.union_nodes = union_nodes;
  args.union_masks = union_masks;
  args.union_count = union_count;
  args.sets = htree_cuda::tree::TileSets::of(args.tiles, 0, blocks, group);
  return attempt([&] { htree_cuda::tree::build_union::build_union(args, nullptr); });
}

// The work of one CTA: queries against a segment of the keys.
#pragma once

#include "config.cuh"

namespace htree_cuda::sm90::indexer {

struct Work {
  int b;
  int query;      // the first
  int begin, end;  // keys of the segment
  int first_key;  // of the first tile; a multiple of kTileKeys
  int tiles;      // that hold a visible key

  // Before the windows are known.
  template <class C>
  static __device__ __forceinline__ Work of(KernelParams const& p, int unit) {
    Work work;
    int const tile = unit % p.query_tiles;
    int const rest = unit / p.query_tiles;
    work.b = rest % p.batches;
    work.query = tile * C::kTileQueries;
    work.begin = rest / p.batches * p.segment_keys;
    work.end = min(work.begin, p.s_kv - p.segment_keys) + p.segment_keys;
    return work;
  }

  // Writes the windows of all queries; a barrier of the CTA lies before their use.
  template <class C>
  __device__ __forceinline__ void write_windows(KernelParams const& p, typename C::SharedStorage& shared) const {
    if (threadIdx.x < C::kTileQueries) {
      int const s = query + static_cast<int>(threadIdx.x);
      KeyRange const range = s < p.s_q ? key_range(p.window, b, s, p.s_kv) : KeyRange{0, 0};
      shared.first[threadIdx.x] = range.first;
      shared.end[threadIdx.x] = range.end;
    }
  }

  // The tiles that some query sees.
  template <class C>
  __device__ __forceinline__ void find_tiles(typename C::SharedStorage const& shared) {
    int from = end;
    int to = begin;
#pragma unroll 1
    for (int i = 0; i < C::kTileQueries; ++i) {
      if (shared.first[i] < shared.end[i]) {
        from = min(from, shared.first[i]);
        to = max(to, shared.end[i]);
      }
    }
    first_key = max(from, begin) / kTileKeys * kTileKeys;
    to = min(to, end);
    tiles = to > first_key ? (to - first_key + kTileKeys - 1) / kTileKeys : 0;
    first_key = uniform(first_key);
    tiles = uniform(tiles);
  }
};

}  // namespace htree_cuda::sm90::indexer

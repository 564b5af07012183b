// What the CTAs of a cluster hand each other: stores into the shared memory of another CTA (st.async), each completing its
// bytes of an mbarrier there. A CTA waits for what it needs and never for the cluster as a whole.
//
// A message has one sender or all CTAs as senders and always the same bytes, so its mbarrier expects the next one as soon as one is
// complete. No buffer is written before it was read:
//   sums      of a layer reach a CTA from others that have its counts of the layer above, which it sends after it has read the sums
//             of the layer above
//   counts    of a round follow those of the round before from every CTA, but not everybody has read those yet: two buffers, two
//             mbarriers. The first round of a layer follows the sums of every CTA
//   nodes     of a layer follow the sums of every CTA, which it sends after it has read the nodes of two layers above: two buffers
//   outputs   have a place of their own
// A CTA may end when it has its outputs, the last that anybody sends it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/barriers.cuh"
#include "device/ptx.cuh"
#include "args.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::htree_decode {

template <class Cfg>
__device__ __forceinline__ uint32_t inbox(Smem<Cfg>& smem, Message message) {
  return ptx::shared_address(&smem.inboxes[static_cast<int>(message)]);
}

// What a CTA is sent of a message, by all CTAs together.
template <class Cfg>
__device__ __forceinline__ uint32_t message_bytes(Args const& args, Message message) {
  Split const split(args);
  switch (message) {
    case Message::kSums: return split.parts() * args.G * static_cast<uint32_t>(sizeof(float2));
    case Message::kNodes: return args.top_k / split.ctas() * static_cast<uint32_t>(sizeof(std::int32_t));
    case Message::kOutputs:
      return args.G * (split.parts() * static_cast<uint32_t>(sizeof(float2)) +
                       split.parts_of_cta() * Cfg::kV * static_cast<uint32_t>(sizeof(float)));
    default: return split.ctas() * kBins * static_cast<uint32_t>(sizeof(std::uint16_t));
  }
}

// One thread calls this, for the barriers of pairs as well. Other CTAs may send once the barrier of the cluster has completed.
template <class Cfg>
__device__ __forceinline__ void open_inboxes(Args const& args, Smem<Cfg>& smem) {
#pragma unroll
  for (int i = 0; i < kMessages; ++i) {
    Message const message = static_cast<Message>(i);
    barriers::mbarrier_init(inbox(smem, message), 1);
    barriers::mbarrier_arrive_expect_bytes(inbox(smem, message), message_bytes<Cfg>(args, message));
  }
#pragma unroll
  for (std::uint64_t& pair : smem.pairs) barriers::mbarrier_init(ptx::shared_address(&pair), 32 * kPartners);
  barriers::mbarrier_init(ptx::shared_address(&smem.bin_warps), 32 * kBinWarps);
  barriers::mbarrier_init_fence();
}

// Waits until a message is complete.
template <class Cfg>
__device__ __forceinline__ void receive(Args const& args, Smem<Cfg>& smem, Message message, int warp) {
  uint32_t const thread = 32 * warp + ptx::lane_index();
  uint32_t const phases = smem.phases[thread];
  int const i = static_cast<int>(message);
  barriers::mbarrier_wait(inbox(smem, message), phases >> i & 1u, "a message of the cluster");
  smem.phases[thread] = phases ^ 1u << i;
  if (thread == 0) {
    barriers::mbarrier_arrive_expect_bytes(inbox(smem, message), message_bytes<Cfg>(args, message));
  }
}

// Some warps of the CTA meet. Not at a named barrier: beside those racecheck reports accesses that __syncthreads separates
// (docs/sanitizers.md). `phase` is which bit of a thread's phases is the barrier's.
template <class Cfg>
__device__ __forceinline__ void meet(Smem<Cfg>& smem, std::uint64_t const& barrier, int phase, int warp) {
  uint32_t const thread = 32 * warp + ptx::lane_index();
  uint32_t const address = ptx::shared_address(&barrier);
  uint32_t const phases = smem.phases[thread];
  barriers::mbarrier_arrive(address);
  barriers::mbarrier_wait(address, phases >> phase & 1u, "other warps");
  smem.phases[thread] = phases ^ 1u << phase;
}

template <class Cfg>
__device__ __forceinline__ void meet_partner(Smem<Cfg>& smem, int warp) {
  meet(smem, smem.pairs[warp / kPartners], kMessages, warp);
}

template <class Cfg>
__device__ __forceinline__ void meet_bin_warps(Smem<Cfg>& smem, int warp) {
  meet(smem, smem.bin_warps, kMessages + 1, warp);
}

}  // namespace htree_cuda::sm90::htree_decode

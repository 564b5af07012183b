// Every barrier operation of the kernels. Each carries a "memory" clobber, so that the compiler moves no access to
// shared or global memory across it: CUTLASS 4.2's own barrier classes lack it (cutlass/arch/barrier.h) and are not
// used here.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#ifdef HTREE_CUDA_DEBUG
#include <cstdio>
#endif

#include "sm90.cuh"

namespace htree_cuda::device::barriers {

// All `threads` threads that name barrier `id` (0 .. 15; 0 is __syncthreads') wait for each other, and their earlier
// writes to shared and global memory are visible to one another afterwards. `threads` is a multiple of 32.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// This thread's part of named_sync without the waiting: its earlier writes are visible to those who wait.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// named_sync, and whether any of the threads said `value`.
__device__ __forceinline__ bool named_sync_or(int id, int threads, bool value) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred own, any;\n"
      "setp.ne.u32 own, %3, 0;\n"
      "barrier.cta.red.or.pred any, %1, %2, own;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(value))
      : "memory");
  return any != 0;
}

// All threads of the cluster wait for each other: each arrives, and later waits. What a thread did before it arrived is
// visible to others once they have waited.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- mbarrier: addresses are shared-memory addresses of 8-byte aligned 64-bit words ------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the async proxy (bulk copies); __syncthreads follows.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// One arrival at a barrier of any CTA of the cluster: `barrier` is an address of the cluster's shared memory. It says only that
// this thread has read what may be overwritten and makes nothing visible that it wrote: a release for the whole cluster would
// wait until all earlier reductions to global memory have ended, some 900 cycles. What was read has to be in registers, or
// multiplied, for the arrival overtakes loads from shared memory that are under way: once_read makes it wait.
__device__ __forceinline__ void mbarrier_arrive_cluster_having_read(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// `barrier`, computed in a way that takes x of all lanes of the warp, which must have their x by then.
__device__ __forceinline__ uint32_t once_read(uint32_t barrier, uint32_t x) {
  return barrier + (x ^ __shfl_xor_sync(kFullWarp, x, 0));
}

// One arrival of a warp, by lane 0. Whatever the other lanes read must already be in their registers.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Gives a stage of a ring back: one arrival of a warp once all of its lanes have read the stage.
__device__ __forceinline__ void release(uint32_t empty) {
  __syncwarp();
  warp_arrive(empty);
}

// The current phase also waits for `bytes` of bulk copies; does not arrive.
__device__ __forceinline__ void mbarrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives once; the current phase also waits for `bytes` of bulk copies.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// How a thread waits. Without a hint the hardware gives up after some 15 cycles: a waiting warp then executes more
// instructions than a working one, which takes power that the clock of the others could use, but needs fewer registers.
enum class Waiting { kSuspended, kPolling };
inline constexpr uint32_t kSuspendNanoseconds = 10'000'000;

// True when the phase of parity `parity` has completed; waits, but not for ever, before it says no.
template <Waiting kWaiting = Waiting::kSuspended>
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  if constexpr (kWaiting == Waiting::kSuspended) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity), "r"(kSuspendNanoseconds)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
  return done != 0;
}

// The same without waiting at all.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Until the phase of parity `parity` has completed. Debug builds (HTREE_CUDA_DEBUG) trap after about two
// seconds and print `name`, because a hung kernel can only be ended with its process.
template <Waiting kWaiting = Waiting::kSuspended>
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity, [[maybe_unused]] char const* name) {
#ifdef HTREE_CUDA_DEBUG
  long long const start = clock64();
  while (!mbarrier_try_wait<kWaiting>(barrier, parity)) {
    if (clock64() - start > 4'000'000'000LL) {
      printf("htree_cuda: block %d thread %d waits for %s, parity %u\n", blockIdx.x, threadIdx.x, name, parity);
      asm volatile("trap;");
    }
  }
#else
  while (!mbarrier_try_wait<kWaiting>(barrier, parity)) {
  }
#endif
}

}  // namespace htree_cuda::device::barriers

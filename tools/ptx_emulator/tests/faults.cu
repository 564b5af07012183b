// Small kernels for tools/ptx_emulator/tests/test_emulator.py, one right and one wrong of a kind: what the emulator must run, and what it
// must notice. Inline assembly, so that nothing of the package is needed.
#include <cuda_runtime.h>

#include <cstdint>

namespace faults {

__device__ inline uint32_t address(void const* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
__device__ inline void init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}
__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
__device__ inline void expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}
__device__ inline void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(address(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
}
__device__ inline void copy16(void* to, void const* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}
__device__ inline void bulk_copy(void* to, void const* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
               "l"(from), "r"(bytes), "r"(address(barrier))
               : "memory");
}
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// out = in through shared memory: cp.async by one warp, handed over by an mbarrier, stored by a bulk copy of another.
enum class Relay { kRight, kNoFence, kNoWait, kRewritten, kNoArrival };

template <Relay kind>
__global__ void relay(float const* in, float* out) {
  __shared__ alignas(128) float stage[128];
  __shared__ uint64_t full;
  int const lane = threadIdx.x % 32;
  if (threadIdx.x == 0) init(&full, 1);
  __syncthreads();
  if (threadIdx.x < 32) {
    copy16(stage + 4 * lane, in + 4 * lane);
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (kind != Relay::kNoWait) asm volatile("cp.async.wait_group 0;" ::: "memory");
    if (kind != Relay::kNoFence) fence_async();
    __syncwarp();
    if (lane == 0 && kind != Relay::kNoArrival) arrive(&full);
  } else {
    wait(&full, 0);
    if (lane == 0) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" ::"l"(out), "r"(address(stage)) : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      if (kind == Relay::kRewritten) stage[5] = 1.0f;
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
  }
}

// out[i] = in[i + shift]: where is checked.
__global__ void fetch(float const* in, float* out, int shift) { out[threadIdx.x] = in[threadIdx.x + shift]; }

__global__ void fetch_shared(float* out, int shift) {
  __shared__ float stage[32];
  stage[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = stage[threadIdx.x + shift];
}

// 64 threads count: with atomics, or by reading and writing.
template <bool kAtomic>
__global__ void count(float* out) {
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  for (int i = 0; i < 20; ++i) {
    if (kAtomic) {
      atomicAdd(&total, 1);
    } else {
      *static_cast<int volatile*>(&total) = *static_cast<int volatile*>(&total) + 1;
    }
  }
  __syncthreads();
  out[threadIdx.x] = static_cast<float>(total);
}

// Sums over a warp; the wrong one leaves half of the lanes out.
template <bool kAll>
__global__ void warp_sum(float const* in, float* out) {
  float sum = in[threadIdx.x];
  if (kAll || threadIdx.x < 16) {
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  }
  out[threadIdx.x] = sum;
}

// out[64][8] = A[64][64] B[8][64]^T, bf16, K-major with the 128-byte swizzle, by one warpgroup.
// kHandedBack and kReleased write over an operand once their own wait has passed: after a barrier with the other warps, and
// without.
enum class Product { kRight, kReadEarly, kRewritten, kNoFence, kHandedBack, kReleased, kNoProductFence, kDisagree, kMissing };

template <Product kind>
__global__ void product(uint16_t const* a, uint16_t const* b, float* out) {
  extern __shared__ __align__(1024) uint16_t shared[];
  int const thread = threadIdx.x;
  for (int i = thread; i < 72 * 64; i += 128) {
    int const row = i / 64, column = i % 64;
    int const at = row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8;
    shared[at] = row < 64 ? a[i] : b[i - 64 * 64];
  }
  if (kind != Product::kNoFence) fence_async();
  __syncthreads();
  float acc[4] = {};
  constexpr uint64_t kHigh = (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
  if (kind != Product::kNoProductFence) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    int const step = kind == Product::kDisagree && thread / 32 == 2 ? k ^ 1 : k;
    uint64_t const da = kHigh | (address(shared) + 32 * k) >> 4, db = kHigh | (address(shared) + 64 * 128 + 32 * step) >> 4;
    if (kind == Product::kMissing && k == 3 && thread / 32 == 2) break;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "l"(da), "l"(db), "r"(k));
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  float early = acc[0];
  asm volatile("" : "+f"(early)::"memory");
  __syncthreads();  // every warp has issued its part
  if (kind == Product::kRewritten && thread == 0) shared[64 * 64] = 0x7f7f;
  __syncthreads();
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])::"memory");
  if (kind == Product::kHandedBack) __syncthreads();
  if ((kind == Product::kHandedBack || kind == Product::kReleased) && thread == 0) shared[64 * 64] = 0x7f7f;
  int const row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  out[row * 8 + column] = kind == Product::kReadEarly ? early : acc[0];
  out[row * 8 + column + 1] = acc[1];
  out[(row + 8) * 8 + column] = acc[2];
  out[(row + 8) * 8 + column + 1] = acc[3];
}

// out[64][8] = A[16][64]^T B[16][64] of the first eight columns of B, bf16, both operands MN-major, by one warpgroup.
__global__ void transposed_product(uint16_t const* a, uint16_t const* b, float* out) {
  extern __shared__ __align__(1024) uint16_t shared[];
  int const thread = threadIdx.x;
  for (int i = thread; i < 32 * 64; i += 128) {
    int const row = i / 64, column = i % 64;
    shared[row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8] = row < 16 ? a[i] : b[i - 16 * 64];
  }
  fence_async();
  __syncthreads();
  float acc[4] = {};
  constexpr uint64_t kHigh = (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  uint64_t const da = kHigh | address(shared) >> 4, db = kHigh | (address(shared) + 16 * 128) >> 4;
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 1, 1;\n"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "l"(da), "l"(db));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])::"memory");
  int const row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + column + i % 2] = acc[i];
}

// A product of a warp with sums in fp16: a [16, kDepth], b [8, kDepth], out [16, 8].
template <int kDepth>
__global__ void half_product(uint16_t const* a, uint16_t const* b, float* out) {
  int const row = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
  auto const pair = [&](uint16_t const* x, int i, int k) {
    return *reinterpret_cast<uint32_t const*>(x + i * kDepth + k + column);
  };
  uint32_t d[2];
  if constexpr (kDepth == 8) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%5, %5};"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(pair(a, row, 0)), "r"(pair(a, row + 8, 0)), "r"(pair(b, row, 0)), "r"(0));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %8};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(pair(a, row, 0)), "r"(pair(a, row + 8, 0)), "r"(pair(a, row, 8)), "r"(pair(a, row + 8, 8)), "r"(pair(b, row, 0)),
          "r"(pair(b, row, 8)), "r"(0));
  }
  for (int i = 0; i < 4; ++i) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(d[i / 2] >> i % 2 * 16)));
    out[(row + i / 2 * 8) * 8 + column + i % 2] = x;
  }
}

// out = in through shared memory, 64 threads: what orders the accesses.
enum class Order { kBarrier, kNoBarrier, kWarp, kShuffle, kHandedOver, kReadFirst, kGivenBack, kGivenBackEarly };

template <Order kind>
__global__ void order(float const* in, float* out) {
  __shared__ float stage[64];
  __shared__ uint64_t full, empty;
  int const thread = threadIdx.x;
  if (thread == 0) {
    init(&full, 32);
    init(&empty, 32);
  }
  __syncthreads();
  float volatile* const words = stage;
  if (kind == Order::kBarrier || kind == Order::kNoBarrier) {
    words[thread] = in[thread];
    if (kind == Order::kBarrier) __syncthreads();
    out[thread ^ 32] = words[thread ^ 32];
  } else if (kind == Order::kWarp || kind == Order::kShuffle) {
    words[thread] = in[thread];
    if (kind == Order::kWarp) __syncwarp();
    float const before = __shfl_sync(0xffffffffu, in[thread], thread % 32 ^ 1);
    out[thread ^ 1] = before == words[thread ^ 1] ? before : 0;
  } else if (thread < 32) {
    words[thread] = in[thread];
    arrive(&full);
    if (kind == Order::kGivenBack || kind == Order::kGivenBackEarly) {
      wait(&empty, 0);
      words[thread] = 0;
    }
    out[thread] = in[thread];
  } else {
    if (kind == Order::kReadFirst) {
      out[thread] = words[thread - 32];
      wait(&full, 0);
    } else {
      wait(&full, 0);
      if (kind == Order::kGivenBackEarly) arrive(&empty);
      out[thread] = words[thread - 32];
      if (kind == Order::kGivenBack) arrive(&empty);
    }
  }
}

// Each block leaves its sum for the next launch, or reads the other's at once.
template <bool kSameLaunch>
__global__ void pass_on(float const* in, float* out) {
  out[32 * blockIdx.x + threadIdx.x] = in[32 * blockIdx.x + threadIdx.x];
  if (kSameLaunch && blockIdx.x == 1) out[32 + threadIdx.x] = out[threadIdx.x ^ 1];
}

// A row comes by a bulk copy where ordinary stores were: fenced before it, or not.
template <bool kFenced>
__global__ void overwrite(float const* in, float* out) {
  __shared__ alignas(128) float stage[32];
  __shared__ uint64_t full;
  int const lane = threadIdx.x;
  if (lane == 0) init(&full, 1);
  stage[lane] = 1.0f;
  if (kFenced) fence_async();
  __syncthreads();
  if (lane == 0) {
    expect(&full, 128);
    bulk_copy(stage, in, 128, &full);
  }
  wait(&full, 0);
  out[lane] = stage[lane];
}

// A warp asks again and again, and so is never blocked, for what another does once its copy has landed.
__global__ void ask_again(float const* in, float* out) {
  __shared__ alignas(128) float stage[32];
  __shared__ uint64_t full;
  __shared__ int stored;
  int const lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init(&full, 1);
    stored = 0;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    if (lane == 0) {
      expect(&full, 128);
      bulk_copy(stage, in, 128, &full);
    }
    wait(&full, 0);
    out[lane] = stage[lane];
    __syncwarp();
    if (lane == 0) atomicAdd(&stored, 1);
  } else if (lane == 0) {
    while (atomicAdd(&stored, 0) == 0) __nanosleep(200);
  }
}

// A producer warpgroup gives registers to two others; the launch granted 168 a thread.
enum class Registers { kRight, kTooMany, kDisagree };

template <Registers kind>
__global__ void __launch_bounds__(384, 1) registers(float const* in, float* out) {
  if (threadIdx.x < 128) {
    if (kind == Registers::kTooMany) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    } else if (kind == Registers::kDisagree && threadIdx.x >= 96) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  }
  out[threadIdx.x] = in[threadIdx.x];
}

// Two blocks of a cluster: each hands its half of `in` to the other by a copy between their shared memories.
__global__ void __cluster_dims__(2, 1, 1) exchange(float const* in, float* out) {
  __shared__ alignas(128) float mine[32];
  __shared__ alignas(128) float theirs[32];
  __shared__ uint64_t full;
  int const lane = threadIdx.x;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (lane == 0) {
    init(&full, 1);
    expect(&full, 128);
  }
  mine[lane] = in[32 * rank + lane];
  fence_async();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (lane == 0) {
    uint32_t to, barrier;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address(theirs)), "r"(rank ^ 1u));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(address(&full)), "r"(rank ^ 1u));
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];" ::"r"(to),
                 "r"(address(mine)), "r"(barrier)
                 : "memory");
  }
  wait(&full, 0);
  out[32 * rank + lane] = theirs[lane];
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Two blocks of a cluster: each reads the other's half of `in` from its shared memory. Wrong: a block may end before it
// is read.
template <bool kRight>
__global__ void __cluster_dims__(2, 1, 1) exchange_loads(float const* in, float* out) {
  __shared__ float mine[32];
  int const lane = threadIdx.x;
  uint32_t rank, from;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  mine[lane] = in[32 * rank + lane];
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  float x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(from) : "r"(address(&mine[lane])), "r"(rank ^ 1u));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  out[32 * rank + lane] = x;
  if constexpr (kRight) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
}

// The exchange by a store of every lane that completes bytes of the other block's barrier; wrong: the barrier expects half.
template <bool kRight>
__global__ void __cluster_dims__(2, 1, 1) exchange_stores(float const* in, float* out) {
  __shared__ alignas(128) float theirs[32];
  __shared__ uint64_t full;
  int const lane = threadIdx.x;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (lane == 0) {
    init(&full, 1);
    expect(&full, kRight ? 128 : 64);
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  uint32_t to, barrier;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address(&theirs[lane])), "r"(rank ^ 1u));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(address(&full)), "r"(rank ^ 1u));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
               "f"(in[32 * rank + lane]), "r"(barrier)
               : "memory");
  wait(&full, 0);
  out[32 * rank + lane] = theirs[lane];
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// out = in by a grid that may begin before the one before it has ended.
enum class Follow { kRight, kNoWait, kNextFirst };

template <Follow kind>
__global__ void follow(float const* in, float* out) {
  if (kind == Follow::kNextFirst) asm volatile("griddepcontrol.launch_dependents;");
  if (kind != Follow::kNoWait) asm volatile("griddepcontrol.wait;" ::: "memory");
  if (kind == Follow::kRight) asm volatile("griddepcontrol.launch_dependents;");
  out[threadIdx.x] = in[threadIdx.x];
}

void launch_following(void (*kernel)(float const*, float*), float const* in, float* out) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = 1;
  config.blockDim = 32;
  config.attrs = &overlap;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, in, out);
}

}  // namespace faults

using namespace faults;

extern "C" __attribute__((visibility("default"))) char const* run_fault(int which, void const* a, void const* b, void* result,
                                                                        int number) {
  auto const* in = static_cast<float const*>(a);
  auto* out = static_cast<float*>(result);
  auto const* x = static_cast<uint16_t const*>(a);
  auto const* y = static_cast<uint16_t const*>(b);
  switch (which) {
    case 0: relay<Relay::kRight><<<1, 64>>>(in, out); break;
    case 1: relay<Relay::kNoFence><<<1, 64>>>(in, out); break;
    case 2: relay<Relay::kNoWait><<<1, 64>>>(in, out); break;
    case 3: relay<Relay::kRewritten><<<1, 64>>>(in, out); break;
    case 4: relay<Relay::kNoArrival><<<1, 64>>>(in, out); break;
    case 10: fetch<<<1, 32>>>(in, out, number); break;
    case 11: fetch_shared<<<1, 32>>>(out, number); break;
    case 20: count<true><<<1, 64>>>(out); break;
    case 21: count<false><<<1, 64>>>(out); break;
    case 30: warp_sum<true><<<1, 32>>>(in, out); break;
    case 31: warp_sum<false><<<1, 32>>>(in, out); break;
    case 40: product<Product::kRight><<<1, 128, 9216>>>(x, y, out); break;
    case 41: product<Product::kReadEarly><<<1, 128, 9216>>>(x, y, out); break;
    case 42: product<Product::kRewritten><<<1, 128, 9216>>>(x, y, out); break;
    case 43: product<Product::kNoFence><<<1, 128, 9216>>>(x, y, out); break;
    case 52: transposed_product<<<1, 128, 4096>>>(x, y, out); break;
    case 49: half_product<16><<<1, 32>>>(x, y, out); break;
    case 51: half_product<8><<<1, 32>>>(x, y, out); break;
    case 44: product<Product::kHandedBack><<<1, 128, 9216>>>(x, y, out); break;
    case 45: product<Product::kReleased><<<1, 128, 9216>>>(x, y, out); break;
    case 46: product<Product::kNoProductFence><<<1, 128, 9216>>>(x, y, out); break;
    case 47: product<Product::kDisagree><<<1, 128, 9216>>>(x, y, out); break;
    case 48: product<Product::kMissing><<<1, 128, 9216>>>(x, y, out); break;
    case 60: order<Order::kBarrier><<<1, 64>>>(in, out); break;
    case 61: order<Order::kNoBarrier><<<1, 64>>>(in, out); break;
    case 62: order<Order::kWarp><<<1, 64>>>(in, out); break;
    case 63: order<Order::kShuffle><<<1, 64>>>(in, out); break;
    case 64: order<Order::kHandedOver><<<1, 64>>>(in, out); break;
    case 65: order<Order::kReadFirst><<<1, 64>>>(in, out); break;
    case 66: order<Order::kGivenBack><<<1, 64>>>(in, out); break;
    case 67: order<Order::kGivenBackEarly><<<1, 64>>>(in, out); break;
    case 80: pass_on<false><<<2, 32>>>(in, out); break;
    case 81: pass_on<true><<<2, 32>>>(in, out); break;
    case 82: overwrite<true><<<1, 32>>>(in, out); break;
    case 83: overwrite<false><<<1, 32>>>(in, out); break;
    case 84: ask_again<<<1, 64>>>(in, out); break;
    case 70: registers<Registers::kRight><<<1, 384>>>(in, out); break;
    case 71: registers<Registers::kTooMany><<<1, 384>>>(in, out); break;
    case 72: registers<Registers::kDisagree><<<1, 384>>>(in, out); break;
    case 90: launch_following(follow<Follow::kRight>, in, out); break;
    case 91: launch_following(follow<Follow::kNoWait>, in, out); break;
    case 92: launch_following(follow<Follow::kNextFirst>, in, out); break;
    case 50: exchange<<<2, 32>>>(in, out); break;
    case 53: exchange_stores<true><<<2, 32>>>(in, out); break;
    case 54: exchange_stores<false><<<2, 32>>>(in, out); break;
    case 55: exchange_loads<true><<<2, 32>>>(in, out); break;
    case 56: exchange_loads<false><<<2, 32>>>(in, out); break;
  }
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

// Facts about the tensor cores of Hopper that the documentation does not give, and that a kernel may build on
// (lab/frozen/htree_layer.md, the third; the others under "Tried"): WGMMA and mma.sync sum sixteen products in the same way, bitwise; the
// base offset of a matrix descriptor takes operands that begin at any multiple of 256 bytes, swizzled as if at one of 1024;
// and mma.sync with sums in fp16 rounds a sum of two products to the nearest, but for one in a hundred thousand at most.
//
//   nvcc -std=c++17 -O2 -arch=sm_90a --expt-relaxed-constexpr -I csrc -I <CUTLASS>/include tests/hardware/tensor_cores.cu -o tensor_cores
//   ./tensor_cores
//
// Prints for each kind of operands in how many sums the two differ, and how many sums are not the nearest.
#include <cstdint>
#include <cstdio>

#include "device/pairs.cuh"
#include "device/wgmma.cuh"

namespace {

using namespace htree_cuda;
using namespace htree_cuda::device;

constexpr int kSteps = 4;  // of 16 products each
constexpr int kThreads = 128;
constexpr int kBlocks = 2000;

struct Random {
  uint32_t state;

  __device__ uint32_t next() {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
  }
  // In (-1, 1), times a power of two between 2^-spread and 2^spread.
  __device__ float value(int spread) {
    float const x = static_cast<float>(static_cast<int>(next())) * 0x1p-31f;
    return ldexpf(x, static_cast<int>(next() % (2 * spread + 1)) - spread);
  }
};

struct Kind {
  int spread;
  bool positive;     // A
  bool accumulates;  // onto values, else onto zeros
  int offset;        // of B, beyond a multiple of 1024 bytes
};

// A [64, 64] by B [64, 64] (kMajor K: transposed), B one panel in shared memory.
template <class Element, wgmma::Major kMajor>
__global__ void compare(uint32_t seed, Kind kind, unsigned long long* differ) {
  extern __shared__ char shared[];
  char* const panel = shared + (1024 - ptx::shared_address(shared) % 1024) % 1024 + kind.offset;
  uint32_t const address = ptx::shared_address(panel);
  int const lane = threadIdx.x % 32;
  Random random{seed * 7919u + threadIdx.x * 104729u + blockIdx.x * 1299709u + 1u};
  for (int i = 0; i < 8; ++i) random.next();
  for (int i = threadIdx.x; i < 64 * 32; i += kThreads) {
    float const x = random.value(kind.spread);
    reinterpret_cast<uint32_t*>(panel)[i] = Pairs<Element>::pack(x, random.value(kind.spread));
  }
  uint32_t a[kSteps][4];
  for (int i = 0; i < kSteps * 4; ++i) {
    float x = random.value(kind.spread), y = random.value(kind.spread);
    if (kind.positive) x = fabsf(x), y = fabsf(y);
    a[i / 4][i % 4] = Pairs<Element>::pack(x, y);
  }
  float sums[wgmma::kAccumulators], expected[wgmma::kAccumulators];
  for (int i = 0; i < wgmma::kAccumulators; ++i) {
    sums[i] = expected[i] = kind.accumulates ? random.value(kind.spread) : 0.0f;
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();

  constexpr bool kRows = kMajor == wgmma::Major::MN;
  wgmma::Descriptor const b(address, 8192);
  uint64_t const base_offset = static_cast<uint64_t>(address >> 7 & 7u) << 49;
  wgmma::pin(sums);
  wgmma::fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wgmma::mma_rs<Element, kMajor>(sums, a[step], b.at(step * (kRows ? 16 * 128 : 32)) | base_offset, true);
  }
  wgmma::commit();
  wgmma::wait<0>();
  wgmma::pin(sums);

  auto const element = [&](int row, int column) {
    return uint32_t{*reinterpret_cast<uint16_t const*>(panel + row * 128 + ((column / 8 ^ row % 8) << 4) + column % 8 * 2)};
  };
  for (int step = 0; step < kSteps; ++step) {
    for (int block = 0; block < 8; ++block) {
      int const n = 8 * block + lane / 4;
      uint32_t words[2];
      for (int half = 0; half < 2; ++half) {
        int const k = 16 * step + 8 * half + 2 * (lane % 4);
        words[half] = kRows ? element(k, n) | element(k + 1, n) << 16 : element(n, k) | element(n, k + 1) << 16;
      }
      Pairs<Element>::mma(reinterpret_cast<float(&)[4]>(expected[4 * block]), a[step], words[0], words[1]);
    }
  }
  unsigned long long count = 0;
  for (int i = 0; i < wgmma::kAccumulators; ++i) count += __float_as_uint(sums[i]) != __float_as_uint(expected[i]);
  atomicAdd(differ, count);
}

template <class Element, wgmma::Major kMajor>
bool run(char const* name) {
  unsigned long long* differ;
  cudaMallocManaged(&differ, sizeof *differ);
  bool right = true;
  for (int const spread : {0, 4, 12}) {
    for (int const which : {0, 1, 2, 3}) {
      for (int const offset : {0, 256, 512, 768}) {
        *differ = 0;
        Kind const kind{spread, which % 2 == 1, which / 2 == 1, offset};
        compare<Element, kMajor><<<kBlocks, kThreads, 16384>>>(static_cast<uint32_t>(spread * 10 + which + 1), kind, differ);
        cudaError_t const error = cudaDeviceSynchronize();
        if (error != cudaSuccess) return std::printf("%s: %s\n", name, cudaGetErrorString(error)), false;
        std::printf("%s, 2^-%d .. 2^%d, %s A, onto %s, offset %d: %llu of %d differ\n", name, spread, spread,
                    kind.positive ? "positive" : "signed", kind.accumulates ? "values" : "zeros", offset, *differ,
                    kBlocks * kThreads * wgmma::kAccumulators);
        right = right && *differ == 0;
      }
    }
  }
  cudaFree(differ);
  return right;
}

// A [16, 8] by four rotations [2, 2] on a diagonal: x cos + y sin and y cos - x sin, exact in float64, and rounded once.
__global__ void rotate(uint32_t seed, int spread, unsigned long long* differ) {
  int const g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  Random random{seed * 7919u + threadIdx.x * 104729u + blockIdx.x * 1299709u + 1u};
  for (int i = 0; i < 8; ++i) random.next();
  unsigned long long count = 0;
  for (int i = 0; i < 1000; ++i) {
    float sine[4], cosine[4];  // of all pairs, the same in all lanes of a warp
    for (int pair = 0; pair < 4; ++pair) {
      float const angle = __shfl_sync(0xffffffffu, random.value(0) * 3.2f, 0);
      sine[pair] = __half2float(__float2half(sinf(angle))), cosine[pair] = __half2float(__float2half(cosf(angle)));
    }
    int const pair = g / 2;
    uint32_t const column = g % 2 ? Pairs<__half>::pack(sine[pair], cosine[pair]) : Pairs<__half>::pack(cosine[pair], -sine[pair]);
    uint32_t a[2], c[2];
    for (uint32_t& x : a) {
      float const lo = random.value(spread);
      x = Pairs<__half>::pack(lo, random.value(spread));
    }
    ptx::multiply_fp16(c[0], c[1], a[0], a[1], t == pair ? column : 0u);
    for (int row = 0; row < 2; ++row) {
      float2 const in = Pairs<__half>::unpack(a[row]), out = Pairs<__half>::unpack(c[row]);
      double const x = double(in.x) * cosine[t] - double(in.y) * sine[t], y = double(in.x) * sine[t] + double(in.y) * cosine[t];
      count += out.x != __half2float(__double2half(x));
      count += out.y != __half2float(__double2half(y));
    }
  }
  atomicAdd(differ, count);
}

bool rounds_to_nearest() {
  unsigned long long* differ;
  cudaMallocManaged(&differ, sizeof *differ);
  bool right = true;
  for (int const spread : {0, 4, 12}) {
    *differ = 0;
    rotate<<<kBlocks, kThreads>>>(static_cast<uint32_t>(spread + 1), spread, differ);
    cudaError_t const error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return std::printf("rotations: %s\n", cudaGetErrorString(error)), false;
    std::printf("rotations with sums in fp16, 2^-%d .. 2^%d: %llu of %lld are not the nearest\n", spread, spread, *differ,
                4000ll * kBlocks * kThreads);
    right = right && *differ < 4000ull * kBlocks * kThreads / 100000;
  }
  cudaFree(differ);
  return right;
}

}  // namespace

int main() {
  bool right = run<cutlass::half_t, wgmma::Major::K>("fp16, K-major");
  right = run<cutlass::bfloat16_t, wgmma::Major::K>("bf16, K-major") && right;
  right = run<cutlass::half_t, wgmma::Major::MN>("fp16, MN-major") && right;
  right = run<cutlass::bfloat16_t, wgmma::Major::MN>("bf16, MN-major") && right;
  right = rounds_to_nearest() && right;
  std::printf(right ? "as stated\n" : "not as stated\n");
  return right ? 0 : 1;
}

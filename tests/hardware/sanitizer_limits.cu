// What compute-sanitizer says about two patterns that are right (docs/sanitizers.md).
//
//   nvcc -arch=sm_90a limits.cu -o limits
//   compute-sanitizer --tool racecheck ./limits one-lane     a warp reads a slot, meets, and one lane gives it back
//   compute-sanitizer --tool racecheck ./limits all-lanes    the same, every lane giving back its own part
//   compute-sanitizer --tool synccheck ./limits two-places   two warps meet at one named barrier, each in its own code
//   compute-sanitizer --tool synccheck ./limits one-place    the same, in the same code
//
// A producer warp writes a slot sixteen times, a consumer warp adds up what it reads: 16 * 17 / 2 in every lane.
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

__device__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

template <bool kAllLanes>
__global__ void hand_over(int* out) {
  __shared__ int volatile slot[32];
  __shared__ alignas(8) uint64_t barriers[2];
  uint32_t const full = static_cast<uint32_t>(__cvta_generic_to_shared(&barriers[0]));
  uint32_t const empty = full + 8;
  int const lane = threadIdx.x % 32;
  int const arrivals = kAllLanes ? 32 : 1;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full), "r"(arrivals) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty), "r"(arrivals) : "memory");
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < 16; ++i) {
    if (threadIdx.x < 32) {
      wait(empty, (i & 1) ^ 1);
      slot[lane] = i + 1;
      __syncwarp();
      if (kAllLanes || lane == 0) arrive(full);
    } else {
      wait(full, i & 1);
      sum += slot[31 - lane];
      __syncwarp();
      if (kAllLanes || lane == 0) arrive(empty);
    }
  }
  if (threadIdx.x >= 32) out[lane] = sum;
}

template <bool kOnePlace>
__global__ void meet(int* out) {
  __shared__ int values[64];
  values[threadIdx.x] = 68 + threadIdx.x;
  int other = 0;
  if (kOnePlace) {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    other = values[threadIdx.x ^ 32];
  } else if (threadIdx.x < 32) {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    other = values[threadIdx.x + 32] * 2 / 2;
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    other = values[threadIdx.x - 32];
  }
  if (threadIdx.x >= 32) out[threadIdx.x - 32] = other + 68 - static_cast<int>(threadIdx.x - 32);
}

}  // namespace

int main(int argc, char** argv) {
  char const* const what = argc > 1 ? argv[1] : "";
  int* out;
  cudaMalloc(&out, 32 * sizeof(int));
  if (std::strcmp(what, "one-lane") == 0) hand_over<false><<<1, 64>>>(out);
  if (std::strcmp(what, "all-lanes") == 0) hand_over<true><<<1, 64>>>(out);
  if (std::strcmp(what, "two-places") == 0) meet<false><<<1, 64>>>(out);
  if (std::strcmp(what, "one-place") == 0) meet<true><<<1, 64>>>(out);
  int result[32] = {};
  cudaMemcpy(result, out, sizeof result, cudaMemcpyDeviceToHost);
  for (int const x : result) {
    if (x != 136) return std::printf("%s: wrong, %d\n", what, x), 1;
  }
  std::printf("%s: right\n", what);
  return 0;
}

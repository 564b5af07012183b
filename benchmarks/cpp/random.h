// Random numbers by index, the same on host and device: inputs of the C++ benchmarks.
#pragma once

#include <cmath>
#include <cstdint>

namespace htree_cuda::benchmark {

__host__ __device__ inline std::uint64_t mix(std::uint64_t z) {
  z *= 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Number `i` of the sequence `seed`, standard normal.
__device__ inline float normal(std::uint64_t i, std::uint64_t seed) {
  std::uint64_t const z = mix(i + seed * 0x100000001b3ull);
  float const u = (float(unsigned(z) >> 8) + 0.5f) * 0x1p-24f;
  float const w = (float(unsigned(z >> 32) >> 8) + 0.5f) * 0x1p-24f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * w);
}

template <class Element>
__global__ void fill_normal(Element* x, std::int64_t n, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < n;
       i += std::int64_t(gridDim.x) * blockDim.x) {
    x[i] = Element(normal(std::uint64_t(i), seed));
  }
}

// x [T, rows]: every column an autoregressive sequence, x_t = rho x_{t-1} + sqrt(1 - rho^2) e, of unit variance.
template <class Element>
__global__ void fill_local(Element* x, std::int64_t T, std::int64_t rows, float rho, std::uint64_t seed) {
  std::int64_t const row = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x;
  if (row >= rows) return;
  float const fresh = sqrtf(1.0f - rho * rho);
  float state = 0.0f;
  for (std::int64_t t = 0; t < T; ++t) {
    float const e = normal(std::uint64_t(t * rows + row), seed);
    state = t == 0 ? e : rho * state + fresh * e;
    x[t * rows + row] = Element(state);
  }
}

}  // namespace htree_cuda::benchmark

// Selection of the best rows without Python: the kernel library against a stable sort on the CPU, then its speed beside a
// read of the same logits. Prints one JSON object.
//
//   topk_indices [--check-only]
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "params.h"
#include "protocol.h"
#include "random.h"

using namespace htree_cuda;

namespace {

enum class Kind { kNormal, kRelu, kRising, kConstant, kNaN };
constexpr char const* kNames[] = {"normal", "relu", "rising", "constant", "nan"};

struct Shape {
  std::int64_t s_q, n, topk;
  Kind kind;
};

// Row s, element j: the same on host and device.
__global__ void fill(float* x, Shape shape) {
  std::int64_t const count = shape.s_q * shape.n;
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < count; i += std::int64_t(gridDim.x) * blockDim.x) {
    float const z = benchmark::normal(std::uint64_t(i), 7);
    switch (shape.kind) {
      case Kind::kNormal: x[i] = z; break;
      case Kind::kRelu: x[i] = fmaxf(z - 2.5f, 0.0f); break;  // a plateau of zeros
      case Kind::kRising: x[i] = float(i % shape.n); break;
      case Kind::kConstant: x[i] = 1.0f; break;
      case Kind::kNaN: x[i] = z > 1.5f ? nanf("") : z; break;
    }
  }
}

struct Device {
  float* logits;
  std::int32_t* indices;
};

TopkIndicesParams params_of(Shape const& shape, Device const& device) {
  TopkIndicesParams p{};
  p.logits = device.logits;
  p.stride_b = shape.s_q * shape.n;
  p.stride_s = shape.n;
  p.indices = device.indices;
  p.B = 1;
  p.s_q = shape.s_q;
  p.n = shape.n;
  p.topk = shape.topk;
  return p;
}

// Rows of the list that differ from a stable sort.
std::int64_t wrong_rows(Shape const& shape, Device const& device) {
  fill<<<1024, 256>>>(device.logits, shape);
  HTREE_CUDA_CHECK(cudaMemset(device.indices, 0x77, shape.s_q * shape.topk * 4));
  topk_indices(params_of(shape, device), nullptr);
  std::vector<float> logits(shape.s_q * shape.n);
  std::vector<std::int32_t> lists(shape.s_q * shape.topk);
  HTREE_CUDA_CHECK(cudaMemcpy(logits.data(), device.logits, logits.size() * 4, cudaMemcpyDeviceToHost));
  HTREE_CUDA_CHECK(cudaMemcpy(lists.data(), device.indices, lists.size() * 4, cudaMemcpyDeviceToHost));
  std::int64_t wrong = 0;
  for (std::int64_t s = 0; s < shape.s_q; ++s) {
    float const* const row = &logits[s * shape.n];
    std::vector<std::int32_t> order(shape.n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      if (std::isnan(row[a]) || std::isnan(row[b])) return std::isnan(row[a]) && !std::isnan(row[b]);
      return row[a] > row[b];
    });
    order.resize(std::min(shape.topk, shape.n));
    std::sort(order.begin(), order.end());
    order.resize(shape.topk, -1);
    wrong += !std::equal(order.begin(), order.end(), &lists[s * shape.topk]);
  }
  return wrong;
}

// Reads every logit once: the floor.
__global__ void read_all(float4 const* x, std::int64_t count, float* out) {
  float sum = 0.0f;
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < count; i += std::int64_t(gridDim.x) * blockDim.x) {
    float4 const four = x[i];
    sum += four.x + four.y + four.z + four.w;
  }
  if (sum == 12345.678f) *out = sum;
}

int run(bool check_only) {
  benchmark::Nvml const nvml;
  std::printf("{\n  \"op\": \"topk_indices\", ");
  benchmark::print_machine(nvml);
  std::int64_t const most = check_only ? std::int64_t(64) * 131072 : std::int64_t(4096) * 131072;
  Device device{};
  HTREE_CUDA_CHECK(cudaMalloc(&device.logits, most * 4));
  HTREE_CUDA_CHECK(cudaMalloc(&device.indices, std::int64_t(4096) * 8192 * 4));

  std::printf(",\n  \"checks\": [");
  std::int64_t wrong_total = 0;
  char const* comma = "";
  for (Kind kind : {Kind::kNormal, Kind::kRelu, Kind::kRising, Kind::kConstant, Kind::kNaN}) {
    for (std::int64_t n : {1001, 16384, 131071}) {
      for (std::int64_t topk : {1, 2048, 5000}) {
        Shape const shape{5, n, topk, kind};
        std::int64_t const wrong = wrong_rows(shape, device);
        wrong_total += wrong;
        std::printf("%s\n    {\"kind\": \"%s\", \"n\": %ld, \"topk\": %ld, \"wrong_rows\": %ld}", comma, kNames[int(kind)], long(n),
                    long(topk), long(wrong));
        comma = ",";
      }
    }
  }
  std::printf("\n  ]");
  if (check_only || wrong_total != 0) {
    std::printf("\n}\n");
    return wrong_total == 0 ? 0 : 1;
  }

  cudaStream_t stream;
  HTREE_CUDA_CHECK(cudaStreamCreate(&stream));
  std::printf(",\n  \"timings\": [");
  comma = "";
  for (Shape const& shape : {Shape{4096, 16384, 2048, Kind::kNormal}, Shape{4096, 65536, 2048, Kind::kNormal},
                             Shape{4096, 131072, 2048, Kind::kNormal}, Shape{4096, 65536, 2048, Kind::kRelu},
                             Shape{4096, 65536, 2048, Kind::kRising}, Shape{4096, 65536, 5000, Kind::kNormal},
                             Shape{1, 131072, 2048, Kind::kNormal}}) {
    fill<<<2048, 256, 0, stream>>>(device.logits, shape);
    HTREE_CUDA_CHECK(cudaGetLastError());
    TopkIndicesParams const p = params_of(shape, device);
    auto const t = benchmark::measure(nvml, stream, [&] { topk_indices(p, stream); });
    auto const floor = benchmark::measure(nvml, stream, [&] {
      read_all<<<132 * 8, 512, 0, stream>>>(reinterpret_cast<float4 const*>(device.logits), shape.s_q * shape.n / 4,
                                            reinterpret_cast<float*>(device.indices));
    });
    std::printf("%s\n    {\"s_q\": %ld, \"n\": %ld, \"topk\": %ld, \"kind\": \"%s\", \"read_ms\": %.6f, ", comma, long(shape.s_q),
                long(shape.n), long(shape.topk), kNames[int(shape.kind)], floor.median_ms);
    benchmark::print_timing(t);
    std::printf("}");
    comma = ",";
  }
  std::printf("\n  ]\n}\n");
  HTREE_CUDA_CHECK(cudaStreamDestroy(stream));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  auto const checks = [](int count, char** values) { return run(count > 1 && std::string(values[1]) == "--check-only"); };
  return benchmark::guarded(checks, argc, argv);
}

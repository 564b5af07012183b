// Tree pooling without Python: the kernel library against a CPU loop that spells out the definition, bit for bit,
// then its speed beside a device-to-device copy of the same run. Prints one JSON object.
//
//   tree_pool [--check-only]
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "params.h"
#include "protocol.h"

using namespace htree_cuda;

namespace {

// ---- CPU reference ---------------------------------------------------------------------------------------------

template <class Element>
float to_float(Element x);
template <>
float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <>
float to_float(__half x) { return __half2float(x); }
template <>
float to_float(float x) { return x; }

template <class Element>
Element from_float(float x);
template <>
__nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
template <>
__half from_float(float x) { return __float2half_rn(x); }
template <>
float from_float(float x) { return x; }

template <class Element>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<__nv_bfloat16>() { return DType::kBFloat16; }
template <>
constexpr DType dtype_of<__half>() { return DType::kFloat16; }
template <>
constexpr DType dtype_of<float>() { return DType::kFloat32; }

struct Shape {
  std::int64_t B, T, H_kv, K, V;
  std::int64_t r, max_top_nodes;

  int layers() const {
    int count = 1;
    for (std::int64_t n = T; n > max_top_nodes; n = (n + r - 1) / r) ++count;
    return count;
  }
  std::int64_t tree_nodes() const {
    std::int64_t total = 0;
    for (std::int64_t n = T; n > max_top_nodes;) total += n = (n + r - 1) / r;
    return total;
  }
};

// x [B, T, H_kv, D] contiguous -> [B, H_kv, M, D]
template <class Element>
std::vector<Element> reference(std::vector<Element> const& x, Shape const& s, std::int64_t D) {
  std::int64_t const M = s.tree_nodes();
  std::vector<Element> tree(s.B * s.H_kv * M * D);
  for (std::int64_t b = 0; b < s.B; ++b) {
    for (std::int64_t h = 0; h < s.H_kv; ++h) {
      for (std::int64_t d = 0; d < D; ++d) {
        std::vector<Element> below(s.T);
        for (std::int64_t t = 0; t < s.T; ++t) below[t] = x[((b * s.T + t) * s.H_kv + h) * D + d];
        std::int64_t begin = 0;
        while (std::int64_t(below.size()) > s.max_top_nodes) {
          std::int64_t const n = std::int64_t(below.size());
          std::vector<Element> layer((n + s.r - 1) / s.r);
          for (std::int64_t i = 0; i < std::int64_t(layer.size()); ++i) {
            std::int64_t const end = std::min(n, (i + 1) * s.r);
            float sum = to_float(below[i * s.r]);
            for (std::int64_t c = i * s.r + 1; c < end; ++c) sum += to_float(below[c]);
            layer[i] = from_float<Element>(sum / float(end - i * s.r));
            tree[((b * s.H_kv + h) * M + begin + i) * D + d] = layer[i];
          }
          begin += std::int64_t(layer.size());
          below.swap(layer);
        }
      }
    }
  }
  return tree;
}

// ---- device ----------------------------------------------------------------------------------------------------

template <class T>
struct Buffer {
  T* data = nullptr;
  std::size_t count = 0;
  explicit Buffer(std::size_t n) : count(n) {
    HTREE_CUDA_CHECK(cudaMalloc(&data, std::max<std::size_t>(1, n) * sizeof(T)));
  }
  ~Buffer() { cudaFree(data); }
  Buffer(Buffer const&) = delete;
  Buffer& operator=(Buffer const&) = delete;
};

template <class Element>
TreePoolParams make_params(Shape const& s, Element const* k, Element const* v, Element* k_tree, Element* v_tree) {
  TreePoolParams p{};
  p.k = {k, s.T * s.H_kv * s.K, s.H_kv * s.K, s.K, k_tree, s.K};
  p.v = {v, s.T * s.H_kv * s.V, s.H_kv * s.V, s.V, v_tree, s.V};
  p.B = s.B;
  p.T = s.T;
  p.H_kv = s.H_kv;
  p.compression_rate = s.r;
  p.layers = s.layers();
  p.dtype = dtype_of<Element>();
  return p;
}

// Number of elements whose bits differ from the reference.
template <class Element>
std::int64_t mismatches(Shape const& s, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  auto const draw = [&](std::int64_t n) {
    std::vector<Element> x(n);
    for (auto& value : x) value = from_float<Element>(normal(generator));
    return x;
  };
  std::vector<Element> const k = draw(s.B * s.T * s.H_kv * s.K), v = draw(s.B * s.T * s.H_kv * s.V);
  std::vector<Element> const expected[2] = {reference(k, s, s.K), reference(v, s, s.V)};
  Buffer<Element> dk(k.size()), dv(v.size()), k_tree(expected[0].size()), v_tree(expected[1].size());
  HTREE_CUDA_CHECK(cudaMemcpy(dk.data, k.data(), k.size() * sizeof(Element), cudaMemcpyHostToDevice));
  HTREE_CUDA_CHECK(cudaMemcpy(dv.data, v.data(), v.size() * sizeof(Element), cudaMemcpyHostToDevice));
  HTREE_CUDA_CHECK(cudaMemset(k_tree.data, 0xff, k_tree.count * sizeof(Element)));
  HTREE_CUDA_CHECK(cudaMemset(v_tree.data, 0xff, v_tree.count * sizeof(Element)));
  tree_pool(make_params(s, dk.data, dv.data, k_tree.data, v_tree.data), nullptr);
  HTREE_CUDA_CHECK(cudaDeviceSynchronize());
  std::int64_t wrong = 0;
  Element const* const trees[2] = {k_tree.data, v_tree.data};
  for (int i = 0; i < 2; ++i) {
    std::vector<Element> got(expected[i].size());
    HTREE_CUDA_CHECK(cudaMemcpy(got.data(), trees[i], got.size() * sizeof(Element), cudaMemcpyDeviceToHost));
    for (std::size_t j = 0; j < got.size(); ++j) {
      wrong += std::memcmp(&got[j], &expected[i][j], sizeof(Element)) != 0;
    }
  }
  return wrong;
}

// Standard normal bf16 from a hash of the index: the timing needs random data, not a good generator.
__global__ void fill_normal(__nv_bfloat16* x, std::int64_t n, std::uint64_t seed) {
  std::int64_t const step = std::int64_t(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < n; i += step) {
    std::uint64_t z = (std::uint64_t(i) + seed) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    float const u = (float(unsigned(z) >> 8) + 0.5f) * 0x1p-24f;
    float const w = (float(unsigned(z >> 32) >> 8) + 0.5f) * 0x1p-24f;
    x[i] = __float2bfloat16_rn(sqrtf(-2.0f * logf(u)) * cospif(2.0f * w));
  }
}

int run(bool check_only) {
  benchmark::Nvml const nvml;
  std::printf("{\n  \"op\": \"tree_pool\", ");
  benchmark::print_machine(nvml);

  Shape const shapes[] = {
      {1, 4099, 2, 128, 128, 16, 32}, {2, 1021, 3, 64, 72, 16, 4},   {1, 257, 1, 576, 512, 16, 1},
      {1, 769, 2, 65, 33, 2, 1},      {1, 20011, 1, 16, 24, 4, 4},   {1, 70001, 1, 8, 8, 2, 1},
      {1, 9973, 1, 128, 65, 64, 2},   {1, 5003, 2, 8, 16, 2048, 2},  {1, 66000, 1, 32, 32, 16, 16},
  };
  std::printf(",\n  \"checks\": [");
  std::int64_t wrong_total = 0;
  bool comma = false;
  for (Shape const& s : shapes) {
    std::int64_t const wrong[3] = {mismatches<__nv_bfloat16>(s, 1), mismatches<__half>(s, 2), mismatches<float>(s, 3)};
    wrong_total += wrong[0] + wrong[1] + wrong[2];
    std::printf("%s\n    {\"B\": %ld, \"T\": %ld, \"H_kv\": %ld, \"K\": %ld, \"V\": %ld, \"r\": %ld, \"layers\": %d, "
                "\"wrong_bits\": [%ld, %ld, %ld]}",
                comma ? "," : "", long(s.B), long(s.T), long(s.H_kv), long(s.K), long(s.V), long(s.r), s.layers(),
                long(wrong[0]), long(wrong[1]), long(wrong[2]));
    comma = true;
  }
  std::printf("\n  ]");
  if (check_only || wrong_total != 0) {
    std::printf("\n}\n");
    return wrong_total == 0 ? 0 : 1;
  }

  cudaStream_t stream;
  HTREE_CUDA_CHECK(cudaStreamCreate(&stream));
  Shape const timed[] = {
      {1, 1 << 20, 8, 128, 128, 16, 8192}, {1, 1 << 20, 1, 128, 128, 16, 8192}, {1, 1 << 17, 8, 128, 128, 16, 8192},
      {1, 1 << 17, 1, 128, 128, 16, 8192}, {1, 1 << 14, 1, 128, 128, 16, 8192}, {1, 1 << 20, 1, 576, 512, 16, 8192},
      {1, 1 << 20, 8, 128, 128, 4, 2048},
  };
  // One pair of buffers serves every shape: 2 GiB each, filled once.
  std::int64_t const most = std::int64_t(1) << 30;
  Buffer<__nv_bfloat16> k(most), v(most), k_tree(most / 2), v_tree(most / 2);
  fill_normal<<<2048, 256, 0, stream>>>(k.data, most, 1);
  fill_normal<<<2048, 256, 0, stream>>>(v.data, most, 2);
  HTREE_CUDA_CHECK(cudaGetLastError());

  std::int64_t const copy_bytes = most * 2;
  auto const copy = benchmark::measure(nvml, stream, [&] {
    HTREE_CUDA_CHECK(cudaMemcpyAsync(v.data, k.data, copy_bytes, cudaMemcpyDeviceToDevice, stream));
  });
  fill_normal<<<2048, 256, 0, stream>>>(v.data, most, 2);
  double const copy_rate = 2.0 * double(copy_bytes) / copy.median_ms / 1e9;
  std::printf(",\n  \"copy\": {\"bytes\": %ld, \"tb_per_s\": %.4f, ", long(2 * copy_bytes), copy_rate);
  benchmark::print_timing(copy);
  std::printf("},\n  \"timings\": [");
  comma = false;
  for (Shape const& s : timed) {
    TreePoolParams const p = make_params(s, k.data, v.data, k_tree.data, v_tree.data);
    auto const t = benchmark::measure(nvml, stream, [&] { tree_pool(p, stream); });
    // Every input byte read once, every node written once; a second launch that reads a layer again gets no credit.
    double const bytes = 2.0 * double(s.B * s.H_kv * (s.K + s.V)) * double(s.T + s.tree_nodes());
    double const rate = bytes / t.median_ms / 1e9;
    std::printf("%s\n    {\"dtype\": \"bfloat16\", \"B\": %ld, \"T\": %ld, \"H_kv\": %ld, \"K\": %ld, \"V\": %ld, "
                "\"r\": %ld, \"max_top_nodes\": %ld, \"layers\": %d, \"bytes\": %.0f, \"tb_per_s\": %.4f, "
                "\"of_copy\": %.4f, ",
                comma ? "," : "", long(s.B), long(s.T), long(s.H_kv), long(s.K), long(s.V), long(s.r),
                long(s.max_top_nodes), s.layers(), bytes, rate, rate / copy_rate);
    benchmark::print_timing(t);
    std::printf("}");
    comma = true;
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

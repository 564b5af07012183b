// attn_dist without Python: the kernel library against a naive float64 kernel on hostile shapes and contents, a
// thousand repeats that must be bitwise identical, then its speed beside the floor. Prints one JSON object.
//
//   attn_dist                             everything
//   attn_dist --check-only                correctness and repeats
//   attn_dist --time-only [h_q s_kv]...   timing, of these shapes alone
//   attn_dist --one h_q s_kv [n]          n launches (default 3) of one timed shape, for a profiler
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "params.h"
#include "protocol.h"
#include "sparse_inputs.h"

using namespace htree_cuda;
using namespace htree_cuda::benchmark;

namespace {

// ---- the definition in float64 ---------------------------------------------------------------------------------

// lse[b][s][h] of the scaled scores, to base 2 or e; one block each. Then, where asked, the oddities.
__global__ void reference_lse(double const* scores, bool const* valid, Shape shape, double sm_scale, float* lse) {
  std::int64_t const i = blockIdx.x;
  std::int64_t const row = i / shape.h_q;
  __shared__ double shared[256];
  double most = -INFINITY;
  for (int j = threadIdx.x; j < shape.topk; j += 256) {
    if (valid[row * shape.topk + j]) most = fmax(most, scores[i * shape.topk + j] * sm_scale);
  }
  shared[threadIdx.x] = most;
  __syncthreads();
  for (int j = 0; j < 256; ++j) most = fmax(most, shared[j]);
  __syncthreads();
  double sum = 0;
  for (int j = threadIdx.x; j < shape.topk; j += 256) {
    if (valid[row * shape.topk + j]) sum += exp(scores[i * shape.topk + j] * sm_scale - most);
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (int j = 0; j < 256; ++j) sum += shared[j];
    double const natural = most + log(sum);
    float value = float(shape.natural ? natural : natural * 1.4426950408889634074);
    if (shape.odd) {
      int const kind = int(mix(i + 991) % 11);
      value = kind == 0 ? INFINITY : kind == 1 ? -INFINITY : kind == 2 && i % shape.h_q == 5 ? NAN : value;
    }
    lse[i] = value;
  }
}

__global__ void reference_sums(double const* scores, bool const* valid, float const* lse, Shape shape, double sm_scale,
                               double* sums) {
  std::int64_t const count = std::int64_t(shape.B) * shape.groups() * shape.s_q * shape.topk;
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < count;
       i += std::int64_t(gridDim.x) * blockDim.x) {
    int const j = int(i % shape.topk);
    std::int64_t const t = i / shape.topk;
    int const s = int(t % shape.s_q);
    int const group = int(t / shape.s_q % shape.groups());
    std::int64_t const row = t / shape.s_q / shape.groups() * shape.s_q + s;
    double sum = 0;
    if (valid[row * shape.topk + j]) {
      for (int h = group * 64; h < min(shape.h_q, group * 64 + 64); ++h) {
        double const x = lse[row * shape.h_q + h];
        if (isinf(x)) continue;
        double const base2 = shape.natural ? x * 1.4426950408889634074 : x;
        sum += exp2(scores[(row * shape.h_q + h) * shape.topk + j] * sm_scale * 1.4426950408889634074 - base2);
      }
    }
    sums[i] = sum;
  }
}

struct Buffers {
  Arena q, k, indices, lse, out, lengths, scores, valid, sums, selected, starts;
};

template <class Element>
struct Problem {
  Shape shape;
  Layout layout;
  AttnDistParams params{};
  std::vector<std::int64_t> starts;

  Problem(Shape const& s, Buffers& buffers, std::uint64_t seed) : shape(s), layout(s), starts(s.B) {
    std::int64_t const rows = std::int64_t(s.B) * s.s_q;
    auto* const q = buffers.q.get<Element>(s.B * layout.q_b);
    auto* const k = buffers.k.get<Element>(s.B * layout.k_b);
    fill_normal<<<1024, 256>>>(q, s.B * layout.q_b, seed);
    fill_normal<<<1024, 256>>>(k, s.B * layout.k_b, seed + 1);
    if (s.strided) poison_gaps<<<256, 256>>>(q, k, s, layout);
    auto* const indices = buffers.indices.get<int>(rows * s.topk);
    fill_indices<<<1024, 256>>>(indices, rows, s.topk, s.s_kv, s.slots, seed + 2);
    HTREE_CUDA_CHECK(cudaGetLastError());
    params.q = q;
    params.q_stride_b = layout.q_b;
    params.q_stride_s = layout.q_s;
    params.q_stride_h = layout.q_h;
    params.k = k;
    params.k_stride_b = layout.k_b;
    params.k_stride_s = layout.k_s;
    params.indices = indices;
    params.indices_stride_b = std::int64_t(s.s_q) * s.topk;
    params.indices_stride_s = s.topk;
    params.indices_stride_t = 1;
    params.topk_length_stride_b = s.s_q;
    params.topk_length_stride_s = 1;
    params.lse_stride_b = std::int64_t(s.s_q) * s.h_q;
    params.lse_stride_s = s.h_q;
    params.lse_stride_h = 1;
    params.lse = buffers.lse.get<float>(rows * s.h_q);
    params.out = buffers.out.get<float>(std::int64_t(s.B) * s.groups() * s.s_q * s.topk);
    if (s.lengths) {
      std::vector<int> const lengths = odd_lengths(rows, s.topk, seed);
      int* const device = buffers.lengths.get<int>(rows);
      HTREE_CUDA_CHECK(cudaMemcpy(device, lengths.data(), rows * sizeof(int), cudaMemcpyHostToDevice));
      params.topk_length = device;
    }
    if (s.causal) {
      starts = middle_starts(s);
      params.q_start = starts.data();
    }
    params.k_stride = kStrideTokens;
    params.B = s.B;
    params.s_q = s.s_q;
    params.s_kv = s.s_kv;
    params.h_q = s.h_q;
    params.d_qk = s.d;
    params.topk = s.topk;
    params.sm_scale = 1.0 / std::sqrt(double(s.d));
    params.lse_base = s.natural ? std::exp(1.0) : 2.0;
    params.dtype = dtype_of<Element>();
  }
};

struct Outcome {
  double max_error = 0;   // over elements, relative to the largest of the row
  double rms_error = 0;   // over rows, the largest
  std::int64_t wrong = 0;  // NaN or zero where the definition has none, or the other way round
};

template <class Element>
Outcome check(Shape const& s, Buffers& buffers, std::uint64_t seed) {
  Problem<Element> problem(s, buffers, seed);
  std::int64_t const rows = std::int64_t(s.B) * s.s_q;
  std::int64_t const count = rows * s.groups() * s.topk;
  auto* const scores = buffers.scores.get<double>(rows * s.h_q * s.topk);
  auto* const valid = buffers.valid.get<bool>(rows * s.topk);
  auto* const sums = buffers.sums.get<double>(count);
  auto* const starts = buffers.starts.get<std::int64_t>(s.B);
  auto* const lse = const_cast<float*>(problem.params.lse);
  HTREE_CUDA_CHECK(cudaMemcpy(starts, problem.starts.data(), s.B * sizeof(std::int64_t), cudaMemcpyHostToDevice));
  auto const* const q = static_cast<Element const*>(problem.params.q);
  auto* const k = static_cast<Element*>(const_cast<void*>(problem.params.k));
  reference_scores<<<2048, 256>>>(q, k, problem.params.indices, problem.params.topk_length, starts, kStrideTokens, s,
                                  problem.layout, scores, valid);
  reference_lse<<<unsigned(rows * s.h_q), 256>>>(scores, valid, s, problem.params.sm_scale, lse);
  reference_sums<<<1024, 256>>>(scores, valid, lse, s, problem.params.sm_scale, sums);
  if (s.poison && s.s_kv > 0) {
    auto* const selected = buffers.selected.get<bool>(std::int64_t(s.B) * s.s_kv);
    HTREE_CUDA_CHECK(cudaMemset(selected, 0, std::int64_t(s.B) * s.s_kv));
    mark_selected<<<256, 256>>>(problem.params.indices, valid, s, selected);
    poison_unselected<<<unsigned(s.B * s.s_kv), 128>>>(k, selected, s, problem.layout);
  }
  HTREE_CUDA_CHECK(cudaGetLastError());
  HTREE_CUDA_CHECK(cudaMemset(problem.params.out, 0x7b, count * sizeof(float)));  // 1.3e36
  attn_dist(problem.params, nullptr);
  HTREE_CUDA_CHECK(cudaDeviceSynchronize());

  std::vector<float> got(count);
  std::vector<double> expected(count);
  HTREE_CUDA_CHECK(cudaMemcpy(got.data(), problem.params.out, count * sizeof(float), cudaMemcpyDeviceToHost));
  HTREE_CUDA_CHECK(cudaMemcpy(expected.data(), sums, count * sizeof(double), cudaMemcpyDeviceToHost));
  Outcome outcome;
  for (std::int64_t row = 0; row < count; row += s.topk) {
    double most = 0, squares = 0, error_squares = 0;
    for (int j = 0; j < s.topk; ++j) {
      if (std::isfinite(expected[row + j])) most = std::max(most, expected[row + j]);
    }
    double worst = 0;
    for (int j = 0; j < s.topk; ++j) {
      double const x = expected[row + j], y = got[row + j];
      if (std::isnan(x) || std::isnan(y) || (x == 0) != (y == 0)) {
        // Below the smallest normal float the kernel flushes to zero.
        outcome.wrong += !(std::isnan(x) && std::isnan(y)) && !(x > 0 && x < 1e-36 && y == 0);
        continue;
      }
      worst = std::max(worst, std::abs(x - y));
      squares += x * x;
      error_squares += (x - y) * (x - y);
    }
    if (most > 0) {
      outcome.max_error = std::max(outcome.max_error, worst / most);
      outcome.rms_error = std::max(outcome.rms_error, std::sqrt(error_squares / squares));
    }
  }
  return outcome;
}

// Bits that differ between the first and any of `repeats` further calls.
unsigned long long repeat(Shape const& s, int repeats, Buffers& buffers) {
  Problem<__nv_bfloat16> problem(s, buffers, 5);
  fill_normal<<<1024, 256>>>(const_cast<float*>(problem.params.lse), std::int64_t(s.B) * s.s_q * s.h_q, 9);
  std::int64_t const count = std::int64_t(s.B) * s.groups() * s.s_q * s.topk;
  auto* const first = buffers.sums.get<float>(count);
  auto* const differences = buffers.selected.get<unsigned long long>(1);
  HTREE_CUDA_CHECK(cudaMemset(differences, 0, sizeof(unsigned long long)));
  attn_dist(problem.params, nullptr);
  HTREE_CUDA_CHECK(cudaMemcpy(first, problem.params.out, count * sizeof(float), cudaMemcpyDeviceToDevice));
  for (int i = 0; i < repeats; ++i) {
    HTREE_CUDA_CHECK(cudaMemsetAsync(problem.params.out, 0xff, count * sizeof(float), nullptr));
    attn_dist(problem.params, nullptr);
    count_differences<<<512, 256>>>(reinterpret_cast<unsigned const*>(first),
                                    reinterpret_cast<unsigned const*>(problem.params.out), count, differences);
  }
  unsigned long long total = 0;
  HTREE_CUDA_CHECK(cudaMemcpy(&total, differences, sizeof(total), cudaMemcpyDeviceToHost));
  return total;
}

// ---- the suite -------------------------------------------------------------------------------------------------

struct Suite {
  Buffers buffers;
  int cases = 0;
  int failures = 0;
  double max_error = 0;
  double rms_error = 0;

  // Inputs are the rounded values in both, so only the arithmetic differs: float32 sums of up to 576 products, scores
  // of about one, exponentials good to 2^-22.
  static constexpr double kMaxError = 1e-5;

  template <class Element>
  void run(Shape const& s) {
    Outcome const o = check<Element>(s, buffers, 1000 + cases);
    ++cases;
    max_error = std::max(max_error, o.max_error);
    rms_error = std::max(rms_error, o.rms_error);
    if (o.wrong != 0 || !(o.max_error < kMaxError)) {
      if (++failures <= 40) {
        std::fprintf(stderr,
                     "FAILED %s B %d s_q %d s_kv %d h_q %d d %d topk %d slots %d causal %d lengths %d strided %d poison %d "
                     "odd %d natural %d: wrong %ld max %.3g rms %.3g\n",
                     dtype_of<Element>() == DType::kBFloat16 ? "bf16" : "fp16", s.B, s.s_q, s.s_kv, s.h_q, s.d, s.topk,
                     int(s.slots), s.causal, s.lengths, s.strided, s.poison, s.odd, s.natural, long(o.wrong),
                     o.max_error, o.rms_error);
      }
    }
  }

  template <class Element>
  void run_all() {
    for (int d : {576, 512, 192, 128}) {
      int variant = 0;
      for (int h_q : {1, 16, 63, 64, 65, 96, 128, 129, 192}) {
        for (int topk : {1, 63, 64, 65, 2047, 2048}) {
          Shape s{1, 3, 4096, h_q, d, topk};
          run<Element>(s);
          // Every feature meets every h_q and topk in some dtype and d_qk.
          ++variant;
          s = {1 + variant % 3, 5, 777 + 64 * (variant % 5), h_q, d, topk};
          s.slots = variant % 7 == 0 ? Slots::kInvalid : Slots::kHostile;
          s.causal = variant % 2;
          s.lengths = variant % 3 == 0;
          s.strided = variant % 4 == 1;
          s.poison = true;
          s.odd = variant % 5 == 2;
          s.natural = variant % 5 == 3;
          run<Element>(s);
        }
      }
      // More queries than CTAs, so that every CTA has whole segments and cuts; few tiles; no key at all.
      run<Element>({1, 300, 5000, 128, d, 320});
      run<Element>({2, 170, 5000, 64, d, 200});
      run<Element>({1, 70, 900, 192, d, 129});
      run<Element>({1, 400, 700, 40, d, 64});
      run<Element>({1, 4, 0, 128, d, 100, Slots::kHostile});
      run<Element>({3, 7, 1, 130, d, 66, Slots::kHostile});
    }
  }
};

// ---- timing ----------------------------------------------------------------------------------------------------

Shape timed_shape(int h_q, int s_kv) { return {1, 4096, s_kv, h_q, 576, 2048}; }

struct Timed {
  Buffers buffers;
  Problem<__nv_bfloat16> problem;
  explicit Timed(Shape const& s) : problem(s, buffers, 1) {
    // Scores are near standard normal: lse about log2(2048) + 0.7 gives probabilities of the usual size.
    std::vector<float> lse(std::size_t(s.B) * s.s_q * s.h_q, 11.7f);
    HTREE_CUDA_CHECK(cudaMemcpy(const_cast<float*>(problem.params.lse), lse.data(), lse.size() * sizeof(float),
                                cudaMemcpyHostToDevice));
    HTREE_CUDA_CHECK(cudaDeviceSynchronize());
  }
};

void time_one(benchmark::Nvml const& nvml, int h_q, int s_kv, bool comma) {
  Shape const s = timed_shape(h_q, s_kv);
  Timed timed(s);
  auto const t = benchmark::measure(nvml, nullptr, [&] { attn_dist(timed.problem.params, nullptr); });
  double const flops = 2.0 * s.B * s.s_q * s.h_q * s.topk * s.d;
  // What the selected rows weigh, each fetched once for all of its query's heads.
  double const gathered = 2.0 * s.B * s.s_q * s.topk * s.d * ((s.h_q + 127) / 128);
  // One H200, 2026-11-20: 755 TFLOP/s is what bf16 GEMMs sustain on random data under the power cap; gathering alone
  // runs at 8.8 TB/s while K fits in L2 and at 6.4 TB/s from 75 MB.
  double const gather_rate = 2.0 * s.s_kv * s.d < 40e6 ? 8.8e12 : 6.4e12;
  double const floor_ms = 1e3 * std::max(flops / 755e12, gathered / gather_rate);
  std::printf("%s\n    {\"dtype\": \"bfloat16\", \"s_q\": %d, \"s_kv\": %d, \"h_q\": %d, \"d_qk\": %d, \"topk\": %d, "
              "\"flops\": %.0f, \"gathered_bytes\": %.0f, \"tflops\": %.1f, \"gathered_tb_per_s\": %.3f, \"floor_ms\": %.3f, "
              "\"of_floor\": %.3f, ",
              comma ? "," : "", s.s_q, s.s_kv, s.h_q, s.d, s.topk, flops, gathered, flops / t.median_ms / 1e9,
              gathered / t.median_ms / 1e9, floor_ms, floor_ms / t.median_ms);
  benchmark::print_timing(t);
  std::printf("}");
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  std::string const mode = argc > 1 ? argv[1] : "";
  if (mode == "--one") {
    Timed timed(timed_shape(std::atoi(argv[2]), std::atoi(argv[3])));
    for (int i = 0; i < (argc > 4 ? std::atoi(argv[4]) : 3); ++i) attn_dist(timed.problem.params, nullptr);
    HTREE_CUDA_CHECK(cudaDeviceSynchronize());
    return 0;
  }
  benchmark::Nvml const nvml;
  std::printf("{\n  \"op\": \"attn_dist\", ");
  benchmark::print_machine(nvml);
  if (mode != "--time-only") {
    Suite suite;
    suite.run_all<__nv_bfloat16>();
    suite.run_all<__half>();
    unsigned long long differences = 0;
    for (int h_q : {128, 64, 192}) {
      Shape s{1, 300, 16384, h_q, 576, 512};
      differences += repeat(s, 1000, suite.buffers);
    }
    std::printf(",\n  \"checks\": {\"cases\": %d, \"failures\": %d, \"max_error\": %.3g, \"rms_error\": %.3g, "
                "\"repeats\": 3000, \"repeat_differences\": %llu}",
                suite.cases, suite.failures, suite.max_error, suite.rms_error, differences);
    std::fflush(stdout);
    if (suite.failures != 0 || differences != 0 || mode == "--check-only") {
      std::printf("\n}\n");
      return suite.failures != 0 || differences != 0;
    }
  }
  std::printf(",\n  \"timings\": [");
  bool comma = false;
  if (mode == "--time-only" && argc > 3) {
    for (int i = 2; i + 1 < argc; i += 2, comma = true) time_one(nvml, std::atoi(argv[i]), std::atoi(argv[i + 1]), comma);
  } else {
    for (int h_q : {128, 64}) {
      for (int s_kv : {4096, 16384, 65536, 131072}) {
        time_one(nvml, h_q, s_kv, comma);
        comma = true;
      }
    }
  }
  std::printf("\n  ]\n}\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return benchmark::guarded(run, argc, argv); }

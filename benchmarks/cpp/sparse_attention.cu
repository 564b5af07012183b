// sparse_attention without Python: the kernel library against a naive float64 kernel on hostile shapes and contents, a
// thousand repeats that must be bitwise identical, then its speed beside the floor. Prints one JSON object.
//
//   sparse_attention                             everything
//   sparse_attention --check-only                correctness and repeats
//   sparse_attention --check-only --small        a few small problems alone
//   sparse_attention --time-only [h_q s_kv]...   timing, of these shapes alone
//   sparse_attention --one h_q s_kv [n]          n launches (default 3) of one timed shape, for a profiler
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

constexpr int kValueDim = 512;

// ---- the definition in float64 ---------------------------------------------------------------------------------

// lse[b][s][h], out[b][s][h][512]; and out with the roundings that a kernel cannot avoid (tests/baseline.py):
// probabilities relative to the largest rounded to the dtype, float32 sums, the output rounded once. One block of 256
// threads for a row; scores become probabilities.
template <class Element>
__global__ void reference_attention(double* scores, bool const* valid, int const* indices, Element const* kv,
                                    float const* sink, Shape shape, Layout layout, double sm_scale, double* lse,
                                    double* out, float* baseline) {
  std::int64_t const i = blockIdx.x;
  std::int64_t const row = i / shape.h_q;
  double* const p = scores + i * shape.topk;
  valid += row * shape.topk;
  indices += row * shape.topk;
  __shared__ double shared[256];
  double most = -INFINITY;
  for (int j = threadIdx.x; j < shape.topk; j += 256) {
    if (valid[j]) most = fmax(most, p[j] * sm_scale);
  }
  shared[threadIdx.x] = most;
  __syncthreads();
  for (int j = 0; j < 256; ++j) most = fmax(most, shared[j]);
  __syncthreads();
  double sum = 0;
  for (int j = threadIdx.x; j < shape.topk; j += 256) {
    p[j] = valid[j] ? exp(p[j] * sm_scale - most) : 0.0;
    sum += p[j];
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
  for (int j = 0; j < 256; ++j) sum += shared[j];
  double const all = sink == nullptr ? sum : sum + exp(double(sink[i % shape.h_q]) - most);
  if (threadIdx.x == 0) {
    lse[i] = (most + log(sum)) * (shape.natural ? 1.0 : 1.4426950408889634074);
  }
  for (int c = threadIdx.x; c < kValueDim; c += 256) {
    double exact = 0;
    float rounded = 0;
    for (int j = 0; j < shape.topk; ++j) {
      if (!valid[j]) continue;
      float const value = float(kv[row / shape.s_q * layout.k_b + indices[j] * layout.k_s + c]);
      exact += p[j] * value;
      rounded += float(Element(float(p[j]))) * value;
    }
    out[i * kValueDim + c] = sum == 0 ? 0.0 : exact / all;
    baseline[i * kValueDim + c] = sum == 0 ? 0.f : float(Element(rounded / float(all)));
  }
}

template <class Element>
__global__ void to_float(Element const* x, std::int64_t n, float* y) {
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < n;
       i += std::int64_t(gridDim.x) * blockDim.x) {
    y[i] = float(x[i]);
  }
}

// ---- problems --------------------------------------------------------------------------------------------------

struct Buffers {
  Arena q, kv, indices, out, lse, workspace, lengths, sinks, scores, valid, exact, exact_lse, baseline, floats, selected, starts;
};

template <class Element>
struct Problem {
  Shape shape;
  Layout layout;
  SparseAttentionParams params{};
  std::vector<std::int64_t> starts;

  Problem(Shape const& s, Buffers& buffers, std::uint64_t seed) : shape(s), layout(s), starts(s.B) {
    std::int64_t const rows = std::int64_t(s.B) * s.s_q;
    auto* const q = buffers.q.get<Element>(s.B * layout.q_b);
    auto* const kv = buffers.kv.get<Element>(s.B * layout.k_b);
    fill_normal<<<blocks(s.B * layout.q_b), 256>>>(q, s.B * layout.q_b, seed);
    fill_normal<<<blocks(s.B * layout.k_b), 256>>>(kv, s.B * layout.k_b, seed + 1);
    if (s.strided) poison_gaps<<<blocks(s.B * (layout.q_b + layout.k_b)), 256>>>(q, kv, s, layout);
    auto* const indices = buffers.indices.get<int>(rows * s.topk);
    fill_indices<<<blocks(rows * s.topk), 256>>>(indices, rows, s.topk, s.s_kv, s.slots, seed + 2);
    HTREE_CUDA_CHECK(cudaGetLastError());
    params.q = q;
    params.q_stride_b = layout.q_b;
    params.q_stride_s = layout.q_s;
    params.q_stride_h = layout.q_h;
    params.kv = kv;
    params.kv_stride_b = layout.k_b;
    params.kv_stride_s = layout.k_s;
    params.indices = indices;
    params.indices_stride_b = std::int64_t(s.s_q) * s.topk;
    params.indices_stride_s = s.topk;
    params.indices_stride_t = 1;
    params.topk_length_stride_b = s.s_q;
    params.topk_length_stride_s = 1;
    params.attn_sink_stride = 1;
    params.out = buffers.out.get<Element>(rows * s.h_q * kValueDim);
    params.lse = buffers.lse.get<float>(rows * s.h_q);
    if (s.lengths) {
      std::vector<int> const lengths = odd_lengths(rows, s.topk, seed);
      int* const device = buffers.lengths.get<int>(rows);
      HTREE_CUDA_CHECK(cudaMemcpy(device, lengths.data(), rows * sizeof(int), cudaMemcpyHostToDevice));
      params.topk_length = device;
    }
    if (s.odd) {
      std::vector<float> sinks(s.h_q);
      for (int h = 0; h < s.h_q; ++h) {
        float const kinds[] = {0.f, 3.f, 9.f, -5.f, 60.f, -200.f, INFINITY, -INFINITY, 7.5f, NAN};
        sinks[h] = kinds[mix(seed + h * 17) % 10];
      }
      float* const device = buffers.sinks.get<float>(s.h_q);
      HTREE_CUDA_CHECK(cudaMemcpy(device, sinks.data(), s.h_q * sizeof(float), cudaMemcpyHostToDevice));
      params.attn_sink = device;
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
    params.d_v = kValueDim;
    params.topk = s.topk;
    params.sm_scale = 1.0 / std::sqrt(double(s.d));
    params.lse_base = s.natural ? std::exp(1.0) : 2.0;
    params.dtype = dtype_of<Element>();
    params.workspace_bytes = sparse_attention_workspace(params);
    params.workspace = buffers.workspace.get<std::uint8_t>(params.workspace_bytes);
  }
};

struct Outcome {
  double max_error = 0, baseline_max = 0;  // over elements, relative to the root mean square of the row
  double rms_error = 0, baseline_rms = 0;  // over all
  double lse_error = 0;                    // absolute, over rows
  std::int64_t wrong = 0;                  // not finite where the definition is, or the other way round
};

template <class Element>
Outcome check(Shape const& s, Buffers& buffers, std::uint64_t seed) {
  Problem<Element> problem(s, buffers, seed);
  std::int64_t const rows = std::int64_t(s.B) * s.s_q;
  std::int64_t const heads = rows * s.h_q;
  std::int64_t const count = heads * kValueDim;
  auto* const scores = buffers.scores.get<double>(heads * s.topk);
  auto* const valid = buffers.valid.get<bool>(rows * s.topk);
  auto* const exact = buffers.exact.get<double>(count);
  auto* const exact_lse = buffers.exact_lse.get<double>(heads);
  auto* const baseline = buffers.baseline.get<float>(count);
  auto* const floats = buffers.floats.get<float>(count);
  auto* const starts = buffers.starts.get<std::int64_t>(s.B);
  HTREE_CUDA_CHECK(cudaMemcpy(starts, problem.starts.data(), s.B * sizeof(std::int64_t), cudaMemcpyHostToDevice));
  auto const* const q = static_cast<Element const*>(problem.params.q);
  auto* const kv = static_cast<Element*>(const_cast<void*>(problem.params.kv));
  reference_scores<<<blocks(32 * heads * s.topk), 256>>>(q, kv, problem.params.indices, problem.params.topk_length,
                                                         starts, kStrideTokens, s, problem.layout, scores, valid);
  reference_attention<<<unsigned(heads), 256>>>(scores, valid, problem.params.indices, kv, problem.params.attn_sink, s,
                                                problem.layout, problem.params.sm_scale, exact_lse, exact, baseline);
  if (s.poison && s.s_kv > 0) {
    auto* const selected = buffers.selected.get<bool>(std::int64_t(s.B) * s.s_kv);
    HTREE_CUDA_CHECK(cudaMemset(selected, 0, std::int64_t(s.B) * s.s_kv));
    mark_selected<<<blocks(rows * s.topk), 256>>>(problem.params.indices, valid, s, selected);
    poison_unselected<<<unsigned(s.B * s.s_kv), 128>>>(kv, selected, s, problem.layout);
  }
  HTREE_CUDA_CHECK(cudaGetLastError());
  HTREE_CUDA_CHECK(cudaMemset(problem.params.out, 0x7b, count * sizeof(Element)));  // 1.3e36, 6.1e4
  HTREE_CUDA_CHECK(cudaMemset(problem.params.lse, 0x7b, heads * sizeof(float)));
  sparse_attention(problem.params, nullptr);
  to_float<<<blocks(count), 256>>>(static_cast<Element const*>(problem.params.out), count, floats);
  HTREE_CUDA_CHECK(cudaDeviceSynchronize());

  std::vector<float> got(count), base(count), got_lse(heads);
  std::vector<double> expected(count), expected_lse(heads);
  HTREE_CUDA_CHECK(cudaMemcpy(got.data(), floats, count * sizeof(float), cudaMemcpyDeviceToHost));
  HTREE_CUDA_CHECK(cudaMemcpy(base.data(), baseline, count * sizeof(float), cudaMemcpyDeviceToHost));
  HTREE_CUDA_CHECK(cudaMemcpy(expected.data(), exact, count * sizeof(double), cudaMemcpyDeviceToHost));
  HTREE_CUDA_CHECK(cudaMemcpy(got_lse.data(), problem.params.lse, heads * sizeof(float), cudaMemcpyDeviceToHost));
  HTREE_CUDA_CHECK(cudaMemcpy(expected_lse.data(), exact_lse, heads * sizeof(double), cudaMemcpyDeviceToHost));
  Outcome outcome;
  double squares = 0, baseline_squares = 0;
  std::int64_t finite = 0;
  for (std::int64_t i = 0; i < heads; ++i) {
    double const x = expected_lse[i], y = got_lse[i];
    if (std::isfinite(x) != std::isfinite(y) || (std::isinf(x) && x != y)) {
      ++outcome.wrong;
    } else if (std::isfinite(x)) {
      outcome.lse_error = std::max(outcome.lse_error, std::abs(x - y));
    }
    double row = 0;
    for (int c = 0; c < kValueDim; ++c) row += expected[i * kValueDim + c] * expected[i * kValueDim + c];
    row = std::max(std::sqrt(row / kValueDim), 1e-30);
    for (int c = 0; c < kValueDim; ++c) {
      double const exact_value = expected[i * kValueDim + c];
      double const mine = got[i * kValueDim + c], allowed = base[i * kValueDim + c];
      if (!std::isfinite(exact_value) || !std::isfinite(mine)) {
        outcome.wrong += !(std::isnan(exact_value) && std::isnan(mine));
        continue;
      }
      double const error = (mine - exact_value) / row, baseline_error = (allowed - exact_value) / row;
      outcome.max_error = std::max(outcome.max_error, std::abs(error));
      outcome.baseline_max = std::max(outcome.baseline_max, std::abs(baseline_error));
      squares += error * error;
      baseline_squares += baseline_error * baseline_error;
      ++finite;
    }
  }
  outcome.rms_error = std::sqrt(squares / std::max<std::int64_t>(finite, 1));
  outcome.baseline_rms = std::sqrt(baseline_squares / std::max<std::int64_t>(finite, 1));
  return outcome;
}

// Bits that differ between the first and any of `repeats` further calls.
unsigned long long repeat(Shape const& s, int repeats, Buffers& buffers) {
  Problem<__nv_bfloat16> problem(s, buffers, 5);
  std::int64_t const heads = std::int64_t(s.B) * s.s_q * s.h_q;
  std::int64_t const words = heads * kValueDim / 2;
  auto* const first = buffers.floats.get<unsigned>(words);
  auto* const first_lse = buffers.exact_lse.get<unsigned>(heads);
  auto* const differences = buffers.selected.get<unsigned long long>(1);
  HTREE_CUDA_CHECK(cudaMemset(differences, 0, sizeof(unsigned long long)));
  sparse_attention(problem.params, nullptr);
  HTREE_CUDA_CHECK(cudaMemcpy(first, problem.params.out, words * sizeof(unsigned), cudaMemcpyDeviceToDevice));
  HTREE_CUDA_CHECK(cudaMemcpy(first_lse, problem.params.lse, heads * sizeof(float), cudaMemcpyDeviceToDevice));
  for (int i = 0; i < repeats; ++i) {
    HTREE_CUDA_CHECK(cudaMemsetAsync(problem.params.out, 0xff, words * sizeof(unsigned), nullptr));
    HTREE_CUDA_CHECK(cudaMemsetAsync(problem.params.lse, 0xff, heads * sizeof(float), nullptr));
    sparse_attention(problem.params, nullptr);
    count_differences<<<blocks(words), 256>>>(first, static_cast<unsigned const*>(problem.params.out), words, differences);
    count_differences<<<blocks(heads), 256>>>(first_lse, reinterpret_cast<unsigned const*>(problem.params.lse), heads,
                                    differences);
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
  double worst_ratio = 0;  // of the error to the baseline's, maximum or root mean square
  double lse_error = 0;

  static constexpr double kFactor = 2.0;        // tests/baseline.py
  static constexpr double kArithmetic = 2e-6;   // relative to the row: float32 sums where the baseline is exact
  static constexpr double kMaxLseError = 2e-5;  // float32 scores of about one, sums of up to 2048 terms

  template <class Element>
  void run(Shape const& s) {
    Outcome const o = check<Element>(s, buffers, 1000 + cases);
    ++cases;
    worst_ratio = std::max({worst_ratio, (o.max_error - kArithmetic) / std::max(o.baseline_max, kArithmetic),
                            (o.rms_error - kArithmetic) / std::max(o.baseline_rms, kArithmetic)});
    lse_error = std::max(lse_error, o.lse_error);
    bool const good = o.wrong == 0 && o.max_error <= kFactor * o.baseline_max + kArithmetic &&
                      o.rms_error <= kFactor * o.baseline_rms + kArithmetic && o.lse_error < kMaxLseError;
    if (!good && ++failures <= 40) {
      std::fprintf(stderr,
                   "FAILED %s B %d s_q %d s_kv %d h_q %d d %d topk %d slots %d causal %d lengths %d strided %d poison %d "
                   "odd %d natural %d: wrong %ld max %.3g (%.3g) rms %.3g (%.3g) lse %.3g\n",
                   dtype_of<Element>() == DType::kBFloat16 ? "bf16" : "fp16", s.B, s.s_q, s.s_kv, s.h_q, s.d, s.topk,
                   int(s.slots), s.causal, s.lengths, s.strided, s.poison, s.odd, s.natural, long(o.wrong),
                   o.max_error, o.baseline_max, o.rms_error, o.baseline_rms, o.lse_error);
    }
  }

  template <class Element>
  void run_all() {
    for (int d : {576, 512}) {
      int variant = 0;
      for (int h_q : {1, 16, 63, 64, 65, 96, 128, 129, 192}) {
        for (int topk : {1, 63, 64, 65, 129, 2047, 2048}) {
          Shape s{1, 3, 4096, h_q, d, topk};
          run<Element>(s);
          // Every feature meets every h_q and topk in some dtype and d_qk.
          ++variant;
          s = {1 + variant % 3, 5, 777 + 64 * (variant % 5), h_q, d, topk};
          s.slots = variant % 8 == 0 ? Slots::kInvalid : Slots::kHostile;
          s.causal = variant % 2;
          s.lengths = variant % 3 == 0;
          s.strided = variant % 4 == 1;
          s.poison = true;
          s.odd = variant % 5 == 2;
          s.natural = variant % 5 == 3;
          run<Element>(s);
        }
      }
      // More units than CTAs, so that every CTA has several; few tiles; no key at all.
      run<Element>({1, 300, 5000, 128, d, 320});
      run<Element>({2, 170, 5000, 64, d, 200});
      run<Element>({1, 70, 900, 192, d, 129});
      run<Element>({1, 400, 700, 40, d, 64});
      run<Element>({1, 4, 0, 128, d, 100, Slots::kHostile});
      run<Element>({3, 7, 1, 130, d, 66, Slots::kHostile});
    }
  }

  void small() {
    Shape s{2, 2, 70, 65, 576, 70, Slots::kHostile};
    s.causal = s.lengths = s.strided = s.poison = s.odd = true;
    run<__nv_bfloat16>(s);
    run<__nv_bfloat16>({1, 5, 200, 3, 576, 130});
    s.d = 512;
    s.natural = true;
    run<__half>(s);
  }
};

// ---- timing ----------------------------------------------------------------------------------------------------

Shape timed_shape(int h_q, int s_kv) { return {1, 4096, s_kv, h_q, 576, 2048}; }

struct Timed {
  Buffers buffers;
  Problem<__nv_bfloat16> problem;
  explicit Timed(Shape const& s) : problem(s, buffers, 1) { HTREE_CUDA_CHECK(cudaDeviceSynchronize()); }
};

void time_one(Nvml const& nvml, int h_q, int s_kv, bool comma) {
  Shape const s = timed_shape(h_q, s_kv);
  Timed timed(s);
  auto const call = [&] { sparse_attention(timed.problem.params, nullptr); };
  auto const t = measure(nvml, nullptr, call);
  auto const spaced = measure(nvml, nullptr, call, Pace::kSpaced);
  double const flops = 2.0 * s.B * s.s_q * s.h_q * s.topk * (s.d + kValueDim);
  // What the selected rows take in bytes, fetched for each group of 64 heads.
  double const gathered = 2.0 * s.B * s.s_q * s.topk * s.d * s.groups();
  // One H200, 2026-11-20: 755 TFLOP/s is what bf16 GEMMs sustain on random data under the power cap; gathering alone
  // runs at 8.8 TB/s while the rows fit in L2 and at 6.4 TB/s from 75 MB.
  double const gather_rate = 2.0 * s.s_kv * s.d < 40e6 ? 8.8e12 : 6.4e12;
  double const floor_ms = 1e3 * std::max(flops / 755e12, gathered / gather_rate);
  std::printf("%s\n    {\"dtype\": \"bfloat16\", \"s_q\": %d, \"s_kv\": %d, \"h_q\": %d, \"d_qk\": %d, \"topk\": %d, "
              "\"flops\": %.0f, \"gathered_bytes\": %.0f, \"tflops\": %.1f, \"gathered_tb_per_s\": %.3f, \"floor_ms\": %.3f, "
              "\"of_floor\": %.3f, ",
              comma ? "," : "", s.s_q, s.s_kv, s.h_q, s.d, s.topk, flops, gathered, flops / t.median_ms / 1e9,
              gathered / t.median_ms / 1e9, floor_ms, floor_ms / t.median_ms);
  print_timing(t);
  std::printf(", \"spaced\": {");
  print_timing(spaced);
  std::printf("}}");
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  std::string const mode = argc > 1 ? argv[1] : "";
  if (mode == "--one") {
    Timed timed(timed_shape(std::atoi(argv[2]), std::atoi(argv[3])));
    for (int i = 0; i < (argc > 4 ? std::atoi(argv[4]) : 3); ++i) sparse_attention(timed.problem.params, nullptr);
    HTREE_CUDA_CHECK(cudaDeviceSynchronize());
    return 0;
  }
  Nvml const nvml;
  std::printf("{\n  \"op\": \"sparse_attention\", ");
  print_machine(nvml);
  if (mode != "--time-only") {
    bool const small = argc > 2 && std::string(argv[2]) == "--small";
    Suite suite;
    unsigned long long differences = 0;
    int repeats = 0;
    if (small) {
      suite.small();
      differences += repeat({1, 4, 100, 64, 576, 70}, repeats = 5, suite.buffers);
    } else {
      suite.run_all<__nv_bfloat16>();
      suite.run_all<__half>();
      for (int h_q : {128, 64, 192}) {
        differences += repeat({1, 300, 16384, h_q, 576, 512}, 1000, suite.buffers);
        repeats += 1000;
      }
    }
    std::printf(",\n  \"checks\": {\"cases\": %d, \"failures\": %d, \"worst_ratio_to_baseline\": %.3g, \"lse_error\": %.3g, "
                "\"repeats\": %d, \"repeat_differences\": %llu}",
                suite.cases, suite.failures, suite.worst_ratio, suite.lse_error, repeats, differences);
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

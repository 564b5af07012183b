// Decoding over a cached tree without Python: tree_append and tree_decode against a float64 descent on the CPU, a thousand
// repeats that must be bitwise identical, then the speed of steps. Prints one JSON object.
//
//   decode                                        everything
//   decode --check-only [--small]                 correctness and repeats; --small: a few small problems alone
//   decode --time-only [B T H H_kv top_k]...      timing, of these shapes alone
//   decode --one B T H H_kv top_k [n]             n launches (default 3) of tree_decode of one shape, for a profiler
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "params.h"
#include "protocol.h"
#include "random.h"

using namespace htree_cuda;
using namespace htree_cuda::benchmark;

namespace {

constexpr int kSiblings = 16;
constexpr int kStepsOfGraph = 16;
constexpr double kRopeBase = 10000.0;

template <class Element>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<__nv_bfloat16>() { return DType::kBFloat16; }
template <>
constexpr DType dtype_of<__half>() { return DType::kFloat16; }

template <class T>
class Device {
public:
  explicit Device(std::int64_t n) : n_(n) { HTREE_CUDA_CHECK(cudaMalloc(&data_, std::max<std::int64_t>(n, 1) * sizeof(T))); }
  ~Device() { cudaFree(data_); }
  Device(Device const&) = delete;
  Device& operator=(Device const&) = delete;
  T* get() const { return data_; }
  std::int64_t size() const { return n_; }
  std::vector<T> host() const {
    std::vector<T> x(n_);
    HTREE_CUDA_CHECK(cudaMemcpy(x.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
    return x;
  }
  void set(std::vector<T> const& x) { HTREE_CUDA_CHECK(cudaMemcpy(data_, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice)); }

private:
  std::int64_t n_;
  T* data_ = nullptr;
};

template <class Element>
void fill(Element* x, std::int64_t n, std::uint64_t seed) {
  fill_normal<<<1024, 256>>>(x, n, seed);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

struct Shape {
  std::int64_t B, T, H, H_kv, top_k;
  std::int64_t K = 128;

  std::int64_t G() const { return H / H_kv; }
};

// A contiguous cache of max_tokens tokens a sequence, filled with random tokens, and one query a sequence.
template <class Element>
struct Problem {
  Shape shape;
  std::int64_t max_tokens, rows = 0;
  TreeDecodeParams decode{};
  TreeAppendParams append{};
  std::vector<std::int32_t> full;
  Device<Element> k, v, q, new_k, new_v, out;
  Device<std::int32_t> lengths, full_lengths, overflowed, selection;
  Device<float> rotations, lse;
  std::int64_t layers;

  static std::int64_t layers_of(std::int64_t tokens) {
    std::int64_t layers = 1;
    while (std::int64_t{1} << (4 * layers) <= tokens) ++layers;
    return layers;
  }
  static std::int64_t rows_of(std::int64_t tokens, int layer) {
    return ((tokens >> (4 * layer)) + kSiblings - 1) / kSiblings * kSiblings;
  }
  static std::int64_t all_rows(std::int64_t tokens) {
    std::int64_t sum = 0;
    for (int layer = 0; layer < layers_of(tokens); ++layer) sum += rows_of(tokens, layer);
    return sum;
  }

  // `chunk` tokens are appended at a time.
  Problem(Shape const& s, std::int64_t chunk, std::uint64_t seed)
      : shape(s),
        max_tokens(s.T + kStepsOfGraph),
        rows(all_rows(max_tokens)),
        k(s.B * s.H_kv * rows * s.K),
        v(s.B * s.H_kv * rows * s.K),
        q(s.B * s.H * s.K),
        new_k(s.B * chunk * s.H_kv * s.K),
        new_v(s.B * chunk * s.H_kv * s.K),
        out(s.B * s.H * s.K),
        lengths(s.B),
        full_lengths(s.B),
        overflowed(s.B),
        selection(layers_of(max_tokens) * s.B * s.H_kv * s.top_k),
        rotations(kSiblings * s.top_k * s.K),
        lse(s.B * s.H),
        layers(layers_of(max_tokens)) {
    HTREE_CUDA_CHECK(cudaMemset(k.get(), 0xff, k.size() * sizeof(Element)));  // NaN where nothing is written
    HTREE_CUDA_CHECK(cudaMemset(v.get(), 0xff, v.size() * sizeof(Element)));
    HTREE_CUDA_CHECK(cudaMemset(lengths.get(), 0, s.B * sizeof(std::int32_t)));
    HTREE_CUDA_CHECK(cudaMemset(overflowed.get(), 0, s.B * sizeof(std::int32_t)));
    std::vector<float> table(rotations.size());
    for (std::int64_t n = 0; n < kSiblings * s.top_k; ++n) {
      for (std::int64_t m = 0; m < s.K / 2; ++m) {
        double const angle = double(n) * std::pow(kRopeBase, -2.0 * double(m) / double(s.K));
        table[(n * (s.K / 2) + m) * 2] = float(std::cos(angle));
        table[(n * (s.K / 2) + m) * 2 + 1] = float(std::sin(angle));
      }
    }
    rotations.set(table);
    fill(q.get(), q.size(), seed);
    TreeCacheParams& cache = append.cache;
    cache.k = k.get();
    cache.v = v.get();
    cache.lengths = lengths.get();
    cache.overflowed = overflowed.get();
    std::int64_t begin = 0;
    for (int layer = 0; layer < layers; ++layer) {
      cache.layer_begin[layer] = begin;
      begin += rows_of(max_tokens, layer);
    }
    cache.rows = rows;
    cache.B = s.B;
    cache.H_kv = s.H_kv;
    cache.K = cache.V = s.K;
    cache.max_tokens = max_tokens;
    cache.num_layers = layers;
    cache.dtype = dtype_of<Element>();
    append.k = new_k.get();
    append.v = new_v.get();
    append.k_stride_h = append.v_stride_h = s.K;
    append.k_stride_t = append.v_stride_t = s.H_kv * s.K;
    append.k_stride_b = append.v_stride_b = chunk * s.H_kv * s.K;
    for (std::int64_t first = 0; first < s.T; first += chunk) {
      fill(new_k.get(), new_k.size(), seed + 2 + 2 * first);
      fill(new_v.get(), new_v.size(), seed + 3 + 2 * first);
      append.T_new = std::min(chunk, s.T - first);
      tree_append(append, nullptr);
    }
    append.T_new = 1;
    full.assign(s.B, std::int32_t(s.T));
    full_lengths.set(full);
    decode.cache = cache;
    decode.q = q.get();
    decode.q_stride_h = s.K;
    decode.q_stride_t = decode.q_stride_b = s.H * s.K;
    decode.rotations = rotations.get();
    decode.out = out.get();
    decode.lse = lse.get();
    decode.selection = selection.get();
    decode.selection_layers = layers - 1;
    decode.T_q = 1;
    decode.G = s.G();
    decode.top_k = s.top_k;
    decode.rope_dim = s.K;
    decode.scale = 1.0 / std::sqrt(double(s.K));
    HTREE_CUDA_CHECK(cudaDeviceSynchronize());
  }

  void restore(cudaStream_t stream) {
    HTREE_CUDA_CHECK(cudaMemcpyAsync(lengths.get(), full_lengths.get(), shape.B * sizeof(std::int32_t),
                                     cudaMemcpyDeviceToDevice, stream));
  }
};

// ---- the definition in float64 ---------------------------------------------------------------------------------

// x with 11 significant bits, as the tensor cores' tf32 has.
double round_tf32(double x) {
  int exponent = 0;
  double const fraction = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11);
}

struct Outcome {
  double max_error = 0, baseline_max = 0;  // of elements, relative to the root mean square of the row
  double lse_error = 0;
  std::int64_t wrong = 0;  // values that are not finite, selected nodes that a definition would not select
};

void rotate(std::vector<double>& x, double position) {
  std::size_t const half = x.size() / 2;
  for (std::size_t m = 0; m < half; ++m) {
    double const angle = position * std::pow(kRopeBase, -2.0 * double(m) / double(x.size()));
    double const low = x[m], high = x[m + half];
    x[m] = low * std::cos(angle) - high * std::sin(angle);
    x[m + half] = low * std::sin(angle) + high * std::cos(angle);
  }
}

// One query of one KV head: the kernel's selection is judged layer by layer, with room for importances that are closer
// than roundings, then taken over; outputs are those of the definition with that selection.
template <class Element>
void check_one(Problem<Element> const& p, std::int64_t b, std::int64_t h, std::vector<Element> const& k,
               std::vector<Element> const& v, std::vector<Element> const& q, std::vector<Element> const& out,
               std::vector<float> const& lse, std::vector<std::int32_t> const& selection, Outcome& outcome) {
  constexpr double kCloseImportances = 0.02;  // relative
  Shape const& s = p.shape;
  std::int64_t const G = s.G(), K = s.K, t = s.T - 1;
  auto const row = [&](std::vector<Element> const& x, int layer, std::int64_t node) {
    std::int64_t const at = ((b * s.H_kv + h) * p.rows + p.append.cache.layer_begin[layer] + node) * K;
    std::vector<double> y(K);
    for (std::int64_t i = 0; i < K; ++i) y[i] = float(x[at + i]);
    return y;
  };
  int layer = 0;
  while (t >> (4 * (layer + 1)) >= s.top_k) ++layer;
  std::vector<std::int64_t> nodes((t >> (4 * layer)) + 1);
  for (std::size_t i = 0; i < nodes.size(); ++i) nodes[i] = std::int64_t(i);
  struct Attended {
    double score[16], rounded[16];
    std::vector<double> value;
  };
  std::vector<Attended> attended;
  for (; layer >= 0; --layer) {
    std::int64_t const n = std::int64_t(nodes.size());
    std::int64_t const readable = n - (layer > 0);
    std::vector<std::vector<double>> heads(G);
    for (std::int64_t g = 0; g < G; ++g) {
      heads[g].resize(K);
      for (std::int64_t i = 0; i < K; ++i) heads[g][i] = float(q[(b * s.H + h * G + g) * K + i]);
      rotate(heads[g], double(n - 1));
    }
    std::vector<Attended> candidates(readable);
    for (std::int64_t c = 0; c < readable; ++c) {
      std::vector<double> key = row(k, layer, nodes[c]);
      rotate(key, double(c));
      for (std::int64_t g = 0; g < G; ++g) {
        double exact = 0, rounded = 0;
        for (std::int64_t i = 0; i < K; ++i) {
          exact += heads[g][i] * key[i];
          rounded += round_tf32(heads[g][i]) * round_tf32(key[i]);
        }
        candidates[c].score[g] = exact * p.decode.scale;
        candidates[c].rounded[g] = rounded * p.decode.scale;
      }
      candidates[c].value = row(v, layer, nodes[c]);
    }
    std::vector<bool> expanded(n, false);
    if (layer > 0) {
      std::vector<double> importance(readable, 0.0);
      for (std::int64_t g = 0; g < G; ++g) {
        double most = -INFINITY, sum = 0;
        for (auto const& c : candidates) most = std::max(most, c.score[g]);
        for (auto const& c : candidates) sum += std::exp(c.score[g] - most);
        for (std::int64_t c = 0; c < readable; ++c) importance[c] += std::exp(candidates[c].score[g] - most) / sum;
      }
      std::vector<double> sorted = importance;
      std::nth_element(sorted.begin(), sorted.begin() + (s.top_k - 2), sorted.end(), std::greater<>());
      double const threshold = sorted[s.top_k - 2];
      std::int32_t const* const list = selection.data() + (((layer - 1) * s.B + b) * s.H_kv + h) * s.top_k;
      std::vector<std::int64_t> children;
      for (std::int64_t i = 0; i < s.top_k; ++i) {
        auto const found = std::lower_bound(nodes.begin(), nodes.end(), std::int64_t(list[i]));
        bool const known = found != nodes.end() && *found == list[i];
        std::int64_t const c = known ? found - nodes.begin() : 0;
        bool const again = known && expanded[c];
        if (!known || again || (i > 0 && list[i] <= list[i - 1])) {
          ++outcome.wrong;
          return;
        }
        expanded[c] = true;
        if (c < readable && importance[c] < threshold * (1 - kCloseImportances)) ++outcome.wrong;
        for (std::int64_t child = 16 * nodes[c]; child < 16 * nodes[c] + 16; ++child) {
          if (child <= t >> (4 * (layer - 1))) children.push_back(child);
        }
      }
      outcome.wrong += !expanded[n - 1];
      for (std::int64_t c = 0; c < readable; ++c) {
        outcome.wrong += !expanded[c] && importance[c] > threshold * (1 + kCloseImportances);
      }
      nodes = children;
    }
    for (std::int64_t c = 0; c < readable; ++c) {
      if (!expanded[c]) attended.push_back(candidates[c]);
    }
  }
  for (std::int64_t g = 0; g < G; ++g) {
    double most = -INFINITY;
    for (auto const& a : attended) most = std::max(most, a.score[g]);
    double sum = 0, rounded_sum = 0;
    std::vector<double> exact(K, 0.0), rounded(K, 0.0);
    for (auto const& a : attended) {
      double const x = std::exp(a.score[g] - most), y = std::exp(a.rounded[g] - most);
      sum += x;
      rounded_sum += y;
      for (std::int64_t i = 0; i < K; ++i) {
        exact[i] += x * a.value[i];
        rounded[i] += round_tf32(y) * a.value[i];
      }
    }
    double square = 0;
    for (double x : exact) square += x * x / (sum * sum);
    double const rms = std::sqrt(square / double(K));
    std::int64_t const head = b * s.H + h * G + g;
    outcome.lse_error = std::max(outcome.lse_error, std::abs(most + std::log(sum) - double(lse[head])));
    for (std::int64_t i = 0; i < K; ++i) {
      double const mine = float(out[head * K + i]), truth = exact[i] / sum;
      outcome.wrong += !std::isfinite(mine);
      outcome.max_error = std::max(outcome.max_error, std::abs(mine - truth) / rms);
      double const base = float(Element(float(rounded[i] / rounded_sum)));
      outcome.baseline_max = std::max(outcome.baseline_max, std::abs(base - truth) / rms);
    }
  }
}

template <class Element>
Outcome check(Problem<Element>& p) {
  HTREE_CUDA_CHECK(cudaMemset(p.out.get(), 0x7b, p.out.size() * sizeof(Element)));
  HTREE_CUDA_CHECK(cudaMemset(p.lse.get(), 0x7b, p.lse.size() * sizeof(float)));
  tree_decode(p.decode, nullptr);
  HTREE_CUDA_CHECK(cudaDeviceSynchronize());
  auto const k = p.k.host(), v = p.v.host(), q = p.q.host(), out = p.out.host();
  auto const lse = p.lse.host();
  auto const selection = p.selection.host();
  Outcome outcome;
  for (std::int64_t b = 0; b < p.shape.B; ++b) {
    for (std::int64_t h = 0; h < p.shape.H_kv; ++h) check_one(p, b, h, k, v, q, out, lse, selection, outcome);
  }
  return outcome;
}

template <class T>
std::uint64_t different_bytes(std::vector<T> const& x, std::vector<T> const& y) {
  auto const* const a = reinterpret_cast<unsigned char const*>(x.data());
  auto const* const b = reinterpret_cast<unsigned char const*>(y.data());
  std::uint64_t count = 0;
  for (std::size_t i = 0; i < x.size() * sizeof(T); ++i) count += a[i] != b[i];
  return count;
}

struct Suite {
  int cases = 0, failures = 0;
  double worst_ratio = 0, lse_error = 0;

  static constexpr double kFactor = 2.0;         // tests/baseline.py
  static constexpr double kMaxLseError = 2e-3;   // natural logarithm; operands of 11 bits, scores of about one

  template <class Element>
  void run(Shape const& s) {
    Problem<Element> all(s, std::max<std::int64_t>(s.T, 1), 100 + cases);
    Outcome const o = check(all);
    ++cases;
    worst_ratio = std::max(worst_ratio, o.max_error / std::max(o.baseline_max, 1e-6));
    lse_error = std::max(lse_error, o.lse_error);
    if (o.wrong == 0 && o.max_error <= kFactor * o.baseline_max && o.lse_error < kMaxLseError) return;
    ++failures;
    std::fprintf(stderr, "FAILED %s B %ld T %ld H %ld H_kv %ld K %ld top_k %ld: wrong %ld max %.3g (%.3g) lse %.3g\n",
                 dtype_of<Element>() == DType::kBFloat16 ? "bf16" : "fp16", long(s.B), long(s.T), long(s.H), long(s.H_kv),
                 long(s.K), long(s.top_k), long(o.wrong), o.max_error, o.baseline_max, o.lse_error);
  }

  template <class Element>
  void run_all() {
    for (std::int64_t T : {1, 16, 17, 257, 4096, 4097, 9001}) {
      for (std::int64_t top_k : {16, 64, 512}) {
        run<Element>({2, T, 8, 2, top_k, 128});
        run<Element>({1, T, 16, 1, top_k, 64});
        run<Element>({1, T, 3, 3, top_k, 128});
      }
    }
  }
};

// Bytes of out and lse that differ between the first call and any of `repeats` more.
std::uint64_t repeat(Shape const& s, int repeats) {
  Problem<__nv_bfloat16> p(s, s.T, 7);
  tree_decode(p.decode, nullptr);
  HTREE_CUDA_CHECK(cudaDeviceSynchronize());
  auto const out = p.out.host();
  auto const lse = p.lse.host();
  std::uint64_t differences = 0;
  for (int i = 0; i < repeats; ++i) {
    HTREE_CUDA_CHECK(cudaMemset(p.out.get(), 0xff, p.out.size() * 2));
    tree_decode(p.decode, nullptr);
    HTREE_CUDA_CHECK(cudaDeviceSynchronize());
    differences += different_bytes(out, p.out.host()) + different_bytes(lse, p.lse.host());
  }
  return differences;
}

// Bytes of the cache that differ when the same tokens come one at a time, and all at once.
std::uint64_t however_filled(Shape const& s) {
  Problem<__nv_bfloat16> p(s, s.T, 9);
  auto const k = p.k.host(), v = p.v.host();
  HTREE_CUDA_CHECK(cudaMemset(p.k.get(), 0xff, p.k.size() * 2));
  HTREE_CUDA_CHECK(cudaMemset(p.v.get(), 0xff, p.v.size() * 2));
  HTREE_CUDA_CHECK(cudaMemset(p.lengths.get(), 0, s.B * sizeof(std::int32_t)));
  TreeAppendParams one = p.append;
  for (std::int64_t t = 0; t < s.T; ++t) {
    one.k = p.new_k.get() + t * one.k_stride_t;
    one.v = p.new_v.get() + t * one.v_stride_t;
    tree_append(one, nullptr);
  }
  HTREE_CUDA_CHECK(cudaDeviceSynchronize());
  return different_bytes(k, p.k.host()) + different_bytes(v, p.v.host());
}

// ---- timing ----------------------------------------------------------------------------------------------------

template <class Body>
cudaGraphExec_t captured(cudaStream_t stream, Body&& body) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  HTREE_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  body();
  HTREE_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  HTREE_CUDA_CHECK(cudaGraphInstantiate(&ready, graph, 0));
  HTREE_CUDA_CHECK(cudaGraphDestroy(graph));
  return ready;
}

void time_one(Nvml const& nvml, Shape const& s, bool comma) {
  Problem<__nv_bfloat16> p(s, std::min<std::int64_t>(s.T, std::max<std::int64_t>(16, (1 << 18) / s.B)), 1);
  p.decode.selection = nullptr;
  p.decode.selection_layers = 0;
  cudaStream_t stream = nullptr;
  HTREE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  auto const graph = captured(stream, [&] {
    p.restore(stream);
    for (int i = 0; i < kStepsOfGraph; ++i) {
      tree_append(p.append, stream);
      tree_decode(p.decode, stream);
    }
  });
  auto const t = measure(nvml, stream, [&] { HTREE_CUDA_CHECK(cudaGraphLaunch(graph, stream)); });
  std::int64_t candidates = 0;
  int layer = 0;
  while ((s.T - 1) >> (4 * (layer + 1)) >= s.top_k) ++layer;
  candidates = ((s.T - 1) >> (4 * layer)) + 1 + layer * kSiblings * s.top_k;
  double const bytes = 2.0 * double(s.B * s.H_kv * s.K) * double(2 * candidates - layer * s.top_k);
  double const us = 1e3 * t.median_ms / kStepsOfGraph;
  std::printf("%s\n    {\"dtype\": \"bfloat16\", \"B\": %ld, \"T\": %ld, \"H\": %ld, \"H_kv\": %ld, \"K\": %ld, \"top_k\": %ld, "
              "\"steps_of_graph\": %d, \"step_us\": %.3f, \"bytes\": %.0f, \"gb_per_s\": %.1f, ",
              comma ? "," : "", long(s.B), long(s.T), long(s.H), long(s.H_kv), long(s.K), long(s.top_k), kStepsOfGraph, us,
              bytes, bytes / us / 1e3);
  print_timing(t);
  std::printf("}");
  std::fflush(stdout);
  HTREE_CUDA_CHECK(cudaGraphExecDestroy(graph));
  HTREE_CUDA_CHECK(cudaStreamDestroy(stream));
}

Shape shape_of(char** argv) {
  return {std::atol(argv[0]), std::atol(argv[1]), std::atol(argv[2]), std::atol(argv[3]), std::atol(argv[4])};
}

int run(int argc, char** argv) {
  std::string const mode = argc > 1 ? argv[1] : "";
  if (mode == "--one") {
    Shape const s = shape_of(argv + 2);
    Problem<__nv_bfloat16> p(s, std::min<std::int64_t>(s.T, 4096), 1);
    for (int i = 0; i < (argc > 7 ? std::atoi(argv[7]) : 3); ++i) tree_decode(p.decode, nullptr);
    HTREE_CUDA_CHECK(cudaDeviceSynchronize());
    return 0;
  }
  Nvml const nvml;
  std::printf("{\n  \"op\": \"decode\", ");
  print_machine(nvml);
  if (mode != "--time-only") {
    bool const small = argc > 2 && std::string(argv[2]) == "--small";
    Suite suite;
    std::uint64_t differences = 0;
    int repeats = 0;
    if (small) {
      suite.run<__nv_bfloat16>({1, 300, 2, 1, 16, 64});
      suite.run<__half>({1, 280, 3, 1, 16, 64});
      differences += repeat({1, 270, 2, 1, 16, 64}, repeats = 2) + however_filled({1, 40, 1, 1, 16, 64});
    } else {
      suite.run_all<__nv_bfloat16>();
      suite.run_all<__half>();
      differences += repeat({2, 9001, 32, 8, 16}, 500) + repeat({1, 40000, 16, 1, 512}, 500);
      repeats = 1000;
      differences += however_filled({2, 4500, 8, 2, 16});
    }
    std::printf(",\n  \"checks\": {\"cases\": %d, \"failures\": %d, \"worst_ratio_to_baseline\": %.3g, \"lse_error\": %.3g, "
                "\"repeats\": %d, \"repeat_differences\": %llu}",
                suite.cases, suite.failures, suite.worst_ratio, suite.lse_error, repeats,
                static_cast<unsigned long long>(differences));
    std::fflush(stdout);
    if (suite.failures != 0 || differences != 0 || mode == "--check-only") {
      std::printf("\n}\n");
      return suite.failures != 0 || differences != 0;
    }
  }
  std::printf(",\n  \"timings\": [");
  bool comma = false;
  if (mode == "--time-only" && argc > 6) {
    for (int i = 2; i + 4 < argc; i += 5, comma = true) time_one(nvml, shape_of(argv + i), comma);
  } else {
    for (std::int64_t top_k : {512, 64}) {
      for (Shape s : {Shape{1, 32768, 32, 8, 0}, Shape{1, 131072, 32, 8, 0}, Shape{1, 1048576, 16, 1, 0},
                      Shape{16, 32768, 32, 8, 0}, Shape{8, 131072, 32, 8, 0}, Shape{64, 32768, 32, 8, 0}}) {
        s.top_k = top_k;
        time_one(nvml, s, comma);
        comma = true;
      }
    }
  }
  std::printf("\n  ]\n}\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return guarded(run, argc, argv); }

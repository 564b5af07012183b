// The htree forward without Python: the kernels against the definition in float64 for some queries of each problem, a
// thousand repeats that must be bitwise identical, then their speed over T. Prints one JSON object.
//
//   forward                                everything
//   forward --check-only                   correctness and repeats
//   forward --check-only --small           the shortest problems alone
//   forward --time-only [T iid|local]...   timing, of these alone
//   forward --one T iid|local [n [G]]      n calls (default 3) of one timed shape, of G heads (16), for a profiler
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "params.h"
#include "protocol.h"
#include "random.h"

using namespace htree_cuda;

namespace {

constexpr std::int64_t kRate = 16;
constexpr float kRho = 0.99f;

template <class Element>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<__nv_bfloat16>() { return DType::kBFloat16; }
template <>
constexpr DType dtype_of<__half>() { return DType::kFloat16; }

struct Shape {
  std::int64_t B, T, T_q, q_start, H_kv, G, K, V, top_k;
  bool strict = true, local = false;
};

std::vector<std::int64_t> layer_sizes(std::int64_t T, std::int64_t top_k) {
  std::vector<std::int64_t> sizes{T};
  while (sizes.back() > top_k * kRate) sizes.push_back((sizes.back() + kRate - 1) / kRate);
  return sizes;
}

template <class T>
class Array {
public:
  explicit Array(std::int64_t count) : count_(count) { HTREE_CUDA_CHECK(cudaMalloc(&data_, std::max<std::int64_t>(bytes(), 256))); }
  ~Array() { cudaFree(data_); }
  Array(Array const&) = delete;
  Array& operator=(Array const&) = delete;
  T* get() const { return data_; }
  std::int64_t count() const { return count_; }
  std::int64_t bytes() const { return count_ * static_cast<std::int64_t>(sizeof(T)); }
  std::vector<T> host() const {
    std::vector<T> out(static_cast<std::size_t>(count_));
    HTREE_CUDA_CHECK(cudaMemcpy(out.data(), data_, static_cast<std::size_t>(bytes()), cudaMemcpyDeviceToHost));
    return out;
  }
  void poison() { HTREE_CUDA_CHECK(cudaMemset(data_, 0xff, static_cast<std::size_t>(bytes()))); }

private:
  std::int64_t count_;
  T* data_ = nullptr;
};

template <class Element>
struct Problem {
  Shape shape;
  std::int64_t H, layers;
  Array<Element> q, k, v, out;
  Array<float> lse;
  Array<std::int32_t> selection;
  ForwardParams params{};
  Array<char> workspace;

  Problem(Shape const& s, bool keep_selection, std::uint64_t seed = 1)
      : shape(s), H(s.H_kv * s.G), layers(static_cast<std::int64_t>(layer_sizes(s.T, s.top_k).size())),
        q(s.B * s.T_q * H * s.K), k(s.B * s.T * s.H_kv * s.K), v(s.B * s.T * s.H_kv * s.V), out(s.B * s.T_q * H * s.V),
        lse(s.B * s.T_q * H), selection(keep_selection ? (layers - 1) * s.B * s.T_q * s.H_kv * s.top_k : 0),
        workspace(fill(keep_selection)) {
    constexpr int kThreads = 256, kBlocks = 1024;
    if (s.local) {
      std::int64_t const columns = H * s.K;
      for (std::int64_t b = 0; b < s.B; ++b) {
        benchmark::fill_local<<<static_cast<unsigned>((columns + 63) / 64), 64>>>(q.get() + b * s.T_q * columns, s.T_q, columns,
                                                                                  kRho, seed + 10 * b);
      }
    } else {
      benchmark::fill_normal<<<kBlocks, kThreads>>>(q.get(), q.count(), seed);
    }
    benchmark::fill_normal<<<kBlocks, kThreads>>>(k.get(), k.count(), seed + 1);
    benchmark::fill_normal<<<kBlocks, kThreads>>>(v.get(), v.count(), seed + 2);
    HTREE_CUDA_CHECK(cudaGetLastError());
    out.poison(), lse.poison(), selection.poison(), workspace.poison();
    params.workspace = workspace.get();
    params.workspace_bytes = workspace.count();
  }

  void run() const { forward(params, nullptr); }

private:
  // Everything but the workspace; its size.
  std::int64_t fill(bool keep_selection) {
    Shape const& s = shape;
    params.q = q.get(), params.k = k.get(), params.v = v.get();
    params.q_stride_h = s.K, params.q_stride_t = H * s.K, params.q_stride_b = s.T_q * H * s.K;
    params.k_stride_h = s.K, params.k_stride_t = s.H_kv * s.K, params.k_stride_b = s.T * s.H_kv * s.K;
    params.v_stride_h = s.V, params.v_stride_t = s.H_kv * s.V, params.v_stride_b = s.T * s.H_kv * s.V;
    params.out = out.get(), params.lse = lse.get();
    params.selection = keep_selection && layers > 1 ? selection.get() : nullptr;
    params.B = s.B, params.T = s.T, params.T_q = s.T_q, params.q_start = s.q_start, params.H_kv = s.H_kv;
    params.G = s.G, params.K = s.K, params.V = s.V, params.top_k = s.top_k;
    params.scale = 1.0 / std::sqrt(double(s.K)), params.rope_base = 10000.0, params.strict_causal = s.strict;
    params.dtype = dtype_of<Element>();
    return forward_workspace(params);
  }
};

// ---- the definition, and what bf16 or fp16 itself would cost (tests/baseline.py) ----------------------------------

float rounded(float x, __nv_bfloat16) { return __bfloat162float(__float2bfloat16_rn(x)); }
float rounded(float x, __half) { return __half2float(__float2half_rn(x)); }
float value(__nv_bfloat16 x) { return __bfloat162float(x); }
float value(__half x) { return __half2float(x); }

// [layer][node][dim] of one (b, h_kv): means of the children that exist, each layer rounded to the dtype.
template <class Element>
using Tree = std::vector<std::vector<float>>;

template <class Element>
Tree<Element> build_tree(std::vector<Element> const& x, std::int64_t first, std::int64_t stride, std::int64_t dim,
                         std::vector<std::int64_t> const& sizes) {
  Tree<Element> tree(sizes.size());
  for (std::size_t l = 0; l < sizes.size(); ++l) {
    tree[l].resize(static_cast<std::size_t>(sizes[l] * dim));
    for (std::int64_t i = 0; i < sizes[l]; ++i) {
      for (std::int64_t d = 0; d < dim; ++d) {
        float& to = tree[l][static_cast<std::size_t>(i * dim + d)];
        if (l == 0) {
          to = value(x[static_cast<std::size_t>(first + i * stride + d)]);
        } else {
          std::int64_t const end = std::min((i + 1) * kRate, sizes[l - 1]);
          float sum = 0;
          for (std::int64_t c = i * kRate; c < end; ++c) sum += tree[l - 1][static_cast<std::size_t>(c * dim + d)];
          to = rounded(sum / float(end - i * kRate), Element());
        }
      }
    }
  }
  return tree;
}

std::vector<double> rotated(float const* x, std::int64_t K, std::int64_t position) {
  std::vector<double> out(static_cast<std::size_t>(K));
  for (std::int64_t m = 0; m < K / 2; ++m) {
    double const angle = double(position) * std::pow(10000.0, -2.0 * double(m) / double(K));
    double const c = std::cos(angle), s = std::sin(angle), lo = x[m], hi = x[m + K / 2];
    out[static_cast<std::size_t>(m)] = lo * c - hi * s;
    out[static_cast<std::size_t>(m + K / 2)] = lo * s + hi * c;
  }
  return out;
}

struct Answer {
  std::vector<double> out, lse;       // [G, V], [G]: the definition
  std::vector<double> base, base_lse;  // the baseline
  std::string fault;                  // of the selection
  double same_share = 1;              // of the selection that is the exact one
};

// The definition for one query and its group of heads, with the nodes that the kernel selected.
template <class Element>
Answer answer(Shape const& s, std::vector<float> const& q, Tree<Element> const& k, Tree<Element> const& v, std::int64_t t,
              std::vector<std::vector<std::int32_t>> const& chosen) {
  std::vector<std::int64_t> const sizes = layer_sizes(s.T, s.top_k);
  int const G = int(s.G);
  double const scale = 1.0 / std::sqrt(double(s.K));
  std::vector<std::vector<double>> scores(G), base_scores(G);
  std::vector<float const*> leaves;
  Answer a;
  std::int64_t same = 0, total = 0;
  std::vector<std::int32_t> parents;
  for (std::size_t l = sizes.size(); l-- > 0;) {
    std::int64_t right = t;
    for (std::size_t i = 0; i < l; ++i) right /= kRate;
    std::vector<std::int64_t> c;
    if (l + 1 == sizes.size()) {
      c.resize(static_cast<std::size_t>(right + 1));
      std::iota(c.begin(), c.end(), 0);
    } else {
      for (std::int32_t parent : parents) {
        for (std::int64_t child = parent * kRate; child < (parent + 1) * kRate && child <= right; ++child) c.push_back(child);
      }
    }
    std::int64_t const n = static_cast<std::int64_t>(c.size());
    std::vector<std::vector<double>> layer_scores(G, std::vector<double>(c.size())), layer_base = layer_scores;
    std::vector<std::vector<double>> q_rotated;
    for (int g = 0; g < G; ++g) q_rotated.push_back(rotated(q.data() + g * s.K, s.K, n - 1));
    for (std::int64_t p = 0; p < n; ++p) {
      std::vector<double> const key = rotated(&k[l][static_cast<std::size_t>(c[static_cast<std::size_t>(p)] * s.K)], s.K, p);
      for (int g = 0; g < G; ++g) {
        double sum = 0;
        float base = 0;
        for (std::size_t d = 0; d < key.size(); ++d) {
          sum += q_rotated[g][d] * key[d];
          base += rounded(float(q_rotated[g][d]), Element()) * rounded(float(key[d]), Element());
        }
        layer_scores[g][static_cast<std::size_t>(p)] = sum * scale;
        layer_base[g][static_cast<std::size_t>(p)] = double(base) * scale;
      }
    }
    std::vector<bool> selected(c.size(), false);
    if (l > 0) {
      std::vector<std::int32_t> const& mine = chosen[l - 1];
      parents.clear();
      for (std::int32_t node : mine) {
        if (node >= 0) parents.push_back(node);
      }
      std::int64_t const want = std::min(s.top_k, n);
      std::size_t at = 0;
      for (std::int32_t node : parents) {
        while (at < c.size() && c[at] < node) ++at;
        if (at == c.size() || c[at] != node || selected[at]) a.fault = "a node that is no candidate, twice or out of order";
        if (at < c.size()) selected[at] = true;
      }
      if (std::int64_t(parents.size()) != want) a.fault = "a wrong number of nodes";
      if (parents.empty() || parents.back() != right) a.fault = "the rightmost node is not selected";
      // The exact set: importance, ties to the lower position.
      std::vector<double> importance(c.size(), 0);
      std::int64_t const counted = s.strict ? n - 1 : n;
      for (int g = 0; g < G && counted > 0; ++g) {
        double const top = *std::max_element(layer_scores[g].begin(), layer_scores[g].begin() + counted);
        double sum = 0;
        for (std::int64_t p = 0; p < counted; ++p) sum += std::exp(layer_scores[g][static_cast<std::size_t>(p)] - top);
        for (std::size_t p = 0; p < c.size(); ++p) importance[p] += std::exp(layer_scores[g][p] - top) / sum;
      }
      importance.back() = HUGE_VAL;
      std::vector<std::size_t> order(c.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) { return importance[x] > importance[y]; });
      for (std::int64_t i = 0; i < want; ++i) same += selected[order[static_cast<std::size_t>(i)]];
      total += want;
    }
    for (std::size_t p = 0; p < c.size(); ++p) {
      if (selected[p]) continue;
      leaves.push_back(&v[l][static_cast<std::size_t>(c[p] * s.V)]);
      for (int g = 0; g < G; ++g) {
        scores[g].push_back(layer_scores[g][p]);
        base_scores[g].push_back(layer_base[g][p]);
      }
    }
  }
  a.same_share = total ? double(same) / double(total) : 1.0;
  for (int g = 0; g < G; ++g) {
    double const top = *std::max_element(scores[g].begin(), scores[g].end());
    float const base_top = float(*std::max_element(base_scores[g].begin(), base_scores[g].end()));
    std::vector<double> sums(static_cast<std::size_t>(s.V), 0.0);
    std::vector<float> base_sums(static_cast<std::size_t>(s.V), 0.0f);
    double denominator = 0;
    float base_denominator = 0;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      double const p = std::exp(scores[g][i] - top);
      float const base_p = std::exp(float(base_scores[g][i]) - base_top);
      denominator += p;
      base_denominator += base_p;
      for (std::size_t d = 0; d < sums.size(); ++d) {
        sums[d] += p * leaves[i][d];
        base_sums[d] += rounded(base_p, Element()) * leaves[i][d];
      }
    }
    for (std::size_t d = 0; d < sums.size(); ++d) {
      a.out.push_back(sums[d] / denominator);
      a.base.push_back(rounded(base_sums[d] / base_denominator, Element()));
    }
    a.lse.push_back(top + std::log(denominator));
    a.base_lse.push_back(double(base_top) + std::log(double(base_denominator)));
  }
  return a;
}

struct Errors {
  double largest = 0, squares = 0;
  std::int64_t count = 0;
  void add(std::vector<double> const& x, std::vector<double> const& exact, std::size_t row) {
    double norm = 0;
    for (std::size_t i = 0; i < row; ++i) norm += exact[i] * exact[i];
    norm = std::sqrt(norm / double(row));
    for (std::size_t i = 0; i < row; ++i) {
      double const error = std::isnan(x[i]) ? HUGE_VAL : std::fabs(x[i] - exact[i]) / norm;
      largest = std::max(largest, error);
      squares += error * error;
      ++count;
    }
  }
  double rms() const { return std::sqrt(squares / double(std::max<std::int64_t>(count, 1))); }
};

struct Suite {
  int cases = 0, failures = 0;
  double worst_ratio = 0;  // of the kernel's error to the baseline's
  double least_share = 1;

  template <class Element>
  void run(Shape const& s) {
    Problem<Element> problem(s, true);
    problem.run();
    HTREE_CUDA_CHECK(cudaDeviceSynchronize());
    auto const q = problem.q.host(), k = problem.k.host(), v = problem.v.host(), out = problem.out.host();
    auto const lse = problem.lse.host();
    auto const selection = problem.selection.host();
    std::vector<std::int64_t> const sizes = layer_sizes(s.T, s.top_k);
    Errors mine, base, mine_lse, base_lse;
    std::string fault;
    double share = 0;
    int queries = 0;
    for (std::int64_t b = 0; b < s.B; ++b) {
      for (std::int64_t h = 0; h < s.H_kv; ++h) {
        auto const tree_k = build_tree(k, (b * s.T * s.H_kv + h) * s.K, s.H_kv * s.K, s.K, sizes);
        auto const tree_v = build_tree(v, (b * s.T * s.H_kv + h) * s.V, s.H_kv * s.V, s.V, sizes);
        // The ends and two between.
        for (std::int64_t i : {std::int64_t{0}, s.T_q / 3, 2 * s.T_q / 3, s.T_q - 1}) {
          std::int64_t const row = (b * s.T_q + i) * problem.H + h * s.G;
          std::vector<float> query;
          for (std::int64_t d = 0; d < s.G * s.K; ++d) query.push_back(value(q[static_cast<std::size_t>(row * s.K + d)]));
          std::vector<std::vector<std::int32_t>> chosen;
          for (std::int64_t l = 0; l + 1 < problem.layers; ++l) {
            auto const first = selection.begin() + (((l * s.B + b) * s.T_q + i) * s.H_kv + h) * s.top_k;
            chosen.emplace_back(first, first + s.top_k);
          }
          Answer const a = answer<Element>(s, query, tree_k, tree_v, s.q_start + i, chosen);
          if (!a.fault.empty()) fault = a.fault;
          share += a.same_share;
          ++queries;
          for (std::int64_t g = 0; g < s.G; ++g) {
            auto const slice = [&](std::vector<double> const& x) {
              return std::vector<double>(x.begin() + g * s.V, x.begin() + (g + 1) * s.V);
            };
            std::vector<double> kernel;
            for (std::int64_t d = 0; d < s.V; ++d) kernel.push_back(value(out[static_cast<std::size_t>((row + g) * s.V + d)]));
            mine.add(kernel, slice(a.out), static_cast<std::size_t>(s.V));
            base.add(slice(a.base), slice(a.out), static_cast<std::size_t>(s.V));
            double const exact = a.lse[static_cast<std::size_t>(g)];
            double const got = lse[static_cast<std::size_t>(row + g)];
            auto const lse_error = [](Errors& to, double error) {
              to.largest = std::max(to.largest, error);
              to.squares += error * error;
              ++to.count;
            };
            lse_error(mine_lse, std::isnan(got) ? HUGE_VAL : std::fabs(got - exact));
            lse_error(base_lse, std::fabs(a.base_lse[static_cast<std::size_t>(g)] - exact));
          }
        }
      }
    }
    // float32 itself resolves lse to about 1e-6 of its size.
    auto const of = [](double error, double allowed) { return error == 0 ? 0 : error / allowed; };
    double const ratio =
        std::max({of(mine.largest, base.largest), of(mine.rms(), base.rms()), of(mine_lse.largest, base_lse.largest + 2e-6),
                  of(mine_lse.rms(), base_lse.rms() + 1e-6)});
    share /= queries;
    worst_ratio = std::max(worst_ratio, ratio);
    least_share = std::min(least_share, share);
    ++cases;
    bool const good = fault.empty() && ratio <= 2.0 && share >= 0.95;
    failures += !good;
    if (!good) {
      std::fprintf(stderr, "forward: B %ld T %ld T_q %ld q_start %ld H_kv %ld G %ld K %ld V %ld top_k %ld strict %d dtype %d: %s, error %.2f of the baseline's, %.3f of the selection exact\n",
                   long(s.B), long(s.T), long(s.T_q), long(s.q_start), long(s.H_kv), long(s.G), long(s.K), long(s.V), long(s.top_k),
                   int(s.strict), int(dtype_of<Element>()), fault.empty() ? "selection well formed" : fault.c_str(), ratio, share);
    }
  }

  void both(Shape const& s) {
    run<__nv_bfloat16>(s);
    run<__half>(s);
  }

  void small() {
    run<__nv_bfloat16>({1, 300, 20, 280, 1, 16, 64, 64, 16});
    run<__nv_bfloat16>({2, 40, 40, 0, 2, 3, 64, 64, 16});
    run<__nv_bfloat16>({1, 4200, 3, 4197, 1, 16, 64, 64, 16});
    run<__half>({3, 1021, 13, 1008, 3, 16, 64, 64, 16});  // fails where fp16 queries restart at every second rank only
  }

  void all() {
    for (std::int64_t T : {1, 2, 15, 16, 17, 255, 256, 257, 509}) both({4, T, std::min<std::int64_t>(T, 20), T - std::min<std::int64_t>(T, 20), 1, 16, 128, 128, 16});
    for (std::int64_t T : {4095, 4096, 4097, 65535, 65537}) both({1, T, 5, T - 5, 1, 3, 64, 64, 16});
    for (std::int64_t T : {8191, 8192, 8193, 131071, 131072, 131073}) both({1, T, 4, T - 4, 1, 16, 128, 128, 512});
    for (std::int64_t G : {1, 3, 5, 8, 16}) both({3, 1021, 13, 1008, 3, G, 64, 64, 16});
    for (std::int64_t K : {64, 128}) {
      for (std::int64_t V : {64, 128}) {
        if (K == V || htree_cuda::has_mixed_dims()) both({1, 1500, 25, 1475, 2, 8, K, V, 32});
      }
    }
    for (std::int64_t top_k : {16, 32, 64, 128, 256, 512}) both({1, 20000, 30, 19000, 1, 4, 64, 64, top_k});
    both({1, 3000, 24, 1000, 1, 4, 64, 64, 16, false});
    both({1, 20000, 4000, 8000, 1, 16, 128, 128, 64, true, true});
    both({1, 262144, 3, 200000, 1, 16, 128, 128, 512});
    both({1, 300000, 1, 299999, 1, 16, 128, 128, 512});
  }
};

std::uint64_t repeat(Shape const& s, int repeats) {
  Problem<__nv_bfloat16> problem(s, false);
  problem.run();
  auto const out = problem.out.host();
  auto const lse = problem.lse.host();
  std::uint64_t differences = 0;
  for (int i = 0; i < repeats; ++i) {
    problem.run();
    if (i % 50 != 49) continue;  // the copies take longer than the calls
    auto const again = problem.out.host();
    auto const again_lse = problem.lse.host();
    differences += std::memcmp(out.data(), again.data(), static_cast<std::size_t>(problem.out.bytes())) != 0;
    differences += std::memcmp(lse.data(), again_lse.data(), static_cast<std::size_t>(problem.lse.bytes())) != 0;
  }
  return differences;
}

// ---- timing ------------------------------------------------------------------------------------------------------

Shape timed_shape(std::int64_t T, bool local) { return {1, T, T, 0, 1, 16, 128, 128, 512, true, local}; }

// Candidates of all queries and layers; a score and a product with a value each.
double candidates(Shape const& s) {
  double sum = 0;
  for (std::int64_t i = 0; i < s.T_q; ++i) {
    std::int64_t right = s.q_start + i, parents = 0;
    std::vector<std::int64_t> rights{right};
    for (std::size_t l = 1; l < layer_sizes(s.T, s.top_k).size(); ++l) rights.push_back(right /= kRate);
    for (std::size_t l = rights.size(); l-- > 0;) {
      std::int64_t const n = l + 1 == rights.size() ? rights[l] + 1 : (parents - 1) * kRate + rights[l] % kRate + 1;
      parents = std::min(s.top_k, n);
      sum += double(n);
    }
  }
  return sum * double(s.B * s.H_kv);
}

void time_one(benchmark::Nvml const& nvml, std::int64_t T, bool local, bool comma) {
  Shape const s = timed_shape(T, local);
  Problem<__nv_bfloat16> problem(s, false);
  auto const t = benchmark::measure(nvml, nullptr, [&] { problem.run(); });
  double const visits = candidates(s);
  double const flops = 2.0 * visits * double(s.G) * double(s.K + s.V);
  std::printf("%s\n    {\"dtype\": \"bfloat16\", \"inputs\": \"%s\", \"T\": %ld, \"H\": 16, \"H_kv\": 1, \"K\": 128, \"V\": 128, "
              "\"top_k\": 512, \"candidates\": %.0f, \"flops\": %.4g, \"tflops\": %.1f, \"workspace_bytes\": %ld, ",
              comma ? "," : "", local ? "local" : "iid", long(T), visits, flops, flops / t.median_ms / 1e9,
              long(problem.workspace.count()));
  benchmark::print_timing(t);
  std::printf("}");
  std::fflush(stdout);
}

bool is_local(char const* text) {
  if (std::string(text) != "iid" && std::string(text) != "local") throw std::invalid_argument("forward: iid or local");
  return std::string(text) == "local";
}

int run(int argc, char** argv) {
  std::string const mode = argc > 1 ? argv[1] : "";
  if (mode == "--one") {
    if (argc < 4) throw std::invalid_argument("forward: --one T iid|local [n [G]]");
    Shape shape = timed_shape(std::atoll(argv[2]), is_local(argv[3]));
    if (argc > 5) shape.G = std::atoll(argv[5]);
    Problem<__nv_bfloat16> problem(shape, false);
    for (int i = 0; i < (argc > 4 ? std::atoi(argv[4]) : 3); ++i) problem.run();
    HTREE_CUDA_CHECK(cudaDeviceSynchronize());
    return 0;
  }
  benchmark::Nvml const nvml;
  std::printf("{\n  \"op\": \"forward\", ");
  benchmark::print_machine(nvml);
  if (mode != "--time-only") {
    bool const small = argc > 2 && std::string(argv[2]) == "--small";
    Suite suite;
    std::uint64_t differences = 0;
    if (small) {
      suite.small();
      differences = repeat({1, 300, 12, 288, 1, 16, 64, 64, 16}, 50);
    } else {
      suite.all();
      differences = repeat({1, 5000, 3000, 2000, 2, 16, 128, 128, 32}, 500) + repeat({1, 16384, 2048, 14336, 1, 16, 128, 128, 512}, 500);
    }
    std::printf(",\n  \"checks\": {\"cases\": %d, \"failures\": %d, \"largest_error_to_baseline\": %.3g, "
                "\"least_share_of_exact_selection\": %.4f, \"repeats\": %d, \"repeat_differences\": %llu}",
                suite.cases, suite.failures, suite.worst_ratio, suite.least_share, small ? 50 : 1000,
                static_cast<unsigned long long>(differences));
    std::fflush(stdout);
    if (suite.failures != 0 || differences != 0 || mode == "--check-only") {
      std::printf("\n}\n");
      return suite.failures != 0 || differences != 0;
    }
  }
  std::printf(",\n  \"timings\": [");
  bool comma = false;
  if (mode == "--time-only" && argc > 3) {
    for (int i = 2; i + 1 < argc; i += 2, comma = true) time_one(nvml, std::atoll(argv[i]), is_local(argv[i + 1]), comma);
  } else {
    for (std::int64_t T : {4096, 16384, 65536, 131072, 262144, 1048576}) {
      for (bool local : {false, true}) {
        time_one(nvml, T, local, comma);
        comma = true;
      }
    }
  }
  std::printf("\n  ]\n}\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return benchmark::guarded(run, argc, argv); }

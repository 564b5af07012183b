// The timing protocol of every C++ benchmark: 0.5 s of warm-up, then back-to-back calls for at least 1 s (at least
// 5), CUDA events around each, median and 90th percentile, clocks and power beside them.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "host/cuda_check.h"

namespace htree_cuda::benchmark {

// The NVIDIA management library through dlopen: a benchmark runs, without clocks, where it is missing.
class Nvml {
public:
  Nvml() {
    library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library_ == nullptr) return;
    auto const init = function<int (*)()>("nvmlInit_v2");
    auto const by_bus = function<int (*)(char const*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
    clock_ = function<int (*)(void*, int, unsigned*)>("nvmlDeviceGetClockInfo");
    power_ = function<int (*)(void*, unsigned*)>("nvmlDeviceGetPowerUsage");
    temperature_ = function<int (*)(void*, int, unsigned*)>("nvmlDeviceGetTemperature");
    auto const driver = function<int (*)(char*, unsigned)>("nvmlSystemGetDriverVersion");
    if (!init || !by_bus || !clock_ || !power_ || !temperature_ || !driver || init() != 0) return;
    char bus[32] = {};
    int device = 0;
    HTREE_CUDA_CHECK(cudaGetDevice(&device));
    HTREE_CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof(bus), device));
    char version[96] = {};
    if (driver(version, sizeof(version)) == 0) driver_ = version;
    if (by_bus(bus, &device_) != 0) device_ = nullptr;
  }

  bool works() const { return device_ != nullptr; }
  std::string const& driver() const { return driver_; }
  unsigned sm_mhz() const { return query([&](unsigned* x) { return clock_(device_, 1, x); }); }
  unsigned memory_mhz() const { return query([&](unsigned* x) { return clock_(device_, 2, x); }); }
  unsigned milliwatts() const { return query([&](unsigned* x) { return power_(device_, x); }); }
  unsigned celsius() const { return query([&](unsigned* x) { return temperature_(device_, 0, x); }); }

private:
  template <class Fn>
  Fn function(char const* name) const {
    return reinterpret_cast<Fn>(dlsym(library_, name));
  }
  template <class Fn>
  static unsigned query(Fn&& fn) {
    unsigned value = 0;
    return fn(&value) == 0 ? value : 0;
  }

  void* library_ = nullptr;
  void* device_ = nullptr;
  std::string driver_ = "unknown";
  int (*clock_)(void*, int, unsigned*) = nullptr;
  int (*power_)(void*, unsigned*) = nullptr;
  int (*temperature_)(void*, int, unsigned*) = nullptr;
};

struct Timing {
  double median_ms;
  double p90_ms;
  double min_ms;
  int calls;
  unsigned sm_mhz;      // medians over the timed calls; 0: no NVML
  unsigned memory_mhz;
  double watts;
  unsigned celsius;
};

inline double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(std::ceil(q * double(values.size()))) - 1];
}

enum class Pace {
  kBackToBack,
  kSpaced,  // after each call a pause as long, so that power stays below the cap
};

template <class Call>
Timing measure(Nvml const& nvml, cudaStream_t stream, Call&& call, Pace pace = Pace::kBackToBack) {
  constexpr double warm_up_s = 0.5;
  constexpr double timed_s = 1.0;
  using Clock = std::chrono::steady_clock;
  auto const since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  auto const start = Clock::now();
  int warm_calls = 0;
  while (warm_calls < 3 || since(start) < warm_up_s) {
    call();
    HTREE_CUDA_CHECK(cudaStreamSynchronize(stream));
    ++warm_calls;
  }
  double const estimate_s = since(start) / warm_calls;
  int const calls = std::max(5, int(std::ceil(1.2 * timed_s / estimate_s)));

  std::vector<cudaEvent_t> events(2 * calls);
  for (auto& event : events) HTREE_CUDA_CHECK(cudaEventCreate(&event));
  std::atomic<bool> done{false};
  std::vector<double> sm, memory, power, temperature;
  std::thread sampler([&] {
    while (nvml.works() && !done) {
      sm.push_back(nvml.sm_mhz());
      memory.push_back(nvml.memory_mhz());
      power.push_back(nvml.milliwatts() / 1000.0);
      temperature.push_back(nvml.celsius());
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  for (int i = 0; i < calls; ++i) {
    HTREE_CUDA_CHECK(cudaEventRecord(events[2 * i], stream));
    call();
    HTREE_CUDA_CHECK(cudaEventRecord(events[2 * i + 1], stream));
    if (pace == Pace::kSpaced) {
      HTREE_CUDA_CHECK(cudaStreamSynchronize(stream));
      std::this_thread::sleep_for(std::chrono::duration<double>(estimate_s));
    }
  }
  HTREE_CUDA_CHECK(cudaStreamSynchronize(stream));
  done = true;
  sampler.join();

  std::vector<double> times(calls);
  for (int i = 0; i < calls; ++i) {
    float milliseconds = 0;
    HTREE_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, events[2 * i], events[2 * i + 1]));
    times[i] = milliseconds;
  }
  for (auto event : events) HTREE_CUDA_CHECK(cudaEventDestroy(event));
  auto const middle = [](std::vector<double> const& values) { return values.empty() ? 0.0 : quantile(values, 0.5); };
  return {quantile(times, 0.5),  quantile(times, 0.9),     *std::min_element(times.begin(), times.end()), calls,
          unsigned(middle(sm)),  unsigned(middle(memory)), middle(power), unsigned(middle(temperature))};
}

// The fields of a Timing, without braces, for the JSON that a benchmark prints.
inline void print_timing(Timing const& t) {
  std::printf("\"median_ms\": %.6f, \"p90_ms\": %.6f, \"min_ms\": %.6f, \"calls\": %d, \"sm_mhz\": %u, "
              "\"memory_mhz\": %u, \"watts\": %.1f, \"celsius\": %u",
              t.median_ms, t.p90_ms, t.min_ms, t.calls, t.sm_mhz, t.memory_mhz, t.watts, t.celsius);
}

// "gpu": ..., "driver": ..., "cuda": ... of the current device, without braces.
inline void print_machine(Nvml const& nvml) {
  int device = 0;
  int runtime = 0;
  cudaDeviceProp properties{};
  HTREE_CUDA_CHECK(cudaGetDevice(&device));
  HTREE_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  HTREE_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  std::printf("\"gpu\": \"%s\", \"sm_count\": %d, \"l2_bytes\": %d, \"driver\": \"%s\", \"cuda\": \"%d.%d\"",
              properties.name, properties.multiProcessorCount, properties.l2CacheSize, nvml.driver().c_str(),
              runtime / 1000, runtime % 1000 / 10);
}

// What main() returns: run's status, or 2 and the error on stderr.
template <class Run>
int guarded(Run&& run, int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (std::exception const& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

}  // namespace htree_cuda::benchmark

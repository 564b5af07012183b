#include <memory>
#include <utility>

#include "params.h"
#include "driver.h"
#include "mixed_dims.h"
#include "recording.h"
#include "recording_api.h"

#ifndef HTREE_CUDA_PARAMS_HASH
#error "the build defines HTREE_CUDA_PARAMS_HASH (build_backend/htree_cuda_compile.py)"
#endif

namespace htree_cuda {

using namespace host;

namespace {

thread_local std::unique_ptr<Recording> told;

}  // namespace

host::Recording* host::recording() { return told.get(); }

void begin_recording(int processors) { told.reset(new Recording{processors, {}}); }

void end_recording(LaunchSink sink, void* context) {
  std::unique_ptr<Recording> const rows = std::move(told);
  if (rows == nullptr || sink == nullptr) return;
  for (LaunchRow const& row : rows->rows) tell(row, -1, sink, context);
}

char const* library_params_hash() { return HTREE_CUDA_PARAMS_HASH; }

bool has_mixed_dims() { return kMixedDims; }

int runtime_version() {
  int version = 0;
  HTREE_CUDA_CHECK(cudaRuntimeGetVersion(&version));
  return version;
}

int driver_version() {
  int version = 0;
  HTREE_CUDA_CHECK(cudaDriverGetVersion(&version));
  return version;
}

namespace {

using GetContext = CUresult (*)(CUcontext*);
using SetContext = CUresult (*)(CUcontext);

SetContext set_context() {
  static SetContext const function = driver_entry_point<SetContext>("cuCtxSetCurrent");
  return function;
}

}  // namespace

// The guard works on driver contexts: torch brings its own copy of the CUDA runtime, and the driver's current
// context is the one thing that both copies share.
DeviceGuard::DeviceGuard(int device) : previous_context_(nullptr) {
  static GetContext const get_context = driver_entry_point<GetContext>("cuCtxGetCurrent");
  set_context();  // looked up before anything changes, because the destructor must not throw
  CUcontext previous = nullptr;
  check_driver(get_context(&previous), "cuCtxGetCurrent");
  previous_context_ = previous;
  HTREE_CUDA_CHECK(cudaSetDevice(device));
}

DeviceGuard::~DeviceGuard() { (void)set_context()(static_cast<CUcontext>(previous_context_)); }

}  // namespace htree_cuda

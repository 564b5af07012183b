// The part of the CUDA runtime and driver that the launchers call, over the emulator: host memory is device memory, a
// launch runs at once, and what goes wrong in a kernel is the launch's error.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

#include "launch.h"

namespace {

std::map<void const*, std::string>& names() {
  static std::map<void const*, std::string> kernels;
  return kernels;
}
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} pushed;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_message;
int current_device = 0;

cudaError_t run(void const* function, dim3 grid, dim3 block, dim3 cluster, bool overlaps, void** arguments,
                size_t shared) {
  auto const found = names().find(function);
  last_message = found == names().end()
                     ? "a kernel that was never registered"
                     : emulator::launch(found->second, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z},
                                        {cluster.x, cluster.y, cluster.z}, overlaps, arguments, static_cast<uint32_t>(shared));
  return last_error = last_message.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

CUresult get_context(CUcontext* context) {
  *context = nullptr;
  return CUDA_SUCCESS;
}
CUresult set_context(CUcontext) { return CUDA_SUCCESS; }
CUresult error_string(CUresult, char const** text) {
  *text = "an error of the emulated driver";
  return CUDA_SUCCESS;
}

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* sizes,
                      cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const* element_strides,
                      CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill) {
  uint32_t const bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  uint32_t const swizzles[] = {0, 32, 64, 128};
  bool good = rank >= 1 && rank <= 5 && reinterpret_cast<uint64_t>(address) % 16 == 0 &&
              interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle <= CU_TENSOR_MAP_SWIZZLE_128B &&
              box[0] * bytes % 16 == 0 && (swizzles[swizzle] == 0 || box[0] * bytes <= swizzles[swizzle]);
  for (cuuint32_t d = 0; d < rank; ++d) {
    good = good && box[d] >= 1 && box[d] <= 256 && element_strides[d] == 1 && sizes[d] >= 1 && sizes[d] <= (1ull << 32) &&
           (d == 0 || (strides[d - 1] % 16 == 0 && strides[d - 1] < (1ull << 40)));
  }
  if (!good) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  emulator::encode_tensor_map(map, reinterpret_cast<uint64_t>(address), {sizes, sizes + rank}, {strides, strides + rank - 1},
                              {box, box + rank}, bytes, swizzles[swizzle]);
  return CUDA_SUCCESS;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void emulator_configure(uint64_t seed, int sms, bool races) {
  emulator::configure({seed, sms, races});
}
EXPORT void emulator_allow(uint64_t address, uint64_t bytes) { emulator::allow(address, bytes); }
EXPORT void emulator_forget_allocations() { emulator::forget_allocations(); }
EXPORT uint64_t emulator_launch_count() { return emulator::launch_count(); }

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, char const* host, char*, char const* name, int, void*, void*, void*, void*, int*) {
  names()[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, char const*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, static_cast<cudaStream_t>(stream)};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  return run(kernel, grid, block, {1, 1, 1}, false, arguments, shared);
}
cudaError_t cudaLaunchKernel(void const* function, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  return run(function, grid, block, {1, 1, 1}, false, arguments, shared);
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  dim3 cluster{1, 1, 1};
  bool overlaps = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      auto const& x = config->attrs[i].val.clusterDim;
      cluster = {x.x, x.y, x.z};
    } else if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      overlaps = config->attrs[i].val.programmaticStreamSerializationAllowed != 0;
    }
  }
  return run(function, config->gridDim, config->blockDim, cluster, overlaps, arguments, config->dynamicSmemBytes);
}
cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute attribute, int value) {
  bool const bad = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > 232448;
  return last_error = bad ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaGetLastError() {
  cudaError_t const error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
char const* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "emulated launch"; }
char const* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : last_message.c_str(); }
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = emulator::configuration().sms; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; return cudaSuccess;
    default: last_message = "a device attribute that the emulator does not know"; return last_error = cudaErrorInvalidValue;
  }
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void const*, cudaLaunchConfig_t const* config) {
  int cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
  }
  *clusters = emulator::configuration().sms / cluster;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  std::map<std::string, void*> const known = {
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&encode_tiled)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&get_context)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(&set_context)},
      {"cuGetErrorString", reinterpret_cast<void*>(&error_string)},
      {"cuGetErrorName", reinterpret_cast<void*>(&error_string)},
  };
  auto const found = known.find(name);
  *function = found == known.end() ? nullptr : found->second;
  if (result != nullptr) {
    *result = found == known.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

// What the C++ benchmarks ask for besides. Device memory is what has been allocated here.
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  emulator::allow(reinterpret_cast<uint64_t>(*pointer), bytes);
  return *pointer == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  emulator::forbid(reinterpret_cast<uint64_t>(pointer));
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, void const* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new std::chrono::steady_clock::time_point);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<std::chrono::steady_clock::time_point*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<std::chrono::steady_clock::time_point*>(event) = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  auto const at = [](cudaEvent_t x) { return *reinterpret_cast<std::chrono::steady_clock::time_point*>(x); };
  *milliseconds = std::chrono::duration<float, std::milli>(at(to) - at(from)).count();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "emulator");
  properties->multiProcessorCount = emulator::configuration().sms;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* bus, int length, int) {
  std::strncpy(bus, "none", static_cast<size_t>(length));
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
// A launch has run when it returns, whatever its stream, so that nothing is left to wait for.
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(new char);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
// Streams that a program asks for and graphs, which timing alone needs, do not exist here.
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaErrorNotSupported; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaErrorNotSupported; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) { return cudaErrorNotSupported; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaErrorNotSupported; }
cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

}  // extern "C"

// Side streams, one for each stream of a caller.
#include "side_stream.h"

#include <cstddef>
#include <map>
#include <utility>

#include "cuda_check.h"

namespace htree_cuda::host {

namespace {

struct Side {
  cudaStream_t stream = nullptr;
  cudaEvent_t forked = nullptr;
  cudaEvent_t joined = nullptr;
  std::mutex mutex;

  Side(cudaStream_t caller) {
    // Something may be capturing: what a capture forbids of a thread is not needed for what it records.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    HTREE_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    cudaError_t error = create(caller);
    cudaError_t const restored = cudaThreadExchangeStreamCaptureMode(&mode);
    HTREE_CUDA_CHECK(error == cudaSuccess ? restored : error);
  }

private:
  cudaError_t create(cudaStream_t caller) {
    int priority = 0;
    cudaError_t error = cudaStreamGetPriority(caller, &priority);
    // Non-blocking: the legacy default stream would wait for any other.
    if (error == cudaSuccess) error = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&forked, cudaEventDisableTiming);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&joined, cudaEventDisableTiming);
    return error;
  }
};

// A program that makes streams without end does not make side streams without end.
constexpr std::size_t kMaxSides = 256;

// Null where there is none: the per-thread default stream has one handle for many streams.
Side* side_of(cudaStream_t caller) {
  if (caller == cudaStreamPerThread) return nullptr;
  int device = 0;
  HTREE_CUDA_CHECK(cudaGetDevice(&device));
  // Never destroyed: at the end of the process the driver may be gone before.
  static auto& mutex = *new std::mutex;
  static auto& sides = *new std::map<std::pair<int, cudaStream_t>, Side*>;
  std::lock_guard<std::mutex> const guard(mutex);
  auto const found = sides.find({device, caller});
  if (found != sides.end()) return found->second;
  if (sides.size() >= kMaxSides) return nullptr;
  return sides[{device, caller}] = new Side(caller);
}

}  // namespace

SideStream::SideStream(cudaStream_t caller) : caller_(caller), stream_(caller) {
  Side* const side = side_of(caller);
  if (side == nullptr) return;
  lock_ = std::unique_lock<std::mutex>(side->mutex);
  HTREE_CUDA_CHECK(cudaEventRecord(side->forked, caller));
  HTREE_CUDA_CHECK(cudaStreamWaitEvent(side->stream, side->forked, 0));
  stream_ = side->stream;
  joined_ = side->joined;
}

SideStream::~SideStream() { (void)try_join(); }

void SideStream::join() { HTREE_CUDA_CHECK(try_join()); }

cudaError_t SideStream::try_join() {
  if (joined_ == nullptr) return cudaSuccess;
  cudaError_t const recorded = cudaEventRecord(joined_, stream_);
  cudaError_t const waited = recorded == cudaSuccess ? cudaStreamWaitEvent(caller_, joined_, 0) : recorded;
  joined_ = nullptr;
  stream_ = caller_;
  lock_.unlock();
  return waited;
}

}  // namespace htree_cuda::host

// A stream of the library's own beside the caller's, for work that may run at the same time as the caller's.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

namespace htree_cuda::host {

// From the constructor on, stream() comes behind what the caller's stream holds, and from join() on the caller's stream
// behind what stream() holds, both by events, without waiting on the host. In a capture this is a fork and a join of the
// graph. Every caller's stream of a device has a side stream of its own, so that callers do not wait for each other and
// one may capture while others run; it is kept until the process ends. Where there is none, stream() is the caller's.
//
// Memory of the caller that the side stream uses needs no record of it (Tensor.record_stream in PyTorch): after join()
// whatever the caller's stream does, the next owner of the memory included, comes behind the side stream's work.
class SideStream {
public:
  explicit SideStream(cudaStream_t caller);
  ~SideStream();  // joins, whatever was thrown
  SideStream(SideStream const&) = delete;
  SideStream& operator=(SideStream const&) = delete;

  cudaStream_t stream() const { return stream_; }
  void join();

private:
  cudaError_t try_join();

  cudaStream_t const caller_;
  cudaStream_t stream_;
  cudaEvent_t joined_ = nullptr;
  std::unique_lock<std::mutex> lock_;  // nobody else records the events between a record and the wait for it
};

}  // namespace htree_cuda::host

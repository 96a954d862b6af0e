// What the bindings, which are compiled without CUDA's headers, need of its runtime: an error's words, and a copy.

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace custom_ops::stable {

void check_launch(const char* op, int status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next check of anyone in this process would report our error as its own
  const auto error = static_cast<cudaError_t>(status);
  throw std::runtime_error(std::string(op) + ": CUDA error " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

void copy_on_device(void* to, const void* from, int64_t bytes, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  check_launch("copy", cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, on));
}

}  // namespace custom_ops::stable

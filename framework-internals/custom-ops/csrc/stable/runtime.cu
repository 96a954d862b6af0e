// The parts of the CUDA runtime for the bindings, which are compiled without CUDA's headers: error messages and a copy.

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace custom_ops::stable {

void check_launch(const char* op, int status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error; otherwise the next check in this process would report it
  const auto error = static_cast<cudaError_t>(status);
  throw std::runtime_error(std::string(op) + ": CUDA error " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

void copy_on_device(void* to, const void* from, int64_t bytes, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  check_launch("copy", cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, on));
}

}  // namespace custom_ops::stable

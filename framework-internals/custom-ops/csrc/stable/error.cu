// CUDA's words for an error: here, because the bindings are compiled without CUDA's headers.

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace custom_ops::stable {

void check_launch(const char* op, int status) {
  if (status == cudaSuccess) return;
  const auto error = static_cast<cudaError_t>(status);
  throw std::runtime_error(std::string(op) + ": CUDA error " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

}  // namespace custom_ops::stable

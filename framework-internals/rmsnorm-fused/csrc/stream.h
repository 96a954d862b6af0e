// The current stream of a GPU, through a C function of torch, so that no header of CUDA is needed.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#ifdef RMS_NORM_CUDA
#include <stdexcept>

// Weak, because the symbol is in torch's CUDA library; a library with CUDA kernels then also loads under a CPU build of torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace rms_norm {

inline void* current_stream(int32_t device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr || aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS)
    throw std::runtime_error("torch gives no CUDA stream");
  return stream;
}

}  // namespace rms_norm
#endif

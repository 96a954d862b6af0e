// The operators on LibTorch's stable ABI: one library for every torch from the version that it is built for (TORCH_TARGET_VERSION)
// on, with the CPU kernels for several instruction sets and, with RMS_NORM_CUDA, the CUDA kernels. impl/prebuilt.py loads it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cpu/levels.h"
#include "operators.h"
#include "stream.h"

namespace {

using rms_norm::Kernels;

struct Stable {
  using Tensor = torch::stable::Tensor;

  static Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, torch::headeronly::ScalarType type) {
    return torch::stable::new_empty(like, {sizes.data(), sizes.size()}, type);
  }
  static Tensor contiguous(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }
  static Tensor converted(const Tensor& tensor, torch::headeronly::ScalarType type) {
    return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
  }
  static Tensor fill(Tensor tensor, double value) { return torch::stable::fill_(tensor, value); }
  template <class... Message> static void check(bool holds, const Message&... message) { STD_TORCH_CHECK(holds, message...); }
};

struct OnCpu : Stable {
  static const Kernels& kernels() {
    static const Kernels best = rms_norm::cpu_kernels();
    return best;
  }
  static void* stream(const Tensor&) { return nullptr; }
};

#ifdef RMS_NORM_CUDA
struct OnCuda : Stable {
  static Kernels kernels() { return {&rms_norm::forward, &rms_norm::backward_workspace, &rms_norm::backward}; }
  static void* stream(const Tensor& tensor) { return rms_norm::current_stream(tensor.get_device_index()); }
};
#endif

template <class Api> void add_to(torch::stable::detail::StableLibrary& library) {
  using Operators = rms_norm::Operators<Api>;
  library.impl("forward", TORCH_BOX(&Operators::forward));
  library.impl("forward_add", TORCH_BOX(&Operators::forward_add));
  library.impl("backward", TORCH_BOX(&Operators::backward));
  library.impl("quantize", TORCH_BOX(&Operators::quantize));
}

}  // namespace

// Not in the namespace rmsnorm_fused: what is compiled here may serve one type of device, and this library the other.
STABLE_TORCH_LIBRARY_IMPL(rmsnorm_fused_prebuilt_2, CPU, library) { add_to<OnCpu>(library); }

#ifdef RMS_NORM_CUDA
STABLE_TORCH_LIBRARY_IMPL(rmsnorm_fused_prebuilt_2, CUDA, library) { add_to<OnCuda>(library); }
#endif

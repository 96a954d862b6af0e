// The operator, registered with TORCH_LIBRARY. This uses torch's C++ classes, which change between versions, so the
// compiled file works only with the version of torch that it was compiled against. csrc/stable avoids these classes.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "kernels.h"

#ifdef CUSTOM_OPS_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace {

using custom_ops::Dtype;
using custom_ops::ScaleCall;

Dtype dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Dtype::kFloat32;
    case at::kDouble: return Dtype::kFloat64;
    case at::kHalf: return Dtype::kFloat16;
    case at::kBFloat16: return Dtype::kBFloat16;
    default:
      TORCH_CHECK_TYPE(false, "scale: argument 'x': expected dtype torch.float32, torch.float64, torch.float16 or torch.bfloat16, got torch.",
                       c10::getDtypeNames(x.scalar_type()).first);
  }
}

// The dispatcher calls the function for the tensors' device, so no function checks where its tensors are.
at::Tensor on_cpu(const at::Tensor& x_any, double alpha) {
  const at::Tensor x = x_any.contiguous(), out = at::empty_like(x, at::MemoryFormat::Contiguous);
  const ScaleCall call{dtype_of(x), x.const_data_ptr(), alpha, out.mutable_data_ptr(), x.numel()};
  at::parallel_for(0, call.count, 32768, [&](int64_t begin, int64_t end) { custom_ops::scale_cpu(call, begin, end); });
  return out;
}

#ifdef CUSTOM_OPS_CUDA
at::Tensor on_cuda(const at::Tensor& x_any, double alpha) {
  const c10::DeviceGuard guard(x_any.device());
  const at::Tensor x = x_any.contiguous(), out = at::empty_like(x, at::MemoryFormat::Contiguous);
  const ScaleCall call{dtype_of(x), x.const_data_ptr(), alpha, out.mutable_data_ptr(), x.numel()};
  C10_CUDA_CHECK(static_cast<cudaError_t>(custom_ops::scale_cuda(call, c10::cuda::getCurrentCUDAStream().stream())));
  return out;
}
#endif

}  // namespace

TORCH_LIBRARY(custom_ops_scale, library) { library.def("scale(Tensor x, float alpha=1.23) -> Tensor"); }
TORCH_LIBRARY_IMPL(custom_ops_scale, CPU, library) { library.impl("scale", &on_cpu); }
#ifdef CUSTOM_OPS_CUDA
TORCH_LIBRARY_IMPL(custom_ops_scale, CUDA, library) { library.impl("scale", &on_cuda); }
#endif

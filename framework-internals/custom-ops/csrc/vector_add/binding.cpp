// The only file that uses both torch and the kernels: checks, allocation, device, stream, threads, and the module.
//
// torch/extension.h would replace all of these includes, but more than doubles the time of the build.

#include "kernels.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#else
#include <torch/version.h>
#endif

#ifdef CUSTOM_OPS_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
constexpr bool kWithCuda = true;
// torch's current stream, not the default one: pending work on the current stream may still write the inputs.
static void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
static void check_launch(int status) { C10_CUDA_CHECK(static_cast<cudaError_t>(status)); }
#else
constexpr bool kWithCuda = false;
// Never called, because CUDA tensors raise an error first; they keep the code below the same for both builds.
static void* current_stream() { return nullptr; }
static void check_launch(int) {}
int custom_ops::add_cuda(const Operands&, void*) { return -1; }
int custom_ops::axpb_cuda(const Operands&, double, void*) { return -1; }
#endif

namespace {

using custom_ops::Dtype;
using custom_ops::Operands;

// The number of elements that justifies another thread; PyTorch's elementwise operators use the same.
constexpr int64_t kGrain = 32768;

std::string dtype_name(const at::Tensor& tensor) {
  return std::string("torch.").append(c10::getDtypeNames(tensor.scalar_type()).first);
}

// The messages are the same as in custom_ops/operators/checks.py; a test compares the two.
void check(const char* op, const char* first, const at::Tensor& x, const at::Tensor& b) {
  TORCH_CHECK_VALUE(b.device() == x.device(), op, ": argument 'b': expected device ", x.device(), " like '", first,
                    "', got ", b.device(), " (move it there with .to())");
  TORCH_CHECK_TYPE(b.scalar_type() == x.scalar_type(), op, ": argument 'b': expected dtype ", dtype_name(x), " like '",
                   first, "', got ", dtype_name(b), " (dtypes are not promoted; use .to())");
  TORCH_CHECK_VALUE(b.sizes() == x.sizes(), op, ": argument 'b': expected shape ", x.sizes(), " like '", first,
                    "', got ", b.sizes(), " (shapes are not broadcast; use .expand())");
}

Dtype kernel_dtype(const char* op, const char* first, const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Dtype::kFloat32;
    case at::kDouble: return Dtype::kFloat64;
    case at::kHalf: return Dtype::kFloat16;
    case at::kBFloat16: return Dtype::kBFloat16;
    default:
      TORCH_CHECK_TYPE(false, op, ": argument '", first, "': expected dtype torch.float32, torch.float64, torch.float16 or ",
                       "torch.bfloat16, got ", dtype_name(x));
  }
}

// Runs `cpu(operands, begin, end)` on torch's threads, or `cuda(operands, stream)` on the device of the inputs.
template <typename Cpu, typename Cuda>
at::Tensor apply(const char* op, const char* first, const at::Tensor& x_any, const at::Tensor& b_any, Cpu cpu,
                 Cuda cuda) {
  check(op, first, x_any, b_any);
  const Dtype dtype = kernel_dtype(op, first, x_any);
  TORCH_CHECK_NOT_IMPLEMENTED(x_any.is_cpu() || (kWithCuda && x_any.is_cuda()), op, ": argument '", first,
                              "': expected a tensor on a device that this build has kernels for (",
                              kWithCuda ? "cpu, cuda" : "cpu", "), got ", x_any.device(),
                              " (custom_ops.build_info() says why)");
  // Set before any allocation or launch, because the tensors' device may not be the current one.
  const c10::DeviceGuard guard(x_any.device());
  // The kernels read memory in order; a transposed or sliced operand would give wrong sums without an error.
  const at::Tensor x = x_any.contiguous();
  const at::Tensor b = b_any.contiguous();
  at::Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  const Operands operands{dtype, x.const_data_ptr(), b.const_data_ptr(), out.mutable_data_ptr(), x.numel()};
  if (x.is_cuda()) {
    check_launch(cuda(operands, current_stream()));
  } else {
    at::parallel_for(0, operands.count, kGrain,
                     [&](int64_t begin, int64_t end) { cpu(operands, begin, end); });
  }
  return out;
}

at::Tensor vector_add(const at::Tensor& a, const at::Tensor& b) {
  return apply("vector_add", "a", a, b, custom_ops::add_cpu, custom_ops::add_cuda);
}

at::Tensor axpb(const at::Tensor& x, const at::Tensor& b, double alpha) {
  return apply(
      "axpb", "x", x, b,
      [alpha](const Operands& operands, int64_t begin, int64_t end) {
        custom_ops::axpb_cpu(operands, alpha, begin, end);
      },
      [alpha](const Operands& operands, void* stream) { return custom_ops::axpb_cuda(operands, alpha, stream); });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  module.doc() = "vector_add and axpb for CPU and CUDA tensors: no dispatcher, no autograd.";
  module.attr("torch_version") = TORCH_VERSION;
  module.attr("with_cuda") = kWithCuda;
  // torch's wrapper turns its C++ errors into ValueError, TypeError, …, without the C++ stack that pybind11 adds to the
  // message, and releases the GIL while the kernel runs.
  module.def("vector_add", torch::wrap_pybind_function_no_gil(vector_add), py::arg("a"), py::arg("b"),
             "a + b, of equal shape, dtype and device.");
  module.def("axpb", torch::wrap_pybind_function_no_gil(axpb), py::arg("x"), py::arg("b"), py::arg("alpha"),
             "alpha * x + b in one kernel, of equal shape, dtype and device.");
}

// bias_gelu and its derivative as operators.

#include <optional>
#include <tuple>

#include "../bias_gelu/kernels.h"
#include "registration.h"
#include "tensors.h"

namespace custom_ops::stable {
namespace {

void check(const char* op, const Tensor& x, const Tensor& bias) {
  check_device(op, {"x", x}, {"bias", bias});
  check_dtype(op, {"x", x}, {"bias", bias});
  if (x.dim() < 1) fail(op, ": argument 'x': expected one dimension or more, got []");
  const std::vector<int64_t> expected{x.size(x.dim() - 1)};
  if (!equal_sizes(expected, bias.sizes())) {
    fail(op, ": argument 'bias': expected shape ", name_of_shape(expected), ", an element for each of x's last dimension, got ",
         name_of_shape(bias.sizes()));
  }
}

struct Forward {
  Tensor x, bias, out;
  BiasGelu call;
};

Forward forward_of(const Tensor& x_any, const Tensor& bias_any, int64_t access) {
  check("bias_gelu", x_any, bias_any);
  const Dtype dtype = dtype_of("bias_gelu", {"x", x_any});
  if (access < 0 || access > static_cast<int64_t>(Access::kVector4)) fail("bias_gelu: argument 'access': expected 0 to 4, got ", access);
  const Tensor x = in_order(x_any), bias = in_order(bias_any), out = make_like(x);
  const int64_t columns = bias.numel(), rows = columns == 0 ? 0 : x.numel() / columns;
  return {x, bias, out,
          {dtype, x.const_data_ptr(), bias.const_data_ptr(), out.mutable_data_ptr(), rows, columns, static_cast<Access>(access)}};
}

struct Backward {
  Tensor grad, x, bias, dx, dbias;
  BiasGeluBackward call;
};

Backward backward_of(const Tensor& grad_any, const Tensor& x_any, const Tensor& bias_any) {
  const char* op = "bias_gelu_backward";
  check(op, x_any, bias_any);
  check_device(op, {"x", x_any}, {"grad", grad_any});
  check_dtype(op, {"x", x_any}, {"grad", grad_any});
  check_shape(op, {"x", x_any}, {"grad", grad_any});
  const Dtype dtype = dtype_of(op, {"x", x_any});
  const Tensor grad = in_order(grad_any), x = in_order(x_any), bias = in_order(bias_any);
  const Tensor dx = make_like(x), dbias = make_like(bias);
  const int64_t columns = bias.numel(), rows = columns == 0 ? 0 : x.numel() / columns;
  BiasGeluBackward call{dtype, grad.const_data_ptr(), x.const_data_ptr(), bias.const_data_ptr(), dx.mutable_data_ptr(),
                        dbias.mutable_data_ptr(), nullptr, rows, columns};
  return {grad, x, bias, dx, dbias, call};
}

using Gradients = std::tuple<Tensor, Tensor>;

Tensor bias_gelu_access(const Tensor& x, const Tensor& bias, int64_t access) {
  const Forward forward = forward_of(x, bias, access);
  torch::stable::parallel_for(0, forward.x.numel(), kGrain / 4, [&](int64_t begin, int64_t end) { bias_gelu_cpu(forward.call, begin, end); });
  return forward.out;
}

Tensor bias_gelu(const Tensor& x, const Tensor& bias) { return bias_gelu_access(x, bias, 0); }

Gradients backward(const Tensor& grad, const Tensor& x, const Tensor& bias) {
  Backward backward = backward_of(grad, x, bias);
  const Tensor workspace = make(backward.x, {bias_gelu_backward_workspace_cpu(backward.call)}, ScalarType::Byte);
  backward.call.workspace = workspace.mutable_data_ptr();
  const int64_t groups = bias_gelu_backward_groups(backward.call.rows), columns = backward.call.columns;
  const int64_t of_group = groups == 0 ? 1 : std::max<int64_t>(1, backward.x.numel() / groups);
  torch::stable::parallel_for(0, groups, std::max<int64_t>(1, kGrain / 4 / of_group),
                              [&](int64_t begin, int64_t end) { bias_gelu_backward_rows_cpu(backward.call, begin, end); });
  torch::stable::parallel_for(0, columns, kGrain / 64,
                              [&](int64_t begin, int64_t end) { bias_gelu_backward_columns_cpu(backward.call, begin, end); });
  return {backward.dx, backward.dbias};
}

Gradients backward_plan(const Tensor& grad, const Tensor& x, const Tensor& bias, int64_t, int64_t, int64_t) { return backward(grad, x, bias); }

#ifdef CUSTOM_OPS_CUDA
Tensor bias_gelu_access_on_gpu(const Tensor& x, const Tensor& bias, int64_t access) {
  const OnDevice on(x.is_cuda() ? x : bias);
  const Forward forward = forward_of(x, bias, access);
  check_launch("bias_gelu", bias_gelu_cuda(forward.call, on.stream()));
  return forward.out;
}

Tensor bias_gelu_on_gpu(const Tensor& x, const Tensor& bias) { return bias_gelu_access_on_gpu(x, bias, 0); }

Gradients backward_plan_on_gpu(const Tensor& grad, const Tensor& x, const Tensor& bias, int64_t across, int64_t blocks, int64_t bytes) {
  if (across != 0 && across != 32 && across != 64 && across != 128 && across != 256) {
    fail("bias_gelu_backward: argument 'threads_across': expected 0, 32, 64, 128 or 256, got ", across);
  }
  if (blocks < 0 || blocks > 1024) fail("bias_gelu_backward: argument 'blocks_per_processor': expected 0 to 1024, got ", blocks);
  const OnDevice on(x.is_cuda() ? x : grad.is_cuda() ? grad : bias);
  Backward backward = backward_of(grad, x, bias);
  backward.call.plan = {static_cast<int>(across), static_cast<int>(blocks), static_cast<int>(bytes)};
  const int64_t bytes_needed = bias_gelu_backward_workspace_cuda(backward.call);
  if (bytes_needed < 0) fail("bias_gelu_backward: CUDA does not say what the device has");
  const Tensor workspace = make(backward.x, {bytes_needed}, ScalarType::Byte);
  backward.call.workspace = workspace.mutable_data_ptr();
  check_launch("bias_gelu_backward", bias_gelu_backward_cuda(backward.call, on.stream()));
  return {backward.dx, backward.dbias};
}

Gradients backward_on_gpu(const Tensor& grad, const Tensor& x, const Tensor& bias) { return backward_plan_on_gpu(grad, x, bias, 0, 0, 0); }
#endif

}  // namespace

void define_bias_gelu(Library& library) {
  library.def("bias_gelu(Tensor x, Tensor bias) -> Tensor");
  library.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor dx, Tensor dbias)");
  // The same with the choices that the kernels make left to the caller: 0 is their own. Measured, not for daily use.
  library.def("bias_gelu.access(Tensor x, Tensor bias, int access) -> Tensor");
  library.def(
      "bias_gelu_backward.plan(Tensor grad, Tensor x, Tensor bias, int threads_across, int blocks_per_processor, int vector_bytes)"
      " -> (Tensor dx, Tensor dbias)");
}

void implement_bias_gelu_cpu(Library& library) {
  library.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  library.impl("bias_gelu.access", TORCH_BOX(&bias_gelu_access));
  library.impl("bias_gelu_backward", TORCH_BOX(&backward));
  library.impl("bias_gelu_backward.plan", TORCH_BOX(&backward_plan));
}

#ifdef CUSTOM_OPS_CUDA
void implement_bias_gelu_cuda(Library& library) {
  library.impl("bias_gelu", TORCH_BOX(&bias_gelu_on_gpu));
  library.impl("bias_gelu.access", TORCH_BOX(&bias_gelu_access_on_gpu));
  library.impl("bias_gelu_backward", TORCH_BOX(&backward_on_gpu));
  library.impl("bias_gelu_backward.plan", TORCH_BOX(&backward_plan_on_gpu));
}
#endif

}  // namespace custom_ops::stable

// bias_gelu and its derivative as operators.

#include <optional>
#include <tuple>

#include "../../bias_gelu/kernels.h"
#include "../boxing.h"
#include "../registration.h"

namespace custom_ops::stable {
namespace {

void check(const char* op, const Tensor& x, const Tensor& bias) {
  check_device(op, {"x", x}, {"bias", bias});
  check_dtype(op, {"x", x}, {"bias", bias});
  if (x.dim() < 1) fail(op, ": argument 'x': expected one dimension or more, got []");
  const int64_t columns = x.size(x.dim() - 1);
  if (!equal_sizes({&columns, 1}, bias.sizes())) {
    fail(op, ": argument 'bias': expected shape ", name_of_shape({&columns, 1}), ", an element for each of x's last dimension, got ",
         name_of_shape(bias.sizes()));
  }
}

struct Forward {
  Tensor x, bias, out;
  BiasGelu call;
};

Forward forward_of(Tensor x_any, Tensor bias_any, int64_t access) {
  check("bias_gelu", x_any, bias_any);
  const Dtype dtype = dtype_of("bias_gelu", {"x", x_any});
  if (access < 0 || access > static_cast<int64_t>(Access::kVector4)) fail("bias_gelu: argument 'access': expected 0 to 4, got ", access);
  Tensor x = in_order(std::move(x_any)), bias = in_order(std::move(bias_any)), out = make_like(x);
  const int64_t columns = bias.numel(), rows = columns == 0 ? 0 : x.numel() / columns;
  const BiasGelu call{dtype, x.const_data_ptr(), bias.const_data_ptr(), out.mutable_data_ptr(), rows, columns, static_cast<Access>(access)};
  return {std::move(x), std::move(bias), std::move(out), call};
}

struct Backward {
  Tensor grad, x, bias, dx, dbias;
  BiasGeluBackward call;
};

Backward backward_of(Tensor grad_any, Tensor x_any, Tensor bias_any) {
  const char* op = "bias_gelu_backward";
  check(op, x_any, bias_any);
  check_device(op, {"x", x_any}, {"grad", grad_any});
  check_dtype(op, {"x", x_any}, {"grad", grad_any});
  check_shape(op, {"x", x_any}, {"grad", grad_any});
  const Dtype dtype = dtype_of(op, {"x", x_any});
  Tensor grad = in_order(std::move(grad_any)), x = in_order(std::move(x_any)), bias = in_order(std::move(bias_any));
  Tensor dx = make_like(x), dbias = make_like(bias);
  const int64_t columns = bias.numel(), rows = columns == 0 ? 0 : x.numel() / columns;
  const BiasGeluBackward call{dtype, grad.const_data_ptr(), x.const_data_ptr(), bias.const_data_ptr(), dx.mutable_data_ptr(),
                              dbias.mutable_data_ptr(), nullptr, rows, columns};
  return {std::move(grad), std::move(x), std::move(bias), std::move(dx), std::move(dbias), call};
}

using Gradients = std::tuple<Tensor, Tensor>;

Tensor bias_gelu_access(Tensor x, Tensor bias, int64_t access) {
  Forward forward = forward_of(std::move(x), std::move(bias), access);
  torch::stable::parallel_for(0, forward.x.numel(), kGrain / 4, [&](int64_t begin, int64_t end) { bias_gelu_cpu(forward.call, begin, end); });
  return std::move(forward.out);
}

Tensor bias_gelu(Tensor x, Tensor bias) { return bias_gelu_access(std::move(x), std::move(bias), 0); }

Gradients backward(Tensor grad, Tensor x, Tensor bias) {
  Backward backward = backward_of(std::move(grad), std::move(x), std::move(bias));
  const Tensor workspace = make_bytes(backward.x, bias_gelu_backward_workspace_cpu(backward.call));
  backward.call.workspace = workspace.mutable_data_ptr();
  const int64_t groups = bias_gelu_backward_groups(backward.call.rows);
  const int64_t of_group = groups == 0 ? 1 : std::max<int64_t>(1, backward.x.numel() / groups);
  torch::stable::parallel_for(0, groups, std::max<int64_t>(1, kGrain / 4 / of_group),
                              [&](int64_t begin, int64_t end) { bias_gelu_backward_rows_cpu(backward.call, begin, end); });
  torch::stable::parallel_for(0, bias_gelu_backward_blocks(backward.call.columns), kGrain / 64 / kColumnBlock,
                              [&](int64_t begin, int64_t end) { bias_gelu_backward_columns_cpu(backward.call, begin, end); });
  return {std::move(backward.dx), std::move(backward.dbias)};
}

Gradients backward_plan(Tensor grad, Tensor x, Tensor bias, int64_t, int64_t, int64_t) {
  return backward(std::move(grad), std::move(x), std::move(bias));
}

#ifdef CUSTOM_OPS_CUDA
Tensor bias_gelu_access_on_gpu(Tensor x, Tensor bias, int64_t access) {
  const OnDevice on(x.is_cuda() ? x : bias);
  Forward forward = forward_of(std::move(x), std::move(bias), access);
  check_launch("bias_gelu", bias_gelu_cuda(forward.call, on.stream()));
  return std::move(forward.out);
}

Tensor bias_gelu_on_gpu(Tensor x, Tensor bias) { return bias_gelu_access_on_gpu(std::move(x), std::move(bias), 0); }

Gradients backward_plan_on_gpu(Tensor grad, Tensor x, Tensor bias, int64_t across, int64_t blocks, int64_t bytes) {
  if (across != 0 && across != 32 && across != 64 && across != 128 && across != 256) {
    fail("bias_gelu_backward: argument 'threads_across': expected 0, 32, 64, 128 or 256, got ", across);
  }
  if (blocks < 0 || blocks > 1024) fail("bias_gelu_backward: argument 'blocks_per_processor': expected 0 to 1024, got ", blocks);
  const OnDevice on(x.is_cuda() ? x : grad.is_cuda() ? grad : bias);
  Backward backward = backward_of(std::move(grad), std::move(x), std::move(bias));
  backward.call.plan = {static_cast<int>(across), static_cast<int>(blocks), static_cast<int>(bytes)};
  const int64_t bytes_needed = bias_gelu_backward_workspace_cuda(backward.call);
  if (bytes_needed < 0) fail("bias_gelu_backward: CUDA does not say what the device has");
  const Tensor workspace = make_bytes(backward.x, bytes_needed);
  backward.call.workspace = workspace.mutable_data_ptr();
  check_launch("bias_gelu_backward", bias_gelu_backward_cuda(backward.call, on.stream()));
  return {std::move(backward.dx), std::move(backward.dbias)};
}

Gradients backward_on_gpu(Tensor grad, Tensor x, Tensor bias) {
  return backward_plan_on_gpu(std::move(grad), std::move(x), std::move(bias), 0, 0, 0);
}
#endif

}  // namespace

void implement_bias_gelu_cpu(Library& library) {
  library.impl("bias_gelu", boxed<&bias_gelu>);
  library.impl("bias_gelu.access", boxed<&bias_gelu_access>);
  library.impl("bias_gelu_backward", boxed<&backward>);
  library.impl("bias_gelu_backward.plan", boxed<&backward_plan>);
}

#ifdef CUSTOM_OPS_CUDA
void implement_bias_gelu_cuda(Library& library) {
  library.impl("bias_gelu", boxed<&bias_gelu_on_gpu>);
  library.impl("bias_gelu.access", boxed<&bias_gelu_access_on_gpu>);
  library.impl("bias_gelu_backward", boxed<&backward_on_gpu>);
  library.impl("bias_gelu_backward.plan", boxed<&backward_plan_on_gpu>);
}
#endif

}  // namespace custom_ops::stable

// conv_bn_relu as an operator: torch's convolution, then one kernel over its result.

#include <array>
#include <optional>

#include "../../conv_bn_relu/kernels.h"
#include "../boxing.h"
#include "../registration.h"

namespace custom_ops::stable {
namespace {

constexpr const char* kOp = "conv_bn_relu";
using Pair = std::vector<int64_t>;  // for height and width

void check_channels(const Tensor& x, const Tensor& weight, const Argument& argument) {
  check_device(kOp, {"x", x}, argument);
  check_wide_dtype(kOp, {"x", x}, argument);
  const int64_t channels = weight.size(0);
  const Sizes sizes(&channels, 1);
  if (!equal_sizes(sizes, argument.tensor.sizes())) {
    fail(kOp, ": argument '", argument.name, "': expected shape ", name_of_shape(sizes), ", an element for each channel of 'weight', got ",
         name_of_shape(argument.tensor.sizes()));
  }
}

void check(const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor& shift) {
  if (x.dim() != 4) fail(kOp, ": argument 'x': expected four dimensions (batch, channels, height, width), got ", name_of_shape(x.sizes()));
  if (weight.dim() != 4) {
    fail(kOp, ": argument 'weight': expected four dimensions (channels, channels of a group, height, width), got ",
         name_of_shape(weight.sizes()));
  }
  check_device(kOp, {"x", x}, {"weight", weight});
  check_dtype(kOp, {"x", x}, {"weight", weight});
  dtype_of(kOp, {"x", x});
  check_channels(x, weight, {"scale", scale});
  check_channels(x, weight, {"shift", shift});
}

Tensor convolution(const Tensor& x, const Tensor& weight, const Pair& stride, const Pair& padding, const Pair& dilation, int64_t groups) {
  using torch::stable::detail::from;
  std::array<StableIValue, 9> stack{word_of(another_handle(x.get())), word_of(another_handle(weight.get())), from(std::nullopt), from(stride),
                                    from(padding), from(dilation), from(false), from(Pair{0, 0}), from(groups)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::convolution", "", stack.data(), TORCH_ABI_VERSION));
  return Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
}

bool channels_last(const Tensor& y) {
  const int64_t channels = y.size(1), width = y.size(3);
  return y.stride(1) == 1 && y.stride(3) == channels && y.stride(2) == width * channels && y.stride(0) == y.size(2) * width * channels;
}

// Requires checked operands; `apply` runs the kernel that a call describes.
template <typename Apply>
Tensor run(const Tensor& x, const Tensor& weight, Tensor scale_any, Tensor shift_any, const Pair& stride, const Pair& padding,
           const Pair& dilation, int64_t groups, Apply apply) {
  const Tensor scale = in_order(std::move(scale_any)), shift = in_order(std::move(shift_any));
  Tensor y = convolution(x, weight, stride, padding, dilation, groups);
  const bool last = !y.is_contiguous() && channels_last(y);
  if (!last) y = in_order(std::move(y));
  const int64_t pixels = y.size(2) * y.size(3);
  apply(ScaleShiftRelu{dtype_of(kOp, {"x", x}), y.mutable_data_ptr(), scale.const_data_ptr(), shift.const_data_ptr(),
                       last ? y.size(0) * pixels : y.size(0), y.size(1), last ? 1 : pixels});
  return y;
}

Tensor conv_bn_relu(Tensor x, Tensor weight, Tensor scale, Tensor shift, Pair stride, Pair padding, Pair dilation, int64_t groups) {
  check(x, weight, scale, shift);
  return run(x, weight, std::move(scale), std::move(shift), stride, padding, dilation, groups, [](const ScaleShiftRelu& call) {
    torch::stable::parallel_for(0, call.outer * call.channels * call.inner, kGrain,
                                [&](int64_t begin, int64_t end) { scale_shift_relu_cpu(call, begin, end); });
  });
}

#ifdef CUSTOM_OPS_CUDA
Tensor conv_bn_relu_on_gpu(Tensor x, Tensor weight, Tensor scale, Tensor shift, Pair stride, Pair padding, Pair dilation, int64_t groups) {
  check(x, weight, scale, shift);  // among others, that all of them are on one GPU
  const OnDevice on(x);
  return run(x, weight, std::move(scale), std::move(shift), stride, padding, dilation, groups,
             [&](const ScaleShiftRelu& call) { check_launch(kOp, scale_shift_relu_cuda(call, on.stream())); });
}
#endif

}  // namespace

void implement_conv_bn_relu_cpu(Library& library) { library.impl("conv_bn_relu", boxed<&conv_bn_relu>); }

#ifdef CUSTOM_OPS_CUDA
void implement_conv_bn_relu_cuda(Library& library) { library.impl("conv_bn_relu", boxed<&conv_bn_relu_on_gpu>); }
#endif

}  // namespace custom_ops::stable

// The Python module of either set of kernels. The one file here with torch headers, and of those only the small ones:
// torch/extension.h takes four times as long to compile.
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>

#include "rms_norm.h"

namespace {

using rms_norm::Rows;
using rms_norm::Shape;
using rms_norm::Type;

Type type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Type::float32;
    case at::kDouble: return Type::float64;
    case at::kHalf: return Type::float16;
    case at::kBFloat16: return Type::bfloat16;
    default: TORCH_CHECK_TYPE(false, "rms_norm kernels take float32, float64, float16 or bfloat16, got ", tensor.scalar_type());
  }
}

// rows: (outer, inner, columns) with adjacent columns.
Rows rows_of(const at::Tensor& rows) {
  TORCH_CHECK_VALUE(rows.dim() == 3 && (rows.size(2) == 1 || rows.stride(2) == 1),
                    "rms_norm kernels take (outer, inner, columns) with adjacent columns, got sizes ", rows.sizes(), ", strides ", rows.strides());
  return {rows.const_data_ptr(), rows.size(1), rows.stride(0), rows.stride(1)};
}

Shape shape_of(const at::Tensor& x, const std::optional<at::Tensor>& weight, uintptr_t stream) {
  const Type type = type_of(x);
  if (weight) {
    TORCH_CHECK_VALUE(weight->is_contiguous() && weight->dim() == 1 && weight->size(0) == x.size(2),
                      "expected a contiguous weight of ", x.size(2), " elements, got ", weight->sizes());
  }
  return {x.size(0) * x.size(1), x.size(2), type, weight ? type_of(*weight) : type, x.is_cuda() ? x.get_device() : 0,
          reinterpret_cast<void*>(stream)};
}

at::TensorOptions wide(const at::Tensor& x) { return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat); }

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps, uintptr_t stream) {
  rms_norm::Forward call{shape_of(x, weight, stream), rows_of(x), weight ? weight->const_data_ptr() : nullptr, eps, nullptr, nullptr};
  at::Tensor y = at::empty({call.shape.rows, call.shape.columns}, x.options());
  at::Tensor rstd = at::empty({call.shape.rows}, wide(x));
  call.y = y.mutable_data_ptr();
  call.rstd = rstd.mutable_data_ptr();
  rms_norm::forward(call);
  return {y, rstd};
}

std::tuple<at::Tensor, std::optional<at::Tensor>> backward(const at::Tensor& dy, const at::Tensor& x,
                                                           const std::optional<at::Tensor>& weight, const at::Tensor& rstd,
                                                           bool needs_dweight, uintptr_t stream) {
  const Shape shape = shape_of(x, weight, stream);
  TORCH_CHECK_VALUE(dy.scalar_type() == x.scalar_type() && dy.dim() == 3 && dy.size(0) * dy.size(1) == shape.rows && dy.size(2) == shape.columns,
                    "expected dy like x ", x.sizes(), ", got ", dy.sizes());
  TORCH_CHECK_VALUE(rstd.is_contiguous() && rstd.numel() == shape.rows && rstd.scalar_type() == wide(x).dtype(),
                    "expected a contiguous rstd of ", shape.rows, " elements, got ", rstd.sizes());
  at::Tensor dx = at::empty({shape.rows, shape.columns}, x.options());
  std::optional<at::Tensor> dweight;
  if (needs_dweight) dweight = at::empty({shape.columns}, weight.value().options());
  rms_norm::Backward call{shape, rows_of(dy), rows_of(x), weight ? weight->const_data_ptr() : nullptr, rstd.const_data_ptr(),
                          dx.mutable_data_ptr(), dweight ? dweight->mutable_data_ptr() : nullptr, nullptr};
  const at::Tensor workspace = at::empty({rms_norm::backward_workspace(call)}, wide(x));
  call.workspace = workspace.mutable_data_ptr();
  rms_norm::backward(call);
  return {dx, dweight};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  module.def("forward", &forward, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
  module.def("backward", &backward, py::arg("dy"), py::arg("x"), py::arg("weight"), py::arg("rstd"), py::arg("needs_dweight"),
             py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

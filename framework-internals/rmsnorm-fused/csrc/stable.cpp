// The kernels as operators on LibTorch's stable ABI: one library for every torch from the version that it is built for
// (TORCH_TARGET_VERSION) on, with the CPU kernels for several instruction sets and, with RMS_NORM_CUDA, the CUDA kernels.
// impl/prebuilt.py loads and calls it. ops/rows.py, register_row_kernels, documents the operators' arguments; a result that
// was not requested is an empty tensor. Only that module calls them, below autograd, so they have no fakes or derivatives.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>

#include <native_build/memory.h>

#include "cpu/levels.h"
#include "cpu/parallel.h"
#include "rms_norm.h"

#ifdef RMS_NORM_CUDA
// Weak, because the symbol is in torch's CUDA library; this file then also loads under a CPU build of torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace rms_norm {

void parallel_for(int64_t count, int64_t grain, void (*task)(int64_t begin, int64_t end, void* context), void* context) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, grain, task, context));
}

int64_t threads() {
  uint32_t count = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&count));
  return count;
}

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Type::float32;
    case ScalarType::Double: return Type::float64;
    case ScalarType::Half: return Type::float16;
    case ScalarType::BFloat16: return Type::bfloat16;
    default: STD_TORCH_CHECK(false, "rms_norm kernels take float32, float64, float16 or bfloat16");
  }
}

ScalarType wide(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor make(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  Tensor made = torch::stable::new_empty(like, {sizes.begin(), sizes.size()}, type);
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(made.get(), &bytes));
  if (made.is_cpu()) native_build::use_large_pages(made.mutable_data_ptr(), bytes);
  return made;
}

// rows: (outer, inner, columns) with adjacent columns, of the sizes of `x`.
Rows rows_of(const Tensor& rows, const Tensor& x) {
  STD_TORCH_CHECK(rows.dim() == 3 && (rows.size(2) == 1 || rows.stride(2) == 1), "expected (outer, inner, columns) with adjacent columns");
  STD_TORCH_CHECK(rows.size(0) * rows.size(1) == x.size(0) * x.size(1) && rows.size(2) == x.size(2) && rows.scalar_type() == x.scalar_type(),
                  "expected as many rows and columns of the same type as x has");
  return {rows.const_data_ptr(), rows.size(1), rows.stride(0), rows.stride(1)};
}

Rows rows_of(const OptionalTensor& rows, const Tensor& x) { return rows ? rows_of(*rows, x) : Rows{nullptr, 1, 0, 0}; }

Weight weight_of(const OptionalTensor& weight, double offset) { return {weight ? weight->const_data_ptr() : nullptr, offset}; }

Shape shape_of(const Tensor& x, const OptionalTensor& weight, void* stream) {
  STD_TORCH_CHECK(!weight || (weight->is_contiguous() && weight->numel() == x.size(2)), "expected a contiguous weight of ", x.size(2), " elements");
  STD_TORCH_CHECK(!weight || weight->scalar_type() == wide(x) || (x.is_cuda() && weight->scalar_type() == x.scalar_type()),
                  "expected a weight of the accumulating type or, on a GPU, of that of x");
  const Type type = type_of(x);
  return {x.size(0) * x.size(1), x.size(2), type, weight ? type_of(*weight) : type, x.is_cuda() ? x.get_device_index() : 0, stream};
}

using Results = std::tuple<Tensor, Tensor, Tensor>;

// A set of kernels and their stream.
struct Target {
  Kernels kernels;
  void* stream;
};

Tensor sum_for(const Tensor& x, const OptionalTensor& residual) {
  return residual ? make(x, {x.size(0) * x.size(1), x.size(2)}, x.scalar_type()) : make(x, {0}, x.scalar_type());
}

// All but where rstd goes and how y is quantised.
Forward call_for(const Target& target, const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, double eps, double offset,
                 bool llama, const Tensor& y, const Tensor& s) {
  return {shape_of(x, weight, target.stream), rows_of(x, x), rows_of(residual, x), weight_of(weight, offset), eps, llama, y.mutable_data_ptr(),
          residual ? s.mutable_data_ptr() : nullptr, nullptr, nullptr};
}

Results forward(const Target& target, const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, double eps, double offset,
                bool llama) {
  const int64_t rows = x.size(0) * x.size(1);
  Tensor y = make(x, {rows, x.size(2)}, x.scalar_type());
  Tensor s = sum_for(x, residual);
  Tensor rstd = make(x, {rows}, wide(x));
  Forward call = call_for(target, x, residual, weight, eps, offset, llama, y, s);
  call.rstd = rstd.mutable_data_ptr();
  target.kernels.forward(call);
  return {y, s, rstd};
}

Results layer_forward(const Target& target, const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, const OptionalTensor& bias,
                      double eps) {
  const int64_t rows = x.size(0) * x.size(1);
  Tensor y = make(x, {rows, x.size(2)}, x.scalar_type());
  Tensor s = sum_for(x, residual);
  Tensor moments = make(x, {rows, 2}, wide(x));
  Forward call = call_for(target, x, residual, weight, eps, 0, false, y, s);
  const Shape with_bias = shape_of(x, bias, target.stream);
  STD_TORCH_CHECK(!weight || !bias || with_bias.weight_type == call.shape.weight_type, "expected a bias of the type of the weight");
  if (bias) call.shape = with_bias;
  call.rstd = moments.mutable_data_ptr();
  call.centred = true;
  call.bias = weight_of(bias, 0).data;
  target.kernels.forward(call);
  return {y, s, moments};
}

Results quantize(const Target& target, const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, const OptionalTensor& scale,
                 double eps, double offset, bool llama) {
  STD_TORCH_CHECK(!scale || (scale->numel() == 1 && scale->scalar_type() == ScalarType::Float), "expected a scale of one float32 element");
  const int64_t rows = x.size(0) * x.size(1);
  Tensor y = make(x, {rows, x.size(2)}, ScalarType::Float8_e4m3fn);
  Tensor s = sum_for(x, residual);
  Tensor row_scales = make(x, {scale ? 0 : rows}, ScalarType::Float);
  const Quantised quantised{scale ? scale->const_data_ptr<float>() : nullptr, scale ? nullptr : row_scales.mutable_data_ptr<float>()};
  Forward call = call_for(target, x, residual, weight, eps, offset, llama, y, s);
  call.quantised = &quantised;
  target.kernels.forward(call);
  return {y, s, row_scales};
}

// dx; fills `dparameters`, of the type of the weight, if there is one.
Tensor run_backward(const Target& target, const Tensor& dy, const OptionalTensor& ds, const Tensor& s, const OptionalTensor& weight, const Tensor& rstd,
                    double offset, bool llama, bool deterministic, const OptionalTensor& dparameters, bool centred) {
  Shape shape = shape_of(s, weight, target.stream);
  STD_TORCH_CHECK(rstd.is_contiguous() && rstd.numel() == shape.rows * (centred ? 2 : 1) && rstd.scalar_type() == wide(s),
                  "expected what the forward pass keeps of ", shape.rows, " rows, contiguous");
  if (dparameters) shape.weight_type = type_of(*dparameters);
  Tensor dx = make(s, {shape.rows, shape.columns}, s.scalar_type());
  Backward call{shape, rows_of(dy, s), rows_of(ds, s), rows_of(s, s), weight_of(weight, offset), rstd.const_data_ptr(), llama, deterministic,
                dx.mutable_data_ptr(), dparameters ? dparameters->mutable_data_ptr() : nullptr, nullptr, centred};
  Tensor workspace = make(s, {target.kernels.backward_workspace(call)}, ScalarType::Byte);
  call.workspace = workspace.mutable_data_ptr();
  target.kernels.backward(call);
  return dx;
}

std::tuple<Tensor, Tensor> backward(const Target& target, const Tensor& dy, const OptionalTensor& ds, const Tensor& s, const OptionalTensor& weight,
                                    const Tensor& rstd, double offset, bool llama, bool needs_dweight, bool deterministic) {
  STD_TORCH_CHECK(weight || !needs_dweight, "expected a weight, whose gradient is asked for");
  OptionalTensor dweight;
  if (needs_dweight) dweight = make(*weight, {s.size(2)}, weight->scalar_type());
  Tensor dx = run_backward(target, dy, ds, s, weight, rstd, offset, llama, deterministic, dweight, false);
  return {dx, needs_dweight ? *dweight : make(s, {0}, s.scalar_type())};
}

std::tuple<Tensor, Tensor> layer_backward(const Target& target, const Tensor& dy, const OptionalTensor& ds, const Tensor& s,
                                          const OptionalTensor& weight, const Tensor& moments, bool needs_dparameters, bool deterministic) {
  OptionalTensor dparameters;
  if (needs_dparameters) dparameters = make(s, {2, s.size(2)}, weight ? weight->scalar_type() : wide(s));
  Tensor dx = run_backward(target, dy, ds, s, weight, moments, 0, false, deterministic, dparameters, true);
  return {dx, needs_dparameters ? *dparameters : make(s, {0}, s.scalar_type())};
}

struct OnCpu {
  explicit OnCpu(const Tensor&) {}

  Target target() const {
    static const Kernels kernels = cpu_kernels();
    return {kernels, nullptr};
  }
};

#ifdef RMS_NORM_CUDA
class OnCuda {
 public:
  explicit OnCuda(const Tensor& tensor) : device_(tensor.get_device_index()), guard_(device_) {}

  Target target() const {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    return {{&rms_norm::forward, &rms_norm::backward_workspace, &rms_norm::backward}, stream};
  }

 private:
  const int32_t device_;
  const torch::stable::accelerator::DeviceGuard guard_;
};
#endif

// The operators of a device: one plain function each, as TORCH_BOX requires.
template <class Device> struct Operators {
  static Results forward_op(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, double eps, double offset, bool llama) {
    const Device device(x);
    return forward(device.target(), x, residual, weight, eps, offset, llama);
  }

  static Results quantize_op(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, const OptionalTensor& scale, double eps,
                             double offset, bool llama) {
    const Device device(x);
    return quantize(device.target(), x, residual, weight, scale, eps, offset, llama);
  }

  static std::tuple<Tensor, Tensor> backward_op(const Tensor& dy, const OptionalTensor& ds, const Tensor& s, const OptionalTensor& weight,
                                                const Tensor& rstd, double offset, bool llama, bool needs_dweight, bool deterministic) {
    const Device device(s);
    return backward(device.target(), dy, ds, s, weight, rstd, offset, llama, needs_dweight, deterministic);
  }

  static Results layer_forward_op(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
    const Device device(x);
    return layer_forward(device.target(), x, residual, weight, bias, eps);
  }

  static std::tuple<Tensor, Tensor> layer_backward_op(const Tensor& dy, const OptionalTensor& ds, const Tensor& s, const OptionalTensor& weight,
                                                      const Tensor& moments, bool needs_dparameters, bool deterministic) {
    const Device device(s);
    return layer_backward(device.target(), dy, ds, s, weight, moments, needs_dparameters, deterministic);
  }

  static void add_to(torch::stable::detail::StableLibrary& library) {
    library.impl("forward", TORCH_BOX(&forward_op));
    library.impl("quantize", TORCH_BOX(&quantize_op));
    library.impl("backward", TORCH_BOX(&backward_op));
    library.impl("layer_forward", TORCH_BOX(&layer_forward_op));
    library.impl("layer_backward", TORCH_BOX(&layer_backward_op));
  }
};

}  // namespace
}  // namespace rms_norm

STABLE_TORCH_LIBRARY(rmsnorm_fused_prebuilt, library) {
  library.def("forward(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset, bool llama) -> (Tensor y, Tensor s, Tensor rstd)");
  library.def(
      "quantize(Tensor x, Tensor? residual, Tensor? weight, Tensor? scale, float eps, float weight_offset, bool llama)"
      " -> (Tensor y, Tensor s, Tensor row_scales)");
  library.def(
      "backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor rstd, float weight_offset, bool llama, bool needs_dweight,"
      " bool deterministic) -> (Tensor dx, Tensor dweight)");
  library.def("layer_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor s, Tensor moments)");
  library.def(
      "layer_backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor moments, bool needs_dparameters, bool deterministic)"
      " -> (Tensor dx, Tensor dparameters)");
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm_fused_prebuilt, CPU, library) { rms_norm::Operators<rms_norm::OnCpu>::add_to(library); }

#ifdef RMS_NORM_CUDA
STABLE_TORCH_LIBRARY_IMPL(rmsnorm_fused_prebuilt, CUDA, library) { rms_norm::Operators<rms_norm::OnCuda>::add_to(library); }
#endif

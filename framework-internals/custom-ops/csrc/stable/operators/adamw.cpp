// A gradient norm and AdamW over lists of tensors, as operators.

#include <cmath>

#include "../../adamw/kernels.h"
#include "../boxing.h"
#include "../registration.h"

namespace custom_ops::stable {
namespace {

constexpr const char* kNorm = "gradient_norm";
constexpr const char* kAdamW = "adamw_";

bool is_narrow(int32_t code) { return code == codes.float16 || code == codes.bfloat16; }

// A parameter or a moment, beside the first parameter.
void check_wide_in_list(const Argument& first, const Argument& other) {
  check_device(kAdamW, first, other);
  check_dtype(kAdamW, first, other);
  const int32_t code = other.tensor.dtype();
  if (code != codes.float32 && code != codes.float64) {
    fail(kAdamW, ": argument '", other.name, "': expected dtype torch.float32 or torch.float64, got ", name_of_dtype(code));
  }
}

// A copy of a parameter, of 16 bits.
void check_copy(const Argument& parameter, const Argument& first, const Argument& other) {
  if (parameter.tensor.dtype() != codes.float32) {
    fail(kAdamW, ": argument 'parameters': expected dtype torch.float32 beside 'copies', got ", name_of_dtype(parameter.tensor.dtype()));
  }
  check_device(kAdamW, parameter, other);
  const int32_t code = other.tensor.dtype();
  if (!is_narrow(code)) {
    fail(kAdamW, ": argument '", other.name, "': expected dtype torch.float16 or torch.bfloat16, got ", name_of_dtype(code));
  }
  check_dtype(kAdamW, first, other);
}

// A gradient, in the dtype of its parameter, or of 16 bits beside float32: in that of the copies, if there are any.
void check_gradient(const Argument& parameter, const Argument& first, const Tensor* copy, const Argument& other) {
  check_device(kAdamW, parameter, other);
  const int32_t code = other.tensor.dtype();
  if (code != parameter.tensor.dtype()) {
    if (parameter.tensor.dtype() != codes.float32 || !is_narrow(code)) check_dtype(kAdamW, parameter, other);
    if (copy != nullptr) check_dtype(kAdamW, {"copies", *copy}, other);
  }
  check_dtype(kAdamW, first, other);
}

void check_scalar(const char* op, const Argument& first, const Argument& scalar, int32_t dtype) {
  check_device(op, first, scalar);
  if (scalar.tensor.dtype() != dtype || scalar.tensor.numel() != 1) {
    fail(op, ": argument '", scalar.name, "': expected one element of dtype ", name_of_dtype(dtype), ", got shape ",
         name_of_shape(scalar.tensor.sizes()), " of dtype ", name_of_dtype(scalar.tensor.dtype()));
  }
}

int64_t chunks_of(int64_t count) { return (count + kChunk - 1) / kChunk; }

// The scratch memory must live as long as the call.
struct Norm {
  std::vector<Tensor> gradients;
  Tensor sums, norm;
  GradientNorm call;
};

Norm norm_of(std::vector<Tensor> given) {
  if (given.empty()) fail(kNorm, ": argument 'gradients': expected one tensor or more, got none");
  const Argument first{"gradients", given[0]};
  GradientNorm call{};
  for (Tensor& tensor : given) {
    const Argument gradient{"gradients", tensor};
    check_device(kNorm, first, gradient);
    const Dtype dtype = dtype_of(kNorm, gradient);
    if (wide(tensor.dtype()) != wide(given[0].dtype())) {
      fail(kNorm, ": argument 'gradients': expected dtypes that are computed in ", name_of_dtype(wide(given[0].dtype())),
           ", like the first, got ", name_of_dtype(tensor.dtype()));
    }
    tensor = in_order(std::move(tensor));
    const int64_t count = tensor.numel();
    if (count == 0) continue;
    call.gradients.push_back({tensor.const_data_ptr(), count, call.chunks, dtype});
    call.chunks += chunks_of(count);
  }
  Tensor sums = make(given[0], {&call.chunks, 1}, codes.float64), norm = make(given[0], {}, wide(given[0].dtype()));
  call.dtype = norm.dtype() == codes.float32 ? Dtype::kFloat32 : Dtype::kFloat64;
  call.sums = static_cast<double*>(sums.mutable_data_ptr());
  call.norm = norm.mutable_data_ptr();
  return {std::move(given), std::move(sums), std::move(norm), std::move(call)};
}

Tensor norm_on_cpu(std::vector<Tensor> gradients) {
  Norm norm = norm_of(std::move(gradients));
  torch::stable::parallel_for(0, norm.call.chunks, 1,
                              [&](int64_t begin, int64_t end) { gradient_norm_chunks_cpu(norm.call, begin, end); });
  double sum = 0;
  for (int64_t chunk = 0; chunk < norm.call.chunks; ++chunk) sum += norm.call.sums[chunk];
  if (norm.call.dtype == Dtype::kFloat32) {
    *static_cast<float*>(norm.call.norm) = static_cast<float>(std::sqrt(sum));
  } else {
    *static_cast<double*>(norm.call.norm) = std::sqrt(sum);
  }
  return std::move(norm.norm);
}

struct Hyperparameters {
  double lr, beta1, beta2, eps, weight_decay, max_norm;
  bool maximize;
};

AdamW update_of(const std::vector<Tensor>& parameters, const std::vector<Tensor>& gradients, const std::vector<Tensor>& means,
                const std::vector<Tensor>& squares, const std::vector<Tensor>& maxima, const std::vector<Tensor>& steps,
                const std::vector<Tensor>& copies, const std::optional<Tensor>& norm,
                const std::optional<Tensor>& device_lr, const Hyperparameters& given) {
  const struct { const char* name; const std::vector<Tensor>& list; } lists[] = {
      {"parameters", parameters}, {"gradients", gradients}, {"means", means}, {"squares", squares},
      {"maxima", maxima},         {"steps", steps},         {"copies", copies}};
  for (const auto& column : lists) {
    if ((&column.list == &copies || &column.list == &maxima) && column.list.empty()) continue;
    if (column.list.size() != parameters.size()) {
      fail(kAdamW, ": argument '", column.name, "': expected ", parameters.size(), " tensors, one per parameter, got ", column.list.size());
    }
  }
  AdamW call{};
  if (parameters.empty()) return call;
  const Argument first{"parameters", parameters[0]};
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (const auto& column : lists) {
      if (&column.list == &steps || i >= column.list.size()) continue;
      const Argument of_list{column.name, column.list[i]};
      if (&column.list == &gradients) {
        check_gradient(first, {"gradients", gradients[0]}, copies.empty() ? nullptr : &copies[0], of_list);
      } else if (&column.list == &copies) {
        check_copy(first, {"copies", copies[0]}, of_list);
      } else {
        check_wide_in_list(first, of_list);
      }
      check_shape(kAdamW, {"parameters", parameters[i]}, of_list);
      if (!column.list[i].is_contiguous()) fail(kAdamW, ": argument '", column.name, "': expected contiguous tensors");
    }
    check_scalar(kAdamW, first, {"steps", steps[i]}, codes.float32);
    const int64_t count = parameters[i].numel();
    if (count == 0) continue;
    call.parameters.push_back({parameters[i].mutable_data_ptr(), gradients[i].const_data_ptr(), means[i].mutable_data_ptr(),
                               squares[i].mutable_data_ptr(), maxima.empty() ? nullptr : maxima[i].mutable_data_ptr(),
                               copies.empty() ? nullptr : copies[i].mutable_data_ptr(),
                               static_cast<const float*>(steps[i].const_data_ptr()), count, call.chunks});
    call.chunks += chunks_of(count);
  }
  call.dtype = dtype_of(kAdamW, first);
  call.gradient_dtype = dtype_of(kAdamW, {"gradients", gradients[0]});
  call.copy_dtype = copies.empty() ? call.dtype : dtype_of(kAdamW, {"copies", copies[0]});
  if (norm) {
    check_scalar(kAdamW, first, {"norm", *norm}, parameters[0].dtype());
    call.norm = norm->const_data_ptr();
  }
  if (device_lr) {
    check_scalar(kAdamW, first, {"device_lr", *device_lr}, codes.float32);
    call.device_lr = device_lr->const_data_ptr();
  }
  call.lr = given.lr;
  call.beta1 = given.beta1;
  call.beta2 = given.beta2;
  call.eps = given.eps;
  call.weight_decay = given.weight_decay;
  call.max_norm = given.max_norm;
  call.amsgrad = !maxima.empty();
  call.maximize = given.maximize;
  return call;
}

template <auto kRun>
void adamw(std::vector<Tensor> parameters, std::vector<Tensor> gradients, std::vector<Tensor> means, std::vector<Tensor> squares,
           std::vector<Tensor> maxima, std::vector<Tensor> steps, std::vector<Tensor> copies, std::optional<Tensor> norm,
           std::optional<Tensor> device_lr, double lr, double beta1, double beta2, double eps, double weight_decay, double max_norm,
           bool maximize) {
  const AdamW call = update_of(parameters, gradients, means, squares, maxima, steps, copies, norm, device_lr,
                               {lr, beta1, beta2, eps, weight_decay, max_norm, maximize});
  if (call.chunks > 0) kRun(call, parameters[0]);
}

void adamw_on_cpu(const AdamW& call, const Tensor&) {
  torch::stable::parallel_for(0, call.chunks, 1, [&](int64_t begin, int64_t end) { adamw_cpu(call, begin, end); });
}

#ifdef CUSTOM_OPS_CUDA
Tensor norm_on_gpu(std::vector<Tensor> gradients) {
  std::optional<OnDevice> on;
  if (!gradients.empty()) on.emplace(gradients[0]);
  Norm norm = norm_of(std::move(gradients));
  check_launch(kNorm, gradient_norm_cuda(norm.call, on->stream()));
  return std::move(norm.norm);
}

void adamw_on_gpu(const AdamW& call, const Tensor& first) {
  const OnDevice on(first);
  check_launch(kAdamW, adamw_cuda(call, on.stream()));
}
#endif

}  // namespace

void implement_adamw_cpu(Library& library) {
  library.impl(kNorm, boxed<&norm_on_cpu>);
  library.impl(kAdamW, boxed<&adamw<&adamw_on_cpu>>);
}

#ifdef CUSTOM_OPS_CUDA
void implement_adamw_cuda(Library& library) {
  library.impl(kNorm, boxed<&norm_on_gpu>);
  library.impl(kAdamW, boxed<&adamw<&adamw_on_gpu>>);
}
#endif

}  // namespace custom_ops::stable

// The rows of a cross-entropy as operators.

#include <algorithm>

#include "../../cross_entropy/kernels.h"
#include "../boxing.h"
#include "../registration.h"

namespace custom_ops::stable {
namespace {

constexpr const char* kName = "cross_entropy";
constexpr const char* kGradientName = "cross_entropy_gradient_";

struct Rows {
  Tensor logits, targets, losses;
  CrossEntropy call;
};

Rows rows_of(Tensor logits_any, Tensor targets_any, int64_t classes, int64_t ignore_index, bool gradient) {
  const char* op = gradient ? kGradientName : kName;
  if (logits_any.dim() != 2) {
    fail(op, ": argument 'logits': expected two dimensions (rows, classes), got ", name_of_shape(logits_any.sizes()));
  }
  const int64_t rows = logits_any.size(0), columns = logits_any.size(1);
  if (!equal_sizes({&rows, 1}, targets_any.sizes())) {
    fail(op, ": argument 'targets': expected shape ", name_of_shape({&rows, 1}), ", an element for each row of 'logits', got ",
         name_of_shape(targets_any.sizes()));
  }
  check_device(op, {"logits", logits_any}, {"targets", targets_any});
  if (targets_any.dtype() != codes.int64) {
    fail(op, ": argument 'targets': expected dtype torch.int64, got ", name_of_dtype(targets_any.dtype()));
  }
  const Dtype dtype = dtype_of(op, {"logits", logits_any});
  if (classes < 1 || classes > columns) {
    fail(op, ": argument 'classes': expected 1 to ", columns, ", the columns of 'logits', got ", classes);
  }
  if (gradient && !logits_any.is_contiguous()) {
    fail(op, ": argument 'logits': expected a contiguous tensor, because the gradient replaces it");
  }
  Tensor logits = in_order(std::move(logits_any)), targets = in_order(std::move(targets_any));
  Tensor losses = make(logits, {&rows, 1}, wide(logits.dtype()));
  void* memory = gradient ? logits.mutable_data_ptr() : const_cast<void*>(logits.const_data_ptr());
  const CrossEntropy call{dtype, memory, static_cast<const int64_t*>(targets.const_data_ptr()), losses.mutable_data_ptr(), rows, columns,
                          classes, ignore_index, gradient};
  return {std::move(logits), std::move(targets), std::move(losses), call};
}

template <bool kGradient> Tensor on_cpu(Tensor logits, Tensor targets, int64_t classes, int64_t ignore_index) {
  Rows rows = rows_of(std::move(logits), std::move(targets), classes, ignore_index, kGradient);
  for (int64_t i = 0; i < rows.call.rows; ++i) {
    const int64_t target = rows.call.targets[i];
    if (target != ignore_index && (target < 0 || target >= classes)) {
      fail(kGradient ? kGradientName : kName, ": argument 'targets': expected classes from 0 to ", classes - 1, " or ignore_index (",
           ignore_index, "), got ", target);
    }
  }
  torch::stable::parallel_for(0, rows.call.rows, std::max<int64_t>(1, kGrain / 4 / rows.call.columns),
                              [&](int64_t begin, int64_t end) { cross_entropy_cpu(rows.call, begin, end); });
  return std::move(rows.losses);
}

#ifdef CUSTOM_OPS_CUDA
template <bool kGradient> Tensor on_gpu(Tensor logits, Tensor targets, int64_t classes, int64_t ignore_index) {
  const OnDevice on(logits.is_cuda() ? logits : targets);
  Rows rows = rows_of(std::move(logits), std::move(targets), classes, ignore_index, kGradient);
  check_launch(kGradient ? kGradientName : kName, cross_entropy_cuda(rows.call, on.stream()));
  return std::move(rows.losses);
}
#endif

}  // namespace

void implement_cross_entropy_cpu(Library& library) {
  library.impl(kName, boxed<&on_cpu<false>>);
  library.impl(kGradientName, boxed<&on_cpu<true>>);
}

#ifdef CUSTOM_OPS_CUDA
void implement_cross_entropy_cuda(Library& library) {
  library.impl(kName, boxed<&on_gpu<false>>);
  library.impl(kGradientName, boxed<&on_gpu<true>>);
}
#endif

}  // namespace custom_ops::stable

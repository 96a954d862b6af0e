// The rows of a cross-entropy as operators.

#include <algorithm>
#include <optional>
#include <tuple>

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

Rows rows_of(const char* op, Tensor logits_any, Tensor targets_any, int64_t classes, int64_t ignore_index, bool gradient) {
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

constexpr const char* kSumsName = "cross_entropy_block_sums_";
constexpr const char* kBlockGradientName = "cross_entropy_block_gradient_";

void check_rows(const char* op, const Argument& argument, std::initializer_list<int64_t> shape) {
  if (!equal_sizes({shape.begin(), shape.size()}, argument.tensor.sizes())) {
    fail(op, ": argument '", argument.name, "': expected shape ", name_of_shape({shape.begin(), shape.size()}), ", got ",
         name_of_shape(argument.tensor.sizes()));
  }
  if (!argument.tensor.is_contiguous()) fail(op, ": argument '", argument.name, "': expected a contiguous tensor");
}

// The arguments come from linear_cross_entropy alone, which has checked the dtypes and the targets.
// `numbers` are those of a row in `sums`.
CrossEntropyBlock block_of(const char* op, const Tensor& logits, const Tensor& targets, int64_t first, int64_t classes, const Tensor& sums,
                           int64_t numbers = 2) {
  if (logits.dim() != 2) fail(op, ": argument 'logits': expected two dimensions (rows, classes), got ", name_of_shape(logits.sizes()));
  const int64_t rows = logits.size(0), columns = logits.size(1);
  check_rows(op, {"logits", logits}, {rows, columns});
  check_rows(op, {"targets", targets}, {rows});
  check_rows(op, {"sums", sums}, {rows, numbers});
  for (const Argument& argument : {Argument{"targets", targets}, Argument{"sums", sums}}) check_device(op, {"logits", logits}, argument);
  check_wide_dtype(op, {"logits", logits}, {"sums", sums});
  if (targets.dtype() != codes.int64) fail(op, ": argument 'targets': expected dtype torch.int64, got ", name_of_dtype(targets.dtype()));
  if (classes < 1 || classes > columns) {
    fail(op, ": argument 'classes': expected 1 to ", columns, ", the columns of 'logits', got ", classes);
  }
  return {dtype_of(op, {"logits", logits}), const_cast<void*>(logits.const_data_ptr()), static_cast<const int64_t*>(targets.const_data_ptr()),
          const_cast<void*>(sums.const_data_ptr()), nullptr, rows, columns, classes, first, 0, true};
}

struct OnCpu {
  explicit OnCpu(const Tensor&) {}
  void operator()(const char*, const CrossEntropyBlock& call) const { run(call, call, &cross_entropy_block_cpu); }
  void operator()(const char*, const GeneralCrossEntropy& call) const { run(call, call.rows, &general_cross_entropy_cpu); }
  void operator()(const char*, const GeneralCrossEntropyBlock& call) const { run(call, call.block, &general_cross_entropy_block_cpu); }

 private:
  template <class Call, class Shape> static void run(const Call& call, const Shape& shape, void (*kernel)(const Call&, int64_t, int64_t)) {
    torch::stable::parallel_for(0, shape.rows, std::max<int64_t>(1, kGrain / 4 / shape.columns),
                                [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  }
};

#ifdef CUSTOM_OPS_CUDA
struct OnGpu {
  explicit OnGpu(const Tensor& logits) : on(logits) {}
  void operator()(const char* op, const CrossEntropyBlock& call) const { check_launch(op, cross_entropy_block_cuda(call, on.stream())); }
  void operator()(const char* op, const GeneralCrossEntropy& call) const { check_launch(op, general_cross_entropy_cuda(call, on.stream())); }
  void operator()(const char* op, const GeneralCrossEntropyBlock& call) const {
    check_launch(op, general_cross_entropy_block_cuda(call, on.stream()));
  }
  const OnDevice on;
};
#endif

template <class Device>
void block_sums(Tensor logits, Tensor targets, int64_t first, int64_t classes, int64_t ignore_index, Tensor sums, Tensor chosen) {
  CrossEntropyBlock call = block_of(kSumsName, logits, targets, first, classes, sums);
  check_rows(kSumsName, {"chosen", chosen}, {call.rows});
  check_wide_dtype(kSumsName, {"logits", logits}, {"chosen", chosen});
  call.ignore_index = ignore_index;
  call.gradient = false;
  call.sums = sums.mutable_data_ptr();
  call.chosen = chosen.mutable_data_ptr();
  Device{logits}(kSumsName, call);
}

template <class Device>
void block_gradient(Tensor logits, Tensor targets, int64_t first, int64_t classes, int64_t ignore_index, Tensor sums) {
  CrossEntropyBlock call = block_of(kBlockGradientName, logits, targets, first, classes, sums);
  call.ignore_index = ignore_index;
  call.logits = logits.mutable_data_ptr();
  Device{logits}(kBlockGradientName, call);
}

// A target that is no class is an error on a CPU.
void check_targets(const char* op, const CrossEntropy& call) {
  for (int64_t i = 0; i < call.rows; ++i) {
    const int64_t target = call.targets[i];
    if (target != call.ignore_index && (target < 0 || target >= call.classes)) {
      fail(op, ": argument 'targets': expected classes from 0 to ", call.classes - 1, " or ignore_index (", call.ignore_index, "), got ", target);
    }
  }
}

template <bool kGradient> Tensor on_cpu(Tensor logits, Tensor targets, int64_t classes, int64_t ignore_index) {
  const char* op = kGradient ? kGradientName : kName;
  Rows rows = rows_of(op, std::move(logits), std::move(targets), classes, ignore_index, kGradient);
  check_targets(op, rows.call);
  torch::stable::parallel_for(0, rows.call.rows, std::max<int64_t>(1, kGrain / 4 / rows.call.columns),
                              [&](int64_t begin, int64_t end) { cross_entropy_cpu(rows.call, begin, end); });
  return std::move(rows.losses);
}

#ifdef CUSTOM_OPS_CUDA
template <bool kGradient> Tensor on_gpu(Tensor logits, Tensor targets, int64_t classes, int64_t ignore_index) {
  const char* op = kGradient ? kGradientName : kName;
  const OnDevice on(logits.is_cuda() ? logits : targets);
  Rows rows = rows_of(op, std::move(logits), std::move(targets), classes, ignore_index, kGradient);
  check_launch(op, cross_entropy_cuda(rows.call, on.stream()));
  return std::move(rows.losses);
}
#endif

// ---- losses with more in them

constexpr const char* kGeneralName = "general_cross_entropy";
constexpr const char* kGeneralGradientName = "general_cross_entropy_gradient_";
constexpr const char* kGeneralSumsName = "general_cross_entropy_block_sums_";
constexpr const char* kGeneralBlockGradientName = "general_cross_entropy_block_gradient_";

// `classes` are all classes, not those of a block.
GeneralParts parts_of(const char* op, const Tensor& logits, const std::optional<Tensor>& class_weight, int64_t classes, double share,
                      double softcap, bool accuracy = false) {
  if (class_weight) {
    const Argument argument{"class_weight", *class_weight};
    check_device(op, {"logits", logits}, argument);
    check_wide_dtype(op, {"logits", logits}, argument);
    if (class_weight->dim() != 1 || class_weight->numel() < classes || !class_weight->is_contiguous()) {
      fail(op, ": argument 'class_weight': expected ", classes, " contiguous elements, got ", name_of_shape(class_weight->sizes()));
    }
  }
  return {class_weight ? class_weight->const_data_ptr() : nullptr, share, softcap, accuracy};
}

// Losses and statistics.
using Results = std::tuple<Tensor, Tensor>;

template <class Device, bool kGradient>
Results general_rows(Tensor logits, Tensor targets, int64_t classes, int64_t ignore_index, Tensor factors, std::optional<Tensor> class_weight,
                     double share, double softcap, bool accuracy) {
  const char* op = kGradient ? kGeneralGradientName : kGeneralName;
  const Device device(logits.is_cuda() ? logits : targets);
  Rows rows = rows_of(op, std::move(logits), std::move(targets), classes, ignore_index, kGradient);
  if (rows.logits.is_cpu()) check_targets(op, rows.call);
  GeneralCrossEntropy call{rows.call, parts_of(op, rows.logits, class_weight, classes, share, softcap, accuracy), factors.const_data_ptr(), nullptr};
  check_rows(op, {"factors", factors}, {rows.call.rows, 3});
  check_device(op, {"logits", rows.logits}, {"factors", factors});
  check_wide_dtype(op, {"logits", rows.logits}, {"factors", factors});
  const int64_t shape[] = {rows.call.rows, 2};
  Tensor statistics = make(rows.logits, {shape, 2}, rows.losses.dtype());
  call.statistics = statistics.mutable_data_ptr();
  device(op, call);
  return {std::move(rows.losses), std::move(statistics)};
}

template <class Device>
void general_block_sums(Tensor logits, Tensor targets, int64_t first, int64_t classes, int64_t ignore_index, std::optional<Tensor> class_weight,
                        double share, double softcap, bool accuracy, Tensor sums, Tensor chosen) {
  const char* op = kGeneralSumsName;
  GeneralCrossEntropyBlock call{block_of(op, logits, targets, first, classes, sums, 5),
                                parts_of(op, logits, class_weight, first + classes, share, softcap, accuracy)};
  check_rows(op, {"chosen", chosen}, {call.block.rows});
  check_wide_dtype(op, {"logits", logits}, {"chosen", chosen});
  call.block.ignore_index = ignore_index;
  call.block.gradient = false;
  call.block.sums = sums.mutable_data_ptr();
  call.block.chosen = chosen.mutable_data_ptr();
  Device{logits}(op, call);
}

template <class Device>
void general_block_gradient(Tensor logits, Tensor targets, int64_t first, int64_t classes, int64_t ignore_index,
                            std::optional<Tensor> class_weight, double share, double softcap, Tensor scales) {
  const char* op = kGeneralBlockGradientName;
  GeneralCrossEntropyBlock call{block_of(op, logits, targets, first, classes, scales, 3),
                                parts_of(op, logits, class_weight, first + classes, share, softcap)};
  call.block.ignore_index = ignore_index;
  call.block.logits = logits.mutable_data_ptr();
  Device{logits}(op, call);
}

}  // namespace

void implement_cross_entropy_cpu(Library& library) {
  library.impl(kName, boxed<&on_cpu<false>>);
  library.impl(kGradientName, boxed<&on_cpu<true>>);
  library.impl(kSumsName, boxed<&block_sums<OnCpu>>);
  library.impl(kBlockGradientName, boxed<&block_gradient<OnCpu>>);
  library.impl(kGeneralName, boxed<&general_rows<OnCpu, false>>);
  library.impl(kGeneralGradientName, boxed<&general_rows<OnCpu, true>>);
  library.impl(kGeneralSumsName, boxed<&general_block_sums<OnCpu>>);
  library.impl(kGeneralBlockGradientName, boxed<&general_block_gradient<OnCpu>>);
}

#ifdef CUSTOM_OPS_CUDA
void implement_cross_entropy_cuda(Library& library) {
  library.impl(kName, boxed<&on_gpu<false>>);
  library.impl(kGradientName, boxed<&on_gpu<true>>);
  library.impl(kSumsName, boxed<&block_sums<OnGpu>>);
  library.impl(kBlockGradientName, boxed<&block_gradient<OnGpu>>);
  library.impl(kGeneralName, boxed<&general_rows<OnGpu, false>>);
  library.impl(kGeneralGradientName, boxed<&general_rows<OnGpu, true>>);
  library.impl(kGeneralSumsName, boxed<&general_block_sums<OnGpu>>);
  library.impl(kGeneralBlockGradientName, boxed<&general_block_gradient<OnGpu>>);
}
#endif

}  // namespace custom_ops::stable

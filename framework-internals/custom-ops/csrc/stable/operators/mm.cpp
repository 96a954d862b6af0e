// mm as an operator: checks, and operands that are read where they lie.

#include <algorithm>
#include <optional>

#include "../../mm/kernels.h"
#include "../boxing.h"
#include "../registration.h"

namespace custom_ops::stable {
namespace {

constexpr const char* kOp = "mm";

// The number of products and sums that justifies another thread.
constexpr int64_t kTerms = 1 << 17;

void check_matrix(const Argument& x) {
  if (x.tensor.dim() != 2) fail(kOp, ": argument '", x.name, "': expected a matrix, got shape ", name_of_shape(x.tensor.sizes()));
}

Tensor mm_on_cpu(Tensor a, Tensor b, std::optional<Tensor> bias_any) {
  const Dtype dtype = dtype_of(kOp, {"a", a});
  check_device(kOp, {"a", a}, {"b", b});
  check_dtype(kOp, {"a", a}, {"b", b});
  check_matrix({"a", a});
  check_matrix({"b", b});
  const int64_t rows = a.size(0), depth = a.size(1), columns = b.size(1);
  if (b.size(0) != depth) {
    fail(kOp, ": argument 'b': expected ", depth, " rows, the columns of 'a', got shape ", name_of_shape(b.sizes()));
  }
  std::optional<Tensor> bias;
  if (bias_any) {
    check_device(kOp, {"a", a}, {"bias", *bias_any});
    check_dtype(kOp, {"a", a}, {"bias", *bias_any});
    if (bias_any->dim() != 1 || bias_any->size(0) != columns) {
      fail(kOp, ": argument 'bias': expected shape [", columns, "], an element for each column of 'b', got ", name_of_shape(bias_any->sizes()));
    }
    bias.emplace(in_order(std::move(*bias_any)));
  }
  const int64_t shape[] = {rows, columns};
  Tensor out = make(a, {shape, 2}, a.dtype());
  const int64_t most = rows * columns * depth / kTerms + 1;
  const int64_t threads = std::min<int64_t>(most, torch::stable::get_num_threads());
  const MatMul call{dtype, a.const_data_ptr(), a.stride(0), a.stride(1), b.const_data_ptr(), b.stride(0), b.stride(1), bias ? bias->const_data_ptr() : nullptr,
                    out.mutable_data_ptr(), rows, columns, depth, threads};
  if (rows > 0 && columns > 0) torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) { mm_cpu(call, begin, end); });
  return out;
}

}  // namespace

void implement_mm_cpu(Library& library) { library.impl(kOp, boxed<&mm_on_cpu>); }

}  // namespace custom_ops::stable

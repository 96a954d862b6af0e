// mm as an operator: checks, and operands that are read where they lie.

#include <algorithm>
#include <cstring>

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

Tensor mm_on_cpu(Tensor a, Tensor b) {
  const bool single = a.dtype() == codes.float32;
  if (!single && a.dtype() != codes.float64) {
    fail(kOp, ": argument 'a': expected dtype torch.float32 or torch.float64, got ", name_of_dtype(a.dtype()));
  }
  check_device(kOp, {"a", a}, {"b", b});
  check_dtype(kOp, {"a", a}, {"b", b});
  check_matrix({"a", a});
  check_matrix({"b", b});
  const int64_t rows = a.size(0), depth = a.size(1), columns = b.size(1);
  if (b.size(0) != depth) {
    fail(kOp, ": argument 'b': expected ", depth, " rows, the columns of 'a', got shape ", name_of_shape(b.sizes()));
  }
  const int64_t shape[] = {rows, columns};
  Tensor out = make(a, {shape, 2}, a.dtype());
  const int64_t most = rows * columns * depth / kTerms + 1;
  const int64_t threads = std::min<int64_t>(most, torch::stable::get_num_threads());
  const MatMul call{single ? Dtype::kFloat32 : Dtype::kFloat64, a.const_data_ptr(), a.stride(0), a.stride(1), b.const_data_ptr(), b.stride(0), b.stride(1),
                    out.mutable_data_ptr(), rows, columns, depth, threads};
  if (depth == 0) {
    std::memset(out.mutable_data_ptr(), 0, rows * columns * (single ? sizeof(float) : sizeof(double)));
  } else if (rows > 0 && columns > 0) {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) { mm_cpu(call, begin, end); });
  }
  return out;
}

}  // namespace

void implement_mm_cpu(Library& library) { library.impl(kOp, boxed<&mm_on_cpu>); }

}  // namespace custom_ops::stable

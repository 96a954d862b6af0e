// vector_add, axpb and scale as operators.

#include "../../scale/kernels.h"
#include "../../vector_add/kernels.h"
#include "../boxing.h"
#include "../registration.h"

namespace custom_ops::stable {
namespace {

// Elements from one column to the next of a matrix that lies column by column and that a kernel can read so; else 0.
int64_t columns_apart(const Tensor& x) { return x.is_cuda() && x.dim() == 2 && x.stride(0) == 1 && !x.is_contiguous() ? x.stride(1) : 0; }

// Leaves the operand as it is if its kernel takes its order, which it writes to `apart`; else it is copied.
Tensor in_known_order(Tensor&& x, int64_t& apart) {
  apart = columns_apart(x);
  return apart != 0 ? std::move(x) : in_order(std::move(x));
}

struct Pair {
  Tensor x, b, out;
  Operands operands;
};

Pair pair_of(const char* op, const char* first, Tensor x_any, Tensor b_any) {
  const Argument x_argument{first, x_any}, b_argument{"b", b_any};
  check_device(op, x_argument, b_argument);
  check_dtype(op, x_argument, b_argument);
  check_shape(op, x_argument, b_argument);
  const Dtype dtype = dtype_of(op, x_argument);
  ColumnMajor order;
  Tensor x = in_known_order(std::move(x_any), order.x), b = in_known_order(std::move(b_any), order.b), out = make_like(x);
  if (order.x != 0 || order.b != 0) order.columns = x.size(1);
  const Operands operands{dtype, x.const_data_ptr(), b.const_data_ptr(), out.mutable_data_ptr(), x.numel(), order};
  return {std::move(x), std::move(b), std::move(out), operands};
}

struct Single {
  Tensor x, out;
  ScaleCall call;
};

Single single_of(Tensor x_any, double alpha) {
  const Dtype dtype = dtype_of("scale", {"x", x_any});
  ColumnMajor order;
  Tensor x = in_known_order(std::move(x_any), order.x), out = make_like(x);
  if (order.x != 0) order.columns = x.size(1);
  const ScaleCall call{dtype, x.const_data_ptr(), alpha, out.mutable_data_ptr(), x.numel(), order};
  return {std::move(x), std::move(out), call};
}

Tensor vector_add(Tensor a, Tensor b) {
  Pair pair = pair_of("vector_add", "a", std::move(a), std::move(b));
  torch::stable::parallel_for(0, pair.operands.count, kGrain, [&](int64_t begin, int64_t end) { add_cpu(pair.operands, begin, end); });
  return std::move(pair.out);
}

Tensor axpb(Tensor x, Tensor b, double alpha) {
  Pair pair = pair_of("axpb", "x", std::move(x), std::move(b));
  torch::stable::parallel_for(0, pair.operands.count, kGrain,
                              [&](int64_t begin, int64_t end) { axpb_cpu(pair.operands, alpha, begin, end); });
  return std::move(pair.out);
}

Tensor scale(Tensor x, double alpha) {
  Single single = single_of(std::move(x), alpha);
  torch::stable::parallel_for(0, single.call.count, kGrain, [&](int64_t begin, int64_t end) { scale_cpu(single.call, begin, end); });
  return std::move(single.out);
}

#ifdef CUSTOM_OPS_CUDA
Tensor vector_add_on_gpu(Tensor a, Tensor b) {
  const OnDevice on(a.is_cuda() ? a : b);
  Pair pair = pair_of("vector_add", "a", std::move(a), std::move(b));
  check_launch("vector_add", add_cuda(pair.operands, on.stream()));
  return std::move(pair.out);
}

Tensor axpb_on_gpu(Tensor x, Tensor b, double alpha) {
  const OnDevice on(x.is_cuda() ? x : b);
  Pair pair = pair_of("axpb", "x", std::move(x), std::move(b));
  check_launch("axpb", axpb_cuda(pair.operands, alpha, on.stream()));
  return std::move(pair.out);
}

Tensor scale_on_gpu(Tensor x, double alpha) {
  const OnDevice on(x);
  Single single = single_of(std::move(x), alpha);
  check_launch("scale", scale_cuda(single.call, on.stream()));
  return std::move(single.out);
}
#endif

}  // namespace

void implement_elementwise_cpu(Library& library) {
  library.impl("vector_add", boxed<&vector_add>);
  library.impl("axpb", boxed<&axpb>);
  library.impl("scale", boxed<&scale>);
}

#ifdef CUSTOM_OPS_CUDA
void implement_elementwise_cuda(Library& library) {
  library.impl("vector_add", boxed<&vector_add_on_gpu>);
  library.impl("axpb", boxed<&axpb_on_gpu>);
  library.impl("scale", boxed<&scale_on_gpu>);
}
#endif

}  // namespace custom_ops::stable

// vector_add, axpb and scale as operators.

#include "../scale/kernels.h"
#include "../vector_add/kernels.h"
#include "registration.h"
#include "tensors.h"

namespace custom_ops::stable {
namespace {

struct Pair {
  Tensor x, b, out;
  Operands operands;
};

Pair pair_of(const char* op, const char* first, const Tensor& x_any, const Tensor& b_any) {
  const Argument x_argument{first, x_any}, b_argument{"b", b_any};
  check_device(op, x_argument, b_argument);
  check_dtype(op, x_argument, b_argument);
  check_shape(op, x_argument, b_argument);
  const Dtype dtype = dtype_of(op, x_argument);
  const Tensor x = in_order(x_any), b = in_order(b_any), out = make_like(x);
  return {x, b, out, {dtype, x.const_data_ptr(), b.const_data_ptr(), out.mutable_data_ptr(), x.numel()}};
}

struct Single {
  Tensor x, out;
  ScaleCall call;
};

Single single_of(const Tensor& x_any, double alpha) {
  const Dtype dtype = dtype_of("scale", {"x", x_any});
  const Tensor x = in_order(x_any), out = make_like(x);
  return {x, out, {dtype, x.const_data_ptr(), alpha, out.mutable_data_ptr(), x.numel()}};
}

Tensor vector_add(const Tensor& a, const Tensor& b) {
  const Pair pair = pair_of("vector_add", "a", a, b);
  torch::stable::parallel_for(0, pair.operands.count, kGrain, [&](int64_t begin, int64_t end) { add_cpu(pair.operands, begin, end); });
  return pair.out;
}

Tensor axpb(const Tensor& x, const Tensor& b, double alpha) {
  const Pair pair = pair_of("axpb", "x", x, b);
  torch::stable::parallel_for(0, pair.operands.count, kGrain,
                              [&](int64_t begin, int64_t end) { axpb_cpu(pair.operands, alpha, begin, end); });
  return pair.out;
}

Tensor scale(const Tensor& x, double alpha) {
  const Single single = single_of(x, alpha);
  torch::stable::parallel_for(0, single.call.count, kGrain, [&](int64_t begin, int64_t end) { scale_cpu(single.call, begin, end); });
  return single.out;
}

#ifdef CUSTOM_OPS_CUDA
Tensor vector_add_on_gpu(const Tensor& a, const Tensor& b) {
  const OnDevice on(a.is_cuda() ? a : b);
  const Pair pair = pair_of("vector_add", "a", a, b);
  check_launch("vector_add", add_cuda(pair.operands, on.stream()));
  return pair.out;
}

Tensor axpb_on_gpu(const Tensor& x, const Tensor& b, double alpha) {
  const OnDevice on(x.is_cuda() ? x : b);
  const Pair pair = pair_of("axpb", "x", x, b);
  check_launch("axpb", axpb_cuda(pair.operands, alpha, on.stream()));
  return pair.out;
}

Tensor scale_on_gpu(const Tensor& x, double alpha) {
  const OnDevice on(x);
  const Single single = single_of(x, alpha);
  check_launch("scale", scale_cuda(single.call, on.stream()));
  return single.out;
}
#endif

}  // namespace

void define_elementwise(Library& library) {
  library.def("vector_add(Tensor a, Tensor b) -> Tensor");
  library.def("axpb(Tensor x, Tensor b, float alpha) -> Tensor");
  library.def("scale(Tensor x, float alpha=1.23) -> Tensor");
}

void implement_elementwise_cpu(Library& library) {
  library.impl("vector_add", TORCH_BOX(&vector_add));
  library.impl("axpb", TORCH_BOX(&axpb));
  library.impl("scale", TORCH_BOX(&scale));
}

#ifdef CUSTOM_OPS_CUDA
void implement_elementwise_cuda(Library& library) {
  library.impl("vector_add", TORCH_BOX(&vector_add_on_gpu));
  library.impl("axpb", TORCH_BOX(&axpb_on_gpu));
  library.impl("scale", TORCH_BOX(&scale_on_gpu));
}
#endif

}  // namespace custom_ops::stable

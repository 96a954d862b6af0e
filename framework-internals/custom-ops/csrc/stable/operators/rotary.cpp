// rotary as an operator: checks, and an operand whose heads are read in place.

#include "../../rotary/kernels.h"
#include "../boxing.h"
#include "../registration.h"

namespace custom_ops::stable {
namespace {

constexpr const char* kOp = "rotary";

void check_tables(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  for (const Argument& table : {Argument{"cos", cos}, Argument{"sin", sin}}) {
    check_device(kOp, {"x", x}, table);
    check_wide_dtype(kOp, {"x", x}, table);
  }
  const int64_t most[] = {x.size(0), x.size(1), x.size(3) / 2}, rank = cos.dim();
  bool fits = rank == 2 || rank == 3;
  for (int64_t d = 0; d < rank && fits; ++d) {
    const int64_t expected = most[3 - rank + d];
    fits = d == rank - 1 ? cos.size(d) <= expected : cos.size(d) == expected;
  }
  if (!fits) {
    fail(kOp, ": argument 'cos': expected shape ", name_of_shape({most + 1, 2}), " or ", name_of_shape({most, 3}),
         ", or fewer columns, an angle for each token and pair of 'x', got ", name_of_shape(cos.sizes()));
  }
  check_shape(kOp, {"cos", cos}, {"sin", sin});
}

// The operands must live as long as the call.
struct Call {
  Tensor x, cos, sin, out;
  Rotary rotary;
};

Call call_of(Tensor x, Tensor cos, Tensor sin, bool inverse, bool interleaved) {
  const Dtype dtype = dtype_of(kOp, {"x", x});
  if (x.dim() != 4 || x.size(3) % 2 != 0) {
    fail(kOp, ": argument 'x': expected shape (batch, tokens, heads, size) with an even size, got ", name_of_shape(x.sizes()));
  }
  check_tables(x, cos, sin);
  if (x.size(3) > 0 && x.stride(3) != 1) x = contiguous(x);
  cos = in_order(std::move(cos));
  sin = in_order(std::move(sin));
  Tensor out = make_like(x);
  const Rotary rotary{dtype, x.const_data_ptr(), cos.const_data_ptr(), sin.const_data_ptr(), out.mutable_data_ptr(),
                      x.size(0), x.size(1), x.size(2), x.size(3), x.stride(0), x.stride(1), x.stride(2), inverse,
                      interleaved, cos.size(cos.dim() - 1), cos.dim() == 3 ? cos.size(1) * cos.size(2) : 0};
  return {std::move(x), std::move(cos), std::move(sin), std::move(out), rotary};
}

Tensor rotary_on_cpu(Tensor x, Tensor cos, Tensor sin, bool inverse, bool interleaved) {
  Call call = call_of(std::move(x), std::move(cos), std::move(sin), inverse, interleaved);
  const Rotary& rotary = call.rotary;
  const int64_t of_position = rotary.heads * rotary.size;
  if (of_position > 0) {
    torch::stable::parallel_for(0, rotary.batch * rotary.tokens, (kGrain + of_position - 1) / of_position,
                                [&](int64_t begin, int64_t end) { rotary_cpu(rotary, begin, end); });
  }
  return std::move(call.out);
}

#ifdef CUSTOM_OPS_CUDA
Tensor rotary_on_gpu(Tensor x, Tensor cos, Tensor sin, bool inverse, bool interleaved) {
  const OnDevice on(x.is_cuda() ? x : cos);
  Call call = call_of(std::move(x), std::move(cos), std::move(sin), inverse, interleaved);
  check_launch(kOp, rotary_cuda(call.rotary, on.stream()));
  return std::move(call.out);
}
#endif

}  // namespace

void implement_rotary_cpu(Library& library) { library.impl(kOp, boxed<&rotary_on_cpu>); }

#ifdef CUSTOM_OPS_CUDA
void implement_rotary_cuda(Library& library) { library.impl(kOp, boxed<&rotary_on_gpu>); }
#endif

}  // namespace custom_ops::stable

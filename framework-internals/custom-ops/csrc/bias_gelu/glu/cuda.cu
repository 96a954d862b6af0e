// Launches of kernels.cuh.

#include "kernels.h"

#include <algorithm>

#include "../../common/launch.h"
#include "kernels.cuh"

namespace custom_ops {
namespace {

template <typename F> struct Form { using type = F; };

// Calls run(function, dtype's type, elements a vector) with compile-time constants.
template <typename Call, typename Run> int for_kind(const Call& call, bool vectors, Run run) {
  return for_dtype(call.dtype, [&](auto tag) -> int {
    constexpr int kWidth = kVectorBytes / sizeof(typename decltype(tag)::type);
    const auto with = [&](auto form) -> int {
      return vectors ? run(form, tag, std::integral_constant<int, kWidth>{}) : run(form, tag, std::integral_constant<int, 1>{});
    };
    switch (call.activation) {
      case Activation::kSilu: return with(Form<Silu>{});
      case Activation::kGelu: return with(Form<Gelu>{});
      case Activation::kGeluTanh: return with(Form<GeluTanh>{});
    }
    return cudaErrorInvalidValue;
  });
}

int64_t elements_of_vector(Dtype dtype) { return dtype == Dtype::kFloat64 ? 2 : dtype == Dtype::kFloat32 ? 4 : 8; }

template <typename Call, typename Kernel> int launch(Kernel* kernel, const Call& call, int width, cudaStream_t stream) {
  const int64_t count = call.rows * call.columns / width, blocks = std::min(ceil_div(count, kGluThreads), kMaxBlocks);
  kernel<<<static_cast<unsigned>(blocks), kGluThreads, 0, stream>>>(call, count, fast_divisor(static_cast<uint32_t>(call.columns / width)));
  return cudaGetLastError();
}

}  // namespace

int glu_cuda(const Glu& call, void* stream) {
  if (call.rows * call.columns == 0) return cudaSuccess;  // an empty grid is an invalid configuration
  const auto whole = [&](int64_t elements) { return elements % elements_of_vector(call.dtype) == 0; };
  const bool vectors = aligned(call.gate, call.up, call.out) && whole(call.columns) && whole(call.gate_row) && whole(call.up_row);
  return for_kind(call, vectors, [&](auto form, auto tag, auto width) {
    using F = typename decltype(form)::type;
    using T = typename decltype(tag)::type;
    constexpr int kWidth = decltype(width)::value;
    return launch(glu_forward<F, T, kWidth>, call, kWidth, static_cast<cudaStream_t>(stream));
  });
}

int glu_backward_cuda(const GluBackward& call, void* stream) {
  if (call.rows * call.columns == 0) return cudaSuccess;
  const auto whole = [&](int64_t elements) { return elements % elements_of_vector(call.dtype) == 0; };
  const bool vectors = aligned(call.grad, call.gate, call.up, call.dgate, call.dup) && whole(call.columns) && whole(call.gate_row) &&
                       whole(call.up_row) && whole(call.result_row);
  return for_kind(call, vectors, [&](auto form, auto tag, auto width) {
    using F = typename decltype(form)::type;
    using T = typename decltype(tag)::type;
    constexpr int kWidth = decltype(width)::value;
    return launch(glu_backward<F, T, kWidth>, call, kWidth, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace custom_ops

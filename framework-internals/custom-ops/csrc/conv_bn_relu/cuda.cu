// Launches of kernels.cuh.

#include "kernels.h"

#include <algorithm>

#include "../common/launch.h"
#include "kernels.cuh"

namespace custom_ops {
namespace {

template <typename T, int kWidth, bool kLast> int launch(const ScaleShiftRelu& call, cudaStream_t stream) {
  const int64_t vectors = call.outer * call.channels * call.inner / kWidth;
  const int64_t blocks = std::min(ceil_div(vectors, kReluThreads), kMaxBlocks);
  const uint32_t inner = static_cast<uint32_t>(kLast ? 1 : call.inner / kWidth);
  const uint32_t channels = static_cast<uint32_t>(kLast ? call.channels / kWidth : call.channels);
  auto* kernel = vectors > INT32_MAX ? scale_shift_relu<T, kWidth, kLast, true> : scale_shift_relu<T, kWidth, kLast, false>;
  kernel<<<static_cast<unsigned>(blocks), kReluThreads, 0, stream>>>(
      static_cast<T*>(call.x), static_cast<const Wide<T>*>(call.scale), static_cast<const Wide<T>*>(call.shift), vectors,
      fast_divisor(inner), fast_divisor(channels));
  return cudaGetLastError();
}

}  // namespace

int scale_shift_relu_cuda(const ScaleShiftRelu& call, void* stream) {
  if (call.outer * call.channels * call.inner == 0) return cudaSuccess;  // an empty grid is an invalid configuration
  return for_dtype(call.dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = kVectorBytes / sizeof(T);
    const auto on = static_cast<cudaStream_t>(stream);
    if (aligned(call.x) && call.inner % kWidth == 0) return launch<T, kWidth, false>(call, on);
    if (aligned(call.x) && call.inner == 1 && call.channels % kWidth == 0) return launch<T, kWidth, true>(call, on);
    return launch<T, 1, false>(call, on);
  });
}

}  // namespace custom_ops

// Launches of common/elementwise.cuh.
#pragma once

#include <algorithm>

#include "elementwise.cuh"
#include "launch.h"

namespace custom_ops {

template <typename T, int kWidth, int kInputs, typename Op>
int launch_elementwise_tiles(const T* x, const T* b, T* out, int64_t count, Op op, cudaStream_t stream) {
  constexpr int64_t kTile = int64_t{kElementwiseThreads} * kWidth;
  const int64_t blocks = std::min(ceil_div(count, kTile), kMaxBlocks);
  elementwise<T, kWidth, kInputs>
      <<<static_cast<unsigned>(blocks), kElementwiseThreads, 0, stream>>>(x, b, out, count, op);
  return cudaGetLastError();
}

// out = op(x) or op(x, b) for `count` elements of a dtype; `b` is null for an operator of one operand.
template <int kInputs, typename Op>
int launch_elementwise(Dtype dtype, const void* x, const void* b, void* out, int64_t count, Op op, void* stream) {
  if (count == 0) return cudaSuccess;  // an empty grid is an invalid configuration
  return for_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = kVectorBytes / sizeof(T);
    const T* typed_x = static_cast<const T*>(x);
    const T* typed_b = static_cast<const T*>(b);
    T* typed_out = static_cast<T*>(out);
    const auto on = static_cast<cudaStream_t>(stream);
    // One vector per thread: with two or four in flight, a copy was 3 % slower at 128 million elements (H200, 2026-11-21).
    if (!aligned(x, b, out)) {
      return launch_elementwise_tiles<T, 1, kInputs>(typed_x, typed_b, typed_out, count, op, on);
    }
    return launch_elementwise_tiles<T, kWidth, kInputs>(typed_x, typed_b, typed_out, count, op, on);
  });
}

}  // namespace custom_ops

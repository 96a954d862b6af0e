// The CUDA kernel, without host headers, so that both NVRTC and nvcc compile it.
#pragma once

#include "../common/device.cuh"

namespace custom_ops {

constexpr int kReluThreads = 256;

// Works in place, one vector per thread and step. kLast: the format is channels-last, and a vector covers kWidth channels;
// otherwise a vector lies within one channel. `inner` and `channels` count vectors in the dimension that a vector spans.
// kLarge: there may be 2^31 vectors or more, and the channel takes 64-bit divisions.
template <typename T, int kWidth, bool kLast, bool kLarge>
__global__ void __launch_bounds__(kReluThreads)
    scale_shift_relu(T* __restrict__ x, const Wide<T>* __restrict__ scale, const Wide<T>* __restrict__ shift, Index vectors,
                     FastDivisor inner, FastDivisor channels) {
  using Lanes = Vector<T, kWidth>;
  Lanes* lanes = reinterpret_cast<Lanes*>(x);
  const Index stride = Index{gridDim.x} * kReluThreads;
  for (Index i = Index{blockIdx.x} * kReluThreads + threadIdx.x; i < vectors; i += stride) {
    unsigned channel;
    if constexpr (kLarge) {
      channel = static_cast<unsigned>((kLast ? i : i / inner.divisor) % channels.divisor);
    } else {
      const unsigned at = static_cast<unsigned>(i);
      channel = channels.remainder(kLast ? at : inner.quotient(at));
    }
    const Lanes own = lanes[i];
    Wide<T> y[kWidth];
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) {
      const Index c = kLast ? Index{channel} * kWidth + lane : Index{channel};
      const Wide<T> v = fma(scale[c], widen(own.lane[lane]), shift[c]);
      y[lane] = v < 0 ? Wide<T>(0) : v;
    }
    lanes[i] = narrow_lanes<T>(y);
  }
}

}  // namespace custom_ops

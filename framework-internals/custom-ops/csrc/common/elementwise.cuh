// One pass over one or two operands, with 16-byte loads and stores.
#pragma once

#include "device.cuh"

namespace custom_ops {

constexpr int kElementwiseThreads = 256;

struct Add {
  template <typename W> __device__ __forceinline__ W operator()(W x, W b) const { return x + b; }
};

struct Axpb {
  double alpha;
  __device__ __forceinline__ double operator()(double x, double b) const { return fma(alpha, x, b); }
  __device__ __forceinline__ float operator()(float x, float b) const { return fmaf(static_cast<float>(alpha), x, b); }
};

struct Scale {
  double alpha;
  __device__ __forceinline__ double operator()(double x) const { return alpha * x; }
  __device__ __forceinline__ float operator()(float x) const { return static_cast<float>(alpha) * x; }
};

// out = op(x) or op(x, b), one vector per thread and kElementwiseThreads of them per block. Many short blocks keep the
// memory busier than a persistent grid. The stride is for problems that exceed the grid's limit.
template <typename T, int kWidth, int kInputs, typename Op>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise(const T* __restrict__ x, const T* __restrict__ b, T* __restrict__ out, Index count, Op op) {
  using Lanes = Vector<T, kWidth>;
  const Lanes* x_lanes = reinterpret_cast<const Lanes*>(x);
  const Lanes* b_lanes = reinterpret_cast<const Lanes*>(b);
  const Index vectors = count / kWidth, stride = Index{gridDim.x} * kElementwiseThreads;

  for (Index i = Index{blockIdx.x} * kElementwiseThreads + threadIdx.x; i < vectors; i += stride) {
    Lanes own = x_lanes[i], other;
    if constexpr (kInputs == 2) other = b_lanes[i];
    Wide<T> result[kWidth];
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) {
      if constexpr (kInputs == 2) {
        result[lane] = op(widen(own.lane[lane]), widen(other.lane[lane]));
      } else {
        result[lane] = op(widen(own.lane[lane]));
      }
    }
    reinterpret_cast<Lanes*>(out)[i] = narrow_lanes<T>(result);
  }

  // The last count % kWidth elements are fewer than a warp, so one block handles them.
  const Index i = vectors * kWidth + threadIdx.x;
  if (blockIdx.x == 0 && i < count) {
    if constexpr (kInputs == 2) {
      narrow(op(widen(x[i]), widen(b[i])), out[i]);
    } else {
      narrow(op(widen(x[i])), out[i]);
    }
  }
}

}  // namespace custom_ops

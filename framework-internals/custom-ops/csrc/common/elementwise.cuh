// One pass over one or two operands: 16-byte loads and stores, several in flight a thread.
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

// out = op(x) or op(x, b). A block takes kElementwiseThreads * kVectors vectors at a time. The launch has a block for each
// such tile (blocks that come and go keep the memory busier than a persistent grid does); the stride is there for grids
// beyond the limit.
template <typename T, int kWidth, int kVectors, int kInputs, typename Op>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise(const T* __restrict__ x, const T* __restrict__ b, T* __restrict__ out, Index count, Op op) {
  using Lanes = Vector<T, kWidth>;
  const Lanes* x_lanes = reinterpret_cast<const Lanes*>(x);
  const Lanes* b_lanes = reinterpret_cast<const Lanes*>(b);
  Lanes* out_lanes = reinterpret_cast<Lanes*>(out);
  const Index vectors = count / kWidth;
  constexpr Index kTile = Index{kElementwiseThreads} * kVectors;

  for (Index tile = blockIdx.x * kTile; tile < vectors; tile += gridDim.x * kTile) {
    Lanes own_x[kVectors], own_b[kVectors];
#pragma unroll
    for (int step = 0; step < kVectors; ++step) {
      const Index i = tile + step * kElementwiseThreads + threadIdx.x;
      if (i < vectors) {
        own_x[step] = x_lanes[i];
        if constexpr (kInputs == 2) own_b[step] = b_lanes[i];
      }
    }
#pragma unroll
    for (int step = 0; step < kVectors; ++step) {
      const Index i = tile + step * kElementwiseThreads + threadIdx.x;
      if (i < vectors) {
        Wide<T> result[kWidth];
        Lanes narrowed;
#pragma unroll
        for (int lane = 0; lane < kWidth; ++lane) {
          if constexpr (kInputs == 2) {
            result[lane] = op(widen(own_x[step].lane[lane]), widen(own_b[step].lane[lane]));
          } else {
            result[lane] = op(widen(own_x[step].lane[lane]));
          }
        }
        narrow_lanes<kWidth>(result, narrowed);
        out_lanes[i] = narrowed;
      }
    }
  }

  // The last count % kWidth elements: fewer than a warp, so one block does them.
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

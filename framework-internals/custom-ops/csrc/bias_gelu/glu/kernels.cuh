// The CUDA kernels. A vector a thread: the launch has enough loads in flight, three in the backward pass.
#pragma once

#include "../gelu.cuh"
#include "kernels.h"
#include "normal.h"

namespace custom_ops {

constexpr int kGluThreads = 256;

// u * sigmoid(u), and its slope s + u * s (1 - s) with 1 - s as exp(-u) s, which does not cancel.
struct Silu {
  static __device__ __forceinline__ float value(float u) { return u * reciprocal(1.0f + power_of_two(u * static_cast<float>(-kLog2E))); }
  static __device__ __forceinline__ double value(double u) { return u / (1.0 + exp(-u)); }
  static __device__ __forceinline__ float slope(float u) {
    const float power = power_of_two(smaller(u * static_cast<float>(-kLog2E), 126.0f)), s = reciprocal(1.0f + power);
    return fmaf(fmaxf(fminf(u, 128.0f), -128.0f), power * s * s, s);
  }
  static __device__ __forceinline__ double slope(double u) {
    const double power = exp(-u > 700.0 ? 700.0 : -u), s = 1.0 / (1.0 + power);
    return fma(fmax(fmin(u, 1024.0), -1024.0), power * s * s, s);
  }
};

// With the tail q = Phi(-|u|): gelu(u) = max(u, 0) - |u| q, and Phi(u) is q or 1 - q.
struct Gelu {
  struct Normal {
    float size, power, tail;
  };
  static __device__ __forceinline__ Normal normal_of(float u) {
    const float a = smaller(fabsf(u), 64.0f), t = reciprocal(fmaf(a, CUSTOM_OPS_NORMAL_STEP, 1.0f));
    const float power = power_of_two(a * a * static_cast<float>(-kLog2E / 2));
#define CUSTOM_OPS_FIRST(c) float tail = c;
#define CUSTOM_OPS_NEXT(c) tail = fmaf(tail, t, c);
    CUSTOM_OPS_NORMAL_TAIL(CUSTOM_OPS_FIRST, CUSTOM_OPS_NEXT)
#undef CUSTOM_OPS_FIRST
#undef CUSTOM_OPS_NEXT
    return {a, power, tail * power};
  }
  static __device__ __forceinline__ float value(float u) {
    const Normal normal = normal_of(u);
    return fmaf(-normal.size, normal.tail, fmaxf(u, -0.0f));  // -0 of -0
  }
  static __device__ __forceinline__ double value(double u) { return u * normcdf(u); }
  static __device__ __forceinline__ float slope(float u) {
    const Normal normal = normal_of(u);
    const float density = normal.power * static_cast<float>(kDensity) * normal.size;
    return u > 0.0f ? (1.0f - normal.tail) + density : normal.tail - density;
  }
  static __device__ __forceinline__ double slope(double u) {
    const double near = u > 40.0 ? 40.0 : u < -40.0 ? -40.0 : u;
    return fma(near, kDensity * exp(-near * near / 2), normcdf(near));
  }
  static constexpr double kDensity = 0.39894228040143267794;  // at 0
};

struct GeluTanh {
  template <typename W> static __device__ __forceinline__ W value(W u) { return gelu(u); }
  template <typename W> static __device__ __forceinline__ W slope(W u) { return gelu_slope(u); }
};

// The place of a thread's vector in (rows, columns / kWidth). kLarge: there may be 2^31 vectors or more.
struct Place {
  Index row, column;
};
__device__ __forceinline__ Place place_of(Index i, FastDivisor columns, bool large) {
  if (large) return {i / columns.divisor, i % columns.divisor};
  const unsigned row = columns.quotient(static_cast<unsigned>(i));
  return {row, static_cast<unsigned>(i) - row * columns.divisor};
}

template <typename F, typename T, int kWidth>
__global__ void __launch_bounds__(kGluThreads) glu_forward(Glu call, Index vectors, FastDivisor columns) {
  using Lanes = Vector<T, kWidth>;
  const bool large = vectors > 2147483647;
  for (Index i = Index{blockIdx.x} * kGluThreads + threadIdx.x; i < vectors; i += Index{gridDim.x} * kGluThreads) {
    const Place place = place_of(i, columns, large);
    const Index column = place.column * kWidth;
    const Lanes gate = *reinterpret_cast<const Lanes*>(static_cast<const T*>(call.gate) + place.row * call.gate_row + column);
    const Lanes up = *reinterpret_cast<const Lanes*>(static_cast<const T*>(call.up) + place.row * call.up_row + column);
    Wide<T> y[kWidth];
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) y[lane] = F::value(widen(gate.lane[lane])) * widen(up.lane[lane]);
    store(static_cast<T*>(call.out) + i * kWidth, narrow_lanes<T>(y));
  }
}

template <typename F, typename T, int kWidth>
__global__ void __launch_bounds__(kGluThreads) glu_backward(GluBackward call, Index vectors, FastDivisor columns) {
  using Lanes = Vector<T, kWidth>;
  const bool large = vectors > 2147483647;
  for (Index i = Index{blockIdx.x} * kGluThreads + threadIdx.x; i < vectors; i += Index{gridDim.x} * kGluThreads) {
    const Place place = place_of(i, columns, large);
    const Index column = place.column * kWidth, result = place.row * call.result_row + column;
    const Lanes grad = *reinterpret_cast<const Lanes*>(static_cast<const T*>(call.grad) + i * kWidth);
    const Lanes gate = *reinterpret_cast<const Lanes*>(static_cast<const T*>(call.gate) + place.row * call.gate_row + column);
    const Lanes up = *reinterpret_cast<const Lanes*>(static_cast<const T*>(call.up) + place.row * call.up_row + column);
    Wide<T> dgate[kWidth], dup[kWidth];
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) {
      const Wide<T> g = widen(grad.lane[lane]), u = widen(gate.lane[lane]);
      dup[lane] = F::value(u) * g;
      dgate[lane] = F::slope(u) * g * widen(up.lane[lane]);
    }
    store(static_cast<T*>(call.dgate) + result, narrow_lanes<T>(dgate));
    store(static_cast<T*>(call.dup) + result, narrow_lanes<T>(dup));
  }
}

}  // namespace custom_ops

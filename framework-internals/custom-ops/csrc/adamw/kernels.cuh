// The CUDA kernels. Pointers travel in the launch's own parameters, which are at most 4 KiB: no table has
// to be copied to the device, and a CUDA graph keeps them.
//
// An update moves 28 bytes per float32 parameter: four reads and three writes. With a copy of 16 bits, which is read and written,
// and a gradient of half the bytes, it moves 30; with AMSGrad, 8 more. At 4.2 TB/s, the 28 bytes of 124 million parameters take
// 0.83 ms, and the norm that comes before, which reads 4 bytes of each, 0.12 ms.
#pragma once

#include "../common/device.cuh"
#include "kernels.h"

namespace custom_ops {

constexpr int kAdamWThreads = 256;

// As many tensors as fit into the parameters of a launch.
constexpr int kGradientsPerLaunch = 120, kParametersPerLaunch = 54;

struct GradientTable {
  Gradient gradients[kGradientsPerLaunch];
  int count;
};

struct ParameterTable {
  Parameter parameters[kParametersPerLaunch];
  int count;
};

// The tensor that contains a chunk. Every thread of a block takes the same path, through the constant cache.
template <typename Part> __device__ __forceinline__ int part_of(const Part* parts, int count, Index chunk) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (parts[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A sum over the block, for thread 0, in an order that depends on nothing but the number of threads.
template <int kThreads> __device__ __forceinline__ double sum_of_block(double own) {
  __shared__ double of_warp[kThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) own += __shfl_xor_sync(0xffffffffu, own, offset);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += of_warp[warp];
  return sum;
}

// The thread's share of the squares of a chunk. The squares of a vector are added in the wide dtype, and these sums in float64.
template <typename G> __device__ __forceinline__ double squares_of_thread(const Gradient& gradient, Index chunk) {
  constexpr int kWidth = kVectorBytes / sizeof(G);
  using Lanes = Vector<G, kWidth>;
  const Index first = (chunk - gradient.first_chunk) * kChunk;
  const G* const g = static_cast<const G*>(gradient.values) + first;
  const int count = static_cast<int>(min(static_cast<Index>(kChunk), static_cast<Index>(gradient.count) - first));
  const bool aligned = reinterpret_cast<unsigned long long>(g) % kVectorBytes == 0;
  const int vectors = aligned ? count / kWidth : 0;

  double own = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += kAdamWThreads) {
    const Lanes lanes = reinterpret_cast<const Lanes*>(g)[i];
    Wide<G> sum = 0;
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) sum += widen(lanes.lane[lane]) * widen(lanes.lane[lane]);
    own += static_cast<double>(sum);
  }
  for (int i = vectors * kWidth + threadIdx.x; i < count; i += kAdamWThreads) own += static_cast<double>(widen(g[i]) * widen(g[i]));
  return own;
}

// One block per chunk.
template <typename T>
__global__ void __launch_bounds__(kAdamWThreads)
    sums_of_squares(const __grid_constant__ GradientTable table, Index first_chunk, double* __restrict__ sums) {
  const Index chunk = first_chunk + blockIdx.x;
  const Gradient& gradient = table.gradients[part_of(table.gradients, table.count, chunk)];
  double own = 0;
  if constexpr (sizeof(T) == sizeof(double)) {
    own = squares_of_thread<double>(gradient, chunk);
  } else if (gradient.dtype == Dtype::kFloat32) {
    own = squares_of_thread<float>(gradient, chunk);
  } else if (gradient.dtype == Dtype::kBFloat16) {
    own = squares_of_thread<__nv_bfloat16>(gradient, chunk);
  } else {
    own = squares_of_thread<__half>(gradient, chunk);
  }
  const double sum = sum_of_block<kAdamWThreads>(own);
  if (threadIdx.x == 0) sums[chunk] = sum;
}

// One block.
template <typename T>
__global__ void __launch_bounds__(kAdamWThreads) norm_of_sums(const double* __restrict__ sums, Index chunks, T* __restrict__ norm) {
  double own = 0;
  for (Index i = threadIdx.x; i < chunks; i += kAdamWThreads) own += sums[i];
  const double sum = sum_of_block<kAdamWThreads>(own);
  if (threadIdx.x == 0) *norm = static_cast<T>(sqrt(sum));
}

struct AdamWSettings {
  const void* norm;
  const void* device_lr;
  double lr, log_beta1, log_beta2, of_mean, kept, of_square, eps, weight_decay, max_norm;
  bool near, maximize;  // near: a mean is computed from the last one, which is nearer than the gradient
};

__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

template <typename T> struct AdamWFactors {
  T clip, decay, rate, correction;
};

template <typename T> __device__ AdamWFactors<T> factors_of(const AdamWSettings& settings, double t) {
  const double lr = settings.device_lr == nullptr ? settings.lr : *static_cast<const float*>(settings.device_lr);
  // 1 − β^t without the cancellation at small t.
  const double of_mean = -expm1(t * settings.log_beta1), of_square = -expm1(t * settings.log_beta2);
  T clip = 1;
  if (settings.norm != nullptr) {
    const T most = static_cast<T>(settings.max_norm) / (*static_cast<const T*>(settings.norm) + static_cast<T>(1e-6));
    clip = most > T(1) ? T(1) : most;  // a norm that is NaN makes everything NaN, as in torch
  }
  return {settings.maximize ? -clip : clip, static_cast<T>(1 - lr * settings.weight_decay), static_cast<T>(lr / of_mean),
          static_cast<T>(sqrt(of_square))};
}

__device__ __forceinline__ bool same_bits(__half a, __half b) { return __half_as_ushort(a) == __half_as_ushort(b); }
__device__ __forceinline__ bool same_bits(__nv_bfloat16 a, __nv_bfloat16 b) { return __bfloat16_as_ushort(a) == __bfloat16_as_ushort(b); }

// The parameters, or their copies where these were written since the parameters were rounded to them. Bits are compared: -0 is
// not 0, and a NaN is itself.
template <typename C, typename T, int kWidth>
__device__ __forceinline__ void take_newer(Vector<T, kWidth>& values, const Vector<C, kWidth>& copies) {
  const Vector<C, kWidth> rounded = narrow_lanes<C>(values.lane);
#pragma unroll
  for (int lane = 0; lane < kWidth; ++lane) {
    if (!same_bits(rounded.lane[lane], copies.lane[lane])) values.lane[lane] = widen(copies.lane[lane]);
  }
}

// One block per chunk. G is the dtype of the gradients, and C that of the copies, or T if there are none.
template <typename T, typename G, typename C, bool kAmsgrad>
__global__ void __launch_bounds__(kAdamWThreads)
    adamw(const __grid_constant__ ParameterTable table, Index first_chunk, const __grid_constant__ AdamWSettings settings) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  constexpr bool kCopies = sizeof(C) < sizeof(T);
  using Lanes = Vector<T, kWidth>;
  using Gradients = Vector<G, kWidth>;
  using Copies = Vector<C, kWidth>;
  const Index chunk = first_chunk + blockIdx.x;
  const Parameter& parameter = table.parameters[part_of(table.parameters, table.count, chunk)];
  const Index first = (chunk - parameter.first_chunk) * kChunk;
  T* const p = static_cast<T*>(parameter.values) + first;
  T* const m = static_cast<T*>(parameter.mean) + first;
  T* const v = static_cast<T*>(parameter.square) + first;
  const G* const g = static_cast<const G*>(parameter.gradient) + first;
  T* const w = kAmsgrad ? static_cast<T*>(parameter.most) + first : nullptr;
  C* const copy = kCopies ? static_cast<C*>(parameter.copy) + first : nullptr;
  const int count = static_cast<int>(min(static_cast<Index>(kChunk), static_cast<Index>(parameter.count) - first));
  const auto all = reinterpret_cast<unsigned long long>(p) | reinterpret_cast<unsigned long long>(m) |
                   reinterpret_cast<unsigned long long>(v) | reinterpret_cast<unsigned long long>(w) |
                   reinterpret_cast<unsigned long long>(g) | reinterpret_cast<unsigned long long>(copy);
  const int vectors = all % kVectorBytes == 0 ? count / kWidth : 0;

  // float64 arithmetic is slow on many GPUs, so one thread computes the factors.
  __shared__ AdamWFactors<T> shared;
  if (threadIdx.x == 0) shared = factors_of<T>(settings, *parameter.step);
  __syncthreads();
  const AdamWFactors<T> factors = shared;
  const T of_mean = static_cast<T>(settings.of_mean), kept = static_cast<T>(settings.kept);
  const T of_square = static_cast<T>(settings.of_square), eps = static_cast<T>(settings.eps);
  const auto update = [&](T gradient, T& value, T& mean, T& square, T& most) {
    gradient *= factors.clip;
    mean = (settings.near ? mean : gradient) + of_mean * (gradient - mean);
    square = kept * square + of_square * gradient * gradient;
    if constexpr (kAmsgrad) most = most <= square ? square : most + (square - square);  // NaN if either is
    value = factors.decay * value - factors.rate * mean / (root(kAmsgrad ? most : square) / factors.correction + eps);
  };

#pragma unroll 2
  for (int i = threadIdx.x; i < vectors; i += kAdamWThreads) {
    const Gradients gradient = reinterpret_cast<const Gradients*>(g)[i];
    Lanes value = reinterpret_cast<Lanes*>(p)[i], mean = reinterpret_cast<Lanes*>(m)[i], square = reinterpret_cast<Lanes*>(v)[i], most;
    if constexpr (kAmsgrad) most = reinterpret_cast<Lanes*>(w)[i];
    if constexpr (kCopies) take_newer(value, reinterpret_cast<const Copies*>(copy)[i]);
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) {
      update(widen(gradient.lane[lane]), value.lane[lane], mean.lane[lane], square.lane[lane], most.lane[lane]);
    }
    reinterpret_cast<Lanes*>(p)[i] = value;
    reinterpret_cast<Lanes*>(m)[i] = mean;
    reinterpret_cast<Lanes*>(v)[i] = square;
    if constexpr (kAmsgrad) reinterpret_cast<Lanes*>(w)[i] = most;
    if constexpr (kCopies) reinterpret_cast<Copies*>(copy)[i] = narrow_lanes<C>(value.lane);
  }
  for (int i = vectors * kWidth + threadIdx.x; i < count; i += kAdamWThreads) {
    Vector<T, 1> value{{p[i]}}, most{};
    if constexpr (kAmsgrad) most.lane[0] = w[i];
    if constexpr (kCopies) take_newer(value, Vector<C, 1>{{copy[i]}});
    update(widen(g[i]), value.lane[0], m[i], v[i], most.lane[0]);
    p[i] = value.lane[0];
    if constexpr (kAmsgrad) w[i] = most.lane[0];
    if constexpr (kCopies) narrow(value.lane[0], copy[i]);
  }
}

}  // namespace custom_ops

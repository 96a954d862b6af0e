// The CUDA kernels, without a host header, so that NVRTC compiles them as nvcc does.
//
// tanh costs more than the memory: at 4 TB/s, one SM of an H200 has 28 instruction slots and 3.5 special-function slots for
// each 16-bit element of the forward pass, and tanhf takes some thirty. u * sigmoid(2 z) takes an exponential and a
// reciprocal, two of the special functions, and nine other instructions; tanh.approx would save one special function and
// lose the digits of the tail, where 1 + tanh cancels and u * sigmoid does not.
#pragma once

#include "../common/device.cuh"

namespace custom_ops {

constexpr int kGeluThreads = 256;

constexpr double kSqrt2OverPi = 0.79788456080286535588;
constexpr double kCubic = 0.044715;
constexpr double kLog2E = 1.44269504088896340736;

// The factor of log2 exp(-2 z) besides u.
__device__ __forceinline__ float exponent_over(float u) {
  constexpr float kLinear = static_cast<float>(-2 * kLog2E * kSqrt2OverPi);
  constexpr float kThird = static_cast<float>(-2 * kLog2E * kSqrt2OverPi * kCubic);
  return fmaf(kThird, u * u, kLinear);
}

// 2^t and 1/x, good to two units in the last place of float32 (CUDA C++ Programming Guide, "Mathematical Functions"); they
// flush to zero only what is below 2^-126.
__device__ __forceinline__ float power_of_two(float t) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
  return power;
}
__device__ __forceinline__ float reciprocal(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

// u * sigmoid(2 z).
__device__ __forceinline__ float gelu(float u) { return u * reciprocal(1.0f + power_of_two(u * exponent_over(u))); }
__device__ __forceinline__ double gelu(double u) {
  return u / (1.0 + exp(-2 * kSqrt2OverPi * u * fma(kCubic, u * u, 1.0)));
}

// The smaller of two, and NaN if either is: fminf would drop it.
__device__ __forceinline__ float smaller(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// s + u * 2z' * s (1 - s) with s = sigmoid(2 z), and 1 - s as exp(-2 z) s, which does not cancel. Where |u| is beyond 64 the
// slope is 0 or 1; without the bounds, infinity would meet zero.
__device__ __forceinline__ float gelu_slope(float u) {
  constexpr float kLinear = static_cast<float>(2 * kSqrt2OverPi);
  constexpr float kSquare = static_cast<float>(2 * kSqrt2OverPi * 3 * kCubic);
  const float power = power_of_two(smaller(u * exponent_over(u), 126.0f)), s = reciprocal(1.0f + power);
  const float near = fmaxf(fminf(u, 64.0f), -64.0f);
  return fmaf(near * fmaf(kSquare, near * near, kLinear), power * s * s, s);
}
__device__ __forceinline__ double gelu_slope(double u) {
  constexpr double kLinear = 2 * kSqrt2OverPi, kSquare = 2 * kSqrt2OverPi * 3 * kCubic;
  const double exponent = -2 * kSqrt2OverPi * u * fma(kCubic, u * u, 1.0);
  const double power = exp(exponent > 700.0 ? 700.0 : exponent), s = 1.0 / (1.0 + power);
  const double near = fmax(fmin(u, 64.0), -64.0);
  return fma(near * fma(kSquare, near * near, kLinear), power * s * s, s);
}

// y of `count` elements. A block takes kGeluThreads * kVectors vectors, and there is a block for each such tile. kLarge:
// there may be 2^31 vectors or more, and the column costs a 64-bit division.
template <typename T, int kWidth, int kVectors, bool kLarge>
__global__ void __launch_bounds__(kGeluThreads)
    bias_gelu_forward(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ out, Index count, FastDivisor columns) {
  using Lanes = Vector<T, kWidth>;
  const Lanes* x_lanes = reinterpret_cast<const Lanes*>(x);
  const Lanes* bias_lanes = reinterpret_cast<const Lanes*>(bias);
  Lanes* out_lanes = reinterpret_cast<Lanes*>(out);
  const Index vectors = count / kWidth;
  constexpr Index kTile = Index{kGeluThreads} * kVectors;

  for (Index tile = blockIdx.x * kTile; tile < vectors; tile += gridDim.x * kTile) {
    Lanes own[kVectors];
#pragma unroll
    for (int step = 0; step < kVectors; ++step) {
      const Index i = tile + step * kGeluThreads + threadIdx.x;
      if (i < vectors) own[step] = x_lanes[i];
    }
#pragma unroll
    for (int step = 0; step < kVectors; ++step) {
      const Index i = tile + step * kGeluThreads + threadIdx.x;
      if (i < vectors) {
        const unsigned column = kLarge ? static_cast<unsigned>(i % columns.divisor) : columns.remainder(static_cast<unsigned>(i));
        const Lanes b = bias_lanes[column];
        Wide<T> y[kWidth];
#pragma unroll
        for (int lane = 0; lane < kWidth; ++lane) y[lane] = gelu(widen(own[step].lane[lane]) + widen(b.lane[lane]));
        Lanes narrowed;
        narrow_lanes<kWidth>(y, narrowed);
        out_lanes[i] = narrowed;
      }
    }
  }
}

// 16 bytes from device memory into shared memory, without a register in between, and the wait for all but the latest few.
__device__ __forceinline__ void copy_16(void* shared, const void* global) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLatest> __device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLatest) : "memory");
}

// The rows of a thread's column in turn, each loaded well before it is used: 16-byte vectors into slots of shared memory
// that are the thread's own, so that nobody else has to be waited for. Enough is on the way then whatever the arithmetic
// does; in registers it would take more of them than leave enough threads.
template <typename Lanes, bool kAhead> class Rows {
 public:
  static constexpr int kStages = 4;
  static constexpr int kSlots = kAhead ? kStages : 1;
  using Slots = Lanes[kSlots][2][kGeluThreads];

  // Of the elements at `at`, `at + stride`, ... before `stop`.
  template <typename T> __device__ Rows(Slots& slots, const T* grad, const T* x, Index at, Index stop, Index stride)
      : slots_(slots), grad_(reinterpret_cast<const char*>(grad)), x_(reinterpret_cast<const char*>(x)), at_(at * sizeof(T)),
        stop_(stop * sizeof(T)), stride_(stride * sizeof(T)) {
    if constexpr (kAhead) {
#pragma unroll
      for (int stage = 0; stage < kStages - 1; ++stage) fetch(stage);
    }
  }

  __device__ __forceinline__ void next(Lanes& grad, Lanes& x) {
    if constexpr (kAhead) {
      fetch((slot_ + kStages - 1) % kStages);
      wait_for_all_but<kStages - 1>();
      grad = slots_[slot_][0][threadIdx.x];
      x = slots_[slot_][1][threadIdx.x];
      slot_ = (slot_ + 1) % kStages;
    } else {
      grad = *reinterpret_cast<const Lanes*>(grad_ + at_);
      x = *reinterpret_cast<const Lanes*>(x_ + at_);
      at_ += stride_;
    }
  }

 private:
  __device__ __forceinline__ void fetch(int slot) {
    if (at_ < stop_) {
      copy_16(&slots_[slot][0][threadIdx.x], grad_ + at_);
      copy_16(&slots_[slot][1][threadIdx.x], x_ + at_);
    }
    end_of_copies();  // of nothing, perhaps: the groups are counted
    at_ += stride_;
  }

  Slots& slots_;
  const char* grad_;
  const char* x_;
  Index at_;
  const Index stop_;
  const Index stride_;
  int slot_ = 0;
};

// dx, and the column sums of a group of rows. kAcross threads stand side by side in a row and 256 / kAcross rows are worked
// on at a time. A group (blockIdx.y) takes its turn with the others, so that all blocks together go through the memory from
// its beginning to its end: each on a stretch of its own, they would be at thousands of places at a time. A thread keeps its
// columns' sums in registers from its first row to its last.
template <typename T, int kWidth, int kAcross>
__global__ void __launch_bounds__(kGeluThreads)
    bias_gelu_backward(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ dx,
                       Wide<T>* __restrict__ sums, Index rows, Index columns) {
  using Lanes = Vector<T, kWidth>;
  constexpr bool kAhead = sizeof(Lanes) == 16;
  constexpr int kDown = kGeluThreads / kAcross;
  __shared__ alignas(16) typename Rows<Lanes, kAhead>::Slots slots;
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const Index column = (Index{blockIdx.x} * kAcross + across) * kWidth;
  const bool inside = column < columns;
  Wide<T> sum[kWidth] = {};

  if (inside) {
    const Lanes b = *reinterpret_cast<const Lanes*>(bias + column);
    Index at = (Index{blockIdx.y} * kDown + down) * columns + column;
    const Index stop = rows * columns, stride = Index{gridDim.y} * kDown * columns;
    Rows<Lanes, kAhead> own(slots, grad, x, at, stop, stride);
    for (; at < stop; at += stride) {
      Lanes own_grad, own_x;
      own.next(own_grad, own_x);
      Wide<T> d[kWidth];
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) {
        d[lane] = widen(own_grad.lane[lane]) * gelu_slope(widen(own_x.lane[lane]) + widen(b.lane[lane]));
        sum[lane] += d[lane];
      }
      narrow_lanes<kWidth>(d, own_x);
      *reinterpret_cast<Lanes*>(dx + at) = own_x;
    }
  }

  if constexpr (kDown > 1) {
    __shared__ Wide<T> of_block[kDown][kAcross * kWidth];
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) of_block[down][across * kWidth + lane] = sum[lane];
    __syncthreads();
    for (int i = threadIdx.x; i < kAcross * kWidth; i += kGeluThreads) {
      const Index c = Index{blockIdx.x} * kAcross * kWidth + i;
      Wide<T> total = of_block[0][i];
#pragma unroll
      for (int other = 1; other < kDown; ++other) total += of_block[other][i];
      if (c < columns) sums[blockIdx.y * columns + c] = total;
    }
  } else if (inside) {
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) sums[blockIdx.y * columns + column + lane] = sum[lane];
  }
}

// dbias: the sum over the groups of bias_gelu_backward, in the order of a tree that depends on their number alone.
template <typename T>
__global__ void __launch_bounds__(1024)
    bias_gelu_dbias(const Wide<T>* __restrict__ sums, T* __restrict__ dbias, Index groups, Index columns) {
  __shared__ Wide<T> of_block[32][33];  // a column of padding, or a warp's stores would meet in one bank
  const int across = threadIdx.x % 32, down = threadIdx.x / 32;
  const Index column = Index{blockIdx.x} * 32 + across;
  Wide<T> sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (Index group = down; group < groups; group += 32) sum += sums[group * columns + column];
  }
  of_block[across][down] = sum;
  __syncthreads();
  sum = of_block[down][across];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
  const Index out = Index{blockIdx.x} * 32 + down;
  if (across == 0 && out < columns) narrow(sum, dbias[out]);
}

}  // namespace custom_ops

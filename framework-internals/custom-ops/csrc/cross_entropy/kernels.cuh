// The CUDA kernel, without host headers: one block per row, which reads the row from memory once and writes it once.
//
// At 4.3 TB/s one SM of an H200 moves 32 KB per microsecond: 6.2 us for a row of 50,304 bfloat16 logits, read and written. An
// exponential in each of two passes takes 3.2 us of its special-function units, the other instructions about 2 us of its
// issue slots, and three passes over shared memory 1.2 us. Two blocks share an SM, so that one computes while the other
// waits for memory.
#pragma once

#include "../common/device.cuh"

namespace custom_ops {

// 2^t, accurate to two units in the last place (CUDA C++ Programming Guide, "Mathematical Functions"). Flushes results below
// 2^-126 to zero.
__device__ __forceinline__ float exp2_of(float t) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
  return power;
}
__device__ __forceinline__ double exp2_of(double t) { return exp2(t); }

template <typename W> struct RowConstants;
template <> struct RowConstants<float> {
  static constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f, kLowest = -3.40282347e38f;
};
template <> struct RowConstants<double> {
  static constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453, kLowest = -1.7976931348623157e308;
};

// The sum of e^(x − reference). The reference, the highest x so far, is finite even if every x is −inf. The difference comes
// before the factor log2(e): with one fma, the rounding of a scaled reference of 1e30 would be an exponent of 1e22.
template <typename W> struct PowerSum {
  W reference = RowConstants<W>::kLowest;
  W sum = 0;

  template <int kWidth> __device__ __forceinline__ void add(const W (&x)[kWidth]) {
    W highest = x[0];
#pragma unroll
    for (int i = 1; i < kWidth; ++i) highest = max(highest, x[i]);
    if (highest > reference) {
      sum *= power_of(reference - highest);
      reference = highest;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += power(x[i]);
  }
  static __device__ __forceinline__ W power_of(W x) { return exp2_of(x * RowConstants<W>::kLog2E); }
  __device__ __forceinline__ W power(W x) const { return power_of(x - reference); }

  __device__ __forceinline__ void merge(W other_reference, W other_sum) {
    const W higher = max(reference, other_reference);
    sum = sum * power_of(reference - higher) + other_sum * power_of(other_reference - higher);
    reference = higher;
  }
};

// The sum over a block, in an order that depends on nothing but the number of threads.
template <typename W, int kThreads> __device__ __forceinline__ void merge_block(PowerSum<W>& own) {
  constexpr int kWarps = kThreads / 32;
  __shared__ W of_warp[2][kWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    own.merge(__shfl_xor_sync(0xffffffffu, own.reference, offset), __shfl_xor_sync(0xffffffffu, own.sum, offset));
  }
  if (threadIdx.x % 32 == 0) {
    of_warp[0][threadIdx.x / 32] = own.reference;
    of_warp[1][threadIdx.x / 32] = own.sum;
  }
  __syncthreads();
  own.reference = of_warp[0][threadIdx.x % kWarps];
  own.sum = of_warp[1][threadIdx.x % kWarps];
#pragma unroll
  for (int offset = kWarps / 2; offset > 0; offset /= 2) {
    own.merge(__shfl_xor_sync(0xffffffffu, own.reference, offset), __shfl_xor_sync(0xffffffffu, own.sum, offset));
  }
}

// Before sm_80, a copy through registers; a thread reads only what it has copied itself.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending> __device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// How many threads share an SM, which limits the registers of each: 64, or 128 for float64, whose exponential is long.
template <typename T> constexpr int kSharing = sizeof(T) == 8 ? 512 : 1024;

// One row. The part from the first aligned address on is divided into 16-byte vectors, which the threads take in turn. The at
// most 14 elements before and after them belong to one thread each. The first `kept` vectors stay in shared memory between
// the passes. The others are read a second time, shortly after the first, so the L2 cache should still have them.
template <typename T, int kThreads, bool kGradient>
__global__ void __launch_bounds__(kThreads, kSharing<T> / kThreads)
    cross_entropy_row(T* __restrict__ logits, const long long* __restrict__ targets, Wide<T>* __restrict__ losses, Index columns,
                      Index classes, Index ignore_index, int kept) {
  using W = Wide<T>;
  constexpr int kWidth = kVectorBytes / sizeof(T);
  constexpr int kCopies = 8;  // in flight per thread; two blocks of 512 threads have 128 KiB, and an SM needs about 32
  constexpr int kLoads = 4;  // of vectors that are not kept
  using Lanes = Vector<T, kWidth>;
  extern __shared__ __align__(16) unsigned char shared[];
  Lanes* const buffer = reinterpret_cast<Lanes*>(shared);

  T* const row = logits + blockIdx.x * columns;
  const Index target = targets[blockIdx.x];
  if (target == ignore_index) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    if constexpr (kGradient) {
      for (Index i = threadIdx.x; i < columns; i += kThreads) narrow(W(0), row[i]);
    }
    return;
  }
  const bool inside = target >= 0 && target < classes;
  const W nan = W(0) / W(0);
  const W chosen = inside ? widen(row[target]) : nan;

  const unsigned offset = static_cast<unsigned>(reinterpret_cast<unsigned long long>(row) % kVectorBytes);
  const int head = static_cast<int>(min(static_cast<Index>((kVectorBytes - offset) % kVectorBytes / sizeof(T)), classes));
  Lanes* const vectors = reinterpret_cast<Lanes*>(row + head);
  const int count = static_cast<int>((classes - head) / kWidth);
  const int outside = static_cast<int>(classes - Index{count} * kWidth);  // elements before and after the vectors
  const Index own = threadIdx.x < head ? threadIdx.x : Index{count} * kWidth + threadIdx.x;
  const int in_memory = min(kept, count);

  PowerSum<W> total;
  W edge = 0;
  if (threadIdx.x < outside) {
    edge = widen(row[own]);
    const W one[1] = {edge};
    total.add(one);
  }
  const auto add = [&](Lanes lanes) {  // a copy, so that the compiler loads 16 bytes at a time
    W x[kWidth];
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) x[lane] = widen(lanes.lane[lane]);
    total.add(x);
  };
  if constexpr (kGradient) {
    int next = threadIdx.x;
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy, next += kThreads) {
      if (next < in_memory) copy_async(buffer + next, vectors + next);
      commit_copies();
    }
    for (int i = threadIdx.x; i < in_memory; i += kThreads, next += kThreads) {
      wait_for_copies<kCopies - 1>();  // the oldest; a thread reads only what it has copied itself
      add(buffer[i]);
      if (next < in_memory) copy_async(buffer + next, vectors + next);
      commit_copies();
    }
  }
  for (int first = in_memory + threadIdx.x; first < count; first += kLoads * kThreads) {
    Lanes lanes[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (first + load * kThreads < count) lanes[load] = vectors[first + load * kThreads];
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (first + load * kThreads < count) add(lanes[load]);
    }
  }
  merge_block<W, kThreads>(total);

  if (threadIdx.x == 0) {
    losses[blockIdx.x] = fma(RowConstants<W>::kLn2, log2(total.sum), total.reference - chosen);
  }
  if constexpr (kGradient) {
    const W scale = inside ? W(1) / total.sum : nan;
    const int hit = inside && target >= head ? static_cast<int>((target - head) / kWidth) : -1;  // `count` or more in the tail
    const auto store = [&](int i, Lanes lanes) {
      W g[kWidth];
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) g[lane] = total.power(widen(lanes.lane[lane])) * scale;
      if (i == hit) {
#pragma unroll
        for (int lane = 0; lane < kWidth; ++lane) g[lane] -= (target - head) % kWidth == lane ? W(1) : W(0);
      }
      vectors[i] = narrow_lanes<T>(g);
    };
    for (int i = threadIdx.x; i < in_memory; i += kThreads) store(i, buffer[i]);
    for (int first = in_memory + threadIdx.x; first < count; first += kLoads * kThreads) {
      Lanes lanes[kLoads];
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        if (first + load * kThreads < count) lanes[load] = vectors[first + load * kThreads];
      }
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        if (first + load * kThreads < count) store(first + load * kThreads, lanes[load]);
      }
    }
    if (threadIdx.x < outside) narrow(total.power(edge) * scale - (own == target ? W(1) : W(0)), row[own]);
    for (Index i = classes + threadIdx.x; i < columns; i += kThreads) narrow(W(0), row[i]);
  }
}

}  // namespace custom_ops

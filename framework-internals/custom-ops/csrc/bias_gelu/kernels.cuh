// The CUDA kernels, without host headers, so that both NVRTC and nvcc compile them.
#pragma once

#include "gelu.cuh"

namespace custom_ops {

constexpr int kGeluThreads = 256;

// How many blocks of the backward kernel should share a multiprocessor, which limits the registers of each. On an H200 four
// are 4 to 6 % faster than three, on an H100 4 % slower in bfloat16 (NOTES.md). For sm_120 they spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
template <typename T> constexpr int kBackwardBlocks = sizeof(T) == 8 ? 2 : 3;
#else
template <typename T> constexpr int kBackwardBlocks = sizeof(T) == 8 ? 2 : 4;
#endif

// Computes y for `count` elements. Each block handles one tile of kGeluThreads * kVectors vectors. kLarge: there may be
// 2^31 vectors or more, and the column takes a 64-bit division.
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
        out_lanes[i] = narrow_lanes<T>(y);
      }
    }
  }
}

// The L2 eviction policy of a load. If the operands are larger than the cache, a pass that reads and writes is faster when
// written lines are evicted before the lines that it has read (measured: NOTES.md).
__device__ __forceinline__ unsigned long long policy_for(bool larger_than_l2) {
  unsigned long long policy = 0;
#if __CUDA_ARCH__ >= 800
  if (larger_than_l2) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  else asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

template <typename Lanes> __device__ __forceinline__ Lanes load(const Lanes* from, unsigned long long policy) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(Lanes) == 16) {
    union {
      unsigned words[4];
      Lanes lanes;
    } loaded;
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(loaded.words[0]), "=r"(loaded.words[1]), "=r"(loaded.words[2]), "=r"(loaded.words[3])
                 : "l"(from), "l"(policy));
    return loaded.lanes;
  }
#endif
  return *from;
}

// Iterates over the rows of a thread's column. Loads are issued ahead: while one row is processed, kAhead rows of the
// gradient and x are on their way into registers.
template <typename Lanes, int kAhead> class Rows {
 public:
  // Covers the elements at `at`, `at + stride`, ... before `stop`.
  template <typename T> __device__ Rows(const T* grad, const T* x, Index at, Index stop, Index stride, bool larger_than_l2)
      : grad_(reinterpret_cast<const char*>(grad)), x_(reinterpret_cast<const char*>(x)), at_(at * sizeof(T)),
        stop_(stop * sizeof(T)), stride_(stride * sizeof(T)), policy_(policy_for(larger_than_l2)) {
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) fetch(slot);
  }

  // `slot` is cyclic and must be a compile-time constant.
  __device__ __forceinline__ void next(int slot, Lanes& grad, Lanes& x) {
    grad = ahead_[slot][0];
    x = ahead_[slot][1];
    fetch(slot);
  }

 private:
  __device__ __forceinline__ void fetch(int slot) {
    if (at_ < stop_) {
      ahead_[slot][0] = load(reinterpret_cast<const Lanes*>(grad_ + at_), policy_);
      ahead_[slot][1] = load(reinterpret_cast<const Lanes*>(x_ + at_), policy_);
    }
    at_ += stride_;
  }

  Lanes ahead_[kAhead][2];
  const char* grad_;
  const char* x_;
  Index at_;
  const Index stop_;
  const Index stride_;
  const unsigned long long policy_;
};

// Computes dx, and the column sums of a group of rows. kAcross threads work across a row, and 256 / kAcross rows are
// processed at a time. The groups (blockIdx.y) interleave their rows, so that all blocks together pass through memory from
// beginning to end. With one contiguous range per group, they would access thousands of places at a time. A thread keeps
// the sums of its columns in registers for all of its rows.
template <typename T, int kWidth, int kAcross>
__global__ void __launch_bounds__(kGeluThreads, kBackwardBlocks<T>)
    bias_gelu_backward(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ dx,
                       Wide<T>* __restrict__ sums, Index rows, Index columns, bool larger_than_l2) {
  using Lanes = Vector<T, kWidth>;
  constexpr int kAhead = kWidth == 8 ? 1 : kWidth == 4 ? 2 : 4;  // about as many elements for every width
  constexpr int kDown = kGeluThreads / kAcross;
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const Index column = (Index{blockIdx.x} * kAcross + across) * kWidth;
  const bool inside = column < columns;
  Wide<T> sum[kWidth] = {};

  if (inside) {
    const Lanes b = *reinterpret_cast<const Lanes*>(bias + column);
    Index at = (Index{blockIdx.y} * kDown + down) * columns + column;
    const Index stop = rows * columns, stride = Index{gridDim.y} * kDown * columns;
    Rows<Lanes, kAhead> own(grad, x, at, stop, stride, larger_than_l2);
    while (at < stop) {
#pragma unroll
      for (int slot = 0; slot < kAhead; ++slot) {
        if (at < stop) {
          Lanes own_grad, own_x;
          own.next(slot, own_grad, own_x);
          Wide<T> d[kWidth];
#pragma unroll
          for (int lane = 0; lane < kWidth; ++lane) {
            d[lane] = widen(own_grad.lane[lane]) * gelu_slope(widen(own_x.lane[lane]) + widen(b.lane[lane]));
            sum[lane] += d[lane];
          }
          store(dx + at, narrow_lanes<T>(d));
        }
        at += stride;
      }
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

// Adds what a block's 32 warps have of 32 columns, of_block[column][warp], in a tree order, and writes the sums to dbias.
template <typename T>
__device__ __forceinline__ void add_warps(const Wide<T> (&of_block)[32][33], T* __restrict__ dbias, Index first, Index columns) {
  __syncthreads();
  const int lane = threadIdx.x % 32, column = threadIdx.x / 32;
  Wide<T> sum = of_block[column][lane];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
  if (lane == 0 && first + column < columns) narrow(sum, dbias[first + column]);
}

// Computes dbias, the sum over the groups of bias_gelu_backward, in a tree order that depends only on their number.
template <typename T>
__global__ void __launch_bounds__(1024)
    bias_gelu_dbias(const Wide<T>* __restrict__ sums, T* __restrict__ dbias, Index groups, Index columns) {
  __shared__ Wide<T> of_block[32][33];  // a column of padding avoids bank conflicts of a warp's stores
  const int across = threadIdx.x % 32, down = threadIdx.x / 32;
  const Index first = Index{blockIdx.x} * 32, column = first + across;
  Wide<T> sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (Index group = down; group < groups; group += 32) sum += sums[group * columns + column];
  }
  of_block[across][down] = sum;
  add_warps<T>(of_block, dbias, first, columns);
}

// Computes dx and dbias in one launch, for few rows: a block has all rows of 32 columns. There, the time is that of the launches
// and of a thread's steps, each of which waits for the memory; a thread has few of them.
template <typename T, int kWidth>
__global__ void __launch_bounds__(1024)
    bias_gelu_backward_of_few_rows(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ bias,
                                   T* __restrict__ dx, T* __restrict__ dbias, Index rows, Index columns) {
  using Lanes = Vector<T, kWidth>;
  constexpr int kAcross = 32 / kWidth, kDown = 1024 / kAcross;
  __shared__ Wide<T> of_block[32][33];
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const Index first = Index{blockIdx.x} * 32, column = first + across * kWidth;
  Wide<T> sum[kWidth] = {};
  if (column < columns) {
    const Lanes b = *reinterpret_cast<const Lanes*>(bias + column);
#pragma unroll 2
    for (Index row = down; row < rows; row += kDown) {
      const Lanes own_grad = *reinterpret_cast<const Lanes*>(grad + row * columns + column);
      const Lanes own_x = *reinterpret_cast<const Lanes*>(x + row * columns + column);
      Wide<T> d[kWidth];
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) {
        d[lane] = widen(own_grad.lane[lane]) * gelu_slope(widen(own_x.lane[lane]) + widen(b.lane[lane]));
        sum[lane] += d[lane];
      }
      store(dx + row * columns + column, narrow_lanes<T>(d));
    }
  }
#pragma unroll
  for (int lane = 0; lane < kWidth; ++lane) {
#pragma unroll
    for (int offset = 16; offset >= kAcross; offset /= 2) sum[lane] += __shfl_xor_sync(0xffffffffu, sum[lane], offset);
    if (threadIdx.x % 32 < kAcross) of_block[across * kWidth + lane][threadIdx.x / 32] = sum[lane];
  }
  add_warps<T>(of_block, dbias, first, columns);
}

}  // namespace custom_ops

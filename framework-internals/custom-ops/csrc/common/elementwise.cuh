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

template <typename T, int kInputs, typename Op>
__device__ __forceinline__ Wide<T> apply(const Op& op, T x, T b) {
  if constexpr (kInputs == 2) return op(widen(x), widen(b));
  else return op(widen(x));
}

// out = op(x) or op(x, b), 16 bytes of each operand a thread: one vector, or where operands are not aligned as many elements, a block
// apart. One element alone has too few bytes in flight: 0.68 of the speed on an H200. Many short blocks keep the memory busier than a
// persistent grid. The stride is for problems that exceed the grid's limit.
template <typename T, int kWidth, int kInputs, typename Op>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise(const T* __restrict__ x, const T* __restrict__ b, T* __restrict__ out, Index count, Op op) {
  using Lanes = Vector<T, kWidth>;
  constexpr int kSteps = kVectorBytes / static_cast<int>(sizeof(Lanes));
  const Lanes* x_lanes = reinterpret_cast<const Lanes*>(x);
  const Lanes* b_lanes = reinterpret_cast<const Lanes*>(b);
  const Index vectors = count / kWidth, stride = Index{gridDim.x} * kElementwiseThreads * kSteps;

  for (Index first = Index{blockIdx.x} * kElementwiseThreads * kSteps + threadIdx.x; first < vectors; first += stride) {
    Lanes own[kSteps], other[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const Index i = first + step * kElementwiseThreads;
      if (step > 0 && i >= vectors) continue;
      own[step] = x_lanes[i];
      if constexpr (kInputs == 2) other[step] = b_lanes[i];
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const Index i = first + step * kElementwiseThreads;
      if (step > 0 && i >= vectors) continue;
      Wide<T> result[kWidth];
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) result[lane] = apply<T, kInputs>(op, own[step].lane[lane], other[step].lane[lane]);
      reinterpret_cast<Lanes*>(out)[i] = narrow_lanes<T>(result);
    }
  }

  // The last count % kWidth elements are fewer than a warp, so one block handles them.
  const Index i = vectors * kWidth + threadIdx.x;
  if (blockIdx.x == 0 && i < count) narrow(apply<T, kInputs>(op, x[i], kInputs == 2 ? b[i] : T{}), out[i]);
}

// An operand of a matrix: column by column, `leading` elements from one to the next, or with 0 row by row.
template <typename T> struct Matrix {
  const T* data;
  Index leading;
};

template <typename T> constexpr int kTileSide = sizeof(T) == 8 ? 32 : 64;

// The same of matrices, into `out` row by row. A tile of one that lies column by column goes through shared memory, so that its reads
// are of whole columns and the writes of whole rows. Four blocks a multiprocessor: 64 registers, where up to 98 were taken.
template <typename T, int kInputs, typename Op>
__global__ void __launch_bounds__(kElementwiseThreads, 4)
    elementwise_by_tiles(Matrix<T> x, Matrix<T> b, T* __restrict__ out, Index rows, Index columns, Op op) {
  constexpr int kSide = kTileSide<T>, kDown = kElementwiseThreads / kSide, kSteps = kSide / kDown;
  constexpr int kPadding = sizeof(T) == 2 ? 2 : 1;  // a warp that reads across rows meets every bank
  __shared__ T tile[kInputs][kSide][kSide + kPadding];
  const Matrix<T> operands[] = {x, b};
  const unsigned across = static_cast<unsigned>((columns + kSide - 1) / kSide), of_row = blockIdx.x / across;
  const Index row = Index{of_row} * kSide, column = Index{blockIdx.x - of_row * across} * kSide;
  const int high = static_cast<int>(min(rows - row, Index{kSide})), wide = static_cast<int>(min(columns - column, Index{kSide}));
  const int lane = threadIdx.x % kSide, down = threadIdx.x / kSide;

  T own[kInputs][kSteps];
#pragma unroll
  for (int input = 0; input < kInputs; ++input) {
    const auto [data, leading] = operands[input];
    const bool turned = leading != 0;
    const Index pitch = turned ? leading : columns;
    const T* from = data + (turned ? column : row) * pitch + (turned ? row : column) + down * pitch + lane;
    const int lines = lane < (turned ? high : wide) ? (turned ? wide : high) : 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step, from += kDown * pitch) {
      if (down + step * kDown < lines) own[input][step] = *from;
    }
  }
#pragma unroll
  for (int input = 0; input < kInputs; ++input) {
    if (operands[input].leading == 0) continue;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) tile[input][down + step * kDown][lane] = own[input][step];
  }
  __syncthreads();
#pragma unroll
  for (int input = 0; input < kInputs; ++input) {
    if (operands[input].leading == 0) continue;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) own[input][step] = tile[input][lane][down + step * kDown];
  }
  T* to = out + (row + down) * columns + column + lane;
#pragma unroll
  for (int step = 0; step < kSteps; ++step, to += kDown * columns) {
    if (lane < wide && down + step * kDown < high) narrow(apply<T, kInputs>(op, own[0][step], own[kInputs - 1][step]), *to);
  }
}

}  // namespace custom_ops

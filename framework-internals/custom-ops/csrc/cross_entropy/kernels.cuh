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

// Copies the first `count` vectors into shared memory, and calls use(index, vector) for those of the thread as they arrive.
template <int kThreads, typename Lanes, typename Use>
__device__ __forceinline__ void each_copied(Lanes* buffer, const Lanes* vectors, int count, const Use& use) {
  constexpr int kCopies = 8;  // in flight per thread; two blocks of 512 threads have 128 KiB, and an SM needs about 32
  int next = threadIdx.x;
#pragma unroll
  for (int copy = 0; copy < kCopies; ++copy, next += kThreads) {
    if (next < count) copy_async(buffer + next, vectors + next);
    commit_copies();
  }
  for (int i = threadIdx.x; i < count; i += kThreads, next += kThreads) {
    wait_for_copies<kCopies - 1>();  // the oldest; a thread reads only what it has copied itself
    use(i, buffer[i]);
    if (next < count) copy_async(buffer + next, vectors + next);
    commit_copies();
  }
}

// How many threads share an SM, which limits the registers of each: 64, or 128 for float64, whose exponential is long.
template <typename T> constexpr int kSharing = sizeof(T) == 8 ? 512 : 1024;

// A row: the part from the first aligned address on is divided into 16-byte vectors, which the threads take in turn. The at
// most 14 elements before and after them belong to one thread each.
template <typename T, int kThreads> struct Row {
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  static constexpr int kLoads = 4;  // of vectors, in flight per thread
  using Lanes = Vector<T, kWidth>;

  T* const start;
  const int head;
  Lanes* const vectors;
  const int count;  // of vectors
  const int outside;  // elements before and after the vectors

  __device__ __forceinline__ Row(T* row, Index classes)
      : start(row),
        head(static_cast<int>(min(static_cast<Index>((kVectorBytes - address(row)) % kVectorBytes / sizeof(T)), classes))),
        vectors(reinterpret_cast<Lanes*>(row + head)),
        count(static_cast<int>((classes - head) / kWidth)),
        outside(static_cast<int>(classes - Index{count} * kWidth)) {}

  // The thread's element outside of the vectors, if it has one.
  __device__ __forceinline__ bool has_own() const { return threadIdx.x < outside; }
  __device__ __forceinline__ Index own() const {
    return threadIdx.x < head ? threadIdx.x : Index{count} * kWidth + threadIdx.x;
  }
  // The vector that holds a class; -1 if none does.
  __device__ __forceinline__ int vector_of(Index target) const {
    return target >= head ? static_cast<int>((target - head) / kWidth) : -1;
  }
  // Calls use(index, vector) for the thread's vectors from `first` on, with several loads in flight.
  template <typename Use> __device__ __forceinline__ void each_vector(int first, const Use& use) const {
    for (int at = first + threadIdx.x; at < count; at += kLoads * kThreads) {
      Lanes lanes[kLoads];
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        if (at + load * kThreads < count) lanes[load] = vectors[at + load * kThreads];
      }
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        if (at + load * kThreads < count) use(at + load * kThreads, lanes[load]);
      }
    }
  }
  __device__ __forceinline__ void clear(Index from, Index to) const {
    for (Index i = from + threadIdx.x; i < to; i += kThreads) narrow(Wide<T>(0), start[i]);
  }
  template <typename W> static __device__ __forceinline__ void add_to(PowerSum<W>& total, Lanes lanes) {
    W x[kWidth];
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) x[lane] = widen(lanes.lane[lane]);
    total.add(x);
  }
  template <typename W> __device__ __forceinline__ void store_softmax(int i, Lanes lanes, const PowerSum<W>& total, W scale) const {
    W g[kWidth];
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) g[lane] = total.power(widen(lanes.lane[lane])) * scale;
    vectors[i] = narrow_lanes<T>(g);
  }

 private:
  static __device__ __forceinline__ unsigned address(const T* row) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(row) % kVectorBytes);
  }
};

// One row. The first `kept` vectors stay in shared memory between the passes. The others are read a second time, shortly after
// the first, so the L2 cache should still have them.
template <typename T, int kThreads, bool kGradient>
__global__ void __launch_bounds__(kThreads, kSharing<T> / kThreads)
    cross_entropy_row(T* __restrict__ logits, const long long* __restrict__ targets, Wide<T>* __restrict__ losses, Index columns,
                      Index classes, Index ignore_index, int kept) {
  using W = Wide<T>;
  using Lanes = typename Row<T, kThreads>::Lanes;
  extern __shared__ __align__(16) unsigned char shared[];
  Lanes* const buffer = reinterpret_cast<Lanes*>(shared);

  const Row<T, kThreads> row(logits + blockIdx.x * columns, classes);
  const Index target = targets[blockIdx.x];
  if (target == ignore_index) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    if constexpr (kGradient) row.clear(0, columns);
    return;
  }
  const bool inside = target >= 0 && target < classes;
  const W nan = W(0) / W(0);
  const W chosen = inside ? widen(row.start[target]) : nan;
  const int in_memory = min(kept, row.count);

  PowerSum<W> total;
  W edge = 0;
  if (row.has_own()) {
    edge = widen(row.start[row.own()]);
    const W one[1] = {edge};
    total.add(one);
  }
  if constexpr (kGradient) {
    each_copied<kThreads>(buffer, row.vectors, in_memory, [&](int, Lanes lanes) { row.add_to(total, lanes); });
  }
  row.each_vector(in_memory, [&](int, Lanes lanes) { row.add_to(total, lanes); });
  merge_block<W, kThreads>(total);

  if (threadIdx.x == 0) {
    losses[blockIdx.x] = fma(RowConstants<W>::kLn2, log2(total.sum), total.reference - chosen);
  }
  if constexpr (kGradient) {
    const W scale = inside ? W(1) / total.sum : nan;
    const int hit = inside ? row.vector_of(target) : -1;
    bool mine = false;  // whether this thread has written the target's vector; a comparison in its place needs registers
    const auto store = [&](int i, Lanes lanes) {
      row.store_softmax(i, lanes, total, scale);
      mine = mine || i == hit;
    };
    for (int i = threadIdx.x; i < in_memory; i += kThreads) store(i, buffer[i]);
    row.each_vector(in_memory, store);
    if (mine) narrow(total.power(chosen) * scale - W(1), row.start[target]);
    if (row.has_own()) narrow(total.power(edge) * scale - (row.own() == target ? W(1) : W(0)), row.start[row.own()]);
    row.clear(classes, columns);
  }
}

// One row of a block of classes, whose sums are merged with those of the blocks before it.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, kSharing<T> / kThreads)
    cross_entropy_block_sums(T* __restrict__ logits, const long long* __restrict__ targets, Wide<T>* __restrict__ sums,
                             Wide<T>* __restrict__ chosen, Index columns, Index classes, Index first, Index ignore_index) {
  using W = Wide<T>;
  if (targets[blockIdx.x] == ignore_index) return;
  const Row<T, kThreads> row(logits + blockIdx.x * columns, classes);
  PowerSum<W> total;
  if (row.has_own()) {
    const W one[1] = {widen(row.start[row.own()])};
    total.add(one);
  }
  row.each_vector(0, [&](int, typename Row<T, kThreads>::Lanes lanes) { row.add_to(total, lanes); });
  merge_block<W, kThreads>(total);
  if (threadIdx.x != 0) return;
  W* const kept = sums + 2 * blockIdx.x;
  total.merge(kept[0], kept[1]);
  kept[0] = total.reference;
  kept[1] = total.sum;
  const Index target = targets[blockIdx.x] - first;
  if (target >= 0 && target < classes) chosen[blockIdx.x] = widen(row.start[target]);
}

// One row of a block of classes, by the sums of all blocks.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, kSharing<T> / kThreads)
    cross_entropy_block_gradient(T* __restrict__ logits, const long long* __restrict__ targets, const Wide<T>* __restrict__ sums,
                                 Index columns, Index classes, Index first, Index ignore_index) {
  using W = Wide<T>;
  const Row<T, kThreads> row(logits + blockIdx.x * columns, classes);
  if (targets[blockIdx.x] == ignore_index) {
    row.clear(0, columns);
    return;
  }
  const Index target = targets[blockIdx.x] - first;
  PowerSum<W> total;
  total.reference = sums[2 * blockIdx.x];
  const W scale = W(1) / sums[2 * blockIdx.x + 1];
  const bool inside = target >= 0 && target < classes;
  const int hit = inside ? row.vector_of(target) : -1;
  const W chosen = inside ? widen(row.start[target]) : W(0);
  bool mine = false;
  row.each_vector(0, [&](int i, typename Row<T, kThreads>::Lanes lanes) {
    row.store_softmax(i, lanes, total, scale);
    mine = mine || i == hit;
  });
  if (mine) narrow(total.power(chosen) * scale - W(1), row.start[target]);
  if (row.has_own()) {
    narrow(total.power(widen(row.start[row.own()])) * scale - (row.own() == target ? W(1) : W(0)), row.start[row.own()]);
  }
  row.clear(classes, columns);
}

}  // namespace custom_ops

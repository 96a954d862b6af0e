// The CUDA kernels of the loss with more than cross-entropy in it (kernels.h), without host headers. They read and write a row as
// those of kernels.cuh do; which parts a loss has is the same for all threads of a launch.
#pragma once

#include "kernels.cuh"

namespace custom_ops {

// tanh, to a few units in the last place. Logits of 16 bits take a form with two special functions, whose error of 2^-23 is far
// below their own rounding.
template <typename T> __device__ __forceinline__ Wide<T> tanh_of(Wide<T> t) {
  if constexpr (sizeof(T) == 2) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(exp2_of(t * (2 * RowConstants<float>::kLog2E)) + 1.0f));
    return fmaf(-2.0f, inverse, 1.0f);
  } else if constexpr (sizeof(T) == 4) {
    return tanhf(t);
  } else {
    return tanh(t);
  }
}

// What a loss has beside the logits and targets.
template <typename W> struct Parts {
  const W* class_weight;  // null: one for each class
  W share;  // of each class in the smoothing; 0 without
  W softcap, inverse;  // of the cap; 0 without
  bool accuracy;

  // The smoothing's weights of the classes from `of` on. As vectors where they lie so: the loads of single elements by a warp would be
  // the width of a thread's vector apart.
  template <int kWidth> __device__ __forceinline__ void weights_of(Index of, W (&weights)[kWidth]) const {
    constexpr int kAtOnce = kVectorBytes / static_cast<int>(sizeof(W));
    const W* const from = class_weight + of;
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) weights[lane] = W(1);
    if (class_weight == nullptr || share == W(0)) return;
    if (kWidth % kAtOnce == 0 && reinterpret_cast<size_t>(from) % kVectorBytes == 0) {
#pragma unroll
      for (int first = 0; first + kAtOnce <= kWidth; first += kAtOnce) {
        const auto some = *reinterpret_cast<const Vector<W, kAtOnce>*>(from + first);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) weights[first + i] = some.lane[i];
      }
    } else {
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) weights[lane] = from[lane];
    }
  }
  template <typename T> __device__ __forceinline__ W capped(W x) const { return softcap == W(0) ? x : softcap * tanh_of<T>(x * inverse); }
  // The derivative of the cap, by the capped value.
  __device__ __forceinline__ W slope(W x) const {
    const W t = softcap == W(0) ? W(0) : x * inverse;  // -inf * 0 is NaN
    return fma(-t, t, W(1));
  }
};

// What the first pass over a row collects: the sum of the powers, the smoothing's sum of weighted logits, and the class with the
// highest logit, the first of several.
template <typename W> struct RowSums {
  PowerSum<W> powers;
  W weighted = 0;
  W best = -W(1) / W(0);
  int prediction = 2147483647;

  __device__ __forceinline__ void consider(W x, int of) {
    if (x > best || (x == best && of < prediction)) {
      best = x;
      prediction = of;
    }
  }
  template <typename T, int kWidth> __device__ __forceinline__ void add(const Parts<W>& parts, const T (&lanes)[kWidth], int first, Index offset) {
    W x[kWidth];
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) {
      const W logit = widen(lanes[lane]);
      if (parts.accuracy) consider(logit, first + lane);
      x[lane] = parts.template capped<T>(logit);
    }
    if (parts.share != W(0)) {
      W weights[kWidth];
      parts.weights_of(offset + first, weights);
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) weighted = fma(weights[lane], x[lane], weighted);
    }
    powers.add(x);
  }
  __device__ __forceinline__ void merge_lane(int offset) {
    weighted += __shfl_xor_sync(0xffffffffu, weighted, offset);
    const W other = __shfl_xor_sync(0xffffffffu, best, offset);
    consider(other, __shfl_xor_sync(0xffffffffu, prediction, offset));
  }
};

// Over a block, in an order that depends on nothing but the number of threads.
template <typename W, int kThreads> __device__ __forceinline__ void merge_block(RowSums<W>& own) {
  constexpr int kWarps = kThreads / 32;
  __shared__ W of_warp[2][kWarps];
  __shared__ int prediction_of_warp[kWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) own.merge_lane(offset);
  if (threadIdx.x % 32 == 0) {
    of_warp[0][threadIdx.x / 32] = own.weighted;
    of_warp[1][threadIdx.x / 32] = own.best;
    prediction_of_warp[threadIdx.x / 32] = own.prediction;
  }
  merge_block<W, kThreads>(own.powers);  // synchronises the block
  own.weighted = of_warp[0][threadIdx.x % kWarps];
  own.best = of_warp[1][threadIdx.x % kWarps];
  own.prediction = prediction_of_warp[threadIdx.x % kWarps];
#pragma unroll
  for (int offset = kWarps / 2; offset > 0; offset /= 2) own.merge_lane(offset);
}

// The gradient of a logit, without the target's part.
template <typename T, typename W> struct GradientOf {
  const Parts<W> parts;
  const PowerSum<W> total;
  const W scale;
  const Index offset;  // of the first class

  // Of the logits from class `of` on.
  template <int kWidth> __device__ __forceinline__ void operator()(const T (&logits)[kWidth], Index of, W (&gradients)[kWidth]) const {
    W weights[kWidth];
    parts.weights_of(offset + of, weights);
#pragma unroll
    for (int lane = 0; lane < kWidth; ++lane) gradients[lane] = of_one(widen(logits[lane]), parts.share * weights[lane]);
  }
  __device__ __forceinline__ W single(W logit, Index of, W of_target) const {
    W weight[1];
    parts.weights_of(offset + of, weight);
    return of_one(logit, fma(parts.share, weight[0], of_target));
  }

 private:
  __device__ __forceinline__ W of_one(W logit, W less) const {
    const W x = parts.template capped<T>(logit);
    return (total.power(x) * scale - less) * parts.slope(x);
  }
};

// Writes the gradient over the vectors and edges of a row; `each_vector` calls its argument for each vector of the thread.
template <typename T, int kThreads, typename W, typename EachVector>
__device__ __forceinline__ void write_gradient(const Row<T, kThreads>& row, const GradientOf<T, W>& gradient, W edge, Index target, W chosen,
                                               W of_target, const EachVector& each_vector) {
  using Lanes = typename Row<T, kThreads>::Lanes;
  constexpr int kWidth = Row<T, kThreads>::kWidth;
  const int hit = target >= 0 ? row.vector_of(target) : -1;
  bool mine = false;  // whether this thread has written the target's vector
  each_vector([&](int i, Lanes lanes) {
    W g[kWidth];
    gradient(lanes.lane, row.head + i * kWidth, g);
    row.vectors[i] = narrow_lanes<T>(g);
    mine = mine || i == hit;
  });
  if (mine) narrow(gradient.single(chosen, target, of_target), row.start[target]);
  if (row.has_own()) narrow(gradient.single(edge, row.own(), row.own() == target ? of_target : W(0)), row.start[row.own()]);
}

// One row, as cross_entropy_row. `factors` (rows, 3) has a row's factors of the target's loss, of the smoothing's and of the square
// of the log-sum-exp.
template <typename T, int kThreads, bool kGradient>
__global__ void __launch_bounds__(kThreads, kSharing<T> / kThreads)
    general_cross_entropy_row(T* __restrict__ logits, const long long* __restrict__ targets, Wide<T>* __restrict__ losses, Index columns,
                              Index classes, Index ignore_index, int kept, const Wide<T>* __restrict__ factors, Parts<Wide<T>> parts,
                              Wide<T>* __restrict__ statistics) {
  using W = Wide<T>;
  using Lanes = typename Row<T, kThreads>::Lanes;
  constexpr int kWidth = Row<T, kThreads>::kWidth;
  extern __shared__ __align__(16) unsigned char shared[];
  Lanes* const buffer = reinterpret_cast<Lanes*>(shared);

  const Row<T, kThreads> row(logits + blockIdx.x * columns, classes);
  const Index target = targets[blockIdx.x];
  if (target == ignore_index) {
    if (threadIdx.x == 0) {
      losses[blockIdx.x] = 0;
      statistics[2 * blockIdx.x] = statistics[2 * blockIdx.x + 1] = 0;
    }
    if constexpr (kGradient) row.clear(0, columns);
    return;
  }
  const bool inside = target >= 0 && target < classes;
  const W nan = W(0) / W(0);
  const W chosen = inside ? widen(row.start[target]) : nan;
  const int in_memory = min(kept, row.count);

  RowSums<W> sums;
  T edge[1] = {};
  if (row.has_own()) {
    edge[0] = row.start[row.own()];
    sums.add(parts, edge, static_cast<int>(row.own()), 0);
  }
  const auto add = [&](int i, Lanes lanes) { sums.add(parts, lanes.lane, row.head + i * kWidth, 0); };
  if constexpr (kGradient) each_copied<kThreads>(buffer, row.vectors, in_memory, add);
  row.each_vector(in_memory, add);
  merge_block<W, kThreads>(sums);

  const W of_target = factors[3 * blockIdx.x], smoothing = factors[3 * blockIdx.x + 1], of_square = factors[3 * blockIdx.x + 2];
  const W reference = sums.powers.reference, logarithm = RowConstants<W>::kLn2 * log2(sums.powers.sum), normaliser = reference + logarithm;
  if (threadIdx.x == 0) {
    const W own = of_target * (logarithm + (reference - parts.template capped<T>(chosen)));
    const W smoothed = parts.share == W(0) ? W(0) : smoothing * normaliser - parts.share * sums.weighted;
    losses[blockIdx.x] = own + smoothed + of_square * normaliser * normaliser;
    statistics[2 * blockIdx.x] = normaliser;
    statistics[2 * blockIdx.x + 1] = sums.prediction == target ? W(1) : W(0);
  }
  if constexpr (kGradient) {
    const W scale = inside ? (of_target + smoothing + W(2) * of_square * normaliser) / sums.powers.sum : nan;
    const GradientOf<T, W> gradient{parts, sums.powers, scale, 0};
    write_gradient(row, gradient, widen(edge[0]), inside ? target : Index{-1}, chosen, of_target, [&](const auto& store) {
      for (int i = threadIdx.x; i < in_memory; i += kThreads) store(i, buffer[i]);
      row.each_vector(in_memory, store);
    });
    row.clear(classes, columns);
  }
}

// One row of a block of classes. `sums` (rows, 5) has a row's reference, sum of powers, sum of weighted logits, highest
// logit, and whether that is the target's.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, kSharing<T> / kThreads)
    general_cross_entropy_block_sums(T* __restrict__ logits, const long long* __restrict__ targets, Wide<T>* __restrict__ sums,
                                     Wide<T>* __restrict__ chosen, Index columns, Index classes, Index first, Index ignore_index,
                                     Parts<Wide<T>> parts) {
  using W = Wide<T>;
  if (targets[blockIdx.x] == ignore_index) return;
  const Row<T, kThreads> row(logits + blockIdx.x * columns, classes);
  RowSums<W> own;
  if (row.has_own()) {
    const T edge[1] = {row.start[row.own()]};
    own.add(parts, edge, static_cast<int>(row.own()), first);
  }
  row.each_vector(0, [&](int i, typename Row<T, kThreads>::Lanes lanes) {
    own.add(parts, lanes.lane, row.head + i * Row<T, kThreads>::kWidth, first);
  });
  merge_block<W, kThreads>(own);
  if (threadIdx.x != 0) return;
  W* const kept = sums + 5 * blockIdx.x;
  own.powers.merge(kept[0], kept[1]);
  kept[0] = own.powers.reference;
  kept[1] = own.powers.sum;
  kept[2] += own.weighted;
  const Index target = targets[blockIdx.x] - first;
  if (parts.accuracy && (own.best > kept[3] || first == 0)) {
    kept[3] = own.best;
    kept[4] = own.prediction == target ? W(1) : W(0);
  }
  if (target >= 0 && target < classes) chosen[blockIdx.x] = parts.template capped<T>(widen(row.start[target]));
}

// One row of a block of classes. `scales` (rows, 3) has a row's reference, the factor of its powers and that of its target.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, kSharing<T> / kThreads)
    general_cross_entropy_block_gradient(T* __restrict__ logits, const long long* __restrict__ targets, const Wide<T>* __restrict__ scales,
                                         Index columns, Index classes, Index first, Index ignore_index, Parts<Wide<T>> parts) {
  using W = Wide<T>;
  const Row<T, kThreads> row(logits + blockIdx.x * columns, classes);
  if (targets[blockIdx.x] == ignore_index) {
    row.clear(0, columns);
    return;
  }
  const Index target = targets[blockIdx.x] - first;
  const bool inside = target >= 0 && target < classes;
  const W chosen = inside ? widen(row.start[target]) : W(0);
  const W edge = row.has_own() ? widen(row.start[row.own()]) : W(0);
  PowerSum<W> total;
  total.reference = scales[3 * blockIdx.x];
  const GradientOf<T, W> gradient{parts, total, scales[3 * blockIdx.x + 1], first};
  write_gradient(row, gradient, edge, inside ? target : Index{-1}, chosen, scales[3 * blockIdx.x + 2],
                 [&](const auto& store) { row.each_vector(0, store); });
  row.clear(classes, columns);
}

}  // namespace custom_ops

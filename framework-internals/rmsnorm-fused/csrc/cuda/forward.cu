// RMSNorm and layer normalisation (kCentred) forward on a GPU. Memory is the limit: x is read once and y written once.
//
// A row belongs to `lanes` threads, which keep it in registers between the sum and the product. From sm_90 on, the lanes of
// a wide row are spread over the blocks of a cluster, which exchange their sums. The part that does not fit in registers is
// read a second time.
#include <cuda_fp8.h>

#include <cfloat>

#include "device.cuh"
#include "forward.cuh"
#include "launch.cuh"
#include "ptx.cuh"

namespace rms_norm {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kAnyBlock = 512;    // threads of a block of forward_kernel, at most: twice the registers
constexpr int kSmallBlock = 128;  // threads of a block that holds several narrow rows
constexpr unsigned kFewBlocks = 8;  // blocks of a grid that starts the next kernel early: saves 4 % of a single row

enum class Kind { rms, layer, float8 };

// A block's storage for the sums of a cluster: one word from every block.
struct Exchange {
  uint64_t barrier;
  float from[kMaxCluster];
};

__device__ __forceinline__ void open_exchange(Exchange& exchange, uint32_t blocks) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    ptx::barrier_init(&exchange.barrier, 1);
    ptx::fence_barrier_init();
    ptx::arrive_expecting(&exchange.barrier, blocks * sizeof(float));
  }
#endif
}

// `combine` of the blocks' values, in the order of their ranks, in every thread. An exchange can be used only once.
template <class Combine> __device__ __forceinline__ float over_cluster(float value, uint32_t blocks, Exchange& exchange, Combine combine) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x < blocks)
    ptx::send(&exchange.from[ptx::rank_in_cluster()], __float_as_uint(value), &exchange.barrier, threadIdx.x);
  ptx::wait_for_cluster(&exchange.barrier, 0);
  value = exchange.from[0];
  for (uint32_t rank = 1; rank < blocks; ++rank) value = combine(value, exchange.from[rank]);
#endif
  return value;
}

template <class T, int V> __device__ __forceinline__ Wide<T> sum_of(const Vector<T, V>& x) {
  Wide<T> chains[2] = {};  // an addition waits four cycles for the previous one
#pragma unroll
  for (int e = 0; e < V; ++e) chains[e % 2] += widen(x.at[e]);
  return chains[0] + chains[1];
}

template <bool kCentred = false, class T, int V> __device__ __forceinline__ Wide<T> sum_of_squares(const Vector<T, V>& x, Wide<T> mean = 0) {
  Wide<T> chains[2] = {};
#pragma unroll
  for (int e = 0; e < V; ++e) chains[e % 2] += centred<kCentred>(widen(x.at[e]), mean) * centred<kCentred>(widen(x.at[e]), mean);
  return chains[0] + chains[1];
}

template <class T, int V> __device__ __forceinline__ void add_to(Vector<T, V>& x, const Vector<T, V>& residual) {
#pragma unroll
  for (int e = 0; e < V; ++e) x.at[e] = narrow<T>(widen(x.at[e]) + widen(residual.at[e]));
}

template <bool kCentred, class T, int V>
__device__ __forceinline__ void normalise(Wide<T> (&y)[V], const Vector<T, V>& s, const Wide<T> (&w)[V], Moments<Wide<T>> row, bool llama) {
#pragma unroll
  for (int e = 0; e < V; ++e) y[e] = centred<kCentred>(widen(s.at[e]), row.mean) * row.rstd;
  if (!kCentred && llama)
#pragma unroll
    for (int e = 0; e < V; ++e) y[e] = rounded<T>(y[e]);
#pragma unroll
  for (int e = 0; e < V; ++e) y[e] *= w[e];
}

template <class T, int V> __device__ __forceinline__ void store(void* row, int index, const Wide<T> (&y)[V]) {
  Vector<T, V> out;
#pragma unroll
  for (int e = 0; e < V; ++e) out.at[e] = narrow<T>(y[e]);
  static_cast<Vector<T, V>*>(row)[index] = out;
}

// A row's scale from its largest magnitude.
__device__ __forceinline__ float scale_of(float largest) {
  const float scale = largest / kLargestFloat8;
  return scale == 0 ? 1.0f : scale;
}

// Finite for a subnormal scale too, so that zeros stay zeros; NaN of NaN. A division of each element takes as long as everything else.
__device__ __forceinline__ float inverse_of(float scale) {
  const float inverse = 1.0f / scale;
  return inverse > FLT_MAX ? FLT_MAX : inverse;
}

template <int V> __device__ __forceinline__ void store_quantised(void* row, int index, const float (&y)[V], float inverse) {
  if constexpr (V == 1) {
    static_cast<__nv_fp8_storage_t*>(row)[index] = __nv_cvt_float_to_fp8(y[0] * inverse, __NV_SATFINITE, __NV_E4M3);
  } else {
    struct alignas(V) Pairs {
      __nv_fp8x2_storage_t at[V / 2];
    } out;
#pragma unroll
    for (int e = 0; e < V; e += 2)
      out.at[e / 2] = __nv_cvt_float2_to_fp8x2({y[e] * inverse, y[e + 1] * inverse}, __NV_SATFINITE, __NV_E4M3);
    static_cast<Pairs*>(row)[index] = out;
  }
}

// Block (lanes, rows per block), cluster `blocks`: V elements are loaded at a time, K such vectors per thread stay in
// registers, and a block processes a slice of `slice` vectors of a row.
template <class T, int V, int K, Kind kKind>
__global__ void __launch_bounds__(kAnyBlock)
    forward_kernel(const __grid_constant__ Forward call, const Quantised quantised, const int slice, const uint32_t blocks) {
  using A = Wide<T>;
  constexpr bool kCentred = kKind == Kind::layer, kQuantised = kKind == Kind::float8;
  __shared__ A slots[2][32];
  __shared__ Exchange exchanges[2];
  const uint32_t row = blockIdx.x / blocks * blockDim.y + threadIdx.y, rank = blockIdx.x % blocks;
  const bool inside = row < call.shape.rows;
  const int lanes = blockDim.x, lane = threadIdx.x, first = static_cast<int>(rank) * slice;
  const int count = inside ? min(slice, static_cast<int>(call.shape.columns / V) - first) : 0;
  const bool of_type_t = call.shape.weight_type == call.shape.type;
  if (blocks > 1) {
#pragma unroll
    for (int i = 0; i < (kKind == Kind::rms ? 1 : 2); ++i) open_exchange(exchanges[i], blocks);
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    ptx::cluster_arrive_relaxed();
#endif
  }
  const T* x_row = inside ? row_of<T>(call.x, row) : nullptr;
  const T* residual_row = inside && call.residual.data ? row_of<T>(call.residual, row) : nullptr;
  T* s_row = static_cast<T*>(call.s) + row * call.shape.columns;

  Vector<T, V> kept[K];
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (lane + k * lanes < count) kept[k] = vector_of<T, V>(x_row, first + lane + k * lanes);
  if (residual_row) {
    Vector<T, V> residual[K];
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) residual[k] = vector_of<T, V>(residual_row, first + lane + k * lanes);
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) {
        add_to(kept[k], residual[k]);
        reinterpret_cast<Vector<T, V>*>(s_row)[first + lane + k * lanes] = kept[k];
      }
  }
  const auto first_term = [](const Vector<T, V>& s) { return kCentred ? sum_of(s) : sum_of_squares(s); };
  A sum = 0;
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (lane + k * lanes < count) sum += first_term(kept[k]);
#pragma unroll 1
  for (int index = lane + K * lanes; index < count; index += lanes) {
    auto s = vector_of<T, V>(x_row, first + index);
    if (residual_row) {
      add_to(s, vector_of<T, V>(residual_row, first + index));
      reinterpret_cast<Vector<T, V>*>(s_row)[first + index] = s;
    }
    sum += first_term(s);
  }
  const auto over_blocks = [&](A value, int which) {
    value = over_row(value, lanes, slots[which], Add{});
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      if (which == 0) ptx::cluster_wait();  // from here on, every block's barriers are ready
      if constexpr (!std::is_same_v<T, double>) value = over_cluster(value, blocks, exchanges[which], Add{});
    }
#endif
    return value;
  };
  sum = over_blocks(sum, 0);
  const T* again = residual_row ? s_row : x_row;  // the part that did not fit in registers; this thread wrote it to s
  Moments<A> moments = {};
  if constexpr (kCentred) {
    moments.mean = sum / static_cast<A>(call.shape.columns);
    sum = 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) sum += sum_of_squares<true>(kept[k], moments.mean);
#pragma unroll 1
    for (int index = lane + K * lanes; index < count; index += lanes) sum += sum_of_squares<true>(vector_of<T, V>(again, first + index), moments.mean);
    sum = over_blocks(sum, 1);
  }
  moments.rstd = reciprocal_root(sum / static_cast<A>(call.shape.columns) + static_cast<A>(call.eps));
  if (call.rstd && lane == 0 && rank == 0 && inside) {
    if constexpr (kCentred) static_cast<Moments<A>*>(call.rstd)[row] = moments;
    else static_cast<A*>(call.rstd)[row] = moments.rstd;
  }

  const auto finish = [&](A(&y)[V], const Vector<T, V>& s, const A(&w)[V], int index) {
    normalise<kCentred>(y, s, w, moments, call.llama);
    if constexpr (kCentred)
      if (call.bias) {
        A bias[V];
        load_weight<T, V>(bias, {call.bias, 0}, of_type_t, first + index);
#pragma unroll
        for (int e = 0; e < V; ++e) y[e] += bias[e];
      }
  };
  const auto each_vector = [&](auto&& work) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) {
        A y[V], w[V];
        widen_anew(kept[k]);
        load_weight<T, V>(w, call.weight, of_type_t, first + lane + k * lanes);
        finish(y, kept[k], w, lane + k * lanes);
        work(y, first + lane + k * lanes);
      }
#pragma unroll 1
    for (int index = lane + K * lanes; index < count; index += lanes) {
      A y[V], w[V];
      load_weight<T, V>(w, call.weight, of_type_t, first + index);
      finish(y, vector_of<T, V>(again, first + index), w, index);
      work(y, first + index);
    }
  };
  if constexpr (!kQuantised) {
    T* y_row = static_cast<T*>(call.y) + row * call.shape.columns;
    each_vector([&](const A(&y)[V], int index) { store<T, V>(y_row, index, y); });
  } else {
    float scale;
    if (quantised.scale) {
      scale = *quantised.scale;
    } else {
      float largest = 0;
      each_vector([&](const A(&y)[V], int) {
#pragma unroll
        for (int e = 0; e < V; ++e) largest = Larger{}(largest, fabsf(y[e]));
      });
      largest = over_row(largest, lanes, slots[1], Larger{});
      if (blocks > 1) largest = over_cluster(largest, blocks, exchanges[1], Larger{});
      scale = scale_of(largest);
      if (lane == 0 && rank == 0 && inside) quantised.row_scales[row] = scale;
    }
    unsigned char* y_row = static_cast<unsigned char*>(call.y) + row * call.shape.columns;
    each_vector([&, inverse = inverse_of(scale)](const A(&y)[V], int index) { store_quantised<V>(y_row, index, y, inverse); });
  }
}

// The intended number of blocks per multiprocessor; one fewer if the same kernel takes a few more registers.
constexpr int resident(int wanted) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return wanted > 2 ? wanted - 1 : wanted;
#else
  return wanted;
#endif
}

// The arguments of row_kernel: without the options that it does not support, and with divisions done beforehand. Values that
// every row needs come first, because a single row waits for each cache line of constants.
struct RowCall {
  Rows x;
  const void* weight;
  void *y, *rstd;
  int64_t columns;
  uint32_t rows;
  int slice;                   // vectors of a row per block
  float offset, eps, inverse;
  uint32_t blocks;             // of a cluster
  Rows residual;
  void* s;
  const void* bias;
  Quantised quantised;
};

// The common case: whole 16-byte vectors, a row in the registers of a block or a cluster, one rounding, and a weight of type
// W or none. Without the branches and divisions of forward_kernel, twice as many blocks fit on a multiprocessor, and a single
// row takes two thirds of the time. kEarly: the weight is loaded together with x, so that the latencies overlap. kLarge: x is
// larger than the L2 cache; an eviction policy for its loads would slow a single row by 5 %.
template <class T, class W, int K, bool kEarly, bool kResidual, bool kCluster, int kMaxBlock, int kResident, bool kLarge = false, Kind kKind = Kind::rms>
__global__ void __launch_bounds__(kMaxBlock, resident(kResident)) row_kernel(const __grid_constant__ RowCall call) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kCluster) return;  // never launched there
#endif
  constexpr int V = kVector<T>;
  constexpr bool kCentred = kKind == Kind::layer, kQuantised = kKind == Kind::float8;
  using Loaded = Vector<T, V>;
  __shared__ float slots[kKind == Kind::rms ? 32 : 64];
  const int lane = threadIdx.x, lanes = blockDim.x;
  ptx::wait_for_previous_kernel();
#if __CUDA_ARCH__ >= 900
  __shared__ Exchange exchange;
  const uint32_t rank = kCluster ? ptx::rank_in_cluster() : 0;
  if constexpr (kCluster) {
    open_exchange(exchange, call.blocks);
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }
#else
  const uint32_t rank = 0;
#endif
  const uint32_t row = kCluster ? blockIdx.x / call.blocks : blockIdx.x * blockDim.y + threadIdx.y;
  const int first = rank * call.slice;
  const int count = kCluster ? min(call.slice, static_cast<int>(call.columns / V) - first) : row < call.rows ? call.slice : 0;
  const auto at_row = [&](const Rows& rows) {  // no division if there is only one stride
    const T* data = row < static_cast<uint32_t>(rows.inner) ? static_cast<const T*>(rows.data) + row * rows.inner_stride : row_of<T>(rows, row);
    return reinterpret_cast<const Loaded*>(data) + first;
  };
  const auto in_result = [&](void* result) { return reinterpret_cast<Loaded*>(static_cast<T*>(result) + row * call.columns) + first; };

  Loaded kept[K];
  const Loaded* x = at_row(call.x);
  const auto read_once = [policy = ptx::policy_for(kLarge)](const Loaded* row, int index) {
    if constexpr (kLarge) return ptx::load(row + index, policy);
    else return row[index];
  };
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (lane + k * lanes < count) kept[k] = read_once(x, lane + k * lanes);
  const auto* weight = static_cast<const Vector<W, V>*>(call.weight);
  Vector<W, V> early[kEarly ? K : 1];
  if (kEarly && weight) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) early[k] = weight[first + lane + k * lanes];
  }
  if constexpr (kResidual) {
    const Loaded* residual = at_row(call.residual);
    Loaded* s = in_result(call.s);
    Loaded added[K];
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) added[k] = read_once(residual, lane + k * lanes);
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) {
        add_to(kept[k], added[k]);
        s[lane + k * lanes] = kept[k];
      }
  }
  if (gridDim.x <= kFewBlocks) ptx::let_next_kernel_start();
  float sum = 0, mean = 0;
  if constexpr (kCentred) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) mean += sum_of(kept[k]);
    mean = over_row(mean, lanes, slots + 32, Add{}) * call.inverse;
  }
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (lane + k * lanes < count) {
      if constexpr (kCentred) widen_anew(kept[k]);
      sum += sum_of_squares<kCentred>(kept[k], mean);
    }
  sum = over_row(sum, lanes, slots, Add{});
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster) {
    ptx::cluster_wait();  // from here on, every block's barrier is ready
    sum = over_cluster(sum, call.blocks, exchange, Add{});
  }
#endif
  const float rstd = rsqrtf(sum * call.inverse + call.eps);
  if (call.rstd && lane == 0 && rank == 0 && row < call.rows) {
    if constexpr (kCentred) static_cast<float2*>(call.rstd)[row] = {mean, rstd};
    else static_cast<float*>(call.rstd)[row] = rstd;
  }
  const auto finish = [&](auto choice) {  // a choice per element would make each wait for constants
    constexpr bool kWeighted = decltype(choice)::value;
    const auto each_vector = [&](auto&& work) {
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (lane + k * lanes < count) {
          widen_anew(kept[k]);
          float out[V];
          Vector<W, V> w;
          if constexpr (kWeighted && kEarly) {
            widen_anew(early[k]);
            w = early[k];
          } else if constexpr (kWeighted) {
            w = weight[first + lane + k * lanes];
          }
#pragma unroll
          for (int e = 0; e < V; ++e)
            out[e] = centred<kCentred>(widen(kept[k].at[e]), mean) * rstd * (kWeighted ? widen(w.at[e]) + call.offset : 1.0f);
          if constexpr (kCentred)
            if (call.bias) {
              const Vector<W, V> bias = static_cast<const Vector<W, V>*>(call.bias)[first + lane + k * lanes];
#pragma unroll
              for (int e = 0; e < V; ++e) out[e] += widen(bias.at[e]);
            }
          work(lane + k * lanes, out);
        }
    };
    if constexpr (kQuantised) {
      float scale;
      if (call.quantised.scale) {
        scale = *call.quantised.scale;
      } else {
        float largest = 0;
        each_vector([&](int, const float(&out)[V]) {
#pragma unroll
          for (int e = 0; e < V; ++e) largest = Larger{}(largest, fabsf(out[e]));
        });
        scale = scale_of(over_row(largest, lanes, slots + 32, Larger{}));
#if __CUDA_ARCH__ >= 1000
        if constexpr (K > 4) asm volatile("" : "+l"(weight));  // otherwise the addresses of its vectors are kept for the second pass, and spill
#endif
        if (lane == 0 && row < call.rows) call.quantised.row_scales[row] = scale;
      }
      unsigned char* y = static_cast<unsigned char*>(call.y) + row * call.columns;
      each_vector([&, inverse = inverse_of(scale)](int index, const float(&out)[V]) { store_quantised<V>(y, index, out, inverse); });
    } else {
      Loaded* y = in_result(call.y);
      each_vector([&](int index, const float(&out)[V]) { store<T, V>(y, index, out); });
    }
  };
  if (weight) finish(std::true_type{});
  else finish(std::false_type{});
}

int lanes_for(int64_t vectors, int vectors_a_thread, int at_most = kMaxThreads) {
  const int64_t lanes = (vectors + vectors_a_thread - 1) / vectors_a_thread;
  if (lanes > 32) return static_cast<int>(std::min<int64_t>((lanes + 31) / 32 * 32, at_most));
  int power = 1;
  while (power < lanes) power *= 2;
  return power;
}

dim3 block_for(int lanes) { return dim3(lanes, std::max(kSmallBlock / lanes, 1)); }

// All cases that the other kernels do not support: 16 bytes at a time, or single elements. How a row is divided depends only
// on the row, never on the number of rows, so its result is the same in every batch.
template <class T, Kind kKind> void run_any(const Forward& call, bool vectorised) {
  const Shape& shape = call.shape;
  const auto with = [&](auto v, auto k) {
    constexpr int V = decltype(v)::value, K = decltype(k)::value;
    const int64_t vectors = shape.columns / V;
    const bool clusters = limits_of(shape.device).capability >= 90 && !std::is_same_v<T, double>;
    const auto [blocks, slice] = spread_over_cluster(vectors, K * kAnyBlock, clusters ? kMaxCluster : 1);
    const dim3 block = blocks > 1 ? dim3(lanes_for(slice, K, kAnyBlock)) : block_for(lanes_for(slice, K, kAnyBlock));
    const Launch how = {dim3(blocks_for(shape.rows, block.y) * blocks), block, 0, blocks};
    launch<forward_kernel<T, V, K, kKind>>(how, shape.device, shape.stream, call, kKind == Kind::float8 ? *call.quantised : Quantised{}, slice,
                                                static_cast<uint32_t>(blocks));
  };
  if (vectorised) with(std::integral_constant<int, kVector<T>>{}, std::integral_constant<int, sizeof(T) < 4 ? 4 : 2>{});
  else with(std::integral_constant<int, 1>{}, std::integral_constant<int, kKind == Kind::float8 ? 2 : 4>{});
}

// row_kernel with the fastest measured choice for each width (NOTES.md). Returns false if it does not support the call.
template <class T, class W, Kind kKind> bool run_rows(const Forward& call) {
  const Shape& shape = call.shape;
  const int64_t vectors = shape.columns / kVector<T>;
  RowCall rows = {call.x, call.weight.data, call.y, call.rstd, shape.columns, static_cast<uint32_t>(shape.rows), static_cast<int>(vectors),
                  static_cast<float>(call.weight.offset), static_cast<float>(call.eps),
                  1.0f / static_cast<float>(shape.columns), 1, call.residual, call.s, call.bias,
                  kKind == Kind::float8 ? *call.quantised : Quantised{}};
  const bool early = limits_of(shape.device).capability >= 90;  // a single row takes as long as a launch
  const auto alone = [&](auto kernel, int vectors_a_thread) {
    const dim3 block = block_for(lanes_for(vectors, vectors_a_thread));
    launch<decltype(kernel)::value>({dim3(blocks_for(shape.rows, block.y)), block, 0, 1, early}, shape.device, shape.stream, rows);
    return true;
  };
  const bool large = larger_than_l2<T>(shape);
#define ROW_KERNEL(...) \
  std::integral_constant<void (*)(RowCall), row_kernel<T, W, __VA_ARGS__>> {}
#define ALONE(K, ...) (large ? alone(ROW_KERNEL(K, __VA_ARGS__, true, kKind), K) : alone(ROW_KERNEL(K, __VA_ARGS__, false, kKind), K))
  if (call.residual.data) {
    if (vectors <= 2048) return ALONE(2, true, true, false, 1024, 1);
    if (vectors <= 4096) return ALONE(4, false, true, false, 1024, 1);
    if (kKind != Kind::rms || !early || vectors > 2048 * kMaxCluster) return false;
    const auto [blocks, slice] = spread_over_cluster(vectors, 2048, kMaxCluster, 4);
    rows.blocks = blocks;
    rows.slice = slice;
    constexpr auto kernel = row_kernel<T, W, 4, false, true, true, 512, sizeof(W) < 4 ? 3 : 2>;
    const Launch how = {dim3(blocks_for(shape.rows, 1) * rows.blocks), dim3(lanes_for(rows.slice, 4)), 0, blocks, early};
    launch<kernel>(how, shape.device, shape.stream, rows);
    return true;
  }
  // A weight of 32 bytes a vector, beside a bias or a row that waits: loaded early it would spill.
  constexpr bool kHeavy = kKind != Kind::rms && sizeof(W) > sizeof(T);
  if (kKind == Kind::float8 && sizeof(T) < 4) {  // a row waits for two sums: more rows a multiprocessor, with fewer threads each
    if (vectors <= 1024) return ALONE(4, !kHeavy, false, false, 512, 2);
    if (vectors <= 2048) return ALONE(4, false, false, false, 512, 2);
  }
  if (vectors <= 512) return ALONE(2, true, false, false, 512, 3);
  if (vectors <= 2048) return ALONE(4, !kHeavy, false, false, 512, 2);
  if (kKind == Kind::rms && wide_forward(call)) return true;
  if (vectors <= 4096) return ALONE(8, false, false, false, 512, (kHeavy ? 1 : 2));
#undef ALONE
#undef ROW_KERNEL
  return false;
}

template <class T, Kind kKind> void run(const Forward& call) {
  const Shape& shape = call.shape;
  const bool vectorised = shape.columns % kVector<T> == 0 && aligned<T>(call.x) && aligned<T>(call.residual) && aligned(call.y) && aligned(call.s) &&
                          aligned(call.weight.data) && aligned(call.bias);
  if constexpr (!std::is_same_v<T, double>) {
    if (vectorised && !call.llama) {
      if (shape.weight_type == shape.type ? run_rows<T, T, kKind>(call) : run_rows<T, Wide<T>, kKind>(call)) return;
    }
  }
  run_any<T, kKind>(call, vectorised);
}

}  // namespace

void forward(const Forward& call) {
  check_size(call.shape);
  const DeviceGuard guard(call.shape.device);
  visit(call.shape.type, [&](auto zero) {
    using T = decltype(zero);
    if (call.centred) return run<T, Kind::layer>(call);
    if (!call.quantised) return run<T, Kind::rms>(call);
    if constexpr (std::is_same_v<T, double>) throw std::invalid_argument("rms_norm: a float64 row cannot be quantised");
    else run<T, Kind::float8>(call);
  });
}

}  // namespace rms_norm

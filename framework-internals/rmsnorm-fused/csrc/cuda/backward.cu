// RMSNorm backward on a GPU, for the cases that the bulk kernels (backward_bulk.cu) do not support: GPUs before sm_90,
// float64, rows that are very short or not whole 16-byte vectors, and the rounding of `llama`. Also the sum for dweight, the
// last step of both.
//
// backward_kernel    Persistent blocks loop over the rows. Every thread owns the same columns of all rows and keeps their
//                    sums for dweight in registers. The next rows of s and dy are copied into shared memory
//                    asynchronously, so that the memory is busy while the block sums a row. Each thread reads only what it
//                    copied itself, so the ring needs no barrier.
// wide rows          These leave no registers for the sums. One kernel computes a scalar per row, and a second one loops
//                    down the columns for dx and dweight: s and dy are read twice.
// dweight            Each block writes one partial row, and a last kernel adds the partial rows in a fixed order.
#include <cuda_pipeline.h>

#include "backward.cuh"
#include "launch.cuh"
#include "ptx.cuh"

namespace rms_norm {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kSmallBlock = 128;        // threads of a block with several narrow rows
constexpr int kMaxStages = 3;           // rows of s and dy in flight per block, including the current one
constexpr int kPullThreads = 512;       // wide rows: threads of a block that sums a row
constexpr int kTileThreads = 256;       // wide rows: threads of a block that loops down columns
constexpr int kTileBlocks = 2;          // of these blocks per multiprocessor: 128 registers per thread, 64 KiB in flight
constexpr int kTileRows = 4;            // wide rows: rows whose loads are in flight together
constexpr int kReduceThreads = 256;     // threads of a block of the last kernel
constexpr int kReduceRows = 32;         // most of them per column; 8 columns are 32 bytes, the smallest fetch

// dy * w, as the row's sum and dx use it.
template <class T> __device__ __forceinline__ Wide<T> weighted(Wide<T> dy, Wide<T> w, bool llama) {
  return llama ? rounded<T>(dy * w) : dy * w;
}

// s * rstd, as dweight uses it.
template <class T> __device__ __forceinline__ Wide<T> normalised(Wide<T> s, Wide<T> rstd, bool llama) {
  return llama ? rounded<T>(s * rstd) : s * rstd;
}

// dx of one vector; its terms of dweight are added to `sums`.
template <class T, int V>
__device__ __forceinline__ void finish_vector(const Backward& call, uint32_t row, int index, const Vector<T, V>& s, const Vector<T, V>& dy,
                                              const Wide<T> (&w)[V], Wide<T> rstd, Wide<T> pull, Wide<T> (&sums)[V]) {
  using A = Wide<T>;
  A out[V];
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const A dy_e = widen(dy.at[e]), s_e = widen(s.at[e]);
    out[e] = weighted<T>(dy_e, w[e], call.llama) * rstd + s_e * pull;
    sums[e] += dy_e * normalised<T>(s_e, rstd, call.llama);
  }
  if (call.ds.data) {
    const auto ds = vector_of<T, V>(row_of<T>(call.ds, row), index);
#pragma unroll
    for (int e = 0; e < V; ++e) out[e] += widen(ds.at[e]);
  }
  Vector<T, V> narrowed;
#pragma unroll
  for (int e = 0; e < V; ++e) narrowed.at[e] = narrow<T>(out[e]);
  reinterpret_cast<Vector<T, V>*>(static_cast<T*>(call.dx) + row * call.shape.columns)[index] = narrowed;
}

template <class T, int V>
__device__ __forceinline__ Wide<T> sum_of_products(const Backward& call, const Vector<T, V>& s, const Vector<T, V>& dy, const Wide<T> (&w)[V]) {
  Wide<T> sum = 0;
#pragma unroll
  for (int e = 0; e < V; ++e) sum += weighted<T>(widen(dy.at[e]), w[e], call.llama) * widen(s.at[e]);
  return sum;
}

// The factor of s in dx of a row: -rstd^3 * mean(g * s).
template <class A> __device__ __forceinline__ A pull_of(A sum, A rstd, int64_t columns) {
  return -(sum * rstd / static_cast<A>(columns)) * rstd * rstd;  // rstd^3 may underflow
}

// Copies asynchronously if the hardware supports it (4, 8 or 16 bytes), else through a register.
template <class T, int V> __device__ __forceinline__ void copy_to_shared(Vector<T, V>* shared, const T* row, int index) {
  const auto* global = reinterpret_cast<const Vector<T, V>*>(row) + index;
  if constexpr (sizeof(Vector<T, V>) >= 4) __pipeline_memcpy_async(shared, global, sizeof(Vector<T, V>));
  else *shared = *global;
}

// The slots of each thread in the ring: [stage][s, dy][k], with threads adjacent, so that the threads of a warp have no
// bank conflicts.
template <class T, int V, int K> struct Ring {
  Vector<T, V>* slots;
  int threads;

  __device__ __forceinline__ Vector<T, V>* s(int stage, int k) const { return slots + ((stage * 2) * K + k) * threads; }
  __device__ __forceinline__ Vector<T, V>* dy(int stage, int k) const { return slots + ((stage * 2 + 1) * K + k) * threads; }

  __device__ __forceinline__ void fetch(const Backward& call, uint32_t row, int vectors, int stage) const {
    if (row < call.shape.rows) {
      const T* s_row = row_of<T>(call.s, row);
      const T* dy_row = row_of<T>(call.dy, row);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int index = threadIdx.x + k * blockDim.x;
        if (index < vectors) {
          copy_to_shared<T, V>(s(stage, k), s_row, index);
          copy_to_shared<T, V>(dy(stage, k), dy_row, index);
        }
      }
    }
    __pipeline_commit();  // a stage without rows is also a group, because the wait counts groups
  }
};

// For rows that fit in K vectors per thread: columns <= V * K * lanes. Each block writes one partial row of dweight.
template <class T, int V, int K>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(const __grid_constant__ Backward call, const int stages) {
  using A = Wide<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ A slots[2][32];
  const uint32_t rows = static_cast<uint32_t>(call.shape.rows);
  const int64_t columns = call.shape.columns;
  const int vectors = static_cast<int>(columns / V), lanes = blockDim.x, lane = threadIdx.x;
  const int threads = lanes * blockDim.y, thread = threadIdx.y * lanes + lane;
  const uint32_t step = gridDim.x * blockDim.y, first = blockIdx.x * blockDim.y;
  const bool of_type_t = call.shape.weight_type == call.shape.type;
  const A* rstds = static_cast<const A*>(call.rstd);
  const Ring<T, V, K> ring{reinterpret_cast<Vector<T, V>*>(memory) + thread, threads};

  A sums[K][V] = {};
  for (int stage = 0; stage < stages - 1; ++stage) ring.fetch(call, first + stage * step + threadIdx.y, vectors, stage);
  A next_rstd = first + threadIdx.y < rows ? rstds[first + threadIdx.y] : A(0);
  int stage = 0, turn = 0;
  for (uint32_t base = first; base < rows; base += step) {
    const uint32_t row = base + threadIdx.y;
    const int count = row < rows ? vectors : 0;
    const A rstd = next_rstd;
    if (row + step < rows) next_rstd = rstds[row + step];
    // Loads into the stage of the previous row, whose values this thread has used; no other thread reads there.
    ring.fetch(call, row + (stages - 1) * step, vectors, stage == 0 ? stages - 1 : stage - 1);
    if (stages == kMaxStages) __pipeline_wait_prior(kMaxStages - 1);
    else __pipeline_wait_prior(1);

    A sum = 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) {
        A w[V];
        load_weight<T, V>(w, call.weight, of_type_t, lane + k * lanes);
        sum += sum_of_products(call, *ring.s(stage, k), *ring.dy(stage, k), w);
      }
    const A pull = pull_of(over_row(sum, lanes, slots[turn], Add{}), rstd, columns);
    turn ^= 1;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) {
        // Reads shared memory and the cache again: kept across the sum, s, dy and w would need the registers of `sums`.
        A w[V];
        load_weight<T, V>(w, call.weight, of_type_t, lane + k * lanes);
        finish_vector(call, row, lane + k * lanes, *ring.s(stage, k), *ring.dy(stage, k), w, rstd, pull, sums[k]);
      }
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  if (!call.dweight) return;

  // The sums of the block's rows are added in shared memory, in the order of threadIdx.y.
  __pipeline_wait_prior(0);
  __syncthreads();
  A* gathered = reinterpret_cast<A*>(memory);
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (lane + k * lanes < vectors)
#pragma unroll
      for (int e = 0; e < V; ++e) gathered[threadIdx.y * columns + (lane + k * lanes) * V + e] = sums[k][e];
  __syncthreads();
  A* partial = static_cast<A*>(call.workspace) + blockIdx.x * columns;
  for (int column = thread; column < columns; column += threads) {
    A sum = 0;
    for (int y = 0; y < blockDim.y; ++y) sum += gathered[y * columns + column];
    partial[column] = sum;
  }
}

// Wide rows, first kernel: the factor of s in dx of each row. One row per block.
template <class T, int V> __global__ void __launch_bounds__(kPullThreads) pull_kernel(const __grid_constant__ Backward call, Wide<T>* pulls) {
  using A = Wide<T>;
  __shared__ A slots[32];
  const uint32_t row = blockIdx.x;
  const T* s_row = row_of<T>(call.s, row);
  const T* dy_row = row_of<T>(call.dy, row);
  const bool of_type_t = call.shape.weight_type == call.shape.type;
  A sum = 0;
#pragma unroll 4
  for (int index = threadIdx.x; index < static_cast<int>(call.shape.columns / V); index += blockDim.x) {
    A w[V];
    load_weight<T, V>(w, call.weight, of_type_t, index);
    sum += sum_of_products(call, vector_of<T, V>(s_row, index), vector_of<T, V>(dy_row, index), w);
  }
  sum = over_row(sum, blockDim.x, slots, Add{});
  if (threadIdx.x == 0) pulls[row] = pull_of(sum, static_cast<const A*>(call.rstd)[row], call.shape.columns);
}

// Wide rows, second kernel: a block owns V * kTileThreads columns (blockIdx.x) of every gridDim.y-th row. One partial row
// of dweight for each blockIdx.y.
template <class T, int V>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks) tile_kernel(const __grid_constant__ Backward call, const Wide<T>* pulls) {
  using A = Wide<T>;
  const uint32_t rows = static_cast<uint32_t>(call.shape.rows);
  const int64_t columns = call.shape.columns;
  const int index = blockIdx.x * kTileThreads + threadIdx.x;
  if (index >= columns / V) return;
  A w[V], sums[V] = {};
  load_weight<T, V>(w, call.weight, call.shape.weight_type == call.shape.type, index);
  for (uint32_t base = blockIdx.y; base < rows; base += kTileRows * gridDim.y) {
    Vector<T, V> s[kTileRows], dy[kTileRows];
    A rstd[kTileRows], pull[kTileRows];
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      const uint32_t row = base + i * gridDim.y;
      if (row < rows) {
        s[i] = vector_of<T, V>(row_of<T>(call.s, row), index);
        dy[i] = vector_of<T, V>(row_of<T>(call.dy, row), index);
        rstd[i] = static_cast<const A*>(call.rstd)[row];
        pull[i] = pulls[row];
      }
    }
#pragma unroll
    for (int i = 0; i < kTileRows; ++i)
      if (base + i * gridDim.y < rows) finish_vector(call, base + i * gridDim.y, index, s[i], dy[i], w, rstd[i], pull[i], sums);
  }
  if (!call.dweight) return;
  A* partial = static_cast<A*>(call.workspace) + blockIdx.y * columns + static_cast<int64_t>(index) * V;
#pragma unroll
  for (int e = 0; e < V; ++e) partial[e] = sums[e];
}

// dweight of type W. Block (columns, rows): thread y adds the partial rows y, y + rows, ..., then thread 0 adds these.
template <class W, class A> __global__ void __launch_bounds__(kReduceThreads) reduce_kernel(const A* partials, int count, int64_t columns, W* dweight) {
  __shared__ A sums[kReduceThreads];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  ptx::wait_for_previous_kernel();
  A sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int row = threadIdx.y; row < count; row += blockDim.y) sum += partials[row * columns + column];
  }
  sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int y = 1; y < blockDim.y; ++y) sum += sums[y * blockDim.x + threadIdx.x];
  dweight[column] = narrow<W>(static_cast<Wide<W>>(sum));
}

int power_of_two_at_least(int64_t value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// How the kernels of this file divide the pass.
struct Plan {
  int vector;        // elements per load
  bool wide;         // the two kernels for wide rows
  dim3 block, grid;  // of backward_kernel, or of tile_kernel
  int stages;
  size_t shared;
  int64_t partials;   // partial rows of dweight, at the start of the workspace
  int64_t workspace;  // bytes
};

// Vectors of a row that a thread of backward_kernel owns: 32 bytes of s, or as many single elements as 64 registers allow.
template <class T, int V> constexpr int kBackwardVectors = V > 1 ? 2 : sizeof(T) == 8 ? 4 : 8;

template <class T> void plan_wide(const Shape& shape, int64_t vectors, int multiprocessors, Plan& plan) {
  plan.block = dim3(kTileThreads);
  const int64_t tiles = (vectors + kTileThreads - 1) / kTileThreads;
  const int64_t wanted = (int64_t{multiprocessors} * kTileBlocks + tiles - 1) / tiles;
  plan.grid = dim3(static_cast<unsigned>(tiles), blocks_for(shape.rows, kTileRows, std::min<int64_t>(wanted, 65535)));
}

template <class T> Plan plan_for(const Backward& call) {
  using A = Wide<T>;
  const Shape& shape = call.shape;
  const DeviceLimits& limits = limits_of(shape.device);
  const bool vectorised = shape.columns % kVector<T> == 0 && aligned<T>(call.s) && aligned<T>(call.dy) && aligned<T>(call.ds) &&
                          aligned(call.dx) && aligned(call.weight.data);
  Plan plan = {};
  plan.vector = vectorised ? kVector<T> : 1;
  const int held = vectorised ? kBackwardVectors<T, kVector<T>> : kBackwardVectors<T, 1>;
  const int64_t vectors = shape.columns / plan.vector;
  const int lanes = std::min(power_of_two_at_least((vectors + held - 1) / held), kMaxThreads);
  plan.block = dim3(lanes, std::max(kSmallBlock / lanes, 1));
  const int threads = plan.block.x * plan.block.y;
  const size_t stage = size_t{2} * held * plan.vector * sizeof(T) * threads;
  const size_t limit = limits.shared_a_block - 2048;  // `slots`, and the system's share
  plan.stages = static_cast<int>(std::min<size_t>(limit / stage, kMaxStages));
  plan.wide = vectors > int64_t{held} * plan.block.x || plan.stages < 2;
  if (plan.wide) {
    plan_wide<T>(shape, vectors, limits.multiprocessors, plan);
  } else {
    // The sums of all rows of the block reuse the ring: columns * block.y elements of the accumulating type.
    plan.shared = std::max(stage * plan.stages, size_t{plan.block.y} * shape.columns * sizeof(A));
    const int by_registers = kMaxThreads / threads;  // the launch bound gives each thread 64 registers
    const int by_memory = static_cast<int>(limits.shared_a_multiprocessor / (plan.shared + 2048));
    plan.grid = dim3(blocks_for(shape.rows, plan.block.y, int64_t{limits.multiprocessors} * std::max(std::min(by_registers, by_memory), 1)));
  }
  plan.partials = plan.wide ? plan.grid.y : plan.grid.x;
  const int64_t accumulators = (call.dweight ? plan.partials * shape.columns : 0) + (plan.wide ? shape.rows : 0);
  plan.workspace = accumulators * static_cast<int64_t>(sizeof(A));
  return plan;
}

template <class T, int V> void run(const Backward& call, const Plan& plan) {
  using A = Wide<T>;
  const Shape& shape = call.shape;
  if (plan.wide) {
    A* pulls = static_cast<A*>(call.workspace) + (call.dweight ? plan.partials * shape.columns : 0);
    launch<pull_kernel<T, V>>({dim3(blocks_for(shape.rows, 1)), dim3(kPullThreads)}, shape.device, shape.stream, call, pulls);
    launch<tile_kernel<T, V>>({plan.grid, plan.block}, shape.device, shape.stream, call, pulls);
  } else {
    launch<backward_kernel<T, V, kBackwardVectors<T, V>>>({plan.grid, plan.block, plan.shared}, shape.device, shape.stream, call, plan.stages);
  }
}

template <class W, class A> void reduce(const Backward& call, int64_t partials) {
  const Shape& shape = call.shape;
  const bool early = limits_of(shape.device).capability >= 90;
  const int rows = std::min(power_of_two_at_least((partials + 3) / 4), kReduceRows), columns = kReduceThreads / rows;
  launch<reduce_kernel<W, A>>({dim3(blocks_for(shape.columns, columns)), dim3(columns, rows), 0, 1, early}, shape.device, shape.stream,
                              static_cast<const A*>(call.workspace), static_cast<int>(partials), shape.columns,
                              static_cast<W*>(call.dweight));
}

}  // namespace

int64_t backward_workspace(const Backward& call) {
  check_size(call.shape);
  const DeviceGuard guard(call.shape.device);  // shared-memory attributes and cluster counts apply to the current device
  if (const auto bytes = bulk_workspace(call)) return *bytes;
  int64_t bytes = 0;
  visit(call.shape.type, [&](auto zero) { bytes = plan_for<decltype(zero)>(call).workspace; });
  return bytes;
}

void backward(const Backward& call) {
  const DeviceGuard guard(call.shape.device);
  std::optional<int64_t> partials = bulk_backward(call);
  visit(call.shape.type, [&](auto zero) {
    using T = decltype(zero);
    if (!partials) {
      const Plan plan = plan_for<T>(call);
      if (plan.vector == 1) run<T, 1>(call, plan);
      else run<T, kVector<T>>(call, plan);
      partials = plan.partials;
    }
    if (!call.dweight) return;
    if (call.shape.weight_type == call.shape.type) reduce<T, Wide<T>>(call, *partials);
    else reduce<Wide<T>, Wide<T>>(call, *partials);
  });
}

}  // namespace rms_norm

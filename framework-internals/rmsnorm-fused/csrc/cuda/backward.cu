// RMSNorm and layer normalisation (kCentred) backward on a GPU, for the cases that the bulk kernels (backward_bulk.cu) do not support: GPUs before sm_90,
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
constexpr int kWideReduceRows = 8;      // the same where there are enough columns for all multiprocessors
constexpr int kWideReduce = 16384;      // columns

// dy * w, as the row's sum and dx use it.
template <class T> __device__ __forceinline__ Wide<T> weighted(Wide<T> dy, Wide<T> w, bool llama) {
  return llama ? rounded<T>(dy * w) : dy * w;
}

// c * rstd, as dweight uses it.
template <class T> __device__ __forceinline__ Wide<T> normalised(Wide<T> c, Wide<T> rstd, bool llama) {
  return llama ? rounded<T>(c * rstd) : c * rstd;
}

// What a thread adds up over the rows for a vector of columns: dweight and, if centred, dbias.
template <class A, int V, bool kCentred> struct Totals {
  A weight[V] = {}, bias[kCentred ? V : 1] = {};
};

// The sums over a row of g * c and, if centred, of g.
template <class A> struct Sums {
  A products, gradients;
};

// dx of a row is g * rstd + c * pull + level.
template <class A> struct Factors {
  A pull, level;
};

// dx of one vector; its terms of dweight and dbias are added to `totals`.
template <bool kCentred, class T, int V>
__device__ __forceinline__ void finish_vector(const Backward& call, uint32_t row, int index, const Vector<T, V>& s, const Vector<T, V>& dy,
                                              const Wide<T> (&w)[V], Moments<Wide<T>> moments, Factors<Wide<T>> factors,
                                              Totals<Wide<T>, V, kCentred>& totals) {
  using A = Wide<T>;
  const bool llama = !kCentred && call.llama;
  A out[V];
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const A dy_e = widen(dy.at[e]), c_e = centred<kCentred>(widen(s.at[e]), moments.mean);
    out[e] = weighted<T>(dy_e, w[e], llama) * moments.rstd + c_e * factors.pull;
    totals.weight[e] += dy_e * normalised<T>(c_e, moments.rstd, llama);
    if constexpr (kCentred) {
      out[e] += factors.level;
      totals.bias[e] += dy_e;
    }
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

template <bool kCentred, class T, int V>
__device__ __forceinline__ void add_to(Sums<Wide<T>>& sums, const Backward& call, const Vector<T, V>& s, const Vector<T, V>& dy, const Wide<T> (&w)[V],
                                       Wide<T> mean) {
  Wide<T> products = 0;
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const Wide<T> g = weighted<T>(widen(dy.at[e]), w[e], !kCentred && call.llama);
    products += g * centred<kCentred>(widen(s.at[e]), mean);
    if constexpr (kCentred) sums.gradients += g;
  }
  sums.products += products;
}

// The factors of a row's lanes; `slots` has room for two sums.
template <bool kCentred, class A>
__device__ __forceinline__ Factors<A> factors_of(Sums<A> sums, int lanes, A (*slots)[32], A rstd, int64_t columns) {
  sums.products = over_row(sums.products, lanes, slots[0], Add{});
  const A pull = -(sums.products * rstd / static_cast<A>(columns)) * rstd * rstd;  // rstd^3 may underflow
  if constexpr (!kCentred) return {pull, A(0)};
  sums.gradients = over_row(sums.gradients, lanes, slots[kCentred ? 1 : 0], Add{});
  return {pull, -(sums.gradients / static_cast<A>(columns)) * rstd};
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
template <class T, int V, int K, bool kCentred>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(const __grid_constant__ Backward call, const int stages) {
  using A = Wide<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kParameters = kCentred ? 2 : 1;
  __shared__ A slots[2][kParameters][32];
  const uint32_t rows = static_cast<uint32_t>(call.shape.rows);
  const int64_t columns = call.shape.columns;
  const int vectors = static_cast<int>(columns / V), lanes = blockDim.x, lane = threadIdx.x;
  const int threads = lanes * blockDim.y, thread = threadIdx.y * lanes + lane;
  const uint32_t step = gridDim.x * blockDim.y, first = blockIdx.x * blockDim.y;
  const bool of_type_t = call.shape.weight_type == call.shape.type;
  const A* rstds = static_cast<const A*>(call.rstd);
  const Ring<T, V, K> ring{reinterpret_cast<Vector<T, V>*>(memory) + thread, threads};

  Totals<A, V, kCentred> totals[K];
  for (int stage = 0; stage < stages - 1; ++stage) ring.fetch(call, first + stage * step + threadIdx.y, vectors, stage);
  Moments<A> next = {};
  if (first + threadIdx.y < rows) next = moments_of<kCentred>(rstds, first + threadIdx.y);
  int stage = 0, turn = 0;
  for (uint32_t base = first; base < rows; base += step) {
    const uint32_t row = base + threadIdx.y;
    const int count = row < rows ? vectors : 0;
    const Moments<A> moments = next;
    if (row + step < rows) next = moments_of<kCentred>(rstds, row + step);
    // Loads into the stage of the previous row, whose values this thread has used; no other thread reads there.
    ring.fetch(call, row + (stages - 1) * step, vectors, stage == 0 ? stages - 1 : stage - 1);
    if (stages == kMaxStages) __pipeline_wait_prior(kMaxStages - 1);
    else __pipeline_wait_prior(1);

    Sums<A> sums = {};
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) {
        A w[V];
        load_weight<T, V>(w, call.weight, of_type_t, lane + k * lanes);
        add_to<kCentred>(sums, call, *ring.s(stage, k), *ring.dy(stage, k), w, moments.mean);
      }
    const Factors<A> factors = factors_of<kCentred>(sums, lanes, slots[turn], moments.rstd, columns);
    turn ^= 1;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) {
        // Reads shared memory and the cache again: kept across the sum, s, dy and w would need the registers of `totals`.
        A w[V];
        load_weight<T, V>(w, call.weight, of_type_t, lane + k * lanes);
        finish_vector<kCentred>(call, row, lane + k * lanes, *ring.s(stage, k), *ring.dy(stage, k), w, moments, factors, totals[k]);
      }
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  if (!call.dweight) return;

  // The sums of the block's rows are added in shared memory, in the order of threadIdx.y.
  __pipeline_wait_prior(0);
  __syncthreads();
  A* gathered = reinterpret_cast<A*>(memory);
  const int row_total = kParameters * static_cast<int>(columns);  // dweight, then dbias
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (lane + k * lanes < vectors)
#pragma unroll
      for (int e = 0; e < V; ++e) {
        A* at = gathered + threadIdx.y * row_total + (lane + k * lanes) * V + e;
        at[0] = totals[k].weight[e];
        if constexpr (kCentred) at[columns] = totals[k].bias[e];
      }
  __syncthreads();
  A* partial = static_cast<A*>(call.workspace) + static_cast<int64_t>(blockIdx.x) * row_total;
  for (int column = thread; column < row_total; column += threads) {
    A sum = 0;
    for (int y = 0; y < blockDim.y; ++y) sum += gathered[y * row_total + column];
    partial[column] = sum;
  }
}

// Wide rows, first kernel: the factors of each row. One row per block.
template <class T, int V, bool kCentred>
__global__ void __launch_bounds__(kPullThreads) pull_kernel(const __grid_constant__ Backward call, Factors<Wide<T>>* factors) {
  using A = Wide<T>;
  __shared__ A slots[kCentred ? 2 : 1][32];
  const uint32_t row = blockIdx.x;
  const A* kept = static_cast<const A*>(call.rstd);
  const A mean = moments_of<kCentred>(kept, row).mean;
  const T* s_row = row_of<T>(call.s, row);
  const T* dy_row = row_of<T>(call.dy, row);
  const bool of_type_t = call.shape.weight_type == call.shape.type;
  Sums<A> sums = {};
#pragma unroll(kCentred && sizeof(T) == 8 ? 2 : 4)
  for (int index = threadIdx.x; index < static_cast<int>(call.shape.columns / V); index += blockDim.x) {
    A w[V];
    load_weight<T, V>(w, call.weight, of_type_t, index);
    add_to<kCentred>(sums, call, vector_of<T, V>(s_row, index), vector_of<T, V>(dy_row, index), w, mean);
  }
  const Factors<A> of_row = factors_of<kCentred>(sums, blockDim.x, slots, moments_of<kCentred>(kept, row).rstd, call.shape.columns);
  if (threadIdx.x == 0) factors[row] = of_row;
}

// Wide rows, second kernel: a block owns V * kTileThreads columns (blockIdx.x) of every gridDim.y-th row. One partial row
// of dweight for each blockIdx.y.
template <class T, int V, bool kCentred>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks) tile_kernel(const __grid_constant__ Backward call, const Factors<Wide<T>>* factors) {
  using A = Wide<T>;
  const uint32_t rows = static_cast<uint32_t>(call.shape.rows);
  const int64_t columns = call.shape.columns;
  const int index = blockIdx.x * kTileThreads + threadIdx.x;
  if (index >= columns / V) return;
  A w[V];
  Totals<A, V, kCentred> totals;
  load_weight<T, V>(w, call.weight, call.shape.weight_type == call.shape.type, index);
  for (uint32_t base = blockIdx.y; base < rows; base += kTileRows * gridDim.y) {
    Vector<T, V> s[kTileRows], dy[kTileRows];
    Moments<A> moments[kTileRows];
    Factors<A> of_row[kTileRows];
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      const uint32_t row = base + i * gridDim.y;
      if (row < rows) {
        s[i] = vector_of<T, V>(row_of<T>(call.s, row), index);
        dy[i] = vector_of<T, V>(row_of<T>(call.dy, row), index);
        moments[i] = moments_of<kCentred>(static_cast<const A*>(call.rstd), row);
        of_row[i] = factors[row];
      }
    }
#pragma unroll
    for (int i = 0; i < kTileRows; ++i)
      if (base + i * gridDim.y < rows) finish_vector<kCentred>(call, base + i * gridDim.y, index, s[i], dy[i], w, moments[i], of_row[i], totals);
  }
  if (!call.dweight) return;
  A* partial = static_cast<A*>(call.workspace) + blockIdx.y * (kCentred ? 2 : 1) * columns + static_cast<int64_t>(index) * V;
#pragma unroll
  for (int e = 0; e < V; ++e) {
    partial[e] = totals.weight[e];
    if constexpr (kCentred) partial[columns + e] = totals.bias[e];
  }
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

// Vectors of a row that a thread of backward_kernel owns: 32 bytes of s, or as many single elements as 64 registers allow; half with dbias.
template <class T, int V, bool kCentred> constexpr int kBackwardVectors = (V > 1 ? 2 : sizeof(T) == 8 ? 4 : 8) / (kCentred ? 2 : 1);

int64_t parameters_of(const Backward& call) { return call.centred ? 2 : 1; }

template <class T> void plan_wide(const Shape& shape, int64_t vectors, int multiprocessors, Plan& plan) {
  plan.block = dim3(kTileThreads);
  const int64_t tiles = (vectors + kTileThreads - 1) / kTileThreads;
  const int64_t wanted = (int64_t{multiprocessors} * kTileBlocks + tiles - 1) / tiles;
  plan.grid = dim3(static_cast<unsigned>(tiles), blocks_for(shape.rows, kTileRows, std::min<int64_t>(wanted, 65535)));
}

template <class T, bool kCentred> Plan plan_for(const Backward& call) {
  using A = Wide<T>;
  const Shape& shape = call.shape;
  const DeviceLimits& limits = limits_of(shape.device);
  const bool vectorised = shape.columns % kVector<T> == 0 && aligned<T>(call.s) && aligned<T>(call.dy) && aligned<T>(call.ds) &&
                          aligned(call.dx) && aligned(call.weight.data);
  Plan plan = {};
  plan.vector = vectorised ? kVector<T> : 1;
  const int held = vectorised ? kBackwardVectors<T, kVector<T>, kCentred> : kBackwardVectors<T, 1, kCentred>;
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
    plan.shared = std::max(stage * plan.stages, size_t{plan.block.y} * parameters_of(call) * shape.columns * sizeof(A));
    const int by_registers = kMaxThreads / threads;  // the launch bound gives each thread 64 registers
    const int by_memory = static_cast<int>(limits.shared_a_multiprocessor / (plan.shared + 2048));
    plan.grid = dim3(blocks_for(shape.rows, plan.block.y, int64_t{limits.multiprocessors} * std::max(std::min(by_registers, by_memory), 1)));
  }
  plan.partials = plan.wide ? plan.grid.y : plan.grid.x;
  const int64_t accumulators = (call.dweight ? plan.partials * parameters_of(call) * shape.columns : 0) + (plan.wide ? 2 * shape.rows : 0);
  plan.workspace = accumulators * static_cast<int64_t>(sizeof(A));
  return plan;
}

template <class T, int V, bool kCentred> void run(const Backward& call, const Plan& plan) {
  using A = Wide<T>;
  const Shape& shape = call.shape;
  if (plan.wide) {
    A* after = static_cast<A*>(call.workspace) + (call.dweight ? plan.partials * parameters_of(call) * shape.columns : 0);
    auto* factors = reinterpret_cast<Factors<A>*>(after);
    launch<pull_kernel<T, V, kCentred>>({dim3(blocks_for(shape.rows, 1)), dim3(kPullThreads)}, shape.device, shape.stream, call, factors);
    launch<tile_kernel<T, V, kCentred>>({plan.grid, plan.block}, shape.device, shape.stream, call, factors);
  } else {
    launch<backward_kernel<T, V, kBackwardVectors<T, V, kCentred>, kCentred>>({plan.grid, plan.block, plan.shared}, shape.device, shape.stream, call, plan.stages);
  }
}

// Returns the number of partial rows of the parameters' gradients.
template <class T, bool kCentred> int64_t run(const Backward& call) {
  const Plan plan = plan_for<T, kCentred>(call);
  if (plan.vector == 1) run<T, 1, kCentred>(call, plan);
  else run<T, kVector<T>, kCentred>(call, plan);
  return plan.partials;
}

template <class W, class A> void reduce(const Backward& call, int64_t partials) {
  const Shape& shape = call.shape;
  const bool early = limits_of(shape.device).capability >= 90;
  const int64_t total = parameters_of(call) * shape.columns;
  const int most = total < kWideReduce ? kReduceRows : kWideReduceRows;
  const int rows = std::min(power_of_two_at_least((partials + 3) / 4), most), columns = kReduceThreads / rows;
  launch<reduce_kernel<W, A>>({dim3(blocks_for(total, columns)), dim3(columns, rows), 0, 1, early}, shape.device, shape.stream,
                              static_cast<const A*>(call.workspace), static_cast<int>(partials), total,
                              static_cast<W*>(call.dweight));
}

}  // namespace

int64_t backward_workspace(const Backward& call) {
  check_size(call.shape);
  const DeviceGuard guard(call.shape.device);  // shared-memory attributes and cluster counts apply to the current device
  if (const auto bytes = bulk_workspace(call)) return *bytes;
  int64_t bytes = 0;
  visit(call.shape.type, [&](auto zero) {
    using T = decltype(zero);
    bytes = (call.centred ? plan_for<T, true>(call) : plan_for<T, false>(call)).workspace;
  });
  return bytes;
}

void backward(const Backward& call) {
  const DeviceGuard guard(call.shape.device);
  std::optional<int64_t> partials = bulk_backward(call);
  visit(call.shape.type, [&](auto zero) {
    using T = decltype(zero);
    if (!partials) partials = call.centred ? run<T, true>(call) : run<T, false>(call);
    if (!call.dweight) return;
    if (call.shape.weight_type == call.shape.type) reduce<T, Wide<T>>(call, *partials);
    else reduce<Wide<T>, Wide<T>>(call, *partials);
  });
}

}  // namespace rms_norm

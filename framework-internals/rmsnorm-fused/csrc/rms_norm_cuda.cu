// RMSNorm on a GPU. Memory is the limit: forward reads x once and writes y, backward reads x and dy once and writes dx.
//
// forward        A row belongs to `lanes` threads, which keep it in registers between the sum and the product. Rows too
//                wide for that (over 65536 bfloat16) are read a second time.
// backward       Persistent blocks walk over the rows; every thread owns the same columns of all of them, and with them
//                a sum for dweight in registers. The coming rows of x and dy are copied into shared memory
//                asynchronously, so that the memory is busy while the block adds up a row. Each thread reads there what
//                it copied itself: the ring needs no barrier.
// wide backward  Rows over 16384 bfloat16 do not leave room for those sums. One kernel finds each row's scalar, a second
//                walks down columns for dx and dweight: x and dy are read twice.
// dweight        Each block writes one partial row, and a last kernel adds the partial rows in a fixed order: equal
//                inputs give equal bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "rms_norm.h"

namespace rms_norm {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kSmallBlock = 128;        // threads of a block that holds several narrow rows
constexpr int kForwardVectors = 4;      // vectors of x that a thread keeps; twice as many in rows of over 4096 vectors
constexpr int kMaxStages = 3;           // rows of x and dy in flight a block, the current one included
constexpr int kPullThreads = 512;       // wide backward: threads of a block that adds up a row
constexpr int kTileThreads = 256;       // wide backward: threads of a block that walks down columns
constexpr int kTileBlocks = 2;          // of these that share a multiprocessor: 128 registers a thread, 64 KiB in flight
constexpr int kTileRows = 4;            // wide backward: rows whose loads are in flight together
constexpr int kReduceColumns = 8;       // columns of one block of the last kernel: 32 bytes, the least a load fetches
constexpr int kReduceRows = 32;

template <class T> using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T> __device__ __forceinline__ T narrow(Wide<T> value) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(value);
  else return value;
}

__device__ __forceinline__ float reciprocal_root(float value) { return rsqrtf(value); }
__device__ __forceinline__ double reciprocal_root(double value) { return 1.0 / sqrt(value); }

// Of 16 bytes or fewer it is loaded at once; two such loads make 32 bytes (a float weight beside bfloat16).
template <class T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Vector {
  T at[V];
};

// Rows are counted in 32 bits (forward() and backward() see to that): dividing 64-bit numbers takes many registers.
template <class T> __device__ __forceinline__ const T* row_of(const Rows& rows, uint32_t row) {
  const uint32_t inner = static_cast<uint32_t>(rows.inner), outer = row / inner;
  return static_cast<const T*>(rows.data) + outer * rows.outer_stride + (row - outer * inner) * rows.inner_stride;
}

template <class T, int V> __device__ __forceinline__ Vector<T, V> vector_of(const T* row, int index) {
  return reinterpret_cast<const Vector<T, V>*>(row)[index];
}

// Makes the compiler forget what it knows of `x`. Otherwise it keeps the widened elements of the first pass for the
// second one, at twice the registers, and spills.
template <class T, int V> __device__ __forceinline__ void widen_anew(Vector<T, V>& x) {
  if constexpr (sizeof(T) < 4 && V > 1) {
    static_assert(sizeof(x) % 4 == 0);
#pragma unroll
    for (int word = 0; word < static_cast<int>(sizeof(x) / 4); ++word) asm volatile("" : "+r"(reinterpret_cast<uint32_t*>(&x)[word]));
  }
}

// The sum of `value` over the `lanes` threads (a power of two) of a row, in all of them; every row of the block has slots
// of its own. `slots` holds 32 values and must not be the one of the call before: a slow thread may still read there.
template <class A> __device__ __forceinline__ A row_sum(A value, int lanes, A* slots) {
  for (int offset = min(lanes, 32) / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (lanes <= 32) return value;
  const int lane = threadIdx.x % 32, warps = lanes / 32;
  slots += threadIdx.y * warps;
  if (lane == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < warps ? slots[lane] : A(0);
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <class T, int V> __device__ __forceinline__ Wide<T> sum_of_squares(const Vector<T, V>& x) {
  Wide<T> sum = 0;
#pragma unroll
  for (int e = 0; e < V; ++e) sum += widen(x.at[e]) * widen(x.at[e]);
  return sum;
}

template <class T, class W, int V>
__device__ __forceinline__ void store_normalised(T* y, const Vector<T, V>& x, const W* weight, int index, Wide<T> rstd) {
  Vector<T, V> out;
  if (weight) {
    const auto w = vector_of<W, V>(weight, index);
#pragma unroll
    for (int e = 0; e < V; ++e) out.at[e] = narrow<T>(widen(x.at[e]) * rstd * static_cast<Wide<T>>(widen(w.at[e])));
  } else {
#pragma unroll
    for (int e = 0; e < V; ++e) out.at[e] = narrow<T>(widen(x.at[e]) * rstd);
  }
  reinterpret_cast<Vector<T, V>*>(y)[index] = out;
}

// Block (lanes, rows a block). V elements are loaded at a time; K such vectors a thread stay in registers.
template <class T, class W, int V, int K> __global__ void __launch_bounds__(kMaxThreads) forward_kernel(const Forward call) {
  using A = Wide<T>;
  __shared__ A slots[2][32];
  const uint32_t rows = static_cast<uint32_t>(call.shape.rows);
  const int64_t columns = call.shape.columns;
  const int vectors = static_cast<int>(columns / V), lanes = blockDim.x, lane = threadIdx.x;
  const W* weight = static_cast<const W*>(call.weight);
  int turn = 0;
  // The bound is the same for all threads of a block: all of them must come to the barrier in row_sum.
  for (uint32_t first = blockIdx.x * blockDim.y; first < rows; first += gridDim.x * blockDim.y) {
    const uint32_t row = first + threadIdx.y;
    const int count = row < rows ? vectors : 0;
    const T* x = row < rows ? row_of<T>(call.x, row) : nullptr;
    T* y = static_cast<T*>(call.y) + row * columns;
    Vector<T, V> kept[K];
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) kept[k] = vector_of<T, V>(x, lane + k * lanes);
    A sum = 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) sum += sum_of_squares(kept[k]);
    for (int index = lane + K * lanes; index < count; index += lanes) sum += sum_of_squares(vector_of<T, V>(x, index));
    const A rstd = reciprocal_root(row_sum(sum, lanes, slots[turn]) / static_cast<A>(columns) + static_cast<A>(call.eps));
    turn ^= 1;
    if (lane == 0 && row < rows) static_cast<A*>(call.rstd)[row] = rstd;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) {
        widen_anew(kept[k]);
        store_normalised(y, kept[k], weight, lane + k * lanes, rstd);
      }
    for (int index = lane + K * lanes; index < count; index += lanes)
      store_normalised(y, vector_of<T, V>(x, index), weight, index, rstd);
  }
}

// Asynchronously where the hardware can (4, 8 or 16 bytes), else through a register.
template <class T, int V> __device__ __forceinline__ void copy_to_shared(Vector<T, V>* shared, const T* row, int index) {
  const auto* global = reinterpret_cast<const Vector<T, V>*>(row) + index;
  if constexpr (sizeof(Vector<T, V>) >= 4) __pipeline_memcpy_async(shared, global, sizeof(Vector<T, V>));
  else *shared = *global;
}

// Each thread's own slots of the ring: [stage][x, dy][k], thread by thread adjacent, so that no two threads of a warp
// meet in a bank.
template <class T, int V, int K> struct Ring {
  Vector<T, V>* slots;
  int threads;

  __device__ __forceinline__ Vector<T, V>* x(int stage, int k) const { return slots + ((stage * 2) * K + k) * threads; }
  __device__ __forceinline__ Vector<T, V>* dy(int stage, int k) const { return slots + ((stage * 2 + 1) * K + k) * threads; }

  __device__ __forceinline__ void fetch(const Backward& call, uint32_t row, int vectors, int stage) const {
    if (row < call.shape.rows) {
      const T* x_row = row_of<T>(call.x, row);
      const T* dy_row = row_of<T>(call.dy, row);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int index = threadIdx.x + k * blockDim.x;
        if (index < vectors) {
          copy_to_shared<T, V>(x(stage, k), x_row, index);
          copy_to_shared<T, V>(dy(stage, k), dy_row, index);
        }
      }
    }
    __pipeline_commit();  // a stage without rows is a group too: the wait counts groups
  }
};

// All that K vectors a thread hold of a row fit: columns <= V * K * lanes. One partial row of dweight a block.
template <class T, class W, int V, int K>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(const Backward call, const int stages) {
  using A = Wide<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ A slots[2][32];
  const uint32_t rows = static_cast<uint32_t>(call.shape.rows);
  const int64_t columns = call.shape.columns;
  const int vectors = static_cast<int>(columns / V), lanes = blockDim.x, lane = threadIdx.x;
  const int threads = lanes * blockDim.y, thread = threadIdx.y * lanes + lane;
  const uint32_t step = gridDim.x * blockDim.y, first = blockIdx.x * blockDim.y;
  const A* rstds = static_cast<const A*>(call.rstd);
  const Ring<T, V, K> ring{reinterpret_cast<Vector<T, V>*>(memory) + thread, threads};

  Vector<W, V> weight[K];
  A sums[K][V];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (call.weight && lane + k * lanes < vectors) weight[k] = vector_of<W, V>(static_cast<const W*>(call.weight), lane + k * lanes);
    else
#pragma unroll
      for (int e = 0; e < V; ++e) weight[k].at[e] = narrow<W>(Wide<W>(1));
#pragma unroll
    for (int e = 0; e < V; ++e) sums[k][e] = 0;
  }

  for (int stage = 0; stage < stages - 1; ++stage) ring.fetch(call, first + stage * step + threadIdx.y, vectors, stage);
  A next_rstd = first + threadIdx.y < rows ? rstds[first + threadIdx.y] : A(0);
  int stage = 0, turn = 0;
  for (uint32_t base = first; base < rows; base += step) {
    const uint32_t row = base + threadIdx.y;
    const int count = row < rows ? vectors : 0;
    const A rstd = next_rstd;
    if (row + step < rows) next_rstd = rstds[row + step];
    // Into the stage of the row before, whose every value this thread has used: nobody else reads there.
    ring.fetch(call, row + (stages - 1) * step, vectors, stage == 0 ? stages - 1 : stage - 1);
    if (stages == kMaxStages) __pipeline_wait_prior(kMaxStages - 1);
    else __pipeline_wait_prior(1);

    A sum = 0;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) {
        const auto x = *ring.x(stage, k), dy = *ring.dy(stage, k);
        widen_anew(weight[k]);
#pragma unroll
        for (int e = 0; e < V; ++e) sum += widen(dy.at[e]) * static_cast<A>(widen(weight[k].at[e])) * widen(x.at[e]);
      }
    const A pull = -rstd * rstd * rstd * (row_sum(sum, lanes, slots[turn]) / static_cast<A>(columns));
    turn ^= 1;
    Vector<T, V>* dx = reinterpret_cast<Vector<T, V>*>(static_cast<T*>(call.dx) + row * columns);
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (lane + k * lanes < count) {
        // From shared memory again: held across the sum, x and dy would take the registers of the sums for dweight.
        const auto x = *ring.x(stage, k), dy = *ring.dy(stage, k);
        Vector<T, V> out;
        widen_anew(weight[k]);
#pragma unroll
        for (int e = 0; e < V; ++e) {
          const A g = widen(dy.at[e]) * rstd;
          out.at[e] = narrow<T>(g * static_cast<A>(widen(weight[k].at[e])) + widen(x.at[e]) * pull);
          sums[k][e] += g * widen(x.at[e]);
        }
        dx[lane + k * lanes] = out;
      }
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  if (!call.dweight) return;

  // The block's rows side by side meet in shared memory, in the order of threadIdx.y.
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

// Wide rows, first kernel: each row's -rstd^3 * mean(dy * weight * x). One row a block.
template <class T, class W, int V> __global__ void __launch_bounds__(kPullThreads) pull_kernel(const Backward call, Wide<T>* pulls) {
  using A = Wide<T>;
  __shared__ A slots[2][32];
  const int vectors = static_cast<int>(call.shape.columns / V);
  const W* weight = static_cast<const W*>(call.weight);
  int turn = 0;
  for (uint32_t row = blockIdx.x; row < call.shape.rows; row += gridDim.x) {
    const T* x_row = row_of<T>(call.x, row);
    const T* dy_row = row_of<T>(call.dy, row);
    A sum = 0;
#pragma unroll 4
    for (int index = threadIdx.x; index < vectors; index += blockDim.x) {
      const auto x = vector_of<T, V>(x_row, index);
      const auto dy = vector_of<T, V>(dy_row, index);
      Vector<W, V> w;
      if (weight) w = vector_of<W, V>(weight, index);
#pragma unroll
      for (int e = 0; e < V; ++e) sum += widen(dy.at[e]) * (weight ? static_cast<A>(widen(w.at[e])) : A(1)) * widen(x.at[e]);
    }
    sum = row_sum(sum, blockDim.x, slots[turn]);
    turn ^= 1;
    const A rstd = static_cast<const A*>(call.rstd)[row];
    if (threadIdx.x == 0) pulls[row] = -rstd * rstd * rstd * (sum / static_cast<A>(call.shape.columns));
  }
}

// Wide rows, second kernel: a block owns V * kTileThreads columns (blockIdx.x) of every gridDim.y-th row. One partial row
// of dweight for each blockIdx.y.
template <class T, class W, int V>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks) tile_kernel(const Backward call, const Wide<T>* pulls, Wide<T>* partials) {
  using A = Wide<T>;
  const uint32_t rows = static_cast<uint32_t>(call.shape.rows);
  const int64_t columns = call.shape.columns;
  const int index = blockIdx.x * kTileThreads + threadIdx.x;
  if (index >= columns / V) return;
  Vector<W, V> weight;
  if (call.weight) weight = vector_of<W, V>(static_cast<const W*>(call.weight), index);
  else
#pragma unroll
    for (int e = 0; e < V; ++e) weight.at[e] = narrow<W>(Wide<W>(1));
  A sums[V];
#pragma unroll
  for (int e = 0; e < V; ++e) sums[e] = 0;
  for (uint32_t base = blockIdx.y; base < rows; base += kTileRows * gridDim.y) {
    Vector<T, V> x[kTileRows], dy[kTileRows];
    A rstd[kTileRows], pull[kTileRows];
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      const uint32_t row = base + i * gridDim.y;
      if (row < rows) {
        x[i] = vector_of<T, V>(row_of<T>(call.x, row), index);
        dy[i] = vector_of<T, V>(row_of<T>(call.dy, row), index);
        rstd[i] = static_cast<const A*>(call.rstd)[row];
        pull[i] = pulls[row];
      }
    }
#pragma unroll
    for (int i = 0; i < kTileRows; ++i) {
      const uint32_t row = base + i * gridDim.y;
      if (row < rows) {
        Vector<T, V> out;
        widen_anew(x[i]);
        widen_anew(dy[i]);
        widen_anew(weight);
#pragma unroll
        for (int e = 0; e < V; ++e) {
          const A g = widen(dy[i].at[e]) * rstd[i];
          out.at[e] = narrow<T>(g * static_cast<A>(widen(weight.at[e])) + widen(x[i].at[e]) * pull[i]);
          sums[e] += g * widen(x[i].at[e]);
        }
        reinterpret_cast<Vector<T, V>*>(static_cast<T*>(call.dx) + row * columns)[index] = out;
      }
    }
  }
  if (!call.dweight) return;
#pragma unroll
  for (int e = 0; e < V; ++e) partials[blockIdx.y * columns + static_cast<int64_t>(index) * V + e] = sums[e];
}

// Block (kReduceColumns, kReduceRows): thread y adds the partial rows y, y + kReduceRows, ..., then thread 0 adds these.
template <class W, class A>
__global__ void reduce_kernel(const A* partials, int count, int64_t columns, W* dweight) {
  __shared__ A sums[kReduceRows][kReduceColumns];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kReduceColumns + threadIdx.x;
  A sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int row = threadIdx.y; row < count; row += kReduceRows) sum += partials[row * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  sum = 0;
  for (int y = 0; y < kReduceRows; ++y) sum += sums[y][threadIdx.x];
  dweight[column] = narrow<W>(static_cast<Wide<W>>(sum));
}

// Rows are counted in 32 bits with room for the rows that the kernels look ahead.
void check_size(const Shape& shape) {
  if (shape.rows > INT32_MAX || shape.columns > INT32_MAX)
    throw std::invalid_argument("the CUDA kernels of rms_norm take at most 2147483647 rows and as many columns, got " +
                                std::to_string(shape.rows) + " x " + std::to_string(shape.columns) + "; split the tensor");
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next call of anyone in this process would report our error as its own
  throw std::runtime_error(std::string("rms_norm: ") + what + ": " + cudaGetErrorString(status));
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

// Makes a device current for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, void* stream, Arguments... arguments) {
  // Without being asked a GPU grants 48 KiB, the kernel's static shared memory included: `slots` has to fit as well.
  if (shared > 47 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "shared memory");
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launch");
}

int power_of_two_at_least(int64_t value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// Threads a row and rows a block, where each thread takes `vectors_a_thread`.
dim3 block_for(int64_t vectors, int vectors_a_thread) {
  const int lanes = std::min(power_of_two_at_least((vectors + vectors_a_thread - 1) / vectors_a_thread), kMaxThreads);
  return dim3(lanes, std::max(kSmallBlock / lanes, 1));
}

unsigned grid_for(int64_t rows, int64_t rows_a_block, int64_t at_most) {
  return static_cast<unsigned>(std::min((rows + rows_a_block - 1) / rows_a_block, at_most));
}

// Whether 16-byte loads may be used: columns in whole vectors, every row at a multiple of 16 bytes.
template <class T> constexpr int kVector = 16 / static_cast<int>(sizeof(T));

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <class T> bool aligned(const Rows& rows) {
  return aligned(rows.data) && rows.outer_stride % kVector<T> == 0 && rows.inner_stride % kVector<T> == 0;
}

// Calls function(T{}, W{}) with the types of x and of the weight.
template <class Function> void visit(const Shape& shape, Function&& function) {
  const auto with = [&](auto x) {
    using A = Wide<decltype(x)>;
    if (shape.weight_type == shape.type) function(x, x);
    else function(x, A{});
  };
  switch (shape.type) {
    case Type::float32: return with(float{});
    case Type::float64: return with(double{});
    case Type::float16: return with(__half{});
    case Type::bfloat16: return with(__nv_bfloat16{});
  }
}

template <class T, class W, int V> void forward_with(const Forward& call) {
  const int64_t vectors = call.shape.columns / V;
  const bool wide = vectors > int64_t{kForwardVectors} * kMaxThreads;
  const dim3 block = block_for(vectors, kForwardVectors);
  const dim3 grid(grid_for(call.shape.rows, block.y, INT32_MAX));
  launch(wide ? forward_kernel<T, W, V, 2 * kForwardVectors> : forward_kernel<T, W, V, kForwardVectors>, grid, block, 0,
         call.shape.stream, call);
}

// How the backward pass is cut up.
struct Plan {
  int vector;        // elements a load
  bool wide;         // the two kernels for wide rows
  dim3 block, grid;  // of backward_kernel, or of tile_kernel
  int stages;
  size_t shared;
  int64_t partials;  // partial rows of dweight
};

// Vectors of a row that a thread of backward_kernel owns: 32 bytes of x, or as many lone elements as 64 registers bear.
template <class T, int V> constexpr int kBackwardVectors = V > 1 ? 2 : sizeof(T) == 8 ? 4 : 8;

template <class T> Plan plan_for(const Backward& call) {
  const Shape& shape = call.shape;
  const bool vectorised = shape.columns % kVector<T> == 0 && aligned<T>(call.x) && aligned<T>(call.dy) && aligned(call.dx) &&
                          (!call.weight || aligned(call.weight));
  Plan plan = {};
  plan.vector = vectorised ? kVector<T> : 1;
  const int held = vectorised ? kBackwardVectors<T, kVector<T>> : kBackwardVectors<T, 1>;
  const int64_t vectors = shape.columns / plan.vector;
  const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount, shape.device);
  plan.block = block_for(vectors, held);
  const int threads = plan.block.x * plan.block.y;
  const size_t stage = size_t{2} * held * plan.vector * sizeof(T) * threads;
  const size_t limit = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, shape.device) - 1024;  // 1 KiB: `slots` and the system
  plan.stages = static_cast<int>(std::min<size_t>(limit / stage, kMaxStages));
  plan.wide = vectors > int64_t{held} * plan.block.x || plan.stages < 2;
  if (plan.wide) {
    plan.block = dim3(kTileThreads);
    const int64_t tiles = (vectors + kTileThreads - 1) / kTileThreads;
    const int64_t wanted = (int64_t{multiprocessors} * kTileBlocks + tiles - 1) / tiles;
    plan.grid = dim3(static_cast<unsigned>(tiles), grid_for(shape.rows, kTileRows, std::min<int64_t>(wanted, 65535)));
    plan.partials = plan.grid.y;
    return plan;
  }
  // The sums of all rows side by side reuse the ring: columns * block.y of the accumulating type.
  const size_t gathered = size_t{plan.block.y} * shape.columns * sizeof(Wide<T>);
  plan.shared = std::max(stage * plan.stages, gathered);
  const int by_registers = kMaxThreads / threads;  // the launch bound grants 64 registers a thread
  const int by_memory = static_cast<int>(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, shape.device) / (plan.shared + 2048));
  plan.grid = dim3(grid_for(shape.rows, plan.block.y, int64_t{multiprocessors} * std::max(std::min(by_registers, by_memory), 1)));
  plan.partials = plan.grid.x;
  return plan;
}

template <class T, class W, int V> void backward_with(const Backward& call, const Plan& plan) {
  using A = Wide<T>;
  const Shape& shape = call.shape;
  A* workspace = static_cast<A*>(call.workspace);
  if (plan.wide) {
    A* pulls = workspace + (call.dweight ? plan.partials * shape.columns : 0);
    launch(pull_kernel<T, W, V>, dim3(grid_for(shape.rows, 1, INT32_MAX)), dim3(kPullThreads), 0, shape.stream, call, pulls);
    launch(tile_kernel<T, W, V>, plan.grid, plan.block, 0, shape.stream, call, pulls, workspace);
  } else {
    launch(backward_kernel<T, W, V, kBackwardVectors<T, V>>, plan.grid, plan.block, plan.shared, shape.stream, call, plan.stages);
  }
  if (call.dweight)
    launch(reduce_kernel<W, A>, dim3(static_cast<unsigned>((shape.columns + kReduceColumns - 1) / kReduceColumns)),
           dim3(kReduceColumns, kReduceRows), 0, shape.stream, workspace, static_cast<int>(plan.partials), shape.columns,
           static_cast<W*>(call.dweight));
}

}  // namespace

void forward(const Forward& call) {
  check_size(call.shape);
  const DeviceGuard guard(call.shape.device);
  visit(call.shape, [&](auto x, auto weight) {
    using T = decltype(x);
    using W = decltype(weight);
    if (call.shape.columns % kVector<T> == 0 && aligned<T>(call.x) && aligned(call.y) && (!call.weight || aligned(call.weight)))
      forward_with<T, W, kVector<T>>(call);
    else
      forward_with<T, W, 1>(call);
  });
}

int64_t backward_workspace(const Backward& call) {
  check_size(call.shape);
  int64_t size = 0;
  visit(call.shape, [&](auto x, auto) {
    const Plan plan = plan_for<decltype(x)>(call);
    size = (call.dweight ? plan.partials * call.shape.columns : 0) + (plan.wide ? call.shape.rows : 0);
  });
  return size;
}

void backward(const Backward& call) {
  const DeviceGuard guard(call.shape.device);
  visit(call.shape, [&](auto x, auto weight) {
    using T = decltype(x);
    using W = decltype(weight);
    const Plan plan = plan_for<T>(call);
    if (plan.vector == 1) backward_with<T, W, 1>(call, plan);
    else backward_with<T, W, kVector<T>>(call, plan);
  });
}

}  // namespace rms_norm

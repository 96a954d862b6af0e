// RMSNorm forward for sm_90 and later, rows too wide for one block: the blocks of a cluster share a row, and x is read once.
//
// One thread makes the bulk copy engine load the block's slice of the row into shared memory. Meanwhile all threads load the
// weights of their columns into registers. Each warp sends its part of the sum to every block of the cluster, so there is no
// barrier between the sums and the results. A block processes one row. The other blocks on the multiprocessor hide its
// latencies, and their number decides the speed (NOTES.md).
#include "device.cuh"
#include "forward.cuh"
#include "launch.cuh"
#include "ptx.cuh"

namespace rms_norm {
namespace {

constexpr int kVectors = 8;  // vectors of a row per thread

struct WideCall {
  Rows x;
  const void* weight;
  void *y, *rstd;
  int64_t columns;
  int slice;        // vectors of a row per block
  uint32_t blocks;  // of a cluster
  float offset, eps, inverse;
  bool larger_than_l2;  // x
};

template <class T, class W, int kThreads, int kResident>
__global__ void __launch_bounds__(kThreads, kResident) wide_kernel(const __grid_constant__ WideCall call) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int V = kVector<T>, kWarps = kThreads / 32;
  constexpr bool kEarly = sizeof(Vector<W, V>) <= 16;  // otherwise the weights need more registers than there are
  using Loaded = Vector<T, V>;
  extern __shared__ __align__(128) unsigned char shared[];
  const Loaded* x = reinterpret_cast<const Loaded*>(shared);
  __shared__ uint64_t loaded, summed;
  __shared__ float sums[kWarps * kMaxCluster];
  const uint32_t rank = ptx::rank_in_cluster(), row = blockIdx.x / call.blocks;
  const int first = rank * call.slice, count = min(call.slice, static_cast<int>(call.columns / V) - first);
  const int parts = kWarps * call.blocks, lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  ptx::wait_for_previous_kernel();
  if (threadIdx.x == 0) {
    ptx::barrier_init(&loaded, 1);
    ptx::barrier_init(&summed, 1);
    ptx::fence_barrier_init();
    ptx::fence_for_bulk_copies();
    ptx::arrive_expecting(&summed, parts * sizeof(float));
    ptx::arrive_expecting(&loaded, count * sizeof(Loaded));
    ptx::copy_bulk(shared, row_of<T>(call.x, row) + int64_t{first} * V, count * sizeof(Loaded), &loaded,
                   ptx::policy_for(call.larger_than_l2));
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  const auto* weight = static_cast<const Vector<W, V>*>(call.weight);
  Vector<W, V> early[kEarly ? kVectors : 1];
  if (kEarly && weight) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (const int index = k * kThreads + threadIdx.x; index < count) early[k] = weight[first + index];
  }
  ptx::cluster_wait();  // every block's barriers are ready; this block's are visible to its threads
  ptx::wait(&loaded, 0);
  float chains[2] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (const int index = k * kThreads + threadIdx.x; index < count) {
      const Loaded at = x[index];
#pragma unroll
      for (int e = 0; e < V; ++e) chains[e % 2] += widen(at.at[e]) * widen(at.at[e]);
    }
  const float own = within_warp(chains[0] + chains[1], 32, Add{});
  if (lane < call.blocks) ptx::send(&sums[rank * kWarps + warp], __float_as_uint(own), &summed, lane);
  ptx::wait_for_cluster(&summed, 0);
  float sum = 0;
  for (int part = lane; part < parts; part += 32) sum += sums[part];
  sum = within_warp(sum, 32, Add{});
  const float rstd = rsqrtf(sum * call.inverse + call.eps);
  if (call.rstd && threadIdx.x == 0 && rank == 0) static_cast<float*>(call.rstd)[row] = rstd;
  Loaded* y = reinterpret_cast<Loaded*>(static_cast<T*>(call.y) + row * call.columns) + first;
  const auto finish = [&](auto choice) {
    constexpr bool kWeighted = decltype(choice)::value;
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (const int index = k * kThreads + threadIdx.x; index < count) {
        const Loaded at = x[index];
        Vector<W, V> w;
        if constexpr (kWeighted && kEarly) {
          widen_anew(early[k]);
          w = early[k];
        } else if constexpr (kWeighted) {
          w = weight[first + index];
        }
        Loaded out;
#pragma unroll
        for (int e = 0; e < V; ++e) {
          out.at[e] = narrow<T>(widen(at.at[e]) * rstd * (kWeighted ? widen(w.at[e]) + call.offset : 1.0f));
        }
        y[index] = out;
      }
  };
  if (weight) finish(std::true_type{});
  else finish(std::false_type{});
#endif
}

template <class T, class W, int kThreads, int kResident> bool run(const Forward& call) {
  const Shape& shape = call.shape;
  const int64_t vectors = shape.columns / kVector<T>;
  const auto [blocks, slice] = spread_over_cluster(vectors, kThreads * kVectors, kMaxCluster);
  if (slice > kThreads * kVectors) return false;
  const WideCall wide = {call.x, call.weight.data, call.y, call.rstd, shape.columns, slice, static_cast<uint32_t>(blocks),
                         static_cast<float>(call.weight.offset), static_cast<float>(call.eps), 1.0f / static_cast<float>(shape.columns),
                         larger_than_l2<T>(shape)};
  const Launch how = {dim3(static_cast<unsigned>(shape.rows * blocks)), dim3(kThreads), static_cast<size_t>(slice) * 16, blocks, true};
  launch<wide_kernel<T, W, kThreads, kResident>>(how, shape.device, shape.stream, wide);
  return true;
}

}  // namespace

bool wide_forward(const Forward& call) {
  const Shape& shape = call.shape;
  if (limits_of(shape.device).capability < 90 || call.residual.data || call.llama || call.quantised || shape.rows > INT32_MAX / kMaxCluster) return false;
  bool done = false;
  visit(shape.type, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>) {
      const auto with = [&](auto weight) {
        using W = decltype(weight);
        done = run<T, W, 256, 5>(call) || run<T, W, 512, 1>(call);
      };
      if (shape.weight_type == shape.type) with(T{});
      else with(float{});
    }
  });
  return done;
}

}  // namespace rms_norm

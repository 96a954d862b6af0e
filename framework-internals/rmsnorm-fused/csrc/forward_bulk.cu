// RMSNorm forward for sm_90 and later, rows that one block's registers cannot hold: x is read once. bulk.cuh says how.
#include <optional>

#include "bulk.cuh"
#include "forward.cuh"

namespace rms_norm {
namespace {

using namespace bulk;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

template <class T, class S, bool kWhole> struct ForwardConsumer : Consumer<T, S, kWhole> {
  using Base = Consumer<T, S, kWhole>;
  using Base::cut, Base::first, Base::has, Base::in_ring, Base::index, Base::kBranch, Base::V;

  const Forward& call;
  float weight[S::kVectors][V];

  __device__ __forceinline__ ForwardConsumer(const Base& base, const Forward& call) : Base(base), call(call) {
#pragma unroll
    for (int k = 0; k < S::kVectors; ++k)
      if (has(k)) load_weight<T, V>(weight[k], call.weight, call.shape.weight_type == call.shape.type, first + index(k));
  }

  // First pass: this warp's part of the row's sum of squares. False when there is no unit any more.
  __device__ __forceinline__ bool add_up(uint32_t turn, Place& at, uint32_t& row) const {
    float sums[2] = {};
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      ptx::wait(&this->control.full[at.stage], at.parity);
      if (tile == 0) {
        row = this->control.units[at.stage];
        if (row == kNoUnit) return false;
      }
#pragma unroll
      for (int i = 0; i < S::kTile; ++i) {
        const int k = tile * S::kTile + i;
        if (kBranch && !has(k)) continue;
        auto x = in_ring(at, 0, i);
        if (!has(k)) x = {};
#pragma unroll
        for (int e = 0; e < V; ++e) sums[e % 2] += widen(x.at[e]) * widen(x.at[e]);
      }
      at.advance(cut.stages);
    }
    this->send_sum(sums[0] + sums[1], turn, true);
    return true;
  }

  __device__ __forceinline__ void finish(uint32_t turn, Place& at, uint32_t row) const {
    Vector<T, V>* y = reinterpret_cast<Vector<T, V>*>(static_cast<T*>(call.y) + row * call.shape.columns) + first;
    const float rstd = rsqrtf(this->sum_of(turn, 0) * this->inverse + static_cast<float>(call.eps));
    if (call.rstd && threadIdx.x == 0 && this->rank == 0) static_cast<float*>(call.rstd)[row] = rstd;
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < S::kTile; ++i) {
        const int k = tile * S::kTile + i;
        if (kBranch && !has(k)) continue;
        const auto x = in_ring(at, 0, i);
        Vector<T, V> out;
#pragma unroll
        for (int e = 0; e < V; ++e) out.at[e] = narrow<T>(widen(x.at[e]) * rstd * weight[k][e]);
        if (has(k)) y[index(k)] = out;
      }
      this->release(at);
    }
  }

  __device__ __forceinline__ void consume() const {
    Place adding, finishing;
    uint32_t row = 0, before = 0;
    for (uint32_t turn = 0;; ++turn) {
      const bool more = add_up(turn, adding, row);
      if (turn > 0) finish(turn - 1, finishing, before);
      if (!more) break;
      before = row;
    }
  }
};

#endif

template <class T, class S, bool kWhole>
__global__ void __launch_bounds__(S::kBlock, S::kResident) forward_bulk_kernel(const __grid_constant__ Forward call, const __grid_constant__ Cut cut) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Control<S> control;
  run_block<T, S>(cut, control, ring, [&](uint32_t rank) { ForwardConsumer<T, S, kWhole>({cut, control, ring, rank}, call).consume(); });
#endif
}

// A slice of 8192 bfloat16 and two blocks a multiprocessor, as long as eight blocks take the row; else twice as wide a slice.
using NarrowShape = BulkShape<1, 4, 8, 2>;
using WideShape = BulkShape<2, 2, 16, 1>;
constexpr int kNarrowCluster = 8;

template <class T, class S> bool run(const Forward& call, int64_t vectors, int widest, size_t ring_bytes) {
  Cut cut = {};
  spread_over_cluster(vectors, 1, cut);
  while (cut.slice > S::kThreads * S::kVectors && cut.cluster < widest) spread_over_cluster(vectors, 2 * cut.cluster, cut);
  if (cut.slice > S::kThreads * S::kVectors) return false;
  cut.warps_a_row = S::kWarps;
  cut.tensors = 1;
  cut.from[0] = call.x;
  const auto with = [&](auto whole) {
    constexpr auto kernel = forward_bulk_kernel<T, S, decltype(whole)::value>;
    const size_t shared = fill_in<kernel, T, S>(call.shape, ring_bytes, cut);
    if (shared == 0) return false;
    launch<kernel>({dim3(cut.teams * cut.cluster), dim3(S::kBlock), shared, cut.cluster, true}, call.shape.device, call.shape.stream, call, cut);
    return true;
  };
  return vectors == int64_t{cut.cluster} * S::kThreads * S::kVectors ? with(std::true_type{}) : with(std::false_type{});
}

}  // namespace

bool bulk_forward(const Forward& call) {
  if (limits_of(call.shape.device).capability < 90 || call.residual.data || call.llama || call.quantised) return false;
  bool done = false;
  visit(call.shape.type, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>) {
      const int64_t vectors = call.shape.columns / kVector<T>;
      done = run<T, NarrowShape>(call, vectors, kNarrowCluster, 48 << 10) || run<T, WideShape>(call, vectors, kMaxCluster, 128 << 10);
    }
  });
  return done;
}

}  // namespace rms_norm

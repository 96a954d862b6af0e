// RMSNorm and layer normalisation (kCentred) backward for sm_90 and later: s, dy (and ds) are read once, at any width up to 262144 bfloat16. bulk.cuh explains
// how. The consumers keep the weight and the sums for dweight of their columns in registers, and write one partial row per
// block.
#include <optional>

#include "backward.cuh"
#include "bulk.cuh"

namespace rms_norm {
namespace {

using namespace bulk;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A row between its two passes; `own` are this warp's parts of its sums, of g * c and, if centred, of g.
template <int kRowSums> struct Summed {
  uint32_t row;
  Moments<float> moments;
  float own[kRowSums];
};

template <class T, class S, bool kWhole> struct BackwardConsumer : Consumer<T, S, kWhole> {
  using Base = Consumer<T, S, kWhole>;
  using Base::count, Base::cut, Base::first, Base::has, Base::in_ring, Base::index, Base::kBranch, Base::row_of_unit, Base::V;

  static constexpr bool kCentred = S::kRowSums == 2;

  const Backward& call;
  float weight[S::kVectors][V], dweight[S::kVectors][V], dbias[kCentred ? S::kVectors : 1][V];

  __device__ __forceinline__ BackwardConsumer(const Base& base, const Backward& call) : Base(base), call(call) {
#pragma unroll
    for (int k = 0; k < S::kVectors; ++k) {
#pragma unroll
      for (int e = 0; e < V; ++e) weight[k][e] = dweight[k][e] = dbias[kCentred ? k : 0][e] = 0;
      if (has(k)) load_weight<T, V>(weight[k], call.weight, call.shape.weight_type == call.shape.type, first + index(k));
    }
  }

  // First pass: this warp's part of the row's sum of dy * w * c, and of dy * w. Returns false when there are no more units.
  __device__ __forceinline__ bool add_up(uint32_t turn, Place& at, Summed<S::kRowSums>& now) const {
    float sums[2] = {}, gradients = 0;  // separate chains, because an addition takes four cycles
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      ptx::wait(&this->control.full[at.stage], at.parity);
      if (tile == 0) {
        const uint32_t unit = this->control.units[at.stage];
        if (unit == kNoUnit) return false;
        now.row = unit * cut.rows + row_of_unit;
        if (this->inside(now.row)) {
          if constexpr (kCentred) now.moments = moments_of<true>(static_cast<const float*>(call.rstd), now.row);
          else now.moments.rstd = __ldg(static_cast<const float*>(call.rstd) + now.row);
        }
      }
#pragma unroll
      for (int i = 0; i < S::kTile; ++i) {
        const int k = tile * S::kTile + i;
        if (kBranch && !has(k)) continue;
        auto s = in_ring(at, 0, i), dy = in_ring(at, 1, i);
        if (!has(k)) s = dy = {};  // the ring contains bytes of another row here
#pragma unroll
        for (int e = 0; e < V; ++e) {
          const float g = widen(dy.at[e]) * weight[k][e];
          sums[e % 2] += g * centred<kCentred>(widen(s.at[e]), now.moments.mean);
          if constexpr (kCentred) gradients += g;
        }
      }
      at.advance(cut.stages);
    }
    now.own[0] = sums[0] + sums[1];
    if constexpr (kCentred) now.own[1] = gradients;
    this->send_sums(now.own, turn, this->inside(now.row));
    return true;
  }

  // Second pass: dx, and this row's part of dweight.
  __device__ __forceinline__ void finish(uint32_t turn, Place& at, const Summed<S::kRowSums>& then) {
    if (!this->inside(then.row)) {  // the last unit may have fewer rows
      for (int tile = 0; tile < S::kTiles; ++tile) this->release(at);
      return;
    }
    const auto [mean, rstd] = then.moments;
    Vector<T, V>* dx = reinterpret_cast<Vector<T, V>*>(static_cast<T*>(call.dx) + then.row * call.shape.columns) + first;
    float sums[S::kRowSums];
    this->sums_of(turn, then.own, sums);
    const float pull = -(sums[0] * rstd * this->inverse) * rstd * rstd;  // rstd^3 may underflow
    float level = 0;
    if constexpr (kCentred) level = -(sums[1] * this->inverse) * rstd;
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < S::kTile; ++i) {
        const int k = tile * S::kTile + i;
        if (kBranch && !has(k)) continue;
        const auto s = in_ring(at, 0, i), dy = in_ring(at, 1, i);
        float out[V];
#pragma unroll
        for (int e = 0; e < V; ++e) {
          const float g = widen(dy.at[e]) * rstd, c = centred<kCentred>(widen(s.at[e]), mean);
          dweight[k][e] += g * c;  // arbitrary for columns that the row lacks; store_partial omits them
          out[e] = g * weight[k][e] + c * pull;
          if constexpr (kCentred) {
            out[e] += level;
            dbias[k][e] += widen(dy.at[e]);
          }
        }
        if (cut.tensors == 3) {
          const auto ds = in_ring(at, 2, i);
#pragma unroll
          for (int e = 0; e < V; ++e) out[e] += widen(ds.at[e]);
        }
        Vector<T, V> narrowed;
#pragma unroll
        for (int e = 0; e < V; ++e) narrowed.at[e] = narrow<T>(out[e]);
        if (has(k)) dx[index(k)] = narrowed;
      }
      this->release(at);
    }
  }

  // The sums of the block's rows are added in shared memory, in their order; no copies into the ring are in flight.
  __device__ __forceinline__ void store_partial(const float (&totals)[S::kVectors][V], int parameter, float* gathered) {
    const int64_t row = blockIdx.x / cut.cluster * S::kRowSums + parameter;
    float* partial = static_cast<float*>(call.workspace) + row * call.shape.columns + int64_t{first} * V;
    if (kWhole || cut.rows == 1) {
#pragma unroll
      for (int k = 0; k < S::kVectors; ++k)
        if (has(k))
#pragma unroll
          for (int e = 0; e < V; e += 4)
            *reinterpret_cast<float4*>(partial + int64_t{index(k)} * V + e) = {totals[k][e], totals[k][e + 1], totals[k][e + 2], totals[k][e + 3]};
      return;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(S::kThreads) : "memory");  // all consumers have finished with the ring
    const int columns = count * V;
#pragma unroll
    for (int k = 0; k < S::kVectors; ++k)
      if (has(k))
#pragma unroll
        for (int e = 0; e < V; ++e) gathered[row_of_unit * columns + index(k) * V + e] = totals[k][e];
    asm volatile("bar.sync 1, %0;" ::"n"(S::kThreads) : "memory");
    for (int column = threadIdx.x; column < columns; column += S::kThreads) {
      float sum = 0;
      for (int row = 0; row < cut.rows; ++row) sum += gathered[row * columns + column];
      partial[column] = sum;
    }
  }

  __device__ __forceinline__ void consume(float* gathered) {
    Place adding, finishing;
    Summed<S::kRowSums> now = {}, before = {};
    for (uint32_t turn = 0;; ++turn) {
      const bool more = add_up(turn, adding, now);
      if (turn > 0) finish(turn - 1, finishing, before);
      if (!more) break;
      before = now;
    }
    if (!call.dweight) return;
    store_partial(dweight, 0, gathered);
    if constexpr (kCentred) store_partial(dbias, 1, gathered);
  }
};

#endif

template <class T, class S, bool kWhole>
__global__ void __launch_bounds__(S::kBlock, S::kResident) backward_bulk_kernel(const __grid_constant__ Backward call, const __grid_constant__ Cut cut) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ Control<S> control;
  run_block<T, S>(cut, control, ring, [&](uint32_t rank) {
    BackwardConsumer<T, S, kWhole>({cut, control, ring, rank}, call).consume(reinterpret_cast<float*>(ring));
  });
#endif
}

// Resets the counter of units before the kernel that uses it. cudaMemsetAsync would take 1.5 us longer, because the next
// kernel would wait for its end before setting up barriers.
__global__ void zero_kernel(uint32_t* counter) {
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  *counter = 0;
}

// The fastest measured choice for each width (NOTES.md). Several blocks per multiprocessor, if registers allow it, hide one
// another's latencies.
template <int kRowSums> using Shape1 = BulkShape<1, 1, 8, 2, kRowSums>;
template <int kRowSums> using Shape2 = BulkShape<1, 2, 8, 2, kRowSums>;
using Shape3 = BulkShape<1, 3, 8, 2>;
using Shape3Centred = BulkShape<1, 3, 12, 1, 2>;  // dbias takes the registers of a second block of eight warps
using Shape4 = BulkShape<2, 2, 8, 1>;
template <int kRowSums> using Shape4Clustered = BulkShape<1, 4, 8, 1, kRowSums>;
using ShapeWide = BulkShape<3, 2, 11, 1>;

constexpr int kLeastVectors = 32;   // bytes of a row; in shorter rows lanes would idle (backward.cu uses fewer lanes per row)
constexpr uint32_t kUnitsToDeal = 16;  // per team: with fewer, resetting the counter takes longer than dynamic assignment saves
constexpr double kFastMemory = 4e12;  // bytes per second: an H200's is 4.9e12, an H100's 3.4e12
constexpr int kNarrowCluster = 8;   // blocks; larger rows use wider slices instead, because fewer clusters of 16 fit on a GPU

enum class Choice { one, two, three, four, four_clustered, wide };

struct BulkPlan {
  Cut cut;
  Choice choice;
  bool whole;
  size_t shared;
  int64_t partial_bytes;
};

// Calls function(S{}, whole) with the shape of a plan; `whole` is a std::bool_constant.
template <int kRowSums, class Function> void with_shape(const BulkPlan& plan, Function&& function) {
  const auto with = [&](auto shape) {
    if (plan.whole) function(shape, std::true_type{});
    else function(shape, std::false_type{});
  };
  switch (plan.choice) {
    case Choice::one: return with(Shape1<kRowSums>{});
    case Choice::two: return with(Shape2<kRowSums>{});
    case Choice::four:
      if constexpr (kRowSums == 1) with(Shape4{});
      return;
    case Choice::four_clustered: return with(Shape4Clustered<kRowSums>{});
    case Choice::three:
      if constexpr (kRowSums == 1) with(Shape3{});
      else function(Shape3Centred{}, std::false_type{});
      return;
    case Choice::wide:
      if constexpr (kRowSums == 1) function(ShapeWide{}, std::false_type{});
      return;
  }
}

// Whether a block has room for a ring of three stages, the fewest, of Shape3Centred: an H100's has, an RTX 5090's has not.
bool has_room_for_three(const Cut& cut, size_t shared_a_block) {
  return 3 * size_t{Shape3Centred::kTensorBytes} * cut.tensors + sizeof(Control<Shape3Centred>) <= shared_a_block;
}

// Warps per row and vectors per lane that leave the fewest lanes idle; prefers two vectors to three or one.
void cut_narrow(int vectors, bool centred, size_t shared_a_block, BulkPlan& plan) {
  double least = 1e9;
  for (const int lane_vectors : {2, 3, 1})
    for (int warps = 1; warps <= Shape3::kWarps; warps *= 2) {
      if (centred && lane_vectors == 3 && (warps > 4 || !has_room_for_three(plan.cut, shared_a_block))) continue;  // eight do not divide twelve
      const double idle = 32.0 * warps * lane_vectors / vectors;
      if (idle < 1 || idle >= least) continue;
      least = idle;
      plan.cut.warps_a_row = warps;
      plan.choice = lane_vectors == 1 ? Choice::one : lane_vectors == 2 ? Choice::two : Choice::three;
    }
}

// Whether every lane of every block has its full number of vectors.
template <class S> bool fills(const Cut& cut, int64_t vectors) {
  return cut.warps_a_row == S::kWarps && cut.slice == S::kThreads * S::kVectors && vectors == int64_t{cut.slice} * cut.cluster;
}

void spread(int64_t vectors, int slice, int most, int least, Cut& cut) {
  const Spread spread = spread_over_cluster(vectors, slice, most, least);
  cut.cluster = spread.blocks;
  cut.slice = spread.slice;
}

// Selects the shape, and how many blocks share a row. Returns false for rows that are too wide.
bool choose(int64_t vectors, bool centred, size_t shared_a_block, BulkPlan& plan) {
  Cut& cut = plan.cut;
  constexpr int four = Shape4::kThreads * Shape4::kVectors;
  const int narrow = Shape3::kThreads * (centred ? 2 : Shape3::kVectors);
  if (vectors <= narrow) {
    spread(vectors, narrow, 1, 1, cut);
    cut_narrow(cut.slice, centred, shared_a_block, plan);
    return true;
  }
  cut.warps_a_row = Shape4::kWarps;
  if (centred) {  // two blocks hide one another's wait for two sums, unless too many lanes of narrow slices idle
    spread(vectors, narrow, kNarrowCluster, 1, cut);
    plan.choice = Choice::two;
    if (cut.slice <= narrow && (cut.cluster == 2 || 4 * cut.slice >= 3 * narrow)) return true;
    spread(vectors, four, kMaxCluster, 1, cut);
    plan.choice = Choice::four_clustered;
    return cut.slice <= four;
  }
  // Three tensors of a wide slice fill the shared memory.
  spread(vectors, four, cut.tensors == 3 ? kMaxCluster : kNarrowCluster, 1, cut);
  plan.choice = cut.cluster == 1 || (cut.cluster == 2 && fills<Shape4>(cut, vectors)) ? Choice::four : Choice::four_clustered;
  if (cut.slice <= four) {
    if (cut.slice <= narrow) plan.choice = Choice::three;
    return true;
  }
  plan.choice = Choice::wide;
  cut.warps_a_row = ShapeWide::kWarps;
  if (cut.slice > ShapeWide::kThreads * ShapeWide::kVectors) spread(vectors, 0, kMaxCluster, kMaxCluster, cut);
  return cut.slice <= ShapeWide::kThreads * ShapeWide::kVectors;
}

// Slices of 1024 vectors are slower when drawn if they are three tensors, which reach the limit of a copy in turn, or if the memory
// is fast: on an H200 77 to 82 % of an addition drawn and 94 % in turn, on an H100 99 and 96 %.
bool in_turn_by_choice(const BulkPlan& plan, int device) {
  return plan.choice == Choice::four && (plan.cut.tensors == 3 || limits_of(device).memory_rate >= kFastMemory);
}

// Bytes of the ring: enough in flight to keep the memory busy (measured). More makes no difference, or is slower: in turn, an H100's
// multiprocessors then share the memory less evenly, and the last one ends later.
size_t ring_bytes(const BulkPlan& plan, int row_sums, bool in_turn, bool deterministic) {
  switch (plan.choice) {
    case Choice::one:
    case Choice::two: return 64 << 10;
    case Choice::three: return (row_sums == 1 ? 72 : 180) << 10;
    case Choice::four:
      if (in_turn) return (plan.cut.cluster == 2 && plan.cut.tensors == 2 ? 128 : 160) << 10;
      return (deterministic || plan.cut.cluster == 1 ? 96 : 128) << 10;
    case Choice::four_clustered: return (row_sums == 2 || (deterministic && !plan.whole) ? 160 : deterministic ? 96 : 128) << 10;
    case Choice::wide: return 224 << 10;
  }
  return 0;
}

template <class T, int kRowSums> bool make_plan(const Backward& call, BulkPlan& plan) {
  const Shape& shape = call.shape;
  const int64_t vectors = shape.columns / kVector<T>;
  if (limits_of(shape.device).capability < 90 || call.llama || shape.columns % kVector<T> != 0 || vectors < kLeastVectors || !aligned<T>(call.s) ||
      !aligned<T>(call.dy) || !aligned<T>(call.ds) || !aligned(call.dx) || !aligned(call.weight.data))
    return false;
  plan = {};
  plan.cut.tensors = call.ds.data ? 3 : 2;
  if (!choose(vectors, call.centred, limits_of(shape.device).shared_a_block, plan)) return false;
  plan.cut.from[0] = call.s;
  plan.cut.from[1] = call.dy;
  plan.cut.from[2] = call.ds;
  with_shape<kRowSums>(plan, [&](auto chosen, auto) {
    using S = decltype(chosen);
    plan.whole = plan.choice != Choice::wide && !(plan.choice == Choice::four && plan.cut.cluster == 1) && fills<S>(plan.cut, vectors);
  });
  with_shape<kRowSums>(plan, [&](auto chosen, auto whole) {
    using S = decltype(chosen);
    const bool in_turn = in_turn_by_choice(plan, shape.device);
    const size_t ring = ring_bytes(plan, kRowSums, in_turn, call.deterministic);
    plan.shared = fill_in<backward_bulk_kernel<T, S, decltype(whole)::value>, T, S>(shape, ring, plan.cut);
    plan.partial_bytes = call.dweight ? int64_t{plan.cut.teams} * kRowSums * shape.columns * static_cast<int64_t>(sizeof(float)) : 0;
    if (!in_turn && !call.deterministic && plan.cut.units > kUnitsToDeal * plan.cut.teams)
      plan.cut.counter = reinterpret_cast<uint32_t*>(static_cast<char*>(call.workspace) + plan.partial_bytes);
  });
  return plan.shared > 0;
}

// The plan for the type of the call, or nothing if these kernels do not support it.
std::optional<BulkPlan> plan_for(const Backward& call) {
  BulkPlan plan;
  bool usable = false;
  visit(call.shape.type, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>) usable = call.centred ? make_plan<T, 2>(call, plan) : make_plan<T, 1>(call, plan);
  });
  return usable ? std::optional(plan) : std::nullopt;
}

template <class T, int kRowSums> void run(const Backward& call, const BulkPlan& plan) {
  with_shape<kRowSums>(plan, [&](auto chosen, auto whole) {
    using S = decltype(chosen);
    const Launch how = {dim3(plan.cut.teams * plan.cut.cluster), dim3(S::kBlock), plan.shared, plan.cut.cluster, true};
    launch<backward_bulk_kernel<T, S, decltype(whole)::value>>(how, call.shape.device, call.shape.stream, call, plan.cut);
  });
}

}  // namespace

std::optional<int64_t> bulk_workspace(const Backward& call) {
  const auto plan = plan_for(call);
  return plan ? std::optional(plan->partial_bytes + static_cast<int64_t>(sizeof(uint64_t))) : std::nullopt;
}

std::optional<int64_t> bulk_backward(const Backward& call) {
  const auto plan = plan_for(call);
  if (!plan) return std::nullopt;
  if (plan->cut.counter) {
    const Launch how = {dim3(1), dim3(1), 0, 1, true};
    launch<zero_kernel>(how, call.shape.device, call.shape.stream, plan->cut.counter);
  }
  visit(call.shape.type, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>) call.centred ? run<T, 2>(call, *plan) : run<T, 1>(call, *plan);
  });
  return plan->cut.teams;
}

}  // namespace rms_norm

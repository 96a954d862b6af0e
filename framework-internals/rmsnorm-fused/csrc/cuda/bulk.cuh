// Persistent blocks that process the rows of a matrix, loaded by the bulk copy engine of sm_90 and later.
//
// The work is divided into units: several rows of one block, or one row shared by the blocks of a cluster. In each block, one
// warp (the producer) makes the engine fill a ring of stages in shared memory with the next units. The other warps (the
// consumers) own the same columns of every row. A row is read from the ring twice: for its sum, and for the results. The
// first pass over a unit comes before the second pass over the previous unit, so that no thread waits for a sum. The sum
// passes through slots in shared memory, also to the other blocks of the cluster, while the threads are busy.
//
// Units are assigned round-robin, or dynamically from a counter when a block is ready. Dynamic assignment is faster, because the
// multiprocessors' access to memory is not equally fast: of equal shares an H100's fastest finish at 72 % of the time of its
// slowest. But which block gets a unit then varies between runs.
#pragma once

#include <map>
#include <mutex>
#include <tuple>
#include <type_traits>

#include "launch.cuh"
#include "ptx.cuh"

namespace rms_norm::bulk {

constexpr int kMaxStages = 20;
constexpr int kSums = 4;          // rows whose sums may be in flight at a time; three would suffice
constexpr int kAhead = 3;         // units fetched ahead of their use
constexpr int kDealt = 32;        // fetched units that a block of the cluster has not read: < kMaxStages + kAhead
constexpr int kVectorBytes = 16;

// How the work is divided into units, besides the compile-time numbers of `BulkShape`. Vectors have kVectorBytes.
struct Cut {
  int slice;          // vectors of a row per block
  int warps_a_row;
  int rows;           // rows of a unit: consumer warps / warps_a_row
  int cluster;        // blocks that share a row; 1 where rows > 1
  int stages;
  int tensors;        // that are read
  Rows from[3];       // they themselves
  int64_t rows_in_all, columns;
  bool adjacent;      // the rows of a unit are contiguous in memory, as in the ring, so one copy loads them
  uint32_t units;
  uint32_t teams;     // clusters in the grid
  uint32_t* counter;  // of assigned units; null: round-robin
};

// A row has kTiles * kTile vectors per lane; a stage contains kTile of them. kWarps is the number of consumer warps, and
// kResident the number of blocks per multiprocessor. A row has kRowSums sums.
template <int kTiles_, int kTile_, int kWarps_, int kResident_, int kRowSums_ = 1> struct BulkShape {
  static constexpr int kTiles = kTiles_, kTile = kTile_, kWarps = kWarps_, kResident = kResident_, kRowSums = kRowSums_;
  static constexpr int kVectors = kTiles * kTile, kThreads = 32 * kWarps;
  // Plus one producer warp and one warp that assigns units. If a block has the multiprocessor to itself, another warp is
  // slower.
  static constexpr bool kDeals = kResident > 1;
  static constexpr int kBlock = kThreads + (kDeals ? 64 : 32);
  static constexpr int kTensorBytes = kThreads * kTile * kVectorBytes;  // of one stage
};

constexpr uint32_t kNoUnit = 0xffffffffu;

template <class S> struct Control {
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t summed[kSums][S::kWarps];    // one per row of the unit
  uint64_t dealt[kDealt], taken[kAhead];
  uint32_t units[kMaxStages];           // the unit in a stage; kNoUnit if there are no more
  uint32_t deal[kDealt];                // units that block 0 of the cluster has fetched for all of its blocks
  alignas(16) float sums[kSums][S::kRowSums][S::kWarps * kMaxCluster];  // from every warp of a row
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Assigns units from `cut.counter` if blocks share a multiprocessor: fetches one after another, kAhead units before the
// producer needs them (an atomic may take microseconds), and passes them to the producers of the cluster. Runs on one lane
// in block 0 of a cluster.
template <class S> __device__ void deal(const Cut& cut, Control<S>& control) {
  for (uint32_t turn = 0;; ++turn) {
    if (turn >= kAhead) ptx::wait(&control.taken[turn % kAhead], turn / kAhead - 1 & 1);
    const uint32_t unit = turn == 0 ? blockIdx.x / cut.cluster : cut.teams + atomicAdd(cut.counter, 1u);
    const int place = turn % kDealt;
    if (cut.cluster == 1) {
      control.deal[place] = unit;
      ptx::arrive(&control.dealt[place]);
    } else {
      for (int block = 0; block < cut.cluster; ++block) ptx::send(&control.deal[place], unit, &control.dealt[place], block);
    }
    if (unit >= cut.units) return;
  }
}

// The sequence of units; only the producer's first lane uses it.
template <class S> class Units {
 public:
  __device__ Units(const Cut& cut, Control<S>& control, uint32_t rank) : cut_(cut), control_(control), rank_(rank) {}

  __device__ __forceinline__ uint32_t next() {
    uint32_t unit = blockIdx.x / cut_.cluster + turn_ * cut_.teams;
    if (cut_.counter) {
      const int place = turn_ % kDealt;
      if (!S::kDeals && rank_ == 0) draw(place);
      if (cut_.cluster > 1) ptx::arrive_expecting(&control_.dealt[place], sizeof(uint32_t));
      ptx::wait_for_cluster(&control_.dealt[place], turn_ / kDealt & 1);
      unit = control_.deal[place];
      if (S::kDeals && rank_ == 0) ptx::arrive(&control_.taken[turn_ % kAhead]);
    }
    ++turn_;
    return unit < cut_.units ? unit : kNoUnit;
  }

 private:
  // Without a separate warp: passes the previously fetched unit to the cluster, and fetches the next one.
  __device__ __forceinline__ void draw(int place) {
    const uint32_t unit = turn_ == 0 ? blockIdx.x / cut_.cluster : cut_.teams + drawn_;
    if (cut_.cluster > 1) {
      for (int block = 0; block < cut_.cluster; ++block) ptx::send(&control_.deal[place], unit, &control_.dealt[place], block);
    } else {
      control_.deal[place] = unit;
      ptx::arrive(&control_.dealt[place]);
    }
    drawn_ = atomicAdd(cut_.counter, 1u);
  }

  const Cut& cut_;
  Control<S>& control_;
  const uint32_t rank_;
  uint32_t turn_ = 0, drawn_ = 0;
};

// A position in the ring, and the parity of its phase.
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

template <class T, class S> __device__ void produce(const Cut& cut, Control<S>& control, unsigned char* ring, uint32_t rank) {
  const int lane = threadIdx.x % 32, stage_bytes = cut.tensors * S::kTensorBytes, row_lanes = 32 * cut.warps_a_row;
  const int first = rank * cut.slice, count = min(cut.slice, static_cast<int>(cut.columns / kVector<T>) - first);
  const auto row_at = [&](int tensor, uint32_t row) { return row_of<T>(cut.from[tensor], row); };
  Units<S> units(cut, control, rank);
  Place at;
  at.parity = 1;  // a stage that was never full counts as empty
  for (;;) {
    const uint32_t unit = __shfl_sync(0xffffffffu, lane == 0 ? units.next() : 0u, 0);
    const uint32_t first_row = unit * cut.rows;
    const int rows = unit == kNoUnit ? 0 : min(cut.rows, static_cast<int>(static_cast<uint32_t>(cut.rows_in_all) - first_row));
    for (int tile = 0; tile < (unit == kNoUnit ? 1 : S::kTiles); ++tile) {
      const int begin = tile * S::kTile * row_lanes;
      const uint32_t bytes = max(min(S::kTile * row_lanes, count - begin), 0) * kVectorBytes;
      ptx::wait(&control.empty[at.stage], at.parity);
      if (lane == 0) {
        control.units[at.stage] = unit;
        ptx::arrive_expecting(&control.full[at.stage], bytes * rows * cut.tensors);
      }
      __syncwarp();
      if (cut.adjacent) {
        if (lane < cut.tensors && rows > 0)
          ptx::copy_bulk(ring + at.stage * stage_bytes + lane * S::kTensorBytes, row_at(lane, first_row), bytes * rows, &control.full[at.stage]);
      } else if (bytes > 0)
        for (int copy = lane; copy < rows * cut.tensors; copy += 32) {
          const int tensor = copy / rows, row = copy - tensor * rows;
          ptx::copy_bulk(ring + at.stage * stage_bytes + tensor * S::kTensorBytes + row * S::kTile * row_lanes * kVectorBytes,
                         row_at(tensor, first_row + row) + int64_t{first + begin} * kVector<T>, bytes, &control.full[at.stage]);
        }
      at.advance(cut.stages);
    }
    if (unit == kNoUnit) return;
  }
}

// A consumer's view of the current unit. Vector k of a row is at index(k), if has(k). kWhole: a unit is one row, and every
// lane has all its vectors, so addresses are constants and need no checks.
template <class T, class S, bool kWhole> struct Consumer {
  static constexpr int V = kVector<T>;
  // With many warps, a branch around the missing vectors of a row is free; with few, it would separate the loads.
  static constexpr bool kBranch = S::kWarps * S::kResident > 8 || S::kTile > 3;

  const Cut& cut;
  Control<S>& control;
  const unsigned char* ring;
  const uint32_t rank;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_lanes = kWhole ? S::kThreads : 32 * cut.warps_a_row;
  const int lane_of_row = kWhole ? threadIdx.x : threadIdx.x % row_lanes, row_of_unit = kWhole ? 0 : threadIdx.x / row_lanes;
  const int first = rank * cut.slice;
  const int count = min(cut.slice, static_cast<int>(cut.columns / V) - first);
  const int parts = (kWhole ? S::kWarps : cut.warps_a_row) * cut.cluster;  // of a row's sum
  const unsigned char* const mine = ring + (row_of_unit * S::kTile * row_lanes + lane_of_row) * kVectorBytes;
  const int stage_bytes = cut.tensors * S::kTensorBytes;
  const float inverse = 1.0f / static_cast<float>(cut.columns);

  __device__ __forceinline__ int index(int k) const { return k * row_lanes + lane_of_row; }
  __device__ __forceinline__ bool has(int k) const { return kWhole || index(k) < count; }
  __device__ __forceinline__ bool inside(uint32_t row) const { return kWhole || row < cut.rows_in_all; }

  __device__ __forceinline__ const Vector<T, V>& in_ring(const Place& at, int tensor, int k_of_tile) const {
    return *reinterpret_cast<const Vector<T, V>*>(mine + at.stage * stage_bytes + tensor * S::kTensorBytes + k_of_tile * row_lanes * kVectorBytes);
  }

  // Each of the sums over a warp's lanes; if a row has several warps, they are sent to all that need them.
  __device__ __forceinline__ void send_sums(float (&own)[S::kRowSums], uint32_t turn, bool inside) const {
#pragma unroll
    for (float& sum : own) sum = within_warp(sum, 32, Add{});
    if (parts == 1 || !inside) return;
    const int place = turn % kSums, part = rank * cut.warps_a_row + warp % cut.warps_a_row;
    uint64_t* summed = &control.summed[place][row_of_unit];
    const auto slot = [&](int which) { return &control.sums[place][which][row_of_unit * parts + part]; };
    if (cut.cluster > 1) {
      if (lane_of_row == 0) ptx::arrive_expecting(summed, parts * sizeof own);
      if (lane < cut.cluster) {
#pragma unroll
        for (int which = 0; which < S::kRowSums; ++which) ptx::send(slot(which), __float_as_uint(own[which]), summed, lane);
      }
    } else if (lane == 0) {
#pragma unroll
      for (int which = 0; which < S::kRowSums; ++which) *slot(which) = own[which];
      ptx::arrive(summed);
    }
  }

  // A row's sums, once all their parts have arrived; `own` if there is only one part.
  __device__ __forceinline__ void sums_of(uint32_t turn, const float (&own)[S::kRowSums], float (&sums)[S::kRowSums]) const {
    const int place = turn % kSums;
    uint64_t* summed = &control.summed[place][row_of_unit];
    if (parts > 1) {
      if (cut.cluster > 1) ptx::wait_for_cluster(summed, turn / kSums & 1);
      else ptx::wait(summed, turn / kSums & 1);
    }
#pragma unroll
    for (int which = 0; which < S::kRowSums; ++which)
      sums[which] = parts == 1 ? own[which] : sum_of_parts(&control.sums[place][which][row_of_unit * parts]);
  }

  // Each lane reads four parts; if there are few, all lanes read the same.
  __device__ __forceinline__ float sum_of_parts(const float* sums) const {
    if (parts == 2) return sums[0] + sums[1];
    const auto four = [&](int index) {
      const float4 part = reinterpret_cast<const float4*>(sums)[index];
      return (part.x + part.y) + (part.z + part.w);
    };
    if (parts <= 8) return parts == 4 ? four(0) : four(0) + four(1);
    if (parts <= 128 && S::kWarps % 8 == 0) return within_warp(four(lane % (parts / 4)), parts / 4, Add{});
    float sum = lane < parts / 4 ? four(lane) : 0.0f;
    if (lane + 32 < parts / 4) sum += four(lane + 32);  // 16 warps and 16 blocks at most
    return within_warp(sum, 32, Add{});
  }

  // Call after the last use of the loaded data: the producer may overwrite this stage immediately.
  __device__ __forceinline__ void release(Place& at) const {
    __syncwarp();
    if (lane == 0) ptx::arrive(&control.empty[at.stage]);
    at.advance(cut.stages);
  }
};

// Runs a block: the consumer threads call `consume` with their rank in the cluster.
template <class T, class S, class Consume>
__device__ __forceinline__ void run_block(const Cut& cut, Control<S>& control, unsigned char* ring, Consume&& consume) {
  const uint32_t rank = cut.cluster > 1 ? ptx::rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kMaxStages; ++stage) {
      ptx::barrier_init(&control.full[stage], 1);
      ptx::barrier_init(&control.empty[stage], S::kWarps);
    }
    for (int place = 0; place < kDealt; ++place) ptx::barrier_init(&control.dealt[place], 1);
    for (int place = 0; place < kAhead; ++place) ptx::barrier_init(&control.taken[place], 1);
    for (int place = 0; place < kSums; ++place)
      for (int row = 0; row < S::kWarps; ++row) ptx::barrier_init(&control.summed[place][row], cut.cluster > 1 ? 1 : cut.warps_a_row);
    ptx::fence_barrier_init();
    ptx::fence_for_bulk_copies();
  }
  __syncthreads();
  if (cut.cluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  ptx::wait_for_previous_kernel();
  const int warp = threadIdx.x / 32;
  if (warp < S::kWarps) consume(rank);
  else if (warp == S::kWarps) produce<T, S>(cut, control, ring, rank);
  else if (threadIdx.x % 32 == 0 && cut.counter && rank == 0) deal(cut, control);
  if (cut.cluster > 1) {  // a block's shared memory must outlive the writes of other blocks
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

#endif

// The number of such clusters that fit on a device at a time. The driver is queried once for each.
template <auto kernel> int clusters_at_a_time(int device, const Launch& how, int resident) {
  static std::mutex mutex;
  static std::map<std::tuple<int, int, size_t>, int> known;
  const std::lock_guard lock(mutex);
  int& count = known[{device, how.cluster, how.shared}];
  if (count > 0) return count;
  grant<kernel>(device);
  if (how.cluster > 1) {
    cudaLaunchAttribute attributes[2];
    const cudaLaunchConfig_t config = configuration(how, nullptr, attributes);
    check(cudaOccupancyMaxActiveClusters(&count, kernel, &config), "cudaOccupancyMaxActiveClusters");
  } else {
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, how.block.x, how.shared), "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    count = std::min(count, resident) * limits_of(device).multiprocessors;
  }
  return count;
}

inline bool contiguous(const Rows& rows, const Shape& shape) { return rows.inner == shape.rows && rows.inner_stride == shape.columns; }

// Computes the fields that follow from the shape S and from `cut.cluster`, `slice`, `warps_a_row`, `tensors` and `from`, for a
// ring of about the given size. Returns the dynamic shared memory in bytes, or 0 if the device has too little.
template <auto kernel, class T, class S> size_t fill_in(const Shape& shape, size_t ring_bytes, Cut& cut) {
  const DeviceLimits& limits = limits_of(shape.device);
  cut.rows_in_all = shape.rows;
  cut.columns = shape.columns;
  cut.rows = S::kWarps / cut.warps_a_row;
  cut.units = blocks_for(shape.rows, cut.rows);
  cut.adjacent = S::kTiles == 1 && cut.cluster == 1 && cut.slice == S::kTile * 32 * cut.warps_a_row;
  for (int tensor = 0; tensor < cut.tensors; ++tensor) cut.adjacent = cut.adjacent && contiguous(cut.from[tensor], shape);
  const size_t stage = size_t{S::kTensorBytes} * cut.tensors;
  const size_t at_most = std::min<size_t>(limits.shared_a_block, limits.shared_a_multiprocessor / S::kResident - 1024) - sizeof(Control<S>);
  const size_t least = 2 * S::kTiles + 1;  // a unit in its second pass, one in its first, and one stage of the next
  cut.stages = static_cast<int>(std::min<size_t>({std::max(ring_bytes / stage, least), at_most / stage, size_t{kMaxStages}}));
  if (cut.stages < static_cast<int>(least)) return 0;
  const Launch how = {dim3(limits.multiprocessors / cut.cluster * cut.cluster), dim3(S::kBlock), stage * cut.stages, cut.cluster};
  const int teams = clusters_at_a_time<kernel>(shape.device, how, S::kResident);
  cut.teams = std::min<uint32_t>(cut.units, teams);
  return teams > 0 ? how.shared : 0;
}

}  // namespace rms_norm::bulk

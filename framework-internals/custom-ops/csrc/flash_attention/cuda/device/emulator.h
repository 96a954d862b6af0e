// Replaces primitives.cuh and CUDA's built-in names, so that g++ compiles the kernels unchanged and a CPU runs them. Every
// thread is a fiber; a collective operation of a warp or warpgroup happens when its last thread arrives. The tensor cores'
// operands are read through descriptors and swizzled shared memory, as the hardware does. Copies write what TMA writes, and
// sums are truncated like the hardware's. The emulator reports kernels that would hang, read past shared memory or copy from
// an unaligned address.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define FLASH_DEVICE inline
#define FLASH_HOST_DEVICE inline
#define FLASH_HOPPER 1
#define FLASH_SHARED_MEMORY(name) unsigned char* name = emulator::shared()
using std::max;
using std::min;

#include "device.h"

// The names and signatures below are CUDA's; half types are copied bit by bit.
#pragma GCC diagnostic ignored "-Wclass-memaccess"

namespace emulator {

struct Dim {
  unsigned x, y, z;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};
struct Meeting {  // threads that wait for each other
  int arrived = 0;
  int generation = 0;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline int current, threads;
inline Dim block_index, grid;
inline std::vector<unsigned char> memory;
inline size_t shared_bytes;
inline std::map<int, Meeting> meetings;
inline std::function<void()> body;
inline long progress;  // counts events that may let another thread continue

[[noreturn]] inline void fail(const char* what) {
  std::printf("emulator: %s (thread %d of block %u, %u, %u)\n", what, current, block_index.x, block_index.y,
              block_index.z);
  std::exit(2);
}

// A matrix descriptor stores 18 bits of a shared address, so shared memory starts at a multiple of 2^18.
constexpr uintptr_t kWindow = uintptr_t{1} << 18;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }
inline unsigned char* shared() {
  return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(memory.data()) + kWindow - 1) & ~(kWindow - 1));
}
inline void check_shared(uint64_t address, int bytes) {
  const auto start = reinterpret_cast<uint64_t>(shared());
  if (address < start || address + bytes > start + shared_bytes) fail("an access outside of shared memory");
}

// Waits until `count` threads have arrived; the last one runs `together` before any continues.
template <typename Together>
void meet(int id, int count, Together together) {
  Meeting& meeting = meetings[id];
  const int generation = meeting.generation;
  ++progress;
  if (++meeting.arrived == count) {
    together();
    meeting.arrived = 0;
    ++meeting.generation;
  } else {
    while (meeting.generation == generation) yield();
  }
}
// Ids: 0 ... 15 named barriers, then the block, its warps, its warpgroups.
inline void sync_block() {
  meet(16, threads, [] {});
}
template <typename Together>
void meet_warp(Together together) {
  meet(100 + current / 32, 32, together);
}
template <typename Together>
void meet_warpgroup(Together together) {
  meet(1000 + current / 128, 128, together);
}

inline void entry() {
  body();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void run_block() {
  memory.assign(2 * kWindow, 0xAB);  // kernels must not rely on zeros
  meetings.clear();
  for (Fiber& fiber : fibers) {
    fiber.stack.resize(192 << 10);
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, entry, 0);
  }
  for (bool any = true; any;) {
    any = false;
    const long before = progress;
    for (current = 0; current < threads; ++current) {
      if (fibers[current].done) continue;
      any = true;
      swapcontext(&scheduler, &fibers[current].context);
      if (fibers[current].done) ++progress;
    }
    if (any && progress == before) fail("every thread waits: a deadlock");
  }
}

// The launch: runs the blocks one after another, in the order of their indices.
inline void launch(Dim blocks, int block_threads, size_t block_shared_bytes, std::function<void()> kernel) {
  constexpr size_t kMostShared = 227 << 10;  // a block's on sm_90; 99 KiB on sm_120
  shared_bytes = block_shared_bytes;
  if (shared_bytes > kMostShared) fail("more shared memory than a block can have");
  grid = blocks;
  threads = block_threads;
  body = std::move(kernel);
  fibers.resize(threads);
  for (unsigned z = 0; z < blocks.z; ++z)
    for (unsigned y = 0; y < blocks.y; ++y)
      for (unsigned x = 0; x < blocks.x; ++x) {
        block_index = {x, y, z};
        run_block();
      }
}

struct Slot {
  uint64_t words[8];
  float* floats;
};
inline std::vector<Slot> slots(1024);

template <typename T>
float element(uint16_t bits) {
  T value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
template <typename T>
float half_of(uint32_t word, int which) {
  return element<T>(static_cast<uint16_t>(word >> (16 * which)));
}

// The tensor cores truncate a sum towards zero to the 24 bits of its accumulator (measured on an H200: 1 + 0.94 ulp gives 1,
// and 1 - 0.25 ulp gives the number below 1). They also truncate the addends, two bits further down; this is not emulated.
inline float truncated(double sum) {
  const float nearest = static_cast<float>(sum);
  return std::abs(nearest) > std::abs(sum) ? std::nextafterf(nearest, 0.f) : nearest;
}

}  // namespace emulator

#define threadIdx (emulator::Dim{static_cast<unsigned>(emulator::current), 0, 0})
#define blockIdx emulator::block_index
#define gridDim emulator::grid
#define __syncthreads emulator::sync_block

namespace custom_ops::flash_attention {

using SharedAddress = uint64_t;

struct TensorMap {  // the fields of a CUtensorMap
  const char* base;
  int64_t sizes[4];
  int64_t strides[4];  // bytes
  int box_rows;
};

inline SharedAddress shared_address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline int take_next(int* counter) { return (*counter)++; }
template <typename T>
T shuffle_xor(T value, int mask) {
  using namespace emulator;
  std::memcpy(&slots[current].words[0], &value, sizeof(T));
  meet_warp([] {});
  T other;
  std::memcpy(&other, &slots[(current & ~31) + ((current & 31) ^ mask)].words[0], sizeof(T));
  meet_warp([] {});
  return other;
}

inline float shuffle_from(float value, int lane) {
  using namespace emulator;
  std::memcpy(&slots[current].words[0], &value, sizeof value);
  meet_warp([] {});
  float other;
  std::memcpy(&other, &slots[(current & ~31) + lane].words[0], sizeof other);
  meet_warp([] {});
  return other;
}

inline bool warp_any(bool value) {
  using namespace emulator;
  slots[current].words[0] = value;
  meet_warp([] {});
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) any = any || slots[(current & ~31) + lane].words[0] != 0;
  meet_warp([] {});
  return any;
}

// cp.async: a copy completes when a wait covers it, as late as the hardware allows.
struct PendingCopy {
  SharedAddress to;
  const void* from;
  bool valid;
};
inline std::vector<std::vector<std::vector<PendingCopy>>> pending_copies(1024);

inline void copy16(SharedAddress to, const void* from, bool valid) {
  if (to % 16 != 0 || (valid && reinterpret_cast<uintptr_t>(from) % 16 != 0))
    emulator::fail("a 16-byte copy is not aligned");
  emulator::check_shared(to, 16);
  auto& groups = pending_copies[emulator::current];
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({to, from, valid});
}
inline void copy_commit() {
  auto& groups = pending_copies[emulator::current];
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}
template <int kPending>
void copy_wait() {
  auto& groups = pending_copies[emulator::current];
  while (groups.size() > kPending + 1) {
    for (const PendingCopy& copy : groups.front()) {
      if (copy.valid) std::memcpy(reinterpret_cast<void*>(copy.to), copy.from, 16);
      else std::memset(reinterpret_cast<void*>(copy.to), 0, 16);
    }
    groups.erase(groups.begin());
  }
}

template <bool kTransposed>
void load_matrices_as(uint32_t (&out)[4], SharedAddress row) {
  using namespace emulator;
  check_shared(row, 16);
  slots[current].words[0] = row;
  meet_warp([] {});
  const int warp = current & ~31, lane = current & 31;
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int r = kTransposed ? lane % 4 * 2 + i : lane / 4, c = kTransposed ? lane / 4 : lane % 4 * 2 + i;
      pair[i] = reinterpret_cast<const uint16_t*>(slots[warp + matrix * 8 + r].words[0])[c];
    }
    std::memcpy(&out[matrix], pair, 4);
  }
  meet_warp([] {});
}
inline void load_matrices(uint32_t (&out)[4], SharedAddress row) { load_matrices_as<false>(out, row); }
inline void load_matrices_transposed(uint32_t (&out)[4], SharedAddress row) { load_matrices_as<true>(out, row); }

template <typename T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using namespace emulator;
  Slot& slot = slots[current];
  for (int i = 0; i < 4; ++i) slot.words[i] = a[i];
  slot.words[4] = b0;
  slot.words[5] = b1;
  slot.floats = c;
  meet_warp([] {
    const int warp = current & ~31;
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = slots[warp + lane].floats[i];
        for (int k = 0; k < 16; ++k) {
          const uint32_t left = slots[warp + row % 8 * 4 + k % 8 / 2].words[row / 8 + k / 8 * 2];
          const uint32_t right = slots[warp + column * 4 + k % 8 / 2].words[4 + k / 8];
          sum += static_cast<double>(half_of<T>(left, k % 2)) * half_of<T>(right, k % 2);
        }
        slots[warp + lane].floats[i] = truncated(sum);
      }
  });
}

// mbarrier: the phase in bit 0, the expected and pending arrivals, the pending bytes.
struct Mbarrier {
  int16_t phase, expected, pending, unused;
};
inline std::map<SharedAddress, std::pair<Mbarrier, int64_t>>& mbarriers() {
  static std::map<SharedAddress, std::pair<Mbarrier, int64_t>> all;
  return all;
}
inline void barrier_init(SharedAddress barrier, int arrivals) {
  emulator::check_shared(barrier, 8);
  mbarriers()[barrier] = {Mbarrier{0, static_cast<int16_t>(arrivals), static_cast<int16_t>(arrivals), 0}, 0};
}
inline void fence_async_proxy() {}
inline void barrier_settle(SharedAddress barrier) {
  auto& [state, bytes] = mbarriers()[barrier];
  ++emulator::progress;
  if (state.pending < 0) emulator::fail("more arrivals at an mbarrier than it expects");
  if (state.pending == 0 && bytes == 0) state.phase ^= 1, state.pending = state.expected;
}
inline void barrier_arrive(SharedAddress barrier) {
  --mbarriers()[barrier].first.pending;
  barrier_settle(barrier);
}
inline void barrier_arrive_expect(SharedAddress barrier, uint32_t bytes) {
  mbarriers()[barrier].second += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(SharedAddress barrier, uint32_t parity) {
  while (mbarriers()[barrier].first.phase == static_cast<int>(parity)) emulator::yield();
}

// The 128-byte swizzle: bits 4 ... 6 of an address are replaced by their exclusive or with bits 7 ... 9.
inline uint64_t swizzled(uint64_t offset) { return offset ^ (offset >> 3 & 0x70); }

inline void tensor_copy(SharedAddress to, const TensorMap& map, SharedAddress barrier, int column, int row, int head,
                        int batch) {
  emulator::check_shared(to, map.box_rows * 128);
  const auto base = reinterpret_cast<uint64_t>(emulator::shared());
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < 64; ++c) {
      uint16_t value = 0;
      if (row + r < map.sizes[1] && column + c < map.sizes[0]) {
        std::memcpy(
            &value,
            map.base + (column + c) * 2 + (row + r) * map.strides[1] + head * map.strides[2] + batch * map.strides[3],
            2);
      }
      std::memcpy(reinterpret_cast<void*>(base + swizzled(to - base + r * 128 + c * 2)), &value, 2);
    }
  mbarriers()[barrier].second -= map.box_rows * 128;
  barrier_settle(barrier);
}

inline void bulk_copy(SharedAddress to, const void* from, uint32_t bytes, SharedAddress barrier) {
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0)
    emulator::fail("a bulk copy is not aligned");
  emulator::check_shared(to, bytes);
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  mbarriers()[barrier].second -= bytes;
  barrier_settle(barrier);
}
inline float2 load_shared_pair(SharedAddress from) {
  emulator::check_shared(from, 8);
  return *reinterpret_cast<const float2*>(from);
}

template <typename Four>  // float4 or int4
void store_shared(SharedAddress to, Four value) {
  if (to % 16 != 0) emulator::fail("a 16-byte store is not aligned");
  emulator::check_shared(to, 16);
  *reinterpret_cast<Four*>(to) = value;
}
inline int4 load_shared_integers(SharedAddress from) {
  if (from % 16 != 0) emulator::fail("a 16-byte load is not aligned");
  emulator::check_shared(from, 16);
  return *reinterpret_cast<const int4*>(from);
}
inline void store_matrices_transposed(SharedAddress row, const uint32_t (&value)[4]) {
  using namespace emulator;
  if (row % 16 != 0) fail("a row of a matrix is not aligned");
  check_shared(row, 16);
  slots[current].words[0] = row;
  meet_warp([] {});
  const int warp = current & ~31, lane = current & 31;
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int i = 0; i < 2; ++i) {
      auto* to = reinterpret_cast<uint16_t*>(slots[warp + matrix * 8 + lane % 4 * 2 + i].words[0]);
      to[lane / 4] = static_cast<uint16_t>(value[matrix] >> (16 * i));
    }
  meet_warp([] {});
}

inline void tensor_store(const TensorMap& map, SharedAddress from, int column, int row, int head, int batch) {
  emulator::check_shared(from, map.box_rows * 128);
  const auto base = reinterpret_cast<uint64_t>(emulator::shared());
  for (int r = 0; r < map.box_rows && row + r < map.sizes[1]; ++r)
    for (int c = 0; c < 64 && column + c < map.sizes[0]; ++c) {
      char* const to = const_cast<char*>(map.base) + (column + c) * 2 + (row + r) * map.strides[1] + head * map.strides[2] + batch * map.strides[3];
      std::memcpy(to, reinterpret_cast<const void*>(base + swizzled(from - base + r * 128 + c * 2)), 2);
    }
}
inline void bulk_commit() {}
inline void bulk_add(float* to, SharedAddress from, uint32_t bytes) {
  if (from % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0 || bytes % 16 != 0)
    emulator::fail("a bulk addition is not aligned");
  emulator::check_shared(from, bytes);
  for (uint32_t i = 0; i < bytes / 4; ++i) to[i] += reinterpret_cast<const float*>(from)[i];
}
inline void bulk_wait_read() {}
inline void bulk_wait() {}
inline void add_to_memory(float* to, float4 value) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulator::fail("a 16-byte addition is not aligned");
  to[0] += value.x, to[1] += value.y, to[2] += value.z, to[3] += value.w;
}
inline void fence_memory() {}
inline void wait_turn(const int* turn, int number) {  // by blocks that run one after another
  if (*turn != number) emulator::fail("a block waits for one that has not run");
}
inline void pass_turn(int* turn, int number) { *turn = number; }
inline void sync_warp() {
  emulator::meet_warp([] {});
}
inline int uniform(int value) { return value; }

template <int kCount>
void registers_release() {}
template <int kCount>
void registers_acquire() {}
inline void named_barrier_sync(int id, int count) {
  emulator::meet(id, count, [] {});
}
inline void named_barrier_arrive(int id, int count) {
  emulator::Meeting& meeting = emulator::meetings[id];
  ++emulator::progress;
  if (++meeting.arrived == count) meeting.arrived = 0, ++meeting.generation;
}

inline void wgmma_begin() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
template <typename T, int kCount>
void wgmma_keep(T (&)[kCount]) {}

// An element of a matrix behind a descriptor: `mn` is its index in the kept dimension, `k` in the summed one.
template <typename T, bool kTransposed>
float matrix_element(uint64_t descriptor, int mn, int k) {
  if (descriptor >> 62 != 1) emulator::fail("a matrix descriptor without the 128-byte swizzle");
  const auto base = reinterpret_cast<uint64_t>(emulator::shared());
  const uint64_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                 stride = (descriptor >> 32 & 0x3fff) << 4;
  const uint64_t offset = kTransposed ? start + mn / 64 * leading + mn % 64 * 2 + k / 8 * stride + k % 8 * 128
                                      : start + mn / 8 * stride + mn % 8 * 128 + k * 2;
  const uint64_t address = base + swizzled(offset);
  emulator::check_shared(address, 2);
  uint16_t bits;
  std::memcpy(&bits, reinterpret_cast<const void*>(address), 2);
  return emulator::element<T>(bits);
}

template <typename T, bool kTransposeB, int kCount, typename Left>
void wgmma_together(float (&d)[kCount], uint64_t b, int accumulate, Left left) {
  using namespace emulator;
  slots[current].floats = d;
  meet_warpgroup([=] {
    const int group = current & ~127;
    static std::vector<float> a(64 * 16), right(16 * 256);
    for (int row = 0; row < 64; ++row)
      for (int k = 0; k < 16; ++k) a[row * 16 + k] = left(group, row, k);
    for (int column = 0; column < kCount * 2; ++column)
      for (int k = 0; k < 16; ++k) right[column * 16 + k] = matrix_element<T, kTransposeB>(b, column, k);
    for (int thread = 0; thread < 128; ++thread)
      for (int i = 0; i < kCount; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
        double sum = accumulate ? slots[group + thread].floats[i] : 0.0;
        for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row * 16 + k]) * right[column * 16 + k];
        slots[group + thread].floats[i] = truncated(sum);
      }
  });
}
template <bool kTransposeB, bool kTransposeA = false, typename T, int kCount>
void wgmma(T*, float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
  wgmma_together<T, kTransposeB>(d, b, accumulate,
                                 [=](int, int row, int k) { return matrix_element<T, kTransposeA>(a, row, k); });
}
template <bool kTransposeB, typename T, int kCount>
void wgmma(T*, float (&d)[kCount], const uint32_t* a, uint64_t b, int accumulate) {
  for (int i = 0; i < 4; ++i) emulator::slots[emulator::current].words[i] = a[i];
  wgmma_together<T, kTransposeB>(d, b, accumulate, [](int group, int row, int k) {
    const int thread = group + row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
    return emulator::half_of<T>(static_cast<uint32_t>(emulator::slots[thread].words[row % 16 / 8 + k / 8 * 2]), k % 2);
  });
}

// -------------------------------------------------------------------------------------------------------- host side

inline const char* clear(void* memory, int64_t bytes, void*) {
  std::memset(memory, 0, static_cast<size_t>(bytes));
  return nullptr;
}

template <typename Args>
const char* launch(void (*kernel)(Args), dim3 blocks, int block_threads, int shared_bytes, void*, const Args& args) {
  emulator::launch({blocks.x, blocks.y, blocks.z}, block_threads, shared_bytes, [&] { kernel(args); });
  return nullptr;
}
inline Device device() { return {3, 90}; }  // few multiprocessors, so that persistent blocks process several tiles

inline const char* make_tensor_map(TensorMap& map, const void* base, const int64_t (&sizes)[4],
                                   const int64_t (&strides)[4], int box_rows) {
  map.base = static_cast<const char*>(base);
  map.box_rows = box_rows;
  for (int i = 0; i < 4; ++i) map.sizes[i] = sizes[i], map.strides[i] = strides[i] * 2;
  for (int i = 0; i < 4; ++i) {
    if (map.sizes[i] == 0 || (i > 0 && (map.strides[i] == 0 || map.strides[i] % 16 != 0)))
      return "the driver refuses the tensor's layout (cuTensorMapEncodeTiled)";
  }
  return nullptr;
}

}  // namespace custom_ops::flash_attention

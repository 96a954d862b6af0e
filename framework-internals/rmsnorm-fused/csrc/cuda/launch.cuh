// The host side of a launch: errors, the current device, limits of a device, attributes of a kernel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

#include "device.cuh"

namespace rms_norm {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error; otherwise the next check in this process would report it
  throw std::runtime_error(std::string("rms_norm: ") + what + ": " + cudaGetErrorString(status));
}

// Row numbers have 32 bits, with room for the rows that the kernels prefetch.
inline void check_size(const Shape& shape) {
  if (shape.rows > INT32_MAX || shape.columns > INT32_MAX)
    throw std::invalid_argument("the CUDA kernels of rms_norm take at most 2147483647 rows and as many columns, got " +
                                std::to_string(shape.rows) + " x " + std::to_string(shape.columns) + "; split the tensor");
}

// Makes a device current during the lifetime of this object.
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

constexpr int kMaxDevices = 64;

struct DeviceLimits {
  int multiprocessors;
  int capability;               // 90 for compute capability 9.0
  int shared_a_block;           // bytes, if requested
  int shared_a_multiprocessor;  // bytes
  int l2_cache;                 // bytes
  double memory_rate;           // bytes per second by the clock and the width of the bus; 0 where the driver tells neither
};

// The driver is queried once per device, because a query takes as long as a small kernel.
inline const DeviceLimits& limits_of(int device) {
  static std::array<DeviceLimits, kMaxDevices> limits;
  static std::array<std::once_flag, kMaxDevices> asked;
  if (device < 0 || device >= kMaxDevices) throw std::invalid_argument("rms_norm: no limits kept for device " + std::to_string(device));
  std::call_once(asked[device], [device] {
    const auto attribute = [device](cudaDeviceAttr name) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
      return value;
    };
    limits[device] = {attribute(cudaDevAttrMultiProcessorCount),
                      10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
                      attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                      attribute(cudaDevAttrL2CacheSize),
                      // kHz, two transfers a cycle, bits
                      2e3 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8};
  });
  return limits[device];
}

struct Launch {
  dim3 grid, block;
  size_t shared = 0;         // dynamic, bytes
  int cluster = 1;           // blocks
  bool before_end = false;   // may start before the previous kernel in the stream has ended
};

// Sets the attributes that a kernel needs to use more shared memory, or larger clusters, than the default limits. Called once
// per kernel and device.
template <auto kernel> void grant(int device) {
  static std::atomic<uint64_t> granted{0};
  if (granted.load(std::memory_order_acquire) >> device & 1) return;
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  const int dynamic = limits_of(device).shared_a_block - static_cast<int>(attributes.sharedSizeBytes);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic), "shared memory");
  if (limits_of(device).capability >= 90)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster size");
  granted.fetch_or(uint64_t{1} << device, std::memory_order_release);
}

inline cudaLaunchConfig_t configuration(const Launch& how, void* stream, cudaLaunchAttribute (&attributes)[2]) {
  cudaLaunchConfig_t config = {};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = how.shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (how.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(how.cluster), 1, 1};
  }
  if (how.before_end) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  return config;
}

template <auto kernel, class... Arguments> void launch(const Launch& how, int device, void* stream, const Arguments&... arguments) {
  if (how.shared > 0 || how.cluster > 1) grant<kernel>(device);
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config = configuration(how, stream, attributes);
  check(cudaLaunchKernelEx(&config, kernel, arguments...), "launch");
}

// Whether a tensor of this shape is too large for the L2 cache.
template <class T> bool larger_than_l2(const Shape& shape) {
  return shape.rows * shape.columns * static_cast<int64_t>(sizeof(T)) > limits_of(shape.device).l2_cache;
}

constexpr int kMaxCluster = 16;  // blocks; more than 8 need cudaFuncAttributeNonPortableClusterSizeAllowed

// A row of vectors, divided over the blocks of a cluster.
struct Spread {
  int blocks;
  int slice;  // vectors of each block except the last
};

// The smallest number of blocks, a power of two from `least` to `most`, with slices no wider than `slice`; with `most` blocks a
// slice may still be wider.
inline Spread spread_over_cluster(int64_t vectors, int slice, int most, int least = 1) {
  Spread spread = {least, static_cast<int>((vectors + least - 1) / least)};
  while (spread.slice > slice && spread.blocks < most) {
    spread.blocks *= 2;
    spread.slice = static_cast<int>((vectors + spread.blocks - 1) / spread.blocks);
  }
  return spread;
}

inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Whether every row starts at a multiple of 16 bytes.
template <class T> bool aligned(const Rows& rows) {
  return aligned(rows.data) && rows.outer_stride % kVector<T> == 0 && rows.inner_stride % kVector<T> == 0;
}

inline unsigned blocks_for(int64_t work, int64_t a_block, int64_t at_most = INT32_MAX) {
  return static_cast<unsigned>(std::min((work + a_block - 1) / a_block, at_most));
}

// Calls function(T{}) with the type of x.
template <class Function> void visit(Type type, Function&& function) {
  switch (type) {
    case Type::float32: return function(float{});
    case Type::float64: return function(double{});
    case Type::float16: return function(__half{});
    case Type::bfloat16: return function(__nv_bfloat16{});
  }
}

}  // namespace rms_norm

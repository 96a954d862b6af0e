// The level that a CPU kernel is compiled for, and the types of its elements.
//
// A wheel built on one machine runs on another, so it cannot use the instruction set of the build machine. The library
// compiles each cpu.cpp once per level of stable/cpu_levels.cpp, in a namespace of that name (CUSTOM_OPS_LEVEL), and selects
// one at run time. GCC's target_clones does not work here: it uses the clone for "arch=haswell" on a Haswell only, and not
// on later processors.
#pragma once

#include <native_build/simd.h>

#include "dtype.h"

#ifdef CUSTOM_OPS_LEVEL
#define CUSTOM_OPS_BEGIN_LEVEL namespace CUSTOM_OPS_LEVEL {
#define CUSTOM_OPS_END_LEVEL }
#else
#define CUSTOM_OPS_BEGIN_LEVEL
#define CUSTOM_OPS_END_LEVEL
#endif

namespace custom_ops {

namespace simd = native_build::simd;
using native_build::BFloat16;
using native_build::Half;
using native_build::Wide;
using native_build::narrow;
using native_build::widen;

template <typename T> struct TypeTag { using type = T; };

// Calls `run` with the tag of the dtype's type on a CPU; common/launch.h has the same for CUDA's types.
template <typename Run> NATIVE_BUILD_INLINE void for_dtype(Dtype dtype, Run run) {
  switch (dtype) {
    case Dtype::kFloat32: return run(TypeTag<float>{});
    case Dtype::kFloat64: return run(TypeTag<double>{});
    case Dtype::kFloat16: return run(TypeTag<Half>{});
    case Dtype::kBFloat16: return run(TypeTag<BFloat16>{});
  }
}

}  // namespace custom_ops

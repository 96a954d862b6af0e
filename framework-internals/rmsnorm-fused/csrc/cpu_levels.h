// The CPU kernels as often as instruction sets are worth telling apart: what a library needs that is compiled on one
// machine and run on another. Its build compiles rms_norm_cpu.cpp once for each level that the processor family has.
#pragma once

#include "rms_norm.h"

namespace rms_norm {

#define RMS_NORM_CPU_LEVEL_DECLARED(level)            \
  namespace level {                                   \
  void forward(const Forward& call);                  \
  int64_t backward_workspace(const Backward& call);   \
  void backward(const Backward& call);                \
  }
RMS_NORM_CPU_LEVEL_DECLARED(baseline)
#ifdef __x86_64__
RMS_NORM_CPU_LEVEL_DECLARED(avx2)
RMS_NORM_CPU_LEVEL_DECLARED(avx512)
#endif
#undef RMS_NORM_CPU_LEVEL_DECLARED

// One implementation of rms_norm.h.
struct Kernels {
  void (*forward)(const Forward& call);
  int64_t (*backward_workspace)(const Backward& call);
  void (*backward)(const Backward& call);
};

// The best that this processor can run.
inline Kernels cpu_kernels() {
#ifdef __x86_64__
  // x86-64-v3 and -v4, which the levels are compiled for, are more than their names: these features are what tells the
  // processors that have them from those that do not.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (v3 && v4) return {avx512::forward, avx512::backward_workspace, avx512::backward};
  if (v3) return {avx2::forward, avx2::backward_workspace, avx2::backward};
#endif
  return {baseline::forward, baseline::backward_workspace, baseline::backward};
}

}  // namespace rms_norm

// The CPU kernels, compiled once per instruction set, for a library that is compiled on one machine and runs on another. The
// build compiles rms_norm.cpp once for each level that it takes, and defines RMS_NORM_HAS_AVX2 and RMS_NORM_HAS_AVX512 for these two.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../rms_norm.h"

namespace rms_norm {

#define RMS_NORM_CPU_LEVEL_DECLARED(level)            \
  namespace level {                                   \
  void forward(const Forward& call);                  \
  int64_t backward_workspace(const Backward& call);   \
  void backward(const Backward& call);                \
  }
#ifdef __aarch64__
RMS_NORM_CPU_LEVEL_DECLARED(neon)
#else
RMS_NORM_CPU_LEVEL_DECLARED(baseline)
#endif
#ifdef RMS_NORM_HAS_AVX2
RMS_NORM_CPU_LEVEL_DECLARED(avx2)
#endif
#ifdef RMS_NORM_HAS_AVX512
RMS_NORM_CPU_LEVEL_DECLARED(avx512)
#endif
#undef RMS_NORM_CPU_LEVEL_DECLARED

// The best level that this processor supports and torch may use; ATEN_CPU_CAPABILITY (default, avx2, avx512) limits both.
// RMSNORM_FUSED_CPU names a lower one; an error if it names none that is here.
inline Kernels cpu_kernels() {
  const auto variable = [](const char* name) { return std::string_view(std::getenv(name) ? std::getenv(name) : ""); };
  const std::string_view asked = variable("RMSNORM_FUSED_CPU");
  struct Level {
    std::string_view name;
    Kernels kernels;
  };
#ifdef __aarch64__
  std::vector<Level> levels = {{"neon", {neon::forward, neon::backward_workspace, neon::backward}}};
#else
  std::vector<Level> levels = {{"baseline", {baseline::forward, baseline::backward_workspace, baseline::backward}}};
#endif
#ifdef __x86_64__
  [[maybe_unused]] const std::string_view allowed = variable("ATEN_CPU_CAPABILITY");
  // These levels are compiled for x86-64-v3 and -v4. Processors with the features checked here have the others as well;
  // clang 15 cannot ask for F16C.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  [[maybe_unused]] const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#ifdef RMS_NORM_HAS_AVX2
  if (has_avx2 && allowed != "default") levels.push_back({"avx2", {avx2::forward, avx2::backward_workspace, avx2::backward}});
#endif
#ifdef RMS_NORM_HAS_AVX512
  if (has_avx512 && allowed != "default" && allowed != "avx2") levels.push_back({"avx512", {avx512::forward, avx512::backward_workspace, avx512::backward}});
#endif
#endif
  std::string names;
  for (const Level& level : levels) {
    if (level.name == asked) return level.kernels;
    names += (names.empty() ? "" : ", ") + std::string(level.name);
  }
  if (!asked.empty()) throw std::runtime_error("RMSNORM_FUSED_CPU: expected one of " + names + " on this machine, got '" + std::string(asked) + "'");
  return levels.back().kernels;
}

}  // namespace rms_norm

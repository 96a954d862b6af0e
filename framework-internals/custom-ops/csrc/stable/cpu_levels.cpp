// The CPU kernels, compiled once per instruction set, and the selection among them at run time.
//
// CUSTOM_OPS_LEVELS says how many of them the build has compiled, from the lowest on: all for a library that other machines load.

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../adamw/kernels.h"
#include "../bias_gelu/kernels.h"
#include "../conv_bn_relu/kernels.h"
#include "../cross_entropy/kernels.h"
#include "../bias_gelu/glu/kernels.h"
#include "../flash_attention/flash_attention.h"
#include "../mm/kernels.h"
#include "../rotary/kernels.h"
#include "../scale/kernels.h"
#include "cpu_levels.h"

namespace custom_ops {

#define CUSTOM_OPS_ATTENTION_DECLARED(level)                                                                    \
  namespace level::flash_attention {                                                                            \
  int64_t forward_cpu_packed(const custom_ops::flash_attention::Problem& problem);                                \
  const char* forward_cpu_pack(const custom_ops::flash_attention::Forward& call, std::atomic<int64_t>& next);     \
  const char* forward_cpu(const custom_ops::flash_attention::Forward& call, std::atomic<int64_t>& next);          \
  const char* forward_cpu_merge(const custom_ops::flash_attention::Forward& call, std::atomic<int64_t>& next);    \
  const char* backward_cpu(const custom_ops::flash_attention::Backward& call, std::atomic<int64_t>& next);        \
  const char* backward_cpu_finish(const custom_ops::flash_attention::Backward& call, std::atomic<int64_t>& next); \
  }
#define CUSTOM_OPS_LEVEL_DECLARED(level)                                                                \
  namespace level {                                                                                     \
  void scale_cpu(const ScaleCall& call, int64_t begin, int64_t end);                                    \
  void scale_shift_relu_cpu(const ScaleShiftRelu& call, int64_t begin, int64_t end);                    \
  void bias_gelu_cpu(const BiasGelu& call, int64_t begin, int64_t end);                                 \
  void bias_gelu_backward_rows_cpu(const BiasGeluBackward& call, int64_t begin, int64_t end);           \
  void bias_gelu_backward_columns_cpu(const BiasGeluBackward& call, int64_t begin, int64_t end);        \
  void glu_cpu(const Glu& call, int64_t begin, int64_t end);                                            \
  void glu_backward_cpu(const GluBackward& call, int64_t begin, int64_t end);                           \
  void cross_entropy_cpu(const CrossEntropy& call, int64_t begin, int64_t end);                         \
  void cross_entropy_block_cpu(const CrossEntropyBlock& call, int64_t begin, int64_t end);              \
  void general_cross_entropy_cpu(const GeneralCrossEntropy& call, int64_t begin, int64_t end);          \
  void general_cross_entropy_block_cpu(const GeneralCrossEntropyBlock& call, int64_t begin, int64_t end);\
  void gradient_norm_chunks_cpu(const GradientNorm& call, int64_t begin, int64_t end);                  \
  void adamw_cpu(const AdamW& call, int64_t begin, int64_t end);                                        \
  void rotary_cpu(const Rotary& call, int64_t begin, int64_t end);                                      \
  void mm_cpu(const MatMul& call, int64_t begin, int64_t end);                                          \
  }                                                                                                     \
  CUSTOM_OPS_ATTENTION_DECLARED(level)
// What every processor of the family has; the only level of a family without others.
#ifdef __aarch64__
#define CUSTOM_OPS_LOWEST neon
#else
#define CUSTOM_OPS_LOWEST baseline
#endif
#ifndef CUSTOM_OPS_LEVELS
#ifdef __x86_64__
#define CUSTOM_OPS_LEVELS 5
#else
#define CUSTOM_OPS_LEVELS 1
#endif
#endif
CUSTOM_OPS_LEVEL_DECLARED(CUSTOM_OPS_LOWEST)
#if CUSTOM_OPS_LEVELS > 1
CUSTOM_OPS_LEVEL_DECLARED(avx2)
#endif
#if CUSTOM_OPS_LEVELS > 2
CUSTOM_OPS_LEVEL_DECLARED(avx512)
#endif
#if CUSTOM_OPS_LEVELS > 3
CUSTOM_OPS_ATTENTION_DECLARED(avx512_bf16)
#endif
#if CUSTOM_OPS_LEVELS > 4
CUSTOM_OPS_ATTENTION_DECLARED(amx)
#endif

namespace {

#define CUSTOM_OPS_NAME_OF(level) #level
#define CUSTOM_OPS_NAME(level) CUSTOM_OPS_NAME_OF(level)
enum class Level { kLowest, kAvx2, kAvx512, kAvx512Bf16, kAmx };
constexpr Level kHighest = static_cast<Level>(CUSTOM_OPS_LEVELS - 1);
constexpr std::string_view kNames[] = {CUSTOM_OPS_NAME(CUSTOM_OPS_LOWEST), "avx2", "avx512", "avx512_bf16", "amx"};

#ifdef __x86_64__
// Whether the processor has AMX with bfloat16 and Linux lets this process use the tiles' registers, which it has to ask for.
bool may_use_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kBf16) == 0 || (edx & kTile) == 0) return false;
#ifdef __linux__
  constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// The best level that this processor supports and torch may use; ATEN_CPU_CAPABILITY (default, avx2, avx512) limits both.
Level best_level() {
#ifdef __x86_64__
  // These levels are compiled for x86-64-v3 and -v4. Processors with the features checked here have the others as well;
  // clang 15 cannot ask for F16C.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const char* given = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string_view allowed = given ? given : "avx512";
  if (avx512 && allowed == "avx512") {
    if (!__builtin_cpu_supports("avx512bf16")) return Level::kAvx512;
    return may_use_amx() ? Level::kAmx : Level::kAvx512Bf16;
  }
  if (avx2 && allowed != "default") return Level::kAvx2;
#endif
  return Level::kLowest;
}

const Level best = std::min(best_level(), kHighest);

// The level that CUSTOM_OPS_CPU names; the best one if it names none that is here, which level_error() says.
Level find_level() {
  const char* given = std::getenv("CUSTOM_OPS_CPU");
  for (int level = 0; given != nullptr && level <= static_cast<int>(best); ++level) {
    if (kNames[level] == given) return static_cast<Level>(level);
  }
  return best;
}

const Level level = find_level();

std::string find_error() {
  const char* given = std::getenv("CUSTOM_OPS_CPU");
  if (given == nullptr || *given == '\0' || kNames[static_cast<int>(level)] == given) return {};
  std::string names;
  for (int i = 0; i <= static_cast<int>(best); ++i) names += (i == 0 ? "" : ", ") + std::string(kNames[i]);
  return "CUSTOM_OPS_CPU: expected one of " + names + ", which this processor has and ATEN_CPU_CAPABILITY allows, got '" + given +
         "'; name one of them, or unset it";
}

const std::string error = find_error();

}  // namespace

const char* level_error() { return error.empty() ? nullptr : error.c_str(); }

// Of the levels above the lowest, those that are compiled; attention has kernels of its own for the two highest.
#if CUSTOM_OPS_LEVELS > 1
#define CUSTOM_OPS_AVX2(call) if (level == Level::kAvx2) return avx2::call;
#else
#define CUSTOM_OPS_AVX2(call)
#endif
#if CUSTOM_OPS_LEVELS > 2
#define CUSTOM_OPS_AVX512(call) if (level >= Level::kAvx512) return avx512::call;
#else
#define CUSTOM_OPS_AVX512(call)
#endif
#if CUSTOM_OPS_LEVELS > 3
#define CUSTOM_OPS_AVX512_BF16(call) if (level == Level::kAvx512Bf16) return avx512_bf16::call;
#else
#define CUSTOM_OPS_AVX512_BF16(call)
#endif
#if CUSTOM_OPS_LEVELS > 4
#define CUSTOM_OPS_AMX(call) if (level == Level::kAmx) return amx::call;
#else
#define CUSTOM_OPS_AMX(call)
#endif
#define CUSTOM_OPS_BY_LEVEL(name, Call)                       \
  void name(const Call& call, int64_t begin, int64_t end) {   \
    CUSTOM_OPS_AVX512(name(call, begin, end))                 \
    CUSTOM_OPS_AVX2(name(call, begin, end))                   \
    return CUSTOM_OPS_LOWEST::name(call, begin, end);         \
  }
#define CUSTOM_OPS_ATTENTION_BY_LEVEL(call)               \
  CUSTOM_OPS_AMX(flash_attention::call)                   \
  CUSTOM_OPS_AVX512_BF16(flash_attention::call)           \
  CUSTOM_OPS_AVX512(flash_attention::call)                \
  CUSTOM_OPS_AVX2(flash_attention::call)                  \
  return CUSTOM_OPS_LOWEST::flash_attention::call;
CUSTOM_OPS_BY_LEVEL(scale_cpu, ScaleCall)
CUSTOM_OPS_BY_LEVEL(scale_shift_relu_cpu, ScaleShiftRelu)
CUSTOM_OPS_BY_LEVEL(bias_gelu_cpu, BiasGelu)
CUSTOM_OPS_BY_LEVEL(bias_gelu_backward_rows_cpu, BiasGeluBackward)
CUSTOM_OPS_BY_LEVEL(bias_gelu_backward_columns_cpu, BiasGeluBackward)
CUSTOM_OPS_BY_LEVEL(glu_cpu, Glu)
CUSTOM_OPS_BY_LEVEL(glu_backward_cpu, GluBackward)
CUSTOM_OPS_BY_LEVEL(cross_entropy_cpu, CrossEntropy)
CUSTOM_OPS_BY_LEVEL(cross_entropy_block_cpu, CrossEntropyBlock)
CUSTOM_OPS_BY_LEVEL(general_cross_entropy_cpu, GeneralCrossEntropy)
CUSTOM_OPS_BY_LEVEL(general_cross_entropy_block_cpu, GeneralCrossEntropyBlock)
CUSTOM_OPS_BY_LEVEL(gradient_norm_chunks_cpu, GradientNorm)
CUSTOM_OPS_BY_LEVEL(adamw_cpu, AdamW)
CUSTOM_OPS_BY_LEVEL(rotary_cpu, Rotary)
CUSTOM_OPS_BY_LEVEL(mm_cpu, MatMul)

namespace flash_attention {
int64_t forward_cpu_packed(const Problem& problem) { CUSTOM_OPS_ATTENTION_BY_LEVEL(forward_cpu_packed(problem)) }
const char* forward_cpu_pack(const Forward& args, std::atomic<int64_t>& next) { CUSTOM_OPS_ATTENTION_BY_LEVEL(forward_cpu_pack(args, next)) }
const char* forward_cpu(const Forward& args, std::atomic<int64_t>& next) { CUSTOM_OPS_ATTENTION_BY_LEVEL(forward_cpu(args, next)) }
const char* forward_cpu_merge(const Forward& args, std::atomic<int64_t>& next) { CUSTOM_OPS_ATTENTION_BY_LEVEL(forward_cpu_merge(args, next)) }
const char* backward_cpu(const Backward& args, std::atomic<int64_t>& next) { CUSTOM_OPS_ATTENTION_BY_LEVEL(backward_cpu(args, next)) }
const char* backward_cpu_finish(const Backward& args, std::atomic<int64_t>& next) { CUSTOM_OPS_ATTENTION_BY_LEVEL(backward_cpu_finish(args, next)) }
}  // namespace flash_attention

}  // namespace custom_ops

// The name of the level in use, or level_error().
extern "C" __attribute__((visibility("default"))) const char* custom_ops_cpu_level() {
  const char* error = custom_ops::level_error();
  return error != nullptr ? error : custom_ops::kNames[static_cast<int>(custom_ops::level)].data();
}

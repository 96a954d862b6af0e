// CPU kernels: one loop per dtype, vectorised by the compiler, in one version for any CPU and one for AVX2, selected at run
// time. Both are in this file, because the builds of this example do not compile files per level (common/cpu.h).

#include "kernels.h"

#include <cmath>

#include "../common/cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define CUSTOM_OPS_AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

namespace custom_ops {
namespace {

struct Add {
  template <typename Wide>
  NATIVE_BUILD_INLINE Wide operator()(Wide x, Wide b) const {
    return x + b;
  }
};

struct Axpb {
  double alpha;
  NATIVE_BUILD_INLINE double operator()(double x, double b) const { return std::fma(alpha, x, b); }
  NATIVE_BUILD_INLINE float operator()(float x, float b) const { return std::fma(static_cast<float>(alpha), x, b); }
};

template <typename T, typename Op>
NATIVE_BUILD_INLINE void loop(const Operands& operands, Op op, int64_t begin, int64_t end) {
  const T* __restrict x = static_cast<const T*>(operands.x);
  const T* __restrict b = static_cast<const T*>(operands.b);
  T* __restrict out = static_cast<T*>(operands.out);
  for (int64_t i = begin; i < end; ++i) narrow(op(widen(x[i]), widen(b[i])), out[i]);
}

template <typename Op>
NATIVE_BUILD_INLINE void loop_of_dtype(const Operands& operands, Op op, int64_t begin, int64_t end) {
  switch (operands.dtype) {
    case Dtype::kFloat32: return loop<float>(operands, op, begin, end);
    case Dtype::kFloat64: return loop<double>(operands, op, begin, end);
    case Dtype::kFloat16: return loop<Half>(operands, op, begin, end);
    case Dtype::kBFloat16: return loop<BFloat16>(operands, op, begin, end);
  }
}

#ifdef CUSTOM_OPS_AVX2
// GCC 12 converts float16 one element at a time unless AVX512-FP16 is enabled, which is five times slower than this.
template <typename Op>
CUSTOM_OPS_AVX2 void half_loop_avx2(const Operands& operands, Op op, int64_t begin, int64_t end) {
  constexpr int64_t kLanes = 8;
  const Half* x = static_cast<const Half*>(operands.x);
  const Half* b = static_cast<const Half*>(operands.b);
  Half* out = static_cast<Half*>(operands.out);
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    float wide_x[kLanes], wide_b[kLanes];
    _mm256_storeu_ps(wide_x, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
    _mm256_storeu_ps(wide_b, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i))));
    for (int lane = 0; lane < kLanes; ++lane) wide_x[lane] = op(wide_x[lane], wide_b[lane]);
    const __m128i narrowed = _mm256_cvtps_ph(_mm256_loadu_ps(wide_x), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), narrowed);
  }
  loop<Half>(operands, op, i, end);
}

template <typename Op>
CUSTOM_OPS_AVX2 void run_avx2(const Operands& operands, Op op, int64_t begin, int64_t end) {
  if (operands.dtype == Dtype::kFloat16) return half_loop_avx2(operands, op, begin, end);
  loop_of_dtype(operands, op, begin, end);
}
#endif

template <typename Op>
void run(const Operands& operands, Op op, int64_t begin, int64_t end) {
#ifdef CUSTOM_OPS_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // such a processor has F16C
  if (has_avx2) return run_avx2(operands, op, begin, end);
#endif
  loop_of_dtype(operands, op, begin, end);
}

}  // namespace

void add_cpu(const Operands& operands, int64_t begin, int64_t end) { run(operands, Add{}, begin, end); }

void axpb_cpu(const Operands& operands, double alpha, int64_t begin, int64_t end) {
  run(operands, Axpb{alpha}, begin, end);
}

}  // namespace custom_ops

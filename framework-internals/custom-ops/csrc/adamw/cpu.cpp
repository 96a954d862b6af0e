// CPU kernels. The update reads and writes each element once; the norm reads each gradient once.

#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../common/cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

using simd::kLanes;
using simd::Vector;

// The tensor of a list that contains a chunk.
template <typename Part> const Part& part_of(const std::vector<Part>& parts, int64_t chunk) {
  const auto after = std::upper_bound(parts.begin(), parts.end(), chunk, [](int64_t c, const Part& part) { return c < part.first_chunk; });
  return *(after - 1);
}

// In float64 the square of a float32 number is exact.
template <typename T> NATIVE_BUILD_INLINE double square(T g) {
  const double wide = widen(g);
  return wide * wide;
}

template <typename T> double sum_of_squares(const T* g, int64_t count) {
  constexpr int kSums = 8;
  double sums[kSums] = {}, rest = 0;
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int lane = 0; lane < kSums; ++lane) sums[lane] += square(g[i + lane]);
  }
  for (; i < count; ++i) rest += square(g[i]);
  for (const double sum : sums) rest += sum;
  return rest;
}

template <typename T> double sum_of_chunk(const Gradient& gradient, int64_t chunk) {
  const int64_t first = (chunk - gradient.first_chunk) * kChunk;
  return sum_of_squares(static_cast<const T*>(gradient.values) + first, std::min(kChunk, gradient.count - first));
}

NATIVE_BUILD_INLINE simd::Floats root(simd::Floats x) {
#if defined(NATIVE_BUILD_AVX512)
  return _mm512_sqrt_ps(x);
#elif defined(NATIVE_BUILD_AVX2)
  return _mm256_sqrt_ps(x);
#else
  for (int i = 0; i < kLanes<float>; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}
NATIVE_BUILD_INLINE simd::Doubles root(simd::Doubles x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::sqrt(x[i]);
  return x;
}

template <typename T, typename G> void update(const AdamW& call, int64_t begin, int64_t end) {
  T clip = 1;
  if (call.norm != nullptr) {
    const T most = static_cast<T>(call.max_norm) / (*static_cast<const T*>(call.norm) + static_cast<T>(1e-6));
    clip = most > T(1) ? T(1) : most;  // a norm that is NaN makes everything NaN, as in torch
  }
  const double lr = call.device_lr == nullptr ? call.lr : *static_cast<const float*>(call.device_lr);
  const T of_mean = static_cast<T>(1 - call.beta1), kept = static_cast<T>(call.beta2), of_square = static_cast<T>(1 - call.beta2);
  const T decay = static_cast<T>(1 - lr * call.weight_decay), eps = static_cast<T>(call.eps);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const Parameter& parameter = part_of(call.parameters, chunk);
    const int64_t first = (chunk - parameter.first_chunk) * kChunk, count = std::min(kChunk, parameter.count - first);
    T* const p = static_cast<T*>(parameter.values) + first;
    T* const m = static_cast<T*>(parameter.mean) + first;
    T* const v = static_cast<T*>(parameter.square) + first;
    const G* const g = static_cast<const G*>(parameter.gradient) + first;
    const double t = *parameter.step;
    const T rate = static_cast<T>(lr / -std::expm1(t * std::log(call.beta1)));
    const T correction = static_cast<T>(std::sqrt(-std::expm1(t * std::log(call.beta2))));
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      const int64_t some = count - i;
      const Vector<T> gradient = clip * simd::load(g + i, some);
      const Vector<T> mean = simd::load(m + i, some), square = simd::load(v + i, some);
      const Vector<T> new_mean = mean + of_mean * (gradient - mean);
      const Vector<T> new_square = kept * square + of_square * gradient * gradient;
      const Vector<T> value = decay * simd::load(p + i, some) - rate * new_mean / (root(new_square) / correction + eps);
      simd::store(new_mean, m + i, some);
      simd::store(new_square, v + i, some);
      simd::store(value, p + i, some);
      if constexpr (!std::is_same_v<G, T>) simd::store(value, static_cast<G*>(parameter.copy) + first + i, some);
    }
  }
}

}  // namespace

void gradient_norm_chunks_cpu(const GradientNorm& call, int64_t begin, int64_t end) {
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const Gradient& gradient = part_of(call.gradients, chunk);
    for_dtype(gradient.dtype, [&](auto tag) { call.sums[chunk] = sum_of_chunk<typename decltype(tag)::type>(gradient, chunk); });
  }
}

void adamw_cpu(const AdamW& call, int64_t begin, int64_t end) {
  for_dtype(call.gradient_dtype, [&](auto tag) {
    using G = typename decltype(tag)::type;
    update<Wide<G>, G>(call, begin, end);
  });
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

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
#elif defined(NATIVE_BUILD_NEON)
  return simd::bits<simd::Floats>(vsqrtq_f32(simd::bits<float32x4_t>(x)));
#else
  for (int i = 0; i < kLanes<float>; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}
NATIVE_BUILD_INLINE simd::Doubles root(simd::Doubles x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::sqrt(x[i]);
  return x;
}

// The parameter, or its copy where that was written since the parameter was rounded to it. Bits are compared: -0 is not 0, and
// a NaN is itself.
template <typename T, typename C> NATIVE_BUILD_INLINE Vector<T> newer(Vector<T> value, const C* copy, int64_t some) {
  using Words = simd::Ints;
  static_assert(sizeof(Vector<T>) == sizeof(Words));
  C rounded[kLanes<T>];
  simd::store(value, rounded);
  const Vector<T> ours = simd::load(rounded), theirs = simd::load(copy, some);
  return native_build::bits<Words>(ours) == native_build::bits<Words>(theirs) ? value : theirs;
}

template <typename T, typename G, typename C, bool kAmsgrad> void update(const AdamW& call, int64_t begin, int64_t end) {
  constexpr bool kCopies = !std::is_same_v<C, T>;
  T clip = 1;
  if (call.norm != nullptr) {
    const T most = static_cast<T>(call.max_norm) / (*static_cast<const T*>(call.norm) + static_cast<T>(1e-6));
    clip = most > T(1) ? T(1) : most;  // a norm that is NaN makes everything NaN, as in torch
  }
  if (call.maximize) clip = -clip;
  const double lr = call.device_lr == nullptr ? call.lr : *static_cast<const float*>(call.device_lr);
  const bool near = call.beta1 > 0.5;  // a mean is computed from the nearer of the two numbers that it lies between
  const T of_mean = static_cast<T>(near ? 1 - call.beta1 : -call.beta1);
  const T kept = static_cast<T>(call.beta2), of_square = static_cast<T>(1 - call.beta2);
  const T decay = static_cast<T>(1 - lr * call.weight_decay), eps = static_cast<T>(call.eps);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const Parameter& parameter = part_of(call.parameters, chunk);
    const int64_t first = (chunk - parameter.first_chunk) * kChunk, count = std::min(kChunk, parameter.count - first);
    T* const p = static_cast<T*>(parameter.values) + first;
    T* const m = static_cast<T*>(parameter.mean) + first;
    T* const v = static_cast<T*>(parameter.square) + first;
    T* const w = kAmsgrad ? static_cast<T*>(parameter.most) + first : nullptr;
    C* const copy = kCopies ? static_cast<C*>(parameter.copy) + first : nullptr;
    const G* const g = static_cast<const G*>(parameter.gradient) + first;
    const double t = *parameter.step;
    const T rate = static_cast<T>(lr / -std::expm1(t * std::log(call.beta1)));
    const T correction = static_cast<T>(std::sqrt(-std::expm1(t * std::log(call.beta2))));
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      const int64_t some = count - i;
      const Vector<T> gradient = clip * simd::load(g + i, some);
      const Vector<T> mean = simd::load(m + i, some), square = simd::load(v + i, some);
      const Vector<T> new_mean = (near ? mean : gradient) + of_mean * (gradient - mean);
      const Vector<T> new_square = kept * square + of_square * gradient * gradient;
      Vector<T> most = new_square;
      if constexpr (kAmsgrad) {
        const Vector<T> before = simd::load(w + i, some);
        most = before <= new_square ? new_square : before + (new_square - new_square);  // NaN if either is
        simd::store(most, w + i, some);
      }
      Vector<T> value = simd::load(p + i, some);
      if constexpr (kCopies) value = newer<T>(value, copy + i, some);
      value = decay * value - rate * new_mean / (root(most) / correction + eps);
      simd::store(new_mean, m + i, some);
      simd::store(new_square, v + i, some);
      simd::store(value, p + i, some);
      if constexpr (kCopies) simd::store(value, copy + i, some);
    }
  }
}

template <typename T, typename G, typename C> void update(Types<T, G, C>, const AdamW& call, int64_t begin, int64_t end) {
  return call.amsgrad ? update<T, G, C, true>(call, begin, end) : update<T, G, C, false>(call, begin, end);
}

}  // namespace

void gradient_norm_chunks_cpu(const GradientNorm& call, int64_t begin, int64_t end) {
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const Gradient& gradient = part_of(call.gradients, chunk);
    for_dtype(gradient.dtype, [&](auto tag) { call.sums[chunk] = sum_of_chunk<typename decltype(tag)::type>(gradient, chunk); });
  }
}

void adamw_cpu(const AdamW& call, int64_t begin, int64_t end) {
  for_types<Half, BFloat16>(call, [&](auto types) { update(types, call, begin, end); });
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

// CPU kernels. A row is read from memory once: the passes after the first find it in the second-level cache.

#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include "../common/cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

using simd::kLanes;
using simd::Vector;

constexpr double kLog2E = 1.44269504088896340736;
constexpr int kUnrolled = 4;  // vectors in flight: an addition takes four cycles, and one can start in each

simd::Floats exp2_of(simd::Floats t) { return simd::exp2(t); }
simd::Doubles exp2_of(simd::Doubles t) {
  for (int i = 0; i < kLanes<double>; ++i) t[i] = std::exp2(t[i]);
  return t;
}

// Calls use(vector, index of a sum, first element, number of elements) for each vector of a row. Lanes beyond the row are -inf,
// which neither a maximum nor a sum of powers sees.
template <typename T, typename Use> NATIVE_BUILD_INLINE void each_vector(const T* row, int64_t classes, const Use& use) {
  using W = Wide<T>;
  constexpr int kLanesOf = kLanes<W>;
  int64_t at = 0;
  for (; at + kUnrolled * kLanesOf <= classes; at += kUnrolled * kLanesOf) {
    for (int i = 0; i < kUnrolled; ++i) use(simd::load(row + at + i * kLanesOf), i, at + i * kLanesOf, kLanesOf);
  }
  for (; at < classes; at += kLanesOf) {
    const int64_t count = std::min<int64_t>(kLanesOf, classes - at);
    Vector<W> last = simd::load(row + at, count);
    for (int64_t i = count; i < kLanesOf; ++i) last[i] = -std::numeric_limits<W>::infinity();
    use(last, 0, at, count);
  }
}

template <typename T> Wide<T> highest_of(const T* row, int64_t classes) {
  using W = Wide<T>;
  Vector<W> highest[kUnrolled];
  for (auto& one : highest) one = simd::broadcast(-std::numeric_limits<W>::infinity());
  each_vector(row, classes, [&](const Vector<W>& x, int i, int64_t, int64_t) { highest[i] = simd::max(x, highest[i]); });
  const Vector<W> most = simd::max(simd::max(highest[0], highest[1]), simd::max(highest[2], highest[3]));
  W result = most[0];
  for (int i = 1; i < kLanes<W>; ++i) result = most[i] > result ? most[i] : result;
  return result;
}

// Returns the sum of exp(row − highest), and writes its terms to `powers` if they are wanted. `powers` may be the row.
template <bool kWanted, typename T> Wide<T> sum_of_powers(const T* row, int64_t classes, Wide<T> highest, Wide<T>* powers) {
  using W = Wide<T>;
  const Vector<W> factor = simd::broadcast(static_cast<W>(kLog2E)), most = simd::broadcast(highest);
  Vector<W> sums[kUnrolled] = {};
  each_vector(row, classes, [&](const Vector<W>& x, int i, int64_t at, int64_t count) {
    const Vector<W> power = exp2_of((x - most) * factor);
    sums[i] += power;
    if constexpr (kWanted) simd::store(power, powers + at, count);
  });
  const Vector<W> total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  W sum = 0;
  for (int i = 0; i < kLanes<W>; ++i) sum += total[i];
  return sum;
}

template <typename T> void rows_of(const CrossEntropy& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  constexpr bool kInPlace = std::is_same_v<T, W>;
  const std::unique_ptr<W[]> memory(call.gradient && !kInPlace ? new W[call.classes] : nullptr);
  for (int64_t at = begin; at < end; ++at) {
    T* row = static_cast<T*>(call.logits) + at * call.columns;
    W* loss = static_cast<W*>(call.losses) + at;
    const int64_t target = call.targets[at];
    if (target == call.ignore_index) {
      *loss = 0;
      if (call.gradient) std::fill(row, row + call.columns, T{});
      continue;
    }
    const bool inside = target >= 0 && target < call.classes;
    const W chosen = inside ? widen(row[target]) : std::numeric_limits<W>::quiet_NaN();
    const W highest = highest_of(row, call.classes);
    if (!call.gradient) {
      *loss = std::log(sum_of_powers<false>(row, call.classes, highest, static_cast<W*>(nullptr))) + (highest - chosen);
      continue;
    }
    W* powers = memory.get();
    if constexpr (kInPlace) powers = row;
    const W sum = sum_of_powers<true>(row, call.classes, highest, powers);
    *loss = std::log(sum) + (highest - chosen);
    const W scale = inside ? 1 / sum : chosen;
    const W of_target = inside ? powers[target] * scale - 1 : 0;
    for (int64_t first = 0; first < call.classes; first += kLanes<W>) {
      const int64_t count = call.classes - first;
      simd::store(simd::load(powers + first, count) * scale, row + first, count);
    }
    if (inside) narrow(of_target, row[target]);
    std::fill(row + call.classes, row + call.columns, T{});
  }
}

template <typename W> W power_of(W x) { return std::exp2(x * static_cast<W>(kLog2E)); }

// The reference is finite even if every logit so far is -inf, so that a difference from it is no NaN.
template <typename T> void merge_block(const CrossEntropyBlock& call, int64_t at, const T* row) {
  using W = Wide<T>;
  W* const sums = static_cast<W*>(call.sums) + 2 * at;
  const W highest = highest_of(row, call.classes), reference = highest > sums[0] ? highest : sums[0];
  const W sum = sum_of_powers<false>(row, call.classes, reference, static_cast<W*>(nullptr));
  sums[1] = sums[1] * power_of(sums[0] - reference) + sum;
  sums[0] = reference;
  const int64_t target = call.targets[at] - call.first;
  if (target >= 0 && target < call.classes) static_cast<W*>(call.chosen)[at] = widen(row[target]);
}

template <typename T> void gradient_of_block(const CrossEntropyBlock& call, int64_t at, T* row) {
  using W = Wide<T>;
  const W* const sums = static_cast<const W*>(call.sums) + 2 * at;
  const Vector<W> factor = simd::broadcast(static_cast<W>(kLog2E)), reference = simd::broadcast(sums[0]);
  const Vector<W> scale = simd::broadcast(1 / sums[1]);
  const int64_t target = call.targets[at] - call.first;
  const bool inside = target >= 0 && target < call.classes;
  const W of_target = inside ? power_of(widen(row[target]) - sums[0]) / sums[1] - 1 : 0;
  each_vector(row, call.classes, [&](const Vector<W>& x, int, int64_t first, int64_t count) {
    simd::store(exp2_of((x - reference) * factor) * scale, row + first, count);
  });
  if (inside) narrow(of_target, row[target]);
  std::fill(row + call.classes, row + call.columns, T{});
}

template <typename T> void rows_of_block(const CrossEntropyBlock& call, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; ++at) {
    T* row = static_cast<T*>(call.logits) + at * call.columns;
    const bool ignored = call.targets[at] == call.ignore_index;
    if (!call.gradient) {
      if (!ignored) merge_block(call, at, row);
    } else if (ignored) {
      std::fill(row, row + call.columns, T{});
    } else {
      gradient_of_block(call, at, row);
    }
  }
}

#include "cpu_general.h"

}  // namespace

void general_cross_entropy_cpu(const GeneralCrossEntropy& call, int64_t begin, int64_t end) {
  for_dtype(call.rows.dtype, [&](auto tag) {
    GeneralRows<typename decltype(tag)::type> rows(call.parts, call.rows.classes);
    for (int64_t at = begin; at < end; ++at) rows.run(call, at);
  });
}

void general_cross_entropy_block_cpu(const GeneralCrossEntropyBlock& call, int64_t begin, int64_t end) {
  for_dtype(call.block.dtype, [&](auto tag) {
    GeneralRows<typename decltype(tag)::type> rows(call.parts, call.block.classes);
    for (int64_t at = begin; at < end; ++at) rows.run(call.block, at);
  });
}

void cross_entropy_block_cpu(const CrossEntropyBlock& call, int64_t begin, int64_t end) {
  for_dtype(call.dtype, [&](auto tag) { rows_of_block<typename decltype(tag)::type>(call, begin, end); });
}

void cross_entropy_cpu(const CrossEntropy& call, int64_t begin, int64_t end) {
  for_dtype(call.dtype, [&](auto tag) { rows_of<typename decltype(tag)::type>(call, begin, end); });
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

// Blocks of rows of attention's operands in the units of a product, and what is done to a block of scores.
#pragma once

#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <type_traits>

#include "../flash_attention.h"
#include "products.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace flash_attention {

using namespace ::custom_ops::flash_attention;  // of flash_attention.h, outside of the level

namespace {

template <typename T> struct ProductOf { using type = Singles<Wide<T>>; };
#if defined(FLASH_ATTENTION_TILES)
template <> struct ProductOf<BFloat16> { using type = Tiles; };
#elif defined(__AVX512BF16__)
template <> struct ProductOf<BFloat16> { using type = Pairs; };
#endif

constexpr int64_t kQueries = 64;  // of a block: what a row of transposed scores holds
constexpr int64_t kKeys = 64;     // of a block

NATIVE_BUILD_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Memory of one thread, in whole cache lines.
template <typename Unit> class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(static_cast<Unit*>(std::aligned_alloc(64, static_cast<size_t>(rounded_up(count * static_cast<int64_t>(sizeof(Unit)) + 1, 64))))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator Unit*() const { return data_; }

 private:
  Unit* data_;
};

template <typename T> NATIVE_BUILD_INLINE void clear(T* from, int64_t count) {
  if (count > 0) std::memset(static_cast<void*>(from), 0, static_cast<size_t>(count) * sizeof(T));
}

// Rows of one head, where they lie or copied.
struct Rows {
  const char* data;
  int64_t row;  // bytes from one to the next
};

template <typename T> T* row_of(const Tensor& tensor, int64_t batch, int64_t head, int64_t row) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride + row * tensor.seq_stride;
}

// Elements in the type of the product, zero from head_size to width, a multiple of 16.
template <typename Element, typename T> void copy_row(const T* from, int64_t head_size, int64_t width, Element* to) {
  constexpr int kLanes = simd::kLanes<Wide<Element>>;
  if constexpr (std::is_same_v<Element, T>) {
    std::memcpy(to, from, static_cast<size_t>(head_size) * sizeof(T));
    std::memset(static_cast<void*>(to + head_size), 0, static_cast<size_t>(width - head_size) * sizeof(T));
  } else {
    int64_t d = 0;
    for (; d + kLanes <= head_size; d += kLanes) simd::store(simd::load(from + d), to + d);
    for (; d < width; d += kLanes) simd::store(simd::load(from + d, d < head_size ? head_size - d : 0), to + d);
  }
}

template <typename Element, typename T>
void copy_rows(const T* from, int64_t stride, int64_t count, int64_t head_size, int64_t width, Element* to) {
  for (int64_t i = 0; i < count; ++i) copy_row(from + i * stride, head_size, width, to + i * width);
}

// The rows of keys or values in the units of the product: in place, or in `buffer` if they have another type or end in a step.
template <class Product, typename T>
Rows rows_of(const T* from, int64_t stride, int64_t count, int64_t head_size, int64_t width, typename Product::Element* buffer) {
  using Element = typename Product::Element;
  if (std::is_same_v<Element, T> && head_size % Product::kStep == 0 && count % Product::kRows == 0) {
    return {reinterpret_cast<const char*>(from), stride * static_cast<int64_t>(sizeof(T))};
  }
  copy_rows(from, stride, count, head_size, width, buffer);
  clear(buffer + count * width, (rounded_up(count, Product::kRows) - count) * width);
  return {reinterpret_cast<const char*>(buffer), width * static_cast<int64_t>(sizeof(Element))};
}

// The blocks of keys or values of one head, widened: once for all blocks of queries that a thread takes of the head, if they fit in a
// part of the level-2 cache, else for each of them. That took an eighth of the time of bfloat16 with AVX2.
template <typename Element, typename T> class WidenedBlocks {
 public:
  WidenedBlocks(const Problem& problem, int64_t width)
      : width_(width), line_(width | 16), rows_(problem.seq_kv), size_(problem.head_size), slots_(number_of_slots(problem, line_)), rows_of_slots_(slots_ * kKeys * line_), key_of_slot_(slots_) {}

  // The block of the rows from `key` on, which are at `from`.
  Rows block(int64_t head, const T* from, int64_t stride, int64_t key) {
    const int64_t slot = slots_ == 1 ? 0 : key / kKeys;
    Element* const to = rows_of_slots_ + slot * kKeys * line_;
    if (head != head_) {
      for (int64_t i = 0; i < slots_; ++i) key_of_slot_[i] = -1;
      head_ = head;
    }
    if (key_of_slot_[slot] != key) {
      for (int64_t i = 0; i < smaller(kKeys, rows_ - key); ++i) copy_row(from + i * stride, size_, width_, to + i * line_);
      key_of_slot_[slot] = key;
    }
    return {reinterpret_cast<const char*>(to), line_ * static_cast<int64_t>(sizeof(Element))};
  }

 private:
  static int64_t number_of_slots(const Problem& problem, int64_t line) {
    constexpr int64_t kBytes = 320 * 1024;  // 512 keys of head size 128
    if (std::is_same_v<Element, T>) return 0;
    const int64_t blocks = blocks_cpu(problem.seq_kv), of_queries = blocks_cpu(problem.seq_q) * (problem.heads_q / problem.heads_kv);
    return of_queries > 1 && blocks > 1 && blocks * kKeys * line * static_cast<int64_t>(sizeof(Element)) <= kBytes ? blocks : 1;
  }

  const int64_t width_, line_, rows_, size_, slots_;  // rows lie `line_` apart, an odd number of cache lines, so that a column's share no sets
  Buffer<Element> rows_of_slots_;
  Buffer<int64_t> key_of_slot_;
  int64_t head_ = -1;
};

// The scale becomes a sign of the queries and a factor of the scores that is positive, so that the largest product has the
// largest score and a hidden one stays -inf.
template <typename Sum> NATIVE_BUILD_INLINE Sum factor_of(double scale) {
  constexpr double kLeast = std::numeric_limits<Sum>::min();  // times an infinite difference it is infinite
  return scale == 0 ? Sum{1} : static_cast<Sum>(std::fmax(std::fabs(scale) * 1.44269504088896340736, kLeast));
}
NATIVE_BUILD_INLINE void turn(double& x, bool zero) { x = zero ? 0 : -x; }
NATIVE_BUILD_INLINE void turn(float& x, bool zero) { x = zero ? 0 : -x; }
NATIVE_BUILD_INLINE void turn(BFloat16& x, bool zero) { x.bits = static_cast<uint16_t>(zero ? 0 : x.bits ^ 0x8000u); }
template <typename Element> void turn_rows(Element* rows, int64_t count, double scale) {
  if (scale > 0) return;
  for (int64_t i = 0; i < count; ++i) turn(rows[i], scale == 0);
}

// The columns of a block of keys or values as the left side of a product that sums over the keys: pairs of rows, which tiles need
// transposed. As many units as half a block of keys has elements.
template <class Product> Broadcast packed_columns(const int32_t* packed, int64_t width) {
  constexpr int64_t kUnit = sizeof(int32_t);
  const char* const data = reinterpret_cast<const char*>(packed);
  return Product::kStep == 2 ? Broadcast{data, kUnit, width * kUnit} : Broadcast{data, kKeys / 2 * kUnit, kUnit};
}
template <class Product> void pack_columns(const BFloat16* from, int64_t stride, int64_t count, int64_t head_size, int64_t width, int32_t* buffer, int32_t* to);

#if defined(__AVX512BF16__)
// Two vectors of float32, rounded to bfloat16 and interleaved: pairs of an element of each.
NATIVE_BUILD_INLINE simd::Ints pair(simd::Floats low, simd::Floats high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                                         3, 18, 2, 17, 1, 16, 0);
  return simd::bits<simd::Ints>(_mm512_permutexvar_epi16(order, simd::bits<__m512i>(_mm512_cvtne2ps_pbh(high, low))));
}

// Pairs of neighbouring rows, (rows / 2, width): those after `count` are zero, up to `padded`.
NATIVE_BUILD_INLINE void pair_rows(const BFloat16* from, int64_t stride, int64_t count, int64_t padded, int64_t head_size, int64_t width, int32_t* to) {
  const auto load = [&](int64_t i, int64_t d) {
    const int64_t left = i < count ? head_size - d : 0;
    const __mmask16 lanes = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from + i * stride + d));
  };
  for (int64_t i = 0; i < padded; i += 2, to += width) {
    for (int64_t d = 0; d < width; d += 16) {
      _mm512_storeu_si512(to + d, _mm512_or_si512(load(i, d), _mm512_slli_epi32(load(i + 1, d), 16)));
    }
  }
}

template <class Product> void pack_columns(const BFloat16* from, int64_t stride, int64_t count, int64_t head_size, int64_t width, int32_t* buffer, int32_t* to) {
  if constexpr (Product::kStep == 2) {
    pair_rows(from, stride, count, count, head_size, width, to);
  } else {
    pair_rows(from, stride, count, kKeys, head_size, width, buffer);
    transpose(buffer, width, kKeys / 2, width, to, kKeys / 2);
  }
}


#endif

// Of 2^f, |f| <= 1/2, from the highest power on: the polynomials with the least largest relative error, 2e-8 and 3e-6.
constexpr float kExactPower[] = {1.53533585e-4f, 1.33988749e-3f, 9.61843738e-3f, 5.55033247e-2f, 2.40226479e-1f, 6.93147203e-1f, 1.0f};
constexpr float kCoarsePower[] = {9.5843254e-3f, 5.5907521e-2f, 2.4024066e-1f, 6.9312400e-1f, 1.0f};

// Whether powers are exact to float32's digits. A 16-bit result does not show 3e-6, a thousandth of bfloat16's rounding.
template <typename T> constexpr bool kIsExact = sizeof(T) > 2;

template <int kCount> NATIVE_BUILD_INLINE simd::Floats polynomial(const float (&coefficients)[kCount], simd::Floats f) {
  simd::Floats sum = simd::broadcast(coefficients[0]);
#pragma GCC unroll 8
  for (int i = 1; i < kCount; ++i) sum = simd::fma(sum, f, simd::broadcast(coefficients[i]));
  return sum;
}

// 2^t of t at most 8, with a relative error of 2e-8 if kExact, else 3e-6.
template <bool kExact> NATIVE_BUILD_INLINE simd::Floats power_of(simd::Floats t) {
#if defined(NATIVE_BUILD_AVX512)
  if constexpr (!kExact) {
    const simd::Floats f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // in [0, 1); 0 of -inf
    simd::Floats power = simd::fma(simd::broadcast(1.34266848e-2f), f, simd::broadcast(5.22424728e-2f));
    power = simd::fma(power, f, simd::broadcast(2.41280213e-1f));
    power = simd::fma(power, f, simd::broadcast(6.93044841e-1f));
    return _mm512_scalef_ps(simd::fma(power, f, simd::broadcast(1.0f)), t);  // which rounds t down
  }
  t = simd::max(simd::broadcast(-200.0f), t);  // keeps NaN; -inf would give it
  const simd::Floats n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(polynomial(kExactPower, t - n), n);
#else
  t = simd::max(simd::broadcast(-127.0f), t);
  const simd::Floats shifted = t + simd::kShift, f = t - (shifted - simd::kShift);
  return (kExact ? polynomial(kExactPower, f) : polynomial(kCoarsePower, f)) * simd::whole_power(shifted);
#endif
}
template <bool> NATIVE_BUILD_INLINE simd::Doubles power_of(simd::Doubles t) {
  for (int i = 0; i < simd::kLanes<double>; ++i) t[i] = std::exp2(t[i]);
  return t;
}

// Of four vectors; without AVX-512 each step for all of them, since the chains of one after the other are longer than what waits in a processor.
template <bool kExact, typename Sum> NATIVE_BUILD_INLINE simd::Block<Sum> powers_of(const simd::Block<Sum>& t) {
#if !defined(NATIVE_BUILD_AVX512)
  if constexpr (std::is_same_v<Sum, float>) {
    const simd::Block<Sum> within = simd::each<Sum>([](auto v) NATIVE_BUILD_INLINED { return simd::max(simd::broadcast(-127.0f), v); }, t);
    const auto multiplied = [](const simd::Power<Sum>& power) NATIVE_BUILD_INLINED {
      return simd::each<Sum>([](auto part, auto whole) NATIVE_BUILD_INLINED { return part * whole; }, power.part, power.whole);
    };
    if constexpr (kExact) return multiplied(simd::power_within<Sum>(within, kExactPower));
    else return multiplied(simd::power_within<Sum>(within, kCoarsePower));
  }
#endif
  return simd::each<Sum>([](auto v) NATIVE_BUILD_INLINED { return power_of<kExact>(v); }, t);
}

// The keys that the queries of a block see.
struct Seen {
  // `low` is the first key of a block of keys; `high` is `low` if no query sees any.
  int64_t begin[kQueries], end[kQueries], low, high;

  Seen(const Problem& problem, int64_t first, int64_t count) : count_(count) {
    const Window window = window_of(problem);
    for (int64_t i = 0; i < count; ++i) {
      const Span span = keys_of_query(window, sequence_of(window, false, first + i), first + i);
      begin[i] = span.begin;
      end[i] = span.end;
    }
    const bool any = begin[0] < end[count - 1];
    low = any ? begin[0] / kKeys * kKeys : 0;
    high = any ? end[count - 1] : 0;
  }
  // Scores of keys become -inf where a query does not see them. Both ends ascend with the queries.
  template <typename Sum> void hide(Sum* scores, int64_t key, int64_t keys, int64_t columns) const {
    if (begin[count_ - 1] <= key && end[0] >= key + keys) return;
    int64_t first = 0, last = 0;
    for (int64_t j = 0; j < keys; ++j) {
      while (first < count_ && end[first] <= key + j) ++first;
      while (last < count_ && begin[last] <= key + j) ++last;
      Sum* const row = scores + j * kQueries;
      for (int64_t i = 0; i < first; ++i) row[i] = -std::numeric_limits<Sum>::infinity();
      for (int64_t i = last; i < columns; ++i) row[i] = -std::numeric_limits<Sum>::infinity();
    }
  }

 private:
  int64_t count_;
};

// Turns a block of products into scores: soft cap, bias and ALiBi, in natural units. `slopes` receives the derivative of the cap,
// unless it is null.
template <typename T, typename Sum>
void change_scores(const Problem& problem, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t columns, int64_t key, int64_t keys, Sum* scores, Sum* slopes) {
  const Features& with = problem.features;
  const Sum factor = static_cast<Sum>(problem.scale == 0 ? 1.0 : std::fabs(problem.scale)), cap = static_cast<Sum>(with.softcap);
  const Window window = window_of(problem);
  for (int64_t i = 0; i < columns; ++i) {
    const int64_t query = first + smaller(i, count - 1);
    const T* const bias = with.bias == nullptr ? nullptr : static_cast<const T*>(with.bias) + batch * with.bias_stride[0] + head * with.bias_stride[1] + query * with.bias_stride[2];
    const Sum steepness = with.alibi_slopes == nullptr ? 0 : static_cast<const Sum*>(with.alibi_slopes)[batch * with.alibi_batch_stride + head];
    const int64_t diagonal = with.alibi_slopes == nullptr ? 0 : diagonal_of(sequence_of(window, false, query), query);
    for (int64_t j = 0; j < keys; ++j) {
      Sum score = scores[j * kQueries + i] * factor;
      if (cap != 0) {
        const Sum bent = std::tanh(score / cap);
        if (slopes != nullptr) slopes[j * kQueries + i] = 1 - bent * bent;
        score = cap * bent;
      }
      if (bias != nullptr) score += widen(bias[(key + j) * with.bias_stride[3]]);
      scores[j * kQueries + i] = score - steepness * static_cast<Sum>(std::abs(key + j - diagonal));
    }
  }
}

// The factor of the products, or of what change_scores makes of them, in powers of two.
template <typename Sum> Sum power_factor(const Problem& problem) {
  return changes_scores(problem.features) ? Sum(1.44269504088896340736) : factor_of<Sum>(problem.scale);
}

// What makes natural scores of the same.
template <typename Sum> Sum natural_factor(const Problem& problem) {
  return changes_scores(problem.features) || problem.scale == 0 ? Sum{1} : static_cast<Sum>(std::fabs(problem.scale));
}

// What the blocks of keys so far have left of each query.
template <typename Sum> struct Softmax {
  Sum top[kQueries];         // the largest score, without its factor; its power is taken out of the sums
  Sum total[kQueries];       // the sum of the powers
  Sum correction[kQueries];  // of the sums before this block
};

// Where the largest score in powers of two is beyond this, its rounding is 8 or more: the product in a multiply-add, which is not
// rounded, would be so far from it that the power overflows, or that of every score is zero.
template <typename Sum> constexpr Sum kFar = static_cast<Sum>(int64_t{1} << (std::numeric_limits<Sum>::digits + 4));
template <typename Sum> NATIVE_BUILD_INLINE bool is_far(Sum power) { return std::fabs(power) > kFar<Sum> && power > -std::numeric_limits<Sum>::infinity(); }

// (factor S - base) of one vector of queries, a multiply-add.
template <typename Sum> struct Exponents {
  simd::Vector<Sum> factor, base;
};

// Where `power` is far out, the scores become (unit S - top) factor, whose first difference is exact near the top and overflows nowhere.
template <typename Sum>
[[gnu::noinline, gnu::cold]] Exponents<Sum> far_out(Sum* scores, int64_t keys, Sum unit, Sum factor, simd::Vector<Sum> power, simd::Vector<Sum> top, const Exponents<Sum>& from) {
  Exponents<Sum> result = from;
  for (int lane = 0; lane < simd::kLanes<Sum>; ++lane) {
    if (!is_far<Sum>(power[lane])) continue;
    for (int64_t j = 0; j < keys; ++j) {
      const Sum product = std::fma(scores[j * kQueries + lane], unit, Sum{0});  // a plain product may be fused with the difference
      scores[j * kQueries + lane] = (product - top[lane]) * factor;
    }
    result.factor[lane] = 1;
    result.base[lane] = 0;
  }
  return result;
}

// A block of scores S^T becomes powers of two of (factor S - top): in place, or in `pairs` of neighbouring keys.
template <class Product, bool kExact> void soften(typename Product::Sum* scores, int32_t* pairs, int64_t keys, int64_t columns, typename Product::Sum factor, Softmax<typename Product::Sum>& row) {
  using Sum = typename Product::Sum;
  using Vector = simd::Vector<Sum>;
  const Vector factors = simd::broadcast(factor);
  for (int64_t c = 0; c < columns; c += simd::kLanes<Sum>) {
    Sum* const at = scores + c;
    Vector tops[4];
    for (Vector& top : tops) top = simd::broadcast(-std::numeric_limits<Sum>::infinity());
    int64_t j = 0;
    for (; j + 4 <= keys; j += 4) {
      for (int u = 0; u < 4; ++u) tops[u] = simd::max(simd::load(at + (j + u) * kQueries), tops[u]);
    }
    for (; j < keys; ++j) tops[0] = simd::max(simd::load(at + j * kQueries), tops[0]);
    const Vector highest = simd::max(simd::max(tops[0], tops[1]), simd::max(tops[2], tops[3]));
    const Vector before = simd::load(row.top + c), none = {};
    // Powers up to 2^8 are as exact, and spare the tiles most of the scaling of old sums.
    const Vector top = (highest - before) * factors > simd::broadcast(Product::kStep == 32 ? Sum{8} : Sum{0}) ? highest : before;
    const auto rounded = [&](Vector score) NATIVE_BUILD_INLINED { return simd::fma(score, factors, none); };  // a plain product may be fused with a difference
    const Vector power = rounded(top);
    // Without a finite score so far, the powers are zero, and not those of -inf less -inf.
    const Vector base = simd::max(power, simd::broadcast(std::numeric_limits<Sum>::lowest()));
    Vector behind = rounded(before) - base;
    Exponents<Sum> exponents = {factors, base};
    if (__builtin_expect(simd::any_above(power == base ? simd::max(base, -base) : none, simd::broadcast(kFar<Sum>)), false)) {
      exponents = far_out<Sum>(at, keys, 1, factor, power, top, exponents);
      for (int lane = 0; lane < simd::kLanes<Sum>; ++lane) behind[lane] = is_far<Sum>(power[lane]) ? (before[lane] - top[lane]) * factor : behind[lane];
    }
    const Vector correction = power_of<true>(behind);
    const auto exponent = [&exponents](Vector score) NATIVE_BUILD_INLINED { return simd::fma(score, exponents.factor, -exponents.base); };
    Vector sums[4] = {};
    if constexpr (Product::kDepth == 1) {
      for (j = 0; j + 4 <= keys; j += 4) {
        simd::Block<Sum> block;
        for (int u = 0; u < 4; ++u) block.of[u] = exponent(simd::load(at + (j + u) * kQueries));
        block = powers_of<kExact, Sum>(block);
        for (int u = 0; u < 4; ++u) {
          sums[u] += block.of[u];
          simd::store(block.of[u], at + (j + u) * kQueries);
        }
      }
      for (; j < keys; ++j) {
        const Vector last = power_of<kExact>(exponent(simd::load(at + j * kQueries)));
        sums[0] += last;
        simd::store(last, at + j * kQueries);
      }
    } else {
#if defined(__AVX512BF16__)
      for (j = 0; j < keys; j += 2) {
        const Vector low = power_of<kExact>(exponent(simd::load(at + j * kQueries)));
        Vector high = {};
        if (j + 1 < keys) high = power_of<kExact>(exponent(simd::load(at + (j + 1) * kQueries)));
        sums[0] += low;
        sums[1] += high;
        const simd::Ints both = pair(low, high);
        std::memcpy(pairs + j / 2 * kQueries + c, &both, sizeof both);
      }
      for (; j < rounded_up(keys, Product::kStep); j += 2) clear(pairs + j / 2 * kQueries + c, 16);
#endif
    }
    simd::store(top, row.top + c);
    simd::store(correction, row.correction + c);
    simd::store(simd::fma(simd::load(row.total + c), correction, (sums[0] + sums[1]) + (sums[2] + sums[3])), row.total + c);
  }
  static_cast<void>(pairs);
}

}  // namespace
}  // namespace flash_attention
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

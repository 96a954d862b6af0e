// CPU kernels over rows of vectors.

#include "kernels.h"

#include <algorithm>
#include <type_traits>

#include <native_build/memory.h>

#include "../common/cpu.h"
#include "gelu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

// How far ahead the backward pass asks for its operands, in bytes: two streams are read and one is written, and the processor alone asks too
// late. In the forward pass this gained nothing.
constexpr int64_t kAhead = 4096;

template <typename T> void forward(const BiasGelu& call, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(call.x);
  const T* bias = static_cast<const T*>(call.bias);
  T* out = static_cast<T*>(call.out);
  const bool large = native_build::is_streamed(call.rows * call.columns * sizeof(T));
  for (int64_t at = begin; at < end;) {  // a row, or the part of one at either end
    const int64_t column = at % call.columns, count = std::min(end - at, call.columns - column);
    simd::write_row(out + at, count, large, [&](int64_t i, int64_t some) NATIVE_BUILD_INLINED {
      return narrowed(gelus(simd::sum<T>(simd::load_block(x + at + i, some), simd::load_block(bias + column + i, some))));
    });
    at += count;
  }
  if (large) simd::end_of_stream();
}

template <typename T> void backward_rows(const BiasGeluBackward& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t groups = bias_gelu_backward_groups(call.rows), columns = call.columns;
  const T* bias = static_cast<const T*>(call.bias);
  const bool large = native_build::is_streamed(call.rows * columns * sizeof(T));
#if defined(NATIVE_BUILD_AVX512)
  // In bfloat16 the bias is widened once for all rows, unless it and the sums would not fit the first-level cache.
  constexpr int64_t kWidened = std::is_same_v<T, BFloat16> ? 2048 : 0;
  alignas(64) W widened[std::max<int64_t>(kWidened, simd::kBlock<T>)];  // in the order of blocks
  const bool widens = columns <= kWidened && call.rows > 8;
  for (int64_t i = 0; widens && i < columns; i += simd::kBlock<T>) {
    simd::store_lanes<T>(simd::load_block(bias + i, columns - i), widened + i);
  }
  const auto bias_at = [&](int64_t i, int64_t some) NATIVE_BUILD_INLINED {
    return widens ? simd::load_lanes<T>(widened + i) : simd::load_block(bias + i, some);
  };
#else
  const auto bias_at = [&](int64_t i, int64_t some) NATIVE_BUILD_INLINED { return simd::load_block(bias + i, some); };
#endif
  for (int64_t group = begin; group < end; ++group) {
    W* sums = static_cast<W*>(call.workspace) + group * bias_gelu_backward_stride(columns);  // in the order of blocks
    std::fill_n(sums, bias_gelu_backward_stride(columns), W(0));
    for (int64_t row = group * call.rows / groups; row < (group + 1) * call.rows / groups; ++row) {
      const T* grad = static_cast<const T*>(call.grad) + row * columns;
      const T* x = static_cast<const T*>(call.x) + row * columns;
      // A block is added to the sums once the operands of the next one are loaded, because a load waits for an earlier store whose address
      // ends in the same 12 bits: with x or bias a block before the sums, modulo 4 KiB, no two blocks overlapped (NOTES.md, 2026-11-24).
      simd::Block<T> before = {};
      W* sums_before = sums;
      simd::write_row(static_cast<T*>(call.dx) + row * columns, columns, large, [&](int64_t i, int64_t some) NATIVE_BUILD_INLINED {
        if (large) {
          simd::prefetch_block(x + i + kAhead / sizeof(T));
          simd::prefetch_block(grad + i + kAhead / sizeof(T));
        }
        const simd::Block<T> u = simd::sum<T>(simd::load_block(x + i, some), bias_at(i, some)), g = simd::load_block(grad + i, some);
        simd::add_to_sums<T>(before, sums_before);
        before = simd::each<T>([](auto of_g, auto s) NATIVE_BUILD_INLINED { return of_g * s; }, g, slopes(u));
        sums_before = sums + i;
        return narrowed(before);
      });
      simd::add_to_sums<T>(before, sums_before);
    }
  }
  if (large) simd::end_of_stream();
}

template <typename T> void backward_columns(const BiasGeluBackward& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t groups = bias_gelu_backward_groups(call.rows), stride = bias_gelu_backward_stride(call.columns);
  const W* sums = static_cast<const W*>(call.workspace);
  T* dbias = static_cast<T*>(call.dbias);
  for (int64_t at = begin * kColumnBlock; at < std::min(end * kColumnBlock, call.columns); at += simd::kBlock<T>) {
    simd::Block<T> total = {};
    for (int64_t group = 0; group < groups; ++group) {
      total = simd::sum<T>(total, simd::load_lanes<T>(sums + group * stride + at));
    }
    simd::store_block(total, dbias + at, call.columns - at);
  }
}

}  // namespace

void bias_gelu_cpu(const BiasGelu& call, int64_t begin, int64_t end) {
  for_dtype(call.dtype, [&](auto tag) { forward<typename decltype(tag)::type>(call, begin, end); });
}

void bias_gelu_backward_rows_cpu(const BiasGeluBackward& call, int64_t begin, int64_t end) {
  for_dtype(call.dtype, [&](auto tag) { backward_rows<typename decltype(tag)::type>(call, begin, end); });
}

void bias_gelu_backward_columns_cpu(const BiasGeluBackward& call, int64_t begin, int64_t end) {
  for_dtype(call.dtype, [&](auto tag) { backward_columns<typename decltype(tag)::type>(call, begin, end); });
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

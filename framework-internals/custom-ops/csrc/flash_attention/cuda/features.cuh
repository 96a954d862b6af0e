// What the general forms of the kernels have beside the plain ones: spans of keys instead of all of them, changed scores, sinks.
//
// Whether a query sees a key is one comparison with a span (../spans.h), for packed sequences, windows and bottom-right causal masks
// alike. find_spans.cuh writes the spans of all rows before the kernel, 1 µs that spares the kernels their differences. A tile of packed
// rows may hold several sequences; what a row does not see of its tile is masked.
#pragma once

#include "../flash_attention.h"
#include "device/platform.cuh"
#include "softmax.cuh"

namespace custom_ops::flash_attention {

// The forms of the wgmma kernels. All but the plain one see the other side by spans. Soft caps and biases have forms of their own: a test
// for them beside every score costs the others more than what they do.
enum class Form { kPlain, kGeneral, kCapped, kBiased };

// Scores are in units of log2 here.
struct General {
  const Span* spans;        // of each row of the kernel's blocks: which rows of the other side it sees; null: all
  const int* diagonals;     // of each query
  int* next_block;          // zero before the launch
  float softcap;            // 0: none
  const float* sinks;       // (heads), in natural units; or null
  const void* bias;         // in natural units; or null
  int64_t bias_stride[4];
  void* bias_gradient;      // (batch, heads, queries, keys), or null
  const float* slopes;      // in natural units; or null
  int64_t slopes_batch_stride;
  int parts;                // of the keys, each of which a block of the mma forward goes over alone
};

// The tiles of the other side that rows `first` to `last` see.
FLASH_DEVICE int first_tile_of(const Span* spans, int first, int tile) { return spans[first].begin / tile; }
FLASH_DEVICE int tiles_of(const Span* spans, int first, int last, int tile) {
  return max(0, (spans[last].end + tile - 1) / tile - spans[first].begin / tile);
}
FLASH_DEVICE bool sees(const Span& span, int row) { return row >= span.begin && row < span.end; }

FLASH_DEVICE float capped(float score, float cap, float& slope) {
  const float bent = tanhf(score / cap);
  slope = 1.f - bent * bent;
  return cap * bent;
}

// Where a lane's fragment of scores lies: element i is of row i / 2 % 2 of the two and of column + i / 4 * 8 + i % 2. Rows are queries
// and columns keys, or with kKeys the reverse. Rows and columns past the end are read as the last one.
struct ScorePlace {
  int batch, head, row[2], column, columns;
  FLASH_DEVICE int column_of(int i) const { return min(column + i / 4 * 8 + i % 2, columns - 1); }
};

// All loads of a fragment stand in one block of instructions, so that one waits for none of the others.
template <typename Element, bool kKeys, int kCount>
FLASH_DEVICE void add_bias(float (&score)[kCount], const General& with, const ScorePlace& at) {
  const int64_t own = with.bias_stride[kKeys ? 3 : 2], step = with.bias_stride[kKeys ? 2 : 3];
  const Element* const start = static_cast<const Element*>(with.bias) + at.batch * with.bias_stride[0] + at.head * with.bias_stride[1];
  const bool pairs = !kKeys && step == 1 && own % 2 == 0 && at.columns % 2 == 0 && reinterpret_cast<uintptr_t>(start) % (2 * sizeof(Element)) == 0;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const Element* const row = start + at.row[e] * own;
    if (pairs) {
#pragma unroll
      for (int i = 2 * e; i < kCount; i += 4) {
        struct alignas(2 * sizeof(Element)) Pair {
          Element of[2];
        };
        const Pair pair = *reinterpret_cast<const Pair*>(row + min(at.column + i / 4 * 8, at.columns - 2));
        score[i] = fmaf(kLog2e, static_cast<float>(pair.of[0]), score[i]);
        score[i + 1] = fmaf(kLog2e, static_cast<float>(pair.of[1]), score[i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 2 * e; i < kCount; i += 4) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) score[j] = fmaf(kLog2e, static_cast<float>(row[at.column_of(j) * step]), score[j]);
      }
    }
  }
}

template <bool kKeys, int kCount>
FLASH_DEVICE void add_alibi(float (&score)[kCount], const General& with, const ScorePlace& at) {
  const float steepness = kLog2e * with.slopes[at.batch * with.slopes_batch_stride + at.head];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = at.row[i / 2 % 2], column = at.column_of(i);
    const int distance = kKeys ? row - with.diagonals[column] : column - with.diagonals[row];
    score[i] -= steepness * fabsf(static_cast<float>(distance));
  }
}

}  // namespace custom_ops::flash_attention

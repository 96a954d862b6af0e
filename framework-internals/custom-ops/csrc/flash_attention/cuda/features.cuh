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

// A score with soft cap, bias and ALiBi, for a query and a key inside of their tensors; `slope` is the derivative of the cap.
template <typename Element>
FLASH_DEVICE float changed_score(const General& with, float score, int batch, int head, int query, int key, float& slope) {
  slope = 1.f;
  if (with.softcap > 0.f) score = capped(score, with.softcap, slope);
  if (with.bias != nullptr) {
    const int64_t place = batch * with.bias_stride[0] + head * with.bias_stride[1] + query * with.bias_stride[2] + key * with.bias_stride[3];
    score += kLog2e * static_cast<float>(static_cast<const Element*>(with.bias)[place]);
  }
  if (with.slopes != nullptr) {
    const float distance = static_cast<float>(key - with.diagonals[query]);
    score -= kLog2e * with.slopes[batch * with.slopes_batch_stride + head] * fabsf(distance);
  }
  return score;
}

}  // namespace custom_ops::flash_attention

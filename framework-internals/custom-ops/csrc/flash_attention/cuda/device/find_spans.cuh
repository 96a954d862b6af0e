// The spans of all rows (../spans.h), before a kernel with features.
#pragma once

#include "../../flash_attention.h"
#include "platform.cuh"

namespace custom_ops::flash_attention {

struct FindSpans {
  Window window;
  Span *of_queries, *of_keys;
  int *diagonals, *next_block;
};

constexpr int kSpanThreads = 256;

__global__ void __launch_bounds__(kSpanThreads) find_spans(const FindSpans args) {
  const int64_t row = int64_t{blockIdx.x} * kSpanThreads + threadIdx.x;
  if (row == 0) *args.next_block = 0;
  if (row < args.window.seq_q) {
    const Sequence in = sequence_of(args.window, false, row);
    args.of_queries[row] = keys_of_query(args.window, in, row);
    args.diagonals[row] = static_cast<int>(diagonal_of(in, row));
  }
  if (row < args.window.seq_kv) args.of_keys[row] = queries_of_key(args.window, sequence_of(args.window, true, row), row);
}

}  // namespace custom_ops::flash_attention

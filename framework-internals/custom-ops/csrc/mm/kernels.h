// The interface of the kernel for a binding: out = a b + bias, of matrices whose rows and columns may lie anywhere.
#pragma once

#include <cstdint>

#include "../common/dtype.h"

namespace custom_ops {

struct MatMul {
  Dtype dtype;    // of all operands; 16-bit types are summed in float32 and rounded once
  const void* a;  // (rows, depth)
  int64_t a_row, a_step;  // strides in elements, as those of b
  const void* b;          // (depth, columns)
  int64_t b_step, b_column;
  const void* bias;  // (columns), contiguous, or null
  void* out;  // (rows, columns), contiguous
  int64_t rows, columns, depth;
  int64_t threads;  // `out` is computed in at most this many parts
};

// `begin` and `end` select parts from 0 to `threads`.
void mm_cpu(const MatMul& call, int64_t begin, int64_t end);

}  // namespace custom_ops

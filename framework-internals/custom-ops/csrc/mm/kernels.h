// The interface of the kernel for a binding: out = a b, of matrices whose rows and columns may lie anywhere.
#pragma once

#include <cstdint>

#include "../common/dtype.h"

namespace custom_ops {

struct MatMul {
  Dtype dtype;    // float32 or float64
  const void* a;  // (rows, depth)
  int64_t a_row, a_step;  // strides in elements, as those of b
  const void* b;          // (depth, columns)
  int64_t b_step, b_column;
  void* out;  // (rows, columns), contiguous
  int64_t rows, columns, depth;
  int64_t threads;  // `out` is computed in at most this many parts
};

// `begin` and `end` select parts from 0 to `threads`.
void mm_cpu(const MatMul& call, int64_t begin, int64_t end);

}  // namespace custom_ops

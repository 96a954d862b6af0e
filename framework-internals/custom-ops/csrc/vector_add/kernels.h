// The interface of the kernels for the binding: plain functions on raw pointers. A file that includes torch's headers takes
// many seconds to compile. With this boundary, only binding.cpp includes them, and the kernels compile in a second or two.
#pragma once

#include <cstdint>

#include "../common/column_major.h"
#include "../common/dtype.h"

namespace custom_ops {

// Two inputs and one output of `count` elements each, contiguous and aligned to one element; the output overlaps neither. The CUDA
// kernels take matrices too that lie column by column.
struct Operands {
  Dtype dtype;
  const void* x;
  const void* b;
  void* out;
  int64_t count;
  ColumnMajor order{};
};

// out = x + b, rounded once to the dtype. `begin` and `end` select elements, so that a caller can use several threads.
void add_cpu(const Operands& operands, int64_t begin, int64_t end);

// out = alpha * x + b in one fused multiply-add; the 16-bit dtypes use float32, and are then rounded once more.
void axpb_cpu(const Operands& operands, double alpha, int64_t begin, int64_t end);

// The same on the current device; `stream` is a cudaStream_t. They return the launch's cudaError_t.
int add_cuda(const Operands& operands, void* stream);
int axpb_cuda(const Operands& operands, double alpha, void* stream);

}  // namespace custom_ops

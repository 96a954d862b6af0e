// The interface of the kernels for a binding: plain structs and functions on raw pointers.
//
//   u = x + bias    z = sqrt(2/pi) * (u + 0.044715 u^3)    y = u / 2 * (1 + tanh z) = u * sigmoid(2 z)
//
// x is (rows, columns), contiguous; bias (columns,). Arithmetic is in float32 for the 16-bit dtypes and in the dtype itself
// for float32 and float64; each result is rounded once.
#pragma once

#include <cstdint>

#include "../common/dtype.h"

namespace custom_ops {

// How a thread of the forward kernel accesses memory: one element at a time, or 1, 2 or 4 vectors of 16 bytes in flight.
// kAuto selects the fastest access for aligned operands. Requesting vectors for unaligned operands is an error.
enum class Access { kAuto, kScalar, kVector1, kVector2, kVector4 };

struct BiasGelu {
  Dtype dtype;
  const void* x;
  const void* bias;
  void* out;
  int64_t rows;
  int64_t columns;
  Access access = Access::kAuto;
};

// The shape of the backward kernel's blocks of 256 threads; zero means that the kernel chooses.
struct BackwardPlan {
  int threads_across = 0;  // threads across a row: 32, 64, 128 or 256
  int blocks_per_processor = 0;  // over the whole launch; more blocks balance better, but write more partial sums
  int vector_bytes = 0;  // bytes per load: 16, or one element
};

// dx = grad * dy/du; dbias is its sum over the rows, in a fixed order.
struct BiasGeluBackward {
  Dtype dtype;
  const void* grad;
  const void* x;
  const void* bias;
  void* dx;
  void* dbias;
  void* workspace;  // bias_gelu_backward_workspace bytes on the device
  int64_t rows;
  int64_t columns;
  BackwardPlan plan = {};
};

// `begin` and `end` select elements of (rows, columns).
void bias_gelu_cpu(const BiasGelu& call, int64_t begin, int64_t end);
int bias_gelu_cuda(const BiasGelu& call, void* stream);  // a cudaStream_t; returns a cudaError_t

// The CPU takes two steps, each parallel over a range: the groups of rows, then blocks of columns of their partial sums. The
// number of groups does not depend on the number of threads, so neither do the sums.
constexpr int64_t kColumnBlock = 64;
inline int64_t bias_gelu_backward_groups(int64_t rows) { return rows < 1024 ? (rows + 15) / 16 : 64; }
inline int64_t bias_gelu_backward_blocks(int64_t columns) { return (columns + kColumnBlock - 1) / kColumnBlock; }
inline int64_t bias_gelu_backward_stride(int64_t columns) { return bias_gelu_backward_blocks(columns) * kColumnBlock; }
inline int64_t bias_gelu_backward_workspace_cpu(const BiasGeluBackward& call) {
  return bias_gelu_backward_groups(call.rows) * bias_gelu_backward_stride(call.columns) * (call.dtype == Dtype::kFloat64 ? 8 : 4);
}
void bias_gelu_backward_rows_cpu(const BiasGeluBackward& call, int64_t begin_group, int64_t end_group);
void bias_gelu_backward_columns_cpu(const BiasGeluBackward& call, int64_t begin_block, int64_t end_block);

int64_t bias_gelu_backward_workspace_cuda(const BiasGeluBackward& call);  // for the current device; -1 if it has none
int bias_gelu_backward_cuda(const BiasGeluBackward& call, void* stream);

}  // namespace custom_ops

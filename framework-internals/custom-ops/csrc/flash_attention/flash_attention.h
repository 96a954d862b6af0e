// The interface of the attention kernels for a binding: plain structs and functions on raw pointers, without torch or CUDA
// headers.
//
//   S = scale * Q K^T    P = softmax(S) over the keys    out = P V    lse = log(sum(exp(S)))
//
// Shapes are q, out (batch, heads_q, seq_q, head_size) and k, v (batch, heads_kv, seq_kv, head_size); query head h
// reads key/value head h / (heads_q / heads_kv). `causal` is the convention of scaled_dot_product_attention's
// is_causal, aligned to the top left: query i attends to keys j <= i, whatever the two lengths are.
#pragma once

#include <cstdint>

namespace custom_ops::flash_attention {

enum class ScalarType { kFloat32, kFloat64, kFloat16, kBFloat16 };

// kAuto selects the fastest kernel that supports the problem on the current device. Requesting another one that does not
// support it is an error:
//   kNaive  any problem.
//   kMma    sm_80 on; float32, float16, bfloat16; head sizes that are multiples of 8 up to 256.
//   kWgmma  sm_90 only; the same types; head sizes up to 256 in the forward of 16-bit types, else up to 128.
// The tensor-core kernels are compiled for widths of 64, 128 and 256, and pad smaller heads with zeros. For 16-bit types they
// need 16-byte aligned pointers and strides that are multiples of 8 elements; kWgmma also needs nonzero strides. float32 is
// split into two fp16 parts in the workspace, so any strides are allowed.
enum class Algorithm { kAuto, kNaive, kMma, kWgmma };

// A (batch, heads, sequence, head_size) tensor; strides count elements, the last dimension has unit stride. A dimension
// of size one may have any stride.
struct Tensor {
  void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t seq_stride;
};

struct Problem {
  ScalarType dtype;
  int64_t batch;
  int64_t heads_q;
  int64_t heads_kv;  // divides heads_q
  int64_t seq_q;
  int64_t seq_kv;
  int64_t head_size;
  double scale;  // any finite value
  bool causal;
  Algorithm algorithm = Algorithm::kAuto;
};

// `lse` is (batch, heads_q, seq_q), contiguous, float32 (float64 if the dtype is float64), natural logarithm. Without any
// key, `lse` is -inf and `out` is zero. `lse` may be null.
struct Forward {
  Problem problem;
  Tensor q, k, v, out;
  void* lse;
  void* workspace;  // forward_workspace_bytes, aligned to 256 bytes; null where that is 0; not used on the CPU
};

// `out` and `lse` are the results of forward. `grad_lse` (null: zero) is the gradient of lse, with its shape and type. Every
// element of dq, dk and dv is written. Sums have a fixed order, so the gradients are deterministic.
struct Backward {
  Problem problem;
  Tensor q, k, v, out, grad_out;
  const void* lse;
  const void* grad_lse;
  Tensor dq, dk, dv;
  void* workspace;  // backward_workspace_bytes, aligned to 256 bytes; null where that is 0; not used on the CPU
};

// These need no device: the sizes are an upper bound over the devices and algorithms for the problem.
int64_t forward_workspace_bytes(const Problem& problem);
int64_t backward_workspace_bytes(const Problem& problem);

// Launch on the current device; `stream` is a cudaStream_t. They do not synchronise and can be captured in a graph.
// They return null, or a static error message.
const char* forward_cuda(const Forward& args, void* stream);
const char* backward_cuda(const Backward& args, void* stream);

// On the CPU, the work is divided into tasks 0 ... tasks - 1 that write to separate places; the caller distributes ranges of
// them over threads. 16-bit types are computed in float32, float32 and float64 in their own type. `algorithm` is ignored.
int64_t forward_cpu_tasks(const Problem& problem);
int64_t backward_cpu_tasks(const Problem& problem);
const char* forward_cpu(const Forward& args, int64_t begin, int64_t end);
const char* backward_cpu(const Backward& args, int64_t begin, int64_t end);

}  // namespace custom_ops::flash_attention

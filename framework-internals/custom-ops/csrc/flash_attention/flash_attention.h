// The interface of the attention kernels for a binding: plain structs and functions on raw pointers, without torch or CUDA
// headers.
//
//   S = scale * Q K^T    P = softmax(S) over the keys    out = P V    lse = log(sum(exp(S)))
//
// Shapes are q, out (batch, heads_q, seq_q, head_size) and k, v (batch, heads_kv, seq_kv, head_size); query head h
// reads key/value head h / (heads_q / heads_kv). `causal` is aligned at the last key (bottom right), as in FlashAttention: query i
// attends to keys j <= i + seq_kv - seq_q. Features change S before the softmax:
//
//   S = softcap tanh(scale Q K^T / softcap) + bias - slope |key - diagonal|    lse = log(sum(exp(S)) + exp(sink))
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "spans.h"

namespace custom_ops::flash_attention {

enum class ScalarType { kFloat32, kFloat64, kFloat16, kBFloat16 };

// kAuto selects the fastest kernel that supports the problem on the current device. Requesting another one that does not
// support it is an error:
//   kNaive  any problem.
//   kMma    sm_80 on; float32, float16, bfloat16; head sizes that are multiples of 8 up to 256.
//   kWgmma  sm_90 only; the same types; head sizes up to 256 in 16-bit types, up to 128 in float32.
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

// What a call may have beside the causal mask; by default, none of it. Of the pointers, null is none.
struct Features {
  int64_t window_left = -1, window_right = -1;  // see spans.h; `causal` makes the right one 0
  double softcap = 0;                           // 0: none
  const void* sinks = nullptr;                  // (heads_q), in the type of lse; for the forward pass
  const void* bias = nullptr;                   // (batch, heads_q, seq_q, seq_kv), in the operands' type
  int64_t bias_stride[4] = {};                  // 0 where it is broadcast
  const void* alibi_slopes = nullptr;           // (heads_q) of every batch, in the type of lse
  int64_t alibi_batch_stride = 0;
  // Packed sequences, in a batch of one: the first row of each of them, then the end of the last.
  const int32_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;
  int64_t sequences = 0;
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
  Features features = {};
};

static inline Window window_of(const Problem& problem) {
  const Features& with = problem.features;
  return {problem.seq_q, problem.seq_kv, with.window_left, problem.causal ? 0 : with.window_right, with.cu_seqlens_q, with.cu_seqlens_k, with.sequences};
}
// Whether scores change otherwise than by the scale.
static inline bool changes_scores(const Features& with) { return with.softcap != 0 || with.bias != nullptr || with.alibi_slopes != nullptr; }
// Whether a query may see no key. Elsewhere, a row whose scores are all -inf has no softmax: it is NaN.
static inline bool hides_rows(const Problem& problem) {
  const Window window = window_of(problem);
  return window.left >= 0 || (window.right >= 0 && problem.seq_q != problem.seq_kv) || window.cu_seqlens_q != nullptr || changes_scores(problem.features);
}

// `lse` is (batch, heads_q, seq_q), contiguous, float32 (float64 if the dtype is float64), natural logarithm. A query
// without any key has an `lse` of -inf (with a sink, the sink) and an `out` of zero. `lse` may be null.
struct Forward {
  Problem problem;
  Tensor q, k, v, out;
  void* lse;
  void* workspace;  // forward_workspace_bytes, aligned to 256 bytes (CPU: forward_cpu_workspace_bytes, 64); null where that is 0
};

// `out` and `lse` are the results of forward. `grad_lse` (null: zero) is the gradient of lse, with its shape and type. Every
// element of dq, dk and dv is written. `deterministic`: sums have a fixed order. Otherwise that of dq is free where it is faster
// so (16-bit types by kWgmma), and dq varies from run to run in its last bits.
struct Backward {
  Problem problem;
  Tensor q, k, v, out, grad_out;
  const void* lse;
  const void* grad_lse;
  Tensor dq, dk, dv;
  void* workspace;  // backward_workspace_bytes, aligned to 256 bytes (CPU: backward_cpu_workspace_bytes, 64); null where that is 0
  bool deterministic = false;
  void* bias_gradient = nullptr;  // null, or (batch, heads_q, seq_q, seq_kv), contiguous, in the operands' type; CPU: zeros
};

// These need no device: the sizes are an upper bound over the devices and algorithms for the problem.
int64_t forward_workspace_bytes(const Problem& problem);
int64_t backward_workspace_bytes(const Problem& problem);

// Launch on the current device; `stream` is a cudaStream_t. They do not synchronise and can be captured in a graph.
// They return null, or a static error message.
const char* forward_cuda(const Forward& args, void* stream);
const char* backward_cuda(const Backward& args, void* stream);

// On the CPU, a pass is a list of steps, one after the other. In each step that has tasks, every thread calls `run` with the same
// counter, which starts at zero, and takes tasks until none is left; more threads than tasks have nothing to do. The tasks write to separate
// places, and no sum depends on the number of threads. bfloat16 is multiplied in bfloat16 where the processor can (AMX,
// AVX512-BF16) and summed in float32; the other 16-bit operands are computed in float32, float32 and float64 in their own type.
// `algorithm` is ignored.
template <class Call> struct Step {
  int64_t tasks;
  const char* (*run)(const Call& call, std::atomic<int64_t>& next);
};

static inline int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
static inline int64_t blocks_cpu(int64_t rows) { return (rows + 63) / 64; }
// What a row of head_size elements is filled up to with zeros.
static inline int64_t width_cpu(const Problem& problem) { return rounded_up(problem.head_size, problem.dtype == ScalarType::kBFloat16 ? 32 : 16); }
static inline int64_t sum_bytes_cpu(const Problem& problem) { return problem.dtype == ScalarType::kFloat64 ? 8 : 4; }
static inline int64_t query_blocks_cpu(const Problem& problem) { return problem.batch * problem.heads_q * blocks_cpu(problem.seq_q); }

// Where the blocks of queries are few, each goes over parts of the keys, of four blocks or more, in as many tasks.
static inline int64_t forward_cpu_parts(const Problem& problem) {
  const int64_t queries = query_blocks_cpu(problem), wanted = queries == 0 ? 1 : (15 + queries) / queries;
  const int64_t most = blocks_cpu(problem.seq_kv) / 4;
  return wanted < most ? wanted : most > 1 ? most : 1;
}
// Of a part, the sums of the columns of V, the largest score and the sum of the powers of each query.
static inline int64_t part_bytes_cpu(const Problem& problem) { return (width_cpu(problem) + 2) * 64 * sum_bytes_cpu(problem); }
static inline int64_t parts_bytes_cpu(const Problem& problem) {
  const int64_t parts = forward_cpu_parts(problem);
  return parts > 1 ? query_blocks_cpu(problem) * parts * part_bytes_cpu(problem) : 0;
}
// Blocks of bfloat16 values, packed for all queries if there is more than one block of them.
static inline int64_t packed_blocks_cpu(const Problem& problem) {
  const bool packed = problem.dtype == ScalarType::kBFloat16 && blocks_cpu(problem.seq_q) * problem.heads_q > problem.heads_kv;
  return packed ? problem.batch * problem.heads_kv * blocks_cpu(problem.seq_kv) : 0;
}
static inline int64_t forward_cpu_workspace_bytes(const Problem& problem) {
  return parts_bytes_cpu(problem) + packed_blocks_cpu(problem) * 64 * width_cpu(problem) * 2;
}
int64_t forward_cpu_packed(const Problem& problem);  // packed_blocks_cpu if this processor's products need them, else 0
const char* forward_cpu_pack(const Forward& args, std::atomic<int64_t>& next);
const char* forward_cpu(const Forward& args, std::atomic<int64_t>& next);
const char* forward_cpu_merge(const Forward& args, std::atomic<int64_t>& next);
static inline std::array<Step<Forward>, 3> forward_cpu_steps(const Problem& problem) {
  const int64_t queries = query_blocks_cpu(problem), parts = forward_cpu_parts(problem);
  return {{{forward_cpu_packed(problem), forward_cpu_pack}, {queries * parts, forward_cpu}, {parts > 1 ? queries : 0, forward_cpu_merge}}};
}

// The parts of the queries of a head whose sums of dk and dv are separate: enough for 16 tasks, of four blocks or more.
static inline int64_t backward_cpu_parts(const Problem& problem) {
  const int64_t heads = problem.batch * problem.heads_kv, wanted = heads == 0 ? 1 : (15 + heads) / heads;
  const int64_t most = blocks_cpu(problem.seq_q) / 4;
  return wanted < most ? wanted : most > 1 ? most : 1;
}
static inline int64_t backward_cpu_tasks(const Problem& problem) { return problem.batch * problem.heads_kv * backward_cpu_parts(problem); }
// The tasks whose sums of dk and dv lie in the workspace.
static inline int64_t backward_cpu_sums(const Problem& problem) { return backward_cpu_parts(problem) > 1 ? backward_cpu_tasks(problem) : 0; }
// The keys of a chunk: as many as half a megabyte has room for, with the sums of their gradients.
static inline int64_t backward_cpu_chunk(const Problem& problem) {
  const bool narrow = problem.dtype == ScalarType::kBFloat16 || problem.dtype == ScalarType::kFloat16;
  const int64_t most = 512 * 1024 / (width_cpu(problem) * (2 * (narrow ? 2 : sum_bytes_cpu(problem)) + 2 * sum_bytes_cpu(problem)));
  return rounded_up(most < problem.seq_kv ? most : problem.seq_kv, 64);
}
static inline int64_t backward_cpu_workspace_bytes(const Problem& problem) {
  const int64_t queries = backward_cpu_chunk(problem) < problem.seq_kv ? 64 * query_blocks_cpu(problem) : 0;
  return (2 * rounded_up(problem.seq_kv, 16) * backward_cpu_sums(problem) + queries) * width_cpu(problem) * sum_bytes_cpu(problem);
}
const char* backward_cpu(const Backward& args, std::atomic<int64_t>& next);
const char* backward_cpu_finish(const Backward& args, std::atomic<int64_t>& next);
static inline std::array<Step<Backward>, 2> backward_cpu_steps(const Problem& problem) {
  const int64_t parts = backward_cpu_parts(problem), blocks = problem.batch * problem.heads_kv * blocks_cpu(problem.seq_kv);
  return {{{backward_cpu_tasks(problem), backward_cpu}, {parts > 1 ? blocks : 0, backward_cpu_finish}}};
}

}  // namespace custom_ops::flash_attention

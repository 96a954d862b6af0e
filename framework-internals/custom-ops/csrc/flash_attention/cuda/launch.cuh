// Shared by the launchers: which kernels support a problem, and how the workspace is divided.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../flash_attention.h"
#include "features.cuh"
#include "device/platform.cuh"
#include "softmax.cuh"

namespace custom_ops::flash_attention {

// Of a problem with features, in the workspace; else all null.
struct SpanWorkspace {
  Span *of_queries, *of_keys;
  int *diagonals, *next_block;
};

// `general` is null for the plain form of a kernel; backward, it has the spans of queries and then those of keys.
const char* forward_naive(const Forward& args, const SpanWorkspace& spans, void* stream);
const char* forward_mma(const Forward& args, const General* general, void* stream);
const char* decode_mma(const Forward& args, int parts, void* stream);  // one query, the keys in parts
const char* forward_wgmma(const Forward& args, const General* general, void* stream);
const char* backward_naive(const Backward& args, const SpanWorkspace& spans, void* stream);
const char* backward_mma(const Backward& args, const General* general, void* stream);
const char* backward_wgmma(const Backward& args, void* stream);
const char* backward_one_pass(const Backward& args, const General* general, void* stream);  // wgmma for 16-bit types
int64_t one_pass_workspace_bytes(const Problem& problem);

// Why the kernels of an algorithm do not support a problem; null if they do.
const char* refuse_mma(const Problem& problem, const Tensor* const* tensors, int count);
const char* refuse_wgmma(const Problem& problem, const Tensor* const* tensors, int count);

inline bool is_split(const Problem& problem) { return problem.dtype == ScalarType::kFloat32; }
// The head sizes that the tensor-core kernels are compiled for; others are padded with zeros.
inline int head_width(int64_t head_size) { return head_size <= 64 ? 64 : head_size <= 128 ? 128 : 256; }

constexpr int64_t align_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Takes aligned pieces of a workspace; with a null workspace it only counts bytes.
class Pieces {
 public:
  explicit Pieces(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(int64_t count) {
    T* piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += align_up(count * static_cast<int64_t>(sizeof(T)));
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

constexpr int kSplitTensors = 4;  // at most: q, k, v and, backward, grad_out

// The parts of an fp32 operand in the workspace, as split.cuh writes them.
struct Parts {
  __half *high, *low;
  int* exponent;
};

struct SplitWorkspace {
  Parts parts[kSplitTensors];
};

inline SplitWorkspace take_parts(Pieces& pieces, const Problem& problem, int tensors) {
  SplitWorkspace workspace{};
  for (int i = 0; i < tensors; ++i) {
    const bool keys = i == 1 || i == 2;
    const int64_t heads = problem.batch * (keys ? problem.heads_kv : problem.heads_q),
                  seq = keys ? problem.seq_kv : problem.seq_q;
    const int64_t count = heads * seq * head_width(problem.head_size);
    workspace.parts[i].high = pieces.take<__half>(count);
    workspace.parts[i].low = pieces.take<__half>(count);
    workspace.parts[i].exponent = pieces.take<int>(heads * ((seq + kSplitRows - 1) / kSplitRows));
  }
  return workspace;
}

// See row_statistics.cuh; `stride` elements per head.
struct RowStatistics {
  float *lse, *delta;
  int64_t stride;
};

inline RowStatistics take_statistics(Pieces& pieces, const Problem& problem) {
  const int64_t stride = (problem.seq_q + 127) / 128 * 128, count = problem.batch * problem.heads_q * stride;
  float* const lse = pieces.take<float>(count);
  return {lse, pieces.take<float>(count), stride};
}

struct BackwardWorkspace {
  SplitWorkspace split;  // float32: of q, k, v, grad_out
  RowStatistics statistics;
};

// Fills the workspace, the first step of every tensor-core backward.
const char* prepare_backward(const Backward& args, BackwardWorkspace& workspace, void* stream);

int64_t naive_workspace_bytes(const Problem& problem, bool backward);

// Splits q, k, v and, if there is a fourth tensor, grad_out.
const char* split_tensors(const Problem& problem, const Tensor* const* tensors, int count,
                          const SplitWorkspace& workspace, void* stream);

#define FLASH_TRY(call) \
  if (const char* error = (call)) return error

}  // namespace custom_ops::flash_attention

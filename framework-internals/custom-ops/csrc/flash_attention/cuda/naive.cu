// Launches the naive kernels.

#include "naive.cuh"

#include <algorithm>

#include "launch.cuh"

namespace custom_ops::flash_attention {
namespace {

// The number of blocks, which share the rows: enough to fill a GPU, but few enough that their scratch rows stay small.
constexpr int64_t kMostBlocks = 1024;

int64_t row_length(const Problem& problem, bool backward) {
  const int64_t one = std::max<int64_t>(problem.seq_kv, 1);
  return backward ? std::max(one, 2 * problem.seq_q) : one;
}

int64_t most_rows(const Problem& problem, bool backward) {
  const int64_t queries = problem.batch * problem.heads_q * problem.seq_q;
  return backward ? std::max(queries, problem.batch * problem.heads_kv * problem.seq_kv) : queries;
}

Naive naive_args(const Problem& problem, const SpanWorkspace& spans, void* workspace, bool backward) {
  Naive kernel{};
  kernel.scratch = workspace;
  kernel.row_length = row_length(problem, backward);
  kernel.rows = problem.batch * problem.heads_q * problem.seq_q;
  kernel.heads_q = static_cast<int>(problem.heads_q);
  kernel.heads_kv = static_cast<int>(problem.heads_kv);
  kernel.seq_q = static_cast<int>(problem.seq_q);
  kernel.seq_kv = static_cast<int>(problem.seq_kv);
  kernel.head_size = static_cast<int>(problem.head_size);
  kernel.scale = problem.scale;
  kernel.causal = problem.causal;
  kernel.with = problem.features;
  kernel.of_queries = spans.of_queries;
  kernel.of_keys = spans.of_keys;
  kernel.diagonals = spans.diagonals;
  return kernel;
}

const char* launch_rows(void (*kernel)(Naive), const Naive& args, void* stream) {
  if (args.rows == 0) return nullptr;
  constexpr int kSharedBytes = kNaiveThreads / 32 * sizeof(double);
  return launch(kernel, dim3(static_cast<unsigned>(std::min(args.rows, kMostBlocks))), kNaiveThreads, kSharedBytes,
                stream, args);
}

template <typename T>
const char* launch_backward(const Backward& args, Naive kernel, void* stream) {
  FLASH_TRY(launch_rows(backward_naive_queries<T>, kernel, stream));
  kernel.rows = args.problem.batch * args.problem.heads_kv * args.problem.seq_kv;
  return launch_rows(backward_naive_keys<T>, kernel, stream);
}

}  // namespace

int64_t naive_workspace_bytes(const Problem& problem, bool backward) {
  const int64_t bytes = problem.dtype == ScalarType::kFloat64 ? 8 : 4;
  return std::min(most_rows(problem, backward), kMostBlocks) * row_length(problem, backward) * bytes;
}

const char* forward_naive(const Forward& args, const SpanWorkspace& spans, void* stream) {
  Naive kernel = naive_args(args.problem, spans, args.workspace, false);
  kernel.q = args.q;
  kernel.k = args.k;
  kernel.v = args.v;
  kernel.out = args.out;
  kernel.lse = args.lse;
  switch (args.problem.dtype) {
    case ScalarType::kFloat32: return launch_rows(forward_naive<float>, kernel, stream);
    case ScalarType::kFloat64: return launch_rows(forward_naive<double>, kernel, stream);
    case ScalarType::kFloat16: return launch_rows(forward_naive<__half>, kernel, stream);
    default: return launch_rows(forward_naive<__nv_bfloat16>, kernel, stream);
  }
}

const char* backward_naive(const Backward& args, const SpanWorkspace& spans, void* stream) {
  Naive kernel = naive_args(args.problem, spans, args.workspace, true);
  kernel.q = args.q;
  kernel.k = args.k;
  kernel.v = args.v;
  kernel.out = args.out;
  kernel.grad_out = args.grad_out;
  kernel.dq = args.dq;
  kernel.dk = args.dk;
  kernel.dv = args.dv;
  kernel.lse = const_cast<void*>(args.lse);
  kernel.grad_lse = args.grad_lse;
  kernel.bias_gradient = args.bias_gradient;
  switch (args.problem.dtype) {
    case ScalarType::kFloat32: return launch_backward<float>(args, kernel, stream);
    case ScalarType::kFloat64: return launch_backward<double>(args, kernel, stream);
    case ScalarType::kFloat16: return launch_backward<__half>(args, kernel, stream);
    default: return launch_backward<__nv_bfloat16>(args, kernel, stream);
  }
}

}  // namespace custom_ops::flash_attention

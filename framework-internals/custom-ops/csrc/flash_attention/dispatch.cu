// Which kernel serves a problem; the launches that every tensor-core kernel of fp32 begins with.

#include <algorithm>

#include "check.h"
#include "launch.cuh"
#include "split.cuh"

namespace custom_ops::flash_attention {
namespace {

bool aligned(const Problem& problem, const Tensor& tensor) {
  const bool strides = (problem.batch == 1 || tensor.batch_stride % 8 == 0) && tensor.head_stride % 8 == 0 && tensor.seq_stride % 8 == 0;
  return strides && reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
}

bool empty(const Problem& problem) { return problem.batch == 0 || problem.seq_q == 0; }

const char* resolve(const Problem& problem, const Tensor* const* tensors, int count, bool backward, Algorithm& algorithm) {
  algorithm = problem.algorithm;
  const char* mma = refuse_mma(problem, tensors, count);
  const char* wgmma = backward ? "flash_attention: the backward has no wgmma kernel" : refuse_wgmma(problem, tensors, count);
  if (algorithm == Algorithm::kMma) return mma;
  if (algorithm == Algorithm::kWgmma) return wgmma;
  if (algorithm == Algorithm::kAuto) {
    algorithm = wgmma == nullptr ? Algorithm::kWgmma : mma == nullptr ? Algorithm::kMma : Algorithm::kNaive;
  }
  return nullptr;
}

}  // namespace

const char* refuse_mma(const Problem& problem, const Tensor* const* tensors, int count) {
  if (problem.dtype == ScalarType::kFloat64) return "flash_attention: float64 has no tensor-core kernel";
  if (problem.head_size > 256 || problem.head_size % 8 != 0) {
    return "flash_attention: the tensor-core kernels take head sizes that are multiples of 8 up to 256";
  }
  if (problem.seq_kv == 0) return "flash_attention: the tensor-core kernels need at least one key";
  const Device now = device();
  if (now.capability < 80) return "flash_attention: the tensor-core kernels need a GPU of compute capability 8.0 or more";
  if (is_split(problem)) return nullptr;
  for (int i = 0; i < count; ++i) {
    if (!aligned(problem, *tensors[i])) {
      return "flash_attention: the tensor-core kernels of 16-bit types need 16-byte aligned pointers and strides";
    }
  }
  return nullptr;
}

const char* refuse_wgmma(const Problem& problem, const Tensor* const* tensors, int count) {
  FLASH_TRY(refuse_mma(problem, tensors, count));
  if (device().capability != 90) return "flash_attention: the wgmma kernels need a GPU of compute capability 9.0";
  if (is_split(problem)) return problem.head_size <= 128 ? nullptr : "flash_attention: the wgmma kernel of float32 takes head sizes up to 128";
  for (int i = 0; i < count; ++i) {  // a tensor map has no stride of zero
    if (tensors[i]->seq_stride == 0 || tensors[i]->head_stride == 0 || (problem.batch > 1 && tensors[i]->batch_stride == 0)) {
      return "flash_attention: the wgmma kernels of 16-bit types do not take expanded tensors";
    }
  }
  return nullptr;
}

const char* split_tensors(const Problem& problem, const Tensor* const* tensors, int count, const SplitWorkspace& workspace,
                          void* stream) {
  Split args{};
  args.head_size = static_cast<int>(problem.head_size);
  args.width = head_width(problem.head_size);
  for (int i = 0; i < count; ++i) {
    const bool keys = i == 1 || i == 2;
    args.tensor[i] = {static_cast<const float*>(tensors[i]->data), tensors[i]->batch_stride, tensors[i]->head_stride,
                      tensors[i]->seq_stride, workspace.parts[i].high, workspace.parts[i].low, workspace.parts[i].largest,
                      static_cast<int>(problem.batch), static_cast<int>(keys ? problem.heads_kv : problem.heads_q),
                      static_cast<int>(keys ? problem.seq_kv : problem.seq_q)};
  }
  FLASH_TRY(zero_memory(workspace.largest, workspace.largest_count * 4, stream));
  constexpr int64_t kQuadsAThread = 8;
  const int64_t quads = std::max(problem.seq_q, problem.seq_kv) * args.width / 4;
  const int64_t blocks = std::min<int64_t>((quads + kSplitThreads * kQuadsAThread - 1) / (kSplitThreads * kQuadsAThread), 4096);
  // A grid has at most 65,535 blocks along y: the heads beyond that come in further launches.
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(problem.batch * problem.heads_q), static_cast<unsigned>(count));
  if (grid.y > 65535) return "flash_attention: float32 takes at most 65,535 heads (batch times heads) at once";
  FLASH_TRY(launch(find_largest, grid, kSplitThreads, 0, stream, args));
  return launch(write_parts, grid, kSplitThreads, 0, stream, args);
}

int64_t forward_workspace_bytes(const Problem& problem) {
  Pieces pieces(nullptr);
  if (is_split(problem)) take_parts(pieces, problem, 3);
  return std::max(pieces.used(), naive_workspace_bytes(problem, false));
}

int64_t backward_workspace_bytes(const Problem& problem) {
  Pieces pieces(nullptr);
  if (is_split(problem)) take_parts(pieces, problem, 4);
  pieces.take<float>(2 * align_up(problem.batch * problem.heads_q * problem.seq_q));
  return std::max(pieces.used(), naive_workspace_bytes(problem, true));
}

const char* forward_cuda(const Forward& args, void* stream) {
  FLASH_TRY(check(args.problem));
  if (empty(args.problem)) return nullptr;
  const Tensor* tensors[] = {&args.q, &args.k, &args.v, &args.out};
  Algorithm algorithm;
  FLASH_TRY(resolve(args.problem, tensors, 4, false, algorithm));
  if (algorithm == Algorithm::kWgmma) return forward_wgmma(args, stream);
  return algorithm == Algorithm::kMma ? forward_mma(args, stream) : forward_naive(args, stream);
}

const char* backward_cuda(const Backward& args, void* stream) {
  FLASH_TRY(check(args.problem));
  if (args.problem.batch == 0) return nullptr;
  const Tensor* tensors[] = {&args.q, &args.k, &args.v, &args.grad_out, &args.out, &args.dq, &args.dk, &args.dv};
  Algorithm algorithm;
  FLASH_TRY(resolve(args.problem, tensors, 8, true, algorithm));
  return algorithm == Algorithm::kNaive ? backward_naive(args, stream) : backward_mma(args, stream);
}

}  // namespace custom_ops::flash_attention

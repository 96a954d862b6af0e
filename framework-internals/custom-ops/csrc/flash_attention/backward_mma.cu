// Launches of the mma.sync backward: the parts of fp32, delta, then the kernel for keys and the one for queries.

#include "backward_mma.cuh"

#include "mma_operand.cuh"

namespace custom_ops::flash_attention {
namespace {

struct Delta {
  Tensor out, grad_out;
  const float *lse, *grad_lse;
  float *delta, *scaled_lse;
  int64_t rows;
  int heads, seq, head_size;
};

constexpr int kDeltaThreads = 256;

// A warp a row: delta = sum(out * grad_out) - grad_lse, and lse in units of log2.
template <typename T>
__global__ void __launch_bounds__(kDeltaThreads) row_deltas(const Delta args) {
  const int64_t row = int64_t{blockIdx.x} * (kDeltaThreads / 32) + threadIdx.x / 32;
  if (row >= args.rows) return;
  const int64_t batch = row / args.seq / args.heads, head = row / args.seq % args.heads, query = row % args.seq;
  const T* out = static_cast<const T*>(args.out.data) + batch * args.out.batch_stride + head * args.out.head_stride + query * args.out.seq_stride;
  const T* grad = static_cast<const T*>(args.grad_out.data) + batch * args.grad_out.batch_stride +
                  head * args.grad_out.head_stride + query * args.grad_out.seq_stride;
  float sum = 0.f;
  for (int i = threadIdx.x % 32; i < args.head_size; i += 32) sum = fmaf(static_cast<float>(out[i]), static_cast<float>(grad[i]), sum);
  for (int offset = 16; offset > 0; offset /= 2) sum += shuffle_xor(sum, offset);
  if (threadIdx.x % 32 == 0) {
    args.delta[row] = sum - (args.grad_lse == nullptr ? 0.f : args.grad_lse[row]);
    args.scaled_lse[row] = args.lse[row] * kLog2e;
  }
}

template <typename Shape>
const char* launch_shape(const Backward& args, const SplitWorkspace& workspace, const float* lse, const float* delta, void* stream) {
  const Problem& problem = args.problem;
  const Tensor* tensors[4] = {&args.q, &args.k, &args.v, &args.grad_out};
  constexpr int kQueries[4] = {0, 3, 1, 2}, kKeys[4] = {1, 2, 0, 3};  // rows, then tiles
  MmaBackward kernel{};
  for (int i = 0; i < 4; ++i) {
    const int which = Shape::kKeys ? kKeys[i] : kQueries[i];
    kernel.operand[i] =
        mma_operand(problem, *tensors[which], Shape::kParts == 2 ? &workspace.parts[which] : nullptr, which == 1 || which == 2);
    kernel.largest[i] = workspace.parts[which].largest;
  }
  const Tensor& first = Shape::kKeys ? args.dk : args.dq;
  kernel.first = first.data;
  kernel.second = args.dv.data;
  const int64_t first_stride[3] = {first.batch_stride, first.head_stride, first.seq_stride};
  const int64_t second_stride[3] = {args.dv.batch_stride, args.dv.head_stride, args.dv.seq_stride};
  for (int i = 0; i < 3; ++i) kernel.first_stride[i] = first_stride[i], kernel.second_stride[i] = second_stride[i];
  kernel.lse = lse;
  kernel.delta = delta;
  kernel.head_size = static_cast<int>(Shape::kParts == 2 ? Shape::kD : problem.head_size);
  kernel.out_head_size = static_cast<int>(problem.head_size);
  kernel.scale = static_cast<float>(problem.scale);
  kernel.causal = problem.causal;
  const int64_t rows = Shape::kKeys ? problem.seq_kv : problem.seq_q, heads = Shape::kKeys ? problem.heads_kv : problem.heads_q;
  const int64_t blocks = (rows + Shape::kRows - 1) / Shape::kRows * problem.batch * heads;
  if (blocks > INT32_MAX) return "flash_attention: more than 2^31 blocks of rows";
  if (blocks == 0) return nullptr;
  return launch(backward_mma<Shape>, dim3(static_cast<unsigned>(blocks)), Shape::kThreads, Shape::kSharedBytes, stream, kernel);
}

// The widest heads' two sums for a block of keys do not fit the registers together: each has its own launch.
template <typename T, int kParts>
const char* launch_width(const Backward& args, const SplitWorkspace& workspace, const float* lse, const float* delta, void* stream) {
  switch (head_width(args.problem.head_size)) {
    case 64: {
      constexpr int kTile = kParts == 2 ? 32 : 64;
      FLASH_TRY((launch_shape<MmaBackwardShape<T, kParts, 64, kTile, 4, 2, true, true, true>>(args, workspace, lse, delta, stream)));
      return launch_shape<MmaBackwardShape<T, kParts, 64, kTile, 4, 2, false, true, false>>(args, workspace, lse, delta, stream);
    }
    case 128: {
      constexpr int kTile = kParts == 2 ? 16 : 32;
      FLASH_TRY((launch_shape<MmaBackwardShape<T, kParts, 128, kTile, 4, 2, true, true, true>>(args, workspace, lse, delta, stream)));
      return launch_shape<MmaBackwardShape<T, kParts, 128, kTile, 4, 2, false, true, false>>(args, workspace, lse, delta, stream);
    }
    default: {
      constexpr int kWarps = kParts == 2 ? 2 : 4, kStages = kParts == 2 ? 1 : 2;
      FLASH_TRY((launch_shape<MmaBackwardShape<T, kParts, 256, 16, kWarps, kStages, true, true, false>>(args, workspace, lse, delta, stream)));
      FLASH_TRY((launch_shape<MmaBackwardShape<T, kParts, 256, 16, kWarps, kStages, true, false, true>>(args, workspace, lse, delta, stream)));
      return launch_shape<MmaBackwardShape<T, kParts, 256, 16, kWarps, kStages, false, true, false>>(args, workspace, lse, delta, stream);
    }
  }
}

template <typename T>
const char* launch_deltas(const Backward& args, float* lse, float* delta, void* stream) {
  const Problem& problem = args.problem;
  const int64_t rows = problem.batch * problem.heads_q * problem.seq_q;
  const Delta kernel{args.out, args.grad_out, static_cast<const float*>(args.lse), static_cast<const float*>(args.grad_lse), delta, lse,
                     rows, static_cast<int>(problem.heads_q), static_cast<int>(problem.seq_q), static_cast<int>(problem.head_size)};
  const int64_t blocks = (rows + kDeltaThreads / 32 - 1) / (kDeltaThreads / 32);
  if (blocks > INT32_MAX) return "flash_attention: more than 2^34 rows";
  if (blocks == 0) return nullptr;
  return launch(row_deltas<T>, dim3(static_cast<unsigned>(blocks)), kDeltaThreads, 0, stream, kernel);
}

}  // namespace

const char* backward_mma(const Backward& args, void* stream) {
  const Problem& problem = args.problem;
  Pieces pieces(args.workspace);
  SplitWorkspace workspace{};
  if (is_split(problem)) {
    const Tensor* tensors[4] = {&args.q, &args.k, &args.v, &args.grad_out};
    workspace = take_parts(pieces, problem, 4);
    FLASH_TRY(split_tensors(problem, tensors, 4, workspace, stream));
  }
  const int64_t rows = problem.batch * problem.heads_q * problem.seq_q;
  float *lse = pieces.take<float>(rows), *delta = pieces.take<float>(rows);
  switch (problem.dtype) {
    case ScalarType::kFloat16:
      FLASH_TRY(launch_deltas<__half>(args, lse, delta, stream));
      return launch_width<__half, 1>(args, workspace, lse, delta, stream);
    case ScalarType::kBFloat16:
      FLASH_TRY(launch_deltas<__nv_bfloat16>(args, lse, delta, stream));
      return launch_width<__nv_bfloat16, 1>(args, workspace, lse, delta, stream);
    default:
      FLASH_TRY(launch_deltas<float>(args, lse, delta, stream));
      return launch_width<__half, 2>(args, workspace, lse, delta, stream);
  }
}

}  // namespace custom_ops::flash_attention

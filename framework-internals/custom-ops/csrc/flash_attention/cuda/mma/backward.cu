// Launches the mma.sync backward: the kernel for keys, then the one for queries.

#include "backward.cuh"

#include "operand.cuh"

namespace custom_ops::flash_attention {
namespace {

template <typename Shape>
const char* launch_shape(const Backward& args, const BackwardWorkspace& workspace, void* stream) {
  const Problem& problem = args.problem;
  const Tensor* tensors[4] = {&args.q, &args.k, &args.v, &args.grad_out};
  constexpr int kQueries[4] = {0, 3, 1, 2}, kKeys[4] = {1, 2, 0, 3};  // rows, then tiles
  MmaBackward kernel{};
  for (int i = 0; i < 4; ++i) {
    const int which = Shape::kKeys ? kKeys[i] : kQueries[i];
    kernel.operand[i] =
        mma_operand(problem, *tensors[which], Shape::kParts == 2 ? &workspace.split.parts[which] : nullptr,
                    which == 1 || which == 2);
    kernel.exponent[i] = workspace.split.parts[which].exponent;
  }
  const Tensor& first = Shape::kKeys ? args.dk : args.dq;
  kernel.first = first.data;
  kernel.second = args.dv.data;
  const int64_t first_stride[3] = {first.batch_stride, first.head_stride, first.seq_stride};
  const int64_t second_stride[3] = {args.dv.batch_stride, args.dv.head_stride, args.dv.seq_stride};
  for (int i = 0; i < 3; ++i) kernel.first_stride[i] = first_stride[i], kernel.second_stride[i] = second_stride[i];
  kernel.lse = workspace.statistics.lse;
  kernel.delta = workspace.statistics.delta;
  kernel.statistics_stride = workspace.statistics.stride;
  kernel.head_size = static_cast<int>(Shape::kParts == 2 ? Shape::kD : problem.head_size);
  kernel.out_head_size = static_cast<int>(problem.head_size);
  kernel.scale = static_cast<float>(problem.scale);
  kernel.causal = problem.causal;
  const int64_t rows = Shape::kKeys ? problem.seq_kv : problem.seq_q,
                heads = Shape::kKeys ? problem.heads_kv : problem.heads_q;
  const int64_t blocks = (rows + Shape::kRows - 1) / Shape::kRows * problem.batch * heads;
  if (blocks > INT32_MAX) return "flash_attention: more than 2^31 blocks of rows";
  return launch(backward_mma<Shape>, dim3(static_cast<unsigned>(blocks)), Shape::kThreads, Shape::kSharedBytes, stream,
                kernel);
}

// For the widest heads, the two sums of a block of keys do not fit in the registers together, so each has its own launch.
template <typename T, int kParts>
const char* launch_width(const Backward& args, const BackwardWorkspace& workspace, void* stream) {
  switch (head_width(args.problem.head_size)) {
    case 64: {
      constexpr int kTile = kParts == 2 ? 32 : 64;
      FLASH_TRY(
          (launch_shape<MmaBackwardShape<T, kParts, 64, kTile, 4, 2, true, true, true>>(args, workspace, stream)));
      return launch_shape<MmaBackwardShape<T, kParts, 64, kTile, 4, 2, false, true, false>>(args, workspace, stream);
    }
    case 128: {
      constexpr int kTile = kParts == 2 ? 16 : 32;
      FLASH_TRY(
          (launch_shape<MmaBackwardShape<T, kParts, 128, kTile, 4, 2, true, true, true>>(args, workspace, stream)));
      return launch_shape<MmaBackwardShape<T, kParts, 128, kTile, 4, 2, false, true, false>>(args, workspace, stream);
    }
    default: {
      constexpr int kWarps = kParts == 2 ? 2 : 4, kStages = kParts == 2 ? 1 : 2;
      FLASH_TRY((launch_shape<MmaBackwardShape<T, kParts, 256, 16, kWarps, kStages, true, true, false>>(args, workspace,
                                                                                                        stream)));
      FLASH_TRY((launch_shape<MmaBackwardShape<T, kParts, 256, 16, kWarps, kStages, true, false, true>>(args, workspace,
                                                                                                        stream)));
      return launch_shape<MmaBackwardShape<T, kParts, 256, 16, kWarps, kStages, false, true, false>>(args, workspace,
                                                                                                     stream);
    }
  }
}

}  // namespace

const char* backward_mma(const Backward& args, void* stream) {
  BackwardWorkspace workspace;
  FLASH_TRY(prepare_backward(args, workspace, stream));
  switch (args.problem.dtype) {
    case ScalarType::kFloat16: return launch_width<__half, 1>(args, workspace, stream);
    case ScalarType::kBFloat16: return launch_width<__nv_bfloat16, 1>(args, workspace, stream);
    default: return launch_width<__half, 2>(args, workspace, stream);
  }
}

}  // namespace custom_ops::flash_attention

// Launches the mma.sync forward, one kernel per type and head width.

#include "forward.cuh"

#include "merge.cuh"
#include "operand.cuh"

namespace custom_ops::flash_attention {
namespace {

// The parts' sums follow the operands' parts in the workspace.
template <typename Shape>
const char* launch_parts(const Forward& args, MmaForward& kernel, Pieces& pieces, int64_t blocks, void* stream) {
  const Problem& problem = args.problem;
  const int64_t rows = problem.batch * problem.heads_q * problem.seq_q, parts = kernel.general.parts;
  kernel.part_out = pieces.take<float>(rows * parts * Shape::kD);
  kernel.part_state = pieces.take<float2>(rows * parts);
  FLASH_TRY(launch(forward_mma<Shape>, dim3(static_cast<unsigned>(blocks * parts)), Shape::kThreads, Shape::kSharedBytes, stream, kernel));
  const MergeParts merge{kernel.part_out, kernel.part_state, args.out, kernel.lse, kernel.general.sinks, rows, static_cast<int>(parts),
                         static_cast<int>(problem.heads_q), static_cast<int>(problem.seq_q), static_cast<int>(problem.head_size),
                         Shape::kParts == 2 ? kSplitProbabilityExponent : 0.f};
  return launch_merge<typename Shape::Element, typename Shape::Out, Shape::kD>(merge, stream);
}

template <typename Shape>
const char* launch_shape(const Forward& args, const General* general, void* stream) {
  const Problem& problem = args.problem;
  const Tensor* tensors[3] = {&args.q, &args.k, &args.v};
  SplitWorkspace workspace{};
  Pieces pieces(args.workspace);
  if constexpr (Shape::kParts == 2) {
    workspace = take_parts(pieces, problem, 3);
    FLASH_TRY(split_tensors(problem, tensors, 3, workspace, stream));
  }
  MmaForward kernel{};
  MmaOperand* operands[3] = {&kernel.q, &kernel.k, &kernel.v};
  for (int i = 0; i < 3; ++i) {
    *operands[i] = mma_operand(problem, *tensors[i], Shape::kParts == 2 ? &workspace.parts[i] : nullptr, i != 0);
  }
  kernel.out = args.out.data;
  kernel.out_batch_stride = args.out.batch_stride;
  kernel.out_head_stride = args.out.head_stride;
  kernel.out_seq_stride = args.out.seq_stride;
  kernel.lse = static_cast<float*>(args.lse);
  for (int i = 0; i < 3; ++i) kernel.exponent[i] = workspace.parts[i].exponent;
  kernel.head_size = static_cast<int>(Shape::kParts == 2 ? Shape::kD : problem.head_size);
  kernel.out_head_size = static_cast<int>(problem.head_size);
  kernel.scale = static_cast<float>(problem.scale * 1.4426950408889634);
  kernel.causal = problem.causal;
  if (general != nullptr) kernel.general = *general;
  const int64_t blocks = (problem.seq_q + Shape::kBlockM - 1) / Shape::kBlockM * problem.batch * problem.heads_q;
  if (blocks > INT32_MAX) return "flash_attention: more than 2^31 blocks of queries";
  if constexpr (Shape::kGeneral) {
    if (general->parts > 1) return launch_parts<Shape>(args, kernel, pieces, blocks, stream);
  }
  return launch(forward_mma<Shape>, dim3(static_cast<unsigned>(blocks)), Shape::kThreads, Shape::kSharedBytes, stream,
                kernel);
}

template <typename T, bool kGeneral>
const char* launch_width(const Forward& args, const General* general, void* stream) {
  switch (head_width(args.problem.head_size)) {
    case 64: return launch_shape<MmaShape<T, 1, 64, 64, 2, kGeneral>>(args, general, stream);
    case 128: return launch_shape<MmaShape<T, 1, 128, 64, 2, kGeneral>>(args, general, stream);
    default: return launch_shape<MmaShape<T, 1, 256, 32, 2, kGeneral>>(args, general, stream);
  }
}

template <bool kGeneral>
const char* launch_split_width(const Forward& args, const General* general, void* stream) {
  switch (head_width(args.problem.head_size)) {
    case 64: return launch_shape<MmaShape<__half, 2, 64, 64, 2, kGeneral>>(args, general, stream);
    case 128: return launch_shape<MmaShape<__half, 2, 128, 32, 2, kGeneral>>(args, general, stream);
    default: return launch_shape<MmaShape<__half, 2, 256, 16, 1, kGeneral>>(args, general, stream);
  }
}

template <bool kGeneral>
const char* launch_type(const Forward& args, const General* general, void* stream) {
  switch (args.problem.dtype) {
    case ScalarType::kFloat16: return launch_width<__half, kGeneral>(args, general, stream);
    case ScalarType::kBFloat16: return launch_width<__nv_bfloat16, kGeneral>(args, general, stream);
    default: return launch_split_width<kGeneral>(args, general, stream);
  }
}

}  // namespace

// A block on sm_86, sm_89 or sm_120 has at most 99 KiB of shared memory; every shape needs less.
const char* forward_mma(const Forward& args, const General* general, void* stream) {
  return general == nullptr ? launch_type<false>(args, nullptr, stream) : launch_type<true>(args, general, stream);
}

}  // namespace custom_ops::flash_attention

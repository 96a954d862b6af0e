// Launches the kernel for a single query of each head.

#include "decode.cuh"

#include "../launch.cuh"
#include "merge.cuh"

namespace custom_ops::flash_attention {
namespace {

template <typename T, int kD>
const char* launch_shape(const Forward& args, int parts, void* stream) {
  const Problem& problem = args.problem;
  const int64_t rows = problem.batch * problem.heads_q, group = problem.heads_q / problem.heads_kv;
  Pieces pieces(args.workspace);
  Decode kernel{args.q, args.k, args.v, args.out, static_cast<float*>(args.lse), static_cast<const float*>(problem.features.sinks)};
  if (parts > 1) {
    kernel.part_out = pieces.take<float>(rows * parts * kD);
    kernel.part_state = pieces.take<float2>(rows * parts);
  }
  kernel.heads_q = static_cast<int>(problem.heads_q);
  kernel.heads_kv = static_cast<int>(problem.heads_kv);
  kernel.seq_kv = static_cast<int>(problem.seq_kv);
  kernel.head_size = static_cast<int>(problem.head_size);
  kernel.parts = parts;
  kernel.scale = static_cast<float>(problem.scale * 1.4426950408889634);
  kernel.softcap = static_cast<float>(problem.features.softcap * 1.4426950408889634);
  const int64_t blocks = problem.batch * problem.heads_kv * ((group + kDecodeRows - 1) / kDecodeRows) * parts;
  if (blocks > INT32_MAX) return "flash_attention: more than 2^31 blocks of queries";
  FLASH_TRY(launch(decode<T, kD>, dim3(static_cast<unsigned>(blocks)), 32 * kDecodeWarps, decode_shared_bytes<kD>(), stream, kernel));
  if (parts == 1) return nullptr;
  MergeParts merge{kernel.part_out, kernel.part_state, args.out, kernel.lse, kernel.sinks, rows, parts};
  merge.heads = kernel.heads_q;
  merge.seq = 1;
  merge.head_size = kernel.head_size;
  return launch_merge<T, T, kD>(merge, stream);
}

template <typename T>
const char* launch_width(const Forward& args, int parts, void* stream) {
  return head_width(args.problem.head_size) == 64 ? launch_shape<T, 64>(args, parts, stream) : launch_shape<T, 128>(args, parts, stream);
}

}  // namespace

const char* decode_mma(const Forward& args, int parts, void* stream) {
  return args.problem.dtype == ScalarType::kFloat16 ? launch_width<__half>(args, parts, stream) : launch_width<__nv_bfloat16>(args, parts, stream);
}

}  // namespace custom_ops::flash_attention

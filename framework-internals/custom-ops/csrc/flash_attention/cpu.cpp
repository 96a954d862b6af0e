// Attention on the CPU, for the instruction set that this file is compiled for.

#include "check.h"
#include "cpu/backward.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace flash_attention {

#define FLASH_ATTENTION_FOR_DTYPE(tasks)                             \
  if (const char* error = check(args.problem)) return error;         \
  switch (args.problem.dtype) {                                      \
    case ScalarType::kFloat32: tasks<float>(args, next); break;      \
    case ScalarType::kFloat64: tasks<double>(args, next); break;     \
    case ScalarType::kFloat16: tasks<Half>(args, next); break;       \
    case ScalarType::kBFloat16: tasks<BFloat16>(args, next); break;  \
  }                                                                  \
  return nullptr;

int64_t forward_cpu_packed(const Problem& problem) { return ProductOf<BFloat16>::type::kDepth == 2 ? packed_blocks_cpu(problem) : 0; }
const char* forward_cpu_pack(const Forward& args, std::atomic<int64_t>& next) {
  if (const char* error = check(args.problem)) return error;
  pack_tasks(args, next);
  return nullptr;
}
const char* forward_cpu(const Forward& args, std::atomic<int64_t>& next) {
  FLASH_ATTENTION_FOR_DTYPE(forward_tasks)
}
const char* forward_cpu_merge(const Forward& args, std::atomic<int64_t>& next) {
  FLASH_ATTENTION_FOR_DTYPE(merge_tasks)
}
const char* backward_cpu(const Backward& args, std::atomic<int64_t>& next) {
  FLASH_ATTENTION_FOR_DTYPE(backward_tasks)
}
const char* backward_cpu_finish(const Backward& args, std::atomic<int64_t>& next) {
  FLASH_ATTENTION_FOR_DTYPE(finish_tasks)
}

}  // namespace flash_attention
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

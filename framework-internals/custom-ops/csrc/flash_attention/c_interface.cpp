// The launchers under C names, for callers without C++ bindings, such as ctypes in the tests.

#include "flash_attention.h"

using namespace custom_ops::flash_attention;

#ifdef FLASH_ATTENTION_CPU
namespace {
template <class Steps, class Call> const char* run(const Steps& steps, const Call& call) {
  for (const auto& step : steps) {
    std::atomic<int64_t> next{0};
    const char* const error = step.tasks > 0 ? step.run(call, next) : nullptr;
    if (error != nullptr) return error;
  }
  return nullptr;
}
}  // namespace
#endif

extern "C" {

#ifdef FLASH_ATTENTION_CPU
const char* flash_attention_forward_cpu(const Forward* args, void*) { return run(forward_cpu_steps(args->problem), *args); }
const char* flash_attention_backward_cpu(const Backward* args, void*) { return run(backward_cpu_steps(args->problem), *args); }
int64_t flash_attention_forward_workspace(const Problem* problem) { return forward_cpu_workspace_bytes(*problem); }
int64_t flash_attention_backward_workspace(const Problem* problem) { return backward_cpu_workspace_bytes(*problem); }
#else

int64_t flash_attention_forward_workspace(const Problem* problem) { return forward_workspace_bytes(*problem); }
int64_t flash_attention_backward_workspace(const Problem* problem) { return backward_workspace_bytes(*problem); }
const char* flash_attention_forward(const Forward* args, void* stream) { return forward_cuda(*args, stream); }
const char* flash_attention_backward(const Backward* args, void* stream) { return backward_cuda(*args, stream); }
#endif

}  // extern "C"

// The launchers under C names, for callers without C++ bindings, such as ctypes in the tests.

#include "flash_attention.h"

using namespace custom_ops::flash_attention;

extern "C" {

#ifdef FLASH_ATTENTION_CPU
const char* flash_attention_forward_cpu(const Forward* args, void*) {
  std::atomic<int64_t> next{0};
  return forward_cpu(*args, next);
}
const char* flash_attention_backward_cpu(const Backward* args, void*) {
  std::atomic<int64_t> next{0}, next_finish{0};
  const char* error = backward_cpu(*args, next);
  return error != nullptr ? error : backward_cpu_finish(*args, next_finish);
}
int64_t flash_attention_forward_workspace(const Problem*) { return 0; }
int64_t flash_attention_backward_workspace(const Problem* problem) { return backward_cpu_workspace_bytes(*problem); }
#else

int64_t flash_attention_forward_workspace(const Problem* problem) { return forward_workspace_bytes(*problem); }
int64_t flash_attention_backward_workspace(const Problem* problem) { return backward_workspace_bytes(*problem); }
const char* flash_attention_forward(const Forward* args, void* stream) { return forward_cuda(*args, stream); }
const char* flash_attention_backward(const Backward* args, void* stream) { return backward_cuda(*args, stream); }
#endif

}  // extern "C"

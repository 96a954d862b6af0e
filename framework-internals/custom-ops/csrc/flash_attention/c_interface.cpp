// The launchers under C names, for callers without C++ bindings, such as ctypes in the tests.

#include "flash_attention.h"

using namespace custom_ops::flash_attention;

extern "C" {

#ifdef FLASH_ATTENTION_CPU
const char* flash_attention_forward_cpu(const Forward* args, void*) {
  return forward_cpu(*args, 0, forward_cpu_tasks(args->problem));
}
const char* flash_attention_backward_cpu(const Backward* args, void*) {
  return backward_cpu(*args, 0, backward_cpu_tasks(args->problem));
}
#else

int64_t flash_attention_forward_workspace(const Problem* problem) { return forward_workspace_bytes(*problem); }
int64_t flash_attention_backward_workspace(const Problem* problem) { return backward_workspace_bytes(*problem); }
const char* flash_attention_forward(const Forward* args, void* stream) { return forward_cuda(*args, stream); }
const char* flash_attention_backward(const Backward* args, void* stream) { return backward_cuda(*args, stream); }
#endif

}  // extern "C"

// Registers every operator when the library is loaded, by torch.ops.load_library or by the import of `_C`.

#include <unistd.h>

#include <cstdlib>

#include "registration.h"

namespace custom_ops::stable {
namespace {

constexpr const char* kSchemas[] = {
#include "../../src/custom_ops/operators/schemas.inc"
};

// The Python package defines the operators when it is imported, before there is a library, and then names its process here
// (operators/registration.py). A child process inherits the variable and not the operators.
bool defined_by_python() {
  const char* process = std::getenv("CUSTOM_OPS_DEFINED_IN");
  return process != nullptr && std::atoll(process) == getpid();
}

void define(Library& library) {
  if (defined_by_python()) return;
  for (const char* schema : kSchemas) library.def(schema);
}

void implement_cpu(Library& library) {
  implement_elementwise_cpu(library);
  implement_bias_gelu_cpu(library);
  implement_glu_cpu(library);
  implement_conv_bn_relu_cpu(library);
  implement_cross_entropy_cpu(library);
  implement_flash_attention_cpu(library);
  implement_adamw_cpu(library);
  implement_rotary_cpu(library);
  implement_mm_cpu(library);
}

#ifdef CUSTOM_OPS_CUDA
void implement_cuda(Library& library) {
  implement_elementwise_cuda(library);
  implement_bias_gelu_cuda(library);
  implement_glu_cuda(library);
  implement_conv_bn_relu_cuda(library);
  implement_cross_entropy_cuda(library);
  implement_flash_attention_cuda(library);
  implement_adamw_cuda(library);
  implement_rotary_cuda(library);
}
#endif

}  // namespace
}  // namespace custom_ops::stable

STABLE_TORCH_LIBRARY_FRAGMENT(custom_ops, library) { custom_ops::stable::define(library); }
STABLE_TORCH_LIBRARY_FRAGMENT(custom_ops_kernels, library) { custom_ops::stable::define(library); }

STABLE_TORCH_LIBRARY_IMPL(custom_ops, CPU, library) { custom_ops::stable::implement_cpu(library); }
STABLE_TORCH_LIBRARY_IMPL(custom_ops_kernels, CPU, library) { custom_ops::stable::implement_cpu(library); }

#ifdef CUSTOM_OPS_CUDA
STABLE_TORCH_LIBRARY_IMPL(custom_ops, CUDA, library) { custom_ops::stable::implement_cuda(library); }
STABLE_TORCH_LIBRARY_IMPL(custom_ops_kernels, CUDA, library) { custom_ops::stable::implement_cuda(library); }
#endif

// Registers every operator when the library is loaded, by torch.ops.load_library or by the import of `_C`.

#include "registration.h"

namespace custom_ops::stable {
namespace {

void define(Library& library) {
  define_elementwise(library);
  define_bias_gelu(library);
  define_conv_bn_relu(library);
  define_cross_entropy(library);
  define_flash_attention(library);
  define_adamw(library);
}

void implement_cpu(Library& library) {
  implement_elementwise_cpu(library);
  implement_bias_gelu_cpu(library);
  implement_conv_bn_relu_cpu(library);
  implement_cross_entropy_cpu(library);
  implement_flash_attention_cpu(library);
  implement_adamw_cpu(library);
}

#ifdef CUSTOM_OPS_CUDA
void implement_cuda(Library& library) {
  implement_elementwise_cuda(library);
  implement_bias_gelu_cuda(library);
  implement_conv_bn_relu_cuda(library);
  implement_cross_entropy_cuda(library);
  implement_flash_attention_cuda(library);
  implement_adamw_cuda(library);
}
#endif

}  // namespace
}  // namespace custom_ops::stable

STABLE_TORCH_LIBRARY(custom_ops, library) { custom_ops::stable::define(library); }
STABLE_TORCH_LIBRARY(custom_ops_kernels, library) { custom_ops::stable::define(library); }

STABLE_TORCH_LIBRARY_IMPL(custom_ops, CPU, library) { custom_ops::stable::implement_cpu(library); }
STABLE_TORCH_LIBRARY_IMPL(custom_ops_kernels, CPU, library) { custom_ops::stable::implement_cpu(library); }

#ifdef CUSTOM_OPS_CUDA
STABLE_TORCH_LIBRARY_IMPL(custom_ops, CUDA, library) { custom_ops::stable::implement_cuda(library); }
STABLE_TORCH_LIBRARY_IMPL(custom_ops_kernels, CUDA, library) { custom_ops::stable::implement_cuda(library); }
#endif

// The operators of each file of this folder, put together in library.cpp.
#pragma once

#include <torch/csrc/stable/library.h>

namespace custom_ops::stable {

using Library = torch::stable::detail::StableLibrary;

// Both namespaces have every operator. custom_ops is the public one: where ../autograd is not compiled, Python registers
// its derivatives, and with them a kernel in Python that every call passes. custom_ops_kernels has none: a call that
// needs no gradient costs a fifth.

#define CUSTOM_OPS_GROUP(name)               \
  void define_##name(Library& library);         \
  void implement_##name##_cpu(Library& library); \
  void implement_##name##_cuda(Library& library);
CUSTOM_OPS_GROUP(elementwise)
CUSTOM_OPS_GROUP(bias_gelu)
CUSTOM_OPS_GROUP(conv_bn_relu)
CUSTOM_OPS_GROUP(flash_attention)
#undef CUSTOM_OPS_GROUP

}  // namespace custom_ops::stable

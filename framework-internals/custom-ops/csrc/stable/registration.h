// The operators of each file in operators/; library.cpp registers them.
#pragma once

#include <torch/csrc/stable/library.h>

namespace custom_ops::stable {

using Library = torch::stable::detail::StableLibrary;

// Both namespaces have every operator. custom_ops is public. If ../autograd is not compiled, Python registers its
// derivatives, and every call passes through a Python kernel. custom_ops_kernels has no derivatives; a call below autograd
// takes a fifth of the time.

#define CUSTOM_OPS_GROUP(name)                   \
  void implement_##name##_cpu(Library& library); \
  void implement_##name##_cuda(Library& library);
CUSTOM_OPS_GROUP(elementwise)
CUSTOM_OPS_GROUP(bias_gelu)
CUSTOM_OPS_GROUP(glu)
CUSTOM_OPS_GROUP(conv_bn_relu)
CUSTOM_OPS_GROUP(cross_entropy)
CUSTOM_OPS_GROUP(flash_attention)
CUSTOM_OPS_GROUP(adamw)
CUSTOM_OPS_GROUP(rotary)
CUSTOM_OPS_GROUP(mm)
#undef CUSTOM_OPS_GROUP

}  // namespace custom_ops::stable

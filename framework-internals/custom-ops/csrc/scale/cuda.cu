// The CUDA kernel is common/elementwise.cuh, with one operand.

#include "kernels.h"

#include "../common/elementwise_launch.h"

namespace custom_ops {

int scale_cuda(const ScaleCall& call, void* stream) {
  return launch_elementwise<1>(call.dtype, call.x, nullptr, call.out, call.count, call.order, Scale{call.alpha}, stream);
}

}  // namespace custom_ops

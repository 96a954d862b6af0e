// CUDA kernels, without torch headers, so nvcc takes a second or two. The kernel itself is in common/elementwise.cuh.

#include "kernels.h"

#include "../common/elementwise_launch.h"

namespace custom_ops {

int add_cuda(const Operands& operands, void* stream) {
  return launch_elementwise<2>(operands.dtype, operands.x, operands.b, operands.out, operands.count, operands.order, Add{}, stream);
}

int axpb_cuda(const Operands& operands, double alpha, void* stream) {
  return launch_elementwise<2>(operands.dtype, operands.x, operands.b, operands.out, operands.count, operands.order,
                               Axpb{alpha}, stream);
}

}  // namespace custom_ops

// The parts of the forward pass that both sets of kernels share.
#pragma once

#include "device.cuh"

namespace rms_norm {

// sm_90 and later, whole 16-byte vectors, rows too wide for one block: a row is spread over the blocks of a cluster
// (forward_wide.cu). If that is not possible, this does nothing and returns false.
bool wide_forward(const Forward& call);

}  // namespace rms_norm

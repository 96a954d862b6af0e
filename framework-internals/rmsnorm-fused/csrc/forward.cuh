// The parts of the forward pass that its two sets of kernels share.
#pragma once

#include "device.cuh"

namespace rms_norm {

// sm_90 and later, whole 16-byte vectors, rows too wide for one block: a row over the blocks of a cluster
// (forward_wide.cu). False, and nothing is done, where that cannot be.
bool wide_forward(const Forward& call);

}  // namespace rms_norm

// The parts of the forward pass that its two sets of kernels share.
#pragma once

#include "device.cuh"

namespace rms_norm {

// sm_90 and later, whole 16-byte vectors, rows wider than a block's registers hold: by the bulk copy engine
// (forward_bulk.cu). False, and nothing is done, where that cannot be.
bool bulk_forward(const Forward& call);

}  // namespace rms_norm

// The parts of the backward pass that both sets of kernels share.
#pragma once

#include <optional>

#include "device.cuh"

namespace rms_norm {

// sm_90 and later, whole 16-byte vectors: the bulk copy engine loads the next rows into shared memory (backward_bulk.cu).
// If that is not possible, this does nothing and returns nothing, and the kernels of backward.cu run.
std::optional<int64_t> bulk_workspace(const Backward& call);  // bytes
std::optional<int64_t> bulk_backward(const Backward& call);   // partial rows of dweight that it leaves in the workspace

}  // namespace rms_norm

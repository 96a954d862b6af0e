// The parts of the backward pass that its two sets of kernels share.
#pragma once

#include <optional>

#include "device.cuh"

namespace rms_norm {

// sm_90 and later, whole 16-byte vectors: the coming rows are brought to shared memory by the bulk copy engine
// (backward_bulk.cu). Nothing, and nothing is done, where that cannot be; then the kernels of backward.cu do it.
std::optional<int64_t> bulk_workspace(const Backward& call);  // bytes
std::optional<int64_t> bulk_backward(const Backward& call);   // partial rows of dweight that it leaves in the workspace

}  // namespace rms_norm

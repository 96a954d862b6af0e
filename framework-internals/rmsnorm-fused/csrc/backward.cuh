// The parts of the backward pass that its two sets of kernels share.
#pragma once

#include <optional>

#include "device.cuh"

namespace rms_norm {

// How the backward pass is cut up into kernels.
struct BackwardPlan {
  int64_t partials;   // partial rows of dweight that the main kernel writes, one after the other
  int64_t workspace;  // bytes, these included
};

// sm_90 and later, whole 16-byte vectors: the coming rows are brought to shared memory by the bulk copy engine
// (backward_bulk.cu). Nothing where that cannot be; then the kernels of backward.cu do it.
std::optional<BackwardPlan> bulk_plan(const Backward& call);
void bulk_backward(const Backward& call);

}  // namespace rms_norm

// torch's threads, through its C interface.
#include "parallel.h"

#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>

namespace rms_norm {
namespace {

void check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error("torch's threads have failed");
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, void (*task)(int64_t begin, int64_t end, void* context), void* context) {
  check(torch_parallel_for(0, count, grain, task, context));
}

int64_t threads() {
  uint32_t count = 1;
  check(torch_get_num_threads(&count));
  return count;
}

}  // namespace rms_norm

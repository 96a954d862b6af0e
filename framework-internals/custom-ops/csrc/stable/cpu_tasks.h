// Tasks of different lengths on torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>

namespace custom_ops::stable {

// Takes the steps one after the other, each in as many threads as torch is set to use, at most one a task; each thread takes tasks
// from the step's counter until none is left. Returns an error's message, or null.
template <class Steps, class Call> const char* share_steps(const Steps& steps, const Call& call) {
  for (const auto& step : steps) {
    if (step.tasks == 0) continue;
    std::atomic<int64_t> next{0};
    std::atomic<const char*> error{nullptr};
    torch::stable::parallel_for(0, step.tasks, 1, [&](int64_t, int64_t) {
      if (const char* status = step.run(call, next)) error = status;
    });
    if (error != nullptr) return error;
  }
  return nullptr;
}

}  // namespace custom_ops::stable

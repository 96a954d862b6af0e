// Tasks of different lengths on torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>

namespace custom_ops::stable {

// Calls `run` in as many threads as torch is set to use, at most `tasks`; each takes tasks from the counter until none is left.
// Returns the first error's message, or null.
template <typename Call> const char* share_tasks(int64_t tasks, const char* (*run)(const Call&, std::atomic<int64_t>&), const Call& call) {
  std::atomic<int64_t> next{0};
  std::atomic<const char*> error{nullptr};
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t, int64_t) {
    if (const char* status = run(call, next)) error = status;
  });
  return error;
}

}  // namespace custom_ops::stable

// Where the CPU kernels get their threads from: torch's, through whichever interface the library at hand is built on
// (parallel_torch.cpp for the just-in-time extension, stable.cpp for the prebuilt library).
#pragma once

#include <cstdint>

namespace rms_norm {

// Calls task(begin, end, context) for ranges that together are 0 … count, on several threads where that gives each of them
// `grain` or more; all of them are done when it returns. Inside another parallel region: one range, on this thread.
void parallel_for(int64_t count, int64_t grain, void (*task)(int64_t begin, int64_t end, void* context), void* context);

// How many threads parallel_for uses at most.
int64_t threads();

template <class Task> void parallel_for(int64_t count, int64_t grain, const Task& task) {
  const auto call = [](int64_t begin, int64_t end, void* context) { (*static_cast<const Task*>(context))(begin, end); };
  parallel_for(count, grain, call, const_cast<Task*>(&task));
}

}  // namespace rms_norm

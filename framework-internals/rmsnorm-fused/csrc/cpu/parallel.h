// The threads of the CPU kernels: those of torch (parallel.cpp).
#pragma once

#include <cstdint>

namespace rms_norm {

// Calls task(begin, end, context) for ranges that together cover 0 … count, on several threads if each gets at least `grain`
// elements. All calls have returned when it returns. Inside another parallel region, there is one range on this thread.
void parallel_for(int64_t count, int64_t grain, void (*task)(int64_t begin, int64_t end, void* context), void* context);

// The largest number of threads that parallel_for uses.
int64_t threads();

template <class Task> void parallel_for(int64_t count, int64_t grain, const Task& task) {
  const auto call = [](int64_t begin, int64_t end, void* context) { (*static_cast<const Task*>(context))(begin, end); };
  parallel_for(count, grain, call, const_cast<Task*>(&task));
}

}  // namespace rms_norm

// torch's threads for the compiled extension.
#include <ATen/Parallel.h>

#include "parallel.h"

namespace rms_norm {

void parallel_for(int64_t count, int64_t grain, void (*task)(int64_t begin, int64_t end, void* context), void* context) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { task(begin, end, context); });
}

int64_t threads() { return at::get_num_threads(); }

}  // namespace rms_norm

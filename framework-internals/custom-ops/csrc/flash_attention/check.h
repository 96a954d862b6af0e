// Checks for problems that no kernel supports.
#pragma once

#include <cmath>
#include <initializer_list>

#include "flash_attention.h"

namespace custom_ops::flash_attention {

// Why the problem is invalid, or null.
// Static: files for several instruction sets include it, and the linker would keep a shared definition of any of them.
static inline const char* check(const Problem& problem) {
  for (const int64_t size : {problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q, problem.seq_kv}) {
    if (size < 0) return "flash_attention: a size is negative";
  }
  if (problem.heads_kv == 0 ? problem.heads_q != 0 : problem.heads_q % problem.heads_kv != 0) {
    return "flash_attention: the number of query heads is not a multiple of the number of key/value heads";
  }
  if (problem.head_size < 1) return "flash_attention: the head size is not positive";
  if (problem.head_size > 256) return "flash_attention: the head size is larger than 256";
  if (!(problem.features.softcap >= 0) || std::isinf(problem.features.softcap)) return "flash_attention: the soft cap is not zero or a positive number";
  if (problem.features.cu_seqlens_q != nullptr && problem.batch != 1) return "flash_attention: packed sequences are a batch of one";
  if (!std::isfinite(problem.scale)) return "flash_attention: the scale is not finite";
  if (problem.seq_q > INT32_MAX / 2 || problem.seq_kv > INT32_MAX / 2)
    return "flash_attention: a sequence is longer than 2^30";
  if (problem.batch * problem.heads_q > INT32_MAX / 2) return "flash_attention: more than 2^30 heads";
  return nullptr;
}

}  // namespace custom_ops::flash_attention

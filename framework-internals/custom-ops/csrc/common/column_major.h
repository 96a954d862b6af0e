// Matrices among the operands of an elementwise kernel that lie column by column, as a transposed one does.
#pragma once

#include <cstdint>

namespace custom_ops {

struct ColumnMajor {
  int64_t columns = 0;  // of the matrices
  int64_t x = 0;        // elements from one column of x to the next; 0: x lies row by row
  int64_t b = 0;
};

}  // namespace custom_ops

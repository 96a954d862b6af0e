// What the environment says about the instruction set of the CPU kernels.
#pragma once

namespace custom_ops {

// Why CUSTOM_OPS_CPU cannot be followed, or null. Every call of an operator fails with it: loading cannot, because an exception
// in a static initialiser ends the process.
const char* level_error();

}  // namespace custom_ops

// The element types that every kernel of this package supports.
#pragma once

namespace custom_ops {

enum class Dtype { kFloat32, kFloat64, kFloat16, kBFloat16 };

}  // namespace custom_ops

"""The roads: how the kernels are built, and how the built function becomes an operator."""

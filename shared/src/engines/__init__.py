"""One training step in several ways: as eager PyTorch, compiled, as a CUDA graph, in JAX; measured side by side."""

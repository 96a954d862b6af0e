"""Every road from a C++/CUDA kernel to torch.ops."""

"""RMSNorm in PyTorch, Triton and CUDA C++, forward and backward."""

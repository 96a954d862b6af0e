"""RMSNorm in PyTorch, Triton, C++ and CUDA C++, forward and backward."""

from rmsnorm_fused.api import RMSNorm, rms_norm

__all__ = ["RMSNorm", "rms_norm"]

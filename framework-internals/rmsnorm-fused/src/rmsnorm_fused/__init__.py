"""RMSNorm in PyTorch, Triton and CUDA C++, forward and backward."""

from rmsnorm_fused.api import RMSNorm, rms_norm

__all__ = ["RMSNorm", "rms_norm"]

"""Every road from a C++/CUDA kernel to ``torch.ops``: the operators, and which build of them serves.

Importing registers ``torch.ops.custom_ops.*``; nothing is compiled or loaded before an operator's first call.
"""

from custom_ops.builds import BuildInfo, build_info
from custom_ops.vector_add import axpb, vector_add

__all__ = ["BuildInfo", "axpb", "build_info", "vector_add"]

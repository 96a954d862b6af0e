"""RMSNorm and layer normalisation in PyTorch, Triton, C++ and CUDA C++, forward and backward."""

import sys
from pathlib import Path

# A wheel has a copy of the shared packages (setup.py), so that it needs no second one. What is installed comes first.
_SHARED = Path(__file__).with_name("_shared")
if _SHARED.is_dir():
    sys.path.append(str(_SHARED))

from rmsnorm_fused.api import LayerNorm, RMSNorm, layer_norm, rms_norm

__all__ = ["LayerNorm", "RMSNorm", "layer_norm", "rms_norm"]

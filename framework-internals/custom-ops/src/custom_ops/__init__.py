"""Every road from a C++/CUDA kernel to ``torch.ops``: the operators, and the build of them that is in use.

The import registers ``torch.ops.custom_ops.*``: schemas, fake kernels and derivatives. The first call, or :func:`load`,
loads the library, which is compiled first if there is none.
"""

import sys
from pathlib import Path

# A wheel has a copy of the shared packages (setup.py), so that it needs no second one. What is installed comes first.
_SHARED = Path(__file__).with_name("_shared")
if _SHARED.is_dir():
    sys.path.append(str(_SHARED))

from custom_ops.builds.loading import BuildInfo, build_info, load, register_operators
from custom_ops.operators.bias_gelu import bias_gelu
from custom_ops.operators.conv_bn_relu import ConvBnRelu2d, conv_bn_relu, fold_batch_norm, fuse
from custom_ops.operators.elementwise import axpb, scale, vector_add
from custom_ops.operators.flash_attention import flash_attention
from custom_ops.operators.glu import geglu, swiglu
from custom_ops.operators.linear import Linear, linear
from custom_ops.operators.rotary import rotary
from custom_ops.operators.training.adamw import AdamW
from custom_ops.operators.training.cross_entropy import CrossEntropyOutput, linear_cross_entropy

__all__ = [
    "AdamW",
    "BuildInfo",
    "ConvBnRelu2d",
    "CrossEntropyOutput",
    "Linear",
    "axpb",
    "bias_gelu",
    "build_info",
    "conv_bn_relu",
    "flash_attention",
    "fold_batch_norm",
    "fuse",
    "geglu",
    "linear",
    "linear_cross_entropy",
    "load",
    "rotary",
    "scale",
    "swiglu",
    "vector_add",
]

register_operators()

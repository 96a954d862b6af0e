"""``torch.ops.custom_ops_scale.scale``, registered by the import of ``_C``."""

import torch  # noqa: F401  (the module finds torch's libraries only where torch has loaded them)
from custom_ops_scale._C import add_one

__all__ = ["add_one"]

"""The private parts of torch that this package and its tests use; tests/test_traps.py fails where one moves."""

from torch._dynamo.exc import Unsupported
from torch.torch_version import TorchVersion
from torch.utils.cpp_extension import _check_cuda_version as check_cuda_version

__all__ = ["TorchVersion", "Unsupported", "check_cuda_version"]

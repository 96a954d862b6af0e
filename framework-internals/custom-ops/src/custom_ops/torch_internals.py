"""The private parts of torch that this package uses, in one place."""

from torch._dynamo.exc import Unsupported

__all__ = ["Unsupported"]

"""Tensors of an optimizer as its kernel takes them: the real numbers of this process, in the order of their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from custom_ops.operators.checks import is_sharded


def dense(parameter: Tensor) -> Tensor:
    """Return the parameter itself, or a copy if its elements do not fill their memory (a slice of another tensor).

    In a graph, complex numbers in another order than that of their indices are copied too: torch traces no write into
    their memory as real ones.

    Raises:
        ValueError: If elements share memory, as those of an expanded tensor: nothing can be written there.
    """
    if parameter.is_contiguous():
        return parameter
    if is_dynamo_compiling() and parameter.is_complex():
        return parameter.detach().contiguous()
    if _like(parameter, parameter.dtype, "meta").stride() == parameter.stride():
        return parameter
    if any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        raise ValueError(
            f"AdamW: parameter of shape {list(parameter.shape)}: expected elements with memory of their own, got "
            f"strides {list(parameter.stride())} (use .clone() of the expanded tensor, or optimize what was expanded)"
        )
    return _like(parameter, parameter.dtype, parameter.device).copy_(parameter.detach())


def fits(value: Any, parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor of the state lies as the parameter does, on its device and in the dtype."""
    return (
        isinstance(value, Tensor)
        and value.dtype == dtype
        and value.device == parameter.device
        and value.stride() == parameter.stride()
        and value.shape == parameter.shape
    )


def fitted(name: str, value: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the state so that :func:`fits` holds, with its values; zeros for None.

    Raises:
        ValueError: If its shape is not that of the parameter.
    """
    if value is not None and value.shape != parameter.shape:
        raise ValueError(
            f"AdamW: state '{name}': expected shape {list(parameter.shape)}, that of its parameter, got "
            f"{list(value.shape)} (load the state of this model's optimizer, or make a new optimizer)"
        )
    made = _like(parameter, dtype, parameter.device)
    return made.zero_() if value is None else made.copy_(value.detach())


def _like(parameter: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    # Keeps the strides of tensors that fill their memory, and the placements of a DTensor.
    return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)


def in_memory_order(tensor: Tensor) -> Tensor:
    """View a tensor that :func:`fits`, or a parameter that is :func:`dense`, as contiguous real numbers."""
    tensor = real(local(tensor))
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient, sharded as the parameter is.

    Raises:
        TypeError: If it is sparse.
        ValueError: If its shape is not that of the parameter.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise TypeError(
            f"AdamW: gradient of a parameter of shape {list(parameter.shape)}: expected a dense tensor, got "
            f"{gradient.layout} (make the embedding with sparse=False, or use torch.optim.SparseAdam for it)"
        )
    if gradient.shape != parameter.shape:
        raise ValueError(
            f"AdamW: gradient: expected shape {list(parameter.shape)}, that of its parameter, got "
            f"{list(gradient.shape)} (the parameter was replaced after the backward pass; call zero_grad())"
        )
    if is_sharded(parameter) and not is_sharded_alike(gradient, parameter):
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    if gradient.requires_grad:  # detaching a DTensor takes the host tens of microseconds
        gradient = gradient.detach()
    return gradient.resolve_conj()


def is_sharded_alike(tensor: Tensor | None, other: Tensor) -> bool:
    """Whether a tensor is spread over processes as a DTensor is."""
    return getattr(tensor, "placements", None) == other.placements  # type: ignore[attr-defined]


def like_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient in the memory order of a parameter that is :func:`dense`; it is copied if it has another."""
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
    return in_memory_order(gradient)


def real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def sum_over_processes(square: Tensor, sharded: Tensor) -> Tensor:
    """Add up a number that each process computed from its part of a DTensor, over those that have other parts."""
    from torch.distributed.tensor import DTensor, Partial

    placements: Sequence[Any] = sharded.placements  # type: ignore[attr-defined]
    parts = [Partial() if placement.is_shard() else placement for placement in placements]
    return DTensor.from_local(square, sharded.device_mesh, parts).full_tensor()  # type: ignore[attr-defined]

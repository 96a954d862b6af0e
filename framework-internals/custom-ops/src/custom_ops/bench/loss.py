"""The loss of a language model with the matrix product of its logits: time and memory of its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import custom_ops
from benchkit import Quantity, Record, compare
from benchkit.device import Device
from benchkit.errors import why_missing, without_frames
from benchkit.results import Absence, Label
from custom_ops.bench.cases import COMPILED, OURS
from custom_ops.bench.speed import compiled_for_one_size, name_of
from custom_ops.operators.checks import wide

TORCH = "F.linear, F.cross_entropy"

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def losses(
    device: Device,
    rows: int,
    width: int,
    classes: int,
    dtypes: Sequence[torch.dtype],
    *,
    compiled: bool,
    seconds: float,
    record: str = "loss",
) -> Iterator[Record | Absence]:
    """Time the loss and the gradients of both operands: records of that name, labels ``form``, ``dtype`` and the sizes.

    Three matrix products of 2·rows·width·classes operations are the same in every form; the least memory takes a
    fourth. The rest is traffic of the logits: two passes for ours.

    Yields:
        The values ``time``, ``speedup`` over torch's operators if these fit, ``loss``, and on a GPU ``peak``, the bytes
        that are allocated at most, without the operands. A form that fails is an absence.
    """
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(0)
        x, weight = (
            torch.randn(size, width, generator=generator).mul(0.5).to(device, dtype).requires_grad_()
            for size in (rows, classes)
        )
        targets = torch.randint(classes, (rows,), generator=generator).to(device)
        operands = (x, weight, targets)
        steps = {name: _step(loss) for name, loss in _forms(compiled).items()}
        first, failed = first_losses(steps, operands, f"the loss in {name_of(dtype)}")
        yield from failed
        steps = {name: steps[name] for name in first}
        late: dict[str, Exception] = {}
        comparison = compare(steps, device=device, inputs=[operands], seconds=seconds, failed=late)
        yield from absences(late, f"the loss in {name_of(dtype)}")
        steps = {name: steps[name] for name in comparison.timings}
        sizes: dict[str, Label] = {"dtype": name_of(dtype), "rows": rows, "width": width, "classes": classes}
        for name, step in steps.items():
            values = {"time": comparison[name].quantity(), "loss": Quantity(first[name], "nats")}
            if TORCH in steps:
                values["speedup"] = comparison.speedup(name, over=TORCH)
            if device == "cuda":
                values["peak"] = Quantity(_peak(step, *operands), "B")
            yield Record(record, {"form": name, **sizes}, values)


def first_losses(
    steps: Mapping[str, Callable[..., Tensor | Sequence[Tensor]]], operands: Sequence[Tensor], what: str
) -> tuple[dict[str, float], list[Absence]]:
    """Take each step once.

    Args:
        steps: For each form a function of the operands that returns the loss, alone or before its gradients.
        operands: The operands.
        what: What the steps compute, for the absences.

    Returns:
        The losses by form, and why other forms have none.
    """
    losses: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for name, step in steps.items():
        try:
            result = step(*operands)
            losses[name] = float(result if isinstance(result, Tensor) else result[0])
        except Exception as error:
            failed[name] = without_frames(error)
    return losses, absences(failed, what)


def absences(failed: Mapping[str, Exception], what: str) -> list[Absence]:
    """Why forms have no figure.

    Args:
        failed: Their errors by name.
        what: What they compute.
    """
    return [Absence(f"{what} with {name}", why_missing(error)) for name, error in failed.items()]


def _forms(compiled: bool) -> dict[str, Loss]:
    forms: dict[str, Loss] = {
        OURS: custom_ops.linear_cross_entropy,
        f"{OURS}, least memory": lambda *operands: custom_ops.linear_cross_entropy(*operands, mode="least_memory"),
        TORCH: _unfused,
    }
    if compiled:
        forms[COMPILED] = compiled_for_one_size(_unfused)
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()
        forms["F.linear_cross_entropy, in chunks"] = lambda *operands: F.linear_cross_entropy(
            *operands, options=options
        )
    return forms


def _unfused(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).to(wide(x.dtype)), targets)


def _step(loss: Loss) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    def step(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        value = loss(x, weight, targets)
        return value.detach(), *torch.autograd.grad(value, (x, weight))

    return step


def _peak(step: Callable[..., object], *operands: Tensor) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(*operands)
    return torch.cuda.max_memory_allocated() - before

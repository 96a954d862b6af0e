"""The loss of a language model with the matrix product of its logits: time and memory of its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

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
PARTS_RECORD = "loss parts"
_ALONE = "cross-entropy alone"

Loss = Callable[..., Tensor]


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
        operands = _operands(device, rows, width, classes, dtype)
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


def parts(
    device: Device, rows: int, width: int, classes: int, dtype: torch.dtype, *, compiled: bool, seconds: float
) -> Iterator[Record | Absence]:
    """Time what a loss may have beside the cross-entropy: records of that name, labels ``part``, ``form``, the sizes.

    Yields:
        The values ``time`` and ``loss``; for :data:`~.cases.OURS` also ``speedup`` over torch's operators, compiled
        where ``compiled``, and ``of_alone``, the speed in that of the cross-entropy alone.
    """
    operands = _operands(device, rows, width, classes, dtype)
    class_weight = torch.linspace(0.5, 1.5, classes, device=device, dtype=wide(dtype))
    every: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "class_weight": class_weight}
    kinds = {_ALONE: {}, **{name.replace("_", " "): {name: every[name]} for name in every}, "all four": every}
    peer = COMPILED if compiled else TORCH
    for part, options in kinds.items():
        unfused = partial(_unfused, **options)
        steps = {
            _ALONE: _step(custom_ops.linear_cross_entropy),
            OURS: _step(partial(custom_ops.linear_cross_entropy, **options)),
            peer: _step(compiled_for_one_size(unfused) if compiled else unfused),
        }
        what = f"the loss with {part}"
        first, absent = first_losses(steps, operands, what)
        yield from absent
        failed: dict[str, Exception] = {}
        steps = {name: steps[name] for name in first}
        timings = compare(steps, device=device, inputs=[operands], seconds=seconds, failed=failed)
        yield from absences(failed, what)
        sizes: dict[str, Label] = {"dtype": name_of(dtype), "rows": rows, "width": width, "classes": classes}
        compared = {"speedup": peer, "of_alone": _ALONE}
        for form in (name for name in timings.timings if name != _ALONE):
            values = {"time": timings[form].quantity(), "loss": Quantity(first[form], "nats")}
            if form == OURS:
                measured = {name: other for name, other in compared.items() if other in timings.timings}
                values |= {name: timings.speedup(form, over=other) for name, other in measured.items()}
            yield Record(PARTS_RECORD, {"part": part, "form": form, **sizes}, values)


def _operands(device: Device, rows: int, width: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(size, width, generator=generator).mul(0.5).to(device, dtype).requires_grad_()
        for size in (rows, classes)
    )
    return x, weight, torch.randint(classes, (rows,), generator=generator).to(device)


def first_losses(
    steps: Mapping[str, Callable[..., Tensor | Sequence[Tensor]]], operands: Sequence[Tensor], what: str
) -> tuple[dict[str, float], list[Absence]]:
    """Take each step once.

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
    """Why forms have no figure."""
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


def _unfused(
    x: Tensor, weight: Tensor, targets: Tensor, *, class_weight: Tensor | None = None, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    logits = F.linear(x, weight).to(wide(x.dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, class_weight, label_smoothing=label_smoothing)
    return loss + z_loss * logits.logsumexp(1).square().mean() if z_loss else loss


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

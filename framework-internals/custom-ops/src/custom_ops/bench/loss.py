"""The loss of a language model with the matrix product of its logits: time and memory of its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import custom_ops
from benchkit import Quantity, Record, compare
from benchkit.device import Device
from benchkit.results import Label
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
    name: str = "loss",
) -> Iterator[Record]:
    """Time the loss and the gradients of both operands: records ``name``, labels ``form``, ``dtype`` and the sizes.

    Three matrix products of 2·rows·width·classes operations are the same in every form; the least memory takes a
    fourth. The rest is traffic of the logits: two passes for ours.

    Args:
        device: Device of the tensors.
        rows: Rows of x, the tokens of a batch.
        width: Columns of x.
        classes: Size of the vocabulary.
        dtypes: Dtypes of the tensors.
        compiled: Whether to time ``torch.compile`` of torch's form too.
        seconds: Sampling time for each dtype.
        name: Name of the records.

    Yields:
        The values ``time``, ``speedup`` over torch's operators, ``loss``, and on a GPU ``peak``, the bytes that are
        allocated at most, without the operands.
    """
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(0)
        x, weight = (
            torch.randn(size, width, generator=generator).mul(0.5).to(device, dtype).requires_grad_()
            for size in (rows, classes)
        )
        targets = torch.randint(classes, (rows,), generator=generator).to(device)
        steps = {form: _step(loss) for form, loss in _forms(compiled).items()}
        first = {form: step(x, weight, targets)[:1] for form, step in steps.items()}
        comparison = compare(steps, device=device, inputs=[(x, weight, targets)], seconds=seconds)
        for form, step in steps.items():
            values = {
                "time": comparison[form].quantity(),
                "speedup": comparison.speedup(form, over=TORCH),
                "loss": Quantity(float(first[form][0]), "nats"),
            }
            if device == "cuda":
                values["peak"] = Quantity(_peak(step, x, weight, targets), "B")
            labels: dict[str, Label] = {
                "form": form,
                "dtype": name_of(dtype),
                "rows": rows,
                "width": width,
                "classes": classes,
            }
            yield Record(name, labels, values)


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
        found = loss(x, weight, targets)
        return found.detach(), *torch.autograd.grad(found, (x, weight))

    return step


def _peak(step: Callable[..., object], *operands: Tensor) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(*operands)
    return torch.cuda.max_memory_allocated() - before

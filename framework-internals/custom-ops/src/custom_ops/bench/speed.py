"""The speed of the memory-bound operators, compared with torch's operators and the machine's memory limit."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchkit import Quantity, Record, compare
from benchkit.device import Device
from benchkit.errors import why_missing
from benchkit.results import Absence, Label
from benchkit.timing import rotating_inputs
from custom_ops.bench.accounting import Traffic, count_launches, size_of
from custom_ops.bench.cases import COMPILED, OURS, BenchmarkCase, benchmark_cases

PLACEMENTS = 16  # of a CPU's operands: how many a rotation has, at least
_PAGE, _LINE = 4096, 64

ACCESSES = {"chosen": 0, "one element": 1, "one vector": 2, "two vectors": 3, "four vectors": 4}


def name_of(dtype: torch.dtype) -> str:
    """``torch.float32`` → ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def operators(
    device: Device,
    ops: Sequence[str],
    counts: Sequence[int],
    dtypes: Sequence[torch.dtype],
    *,
    columns: int,
    compiled: bool,
    seconds: float,
) -> Iterator[Record | Absence]:
    """Time operators at several sizes: records ``speed``, labels ``op``, ``form``, ``dtype``, ``count``, ``clock``.

    Yields:
        The values ``time``, ``rate`` and ``speedup`` over torch's operators. For every form, ``rate`` is the bytes that
        a fused kernel must move, divided by the time. A form that fails is an absence.
    """
    for op in ops:
        case = benchmark_cases()[op]
        for dtype in dtypes:
            for count in counts:
                forms = dict(case.forms)
                if compiled and case.compiled is not None:
                    forms[COMPILED] = compiled_for_one_size(case.compiled)
                yield from _all_forms(case, forms, device, count, dtype, columns=columns, seconds=seconds)


def _all_forms(
    case: BenchmarkCase,
    forms: dict[str, Callable[..., Any]],
    device: Device,
    count: int,
    dtype: torch.dtype,
    *,
    columns: int,
    seconds: float,
) -> Iterator[Record | Absence]:
    failed: dict[str, Exception] = {}
    timings = timed(case, forms, device, count, dtype, columns=columns, seconds=seconds, over="torch", failed=failed)
    for form, clock, values in timings:
        labels: dict[str, Label] = {"op": case.op, "form": form, "dtype": name_of(dtype), "count": count}
        data = {"compiled": "for each size"} if form == COMPILED else None
        yield Record("speed", {**labels, "limit": case.limit, "clock": clock}, values, data)
    for form, error in failed.items():
        yield Absence(f"{case.op} with {form} at {count} elements in {name_of(dtype)}", why_missing(error))


def timed(
    case: BenchmarkCase,
    forms: Mapping[str, Callable[..., Any]],
    device: Device,
    count: int,
    dtype: torch.dtype,
    *,
    columns: int,
    seconds: float,
    over: str,
    share_of: str | None = None,
    failed: dict[str, Exception] | None = None,
) -> Iterator[tuple[str, str, dict[str, Quantity]]]:
    """Time every form; yields its name, its clock, and ``time``, ``rate`` and ``speedup`` over the form ``over``.

    With ``share_of``, a form that moves the same bytes, also ``share``, the speed over that form's. ``failed`` is that
    of :func:`benchkit.compare`.
    """
    inputs = rotating_inputs(partial(case.operands, count, columns, dtype, device), device=device)
    if device == "cpu":
        inputs = placed(inputs, PLACEMENTS)
    comparison = compare(forms, device=device, inputs=inputs, seconds=seconds, failed=failed)
    moved = case.traffic(*inputs[0]).bytes
    for form in comparison.timings:
        time = comparison[form].quantity()
        values = {"time": time, "rate": time.per(moved, "B/s")}
        if over in comparison.timings:
            values["speedup"] = comparison.speedup(form, over=over)
        if share_of is not None and share_of in comparison.timings:
            values["share"] = comparison.speedup(form, over=share_of)
        yield form, comparison[form].method, values


def placed(sets: Sequence[tuple[torch.Tensor, ...]], number: int) -> list[tuple[torch.Tensor, ...]]:
    """Place every operand at cache lines drawn within a page of 4 KiB.

    A load waits for an earlier store whose address is equal modulo 4 KiB, so that the time of a kernel depends on where
    its operands lie. One process would measure one placement.

    Returns:
        Sets in the order of ``sets``, again and again, each with a placement of its own.
    """
    draw = random.Random(0)
    roomy = [[(_with_room(x), x.shape) for x in operands] for operands in sets]
    return [
        tuple(_from_line(draw.randrange(_PAGE // _LINE), *operand) for operand in operands)
        for operands in math.ceil(number / len(sets)) * roomy
    ]


def _with_room(x: torch.Tensor) -> torch.Tensor:
    """The elements of ``x`` and a page more, the first ones again."""
    more = _PAGE // x.element_size()
    return torch.cat((x.flatten(), x.flatten().repeat(math.ceil(more / x.numel()))[:more]))


def _from_line(line: int, buffer: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A tensor in the buffer whose address is that of the cache line in its page."""
    start = (line * _LINE - buffer.data_ptr()) % _PAGE // buffer.element_size()
    return buffer[start : start + shape.numel()].view(shape)


def compiled_for_one_size(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function from scratch for the one size with which it is called.

    Without the reset, a second size would compile it for dynamic sizes, with block sizes chosen for the first size.
    That took twice the time of torch's own kernels at 128 Mi elements.
    """

    def call(*operands: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler warns about this machine (TF32, few multiprocessors)
            return made(*operands)

    torch.compiler.reset()
    made = torch.compile(function, fullgraph=True, dynamic=False)
    return call


def fusions(device: Device, count: int, dtype: torch.dtype, *, columns: int) -> Iterator[Record]:
    """Compare launches and bytes of each operator, unfused and fused: records ``fusion``, label ``op``.

    Yields:
        The values ``bytes``, ``predicted_launches`` and the profiler's ``launches``, each also with the prefix
        ``unfused_`` for torch's operators; and ``predicted_speedup``, the ratio of the bytes.
    """
    for case in benchmark_cases().values():
        operands = case.operands(count, columns, dtype, device)
        ours, theirs = case.traffic(*operands), case.unfused(*operands)
        yield Record(
            "fusion",
            {"op": case.op, "dtype": name_of(dtype), "count": count},
            {
                "predicted_speedup": Quantity(theirs.bytes / ours.bytes, "×"),
                **launches(ours, partial(case.forms[OURS], *operands), device),
                **launches(theirs, partial(case.forms["torch"], *operands), device, "unfused_"),
            },
        )


def launches(traffic: Traffic, call: Callable[[], object], device: Device, prefix: str = "") -> dict[str, Quantity]:
    """The predicted and counted launches and the bytes, as values of a record."""
    return {
        f"{prefix}launches": Quantity(count_launches(call, device=device), ""),
        f"{prefix}predicted_launches": Quantity(traffic.launches, ""),
        f"{prefix}bytes": Quantity(traffic.bytes, "B"),
    }


def accesses(
    device: Device, count: int, dtypes: Sequence[torch.dtype], *, columns: int, seconds: float
) -> Iterator[Record]:
    """Time bias_gelu's forward kernel for each width of memory access: records ``access``, labels ``access``,
    ``dtype``.

    Yields:
        The values ``time``, ``rate`` and ``speedup`` over one element at a time.
    """
    operator = torch.ops.custom_ops_kernels.bias_gelu.access
    case = benchmark_cases()["bias_gelu"]
    forms = {name: lambda x, bias, access=number: operator(x, bias, access) for name, number in ACCESSES.items()}
    for dtype in dtypes:
        timings = timed(case, forms, device, count, dtype, columns=columns, seconds=seconds, over="one element")
        for name, _, values in timings:
            yield Record("access", {"access": name, "dtype": name_of(dtype), "count": count}, values)


def plans(
    device: Device, count: int, dtypes: Sequence[torch.dtype], *, columns: int, seconds: float
) -> Iterator[Record]:
    """Time bias_gelu's backward kernel for each block shape: records ``plan``, labels ``across``, ``blocks``.

    Yields:
        The values ``time`` and ``rate``.
    """
    operator = torch.ops.custom_ops_kernels.bias_gelu_backward.plan
    case = benchmark_cases()["bias_gelu_backward"]
    choices = [(across, blocks) for across in (64, 128, 256) for blocks in (2, 3, 4, 8, 16)]
    forms = {
        f"{across} {blocks}": lambda *operands, plan=(across, blocks, 16): operator(*operands, *plan)
        for across, blocks in choices
    }
    for dtype in dtypes:
        inputs = rotating_inputs(partial(case.operands, count, columns, dtype, device), device=device)
        comparison = compare(forms, device=device, inputs=inputs, seconds=seconds)
        moved = case.traffic(*inputs[0]).bytes
        for (across, blocks), name in zip(choices, forms, strict=True):
            time = comparison[name].quantity()
            labels: dict[str, Label] = {
                "across": across, "blocks": blocks, "dtype": name_of(dtype), "count": count
            }  # fmt: skip
            yield Record("plan", labels, {"time": time, "rate": time.per(moved, "B/s")})


def peak_memory(device: Device, count: int, dtype: torch.dtype, *, columns: int) -> Iterator[Record]:
    """Measure the GPU memory of gelu(x + bias), forward and backward: records ``peak memory``, label ``form``.

    Yields:
        The values of :func:`peaks`.
    """
    case = benchmark_cases()["bias_gelu"]
    leaves = [tensor.requires_grad_() for tensor in case.operands(count, columns, dtype, device)]
    for form in (OURS, "torch"):
        values = peaks(partial(case.forms[form], *leaves), leaves)
        yield Record("peak memory", {"form": form, "dtype": name_of(dtype), "count": count}, values)


def peaks(forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]) -> dict[str, Quantity]:
    """Measure the GPU memory of a forward and a backward pass, in bytes.

    Returns:
        ``saved``, the bytes kept for the backward pass, and ``peak``, both without the leaves themselves; and
        ``operand``, the bytes of the first tensor in ``leaves``.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = forward()
    saved = torch.cuda.memory_allocated() - before
    result.backward(torch.ones_like(result))
    peak = torch.cuda.max_memory_allocated() - before
    for leaf in leaves:
        leaf.grad = None
    return {"saved": Quantity(saved, "B"), "peak": Quantity(peak, "B"), "operand": Quantity(size_of(leaves[0]), "B")}

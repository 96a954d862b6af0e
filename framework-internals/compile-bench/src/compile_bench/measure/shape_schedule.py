"""Measures one strategy for changing shapes, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchkit import Timing, UserError
from compile_bench.capture.collector import Collector, import_compiler, mark_dynamic, prepare_toolchain
from compile_bench.capture.trace import CompileTrace
from compile_bench.measure.records import ShapeStudy
from compile_bench.measure.shapes import MADE_SCHEDULES, PADDED, Passes, Strategy
from compile_bench.measure.steps import load_case
from compile_bench.targets.case import Case
from compile_bench.targets.regional import OwnRegions, compile_case
from compile_bench.targets.target import Step, Target, describe_error, named_tensors

Sizes = dict[tuple[int, int], list[int]]  # (leaf, dimension): its size in every call

LEAST_PASSES = 3
_DYNAMIC: dict[Strategy, bool | None] = {"static": False, "buckets": False, "padding": False, "dynamic": True}


def shapes(case: Case, *, strategy: Strategy, schedule: str, seconds: float) -> ShapeStudy:
    """Make passes through a schedule with one strategy.

    ``schedule`` is one of :data:`compile_bench.measure.shapes.MADE_SCHEDULES`, or empty for the target's own.
    """
    target = load_case(case)
    if isinstance(target.model, OwnRegions):
        raise UserError(f"{case.target} compiles {target.model.text} itself: return the model uncompiled")
    calls = make_calls(target, schedule) if schedule else list(target.calls())
    if len(calls) < 2:
        made = ", ".join(MADE_SCHEDULES)
        raise UserError(f"{case.target} has no schedule of shapes; give its Target one, or --schedule {made}")
    sizes = varying_sizes(calls)
    description = tuple(", ".join(str(list(leaf.shape)) for leaf in call.tensors) for call in calls)
    names = tuple(_name(calls[0], leaf, dimension) for leaf, dimension in sizes)
    try:
        passes = _passes(case, target, _prepare(calls, strategy, sizes), strategy, seconds)
    except UserError:
        raise
    except Exception as error:  # whatever the model or the compiler raises
        if strategy == "eager":
            raise UserError(f"{case.target}: a call of the schedule raised {describe_error(error)}") from error
        passes = Passes(strategy, failed=describe_error(error))
    return ShapeStudy.of_case(case, description, names, [passes])


def _passes(case: Case, target: Target, calls: list[Target], strategy: Strategy, seconds: float) -> Passes:
    """Time the first pass, compiling included, and later passes for a number of seconds."""
    model: nn.Module = target.copied()
    start = time.perf_counter()
    if strategy == "eager":
        steps = [call.step(model, train=case.train) for call in calls]
        _go_through(steps, case)
        trace = CompileTrace()
    else:
        import_compiler()
        prepare_toolchain(case.device)
        model = compile_case(model, replace(case, dynamic=_DYNAMIC.get(strategy), scope="whole"))
        steps = [call.step(model, train=case.train) for call in calls]
        with Collector() as collector:
            _go_through(steps, case)
        trace = collector.trace()
    first = time.perf_counter() - start
    later: list[float] = []
    end = time.perf_counter() + seconds
    while len(later) < LEAST_PASSES or time.perf_counter() < end:
        start = time.perf_counter()
        _go_through(steps, case)
        later.append(time.perf_counter() - start)
    figure = Timing(tuple(later), 1, "wall-clock", 0.0).quantity()
    return Passes(strategy, first, figure, len(trace.graphs), trace.recompiles)


def _go_through(steps: Sequence[Step], case: Case) -> None:
    for step in steps:
        step()
    if case.device == "cuda":
        torch.cuda.synchronize()


def make_calls(target: Target, schedule: str) -> list[Target]:
    """Calls with other shapes, cut out of the target's own arguments.

    In the first tensor, dimension 0 is the batch and dimension 1 the sequence. Every tensor with the same size there is
    cut too. The schedules are ``last-batch`` (full, full, a little over half), ``batch-1`` (full, one, full) and
    ``growing-sequence`` (four quarters).
    """
    if schedule not in MADE_SCHEDULES:
        raise UserError(f"--schedule takes {', '.join(MADE_SCHEDULES)}, got {schedule!r}")
    tensors = target.tensors
    dimension = 1 if schedule == "growing-sequence" else 0
    if not tensors or tensors[0].ndim <= dimension:
        raise UserError(f"--schedule {schedule} cuts dimension {dimension} of the first tensor argument: there is none")
    whole = tensors[0].shape[dimension]
    sizes = {
        "last-batch": (whole, whole, min(whole // 2 + 1, max(whole - 1, 1))),
        "batch-1": (whole, 1, whole),
        "growing-sequence": tuple(max(whole * quarter // 4, 1) for quarter in (1, 2, 3, 4)),
    }[schedule]

    def cut(size: int) -> Target:
        def narrow(leaf: Tensor) -> Tensor:
            fits = leaf.ndim > dimension and leaf.shape[dimension] == whole
            return leaf.narrow(dimension, 0, size).clone() if fits else leaf

        return target.mapped(narrow)

    try:
        return [cut(size) for size in sizes]
    except RuntimeError as error:  # of a layout that cannot be cut, such as a sparse one
        raise UserError(f"--schedule {schedule} cannot cut the arguments: {describe_error(error)}") from error


def varying_sizes(calls: Sequence[Target]) -> Sizes:
    """The dimensions whose size changes over the calls."""
    leaves = [call.tensors for call in calls]
    if len({tuple(leaf.ndim for leaf in tensors) for tensors in leaves}) > 1:
        raise UserError(
            "the calls of the schedule differ in the number of tensors or in their ranks, not in sizes alone"
        )
    sizes = {
        (index, dimension): [tensors[index].shape[dimension] for tensors in leaves]
        for index, leaf in enumerate(leaves[0])
        for dimension in range(leaf.ndim)
    }
    varying = {key: seen for key, seen in sizes.items() if len(set(seen)) > 1}
    if not varying:
        raise UserError("all calls of the schedule have the same shapes: nothing to choose between")
    return varying


def _prepare(calls: Sequence[Target], strategy: Strategy, sizes: Sizes) -> list[Target]:
    """The calls with the dimensions that change marked as dynamic, padded, or as they are."""
    if strategy == "mark_dynamic":
        for call in calls:
            for index, leaf in enumerate(call.tensors):
                for dimension in range(leaf.ndim):
                    # Sizes 0 and 1 are constants to the compiler: marked, they are an error.
                    if (index, dimension) in sizes and leaf.shape[dimension] > 1:
                        mark_dynamic(leaf, dimension)
        return list(calls)
    if strategy not in PADDED:
        return list(calls)
    return [_padded(call, strategy, sizes) for call in calls]


def _padded(call: Target, strategy: Strategy, sizes: Sizes) -> Target:
    """The call with its tensors padded as the strategy says: to the next power of two, or to the largest shape."""
    tensors = call.tensors
    first = {id(leaf): index for index, leaf in reversed([*enumerate(tensors)])}  # a leaf may occur twice

    def pad(leaf: Tensor) -> Tensor:
        index = first[id(leaf)]
        widths: list[int] = []
        for dimension in reversed(range(leaf.ndim)):  # F.pad starts with the last dimension
            size = leaf.shape[dimension]
            largest = max(sizes.get((index, dimension), [size]))
            wanted = min(1 << (size - 1).bit_length(), largest) if strategy == "buckets" else largest
            changes = (index, dimension) in sizes
            widths += [0, wanted - size if changes else 0]
        return F.pad(leaf, widths)

    return call.mapped(pad)


def _name(call: Target, leaf: int, dimension: int) -> str:
    """``args[0] dimension 1`` or ``kwargs['labels'] dimension 1``."""
    places = [place for place, _ in (*named_tensors(call.args, "args"), *named_tensors(dict(call.kwargs), "kwargs"))]
    return f"{places[leaf]} dimension {dimension}"

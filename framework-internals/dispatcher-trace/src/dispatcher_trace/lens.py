"""The main job: walk the cases, hold them against prediction, profiler and untraced run; time the tracer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchkit import Quantity, compare, measure
from benchkit.device import Device
from benchkit.report import ReportSpec
from benchkit.run import Lens, Run
from dispatcher_trace import figures, profile, render, story
from dispatcher_trace.cases import Case, cases
from dispatcher_trace.recorder import Recorder
from dispatcher_trace.records import Call
from dispatcher_trace.shim import Shims, installed
from dispatcher_trace.trace import Trace, record

_SMALL = 4  # elements of the vectors of the overhead measurement: nothing but dispatch


def build_lens(root: Path) -> Lens:
    """The lens, for ``scripts/run.py`` and the root scripts.

    Args:
        root: the package's folder.
    """
    spec = ReportSpec("dispatcher_trace", story.context, figures.figures, story.finding)
    return Lens("dispatcher-trace", root, configure, collect, spec)


def configure(device: Device, quick: bool) -> dict[str, Any]:
    """Sizes and seconds of a run."""
    return {"size": 64 if quick else 256, "seconds": 0.5 if quick else 3.0}


def collect(run: Run) -> None:
    """Measure everything and keep the records."""
    every = cases(run.configuration["size"], run.device)
    with run.working("The cases without shims"):
        untraced = {case: _untraced(case) for case in every}
        small = [torch.ones(_SMALL, device=run.device) for _ in range(2)]
        stock = measure(lambda: torch.add(*small), seconds=run.configuration["seconds"] / 3, clock="wall-clock")
    start = time.perf_counter()
    with run.working("Installing the shims"), installed("all") as shims:
        seconds = time.perf_counter() - start
        run.record("installation", values={"seconds": Quantity(seconds, "s"), "shims": Quantity(shims.count, "")})
        for case in every:
            with run.working(f"{case.expression}, {case.dtype}, {case.mode}"):
                _walk(run, shims, case, *untraced[case])
        with run.working("Overhead of the shims"):
            _overhead(run, shims, small, stock.quantity())
    with run.working("What notes on the dispatcher say"):
        _claims(run)
    if run.device == "cpu":
        run.absent(
            "The routine below the CPU kernel (vectorised loop, BLAS or oneDNN)",
            "the wheel's tables name the at::native function, and no public interface says what it calls",
        )


def _untraced(case: Case) -> tuple[list[torch.Tensor], list[str]]:
    """Results without shims, and the operators that the profiler saw, in order."""
    case.prepare()()  # the first call of an operator may set caches up
    evaluate = case.prepare()
    with profile.profiled() as profiled:
        results = evaluate()
    return results, profile.operator_names(profiled.events)


def _walk(run: Run, shims: Shims, case: Case, expected: list[torch.Tensor], operators: list[str]) -> None:
    evaluate = case.prepare()
    with record(shims, kernels=True) as walk:
        results = evaluate()
    assert walk.match is not None
    agreed, hops = walk.agreement
    ours = sorted(call.operator.partition(".")[0] for call in walk.all_calls)
    run.record(
        "walk",
        labels={"expression": case.expression, "dtype": case.dtype, "mode": case.mode},
        values={
            "hops": Quantity(len(walk.hops), ""),
            "positions": Quantity(hops, ""),
            "agreed": Quantity(agreed, ""),
            "calls": Quantity(walk.match.calls, ""),
            "profiled": Quantity(walk.match.operators, ""),
            "tied": Quantity(walk.match.tied, ""),
        },
        data={
            "bit_equal": len(results) == len(expected) and all(map(torch.equal, results, expected)),
            "same_operators": ours == sorted(operators),
            "lines": render.tree(walk.calls).splitlines(),
            "spine": [[hop.operator, hop.key] for hop in walk.calls[0].spine()],
            "hops": [row for call in walk.calls for row in _rows(call, 0)],
            "kernels": _kernels(walk),
            "notes": walk.notes,
        },
    )


def _rows(call: Call, depth: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for hop in call.hops:
        rows.append(
            {
                "number": hop.number,
                "depth": depth,
                "operator": hop.operator,
                "key": hop.key,
                "how": hop.how,
                "kind": hop.kind,
                "where": hop.where,
                "native": hop.native,
                "predicted": hop.predicted,
                "dtypes": sorted({tensor.dtype for tensor in hop.tensors}),
                "thread": hop.thread,
                "node": hop.node,
                "why": hop.why,
            }
        )
        rows += [row for inner in hop.calls for row in _rows(inner, depth + 1)]
    return rows


def _kernels(walk: Trace) -> list[dict[str, Any]]:
    return [
        {
            "operator": call.operator,
            "node": call.hops[0].node,
            "name": kernel.name,
            "grid": kernel.grid,
            "block": kernel.block,
            "registers": kernel.registers,
            "seconds": kernel.seconds,
        }
        for call in walk.all_calls
        for kernel in call.kernels
    ]


def _overhead(run: Run, shims: Shims, small: list[torch.Tensor], stock: Quantity) -> None:
    recorder = Recorder(shims.number_labels)

    def off() -> None:
        torch.add(*small)

    def on() -> None:
        shims.recorder = recorder
        torch.add(*small)
        shims.recorder = None
        recorder.top.clear()

    with record(shims, kernels=False) as walk:
        off()
    timed = compare({"off": off, "on": on}, seconds=run.configuration["seconds"], clock="wall-clock")
    run.record(
        "overhead",
        values={
            "hops": Quantity(len(walk.hops), ""),
            "untraced": stock,
            "off": timed["off"].quantity(),
            "on": timed["on"].quantity(),
        },
    )


def _claims(run: Run) -> None:
    """Two things that notes on the dispatcher tell readers to use, tried on this build."""
    name = "_dispatch_print_registrations"
    run.record("claim", {"claim": "torch._C._dispatch_print_registrations"}, data={"exists": hasattr(torch._C, name)})
    code = "import torch; torch.ones(2) + 1"
    environment = {**os.environ, "TORCH_SHOW_DISPATCH_TRACE": "1"}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    printed = [line for line in (child.stdout + child.stderr).splitlines() if "op=" in line]
    run.record("claim", {"claim": "TORCH_SHOW_DISPATCH_TRACE"}, data={"lines": len(printed)})

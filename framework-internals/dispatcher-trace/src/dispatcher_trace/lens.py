"""The main job: walk the cases and whole training steps, hold them against prediction, profiler and untraced run."""

from __future__ import annotations

import functools
import gzip
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchkit import Quantity, compare, measure
from benchkit.device import Device
from benchkit.report import ReportSpec
from benchkit.results import write_bytes_atomically, write_text_atomically
from benchkit.run import Lens, Run
from dispatcher_trace import agreement, cost, dispatcher, figures, fold, native_step, profile, render, story
from dispatcher_trace.cases import SHOWN, STEPPED, Case, cases
from dispatcher_trace.catalogue import CATALOGUE, Entry
from dispatcher_trace.programs import PROGRAMS
from dispatcher_trace.recorder import Recorder
from dispatcher_trace.records import Call
from dispatcher_trace.shim import Shims, installed
from dispatcher_trace.targets import load_function
from dispatcher_trace.trace import Trace, record
from native_build.toolchain import missing_cxx

_SMALL = 4  # elements of the vectors of the overhead measurement: nothing but dispatch
_STEPPED_SIZE = 32  # rows and columns where a kernel is single-stepped: every routine is reached, no loop takes long
# Each takes under a second: a loop over elements, a library's product, a reduction.
_STEPPED_QUICKLY = (("a + b", "f32"), ("a @ b", "f32"), ("torch.softmax(a, -1)", "f32"))
_CUSTOM_OPERATOR = ("scaled_relu(x, 2.0)", "f32", "requires_grad")

Made = Callable[[], list[torch.Tensor]]


def build_lens(root: Path) -> Lens:
    """The lens, for ``scripts/run.py`` and the root scripts.

    Args:
        root: the package's folder.
    """
    spec = ReportSpec("dispatcher_trace", story.context, figures.figures, story.finding)
    return Lens("dispatcher-trace", root, configure, functools.partial(collect, root=root), spec)


def configure(device: Device, quick: bool) -> dict[str, Any]:
    """Sizes and seconds of a run, of the catalogue every so many entries, and what is single-stepped."""
    return {
        "size": 64 if quick else 256,
        "seconds": 0.5 if quick else 3.0,
        "rounds": 5 if quick else 15,
        "catalogue_step": 6 if quick else 1,
        "stepped": [case for case in STEPPED if not quick or case in _STEPPED_QUICKLY],
    }


def collect(run: Run, root: Path) -> None:
    """Measure everything and keep the records."""
    no_compiler = missing_cxx()
    if no_compiler:
        run.absent("The compiled call", no_compiler)
    made = _made(run, root, compile=no_compiler is None)
    with run.working("Everything once without shims"):
        untraced = {name: _untraced(make) for name, make in made.items()}
    with run.working("Time a hop"):
        small = [torch.ones(_SMALL, device=run.device) for _ in range(2)]
        stock = measure(lambda: torch.add(*small), seconds=run.configuration["seconds"] / 3, clock="wall-clock")
        for description, figure in cost.hop_costs(run.configuration["rounds"]).items():
            run.record("hop_cost", {"what": description}, {"seconds": figure})
    with run.working("What torch itself refuses of the catalogue"):
        entries = CATALOGUE[:: run.configuration["catalogue_step"]]
        impossible = agreement.impossible(run.device, entries)
    tables = dispatcher.dumps()
    start = time.perf_counter()
    with run.working("Installing the shims"), installed("all") as shims:
        seconds = time.perf_counter() - start
        run.record("installation", values={"seconds": Quantity(seconds, "s"), "shims": Quantity(shims.count, "")})
        for name, make in made.items():
            with run.working(str(name)):
                _walk(run, shims, name, make, *untraced[name])
        with run.working("The catalogue under every mode"):
            _agreement(run, shims, entries, impossible)
        with run.working("Overhead of the shims"):
            _overhead(run, shims, small, stock.quantity())
    with run.working("What is left behind"):
        _restored(run, tables)
    with _dispatch_trace() as printed:  # starts torch in a process of its own while this one single-steps
        with run.working("Below the backend key"):
            _native_steps(run)
        with run.working("What published notes on the dispatcher say"):
            _claims(run, printed)


def _made(run: Run, root: Path, *, compile: bool) -> dict[Case | str, Callable[[], Made]]:
    """Everything that is walked: functions that make the inputs and return the call."""
    made: dict[Case | str, Callable[[], Made]] = {
        case: case.prepare for case in cases(run.configuration["size"], run.device, compile=compile)
    }
    made |= {name: functools.partial(make, run.device) for name, make in PROGRAMS.items()}
    step = load_function(f"{root / 'examples' / 'custom_op.py'}:step")

    def custom_operator() -> Made:
        def call() -> list[torch.Tensor]:
            with torch.device(run.device):
                result = step()
            result.sum().backward()
            return [result]

        return call

    return {**made, "custom operator": custom_operator}


def _untraced(make: Callable[[], Made]) -> tuple[list[torch.Tensor], profile.Profile]:
    """Results without shims, and what the profiler saw."""
    make()()  # the first call of an operator may set caches up, of a compiled function compiles
    evaluate = make()
    with profile.profiled() as profiled:
        results = evaluate()
    return results, profiled


def _walk(
    run: Run,
    shims: Shims,
    name: Case | str,
    make: Callable[[], Made],
    expected: list[torch.Tensor],
    profiled: profile.Profile,
) -> None:
    evaluate = make()
    with record(shims, kernels=True) as walk:
        results = evaluate()
    assert walk.match is not None
    agreed, positions = walk.agreement
    ours = Counter(call.operator.partition(".")[0] for call in walk.all_calls) + Counter(walk.unrecorded)
    counts = {"hops": len(walk.hops), "positions": positions, "agreed": agreed, "calls": walk.match.calls}
    counts |= {"profiled": walk.match.operators, "tied": walk.match.tied}
    theirs = Counter(profile.operator_names(profiled.events))
    facts = {
        "bit_equal": len(results) == len(expected) and all(map(torch.equal, results, expected)),
        "same_operators": ours == theirs,
        "only_untraced": dict(theirs - ours),
        "only_traced": dict(ours - theirs),
        "notes": walk.notes,
        "findings": [asdict(finding) for finding in walk.findings if finding.kind != "prediction"],
    }
    values = {key: Quantity(value, "") for key, value in counts.items()}
    if name in PROGRAMS:
        run.record("program", {"step": str(name)}, values, facts)
        if name == "GPT step":
            _folded_step(run, walk, profiled)
        return
    which = (name.expression, name.dtype, name.mode) if isinstance(name, Case) else _CUSTOM_OPERATOR
    labels = dict(zip(("expression", "dtype", "mode"), which, strict=True))
    run.record("walk", labels, values, {**facts, **_walk_data(walk, whole=which in SHOWN)})


def _walk_data(walk: Trace, *, whole: bool) -> dict[str, Any]:
    """What the report says of a walk; the tree and the reasons of those that are shown alone."""
    factories = ("aten::empty", "aten::linspace")
    forward = [call for call in walk.calls if not call.hops[0].node and not call.operator.startswith(factories)]
    main = max(forward, key=lambda call: sum(1 for _ in call.walk()))
    rows = [row for call in walk.calls for row in _rows(call, 0)]
    return {
        "lines": render.tree(walk.calls).splitlines() if whole else [],
        "spine": [[hop.operator, hop.key] for hop in main.spine()],
        "hops": rows if whole else [],
        "keys": [hop.key for hop in walk.hops],
        "autocast": {
            "included": any(key.startswith("Autocast") for hop in walk.hops for key in hop.included),
            "removed": any(key.startswith("Autocast") for key in walk.hops[0].removed),
        },
        "disagreements": [
            {name: row[name] for name in ("number", "operator", "key", "predicted")}
            for row in rows
            if row["predicted"] != row["key"]
        ],
        "threads": dict(Counter(hop.thread for hop in walk.hops)),
        "kernels": _kernels(walk),
    }


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
                "included": hop.included,
                "removed": hop.removed,
                "thread": hop.thread,
                "node": hop.node,
                "made_node": hop.made_node,
                "effects": hop.effects,
                "key_line": render.key_line(hop).strip(),
                "why": hop.why,
            }
        )
        rows += [row for inner in hop.calls for row in _rows(inner, depth + 1)]
    return rows


def _kernels(walk: Trace) -> list[dict[str, Any]]:
    return [
        {**asdict(kernel), "library": kernel.library, "operator": call.operator, "node": call.hops[0].node}
        for call in walk.all_calls
        for kernel in call.kernels
    ]


def _folded_step(run: Run, walk: Trace, profiled: profile.Profile) -> None:
    """The GPT step by line of code, its times, and the whole walk beside the report."""
    run.record("fold", data=[asdict(row) for row in fold.folded(walk.calls)])
    costs = cost.operator_costs(profiled, walk)
    run.record("operator_cost", data=[asdict(item) for item in costs if item.share >= cost.THRESHOLD])
    hops = walk.hops
    keys = list(dict.fromkeys(hop.key for hop in hops))
    columns = {
        "key": [keys.index(hop.key) for hop in hops],
        "start_us": [hop.start_ns // 1000 for hop in hops],
        "stop_us": [hop.stop_ns // 1000 for hop in hops],
        "backward": [int(bool(hop.node)) for hop in hops],
    }
    run.record("timeline", data={"keys": keys, **columns})
    page = walk.to_html("One training step of the GPT, every hop")
    write_text_atomically(run.recorder.directory / story.UNFOLDED, page)
    document = json.dumps(walk.to_perfetto(), separators=(",", ":")).encode()
    write_bytes_atomically(run.recorder.directory / story.PERFETTO, gzip.compress(document, mtime=0))


def _agreement(run: Run, shims: Shims, entries: tuple[Entry, ...], impossible: dict[tuple[str, str], str]) -> None:
    """The catalogue under every mode: how often the prediction holds, and each disagreement with its cause."""
    measured = list(agreement.measure(shims, run.device, impossible, entries))
    run.record("catalogue", data=[[entry.name, entry.family] for entry in entries])
    for mode in agreement.MODES:
        ours = [item for item in measured if item.mode == mode]
        wrong = [item for entry in ours for item in entry.disagreements]
        groups = Counter((item.operator, item.visited, item.predicted, item.cause) for item in wrong)
        run.record(
            "agreement",
            {"mode": mode, "functorch": mode in agreement.INSIDE_FUNCTORCH},
            {
                "entries": Quantity(len(ours), ""),
                "calls": Quantity(sum(item.calls for item in ours), ""),
                "agreed": Quantity(sum(item.calls for item in ours) - len(wrong), ""),
            },
            {
                "disagreements": [
                    {"operator": operator, "visited": visited, "predicted": predicted, "cause": cause, "calls": count}
                    for (operator, visited, predicted, cause), count in groups.items()
                ],
                "errors": [[item.entry, item.error] for item in ours if item.error],
                "refused": [name for refused_mode, name in impossible if refused_mode == mode],
            },
        )


def _restored(run: Run, before: dict[str, str]) -> None:
    """The tables after the installation, and after one whose traced code raised."""
    after = dispatcher.dumps()
    try:
        with installed("core") as shims, record(shims, kernels=False):
            torch.ones(2).select(0, 5)
    except IndexError:
        raised = dispatcher.dumps()
    run.record(
        "restored",
        values={"operators": Quantity(len(before), "")},
        data={"equal": after == before, "equal_after_exception": raised == before},
    )


def _native_steps(run: Run) -> None:
    """The routines below the CPU kernels of the plain cases."""
    if run.device != "cpu":
        run.absent(
            "Routines below a kernel by single-stepping", "they run on the device; the profiler names its kernels"
        )
        return
    if reason := native_step.unavailable():
        run.absent("The routine below the CPU kernel (vectorised loop, BLAS or oneDNN)", reason)
        return
    plain = [
        Case(expression, dtype, "plain", _STEPPED_SIZE, run.device)
        for expression, dtype in run.configuration["stepped"]
    ]
    with installed("core") as shims:
        for case in plain:
            evaluate = case.prepare()
            evaluate()
            with record(shims, kernels=False, native=True) as walk:
                evaluate()
            for hop in walk.hops:
                if hop.native_step is not None and hop.key == "CPU":
                    step = asdict(hop.native_step)
                    labels = {"expression": case.expression, "dtype": case.dtype, "operator": hop.operator}
                    run.record("native_step", labels, {"instructions": Quantity(step["instructions"], "")}, step)


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


@contextmanager
def _dispatch_trace() -> Iterator[Callable[[], str]]:
    """A child that adds with ``TORCH_SHOW_DISPATCH_TRACE`` set, and a function that waits for what it printed."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import torch; torch.ones(2) + 1"],
        env={**os.environ, "TORCH_SHOW_DISPATCH_TRACE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def printed() -> str:
        output, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"a process that adds two tensors ended with status {child.returncode}: {output}")
        return output

    with child:
        try:
            yield printed
        finally:
            child.kill()


def _claims(run: Run, printed: Callable[[], str]) -> None:
    """Two things that notes on the dispatcher tell readers to use, tried on this build.

    Args:
        run: where the records go.
        printed: what a child printed whose every dispatch was to be.
    """
    name = "_dispatch_print_registrations"
    run.record("claim", {"claim": "torch._C._dispatch_print_registrations"}, data={"exists": hasattr(torch._C, name)})
    lines = [line for line in printed().splitlines() if "op=" in line]
    run.record("claim", {"claim": "TORCH_SHOW_DISPATCH_TRACE"}, data={"lines": len(lines)})

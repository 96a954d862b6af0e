"""Compiles a function with Inductor, observes every launch, and returns a :class:`~jax_baseline.diff.programs.Program`.

The bytes of a launch are the sizes of the tensors that it receives and returns, each whole. The time of a launch is
measured by a clock around it on a CPU, and from the kernels of a profile on a GPU.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchkit import UserError
from jax_baseline.diff.inductor.labels import LABEL
from jax_baseline.diff.inductor.private import observe_inductor
from jax_baseline.diff.inductor.source import GeneratedKernel, HookedModule, Role, hook_launches
from jax_baseline.diff.programs import KernelLaunch, Program, Scopes, Tensor, short_location, sketch

# Elements of a tensor that are summed in float64 at a time: copies of all logits in float64 would take the most memory
# of a comparison.
_PART = 1 << 24
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
# Operations that only rename existing memory.
_VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice",
    "split", "split_with_sizes", "select", "alias", "detach", "getitem", "unbind", "as_strided", "_reshape_alias",
    "lift_fresh_copy",
})  # fmt: skip
_MOVES_DATA = _VIEWS | {
    "clone", "copy", "copy_", "cat", "_to_copy", "convert_element_type", "constant_pad_nd", "full", "zeros", "empty",
}  # fmt: skip
_MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_mm"})
_REDUCTIONS = frozenset({
    "sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "argmax", "argmin", "prod", "any", "all",
    "logsumexp", "norm", "cumsum",
})  # fmt: skip
_INDEXES = frozenset({
    "embedding", "embedding_dense_backward", "index", "index_put", "gather", "scatter", "scatter_add",
    "index_select", "_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index",
    "_unsafe_masked_index_put_accumulate",
})  # fmt: skip


@dataclass(frozen=True)
class _Node:
    """A node of the graph that Inductor lowered."""

    op: str
    label: Scopes
    elements: int
    location: str


@dataclass
class _Graph:
    """A generated module and the nodes that it was lowered from."""

    module: HookedModule
    nodes: Mapping[str, _Node]
    provenance: Mapping[str, list[str]]


@dataclass
class _Observation:
    """The memory traffic of one launch."""

    bytes_read: int
    writes: tuple[Tensor, ...]


@dataclass
class Hooks:
    """Receives what the generated code reports. A process has one, which the generated code imports by name."""

    mode: str = "off"  # what to record: ``off``, ``tensors``, ``clock`` (times) or ``profile`` (ranges of the profiler)
    observed_by_key: dict[str, _Observation] = field(default_factory=dict)  # memory traffic by launch
    # Times by launch, from the clock.
    seconds_by_key: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # Roles of the pointers of a generated kernel, by launch.
    roles_by_key: dict[str, tuple[Role, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what could not be interpreted

    def launch(self, key: str) -> Any:
        """Return a context manager for the launch."""
        if self.mode == "clock":
            return self._clock(key)
        return torch.profiler.record_function(f"launch {key}") if self.mode == "profile" else nullcontext()

    def observe(self, key: str, arguments: Sequence[Any], out: Any, result: Any) -> None:
        """Record what a launch read and wrote."""
        if self.mode != "tensors":
            return
        given = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        roles = self.roles_by_key.get(key)
        if roles is None:
            # An in-place operator returns nothing and writes its first argument.
            reads, writes = given, [*_tensors(out), *_tensors(result)] or given[:1]
        elif len(roles) == len(given):
            reads = [tensor for tensor, role in zip(given, roles, strict=True) if role != "write"]
            writes = [tensor for tensor, role in zip(given, roles, strict=True) if role != "read"]
        else:
            self.notes.append(f"{key} takes {len(given)} tensors where its source names {len(roles)} pointers")
            reads, writes = given, []
        self.observed_by_key[key] = _Observation(
            sum(one.numel() * one.element_size() for one in _distinct(reads)),
            tuple(_tensor(f"{key}[{index}]", one) for index, one in enumerate(_whole(writes))),
        )

    @contextmanager
    def _clock(self, key: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds_by_key[key].append(time.perf_counter() - start)


HOOKS = Hooks()


@dataclass
class _GraphCollector:
    """Collects the modules of one compilation, and adds hooks to their launches."""

    graphs: list[_Graph] = field(default_factory=list)  # the modules with their nodes, in the order of generation
    # Nodes of the graphs whose module is not generated yet, by name.
    nodes: dict[str, _Node] = field(default_factory=dict)

    def on_graph(self, graph: torch.fx.Graph) -> None:
        """Take the nodes of a graph that Inductor is about to lower."""
        self.nodes.update({node.name: _node(node) for node in graph.nodes if node.op == "call_function"})

    def rewrite(self, source: str, provenance: Mapping[str, list[str]]) -> str:
        """Return the source of a generated module with hooks."""
        number = len(self.graphs)
        module = hook_launches(source, graph=number, hooks=f"{__name__}:HOOKS")
        for handle, _ in module.launches:
            if kernel := module.kernels.get(handle.rsplit(":", 1)[0]):
                HOOKS.roles_by_key[f"{number}:{handle}"] = kernel.roles
        self.graphs.append(_Graph(module, self.nodes, provenance))
        self.nodes = {}
        return module.source


def compile_program(
    run: Callable[[], Sequence[torch.Tensor]],
    *,
    device: str,
    repeats: int,
    sketched: bool = False,
    prepare: Callable[[], object] = lambda: None,
) -> Program:
    """Compile the functions that ``run`` calls, and return them as one program.

    ``run`` calls functions wrapped in ``torch.compile`` and returns their results, gradients included. It is called
    several times, each time after ``prepare``, which is not timed, and must compute the same each time. 0 repeats time
    nothing.

    Raises:
        UserError: If Inductor compiled nothing.
        RuntimeError: If this version of torch has moved a private part.
    """

    def prepared_run() -> Sequence[torch.Tensor]:
        prepare()
        return run()

    prepare()
    graphs, compile_seconds = _compile(run, device)
    values = _observe_tensors(prepared_run, sketched)
    seconds = _time_launches(prepared_run, device, repeats) if repeats else {}
    wall = _time_whole(run, prepare, device, repeats) if repeats else None
    missed = [f"no launch was found for {handle}" for graph in graphs for handle in graph.module.missed]
    notes = tuple(dict.fromkeys((*HOOKS.notes, *missed)))
    return Program("Inductor", tuple(_launches(graphs, seconds)), wall, compile_seconds, values, notes)


def _compile(run: Callable[[], object], device: str) -> tuple[list[_Graph], float]:
    """Run once with empty caches, and return the generated modules and the seconds that it takes."""
    torch.compiler.reset()
    collector = _GraphCollector()
    start = time.perf_counter()
    with observe_inductor(collector.on_graph, collector.rewrite):
        run()
        _wait(device)
    seconds = time.perf_counter() - start
    if not collector.graphs:
        raise UserError("Inductor compiled nothing: the torch function must call operations of torch on its arguments")
    return collector.graphs, seconds


def kernel_seconds_from_trace(trace: Mapping[str, Any]) -> dict[str, list[float]]:
    """Read the times of the kernels in each ``launch KEY`` range from a Chrome trace of ``torch.profiler``.

    A kernel belongs to the range that contains the CUDA call with its correlation number. There is one entry for each
    time that the range was entered.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("launch "))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("launch ")
    )
    called = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    sums = [0.0] * len(ranges)
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = called.get(event.get("args", {}).get("correlation"))
        index = None if at is None else next((i for i, (a, b, _) in enumerate(ranges) if a <= at <= b), None)
        if index is not None:
            sums[index] += event["dur"] * 1e-6
    seconds_by_key: dict[str, list[float]] = defaultdict(list)
    for (_, _, key), total in zip(ranges, sums, strict=True):
        seconds_by_key[key].append(total)
    return dict(seconds_by_key)


def _observe_tensors(run: Callable[[], Sequence[torch.Tensor]], sketched: bool) -> tuple[Tensor, ...]:
    HOOKS.observed_by_key.clear()
    with patch.object(HOOKS, "mode", "tensors"):
        return values_of(run(), sketched)


def values_of(results: Sequence[torch.Tensor], sketched: bool) -> tuple[Tensor, ...]:
    """Reduce results to what a :class:`~jax_baseline.diff.programs.Program` keeps of them."""
    return tuple(_tensor(f"result {index}", value, sketched) for index, value in enumerate(results))


def _time_launches(run: Callable[[], Any], device: str, repeats: int) -> dict[str, float]:
    run()
    _wait(device)
    HOOKS.seconds_by_key.clear()
    with patch.object(HOOKS, "mode", "clock" if device == "cpu" else "profile"):
        if device == "cpu":
            for _ in range(repeats):
                run()
            samples_by_key: Mapping[str, list[float]] = HOOKS.seconds_by_key
        else:
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
                for _ in range(repeats):
                    run()
                _wait(device)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                samples_by_key = kernel_seconds_from_trace(json.loads(path.read_text()))
    return {key: statistics.median(samples) for key, samples in samples_by_key.items()}


def _time_whole(run: Callable[[], Any], prepare: Callable[[], object], device: str, repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        prepare()
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _launches(graphs: Sequence[_Graph], seconds: Mapping[str, float]) -> Iterator[KernelLaunch]:
    for number, graph in enumerate(graphs):
        for handle, statement in graph.module.launches:
            key = f"{number}:{handle}"
            if key in HOOKS.observed_by_key:
                yield _launch(graph, key, handle, statement, seconds.get(key))


def _launch(graph: _Graph, key: str, handle: str, statement: str, seconds: float | None) -> KernelLaunch:
    observed, name = HOOKS.observed_by_key[key], handle.rsplit(":", 1)[0]
    nodes = [graph.nodes[node] for node in graph.provenance.get(handle, []) if node in graph.nodes]
    kernel = graph.module.kernels.get(name)
    computing = [node for node in nodes if node.op not in _VIEWS] or nodes
    if kernel is None:
        # A library call does one operation. The other nodes prepare its arguments.
        computing = [node for node in computing if node.op in name] or computing
    ops = Counter(node.op for node in computing)
    weights: Counter[Scopes] = Counter()
    for node in computing:
        weights[node.label] += max(node.elements, 1)
    main = max(computing, key=lambda node: (node.op in _MATMULS, bool(node.label), node.elements), default=None)
    label: Scopes = ()
    if main is not None:
        label = main.label if main.op in _MATMULS else weights.most_common(1)[0][0]
    return KernelLaunch(
        name=key,
        kind=name if kernel is None else ("Triton kernel" if "triton" in name else "C++ kernel"),
        category=_category(name, ops, kernel),
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        phase=graph.module.phase,
        label=label,
        labels=tuple(scopes for scopes, _ in weights.most_common()),
        location=main.location if main else "",
        calls=1,
        bytes_read=observed.bytes_read,
        bytes_written=sum(tensor.bytes for tensor in observed.writes),
        flops=None,
        seconds=seconds,
        source=kernel.source if kernel else statement,
        writes=observed.writes,
    )


def _node(node: torch.fx.Node) -> _Node:
    target = getattr(node.target, "__name__", str(node.target))
    label = (node.meta.get("custom") or {}).get(LABEL, "")
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    user_frames = [frame for frame in frames if "site-packages" not in frame[0]]
    return _Node(
        op=target.split(".")[0],
        label=tuple(part for part in label.split("/") if part),
        elements=sum(tensor.numel() for tensor in _tensors(node.meta.get("val")) if isinstance(tensor.numel(), int)),
        location=short_location(*(user_frames or frames)[-1]) if frames else "",
    )


def _category(name: str, ops: Counter[str], kernel: GeneratedKernel | None) -> str:
    if "_c10d_functional" in name:
        return "collective"
    if kernel is None and "attention" in name:
        return "attention"
    if kernel is None and (ops.keys() & _MATMULS or name.rsplit(".", 1)[-1] in _MATMULS):
        return "matmul"
    if ops.keys() & _INDEXES:
        return "gather/scatter"
    if ops.keys() & _REDUCTIONS:
        return "reduction"
    if kernel is None:
        return "library call"
    return "data movement" if ops.keys() <= _MOVES_DATA else "element-wise"


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor for each piece of memory."""
    return list({(tensor.data_ptr(), tensor.numel(), tensor.dtype): tensor for tensor in tensors}.values())


def _whole(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Replace views that together fill their storage by one tensor, as for the halves of a concatenation."""
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in _distinct(tensors):
        groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    tensors_whole = []
    for group in groups.values():
        elements = group[0].untyped_storage().nbytes() // group[0].element_size()
        if len(group) > 1 and sum(tensor.numel() for tensor in group) == elements:
            tensors_whole.append(torch.as_strided(group[0], (elements,), (1,), 0))
        else:
            tensors_whole.extend(group)
    return tensors_whole


def _tensor(name: str, value: torch.Tensor, sketched: bool = False) -> Tensor:
    value = value.detach()
    return Tensor(
        name,
        str(value.dtype).removeprefix("torch."),
        tuple(value.shape),
        value.numel() * value.element_size(),
        _moments(value),
        sketch(value.to(torch.complex128 if value.is_complex() else torch.float64).cpu().numpy()) if sketched else None,
    )


def _moments(value: torch.Tensor) -> tuple[float, ...] | None:
    if value.numel() == 0 or value.is_complex():
        return None
    sums, largest, least = zip(*map(_sums, value.flatten().split(_PART)), strict=True)
    ends = torch.stack((torch.stack(largest).max(), torch.stack(least).min()))
    return (float(value.numel()), *torch.stack(sums).sum(0).tolist(), *ends.tolist())


def _sums(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = part.double()
    sums = torch.stack((wide.sum(), wide.abs().sum(), wide.square().sum(), wide.pow(3).sum()))
    return sums, wide.max(), wide.min()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

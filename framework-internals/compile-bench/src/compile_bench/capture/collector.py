"""Collects what torch.compile does. No other module uses private names of PyTorch's compiler.

A handler on the logger ``torch.__trace`` receives the entries that PyTorch writes for ``tlparse``. Torch 2.10 to 2.15
write the same entries. :func:`missing_surface` names what a later PyTorch has moved.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compile_bench.capture.frames import Frame, UserCodeFilter, frames_in, has_packages
from compile_bench.capture.parsing import CACHE_EVENT, Event, read_events
from compile_bench.capture.trace import CompileTrace

_TRACE_LOGGER = "torch.__trace"

# Breaks that skip a whole frame reach the trace only while the artifact log "graph_breaks" is on in these modules.
BREAK_LOGGERS = tuple(
    f"torch._dynamo.{module}.__graph_breaks" for module in ("symbolic_convert", "convert_frame", "exc")
)

_KEPT = frozenset(("dynamo_output_graph", "dynamo_cpp_guards_str", "compilation_metrics"))

# File names by their number in stacks. PyTorch writes each name only once in a process, so this is a global.
_FILES: dict[int, str] = {}

# The text of these artifacts is kept. Of the others (bytecode, graphs, generated code: megabytes), the name is enough.
_READ_ARTIFACTS = frozenset(("dynamo_graph_break_reason", "recompile_reasons"))

# AOTAutograd hashes the parts of its key one by one only while this logger is at level DEBUG.
_AUTOGRAD_CACHE = "torch._functorch._aot_autograd.autograd_cache"

# Inductor times the candidates for a kernel here.
_BENCHMARKING = "torch._inductor.runtime.benchmarking"

# Module and attribute of the private names that this file uses, except the loggers.
_SURFACE = (
    ("torch._logging", "trace_structured"),
    ("torch._inductor.metrics", "generated_kernel_count"),
    ("torch._inductor.cpu_vec_isa", "valid_vec_isa_list"),
    ("torch._inductor.cudagraph_utils", "__name__"),
    ("torch._dynamo", "mark_dynamic"),
    ("torch._dynamo.eval_frame", "_stance.stance"),
    ("torch._dynamo.symbolic_convert", "InstructionTranslatorBase.maybe_has_backedge"),
    ("torch._dynamo.guards", "profile_guard_manager"),
    ("torch._guards", "CompileContext.current_compile_id"),
    ("torch._subclasses", "FakeTensorMode"),
    ("torch._dynamo", "lookup_backend"),
    ("torch._inductor.config", "force_disable_caches"),
    ("torch._inductor.utils", "fresh_cache"),
    (_BENCHMARKING, "benchmarker.benchmark_gpu"),
    ("torch", "Tensor._backward_hooks"),
    ("torch", "Tensor._post_accumulate_grad_hooks"),
)


# Suffix of a reason that concerns a part of a graph only.
PARTIAL = " (a part of the graph)"

# The scheduler gives this reason for every operator if CUDA graphs are off.
_CUT_OFF = "when cudagraphs is disabled"


@contextmanager
def _handled(name: str, handler: logging.Handler, *, propagate: bool = False) -> Iterator[None]:
    """Give a logger another handler and the level DEBUG inside the block.

    pytest 9.2 and later also give theirs to a logger that does not propagate, and print the thousands of entries of the
    trace where a test fails. So its handlers are left out.
    """
    logger = logging.getLogger(name)
    before = logger.level, logger.propagate, list(logger.handlers)
    logger.setLevel(logging.DEBUG)
    logger.propagate = logger.propagate and propagate
    kept = [
        kept_handler for kept_handler in logger.handlers if not type(kept_handler).__module__.startswith("_pytest.")
    ]
    logger.handlers[:] = [*kept, handler]
    try:
        yield
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]
        logger.handlers[:] = before[2]


class Collector(logging.Handler):
    """Collects what torch.compile does inside a ``with`` block.

    Examples:
        >>> with Collector() as collector:
        ...     torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
        tensor([0.8415, 0.8415])
        >>> len(collector.trace().graphs)
        1
    """

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self.events: list[Event] = []
        self._seconds = 0.0
        self._errors: list[str] = []
        self._loggers = ExitStack()
        self._kernels_before = 0
        self._kernels = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one entry. :meth:`trace` reports an entry that cannot be read; this method does not raise."""
        start = time.perf_counter()
        try:
            self.events.extend(_events(getattr(record, "metadata", None) or {}, getattr(record, "payload", None)))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            self._errors.append(f"{type(error).__name__}: {error}")
        finally:
            self._seconds += time.perf_counter() - start

    @property
    def compilations(self) -> int:
        """Number of compilations that began until now."""
        return sum(event.kind == "dynamo_start" for event in self.events)

    def __enter__(self) -> Collector:
        self._loggers.enter_context(_handled(_TRACE_LOGGER, self, propagate=True))
        for name in BREAK_LOGGERS:
            self._loggers.enter_context(_handled(name, logging.NullHandler()))
        self._kernels_before = _generated_kernels()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kernels = _generated_kernels() - self._kernels_before
        self._loggers.close()

    def trace(
        self, user_code: UserCodeFilter | None = None, *, pauses: Sequence[tuple[float, float]] = ()
    ) -> CompileTrace:
        """The records, after the block has ended.

        ``pauses`` is when this process was stopped, see :func:`benchkit.processes.pauses`.
        """
        if self._errors:
            raise RuntimeError(
                f"{len(self._errors)} entries of torch's structured trace could not be read (torch "
                f"{torch.__version__}; first: {self._errors[0]}); compile_bench.capture needs an update for it"
            )
        return read_events(
            self.events,
            user_code=user_code or user_code_filter(),
            kernels=self._kernels,
            handler_seconds=self._seconds,
            pauses=pauses,
        )


def user_code_filter(*, launcher: bool = True, libraries: bool = True) -> UserCodeFilter:
    """The user-code filter for this interpreter.

    Without ``launcher`` this package's files count as user code. Without ``libraries`` installed packages do, as they
    do in PyTorch's messages.
    """
    paths = sysconfig.get_paths()
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [folder for folder in sys.path if folder and has_packages(Path(folder))]
    return UserCodeFilter(
        torch=str(Path(torch.__file__).parent),
        library=list(dict.fromkeys(installed)) if libraries else [],
        launcher=str(Path(__file__).parents[1]) if launcher else "",
        models=("zoo.py", "hugging_face.py"),
    )


def missing_surface() -> list[str]:
    """The private names that this module needs and that the installed torch does not have."""
    missing = []
    for module, attribute in _SURFACE:
        try:
            attrgetter(attribute)(importlib.import_module(module))
        except (ImportError, AttributeError):
            missing.append(f"{module}.{attribute}")
    return missing


def hooked(model: nn.Module) -> list[str]:
    """The parameters with hooks, which a copy of the model does not have."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]


def import_compiler() -> None:
    """Import Dynamo and Inductor, which ``import torch`` does not do."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor.compile_fx")


def prepare_toolchain(device: str) -> float:
    """Do the work of Inductor that does not depend on the model.

    On a CPU, Inductor compiles test programs to find out which vector instructions it can use. On a GPU, Triton builds
    and loads its driver stub. This happens once in a process, and takes longer with an empty cache folder. Returns the
    seconds that it took.
    """
    start = time.perf_counter()
    if device == "cpu":
        importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()
    else:
        importlib.import_module("triton.runtime.driver").driver.active.get_current_target()
    return time.perf_counter() - start


class CudaGraphSkips(logging.Handler):
    """Collects why Inductor did not use CUDA graphs for a graph or a part of it, inside a ``with`` block.

    If an operator cannot be captured, such as one on the CPU or a copy to it, Inductor splits the graph around the
    operator and captures the parts before and after it. Torch 2.10 reports such a partition in a performance hint.
    Later versions list the operators at level DEBUG: one record for an operator, then one for each line of its stack.
    """

    # Torch 2.10 uses the artifact log "perf_hints", later versions "cudagraphs".
    _LOGGERS = (
        "torch._inductor.cudagraph_utils.__cudagraphs",
        "torch._inductor.cudagraph_utils.__perf_hints",
        "torch._inductor.scheduler.__cudagraphs",
        "torch._inductor.utils.__perf_hints",
    )
    _SKIPPED = re.compile(
        r"(?:skipping cudagraphs due to )+(?P<reason>.+)", re.DOTALL
    )  # the prefix comes twice in a forwarded message
    _CUT = re.compile(r"cudagraph partition due to (?P<reason>.+)", re.DOTALL)
    _CUT_NODE = re.compile(r" {4}\S+: reason=(?P<reason>[^,]+), ir=")
    _STACK_LINE = " " * 9

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self.reasons: list[str] = []  # PyTorch's reasons, each once
        self.messages: list[str] = []  # the full message of each reason, with the lines of the model that PyTorch names
        # For each reason, the compilations that gave it; "" for one that was given when a graph ran.
        self.compile_ids: list[set[str]] = []
        self._in_stack = False
        self._loggers = ExitStack()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the reason of a message about a skip."""
        message = record.getMessage()
        if self._in_stack and message.startswith(self._STACK_LINE):
            self.messages[-1] += "\n" + message
            return
        self._in_stack = False
        if match := self._SKIPPED.search(message):
            self._keep(match["reason"], "")
        elif match := self._CUT.search(message):
            self._keep(match["reason"], PARTIAL)
        elif (match := self._CUT_NODE.match(message)) and _CUT_OFF not in match["reason"]:
            self._in_stack = self._keep(match["reason"], PARTIAL)

    def _keep(self, text: str, suffix: str) -> bool:
        """Keep a reason, the first line of a message, if it is new. Returns whether it is."""
        reason = re.sub(r"\.? *Found from.*", "", text.strip().split("\n")[0]).rstrip(". ") + suffix
        if reason in self.reasons:
            self.compile_ids[self.reasons.index(reason)].add(compile_id())
            return False
        self.reasons.append(reason)
        self.compile_ids.append({compile_id()})
        self.messages.append(text.strip())
        return True

    def __enter__(self) -> CudaGraphSkips:
        for name in self._LOGGERS:
            self._loggers.enter_context(_handled(name, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loggers.close()


def compiler_off() -> str:
    """What turns torch.compile off in this process, with the remedy; empty if nothing does."""
    dynamo = importlib.import_module("torch._dynamo")
    variables = [name for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE") if os.environ.get(name) == "1"]
    if variables:
        return f"{variables[0]} is set to 1; unset it"
    if dynamo.config.disable:
        return "torch._dynamo.config.disable is True; leave it False"
    if importlib.import_module("torch._dynamo.eval_frame")._stance.stance == "force_eager":
        return 'torch.compiler.set_stance("force_eager") is in effect; leave it at "default"'
    return ""


def backend_of(name: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function of the backend with this name; a function is its own."""
    return importlib.import_module("torch._dynamo").lookup_backend(name)


def without_data(inputs: Sequence[Any]) -> tuple[AbstractContextManager[object], list[Any]]:
    """A mode for tensors without data, and the inputs of a graph as tensors without data."""
    fake = importlib.import_module("torch._subclasses")
    for given in inputs:
        if isinstance(given, fake.FakeTensor):
            return given.fake_mode, list(inputs)
    mode = fake.FakeTensorMode(allow_non_fake_inputs=True)
    return mode, [mode.from_tensor(given) if isinstance(given, torch.Tensor) else given for given in inputs]


def compile_id() -> str:
    """The id of the current compilation, as in the records of a trace; empty outside a compilation."""
    identity = importlib.import_module("torch._guards").CompileContext.current_compile_id()
    return "" if identity is None else f"{identity.frame_id}/{identity.frame_compile_id}"


def settings(values: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Change settings of ``torch._dynamo.config`` inside a block."""
    return importlib.import_module("torch._dynamo").config.patch(dict(values)) if values else nullcontext()


def autotuning_within(guard: Callable[[], AbstractContextManager[object]]) -> AbstractContextManager[object]:
    """Have Inductor time each candidate for a GPU kernel inside ``guard()``.

    Each candidate first runs once outside the guard. This call may compile, load or autotune the kernel, which takes up
    to seconds on a CPU and is not timed. A candidate that fails does so in this call.
    """
    benchmarker = importlib.import_module(_BENCHMARKING).benchmarker
    timed = benchmarker.benchmark_gpu

    def guarded(candidate: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        candidate()
        torch.cuda.synchronize()
        with guard():
            return timed(candidate, *arguments, **options)

    # All of Inductor shares this instance. Its class differs between versions.
    return patch.object(benchmarker, "benchmark_gpu", guarded)


def all_key_parts() -> AbstractContextManager[None]:
    """Inside, the keys of AOTAutograd's cache have parts too. Hashing these takes time."""
    return _handled(_AUTOGRAD_CACHE, logging.NullHandler())


@contextmanager
def without_caches() -> Iterator[None]:
    """Ignore all caches of compiled code inside the block."""
    with importlib.import_module("torch._inductor.config").patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")  # it is disabled on purpose
        yield


def empty_caches() -> AbstractContextManager[object]:
    """Inside, the compiler's caches are empty. What it knows about the machine stays."""
    return importlib.import_module("torch._inductor.utils").fresh_cache()


def settings_restored(names: Sequence[str]) -> AbstractContextManager[object]:
    """Restore settings of ``torch._dynamo.config`` after a block."""
    config = importlib.import_module("torch._dynamo").config
    return config.patch({name: getattr(config, name) for name in names})


def resuming_in_loops() -> AbstractContextManager[object]:
    """Have Dynamo resume after a graph break in a loop, where by default it skips the whole frame.

    Each iteration that breaks needs a separate graph and resume function. Dynamo can compile them, but does not by
    default because there are so many.
    """
    translator = importlib.import_module("torch._dynamo.symbolic_convert").InstructionTranslatorBase
    return patch.object(translator, "maybe_has_backedge", lambda _: False)


def untimed_guards() -> AbstractContextManager[object]:
    """Inside, Dynamo does not time its guards: it would flush the CPU's caches for that, 20 ms in every compilation."""
    return patch.object(importlib.import_module("torch._dynamo.guards"), "profile_guard_manager", lambda *_: 0.0)


def mark_dynamic(tensor: torch.Tensor, dimension: int) -> None:
    """Make the size of a dimension a symbol from the first call on."""
    importlib.import_module("torch._dynamo").mark_dynamic(tensor, dimension)


def allocations(profile: Any) -> list[int]:
    """Bytes of each allocation (positive) and release (negative) on the CPU, in order."""
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def _generated_kernels() -> int:
    return int(importlib.import_module("torch._inductor.metrics").generated_kernel_count)


def _events(metadata: Mapping[str, Any], payload: object) -> list[Event]:
    text = payload if isinstance(payload, str) else ""
    compile_id = f"{metadata['frame_id']}/{metadata.get('frame_compile_id')}" if "frame_id" in metadata else ""
    events = []
    for key, value in metadata.items():
        if key == "chromium_event":
            events.append(Event(key, compile_id, json.loads(text)))
        elif key == "artifact":
            name = value["name"]
            is_read = name in _READ_ARTIFACTS or CACHE_EVENT.fullmatch(name) is not None
            events.append(Event(name, compile_id, value, text if is_read else ""))
        elif key == "str":
            _FILES[value[1]] = value[0]
        elif key == "dynamo_start":
            stack = [{**frame, "filename": _FILES.get(frame["filename"], "")} for frame in value["stack"]]
            events.append(Event(key, compile_id, {"stack": stack}))
        elif key in _KEPT:
            events.append(Event(key, compile_id, value, text))
    return events


class FailingOperatorBackend:
    """A backend of ``torch.compile`` that notes the line of the operator that another backend fails on.

    An error of AOTAutograd names no line, such as that of ``nonzero``, which the backward pass of ``x[mask] = value``
    needs. So the graph runs again, node by node, on tensors without data. The node that fails, or the node with the
    backward pass that fails, has the line.
    """

    def __init__(self, backend: str, user_code: UserCodeFilter) -> None:
        self._compile = backend_of(backend)
        self._user_code = user_code
        self.lines: dict[str, Frame] = {}  # line of the operator that failed, by compile id
        self.__name__ = backend  # Dynamo's messages show this name

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile a graph."""
        try:
            return self._compile(graph, inputs)
        except Exception:
            node = _failing_node(graph, inputs)
            line = self._user_code.innermost(frames_in(node.stack_trace or "")) if node is not None else None
            if line is not None:
                self.lines[compile_id()] = line
            raise


class _NodeTracker(fx.Interpreter):
    """Runs a graph and knows which node runs, in the forward pass and in the backward pass."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.node: fx.Node | None = None  # the node that runs, or the last one that ran
        self._known: list[torch.autograd.graph.Node] = []  # kept alive, because they are compared by identity

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        result = super().run_node(n)
        if n.op != "output":
            # An in-place operator gives earlier values a new grad_fn, so this looks at all values.
            values = pytree.tree_leaves([*self.env.values(), result])
            self._assign([value.grad_fn for value in values if isinstance(value, Tensor)], n)
        return result

    def _assign(self, waiting: list[torch.autograd.graph.Node | None], node: fx.Node) -> None:
        """Assign the new autograd nodes to the graph node that just ran."""
        while waiting:
            new = waiting.pop()
            if new is None or any(new is known for known in self._known):
                continue
            self._known.append(new)
            new.register_prehook(lambda gradients: setattr(self, "node", node))
            waiting += [function for function, _ in new.next_functions]


def _failing_node(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.Node | None:
    """The node at which a graph fails without data, forward or backward; None if the graph does not fail."""
    tracker = _NodeTracker(graph)
    mode, inputs = without_data(inputs)
    with mode, torch.enable_grad():
        try:
            outputs = [leaf for leaf in pytree.tree_leaves(tracker.run(*inputs)) if isinstance(leaf, Tensor)]
            outputs = [output for output in outputs if output.requires_grad]
            wanted = [given for given in inputs if isinstance(given, Tensor) and given.requires_grad]
            if outputs and wanted:
                torch.autograd.grad(outputs, wanted, [torch.ones_like(output) for output in outputs], allow_unused=True)
        except Exception:  # the backend's error, or the error that it leads to here
            return tracker.node
    return None

"""The one module over PyTorch's private surface: what torch.compile did, as it happens, without parsing logs.

A handler on the logger ``torch.__trace`` receives what PyTorch writes for ``tlparse``. The same entries come on torch
2.10 to 2.15; :func:`missing_surface` names what a later PyTorch has moved.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from compile_bench.capture.frames import UserCodeFilter
from compile_bench.capture.trace import CompileTrace, Event, read_events

_TRACE_LOGGER = "torch.__trace"

# Breaks that give up a whole frame reach the trace only while the artifact log "graph_breaks" is on in these modules.
BREAK_LOGGERS = tuple(
    f"torch._dynamo.{module}.__graph_breaks" for module in ("symbolic_convert", "convert_frame", "exc")
)

_KEPT = frozenset(("dynamo_output_graph", "dynamo_cpp_guards_str", "compilation_metrics"))

# Files by the number that stands for them in stacks. PyTorch tells each once a process, to whoever listens then.
_FILES: dict[int, str] = {}

# Artifacts whose text is read; of the others (bytecode, graphs, generated code: megabytes) the name is enough.
_READ_ARTIFACTS = frozenset(("dynamo_graph_break_reason", "recompile_reasons"))

# Where Inductor times what it chooses from.
_BENCHMARKING = "torch._inductor.runtime.benchmarking"

# module, attribute: what this file reaches for, apart from the loggers.
_SURFACE = (
    ("torch._logging", "trace_structured"),
    ("torch._inductor.metrics", "generated_kernel_count"),
    ("torch._inductor.cpu_vec_isa", "valid_vec_isa_list"),
    ("torch._inductor.compile_fx", "compile_fx"),
    ("torch._inductor.cudagraph_utils", "__name__"),
    ("torch._dynamo", "mark_dynamic"),
    ("torch._dynamo", "mark_static"),
    ("torch._dynamo.eval_frame", "skip_code"),
    ("torch._dynamo", "explain"),
    ("torch._guards", "CompileContext.current_compile_id"),
    ("torch._guards", "CompileContext.current_trace_id"),
    ("torch._subclasses", "FakeTensorMode"),
    ("torch._dynamo", "lookup_backend"),
    ("torch._dynamo.utils", "get_compilation_metrics"),
    ("torch._dynamo.utils", "CompilationMetrics.fail_type"),
    ("torch._inductor.config", "force_disable_caches"),
    (_BENCHMARKING, "benchmarker.benchmark_gpu"),
)


# Behind the reason why only a part of a graph, and not all of it, runs without CUDA graphs.
PARTIAL = " (a part of the graph)"

# What the scheduler says of every operator where CUDA graphs were not asked for.
_CUT_OFF = "when cudagraphs is disabled"


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
        self._saved: list[tuple[logging.Logger, int, bool, list[logging.Handler]]] = []
        self._kernels_before = 0
        self._kernels = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one entry; one that cannot be read is reported by :meth:`trace`, not raised into the user's code."""
        start = time.perf_counter()
        try:
            self.events.extend(_events(getattr(record, "metadata", None) or {}, getattr(record, "payload", None)))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            self._errors.append(f"{type(error).__name__}: {error}")
        finally:
            self._seconds += time.perf_counter() - start

    def __enter__(self) -> Collector:
        trace = logging.getLogger(_TRACE_LOGGER)
        for logger in (trace, *map(logging.getLogger, BREAK_LOGGERS)):
            self._saved.append((logger, logger.level, logger.propagate, list(logger.handlers)))
            logger.setLevel(logging.DEBUG)
            if logger is not trace:
                logger.propagate = False
                logger.handlers[:] = logger.handlers or [logging.NullHandler()]
        trace.addHandler(self)
        self._kernels_before = _generated_kernels()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kernels = _generated_kernels() - self._kernels_before
        for logger, level, propagate, handlers in self._saved:
            logger.setLevel(level)
            logger.propagate = propagate
            logger.handlers[:] = handlers
        self._saved.clear()

    def trace(
        self, user_code: UserCodeFilter | None = None, *, pauses: Sequence[tuple[float, float]] = ()
    ) -> CompileTrace:
        """What was seen, once the block has ended.

        Args:
            user_code: tells whose code a file is; by default :func:`folders`.
            pauses: when this process was stopped, see :func:`benchkit.processes.pauses`.

        Raises:
            RuntimeError: if entries came that this version cannot read: their format has changed.
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
    """Whose code a file is, in this interpreter.

    Args:
        launcher: whether this package is what calls the model; otherwise its files count as the user's.
        libraries: whether installed packages are told from the user's code, which PyTorch's own messages do not do.
    """
    paths = sysconfig.get_paths()
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # And wherever else pip has put packages: a user's own folder, a --target on PYTHONPATH.
    installed += [folder for folder in sys.path if folder and next(Path(folder).glob("*.dist-info"), None)]
    return UserCodeFilter(
        torch=str(Path(torch.__file__).parent),
        library=list(dict.fromkeys(installed)) if libraries else [],
        launcher=str(Path(__file__).parents[1]) if launcher else "",
        launched=("zoo.py", "hugging_face.py", "resnet.py"),
    )


def missing_surface() -> list[str]:
    """Names of PyTorch's private surface that this module needs and this torch does not have."""
    missing = []
    for module, attribute in _SURFACE:
        try:
            attrgetter(attribute)(importlib.import_module(module))
        except (ImportError, AttributeError):
            missing.append(f"{module}.{attribute}")
    return missing


def import_compiler() -> float:
    """Import Dynamo and Inductor, which ``import torch`` leaves out.

    Returns:
        Seconds.
    """
    start = time.perf_counter()
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor.compile_fx")
    return time.perf_counter() - start


def prepare_toolchain(device: str) -> float:
    """Do what Inductor does once a process, and more slowly once a cache folder, whatever the model is.

    On a CPU it finds out by test programs which vector instructions the compiler and the machine have; on a GPU Triton
    builds and loads its driver stub.

    Returns:
        Seconds.
    """
    start = time.perf_counter()
    if device == "cpu":
        importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()
    else:
        importlib.import_module("triton.runtime.driver").driver.active.get_current_target()
    return time.perf_counter() - start


class CudaGraphSkips(logging.Handler):
    """Collects, inside a ``with`` block, why Inductor did not use CUDA graphs, for a graph or for a part of it.

    A graph with an operator that cannot be captured (on the CPU, or a copy to it) is cut around that operator, and the
    parts before and behind are captured. Torch 2.10 calls that a partition in a performance hint; later ones list the
    parts at level DEBUG, an operator in one record and its stack, line by line, in records of their own.

    Attributes:
        reasons: each once, in PyTorch's words.
        messages: in full, with the lines of the model that PyTorch names; one a reason.
    """

    # The artifact log of a skip was "perf_hints" before it was "cudagraphs".
    _LOGGERS = (
        "torch._inductor.cudagraph_utils.__cudagraphs",
        "torch._inductor.cudagraph_utils.__perf_hints",
        "torch._inductor.scheduler.__cudagraphs",
        "torch._inductor.utils.__perf_hints",
    )
    _SKIPPED = re.compile(r"(?:skipping cudagraphs due to )+(?P<reason>.+)", re.DOTALL)  # twice, where handed on
    _CUT = re.compile(r"cudagraph partition due to (?P<reason>.+)", re.DOTALL)
    _CUT_NODE = re.compile(r" {4}\S+: reason=(?P<reason>[^,]+), ir=")
    _STACK_LINE = " " * 9

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self.reasons: list[str] = []
        self.messages: list[str] = []
        self._in_stack = False
        self._saved: list[tuple[logging.Logger, int, bool]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the reason of a message about a skip."""
        message = record.getMessage()
        if self._in_stack and message.startswith(self._STACK_LINE):
            self.messages[-1] += "\n" + message
            return
        self._in_stack = False
        if found := self._SKIPPED.search(message):
            self._keep(found["reason"], "")
        elif found := self._CUT.search(message):
            self._keep(found["reason"], PARTIAL)
        elif (found := self._CUT_NODE.match(message)) and _CUT_OFF not in found["reason"]:
            self._in_stack = self._keep(found["reason"], PARTIAL)

    def _keep(self, text: str, suffix: str) -> bool:
        """Whether the reason is new; its first line is the reason, the rest says where."""
        reason = re.sub(r"\.? *Found from.*", "", text.strip().split("\n")[0]).rstrip(". ") + suffix
        if reason in self.reasons:
            return False
        self.reasons.append(reason)
        self.messages.append(text.strip())
        return True

    def __enter__(self) -> CudaGraphSkips:
        for logger in map(logging.getLogger, self._LOGGERS):
            self._saved.append((logger, logger.level, logger.propagate))
            logger.setLevel(logging.DEBUG)
            logger.propagate = False
            logger.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for logger, level, propagate in self._saved:
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate


def inductor(module: Any, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph of Dynamo's with Inductor, as ``torch.compile`` does by default."""
    return importlib.import_module("torch._inductor.compile_fx").compile_fx(module, inputs)


def backend_of(name: str) -> Callable[..., Any]:
    """The function behind a backend's name."""
    return importlib.import_module("torch._dynamo").lookup_backend(name)


def without_data(inputs: Sequence[Any]) -> tuple[AbstractContextManager[object], list[Any]]:
    """A mode of tensors that have no data, and the inputs of a graph as such tensors."""
    fake = importlib.import_module("torch._subclasses")
    for each in inputs:
        if isinstance(each, fake.FakeTensor):
            return each.fake_mode, list(inputs)
    mode = fake.FakeTensorMode(allow_non_fake_inputs=True)
    return mode, [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in inputs]


def compile_id() -> str:
    """Number of the compilation that is going on, as in a trace's records; empty outside of one."""
    identity = importlib.import_module("torch._guards").CompileContext.current_compile_id()
    return "" if identity is None else f"{identity.frame_id}/{identity.frame_compile_id}"


@dataclass(frozen=True)
class Tracing:
    """Where Dynamo is.

    Attributes:
        compile_id: as of :func:`compile_id`.
        attempt: how often it began anew with that function.
    """

    compile_id: str
    attempt: int


def tracing() -> Tracing:
    """Where Dynamo is at this moment."""
    trace = importlib.import_module("torch._guards").CompileContext.current_trace_id()
    return Tracing(compile_id(), 0 if trace is None else trace.attempt)


def was_skipped(compile_id: str) -> bool:
    """Whether a compilation that is over came to nothing, so that its function runs as it was written."""
    metrics = importlib.import_module("torch._dynamo.utils").get_compilation_metrics()
    latest = next((each for each in reversed(metrics) if each.compile_id == compile_id), None)
    return latest is not None and latest.fail_type is not None


def settings(values: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Settings of ``torch._dynamo.config``, inside a block."""
    return importlib.import_module("torch._dynamo").config.patch(dict(values)) if values else nullcontext()


@contextmanager
def autotuning_within(guard: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Whatever Inductor times on a GPU inside the block, to choose a kernel, it times in a ``guard()`` of its own.

    A candidate's first call is made before that: it may compile, load or autotune what it runs, which takes up to
    seconds of a CPU and is not timed. Candidates that fail do so there.
    """
    benchmarker = importlib.import_module(_BENCHMARKING).benchmarker
    timed = benchmarker.benchmark_gpu

    def guarded(candidate: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        candidate()
        torch.cuda.synchronize()
        with guard():
            return timed(candidate, *arguments, **options)

    # On the one instance that everything in Inductor shares, whatever its class is in this version.
    benchmarker.benchmark_gpu = guarded
    try:
        yield
    finally:
        del benchmarker.benchmark_gpu


@contextmanager
def without_caches() -> Iterator[None]:
    """Everything compiled inside is compiled anew, whatever the caches hold."""
    with importlib.import_module("torch._inductor.config").patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")  # which is what was asked for
        yield


def settings_restored(names: Sequence[str]) -> AbstractContextManager[object]:
    """Whatever becomes of settings of ``torch._dynamo.config`` inside a block, afterwards they are as before."""
    config = importlib.import_module("torch._dynamo").config
    return config.patch({name: getattr(config, name) for name in names})


def mark_dynamic(tensor: torch.Tensor, dimension: int) -> None:
    """Tell Dynamo that a dimension will change, so that its size is symbolic from the first call."""
    importlib.import_module("torch._dynamo").mark_dynamic(tensor, dimension)


def mark_static(tensor: torch.Tensor) -> None:
    """Tell Dynamo that no size of a tensor is to be symbolic, whatever sizes come where it is made."""
    importlib.import_module("torch._dynamo").mark_static(tensor)


def never_begin_at(function: Callable[..., Any]) -> None:
    """Have Dynamo trace a function only where it follows into it, never by itself."""
    importlib.import_module("torch._dynamo.eval_frame").skip_code(function.__code__)


def allocations(profile: Any) -> list[int]:
    """Bytes of every allocation (above 0) and release (below 0) on the CPU in a profile with memory, in turn.

    Args:
        profile: a ``torch.profiler.profile(profile_memory=True)`` after its block.
    """
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
            events.append(Event(name, compile_id, value, text if name in _READ_ARTIFACTS else ""))
        elif key == "str":
            _FILES[value[1]] = value[0]
        elif key == "dynamo_start":
            stack = [{**frame, "filename": _FILES.get(frame["filename"], "")} for frame in value["stack"]]
            events.append(Event(key, compile_id, {"stack": stack}))
        elif key in _KEPT:
            events.append(Event(key, compile_id, value, text))
    return events

"""What triage finds in a model, prices and mends: typed results. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchkit.results import Quantity
from compile_bench.frames import Frame
from compile_bench.results import Case
from compile_bench.trace import Break, CompileTrace, Recompile

Kind = Literal[
    "graph break",
    "function given up",
    "recompile limit",
    "silent eager",
    "method not compiled",
    "CUDA graph lost",
    "compile error",
]

# What a break keeps when lines above it move: file, function and the line's text.
Mark = tuple[str, int]


@dataclass(frozen=True)
class Survey:
    """What one process saw of a target, training or inference, over several seeds.

    Attributes:
        case: what was traced.
        breaks: merged over the seeds.
        seeds: for every break the seeds that met it.
        eager: functions that computed outside any graph without Dynamo saying why, as findings.
        trace: of the first seed.
        recompiles: one for every place and guard.
        calls: steps a seed.
        failures: what a seed raised, one line each; its breaks up to then are kept.
        collect_seconds: time spent in the collector.
        trace_seconds: time of all first calls, that included.
        user_files: those of the breaks' files that are the user's.
        notes: lines that nothing could be seen behind, and why.
        hidden: breaks that were only seen behind functions that Dynamo gave up.
    """

    case: Case
    breaks: tuple[Break, ...]
    seeds: tuple[tuple[int, ...], ...]
    eager: tuple[SilentEager, ...]
    trace: CompileTrace
    recompiles: tuple[Recompile, ...]
    calls: int
    failures: tuple[str, ...]
    collect_seconds: float
    trace_seconds: float
    user_files: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    hidden: frozenset[Mark] = frozenset()


@dataclass(frozen=True)
class SilentEager:
    """A function that runs eagerly and about which Dynamo logs nothing.

    Attributes:
        kind: why.
        frame: the function's first line, or for a method the line that calls it.
        function: its name.
        reason: in one sentence.
    """

    kind: Kind
    frame: Frame
    function: str
    reason: str


@dataclass(frozen=True)
class Price:
    """What a break costs.

    Attributes:
        gap: Python between the graph before the break and the next one, per step; None where there is none to measure.
        share: how many breaks lie in that gap together.
        crossing: bytes of the tensors that the graph before hands over to Python.
        compile_seconds: of the functions that exist because the graph was split here.
        no_gap: why there is no gap, as a clause; empty where there is one.
    """

    gap: Quantity | None
    share: int
    crossing: int
    compile_seconds: float
    no_gap: str = ""


@dataclass(frozen=True)
class Figures:
    """A model before or after a patch, with Inductor.

    Attributes:
        graphs: captured.
        breaks: places.
        step: seconds a step; None where it was not measured.
        compile_seconds: of the first steps; likewise.
    """

    graphs: int
    breaks: int
    step: Quantity | None = None
    compile_seconds: float | None = None


@dataclass(frozen=True)
class Mend:
    """A change of the source that was tried.

    Attributes:
        case: of the catalogue.
        title: what the change does.
        effect: what is different for the user afterwards; empty if nothing is.
        patch: unified diff; empty if it was not accepted.
        files: what it changes.
        accepted: whether the breaks fell and outputs and gradients matched.
        verdict: why (not), in one sentence.
        before: with Inductor.
        after: likewise.
        apart: why it is not among those that hold together, although it is accepted; empty if it is.
    """

    case: str
    title: str
    effect: str
    patch: str
    files: tuple[str, ...]
    accepted: bool
    verdict: str
    before: Figures | None = None
    after: Figures | None = None
    apart: str = ""


@dataclass(frozen=True)
class Priced:
    """Prices by place (file and line), the whole model's figures, and functions given up at the recompile limit."""

    prices: dict[tuple[str, int], Price]
    figures: Figures
    limits: tuple[Break, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """Changes that may mend one break.

    Attributes:
        overlays: changed sources, the least invasive change first: from paths to contents.
        allowed: the breaks that may be left.
    """

    overlays: tuple[Mapping[str, bytes], ...]
    allowed: frozenset[Mark]


@dataclass(frozen=True)
class Refusal:
    """Why a changed model does not compute what the unchanged one does.

    Attributes:
        why: in one sentence.
        off: whether a value is outside its bound and nothing else is wrong: the compiler's rounding can do that alone.
    """

    why: str
    off: bool = False


@dataclass(frozen=True)
class Trial:
    """What came of a change.

    Attributes:
        verdict: empty if it is accepted; else why not, in one sentence.
        left: the breaks that are left, over training and inference.
        gives_up: whether functions are still given up, behind which breaks may be hidden.
        graphs: captured in the first kind of step.
        unseen: whether it is refused only since a function that is given up hides what came of it.
        off: see :class:`Refusal`.
    """

    verdict: str
    left: frozenset[Mark] = frozenset()
    gives_up: bool = False
    graphs: int = 0
    unseen: bool = False
    off: bool = False


def mark(found: Break) -> Mark:
    """How a break is recognised in a changed file: by its file, and its line in the unchanged one."""
    return found.file, found.line


@dataclass(frozen=True)
class Finding:
    """One thing that keeps a line out of a graph.

    Attributes:
        kind: what kind of thing.
        file: of the user's code.
        line: in it.
        end_line: last line of the statement that ``line`` is in.
        function: that the line is in.
        source: the line's text.
        category: family of reasons.
        reason: in PyTorch's words.
        explanation: the sentence behind it.
        advice: what to do, from the catalogue or PyTorch's first hint.
        case: of the catalogue, if one matches.
        kinds: ``"training"``, ``"inference"`` or both.
        seeds: that met it.
        times: how often it was met.
        library: the library's line that the user's line led to.
        user_file: whether ``file`` is the user's, so that it can be changed.
        price: None where it was not measured.
        mend: None where nothing was tried.
    """

    kind: Kind
    file: str
    line: int
    end_line: int
    function: str
    source: str
    category: str
    reason: str
    explanation: str
    advice: str
    case: str
    kinds: tuple[str, ...]
    seeds: tuple[int, ...]
    times: int
    library: str = ""
    user_file: bool = True
    price: Price | None = None
    mend: Mend | None = None

    @property
    def place(self) -> str:
        """``file.py:LINE``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Bill:
    """Everything triage says about a target.

    Attributes:
        target: its name.
        findings: dearest first.
        recompiles: one for every place and guard.
        surveys: what the tracing processes saw.
        together: the accepted patches that hold together as one, with figures before and after; None without any.
        absent: what could not be done, one line each.
    """

    target: str
    findings: tuple[Finding, ...]
    recompiles: tuple[Recompile, ...]
    surveys: tuple[Survey, ...]
    together: Mend | None = None
    absent: tuple[str, ...] = ()

    @property
    def raised(self) -> tuple[str, ...]:
        """A sentence for every error with which tracing ended, and which the model by itself does not raise."""
        return tuple(
            f"{survey.case.kind} raises where it is compiled, which ended its tracing: {failure}"
            for survey in self.surveys
            for failure in survey.failures
        )

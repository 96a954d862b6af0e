"""Fixes and the results of trying them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchkit.results import Quantity
from benchkit.typed_records import TypedRecord
from compile_bench.capture.trace import Break
from compile_bench.measure.records import Place, Steady


@dataclass(frozen=True)
class Figures:
    """A model before or after a fix, compiled with Inductor."""

    graphs: int  # number of captured graphs
    breaks: int  # number of places that break
    step: Quantity | None = None  # time of a step; None where it was not measured
    compile_seconds: float | None = None  # time of the first steps; None where it was not measured
    # Lines (file.py:LINE) whose guards failed up to the recompile limit, so that their function runs eagerly in the
    # steps that were timed.
    still_eager: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimedSteps:
    """Steps of the unchanged and of the changed model, timed in alternation."""

    # The steps: "eager" is the unchanged model, "compiled" the changed one; the control is the unchanged model against
    # itself.
    steady: Steady
    first_before: float  # seconds of the first steps of the unchanged model, with empty caches
    first_after: float  # the same of the changed model
    eager_before: tuple[str, ...]  # lines that keep the unchanged model eager, see :class:`Figures`
    eager_after: tuple[str, ...]  # the same of the changed model


@dataclass(frozen=True)
class Fix(TypedRecord, name="combined fix", labels=("target",)):
    """A change of the source that was tried, for one break or for several at once.

    Only the combined fix of a target is a record of its own; others are part of their findings.
    """

    title: str  # what the change does
    verdict: str = ""  # why it is verified or refused, in one sentence
    accepted: bool = False  # whether it is verified: the break is gone, and outputs and gradients match
    effect: str = ""  # what else changes for the user; empty if nothing does
    conflict: str = ""  # why the combined fix leaves this verified fix out; empty if it does not
    patch: str = ""  # unified diff; empty unless the fix is verified
    before: Figures | None = None  # the unchanged model
    after: Figures | None = None  # the changed model
    cases: str = ""  # names of the catalogue's entries
    speedup: Quantity | None = None  # step before over step after; None where it was not measured
    control: Quantity | None = None  # the step before over itself, in the same rounds
    pressure: float | None = None  # percent of the time in which some task waited for a CPU core
    target: str = ""  # of the combined fix


@dataclass(frozen=True)
class Proposal:
    """Changes that may fix one break, or several breaks at once."""

    overlays: tuple[Mapping[str, bytes], ...]  # changed sources by path, the least invasive change first
    places: frozenset[Place]  # the breaks that a change has to remove
    allowed: frozenset[Place]  # the breaks that may remain
    # Functions (file and name) of the unchanged model in which breaks may be hidden.
    untraced: frozenset[tuple[str, str]] = frozenset()
    # The kinds of step (whether training) in which the lines break, and in which results are compared. In the first one
    # the breaks are looked for, before the proof looks at all.
    kinds: tuple[bool, ...] = (False,)
    compiled: tuple[bool, ...] = (False,)  # those of them that run all lines, in which the proof compiles with Inductor


@dataclass(frozen=True)
class Tried:
    """A message of a trial: what became of a candidate."""

    place: Place  # the break
    index: int  # position among the candidates for this break
    verdict: str  # why it is refused; empty if it is accepted


@dataclass(frozen=True)
class Refusal:
    """Why a changed model does not compute what the unchanged model does."""

    why: str  # the reason in one sentence
    # Whether a value is outside its bound and nothing else is wrong. The compiler's rounding alone can cause this.
    out_of_bound: bool = False


@dataclass(frozen=True)
class Trial:
    """The result of trying a change."""

    verdict: str  # why the change is refused, in one sentence; empty if it is accepted
    remaining: frozenset[Place] = frozenset()  # the breaks that remain, over training and inference
    revealed: tuple[Break, ...] = ()  # breaks that the skipped frame hid and that the change brought to light
    skips_frames: bool = False  # whether Dynamo still skips frames, which may hide breaks
    graphs: int = 0  # number of graphs in the first kind of step
    unseen: bool = False  # whether the change is refused only because a skipped frame hides its result
    out_of_bound: bool = False  # see :class:`Refusal`
    timed: TimedSteps | None = None  # steps before and after; None where they were not timed

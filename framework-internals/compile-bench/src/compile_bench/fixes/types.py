"""Fixes and the results of trying them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchkit.results import Quantity
from benchkit.typed_records import TypedRecord
from compile_bench.capture.trace import Break
from compile_bench.measure.measurements import Steady
from compile_bench.measure.survey.types import Place


@dataclass(frozen=True)
class Figures:
    """A model before or after a fix, compiled with Inductor.

    Attributes:
        graphs: Number of captured graphs.
        breaks: Number of places that break.
        step: Time of a step; None where it was not measured.
        compile_seconds: Time of the first steps; None where it was not measured.
        still_eager: Lines (``file.py:LINE``) whose guards failed up to the recompile limit, so that their function runs
            eagerly in the steps that were timed.
    """

    graphs: int
    breaks: int
    step: Quantity | None = None
    compile_seconds: float | None = None
    still_eager: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimedSteps:
    """Steps of the unchanged and of the changed model, timed in alternation.

    Attributes:
        steady: The steps: "eager" is the unchanged model, "compiled" the changed one; the control is the unchanged
            model against itself.
        first_before: Seconds of the first steps of the unchanged model, with empty caches.
        first_after: The same of the changed model.
        eager_before: Lines that keep the unchanged model eager, see :class:`Figures`.
        eager_after: The same of the changed model.
    """

    steady: Steady
    first_before: float
    first_after: float
    eager_before: tuple[str, ...]
    eager_after: tuple[str, ...]


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
    """Changes that may fix one break, or several breaks at once.

    Attributes:
        overlays: Changed sources by path, the least invasive change first.
        places: The breaks that a change has to remove.
        allowed: The breaks that may remain.
        untraced: Functions (file and name) of the unchanged model in which breaks may be hidden.
        train: Whether the breaks are looked for in training or in inference, before the proof looks at both.
    """

    overlays: tuple[Mapping[str, bytes], ...]
    places: frozenset[Place]
    allowed: frozenset[Place]
    untraced: frozenset[tuple[str, str]] = frozenset()
    train: bool = False


@dataclass(frozen=True)
class Tried:
    """A message of a trial: what became of a candidate.

    Attributes:
        place: The break.
        index: Position among the candidates for this break.
        verdict: Why it is refused; empty if it is accepted.
    """

    place: Place
    index: int
    verdict: str


@dataclass(frozen=True)
class Refusal:
    """Why a changed model does not compute what the unchanged model does.

    Attributes:
        why: The reason in one sentence.
        out_of_bound: Whether a value is outside its bound and nothing else is wrong. The compiler's rounding alone can
            cause this.
    """

    why: str
    out_of_bound: bool = False


@dataclass(frozen=True)
class Trial:
    """The result of trying a change.

    Attributes:
        verdict: Why the change is refused, in one sentence; empty if it is accepted.
        remaining: The breaks that remain, over training and inference.
        revealed: Breaks that the skipped frame hid and that the change brought to light.
        skips_frames: Whether Dynamo still skips frames, which may hide breaks.
        graphs: Number of graphs in the first kind of step.
        unseen: Whether the change is refused only because a skipped frame hides its result.
        out_of_bound: See :class:`Refusal`.
        timed: Steps before and after; None where they were not timed.
    """

    verdict: str
    remaining: frozenset[Place] = frozenset()
    revealed: tuple[Break, ...] = ()
    skips_frames: bool = False
    graphs: int = 0
    unseen: bool = False
    out_of_bound: bool = False
    timed: TimedSteps | None = None

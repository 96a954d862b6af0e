"""Fixes and what came of trying them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchkit.results import Quantity
from compile_bench.measure.survey_types import Mark


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
class Fix:
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
    skips_frames: bool = False
    graphs: int = 0
    unseen: bool = False
    off: bool = False
